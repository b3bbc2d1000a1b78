"""The papers' experiments as presets: what is measured, for how long, kept, and concluded.

Machines are made up here, as `tests.lab.fake_runs` says; what ends a run from outside is in
`test_presets_endings.py`.
"""

from __future__ import annotations

import csv
import html
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradlane.lab.cluster.errors import LabError
from gradlane.lab.runs.cells import Cell, CellsProgress
from gradlane.lab.runs.display import runs_progress
from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.rows import NO_EVIDENCE, Row, read_rows, save_rows
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.bound import port_bytes
from gradlane.report.time_left import TimeLeft, format_duration
from gradlane_papers.experiments import bandwidth as bandwidth_preset
from gradlane_papers.experiments.bandwidth import BANDWIDTH, QUICK, between
from gradlane_papers.experiments.findings import Findings, Reversal, completed
from gradlane_papers.experiments.preset import Preset, run_preset
from gradlane_papers.experiments.simulated import Simulation, simulate_missing
from tests.command_line import run
from tests.lab.fake_runs import FakeMachine

GBIT = 10**9
SMALL: dict[str, Any] = {
    "workloads": ["resnet50"],
    "rates_bps": [4 * GBIT],
    "strategies": ["p3", "ddp-gloo:25"],
}
STEPS_S = {"none": 0.3, "p3": 0.35, "slicing": 0.43, "ddp-gloo:25": 0.44, "ddp-gloo:4": 0.4}


def quiet() -> Console:
    return Console(file=StringIO(), width=110)


def run_made(preset: Preset, path: Path, machine: FakeMachine) -> list[Row]:
    return run_preset(replace(preset, run=machine.run), PresetFolder(path), quiet())


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[Simulation]:
    """What was simulated; every step takes 0.36 s."""
    runs: list[Simulation] = []

    def run_simulation(self: Simulation) -> Row:
        runs.append(self)
        return Row.of(
            **self.inputs(),
            batch_size=32,
            samples_per_s=32 * self.workers / 0.36,
            step_s_median=0.36,
            bound_step_s=0.32,
            cpu_bound=False,
        )

    monkeypatch.setattr(Simulation, "run", run_simulation)
    return runs


def test_presets_fit_their_limits_on_two_cores() -> None:
    """What the program says before it begins, from step times and steps."""
    full, quick = BANDWIDTH.choose(), QUICK.choose()
    assert 0.5 * bandwidth_preset.LIMIT_S < full.estimate_s < 0.95 * bandwidth_preset.LIMIT_S
    assert quick.estimate_s < 0.8 * bandwidth_preset.QUICK_LIMIT_S


def test_the_full_bandwidth_preset_is_the_papers_experiment() -> None:
    preset = BANDWIDTH.choose()
    cells = preset.cells
    assert {cell.workload for cell in cells} == {"resnet50", "inception_v3", "vgg19", "sockeye"}
    assert all(cell.workers == 4 for cell in cells)
    for cell in cells:
        assert {"p3", "slicing", "wfbp", "kvstore", "deferred-pull"} < set(cell.strategies)
        assert sum(name.startswith("ddp-gloo:") for name in cell.strategies) == 3
        network = ARCHITECTURES[cell.workload]()
        sizes = [one.numel for layer in network.layers for one in layer.parameters]
        load_bps = 8 * port_bytes(4 * sum(sizes), workers=4) / network.batch_time_s
        passes_bps = min(load_bps, cell.rate_bps) / cell.dilation
        assert passes_bps <= 705e6, "two cores carry what passes four such ports"
        assert cell.rate_bps / cell.dilation <= 1.51e9


