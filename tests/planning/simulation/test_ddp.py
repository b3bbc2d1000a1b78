"""The formula for DDP beside every measured row of DDP over Gloo."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from gradlane.lab.calibration.prediction import predicted_ddp_step_s
from gradlane.lab.runs.rows import Row, read_rows
from gradlane.planning.simulation.ddp import buckets_of, ddp_step_s
from gradlane.planning.simulation.grid import GOODPUT_SHARE, evaluate
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, synthetic_profile
from gradlane.planning.simulation.scenarios import DDP, Cluster
from tests.paths import ROOT

MB = 1 << 20
FITTED = "resnet50"


def rows() -> list[Row]:
    content = read_rows(ROOT / "docs" / "predictions.json")
    return [row for row in content if row.strategy.startswith("ddp-gloo:")]


def error(row: Row) -> float:
    return predicted_ddp_step_s(row) / row.step_s_median - 1.0


def test_rows_that_were_not_fitted_are_predicted() -> None:
    errors = [abs(error(row)) for row in rows() if row.workload != FITTED]
    assert len(errors) >= 18
    assert statistics.median(errors) < 0.03
    assert max(errors) < 0.08


def test_the_fitted_rows_are_predicted() -> None:
    errors = [abs(error(row)) for row in rows() if row.workload == FITTED]
    assert len(errors) == 5 and max(errors) < 0.02


@pytest.mark.parametrize(
    ("workers", "compute_s", "measured_s"),
    [(2, 0.0447, (0.1124, 0.1159)), (4, 0.0806, (0.1759, 0.1697))],
)
def test_steps_on_an_h200_are_predicted(
    workers: int, compute_s: float, measured_s: tuple[float, float]
) -> None:
    """Over Gloo and NCCL, `docs/research/cuda.md`; buckets as torch makes them."""
    step_s = ddp_step_s(
        synthetic_profile("resnet50", compute_s),
        workers=workers,
        goodput_bps=10e9 * GOODPUT_SHARE,
        buckets_mb=[None],
    )
    for one in measured_s:
        assert step_s == pytest.approx(one, rel=0.05)


def tensors(*sizes: int) -> Profile:
    """Return a profile whose first tensor is ready last, as in backward."""
    count = len(sizes)
    return Profile(
        "sizes",
        1,
        1.0,
        2.0,
        tuple(
            ProfileTensor(f"t{index}", (size,), "f32", index / count, 2.0 - index / count)
            for index, size in enumerate(sizes)
        ),
    )


def test_buckets_fill_in_the_order_of_backward() -> None:
    profile = tensors(*[MB // 4] * 30)
    sizes = [size // MB for _, size in buckets_of(profile, None)]
    assert sizes == [1, 25, 4], "torch's first bucket holds 1 MB, the others 25"
    assert [size // MB for _, size in buckets_of(profile, 8.0)] == [8, 8, 8, 6]
    ready_s = [ready for ready, _ in buckets_of(profile, 8.0)]
    assert ready_s == sorted(ready_s) and ready_s[-1] == 2.0


def test_a_step_is_the_last_bucket_or_the_compute() -> None:
    profile = tensors(MB // 4, MB // 4)
    slow: dict[str, Any] = {"workers": 2, "goodput_bps": 8.0 * MB, "free_host": True}
    slow["buckets_mb"] = [1.0]
    # The first megabyte is ready at 1.5 s and takes a second, the second one follows.
    assert ddp_step_s(profile, **slow) == pytest.approx(3.5)
    assert ddp_step_s(profile, **{**slow, "latency_s": 0.25}) == pytest.approx(4.5)
    assert ddp_step_s(profile, **{**slow, "compression": 2.0}) == pytest.approx(2.5)
    assert ddp_step_s(profile, **{**slow, "goodput_bps": 1e15}) == pytest.approx(2.0)
    assert ddp_step_s(profile, **{**slow, "workers": 1}) == 2.0


def test_rows_of_ddp_stand_beside_those_of_the_engine() -> None:
    profile = synthetic_profile("resnet50")
    ddp, p3 = evaluate(profile, [Cluster(4, 4e9, DDP), Cluster(4, 4e9, "p3")])
    assert ddp.step_s > p3.step_s > ddp.bound_step_s * 0.99
    assert ddp.tx_bytes_per_step == pytest.approx(1.5 * profile.size_bytes)
    with pytest.raises(ValueError, match="codec"):
        evaluate(profile, [Cluster(4, 4e9, DDP, codec="qsgd:bits=8")])
