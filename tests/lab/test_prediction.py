"""Predictions for runs of the lab: which rows, how they are converted, what was once measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.calibration.grid import in_grid_order
from gradlane.lab.calibration.prediction import (
    LeftOut,
    can_predict,
    markdown_of,
    predict,
    replayed_profile,
    summary_of,
)
from gradlane.lab.calibration.prediction_grid import (
    MEDIAN_ERROR_TARGET,
    WORST_ERROR_TARGET,
    fit_spread,
    page_of,
    with_spread,
)
from gradlane.lab.runs.cells import with_compute_times
from gradlane.lab.runs.rows import NO_EVIDENCE, Row, read_rows
from gradlane.planning.simulation.costs import MachineCosts
from tests.command_line import run
from tests.paths import ROOT

ROW: dict[str, Any] = {
    "workload": "resnet50",
    "strategy": "p3",
    "workers": 4,
    "rate_bps": 4 * 10**9,
    "dilation": 10.0,
    "slice_elems": None,
    "codec": "raw",
    "cpu_bound": False,
    "compute_s": 0.303,
    "step_s_median": 0.3486,
}
"""As measured on the project's two-core machine; see the README."""


def row(**changes: Any) -> Row:
    return Row.from_json({**ROW, **changes})


def test_local_updates_are_predicted_as_whatif_simulates_them() -> None:
    """A round of which nothing is hidden, and one that is hidden by the next steps."""
    found = [
        predict(row(strategy=f"p3/local:{options}")).predicted_step_s
        for options in ("steps=1", "steps=4", "steps=4,fragments=2,overlap_steps=2")
    ]
    each, seldom, hidden = (step_s - 0.303 for step_s in found)
    assert can_predict(row(strategy="p3/local:steps=4"))
    assert each == pytest.approx(4 * seldom, rel=0.01) and each > 0.3
    assert hidden == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({"dilation": 6.7, "compute_s": 0.3057, "step_s_median": 0.3365}, 0.03),
        ({"strategy": "slicing", "step_s_median": 0.4363}, 0.03),
        ({"strategy": "kvstore", "compute_s": 0.3062, "step_s_median": 0.4560}, 0.03),
        (
            {
                "workload": "vgg19",
                "rate_bps": 10**10,
                "dilation": 20.0,
                "compute_s": 0.606,
                "step_s_median": 0.7403,
            },
            0.03,
        ),
    ],
)
def test_published_measurements_are_predicted(changes: dict[str, Any], tolerance: float) -> None:
    prediction = predict(row(**changes))
    assert abs(prediction.error) <= tolerance, prediction


def test_only_replays_of_the_engine_are_predicted() -> None:
    assert can_predict(row())
    assert not can_predict(row(strategy="ddp-gloo:25"))
    assert not can_predict(row(strategy="none"))
    assert not can_predict(row(workload="digits-cnn"))
    assert not can_predict(row(cpu_bound=True))
    assert LeftOut.of([row(), row()]).text == ""
    out = LeftOut.of([row(), row(cpu_bound=True), row(strategy="none"), row(codec="f16")])
    assert out.text.startswith(f"3 of 4 rows are left out, 1 with {NO_EVIDENCE}; 2 of other kinds")
    assert out.to_json() == {"rows": 4, "no_evidence": 1, "other_kinds": 2}


def test_a_replay_is_scaled_to_what_was_measured() -> None:
    profile = replayed_profile("resnet50", 10.0, 0.303)
    assert profile.compute_s == pytest.approx(3.03)
    assert all(tensor.need_s <= profile.forward_s for tensor in profile.tensors)
    assert all(tensor.ready_s <= profile.compute_s for tensor in profile.tensors)


def test_a_summary_needs_predictions() -> None:
    predictions = [predict(row()), predict(row(step_s_median=0.2))]
    summary = summary_of(predictions)
    assert summary["worst_error"] >= summary["median_error"] > 0.0
    assert markdown_of(predictions).count("\n") == 3
    with pytest.raises(ValueError, match="nothing to predict"):
        summary_of([])


