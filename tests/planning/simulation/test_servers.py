"""Slices on fewer ranks than train, simulated and planned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlane.planning.schemes.costs import Counts, Layer, costs_of
from gradlane.planning.schemes.step_time import NodeCluster, hybrid_step
from gradlane.planning.simulation.grid import SimulatedRow, evaluate
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster
from gradlane.training.options.server_places import parse_servers
from gradlane.training.plans.plan import Plan, read_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.command_line import run

SLOW_BPS = 1e9


def row(servers: int | None) -> SimulatedRow:
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


def test_servers_apart_have_ports_of_their_own() -> None:
    def apart(serving: int) -> SimulatedRow:
        cluster = Cluster(workers=4, rate_bps=SLOW_BPS, serving=serving, free_host=True)
        return evaluate(synthetic_profile("resnet50", 0.3), [cluster])[0]

    rows = {serving: apart(serving) for serving in (2, 4, 6)}
    # 4 / S of the model through a server's port, and one model through a worker's.
    shared_s = row(None).bound_step_s
    bounds = [rows[serving].bound_step_s for serving in (2, 4, 6)]
    assert bounds == pytest.approx([shared_s * 4 / 3, shared_s * 2 / 3, shared_s * 2 / 3], rel=0.02)
    for one in rows.values():
        assert 1.0 <= one.step_s / one.bound_step_s < 1.4
    assert rows[2].step_s > rows[4].step_s
    assert rows[4].step_s < row(None).step_s
    assert (rows[2].workers, rows[2].servers, rows[2].serving) == (4, None, 2)


def test_the_commands_take_servers_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, made = tmp_path / "rows.json", tmp_path / "plan.json"
    both = ["vgg19", "--workers", "4", "--rate", "1gbit", "--servers", "separate=2"]
    status, _, _ = run(
        monkeypatch, capsys, "whatif", *both, "--strategy", "p3", "--json", str(rows)
    )
    assert status == 0
    assert json.loads(rows.read_text())["rows"][0]["serving"] == 2
    poseidon = ("--plan", "poseidon", "--json", str(made))
    status, printed, _ = run(monkeypatch, capsys, "plan", *both, *poseidon)
    assert status == 0
    assert "4 workers, 2 more, which only serve, at" in " ".join(printed.split())
    assert read_plan(str(made)).facts.serving == 2
    plan = json.loads(made.read_text())
    assert (plan["cluster"]["serving"], "servers" in plan["cluster"]) == (2, False)
    status, _, errors = run(monkeypatch, capsys, "plan", *both[:-1], "separate=0")
    assert (status, "separate=3 for ranks that only serve" in errors) == (2, True)


def test_poseidons_rule_counts_nodes_that_are_either() -> None:
    elements = 4096 * 4096
    shapes = ((4096, 4096),)
    layer = Layer("fc", 0, "Linear", ("fc.weight",), shapes, elements, 4 * elements, 0.0, 0.0)
    floats = {cost.scheme: cost.node_floats for cost in costs_of(layer, Counts(32, 8, 4, True))}
    # Table 1: a server's 2 P1 MN / P2 is more than a worker's 2 MN.
    assert floats["ps"] == 2 * 8 * 4096**2 / 4
    assert floats["sfb"] == 2 * 32 * 7 * (4096 + 4096)
    more = costs_of(layer, Counts(32, 8, 16, True), ("ps",))[0]
    assert more.node_floats == 2 * 4096**2
    nodes = NodeCluster(8, 1e9, serving=4)
    step = hybrid_step([layer], {"fc": "ps"}, nodes, batch_rows=32, compute_s=0.0)
    assert step.node_bytes == (2.0 * 4 * elements,) * 8 + (4.0 * 4 * elements,) * 4


@pytest.mark.parametrize("text", ["", "0", "separate=", "separate=x", "-1", "apart=2"])
def test_what_is_no_number_of_servers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="use a number of ranks"):
        parse_servers(text)
    assert parse_servers(None) == (None, 0)
    assert parse_servers("3") == (3, 0)
    assert parse_servers("separate=3") == (None, 3)
