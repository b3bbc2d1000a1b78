"""Slices on fewer ranks than train, simulated and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlane.planner.plan import Plan
from gradlane.planner.settings import ClusterFacts, Settings
from gradlane.whatif.grid import Row, evaluate
from gradlane.whatif.profiles import synthetic_profile
from gradlane.whatif.simulation import Cluster
from tests.command_line import run

SLOW_BPS = 1e9


def row(servers: int | None) -> Row:
    cluster = Cluster(workers=4, rate_bps=SLOW_BPS, servers=servers, free_host=True)
    return evaluate(synthetic_profile("resnet50", 0.3), [cluster])[0]


def test_fewer_servers_are_slower_where_the_network_decides() -> None:
    rows = {servers: row(servers) for servers in (1, 2, None)}
    # (N + S - 2) / S of the model through the port of a server: 3, 2, and 1.5 where all are.
    bounds = [rows[servers].bound_step_s for servers in (1, 2, None)]
    assert bounds == pytest.approx([bounds[2] * 2, bounds[2] * 4 / 3, bounds[2]], rel=1e-3)
    assert rows[1].step_s > rows[2].step_s > rows[None].step_s
    assert all(one.step_s > one.bound_step_s for one in rows.values())


def test_more_servers_than_workers_are_refused() -> None:
    with pytest.raises(ValueError, match="5 servers of 4 ranks"):
        row(5)


def test_the_commands_take_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, made = tmp_path / "rows.json", tmp_path / "plan.json"
    both = ["resnet50", "--workers", "4", "--rate", "1gbit", "--servers", "2"]
    assert (
        run(monkeypatch, capsys, "whatif", *both, "--strategy", "p3", "--json", str(rows))[0] == 0
    )
    assert json.loads(rows.read_text())["rows"][0]["servers"] == 2
    poseidon = ("--plan", "poseidon", "--json", str(made))
    status, printed, _ = run(monkeypatch, capsys, "plan", *both, *poseidon)
    assert status == 0
    assert "2 of them servers" in " ".join(printed.split())
    plan = json.loads(made.read_text())
    assert plan["cluster"]["servers"] == 2


def test_plan_files_keep_the_servers() -> None:
    facts = ClusterFacts(4, 1e9, servers=3)
    plan = Plan("any", facts, "given", Settings(), ())
    assert plan.to_json()["cluster"]["servers"] == 3
    assert (
        "servers"
        not in Plan("any", ClusterFacts(4, 1e9), "given", Settings(), ()).to_json()["cluster"]
    )
    with pytest.raises(ValueError, match="servers is 5; use 1 to 4"):
        ClusterFacts(4, 1e9, servers=5)