def test_the_command_prints_a_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    results, written = tmp_path / "results.json", tmp_path / "out.json"
    rows = [ROW, {**ROW, "strategy": "none"}, {**ROW, "cpu_bound": True}]
    results.write_text(json.dumps(rows), encoding="utf-8")
    arguments = ["lab", "predict", str(results), "--json", str(written)]
    status, out, _ = run(monkeypatch, capsys, *arguments)
    assert status == 0
    assert "| resnet50 | p3 | 4 |" in out and "median error" in out
    assert f"2 of 3 rows are left out, 1 with {NO_EVIDENCE}" in out
    content = json.loads(written.read_text(encoding="utf-8"))
    assert len(content["rows"]) == 1
    assert content["left_out"] == {"rows": 3, "no_evidence": 1, "other_kinds": 1}


def test_what_the_lab_measured_is_predicted() -> None:
    """Every fourth row of the published grid: a model that drifts from the lab is seen here."""
    path = ROOT / "docs" / "predictions.json"
    rows = [it for it in in_grid_order(with_compute_times(read_rows(path))) if can_predict(it)]
    assert len(rows) > 40
    summary = summary_of([predict(it) for it in rows[::4]])
    assert summary["median_error"] <= MEDIAN_ERROR_TARGET
    assert summary["worst_error"] <= WORST_ERROR_TARGET


def test_the_fit_finds_the_spread_that_made_the_rows() -> None:
    costs = with_spread(MachineCosts(), 0.35)
    made = row(rate_bps=15 * 10**8, dilation=4.0)
    made = replace(made, step_s_median=predict(made, costs).predicted_step_s)
    assert fit_spread([made], MachineCosts()) == (0.35, 0.0)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit_spread([], MachineCosts())


def measured(row: Row) -> Row:
    return replace(
        row,
        dilation=6.7,
        warmup=2,
        steps=2,
        machine={"processors": 2},
        versions={"kernel": "6", "torch": "2"},
        cpu_share=0.2,
        goodput_bps=3.8e9,
    )


def test_a_page_names_errors_baselines_and_what_is_missing() -> None:
    rows = [
        measured(row(strategy=name, slice_elems=elems))
        for name, elems in (("p3", 50_000), ("ddp-gloo:4", None), ("ddp-gloo:25", None))
    ]
    rows[-1] = replace(rows[-1], step_s_median=0.9 * rows[-1].step_s_median)
    page = page_of([predict(row())], rows)
    assert "| resnet50 (fitted) | 1 |" in page
    missing = "none, slicing, kvstore, wfbp, p3/sealed, p3/lanes=4"
    assert f"- resnet50 at 4 Gbit/s: {missing}" in page
    assert "- vgg19 at 5 Gbit/s: all" in page
    assert "DDP over p3" in page
    beside = page.split("## Beside them")[1]
    assert beside.count("resnet50") == 1 and "| 25 MB |" in beside


def test_a_run_over_lanes_is_predicted_as_one() -> None:
    one = row(workload="vgg19", rate_bps=30 * 10**9, dilation=1.0, step_s_median=0.3)
    two = replace(one, strategy="p3/lanes=2")
    assert can_predict(two)
    # Without dilation the host is the limit, and two threads do twice as much.
    assert predict(two).predicted_step_s < 0.75 * predict(one).predicted_step_s
    page = page_of([predict(it) for it in (one, two)], [measured(one), measured(two)])
    assert "| all over several lanes | 1 |" in page
    assert in_grid_order([two, one]) == [one, two]


def test_a_sealed_run_is_predicted_as_one() -> None:
    plain, sealed = row(), row(strategy="p3/sealed")
    assert can_predict(sealed)
    # Tags travel, and bytes take the processor longer.
    equal = with_spread(MachineCosts(), 0.0)
    assert predict(sealed, equal).predicted_step_s > predict(plain, equal).predicted_step_s
    page = page_of([predict(it) for it in (plain, sealed)], [measured(plain), measured(sealed)])
    assert "| all that is sealed | 1 |" in page
    assert in_grid_order([sealed, plain]) == [plain, sealed]