def test_what_is_measured_quickly_counts_for_the_full_preset() -> None:
    full = {
        (cell.workload, cell.rate_bps, cell.dilation): cell for cell in BANDWIDTH.choose().cells
    }
    quick = QUICK.choose().cells
    assert len({cell.workload for cell in quick}) == 2 and len(quick) == 6
    for cell in quick:
        whole = full[cell.workload, cell.rate_bps, cell.dilation]
        assert set(cell.strategies) < set(whole.strategies) and cell.steps == whole.steps
        assert len(cell.strategies) == 3 + 1, "compute alone is no strategy"


def test_a_preset_goes_on_where_it_stopped(tmp_path: Path, simulated: list[Simulation]) -> None:
    preset = BANDWIDTH.choose(**SMALL)
    killed = FakeMachine(fails_after=2)
    with pytest.raises(KeyboardInterrupt):
        run_made(preset, tmp_path, killed)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert [row["strategy"] for row in kept] == ["none", "p3"]
    second = FakeMachine()
    rows = run_made(preset, tmp_path, second)
    assert [name for _, _, name in second.runs] == ["ddp-gloo:25"]
    assert [row.strategy for row in Findings(rows).measured] == ["none", "p3", "ddp-gloo:25"]
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "results.csv",
        "report.html",
    }
    third, before = FakeMachine(), len(simulated)
    assert run_made(preset, tmp_path, third) == rows
    assert third.runs == [] and len(simulated) == before > 0


def test_asking_for_more_adds_to_a_folder(tmp_path: Path, simulated: list[Simulation]) -> None:
    run_made(BANDWIDTH.choose(**SMALL), tmp_path, FakeMachine())
    more = FakeMachine()
    rows = run_made(
        BANDWIDTH.choose(**{**SMALL, "rates_bps": [2 * GBIT, 4 * GBIT]}), tmp_path, more
    )
    assert {rate for _, rate, _ in more.runs} == {2 * GBIT}
    assert {row.rate_bps for row in Findings(rows).measured} == {2 * GBIT, 4 * GBIT}
    assert len(Findings(rows).simulated) == 4, "two rates, and two between them"


def test_longer_runs_replace_shorter_ones(tmp_path: Path, simulated: list[Simulation]) -> None:
    run_made(BANDWIDTH.choose(**SMALL), tmp_path, FakeMachine())
    longer = FakeMachine()
    rows = run_made(BANDWIDTH.choose(**SMALL, steps=5), tmp_path, longer)
    assert len(longer.runs) == 3
    assert {row.steps for row in Findings(rows).measured} == {5}


def test_rows_of_a_busy_machine_are_measured_again(
    tmp_path: Path, simulated: list[Simulation]
) -> None:
    cell = BANDWIDTH.choose(**SMALL).cells[0]
    preset = replace(BANDWIDTH, cells=[cell], simulations=lambda rows: [])
    with pytest.raises(LabError, match="no evidence"):
        run_made(preset, tmp_path, FakeMachine(busy=True))
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    runs = len(cell.strategies)
    assert html.escape(f"In {runs} of {runs} runs: {NO_EVIDENCE}; marked *, ") in page
    again = FakeMachine()
    rows = run_made(preset, tmp_path, again)
    assert len(again.runs) == len(rows) == len(cell.strategies)


