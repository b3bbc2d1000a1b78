"""The presets utilization, scaling and slices: what is sampled, counted and concluded."""

from __future__ import annotations

import html
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradlane.lab.cluster.counters import Recording, TrafficRecord, read_process_cpu_ns
from gradlane.lab.cluster.machine import available_bytes
from gradlane.lab.runs.cells import CellsProgress
from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.rows import NO_EVIDENCE, Row, read_rows, save_rows
from gradlane.lab.runs.traffic import activity_of
from gradlane.planning.planner.search import SLICES as PLANNED_SLICES
from gradlane_papers.experiments import slices as slices_preset
from gradlane_papers.experiments.findings import Findings, completed
from gradlane_papers.experiments.preset import Preset, run_preset
from gradlane_papers.experiments.scaling import SCALING, needed_bytes, without_large_cells
from gradlane_papers.experiments.simulated import Simulation
from gradlane_papers.experiments.slices import SLICES, SWEEP, planned_slice_elems, sweeps_of
from gradlane_papers.experiments.utilization import (
    UTILIZATION,
    busiest_port,
    is_communication_bound,
    least_unused,
    ports_of,
    summed,
)
from tests.command_line import run
from tests.lab.fake_runs import FakeMachine

GBIT = 10**9
STEPS_S = {"none": 0.3, "p3": 0.35, "wfbp": 0.43, "kvstore": 0.46, "ddp-gloo:25": 0.44}


def printed(preset: Preset, rows: Sequence[Row]) -> str:
    console = Console(file=StringIO(), width=110)
    console.print(*preset.tables(Findings(rows)))
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def recording(carried: Mapping[tuple[int, str], list[int]]) -> Recording:
    """Two ports of 8 Mbit/s, 10,000 bytes in 10 ms, that carried so many bytes an interval."""
    record = TrafficRecord(2)
    totals = {key: 0 for key in carried}
    count = len(next(iter(carried.values())))
    for index in range(count + 1):
        if index > 0:
            for key, moved in carried.items():
                totals[key] += moved[index - 1]
        now_s = 5.0 + 0.01 * index
        record.add_ports(now_s, [(totals[node, "in"], totals[node, "out"]) for node in (0, 1)])
        record.add_processes(now_s, [2_000_000 * index, 500_000 * index])
        record.add_processors(now_s, (3 * index, 4 * index, index))
    end_s = 5.0 + 0.01 * count + 1e-9
    return Recording(record, [5.0, 5.0 + 0.005 * count, end_s])


CARRIED = {
    (0, "in"): [10_000, 10_000, 0, 10_000],
    (0, "out"): [10_000, 400, 499, 600],
    (1, "in"): [5_000, 0, 0, 5_000],
    (1, "out"): [5_000, 5_000, 5_000, 5_000],
}


def active_row(**fields: Any) -> Row:
    content = {
        "workload": "resnet50",
        "strategy": "p3",
        "rate_bps": 40_000_000,
        "workers": 2,
        "dilation": 4.0,
        "goodput_bps": 32e6,
        "steps": 2,
        "compute_s": 0.003,
        "step_s_median": 0.005,
        "bound_step_s": 0.0045,
        "cpu_share": 0.5,
        "cpu_bound": False,
        "source": "measured",
    }
    return replace(Row.from_json(content), activity=activity_of(recording(CARRIED), 4.0), **fields)


def test_activity_is_bytes_and_processor_time_of_each_interval() -> None:
    activity = activity_of(recording(CARRIED), 4.0)
    assert activity.received_bytes == [CARRIED[0, "in"], CARRIED[1, "in"]]
    assert activity.sent_bytes == [CARRIED[0, "out"], CARRIED[1, "out"]]
    assert activity.rank_cpu_s == [[0.002] * 4, [0.0005] * 4]
    assert activity.step_starts_s == pytest.approx([0.0, 0.005, 0.01])
    assert activity.wall_sample_gap_s_max == pytest.approx(0.01)
    assert summed([1.0, 2.0, 3.0, 4.0, 5.0], 2) == [3.0, 7.0]


def test_idle_is_below_a_twentieth_of_the_goodput() -> None:
    row = active_row()
    uses = {(port.node, port.direction): port for port in ports_of(row)}
    assert uses[0, "in"].idle_share == 0.25
    assert uses[0, "out"].idle_share == 0.5, "400 and 499 bytes are idle, 600 are not"
    assert uses[0, "in"].unused_share == pytest.approx(0.25)
    port = busiest_port(row)
    assert (port.node, port.direction, port.bytes_per_step) == (0, "in", 15_000)
    assert is_communication_bound(row)
    assert not is_communication_bound(replace(row, bound_step_s=0.003))
    # 15,000 bytes at a nominal 4 MB/s take 3.75 of the bound's 4.5 ms.
    assert least_unused(row) == pytest.approx(1 - 3.75 / 4.5)
    assert re.search(r"^ p3 .* node 0, in +25 ", printed(UTILIZATION, [row]), re.MULTILINE)


