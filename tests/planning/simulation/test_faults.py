"""The cost of lost machines: formulas beside random runs, limits, words and the command."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import settings as settings_of_hypothesis
from hypothesis import strategies as st

from gradlane.formats.durations import format_duration_s, parse_duration_s
from gradlane.planning.advice.faults import verdicts
from gradlane.planning.simulation.faults import (
    AGREEMENT_S,
    SHRINKS,
    WAITS,
    FaultSettings,
    best_interval_s,
    fault_cost,
    share_with,
    share_without,
)
from gradlane.planning.simulation.grid import SimulatedRow, evaluate
from gradlane.planning.simulation.scenarios import Cluster
from tests.command_line import run
from tests.planning.simulation.fault_runs import (
    Machines,
    Progress,
    run_going_on,
    run_shrinking,
    run_waiting,
)
from tests.planning.simulation.small_profile import SMALL

STEP_S, WRITE_S, JOIN_S, LOSSES = 0.3, 2.0, 1.5, 1500
RUNNERS = {WAITS: run_waiting, SHRINKS: run_shrinking}
ORDINARY = [
    (machines, 3600.0 * hours, replacement_s)
    for machines in (2, 4, 16)
    for hours in (2, 6, 48)
    for replacement_s in (0.0, 300.0, 1200.0)
]
SHORT = [
    (machines, mtbf_s, replacement_s)
    for machines in (2, 4, 16)
    for mtbf_s in (60.0, 600.0, 1800.0)
    for replacement_s in (0.0, 300.0)
]
"""Times between failures down to the time of a restart."""
A_WORKER = Cluster(workers=1, rate_bps=1e9)


def shares(settings: FaultSettings, machines: int) -> dict[str, tuple[float, float]]:
    """Return by policy the share of the formula, and that of a random run."""
    found = {}
    for kind, runner in RUNNERS.items():
        formula, interval_s = share_without(settings, machines, STEP_S, WRITE_S, kind=kind)
        there = Machines(machines, settings.mtbf_s, settings.replacement_s, Random(1))
        found[kind] = (
            formula,
            runner(
                there,
                Progress(interval_s, WRITE_S),
                losses=LOSSES,
                detection_s=settings.detection_s,
                restart_s=settings.restart_s,
            ),
        )
    formula, interval_s = share_with(settings, machines, STEP_S, WRITE_S, JOIN_S)
    away_s = settings.replacement_s + settings.restart_s
    found["with"] = (
        formula,
        run_going_on(
            Machines(machines, settings.mtbf_s, away_s, Random(1)),
            Progress(interval_s, WRITE_S),
            losses=LOSSES,
            pause_s=settings.detection_s + AGREEMENT_S + STEP_S,
            join_s=JOIN_S,
            restart_s=settings.restart_s,
        ),
    )
    return found


def better(found: dict[str, tuple[float, float]]) -> tuple[float, float]:
    """Return the better kind of restart, by formula and by random run."""
    return max(found[kind][0] for kind in RUNNERS), max(found[kind][1] for kind in RUNNERS)


@pytest.mark.parametrize(("machines", "mtbf_s", "replacement_s"), ORDINARY)
def test_formulas_agree_with_random_runs(
    machines: int, mtbf_s: float, replacement_s: float
) -> None:
    found = shares(FaultSettings(mtbf_s, replacement_s=replacement_s), machines)
    for formula, ran in (found[WAITS], better(found), found["with"]):
        assert formula == pytest.approx(ran, abs=0.02), found


@pytest.mark.parametrize(("machines", "mtbf_s", "replacement_s"), SHORT)
def test_formulas_hold_where_losses_come_as_fast_as_restarts(
    machines: int, mtbf_s: float, replacement_s: float
) -> None:
    found = shares(FaultSettings(mtbf_s, replacement_s=replacement_s), machines)
    for formula, ran in (found[WAITS], better(found), found["with"]):
        assert formula == pytest.approx(ran, abs=0.06), found


def test_a_given_interval_and_checkpoints_that_take_long_count() -> None:
    """Half an interval is lost with each machine, and each write stops all."""
    for interval_s, write_s in ((60.0, 30.0), (1800.0, 2.0)):
        settings = FaultSettings(21600.0, checkpoint_interval_s=interval_s)
        formula, used_s = share_without(settings, 4, STEP_S, write_s, kind=WAITS)
        assert used_s == interval_s
        ran = run_waiting(
            Machines(4, 21600.0, 300.0, Random(2)),
            Progress(interval_s, write_s),
            losses=LOSSES,
            detection_s=30.0,
            restart_s=60.0,
        )
        assert formula == pytest.approx(ran, abs=0.02)
        assert formula < share_without(FaultSettings(21600.0), 4, STEP_S, 2.0, kind=WAITS)[0]


def test_no_given_interval_is_better_than_the_best_one() -> None:
    for mtbf_s in (600.0, 21600.0, 1e6):
        best, _ = share_without(FaultSettings(mtbf_s), 4, STEP_S, WRITE_S, kind=WAITS)
        for power in range(40):
            settings = FaultSettings(mtbf_s, checkpoint_interval_s=1.25**power)
            assert share_without(settings, 4, STEP_S, WRITE_S, kind=WAITS)[0] <= best * 1.001


def test_the_best_interval_is_dalys() -> None:
    """His figures 3 to 5: 117, 57 and 9.1 minutes for 24 h, 6 h and 15 min, with 5 min a dump."""
    for mtbf_min, best_min in ((1440, 117), (360, 57), (15, 9.1)):
        assert best_interval_s(60.0 * mtbf_min, 300.0) / 60 == pytest.approx(best_min, rel=0.01)
    assert best_interval_s(100.0, 200.0) == 100.0


@given(
    machines=st.integers(1, 400),
    mtbf_s=st.floats(1.0, 1e9),
    times=st.tuples(*[st.floats(0.0, 1e6)] * 3),
    write_s=st.floats(0.0, 1e4),
    interval_s=st.none() | st.floats(0.001, 1e6),
)
@settings_of_hypothesis(max_examples=200, deadline=None)
def test_shares_are_shares_whatever_is_asked(
    machines: int,
    mtbf_s: float,
    times: tuple[float, float, float],
    write_s: float,
    interval_s: float | None,
) -> None:
    restart_s, replacement_s, detection_s = times
    settings = FaultSettings(mtbf_s, restart_s, replacement_s, detection_s, interval_s, write_s)
    (row,) = evaluate(SMALL, [replace(A_WORKER, strategy="ddp", workers=machines)])
    for strategy in ("ddp", "p3"):
        cost = fault_cost(settings, replace(row, strategy=strategy), 10**6)
        assert 0.0 <= cost.train_share <= 1.0
        assert 0.0 <= cost.samples_per_s <= row.samples_per_s
        if cost.going_on_train_share is None:
            assert strategy == "ddp"
        else:
            assert 0.0 <= cost.going_on_train_share <= 1.0


def test_rarer_losses_and_faster_restarts_never_hurt() -> None:
    rows = [
        fault_cost(FaultSettings(mtbf_s), row_of("p3", 4), SMALL.size_bytes)
        for mtbf_s in (60.0, 600.0, 3600.0, 21600.0, 1e6, 1e9)
    ]
    quick = [
        fault_cost(FaultSettings(mtbf_s, 10.0, 10.0, 1.0), row_of("p3", 4), SMALL.size_bytes)
        for mtbf_s in (60.0, 600.0, 3600.0, 21600.0, 1e6, 1e9)
    ]
    for costs in (rows, quick):
        without = [cost.train_share for cost in costs]
        with_it = [cost.going_on_train_share or 0.0 for cost in costs]
        assert without == sorted(without) and with_it == sorted(with_it)
    for slow, fast in zip(rows, quick, strict=True):
        assert fast.train_share >= slow.train_share
        assert (fast.going_on_train_share or 0.0) >= (slow.going_on_train_share or 0.0)


def row_of(strategy: str, workers: int, *, ranks_per_node: int = 1) -> SimulatedRow:
    (row,) = evaluate(SMALL, [replace(A_WORKER, strategy="ddp", workers=workers)])
    return replace(row, strategy=strategy, ranks_per_node=ranks_per_node)


def verdict(settings: FaultSettings, *rows: SimulatedRow) -> str:
    (text,) = verdicts([fault_cost(settings, row, SMALL.size_bytes) for row in rows])
    return text


def test_no_progress_is_said_by_name() -> None:
    hours = FaultSettings(21600.0)
    number = r"of 100 machine-hours \d\d\.\d"
    both = verdict(hours, row_of("p3", 4))
    assert re.fullmatch(rf"4 workers: {number} train without going on, \d\d\.\d with it\.", both)
    seconds = replace(hours, mtbf_s=20.0)
    assert verdict(seconds, row_of("p3", 4)) == (
        "4 workers: training makes no progress, with or without going on."
    )
    quick = FaultSettings(600.0, replacement_s=60.0, restart_s=600.0, detection_s=1.0)
    text = verdict(quick, row_of("p3", 8))
    assert re.fullmatch(
        rf"8 workers: training makes no progress without going on, {number} train with it\.", text
    )


def test_what_cannot_go_on_is_said_by_name() -> None:
    settings = FaultSettings(21600.0)
    assert verdict(settings, row_of("ddp", 4)).endswith(
        " train without going on; ddp cannot go on."
    )
    alone = verdict(settings, row_of("p3", 1))
    assert re.fullmatch(
        r"1 worker: of 100 machine-hours \d\d\.\d train; nobody is left to go on\.", alone
    )


def test_the_ranks_of_a_node_are_lost_together() -> None:
    settings = FaultSettings(21600.0, checkpoint_s=1.0)
    apart = fault_cost(settings, row_of("p3", 4), SMALL.size_bytes)
    nodes = fault_cost(settings, row_of("p3", 16, ranks_per_node=4), SMALL.size_bytes)
    assert nodes.machines == apart.machines == 4
    assert nodes.train_share == apart.train_share
    assert verdict(settings, row_of("p3", 16, ranks_per_node=4)).startswith("4 nodes of 4 workers:")


COMMAND = ("whatif", "resnet50", "--workers", "4", "--rate", "10gbit")


def test_the_command_prints_and_writes_what_faults_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, page, again = (tmp_path / name for name in ("rows.json", "page.html", "again.html"))
    given_ = (*COMMAND, "--mtbf", "6h", "--checkpoint-interval", "10min")
    status, out, errors = run(
        monkeypatch, capsys, *given_, "--json", str(saved), "--html", str(page)
    )
    assert status == 0, errors
    content = json.loads(saved.read_text(encoding="utf-8"))
    faults = content["faults"]
    assert (faults["mtbf_s"], faults["restart_s"], faults["replacement_s"]) == (21600, 60, 300)
    assert [row["strategy"] for row in faults["rows"]] == ["ddp", "p3"]
    for cost, row in zip(faults["rows"], content["rows"], strict=True):
        assert cost["step_s"] == row["step_s"]
        assert cost["samples_per_s"] == pytest.approx(cost["train_share"] * row["samples_per_s"])
        assert cost["checkpoint_interval_s"] == 600.0
        assert cost["checkpoint_every"] == round(600.0 / row["step_s"])
    (sentence,) = faults["verdicts"]
    words = " ".join(out.split())
    assert sentence in words and faults["assumptions"] in words
    assert run(monkeypatch, capsys, "report", str(saved), "--html", str(again))[0] == 0
    for path in (page, again):
        text = path.read_text(encoding="utf-8")
        assert "What faults cost" in text and sentence in text


def test_without_mtbf_nothing_is_said_about_faults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    saved, page = tmp_path / "rows.json", tmp_path / "page.html"
    status, out, _ = run(monkeypatch, capsys, *COMMAND, "--json", str(saved), "--html", str(page))
    assert status == 0 and "Faults" not in out
    assert "faults" not in json.loads(saved.read_text(encoding="utf-8"))
    assert "What faults cost" not in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--mtbf", "6"), "--mtbf: '6' has no unit: 6s"),
        (("--mtbf", "often"), "--mtbf: 'often' is no length of time"),
        (("--mtbf", "-6h"), "--mtbf: '-6h' is no length of time"),
        (("--mtbf", "nan"), "--mtbf: 'nan' is no length of time"),
        (("--mtbf", "0h"), "--mtbf is 0 s: use 1 s to 36500 d"),
        (("--mtbf", "1e400s"), "--mtbf is inf s"),
        (("--mtbf", "6h", "--restart-time", "1e9d"), "--restart-time is"),
        (("--mtbf", "6h", "--checkpoint-interval", "0s"), "--checkpoint-interval is 0 s: use 1 ms"),
        (("--mtbf", "6h", "--servers", "separate=2"), "--mtbf knows nothing of servers"),
        *(
            ((option, "5s"), f"{option} has no effect without --mtbf")
            for option in (
                "--restart-time",
                "--replacement-time",
                "--detection-time",
                "--checkpoint-interval",
                "--checkpoint-time",
            )
        ),
    ],
)
def test_nonsense_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    named: str,
) -> None:
    status, _, errors = run(monkeypatch, capsys, *COMMAND, "--strategy", "p3", *options)
    assert status == 2
    assert named in " ".join(errors.split())


def test_lengths_of_time_are_read_and_said() -> None:
    texts = ("0 s", "100 us", "20 ms", "1.5 s", "10 min", "6 h", "30 d")
    assert [format_duration_s(parse_duration_s(text.replace(" ", ""))) for text in texts] == [
        *texts
    ]
