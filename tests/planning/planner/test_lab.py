"""The lab's strategy `auto`: the steps in which a plan is found are none of the measured ones.

Its run in namespaces is in `tests/lab/test_run.py`, beside those of all other strategies.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradlane.lab.calibration.prediction import can_predict
from gradlane.lab.runs.messages import TrialRequest
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy
from gradlane.lab.workloads import WorkloadSpec
from gradlane.training.plans.settings import LEARNING_STEPS


def test_auto_is_a_strategy_that_learns_first() -> None:
    auto = parse_strategy("auto")
    assert (auto.text, auto.family, auto.is_planned) == ("auto", "gradlane", True)
    assert auto.communicates and auto.sums_in_rank_order
    assert auto.slice_elems(None) is None
    options = LabOptions(
        workload="resnet50", strategies=parse_strategies("p3,auto"), steps=3, warmup=2
    )
    assert [options.warmup_of(one) for one in options.strategies] == [2, LEARNING_STEPS + 2]
    assert options.steps_in_total == (2 + 3) + (LEARNING_STEPS + 2 + 3)
    free = parse_strategy("auto:any-rounding")
    assert free.is_planned and free.any_rounding and not free.sums_in_rank_order
    with pytest.raises(ValueError, match=r"auto\[:any-rounding\]"):
        parse_strategy("auto:any")
    row = Row(strategy="auto", workload="resnet50", rate_bps=10**9, step_s_median=1.0)
    assert not can_predict(row)
    assert can_predict(replace(row, strategy="p3"))
    assert can_predict(replace(row, strategy="poseidon"))


def test_a_sealed_strategy_has_a_secret() -> None:
    sealed = parse_strategy("slicing/sealed")
    assert (sealed.text, sealed.setting, sealed.sealed) == ("slicing/sealed", "slicing", True)
    assert sealed.sums_in_rank_order
    asked = TrialRequest("a", WorkloadSpec("resnet50"), sealed.text, ["10.0.0.1"], 1, 1, 1, None)
    assert asked.secret is not None and replace(asked, strategy="slicing").secret is None
    both = parse_strategy("p3/sealed/drop")
    assert (both.sealed, both.stragglers.rule, both.text) == (True, "drop", "p3/sealed/drop")
    with pytest.raises(ValueError, match="only gradlane's strategies are sealed"):
        parse_strategy("ddp-gloo:25/sealed")