def test_the_processor_time_of_a_process_counts_all_its_threads() -> None:
    before_ns, end_s = read_process_cpu_ns(os.getpid()), time.process_time() + 0.05

    def burn() -> None:
        while time.process_time() < end_s:
            pass

    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert read_process_cpu_ns(os.getpid()) - before_ns >= 40_000_000
    with pytest.raises(OSError):
        read_process_cpu_ns(2**22 + 1)


def test_utilization_keeps_what_was_sampled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = FakeMachine(steps_s=STEPS_S)

    def run_made(options: Any, *, progress: Any, on_rows: Any, on_recording: Any) -> Any:
        def told(rows: list[Any]) -> None:
            rows[-1] = on_recording(rows[-1], recording(CARRIED))
            on_rows(rows)

        return machine.run(options, progress=progress, on_rows=told)

    monkeypatch.setattr("gradlane_papers.experiments.utilization.run_lab", run_made)
    preset = UTILIZATION.choose(workloads=["resnet50"], rates_bps=[4 * GBIT], strategies=["p3"])
    rows = run_preset(preset, PresetFolder(tmp_path), Console(file=StringIO()))
    assert [row.activity and row.activity.sent_bytes[0] for row in rows] == [CARRIED[0, "out"]] * 2
    assert "activity" not in (tmp_path / "results.csv").read_text()
    assert "bytes in and out of a port" in (tmp_path / "report.html").read_text("utf-8")


@pytest.mark.parametrize("alone_is_evidence", [True, False])
def test_a_busy_machines_use_of_ports_is_reported_and_marked(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    alone_is_evidence: bool,
) -> None:
    """Compute alone sleeps and leaves any machine idle: its row may be the only evidence."""
    path = tmp_path / "results.json"
    alone = active_row(strategy="none", preset="utilization", cpu_bound=not alone_is_evidence)
    save_rows([alone, active_row(preset="utilization", cpu_bound=True)], path)
    status, out, errors = run(monkeypatch, capsys, "report", str(path))
    assert status == 0, errors
    busy = 1 if alone_is_evidence else 2
    assert f"in {busy} of 2 runs: {NO_EVIDENCE}; marked *" in out
    page = (tmp_path / "results.html").read_text(encoding="utf-8")
    assert html.escape(f"In {busy} of 2 runs: {NO_EVIDENCE}; marked *") in page
    assert "p3 *: bytes in and out of a port" in page
    assert "p3 *" in printed(UTILIZATION, read_rows(path))


def test_rows_of_a_busy_machine_are_counted_where_others_are_left() -> None:
    rows = [active_row(strategy="none"), active_row(), active_row(strategy="wfbp", cpu_bound=True)]
    found = Findings([*rows, active_row(source="simulated")])
    assert [row.strategy for row in found.measured] == ["none", "p3"]
    assert found.note.startswith(f"in 1 of 3 runs: {NO_EVIDENCE}")
    assert Findings(rows[:2]).note == ""


def sweep_rows(steps_s: Mapping[int, float]) -> list[Row]:
    rows: list[Row] = []
    for cell in SWEEP.choose(workloads=["resnet50"], sizes=list(steps_s)).cells:
        made: list[Any] = []
        assert cell.slice_elems is not None
        machine = FakeMachine(steps_s={"p3": steps_s[cell.slice_elems]})
        machine.run(
            cell.options(["p3"]),
            progress=CellsProgress(),
            on_rows=lambda it, to=made: to.extend(it),
        )
        rows += map(SWEEP.describe, made)
    return completed(rows)


def test_a_sweep_of_a_busy_machine_is_marked(tmp_path: Path) -> None:
    busy = [replace(row, cpu_bound=True) for row in sweep_rows({1_000: 0.5, 50_000: 0.34})]
    out = printed(SWEEP, busy)
    assert re.search(r"^ 1,000 .* \* *$", out, re.MULTILINE)
    assert re.search(r"^ 50,000 .*best measured, \* *$", out, re.MULTILINE)
    page = tmp_path / "report.html"
    SWEEP.write_page(busy, page)
    text = page.read_text(encoding="utf-8")
    assert "best measured, *" in text and html.escape(f"In 2 of 2 runs: {NO_EVIDENCE}") in text


