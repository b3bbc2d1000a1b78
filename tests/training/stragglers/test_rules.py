"""Rules for stragglers as they are written, what they do not go with, carrying and pacing alone."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import pytest
import torch

from gradlane.formats.live_state import StepTimes
from gradlane.lab.cluster.straggling import Bursts
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy, with_rules
from gradlane.planning.simulation.straggler import StragglerSpec, parse_straggler
from gradlane.training.model.contributors import Contributors
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.kernel.gradient_exchange import GradientExchange
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase, Phases
from gradlane.training.model.lazy_parameters import Exemption, LazyParameters
from gradlane.training.model.others_steps import OthersSteps
from gradlane.training.model.stages.late_gradients import LateGradientBuffer
from gradlane.training.model.stages.stage_list import StageList
from gradlane.training.model.step_layout import StepLayout
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.monitoring.metrics import metrics_of
from gradlane.training.monitoring.summary import summary_line
from gradlane.training.options.compatibility import refusal
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.options.stragglers import StragglerRule, parse_stragglers
from gradlane.training.options.strategy import plan_features
from gradlane.training.rendezvous.tensor_table import build_table
from gradlane.training.session.pace import at_pace


def test_rules_are_read_and_given_to_the_core() -> None:
    assert parse_stragglers("wait") is None
    assert parse_stragglers("drop") == StragglerRule(0, None)
    assert json.loads(StragglerRule().core_rule(4))["close"] == "spread"
    assert parse_stragglers("backup=2") == StragglerRule(2)
    core = json.loads(StragglerRule(2).core_rule(3))
    assert core == {"close": {"backup": {"ranks": 2}}, "ahead_steps": 3}
    assert json.loads(StragglerRule(0, 1.5).core_rule(4))["close"] == {"deadline": {"percent": 150}}
    for wrong in ("", "drop=1", "drop=x", "backup", "backup=0", "backup=1.5", "late"):
        with pytest.raises(ValueError, match="backup=1"):
            parse_stragglers(wrong)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"strategy": "ring"}, r"ring.: a ring needs every rank's part; use p3, slicing or wfbp$"),
        ({"strategy": "kvstore"}, r"kvstore.: its workers pull, .* use p3, slicing or wfbp$"),
        ({"strategy": "deferred-pull"}, r"deferred-pull.: its workers pull, .*old results"),
        ({"strategy": "asgd", "update": "server"}, r"asgd.: .* nobody; leave stragglers out$"),
        ({"update": "server"}, 'update="worker"'),
        ({"scheme": "sfb"}, "all ranks"),
        ({"late": "keep"}, "discard, carry"),
        ({"ahead_steps": 0}, "1 or more"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(
    others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Options.of(**keywords_of(**{"stragglers": "backup=1", **others}))


def test_plans_have_to_leave_gradients_on_servers() -> None:
    drop = Options.of(stragglers="drop").features
    assert not refusal(plan_features("", {"first.weight": "ps"}), drop)
    assert not refusal(plan_features("", {"first.weight": "ring"}), Options.of().features)
    assert "'ring' for 'first" in refusal(plan_features("", {"first.weight": "ring"}), drop)
    assert "scheme 'sfb'" in refusal(plan_features("poseidon", None), drop)
    assert not refusal(plan_features("auto", None), drop)


def test_numbers_of_ranks_are_checked() -> None:
    Options.of(stragglers="backup=1", servers=2).check_world(2)
    Options.of(stragglers="backup=1").check_world(1)
    with pytest.raises(ValueError, match="at least one has to contribute"):
        Options.of(stragglers="backup=2").check_world(2)
    with pytest.raises(ValueError, match="there are 2 ranks"):
        Options.of(servers=3).check_world(2)
    with pytest.raises(ValueError, match="servers is 0; it must be 1 or more"):
        Options.of(servers=0)
    with pytest.raises(ValueError, match="nobody is late"):
        Options.of(**keywords_of(late="carry"))


def test_what_a_step_went_on_without_is_in_the_next_gradient() -> None:
    contributors = mock.Mock(spec=Contributors)
    contributors.lack_this_rank.side_effect = lambda step: step < 3
    carrying = LateGradientBuffer(contributors)

    def give(index: int, value: float) -> float:
        gradient = torch.full((3,), value)
        carrying.before_send(index, gradient)
        given = gradient.tolist()
        # From now on it is the core's, and holds something else.
        gradient.fill_(-1.0)
        return float(given[0])

    assert (give(0, 1.0), give(1, 5.0)) == (1.0, 5.0)
    carrying.completed(1)
    assert give(0, 2.0) == 3.0
    carrying.completed(2)
    assert give(0, 4.0) == 7.0
    carrying.completed(3)
    assert give(0, 1.0) == 1.0
    assert give(1, 1.0) == 6.0, "it waits until there is a gradient to be added to"
    carrying.completed(4)
    assert give(1, 1.0) == 1.0


class _Model:
    """Passes the steps that it is told to."""

    def __init__(self, passes: set[int]) -> None:
        self.reads_averages = False
        self._passes = passes
        self.step = 0

    def pass_step(self) -> bool:
        self.step += 1
        return self.step in self._passes


def test_batches_of_passed_steps_are_left_out() -> None:
    model: Any = _Model({2, 3, 6})
    passed: list[int] = []
    batches = at_pace(range(1, 8), lambda: model, lambda: passed.append(model.step))
    assert list(batches) == [1, 4, 5, 7]
    assert passed == [2, 3, 6]


class _WaitedError(Exception):
    pass


def _left_out(*, goes_on: bool, meets: bool = False) -> OthersSteps:
    """A model whose step 3 has ended here and goes on without this rank.

    Args:
        goes_on: whether the others are in step 4 already.
        meets: whether all ranks begin step 4 together.
    """
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    entries = build_table(torch.nn.ParameterList([parameter]))
    exchange = mock.Mock(spec=GradientExchange)
    exchange.layout = StepLayout(entries, len(entries))
    exchange.step = exchange.training_step = 3
    exchange.norm = mock.Mock(is_measured=False)
    exchange.is_watched.return_value = False
    exchange.statuses.return_value = {}
    contributors = mock.Mock(spec=Contributors)
    contributors.lack_this_rank.return_value = True
    contributors.are_past.return_value = goes_on
    exchange.take_arrived.side_effect = _WaitedError
    consistency = mock.Mock(join=None)
    consistency.compares_after.return_value = meets
    in_order = StageList([])
    phases = Phases(FailureLatch(), in_order)
    updates, lazy = mock.Mock(stepped=[]), LazyParameters([parameter])
    parts = KernelParts(phases, exchange, updates, in_order, Exemption(), lazy, mock.Mock())
    stages = mock.Mock(consistency=consistency)
    steps = TrainingSteps(
        parts,
        stages,
        mock.Mock(),
        mock.Mock(),
        lambda: None,
        mock.Mock(),
        contributors,
        mock.Mock(),
    )
    steps.step_end.end_step()
    assert phases.phase is Phase.PENDING
    return steps.others


def test_who_was_left_out_and_is_in_time_for_the_next_does_not_wait_for_its_whole_result() -> None:
    # Waiting made it begin the next step later than the others, and be left out for good.
    assert _left_out(goes_on=False).pass_step() is False
    with pytest.raises(_WaitedError):
        _left_out(goes_on=True).pass_step()


def test_a_step_that_all_begin_together_is_not_passed() -> None:
    assert _left_out(goes_on=True, meets=True).pass_step() is False


def test_who_reads_averages_passes_nothing_and_is_told() -> None:
    model: Any = _Model({1, 2})
    model.reads_averages = True
    with pytest.warns(UserWarning, match="clipping"):
        assert list(at_pace(range(3), lambda: model, None)) == [0, 1, 2]


def test_the_lab_runs_each_strategy_of_gradlane_with_each_rule() -> None:
    strategies = with_rules(parse_strategies("none,ddp-gloo,p3"), "wait,drop,backup=1")
    texts = [strategy.text for strategy in strategies]
    assert texts == ["none", "ddp-gloo", "p3", "p3/drop", "p3/backup=1"]
    again = parse_strategy("p3/backup=1")
    assert (again.setting, again.stragglers.rule) == ("p3", "backup=1")
    assert again == strategies[-1]
    carries = parse_strategy("p3/drop=1.1:carry")
    assert (carries.stragglers.rule, carries.stragglers.late) == ("drop=1.1", "carry")
    wrongs = ("ddp-gloo/drop", "ring/drop", "asgd/drop", "p3/late", "p3/wait:carry", "p3/drop:keep")
    for wrong in wrongs:
        with pytest.raises(ValueError):
            parse_strategy(wrong)


def test_a_straggler_is_written_with_rank_and_share() -> None:
    assert parse_straggler("rank=3,share=0.1") == StragglerSpec(3, 0.1, 0.5)
    assert parse_straggler("rank=1, share=0.5, burst=20 ms") == StragglerSpec(1, 0.5, 0.02)
    for wrong in (
        "rank=3",
        "rank=x,share=0.1",
        "rank=1,share=1",
        "rank=1,share=0.1,burst=99s",
        "3",
    ):
        with pytest.raises(ValueError, match="straggler is"):
            parse_straggler(wrong)
    with pytest.raises(ValueError, match=r"'0.5' has no unit: 0.5s for seconds, 0.5ms"):
        parse_straggler("rank=3,share=0.1,burst=0.5")


def test_bursts_stop_a_process_and_leave_it_running() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        with Bursts(StragglerSpec(0, 0.5, 0.01), child.pid) as bursts:
            bursts.begin()
            bursts.begin()
            deadline_s = time.monotonic() + 20
            while bursts.count < 3:
                assert time.monotonic() < deadline_s
                time.sleep(0.005)
        # A stopped process would not end before it is continued.
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(20) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_who_was_left_out_is_in_the_metrics_and_in_the_line_at_the_end() -> None:
    steps: StepTimes = {
        "count": 10,
        "last_s": 0.1,
        "mean_s": 0.1,
        "median_s": 0.1,
        "max_s": 0.1,
        "wait_last_s": 0.0,
        "wait_median_s": 0.0,
        "wait_share": 0.0,
    }

    def row(steps: int, late: int, late_s: float) -> dict[str, float]:
        return {
            "left_out_steps": steps,
            "late_count": late,
            "left_out_late_s": late_s,
            "late_s_max": late_s,
            "late_step_max": late,
        }

    rows = [row(0, 0, 0.0), row(1, 0, 0.0), row(4, 2, 0.03)]
    metrics = metrics_of(0, 3, steps, [{"step": 10, "decided_steps": 10, "left_out": rows}])
    assert [one["left_out_share"] for one in metrics["left_out"]] == [0.0, 0.1, 0.4]
    assert metrics["left_out"][2]["late_s_mean"] == pytest.approx(0.015)
    line = summary_line(metrics, [])
    assert line.endswith("steps that went on without: rank 2 40% (15 ms late), rank 1 10%")
    none = metrics_of(0, 3, steps, [{"step": 10}])
    assert none["left_out"] == [] and "without" not in summary_line(none, [])
