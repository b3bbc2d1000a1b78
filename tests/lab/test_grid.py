"""The prediction grid: measured in pieces, continued, and never measured twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.calibration.grid import CELLS, cells_of, in_grid_order
from gradlane.lab.calibration.prediction_grid import auto_table
from gradlane.lab.runs.cells import (
    STEPS,
    CellsProgress,
    measure_missing,
    missing_strategies,
    still_missing,
    with_compute_times,
)
from gradlane.lab.runs.rows import Row, compact, read_rows
from tests.lab.fake_runs import FakeMachine, fake_row


def measure(machine: FakeMachine, path: Path, budget_s: float) -> int:
    return measure_missing(
        cells_of(["resnet50"]),
        path,
        budget_s=budget_s,
        progress=CellsProgress(),
        now=machine.now,
        run=machine.run,
    )


def test_the_grid_is_what_the_predictions_are_tested_on() -> None:
    for workload in ("resnet50", "vgg19", "inception_v3", "sockeye"):
        cells = cells_of([workload])
        assert len(cells) == 5
        assert all({"none", "p3", "slicing", "kvstore", "wfbp"} <= {*it.strategies} for it in cells)
        assert all(it.rate_bps / it.dilation <= 705e6 for it in cells)
    assert len(CELLS) == 20
    over_lanes = [name for cell in CELLS for name in cell.strategies if "/lanes=" in name]
    assert len(over_lanes) == len(CELLS), "one drawn for each cell"
    lanes, strategies = ({name.split("/lanes=")[part] for name in over_lanes} for part in (1, 0))
    assert lanes == {"2", "3", "4"} and strategies == {"p3", "slicing", "kvstore", "wfbp"}
    with pytest.raises(ValueError, match="'vgg16' is not in the grid"):
        cells_of(["vgg16"])


def test_other_strategies_can_be_measured_in_its_cells() -> None:
    cells = cells_of(["resnet50"], ["p3", "auto", "auto:any-rounding", "ddp-gloo:25"])
    names = ("none", "p3", "auto", "auto:any-rounding", "ddp-gloo:25")
    assert [cell.strategies for cell in cells] == [names] * 5
    options = cells[0].options(names)
    warmups = {one.text: options.warmup_of(one) for one in options.strategies}
    # Seven steps in which a plan is found, three in which priorities come into force again.
    assert (warmups["auto"], warmups["auto:any-rounding"]) == (7 + 3, 7 + 3)
    assert (warmups["p3"], warmups["none"]) == (3, 2)
    assert cells[0].run_estimate_s("auto") > cells[0].run_estimate_s("p3")
    with pytest.raises(ValueError, match="no strategy 'p4'"):
        cells_of([], ["p4"])


def row_of(strategy: str, step_s: float, **more: Any) -> Row:
    cell = {"workload": "resnet50", "rate_bps": 4e9, "workers": 4, "dilation": 6.7}
    row = {"strategy": strategy, "step_s_median": step_s, "codec": "raw", "cpu_bound": False}
    return Row.from_json({**cell, **row, **more})


def test_auto_stands_beside_the_best_fixed_strategy_with_the_same_bits() -> None:
    plan = {
        "settings": {"strategy": "ring", "slice_elems": 8192},
        "prediction": {"step_s": 6.7 * 0.327},
        "schemes": "ring+sfb",
    }
    rows = [
        row_of("p3", 0.35),
        row_of("slicing", 0.43),
        row_of("ring", 0.33),
        row_of("ddp-gloo:25", 0.2),
        row_of("asgd", 0.1),
        row_of("p3", 0.1, rate_bps=8e9),
        row_of("p3", 0.1, cpu_bound=True),
        row_of("auto", 0.343, metrics={"plan": {**plan, "schemes": "ps"}}),
        row_of("auto:any-rounding", 0.3366, metrics={"plan": plan}),
        row_of("auto", 0.1, workload="vgg19"),
    ]
    table = auto_table(rows).splitlines()[2:]
    assert table == [
        "| resnet50 | 4 Gbit/s | auto | 350.0 ms (p3) | 343.0 ms | -2.0 % | 327.0 ms "
        "| ring, slices of 8,192 |",
        "| resnet50 | 4 Gbit/s | auto:any-rounding | 330.0 ms (ring) | 336.6 ms | +2.0 % "
        "| 327.0 ms | ring, ring+sfb, slices of 8,192 |",
        "| vgg19 | 4 Gbit/s | auto | - | 100.0 ms | - | - | - |",
    ]
    assert auto_table([row_of("p3", 0.35)]) == ""


def test_a_row_keeps_what_a_plan_chose() -> None:
    made = fake_row(cells_of(["resnet50"], ["auto"])[0].options(["auto"]), "auto")
    choices = [{"setting": "schemes", "value": "ps+sfb"}, {"setting": "strategy", "value": "p3"}]
    plan = {"settings": {}, "prediction": {}, "summary": "s", "choices": choices, "model": "m"}
    kept = compact(replace(made, metrics={"plan": plan, "wait_s": 1.0, "peers": []})).metrics
    found = {"settings": {}, "prediction": {}, "summary": "s", "schemes": "ps+sfb"}
    assert kept == {"wait_s": 1.0, "plan": found}


def test_it_is_measured_in_pieces_and_nothing_twice(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    machine = FakeMachine()
    total = still_missing(cells_of(["resnet50"]), [])
    missing, calls = total, 0
    while missing:
        left = measure(machine, path, budget_s=100.0)
        assert left < missing, "every call measures something"
        missing, calls = left, calls + 1
    assert calls > 3
    assert len(machine.runs) == len(set(machine.runs)) == total
    rows = read_rows(path)
    assert len(rows) == total
    assert not any(row.has("utilization_over_time") for row in rows)
    assert rows[0].metrics == {"tx_bytes": 7} and rows[0].steps == STEPS
    assert measure(machine, path, budget_s=100.0) == 0 and len(machine.runs) == total


def test_an_interrupted_run_keeps_what_it_had(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    machine = FakeMachine(fails_after=2)
    with pytest.raises(KeyboardInterrupt):
        measure(machine, path, budget_s=1e9)
    assert [row.strategy for row in read_rows(path)] == ["none", "p3"]
    again = FakeMachine()
    measure(again, path, budget_s=1e9)
    assert not set(machine.runs) & set(again.runs)


def test_rows_of_a_busy_machine_are_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    cell = cells_of(["resnet50"])[0]
    assert measure(FakeMachine(busy=True), path, budget_s=1.0) == 5 * 8
    assert missing_strategies(cell, read_rows(path)) == list(cell.strategies)
    assert with_compute_times(read_rows(path)) == []


def test_rows_get_the_compute_time_of_their_cell(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    measure(FakeMachine(), path, budget_s=1e9)
    rows = in_grid_order(with_compute_times(read_rows(path)))
    assert [row.strategy for row in rows[:4]] == ["p3", "slicing", "kvstore", "wfbp"]
    assert {row.compute_s for row in rows} == {0.3}


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    assert read_rows(path) == []
    for text in ("{", "{}", json.dumps([{"strategy": "p3"}])):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"grid\.json"):
            read_rows(path)


def test_slower_ports_and_more_steps_take_longer() -> None:
    cell = cells_of(["vgg19"])[0]
    faster = replace(cell, rate_bps=2 * cell.rate_bps)
    longer = replace(cell, steps=cell.steps + 1)
    assert longer.run_estimate_s("p3") > cell.run_estimate_s("p3") > faster.run_estimate_s("p3")
    assert cell.estimate_s() > sum(map(cell.run_estimate_s, cell.strategies))