def test_a_sweep_points_out_its_optimum_and_the_plan() -> None:
    rows = sweep_rows({1_000: 0.5, 50_000: 0.34, 200_000: 0.335, 1_000_000: 0.4})
    rows = [replace(row, planned_slice_elems=50_000) for row in rows]
    (sweep,) = sweeps_of(Findings(rows))
    assert sweep.best.slice_elems == 200_000 and sweep.is_interior
    assert sweep.planned_over_best == pytest.approx(0.34 / 0.335)
    text = printed(SWEEP, rows)
    assert re.search(r"^ 200,000 .*best measured", text, re.MULTILINE)
    assert re.search(r"^ 50,000 .*planner's choice", text, re.MULTILINE)
    (flat,) = sweeps_of(Findings(sweep_rows({1_000: 0.3, 50_000: 0.34})))
    assert not flat.is_interior and flat.planned is None and flat.planned_over_best is None


def test_the_planner_is_asked_about_the_emulated_cluster() -> None:
    rows = sweep_rows({50_000: 0.34})
    size = planned_slice_elems(rows)
    assert size in SLICES, "so its choice has a measured row"
    assert set(PLANNED_SLICES) | {50_000} <= set(SLICES)


def test_a_plan_that_is_known_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = sweep_rows({50_000: 0.34, 100_000: 0.35})
    rows[0] = replace(rows[0], planned_slice_elems=25_000)
    monkeypatch.setattr(slices_preset, "search", None)
    assert [row.planned_slice_elems for row in SWEEP.finish(rows)] == [25_000, 25_000]


def test_slices_are_the_papers() -> None:
    cells = SWEEP.choose().cells
    assert {cell.workload for cell in cells} == {"resnet50", "vgg19"}
    assert [min(SLICES), max(SLICES)] == [1_000, 1_000_000]
    assert len({(cell.workload, cell.slice_elems) for cell in cells}) == 2 * len(SLICES)
    assert SWEEP.choose().estimate_s < 45 * 60
    alone = [cell for cell in cells if "none" in cell.strategies]
    assert len(alone) == 2, "compute alone is measured once for each network"


def test_scaling_measures_eight_and_simulates_a_thousand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Simulation] = []

    def run_simulation(self: Simulation) -> Row:
        asked.append(self)
        return Row.of(
            **self.inputs(),
            samples_per_s=32 * self.workers / 0.4,
            batch_size=32,
            step_s_median=0.4,
            bound_step_s=0.33,
            cpu_bound=False,
        )

    monkeypatch.setattr(Simulation, "run", run_simulation)
    preset = SCALING.choose(workloads=["resnet50"])
    assert [cell.workers for cell in preset.cells] == [2, 4, 8]
    assert preset.cells[2].rate_bps / preset.cells[2].dilation < 360e6
    machine = FakeMachine(steps_s=STEPS_S)
    rows = run_preset(
        replace(preset, run=machine.run), PresetFolder(tmp_path), Console(file=StringIO())
    )
    assert len(machine.runs) == 3 * 5
    assert all(it.is_real and it.dilation == 1.0 for it in asked)
    counts = {name: [it.workers for it in asked if it.strategy == name] for name in STEPS_S}
    assert counts["p3"][-1] == 1024 and counts["kvstore"][-1] == 256
    assert {it.strategy for it in asked} == {"p3", "wfbp", "kvstore", "ring-fused"}
    assert "1,024" in printed(SCALING, rows)
    p3 = next(row for row in Findings(rows).measured if row.strategy == "p3")
    assert p3.compute_s == 0.3


def test_real_clusters_are_simulated_without_dilation() -> None:
    real = Simulation("resnet50", "p3", 4, 10 * GBIT, 1.0, 0.3, is_real=True).run()
    ring = Simulation("resnet50", "ring-fused", 4, 10 * GBIT, 1.0, 0.3, is_real=True).run()
    assert real.step_s_median >= 0.3 and ring.step_s_median >= 0.3
    assert real.is_real and not Simulation("resnet50", "p3", 4, GBIT, 1.0, 0.3).is_row(real)


def test_cells_that_do_not_fit_into_memory_are_left_out(tmp_path: Path) -> None:
    preset = SCALING.choose(workloads=["vgg19", "resnet50"])
    largest = max(map(needed_bytes, preset.cells))
    assert 12e9 < largest < 24e9, "eight times VGG-19, and a few copies"
    kept, said = without_large_cells(preset, largest - 1)
    assert len(kept.cells) == len(preset.cells) - 1
    assert len(said) == 1 and "vgg19 on 8 workers is left out" in said[0]
    assert without_large_cells(preset, largest)[1] == []
    source = tmp_path / "meminfo"
    source.write_text("MemTotal: 9 kB\nMemAvailable:    2000 kB\n")
    assert available_bytes(source) == 2_048_000
    source.write_text("MemTotal: 9 kB\n")
    assert available_bytes(source) == float("inf")