def test_a_folder_of_another_preset_is_refused(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(
        json.dumps(
            [
                {
                    "preset": "slices",
                    "workload": "x",
                    "strategy": "p3",
                    "rate_bps": 1,
                    "step_s_median": 1.0,
                }
            ]
        )
    )
    with pytest.raises(ValueError, match="gradlane lab slices"):
        run_made(BANDWIDTH.choose(**SMALL), tmp_path, FakeMachine())


def test_the_table_is_what_the_rows_say(tmp_path: Path, simulated: list[Simulation]) -> None:
    rows = run_made(BANDWIDTH.choose(**SMALL), tmp_path, FakeMachine(steps_s=STEPS_S))
    with (tmp_path / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == len(rows)
    assert [float(line["step_s_median"]) for line in table] == [row.step_s_median for row in rows]
    assert {line["preset"] for line in table} == {"bandwidth"}
    assert not {"metrics", "step_s", "machine"} & table[0].keys()


def test_simulated_rows_that_nobody_asks_for_are_dropped() -> None:
    one = Simulation("resnet50", "p3", 2, 8 * GBIT, 4.0, 0.3, seeds=(0,))
    other = replace(one, rate_bps=6 * GBIT)
    saved: list[list[Row]] = []
    rows = simulate_missing([one, other], [], keep=saved.append)
    assert [len(it) for it in saved] == [1, 2]
    assert rows[0].step_s_median >= (rows[0].bound_step_s or 0.0) >= 0.3
    assert simulate_missing([other], rows, keep=saved.append) == rows[1:]
    changed = replace(other, compute_s=0.2)
    assert simulate_missing([changed], rows, keep=saved.append)[0].compute_s == 0.2


def test_a_simulation_that_fails_is_told_and_the_rest_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_simulation(self: Simulation) -> Row:
        if self.rate_bps == 3 * GBIT:
            raise ValueError("no such cluster")
        return Row.of(**self.inputs(), step_s_median=0.3)

    monkeypatch.setattr(Simulation, "run", run_simulation)
    asked = [Simulation("resnet50", "p3", 2, rate * GBIT, 4.0, 0.3) for rate in (1, 2, 3, 4)]
    saved: list[list[Row]] = []
    with pytest.raises(ValueError, match="no such cluster"):
        simulate_missing(asked, [], keep=saved.append)
    assert [row.rate_bps for row in saved[-1]] == [GBIT, 2 * GBIT]


def test_curves_go_through_the_measured_rates() -> None:
    dilations = between({2 * GBIT: 4.0, 16 * GBIT: 32.0})
    assert dilations == {2 * GBIT: 4.0, 4 * GBIT: 8.0, 8 * GBIT: 16.0, 16 * GBIT: 32.0}
    assert between({GBIT: 4.0}) == {GBIT: 4.0}


def made(steps_s: dict[str, float], strategies: Sequence[str] = ()) -> list[Row]:
    cell = Cell("resnet50", 4 * GBIT, tuple(strategies or steps_s), 6.7)
    machine = FakeMachine(steps_s=steps_s)
    rows: list[Row] = []

    def keep(found: list[Any]) -> None:
        rows[:] = list(map(BANDWIDTH.describe, found))

    machine.run(cell.options(cell.strategies), progress=CellsProgress(), on_rows=keep)
    return completed(rows)


def test_the_best_of_the_bucket_sizes_counts() -> None:
    rows = made(STEPS_S)
    ((p3, ratio),) = Findings(rows).gains("p3")
    assert [row.strategy for row in Findings(rows).baselines] == ["ddp-gloo:4"]
    assert ratio == pytest.approx(0.4 / 0.35)
    assert p3.strategy == "p3" and p3.speedup_over_ddp == ratio
    assert p3.compute_s == 0.3
    # 102.2 MB, three quarters sent and three quarters received, at 0.956 of 4 Gbit/s.
    assert p3.bound_step_s == pytest.approx(0.3208, abs=0.002)
    assert Findings(rows).faster_than_bound() == []
    assert len(Findings(made({"none": 0.3, "p3": 0.31})).faster_than_bound()) == 1


def test_steps_that_do_not_wait_for_their_gradients_have_no_bound() -> None:
    rows = made({"none": 0.3, "p3": 0.35, "asgd": 0.3})
    bounds = {row.strategy: row.bound_step_s for row in rows}
    assert bounds["asgd"] is None and (bounds["p3"] or 0.0) > 0.3
    assert Findings(rows).faster_than_bound() == [] == Findings(rows).over_bound("asgd")


def reversals(rows: Sequence[Row]) -> list[Reversal]:
    return list(Findings(rows).reversals())


def test_an_order_that_is_not_the_expected_one_is_told() -> None:
    assert reversals(made({**STEPS_S, "wfbp": 0.44, "kvstore": 0.47})) == []
    rows = made({"none": 0.3, "p3": 0.45, "slicing": 0.41, "wfbp": 0.408})
    found = reversals(rows)
    assert [(it.slower.strategy, it.faster.strategy) for it in found] == [("p3", "slicing")]
    assert found[0].explanation == "not simulated"
    predicted = [
        replace(row, source="simulated", step_s_median=step_s)
        for row, step_s in zip(rows[1:3], (0.4, 0.41), strict=True)
    ]
    assert "expected order" in reversals([*rows, *predicted])[0].explanation
    rows[1] = replace(rows[1], step_s=[0.40, 0.50])
    assert "differ by 22" in reversals(rows)[0].explanation


def test_what_is_printed_names_gains(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=110).print(*BANDWIDTH.tables(Findings(made(STEPS_S))))
    assert "resnet50 at 4 Gbit/s" in (out := capsys.readouterr().out)
    assert "1.143" in out and "ddp" not in out.lower().replace("best ddp", "").replace("x ddp", "")


def test_time_left_follows_the_pace() -> None:
    now = [100.0]
    left = TimeLeft(1000.0, lambda: now[0])
    assert left.left_s == 1000.0
    now[0], left.done_s = 300.0, 100.0
    assert left.left_s == 1800.0, "a tenth took twice as long as estimated"
    left.done_s = 1000.0
    assert left.left_s == 0.0
    assert [format_duration(it) for it in (10, 60, 600, 6300)] == [
        "less than a minute",
        "about 1 min",
        "about 10 min",
        "about 1 h 45 min",
    ]


def test_progress_counts_runs_and_tells_the_time_left(
    tmp_path: Path, simulated: list[Simulation]
) -> None:
    console = quiet()
    with runs_progress(console) as progress:
        progress.plan(2, 600.0)
        progress.within_run(150.0)
        progress.run_ended(300.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "2 runs to measure: about 10 min" in text and "1 of 2 runs" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bandwidth", "--rate", "fast"], "4gbit"),
        (["bandwidth", "--rate", "4gbit,-1gbit"], "-1gbit"),
        (["bandwidth", "--workload", "alexnet"], "resnet50"),
        (["bandwidth", "--strategy", "p4"], "p4"),
        (["bandwidth", "--dilation", "0"], "dilation"),
        (["bandwidth", "--steps", "0"], "steps"),
        (["bandwidth", "--workers", "1"], "workers"),
        (["bandwidth", "--rate", "1mbit", "--dilation", "10"], "1 Mbit/s"),
        (["utilization", "--rate", "fast"], "4gbit"),
        (["utilization", "--workload", "inception_v3"], "sockeye"),
        (["scaling", "--workers", "two"], "2,4,8"),
        (["scaling", "--rate", "4gbit,5gbit"], "4gbit"),
        (["slices", "--slice-elems", "50k"], "50000"),
        (["slices", "--slice-elems", "0"], "50000"),
    ],
)
def test_wrong_arguments_end_with_two_and_make_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    output = tmp_path / "results"
    status, _, errors = run(monkeypatch, capsys, "lab", *arguments, "--output", str(output))
    assert status == 2 and message in errors and "Traceback" not in errors
    assert not output.exists()


def test_a_file_in_place_of_the_folder_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "results"
    path.write_text("mine")
    status, _, errors = run(monkeypatch, capsys, "lab", "bandwidth", "--output", str(path))
    assert status == 2 and "--output" in errors and path.read_text() == "mine"


def test_rows_that_cannot_be_written_leave_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    one, other = made({"none": 0.3, "p3": 0.35})
    save_rows([one], path)
    monkeypatch.setattr(Path, "replace", lambda *_: os.stat("/dev/null/nothing"))
    with pytest.raises(LabError, match=r"results\.json"):
        save_rows([other], path)
    assert read_rows(path) == [one] and list(tmp_path.iterdir()) == [path]
