"""Simulations through the compiled core, rows, answers and the command."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.advice.advice import (
    ClusterAdvice,
    advise,
    required_links,
    text_of_required_links,
)
from gradlane.planning.advice.causes import Cause
from gradlane.planning.simulation.grid import SimulatedRow, clusters_of, evaluate
from gradlane.planning.simulation.lists import (
    Grid,
    parse_compressions,
    parse_names,
    parse_rates,
    parse_workers,
    read_additions,
)
from gradlane.planning.simulation.profiles import Profile, read_profile, synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of
from tests.command_line import run
from tests.paths import SHARED
from tests.planning.simulation.small_profile import SMALL

DATA = SHARED / "data"


def grid(profile: Profile, **changes: Any) -> list[SimulatedRow]:
    base = changes.pop("base", Cluster(workers=1, rate_bps=0.0))
    settings: dict[str, Any] = {"workers": [4], "rates_bps": [1e9], "strategies": ["p3"]}
    return evaluate(profile, clusters_of(Grid(**{**settings, **changes}), base))


def no_cause(row: SimulatedRow, link_is_enough: bool) -> Cause:
    """In place of simulations that find what a row waits for."""
    return Cause("network", row.step_s - row.compute_s, 0.0, 0.0, 0.0, 0.0)


def host_beyond(row: SimulatedRow) -> str:
    """No link is fast enough."""
    return "host"


def link_is_enough(row: SimulatedRow) -> str:
    """A link that was not simulated is fast enough."""
    return "none"


def advice_of(rows: list[SimulatedRow]) -> list[ClusterAdvice]:
    return advise(rows, required_links(rows, host_beyond), no_cause)


def test_rows_hold_what_follows_from_each_other() -> None:
    rows = grid(
        SMALL,
        workers=[1, 4],
        rates_bps=[2e8, 1e9, 1e10],
        strategies=["p3", "slicing", "kvstore", "wfbp", "deferred-pull", "ring", "ring-fused"],
        compressions=[1.0, 4.0],
    )
    assert len(rows) == 2 * 3 * 7 * 2
    for row in rows:
        assert row.step_s >= row.bound_step_s * (1 - 1e-9), row
        assert row.scaling_factor == pytest.approx(row.compute_s / row.step_s)
        assert row.samples_per_s == pytest.approx(16 * row.workers / row.step_s)
        if row.workers == 1:
            assert row.scaling_factor == pytest.approx(1.0, abs=0.01)


def test_faster_links_and_fewer_bytes_never_hurt() -> None:
    rates = [2e8, 4e8, 8e8, 16e8]
    steps = [row.step_s for row in grid(SMALL, rates_bps=rates)]
    assert steps == sorted(steps, reverse=True)
    steps = [row.step_s for row in grid(SMALL, rates_bps=[2e8], compressions=[1, 2, 4, 8])]
    assert steps == sorted(steps, reverse=True)


def test_the_same_scenario_gives_the_same_report() -> None:
    scenario = scenario_of(SMALL, Cluster(4, 1e9, "kvstore", compute_spread=0.1, seed=5))
    first = run_scenario(scenario)
    assert run_scenario(scenario) == first
    other = scenario_of(SMALL, Cluster(4, 1e9, "kvstore", compute_spread=0.1, seed=6))
    assert run_scenario(other) != first


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="p4"):
        scenario_of(SMALL, Cluster(4, 1e9, "p4"))
    for latency_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match=r"latency-s is .*use 0 to 10 seconds"):
            Cluster(4, 1e9, latency_s=latency_s)
    with pytest.raises(ValueError, match="workers-per-node is 0"):
        Cluster(4, 1e9, "ring-fused", topology="hierarchical", workers_per_node=0)
    with pytest.raises(ValueError, match="nodes of 8"):
        scenario_of(SMALL, Cluster(12, 1e9, "ring-fused", topology="hierarchical"))
    with pytest.raises(ValueError, match="rate_bps"):
        run_scenario(scenario_of(SMALL, Cluster(4, -1.0)))
    broken = scenario_of(SMALL, Cluster(4, 1e9))
    broken["profile"]["tensors"][2]["ready_s"] = 9.0
    with pytest.raises(ValueError, match=r"tensors\[2\]"):
        run_scenario(broken)


def test_many_workers_are_folded() -> None:
    cluster = Cluster(2000, 10e9, "p3", steps=1)
    report = run_scenario(scenario_of(SMALL, cluster))["report"]
    assert report["workers"] == 2000
    assert report["simulated_ranks"] < 100


def test_the_answer_names_the_cheapest_change() -> None:
    profile = synthetic_profile("resnet50")
    rows = grid(
        profile,
        rates_bps=[1e9, 5e9, 40e9],
        strategies=["wfbp", "p3"],
        compressions=[1.0, 16.0],
    )
    slow, middle, fast = advice_of(rows)
    assert slow.bottleneck == middle.bottleneck == "network"
    assert slow.cheapest is not None and slow.cheapest.kind == "link"
    assert slow.cheapest.rate_bps == 5e9
    assert slow.cheapest.strategy == "p3"
    assert [change.kind for change in slow.alternatives] == ["compression"]
    assert middle.cheapest is not None and middle.cheapest.kind == "strategy"
    assert "p3, exact and free" in middle.text
    # What else would do is told without p3, which needs nothing else.
    assert [change.strategy for change in middle.alternatives] == ["wfbp", "wfbp"]
    assert fast.bottleneck == "none"
    assert fast.cheapest is not None and fast.cheapest.kind == "nothing"
    assert "not the bottleneck" in fast.text
    assert any("16 times fewer bytes" in text for text in fast.not_worth)


def test_the_answer_says_when_nothing_helps() -> None:
    (row,) = grid(SMALL, strategies=["wfbp"], rates_bps=[1e7])
    (answer,) = advice_of([row])
    assert answer.cheapest is None
    assert "Nothing simulated here reaches 95 %, or more than wfbp." in answer.text


def test_a_faster_link_and_fewer_bytes_together_are_told_where_neither_is_enough() -> None:
    (row,) = grid(SMALL, strategies=["wfbp"], rates_bps=[1e8])

    def answer_of(shares: dict[tuple[float, float], float]) -> ClusterAdvice:
        rows = [
            replace(row, rate_bps=rate, compression=times, scaling_factor=share)
            for (rate, times), share in shares.items()
        ]
        return advice_of(rows)[0]

    neither = {(1e8, 1.0): 0.1, (1e8, 4.0): 0.5, (1e9, 1.0): 0.8}
    answer = answer_of({**neither, (1e9, 4.0): 0.99})
    assert answer.cheapest is not None and answer.cheapest.kind == "link and compression"
    assert "a link of 1 Gbit/s and 4 times fewer bytes with wfbp (99 %)" in answer.text
    assert "Nothing simulated here reaches 95 %" in answer_of({**neither, (1e9, 4.0): 0.9}).text
    answer = answer_of({**neither, (1e9, 1.0): 0.97, (1e9, 4.0): 0.99})
    assert answer.cheapest is not None and answer.cheapest.kind == "link"
    assert answer.alternatives == []


def test_a_formula_is_not_advised_before_a_simulation() -> None:
    rows = grid(SMALL, strategies=["wfbp", "p3", "ring-fused"], rates_bps=[1e8])
    scaled = {"wfbp": 0.5, "p3": 0.96, "ring-fused": 1.0}
    (answer,) = advice_of([replace(row, scaling_factor=scaled[row.strategy]) for row in rows])
    assert answer.cheapest is not None and answer.cheapest.strategy == "p3"


def test_needs_are_the_rates_from_which_on_the_goal_is_reached() -> None:
    (row,) = grid(SMALL)
    shares = {1e9: 0.96, 2e9: 0.90, 3e9: 0.95, 4e9: 0.99}
    rows = [replace(row, rate_bps=rate, scaling_factor=it) for rate, it in shares.items()]
    (need,) = required_links(rows, host_beyond)
    assert (need.rate_bps, need.from_slowest) == (3e9, False)
    assert text_of_required_links([need]) == ["4 workers: 95 % takes 3 Gbit/s with p3."]
    assert required_links(rows[2:], host_beyond)[0].from_slowest
    # What a row shows is never denied, even where a faster link was slower by chance.
    assert required_links(rows[:2], host_beyond)[0].rate_bps == 1e9
    (need,) = required_links(rows[1:2], link_is_enough)
    assert (need.rate_bps, need.any_link, need.limit_beyond) == (None, True, "none")
    other = replace(need, strategy="wfbp")
    assert text_of_required_links([need, other, replace(need, strategy="ring", rate_bps=1e9)]) == [
        "4 workers: 95 % takes a faster link than was simulated with p3, wfbp; 1 Gbit/s with ring."
    ]
    (never,) = required_links(rows[1:2], host_beyond)
    late = replace(never, strategy="ring", codec="f16", limit_beyond="latency")
    assert text_of_required_links([replace(need, strategy="wfbp"), never, late]) == [
        "4 workers: 95 % takes a faster link than was simulated with wfbp; no link, however fast, "
        "reaches 95 % with p3, where then the host is the limit; no link, however fast, reaches "
        "95 % with ring f16, where then the latency is the limit."
    ]


def test_lists_are_read_as_people_write_them() -> None:
    assert parse_workers("2,4,8") == [2, 4, 8]
    assert parse_workers("3..17") == [3, 4, 8, 16, 17]
    assert parse_rates("1..4gbit") == [10**9, 2 * 10**9, 3 * 10**9, 4 * 10**9]
    assert parse_rates("500mbit..2gbit, 10g") == [5 * 10**8, 10**9, 2 * 10**9, 10**10]
    assert parse_rates("1,4,10gbit") == [10**9, 4 * 10**9, 10**10]
    assert parse_compressions("1, 2.5") == [1.0, 2.5]
    assert parse_names("p3,p3", ("p3", "wfbp"), "strategy") == ["p3"]


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (parse_workers, "0"),
        (parse_workers, "four"),
        (parse_workers, "8..2"),
        (parse_workers, ""),
        (parse_rates, "10..1gbit"),
        (parse_rates, "fast"),
        (parse_rates, "1..fast"),
        (parse_compressions, "0.5"),
        (parse_compressions, "nan"),
    ],
)
def test_other_lists_are_refused(parse: Any, text: str) -> None:
    with pytest.raises(ValueError):
        parse(text)


def test_additions_are_read(tmp_path: Path) -> None:
    path = tmp_path / "additions.csv"
    path.write_text("elements,seconds\n20,2e-6\n10,1e-6\n", encoding="utf-8")
    assert read_additions(path) == [(10.0, 1e-6), (20.0, 2e-6)]
    path.write_text("elements,seconds\n10,soon\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 2"):
        read_additions(path)
    path.write_text("elements,seconds\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no measurements"):
        read_additions(path)


def test_the_command_prints_and_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "whatif.json"
    arguments = ("whatif", "resnet50", "--workers", "2,4", "--rate", "1gbit,5gbit")
    status, out, _ = run(monkeypatch, capsys, *arguments, "--json", str(path))
    assert status == 0
    assert "bottleneck" in out and "p3" in out
    content = json.loads(path.read_text(encoding="utf-8"))
    assert len(content["rows"]) == 8
    assert {
        "strategy",
        "codec",
        "topology",
        "workers",
        "rate_bps",
        "compression",
        "scaling_factor",
        "step_s",
        "bound_step_s",
        "samples_per_s",
    } <= set(content["rows"][0])
    assert all(0.0 < row["scaling_factor"] <= 1.0 for row in content["rows"])
    assert len(content["answers"]) == 4
    assert len(content["needs"]) == 4


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nothing.json"], "nothing.json"),
        (["resnet50", "--strategy", "p4"], "p4"),
        (["resnet50", "--codec", "magic"], "magic"),
        (["resnet50", "--workers", "many"], "many"),
        (["resnet50", "--strategy", "ring-fused", "--trace", "trace.json"], "are 20"),
        (["resnet50", "--json", "/no/such/folder/x.json"], "folder"),
        *(
            (["resnet50", "--strategy", strategy, *option], f"{option[0]} has no effect")
            for strategy, option in (
                ("ddp", ("--slice-elems", "5000")),
                ("ddp", ("--codec", "qsgd:bits=8")),
                ("ddp,ring", ("--servers", "2")),
                ("kvstore,ddp", ("--stragglers", "drop")),
                ("ring-fused", ("--straggler", "rank=1,share=0.1")),
                ("p3", ("--topology", "hierarchical")),
                ("p3", ("--workers-per-node", "4")),
                ("p3", ("--local-rate", "100gbit")),
                ("ring-fused", ("--latency-s", "0.001")),
                ("ring-fused", ("--clip",)),
                ("ring-fused", ("--free-host",)),
            )
        ),
        (["resnet50", "--strategy", "p3", "--codec", "qsgd:ring=integer"], "ring=integer"),
    ],
)
def test_wrong_arguments_end_with_status_2(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    named: str,
) -> None:
    status, _, err = run(monkeypatch, capsys, "whatif", *arguments)
    assert status == 2
    assert named in err


def test_raw_and_encoded_steps_stand_in_tables_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    arguments = ["whatif", "resnet50", "--workers", "4", "--rate", "1gbit", "--strategy", "p3"]
    codecs = ["--codec", "raw", "--codec", "qsgd:bits=4"]
    status, out, _ = run(monkeypatch, capsys, *arguments, *codecs, "--html", str(page))
    assert status == 0
    raw, encoded = out.split("gradients in qsgd:bits=4")
    for table in (raw, encoded):
        assert len(re.findall(r"│ p3 ", table)) == 1
    assert page.read_text(encoding="utf-8").count("Gradients in qsgd:bits=4. Scaling") == 1


def test_kvstore_splits_from_a_size_on() -> None:
    """Split tensors spread over all servers; whole ones wait for one of them."""

    def step_s(slice_elems: int | None) -> float:
        cluster = Cluster(4, 2e8, "kvstore", slice_elems=slice_elems)
        return float(run_scenario(scenario_of(SMALL, cluster))["report"]["step_s"])

    whole = step_s(None)
    assert step_s(1_000_000) == whole
    assert step_s(1_000) < 0.95 * whole


def test_simulating_does_not_import_torch() -> None:
    code = (
        "import sys; from gradlane.cli import whatif; "
        "from gradlane.planning.simulation import profiles; "
        "profiles.synthetic_profile('vgg19'); sys.exit('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


@pytest.mark.skipif(not DATA.is_dir(), reason="no reference data beside this checkout")
@pytest.mark.parametrize("model", ["resnet50", "vgg16"])
def test_ring_fused_agrees_with_the_reference_curves(model: str) -> None:
    """Within a twentieth of a percentage point, through profile import and command."""
    profile = read_profile(DATA / "profiles" / f"{model}-v100-bs32.json")
    additions = tuple(read_additions(DATA / "vec_add_v100.csv"))
    with (DATA / "whatif_reference.csv").open(encoding="utf-8") as file:
        expected = [row for row in csv.DictReader(file) if row["model"] == model]
    assert len(expected) == 90
    for row in expected:
        cluster = Cluster(
            workers=int(row["gpus"]),
            rate_bps=float(row["bandwidth_gbps"]) * 1e9,
            strategy="ring-fused",
            compression=float(row["compression"]),
            additions=additions,
        )
        (found,) = evaluate(profile, [cluster])
        reference = float(row["scaling_factor_reference"])
        assert found.scaling_factor == pytest.approx(reference, abs=5e-4), row
