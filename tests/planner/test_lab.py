"""The lab's strategy `auto`: the steps in which a plan is found are none of the measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlane.lab.privilege import why_no_namespaces
from gradlane.lab.run import LabOptions, run_lab
from gradlane.lab.strategy import parse_strategies, parse_strategy
from gradlane.planner.settings import LEARNING_STEPS
from gradlane.whatif.prediction import can_predict

REASON = why_no_namespaces()


def test_auto_is_a_strategy_that_learns_first() -> None:
    auto = parse_strategy("auto")
    assert (auto.text, auto.family, auto.is_planned) == ("auto", "gradlane", True)
    assert auto.communicates and auto.sums_in_rank_order
    assert auto.slice_elems(None) is None
    options = LabOptions("resnet50", parse_strategies("p3,auto"), steps=3, warmup=2)
    assert [options.warmup_of(one) for one in options.strategies] == [2, LEARNING_STEPS + 2]
    assert options.steps_in_total == (2 + 3) + (LEARNING_STEPS + 2 + 3)
    row = {"strategy": "auto", "workload": "resnet50", "codec": "raw", "cpu_bound": False}
    assert not can_predict(row)
    assert can_predict({**row, "strategy": "p3"})


@pytest.mark.skipif(REASON is not None, reason=f"no network namespaces here: {REASON}")
@pytest.mark.timeout(180)
def test_auto_learns_what_the_mean_is_and_says_what_it_chose(tmp_path: Path) -> None:
    pytest.importorskip("gradlane._core", reason="the compiled core is not built")
    path = tmp_path / "profile.json"
    params = [
        {"name": f"layer{4 - i}.weight", "shape": [50, 100], "grad_ready_s": 0.004 * i}
        for i in range(1, 5)
    ]
    content = {"batch_time_s": 0.024, "backward_time_s": 0.016, "params": params}
    path.write_text(json.dumps(content))
    options = LabOptions(
        workload="resnet50",
        strategies=parse_strategies("p3,auto"),
        workers=3,
        rates_bps=[100_000_000],
        steps=3,
        warmup=1,
        profile_path=str(path),
    )
    fixed, auto = run_lab(options)
    for row in (fixed, auto):
        assert len(row.step_s) == 3
        assert row.params_equal
        assert row.verified_tensors == 3 * 4
    assert auto.warmup == LEARNING_STEPS + 1
    plan = auto.metrics["plan"]
    assert plan["cluster"]["workers"] == 3
    assert 5e7 < plan["cluster"]["rate_bps"] < 2e8
    assert plan["settings"]["strategy"]
    assert "plan" not in fixed.metrics
