"""Variants of large clusters: simulated once, for one step, with the same verdict."""

from __future__ import annotations

import io
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from gradlane.cli import late_progress, whatif
from gradlane.cli.late_progress import LateProgress
from gradlane.cli.whatif import run_whatif
from gradlane.planning.advice.causes import find_cause, first_variants, limit_beyond_link
from gradlane.planning.advice.variants import Variant, Variants
from gradlane.planning.simulation import scenarios as module
from gradlane.planning.simulation.grid import SimulatedRow, evaluate, simulate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.scenarios import Cluster
from gradlane.planning.simulation.threads import in_threads
from tests.planning.simulation.small_profile import SMALL

WORKERS = 24


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster(WORKERS, 2e8),
        Cluster(WORKERS, 1e13, "wfbp", latency_s=0.3, free_host=True),
        Cluster(WORKERS, 1e11, compute_spread=0.4, seed=3),
        Cluster(WORKERS, 2e8, "ring"),
        Cluster(WORKERS, 2e8, codec="qsgd:bits=8"),
    ],
    ids=["network", "latency", "ranks", "ring", "codec"],
)
def test_one_step_and_large_frames_give_the_verdict_of_three(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    (row,) = evaluate(SMALL, [cluster])
    slow = Variants(SMALL)
    expected = find_cause(slow, cluster, row, link_is_enough=False)
    limit = limit_beyond_link(slow, cluster)
    monkeypatch.setattr(module, "MANY_RANKS", WORKERS)
    fast = Variants(SMALL)
    found = find_cause(fast, cluster, row, link_is_enough=False)
    assert found.bottleneck == expected.bottleneck
    assert limit_beyond_link(fast, cluster) == limit
    for name in ("by_free_host", "by_faster_link", "by_fewer_bytes", "together"):
        one, other = (getattr(it, f"saved_{name}_s") for it in (found, expected))
        assert one == pytest.approx(other, abs=0.08 * row.step_s), name


def test_what_is_known_is_not_simulated_again() -> None:
    done: list[None] = []
    variants = Variants(SMALL, 2, lambda: done.append(None))
    cluster = Cluster(4, 2e8)
    (row,) = evaluate(SMALL, [cluster])
    variants.simulate(first_variants(cluster))
    assert len(done) == len(first_variants(cluster)) == 4
    find_cause(variants, cluster, row, link_is_enough=False)
    assert len(done) == 4
    one, other = variants.simulate([Variant(cluster), Variant(cluster)])
    assert one == other == row and len(done) == 5


def test_threads_change_no_row() -> None:
    clusters = [Cluster(4, rate, strategy) for rate in (1e8, 1e9) for strategy in ("p3", "wfbp")]
    seen = []
    rows = evaluate(SMALL, clusters, lambda row: seen.append(row.rate_bps), threads=3)
    assert rows == evaluate(SMALL, clusters) == [simulate(SMALL, one)[0] for one in clusters]
    assert seen == [one.rate_bps for one in clusters]


def test_a_refusal_is_raised_from_a_thread() -> None:
    clusters = [Cluster(4, 1e9), replace(Cluster(4, 1e9), rate_bps=-1.0)]
    with pytest.raises(ValueError, match="rate_bps"):
        evaluate(SMALL, clusters, threads=2)
    assert list(in_threads(abs, [-1, 2, -3], 2)) == [1, 2, 3]


@pytest.mark.parametrize(("takes_s", "is_shown"), [(0.0, False), (0.5, True)])
def test_a_bar_comes_after_a_while(
    monkeypatch: pytest.MonkeyPatch, takes_s: float, is_shown: bool
) -> None:
    monkeypatch.setattr(late_progress, "DELAY_S", 0.05 if is_shown else 60.0)
    text = io.StringIO()
    with LateProgress(Console(file=text, force_terminal=True), "simulating") as progress:
        progress.expect(2)
        progress.advance()
        time.sleep(takes_s)
    assert ("simulating" in text.getvalue()) == is_shown
    assert ("1/2" in text.getvalue()) == is_shown


@pytest.mark.parametrize("strategies", [["p3"], ["ddp", "p3"]])
def test_variants_beside_a_lone_large_cluster_change_no_answer(
    strategies: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "MANY_RANKS", WORKERS)
    begun: list[int] = []
    simulate_all = Variants.simulate

    def note(variants: Variants, wanted: Iterable[Variant]) -> list[SimulatedRow]:
        wanted = list(wanted)
        begun.append(len(wanted))
        return simulate_all(variants, wanted)

    monkeypatch.setattr(Variants, "simulate", note)

    def answer(name: str) -> str:
        path = tmp_path / name
        run_whatif(
            SMALL,
            Grid(workers=[WORKERS], rates_bps=[2e8], strategies=strategies),
            Cluster(workers=1, rate_bps=0.0),
            console=Console(quiet=True),
            json_path=path,
        )
        return path.read_text(encoding="utf-8")

    beside = answer("beside.json")
    assert begun[0] == 5 <= begun[1], "the five of p3, and then all that are missing"
    monkeypatch.setattr(whatif, "variants_ahead", lambda clusters: [])
    assert answer("after.json") == beside
