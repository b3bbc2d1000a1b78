"""Updates by ranks that train nothing: the bits of servers that train, in any program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.built import needs_core
from tests.training.model.pool import RankPool
from tests.training.serving.roles import digests_of

pytestmark = needs_core
MODULE = "tests.training.serving.update_programs"

EVENTS: dict[str, dict[str, int]] = {
    "plain": {},
    "accumulate": {"accumulate": 3},
    "program-writes": {"halve": 3},
    "goes-back": {"save": 3, "load": 5},
    "forgets": {"save": 2, "forget": 4},
}


def run(kind: str, model_name: str = "awkward", **more: Any) -> dict[str, Any]:
    return {"model_name": model_name, "kind": kind, "steps": 6, "events": {}, **more}


RUNS = [
    *(run(kind, events=events) for kind in ("sgd", "adamw") for events in EVENTS.values()),
    # State of short floats travels in halves.
    run("adamw", "bf16", events=EVENTS["goes-back"]),
    run("sgd", "f16", events={**EVENTS["goes-back"], "halve": 4}),
    run("adamw", "wide", steps=3, strategy="kvstore", seed=3),
    run("sgd", "wide", steps=3, strategy="deferred-pull"),
    run("sgd", "wide", steps=3, strategy="wfbp", events={"halve": 2}),
    run("adamw", "wide", steps=3, codec="qsgd:bits=8", seed=4, events={"save": 2}),
]


def trained(pool: RankPool, workers: int, servers: int, runs: list[dict[str, Any]]) -> list[Any]:
    """Train on servers apart, or, with 0 servers, on those that train."""
    return digests_of(pool, MODULE, workers, servers, runs)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2)])
def test_servers_that_train_nothing_change_no_bit(
    pool: RankPool, workers: int, servers: int
) -> None:
    expected = trained(pool, workers, 0, RUNS)
    assert all(result == expected[0] for result in expected)
    # Whatever happens in a run shows in its parameters.
    assert len({parameters for parameters, _, _ in expected[0]}) == len(RUNS)
    results = trained(pool, workers, servers, RUNS)
    for result in results[:workers]:
        for found, wanted, options in zip(result, expected[0], RUNS, strict=True):
            assert found == wanted, options
    served = [one for result in results[workers:] for one in result[0]]
    assert len(served) == servers and all(channel["owned_bytes"] > 0 for (channel,) in served)


@pytest.mark.parametrize("servers", [0, 1])
def test_a_model_that_is_prepared_again_keeps_its_state(pool: RankPool, servers: int) -> None:
    kinds = [("sgd", "awkward"), ("adamw", "bf16")]
    runs = [run(*kind, events=events) for events in ({}, {"again": 4}) for kind in kinds]
    for result in trained(pool, 2, servers, runs)[:2]:
        plain, again = ([one[:2] for one in half] for half in (result[:2], result[2:]))
        assert again == plain


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_checkpoint_goes_on_with_any_servers(pool: RankPool, tmp_path: Path, kind: str) -> None:
    def run_until(steps: int, folder: Path) -> dict[str, Any]:
        folder.mkdir(exist_ok=True)
        return run(kind, steps=steps, checkpoint_folder=str(folder), checkpoint_every=3)

    for number, (before, after) in enumerate([(1, 2), (1, 0), (0, 1)]):
        whole = trained(pool, 2, 0, [run_until(7, tmp_path / f"whole-{number}")])[0][0]
        folder = tmp_path / str(number)
        trained(pool, 2, before, [run_until(4, folder)])
        for ((parameters, state, steps),) in trained(pool, 2, after, [run_until(7, folder)])[:2]:
            assert ((parameters, state), steps) == (whole[:2], 4), (before, after)


@pytest.mark.parametrize(
    ("how", "words"),
    [("lr", 'lr=0.25 of ".*"'), ("parameters", "6 parameters that its program has changed")],
)
def test_ranks_that_update_differently_are_named_everywhere(
    pool: RankPool, how: str, words: str
) -> None:
    for result in pool.run(f"{MODULE}:differ", ranks=3, how=how):
        # The server may hear either first.
        said = rf"rank 1 has {words} in step 3 and rank 0|in step 3 and rank 1 {words}: what"
        assert re.search(said, result), result


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("uncounted", r"parameter '.*weight' .*\.data\.mul_.*torch\.no_grad"),
        ("clip", r'session\.clip_grad_norm_\(\) with update="server"'),
        ("scale", r"\.grad of .* in step 3: with update=\"server\""),
    ],
)
def test_programs_that_servers_cannot_follow_are_refused(
    pool: RankPool, how: str, words: str
) -> None:
    results = pool.run(f"{MODULE}:differ", ranks=3, how=how)
    # Who is refused first tells the others.
    assert any(re.match(f"UsageError: {words}", result) for result in results), results
    for result in results:
        assert re.search(words, result), result
