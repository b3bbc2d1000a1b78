"""A few random loops, all loops that were wrong once, and that the search finds what it is for."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from tests.strangers.description import Action, Loop
from tests.strangers.generate import generate
from tests.strangers.mutations import MUTATIONS, Mutation, loops_to_find
from tests.strangers.search import make_small
from tests.strangers.verdict import judge

_REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
_FIXED_SEEDS = range(24)
_FRESH_LOOPS = 20
_REAL_SEEDS = range(500, 510)


def check(loop: Loop, *, real: bool = False) -> None:
    verdict = judge(loop, real=real)
    if not verdict.is_right:
        smaller = make_small(loop, verdict, real)
        pytest.fail(f"seed {loop.seed}: {verdict.kind}\n{verdict.text}\n{smaller.to_json()}")


def test_fixed_loops() -> None:
    for seed in _FIXED_SEEDS:
        check(generate(seed))


def test_fresh_loops() -> None:
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + _FRESH_LOOPS):
        print(f"seed {seed}")
        check(generate(seed))


def test_loops_over_the_compiled_core() -> None:
    for seed in _REAL_SEEDS:
        check(generate(seed), real=True)


@pytest.mark.parametrize("path", _REGRESSIONS, ids=lambda path: path.stem)
def test_loops_that_were_wrong_once(path: Path) -> None:
    loop = Loop.from_json(path.read_text())
    for optimizer in loop.optimizers:
        if not hasattr(torch.optim, optimizer.kind):
            pytest.skip(f"this torch has no {optimizer.kind}")
    verdict = judge(loop)
    assert verdict.is_right, verdict


@pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"),
    reason="an older torch has fewer optimizers, so other loops come from these seeds",
)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_mutations_are_found(mutation: Mutation) -> None:
    assert loops_to_find(mutation, mutation.seed, most=12) is not None


def test_descriptions_survive_json() -> None:
    for seed in range(200):
        loop = generate(seed)
        assert Loop.from_json(loop.to_json()) == loop
        assert generate(seed) == loop


def test_shrinking_keeps_what_fails() -> None:
    """A loop with a wrong action in it shrinks to that one and what it needs."""
    loop = generate(10)
    wrong = Action("freeze", 0, None, {"block": 99, "trained": True})
    middle = len(loop.actions) // 2
    actions = (*loop.actions[:middle], wrong, *loop.actions[middle:])
    verdict = judge(dataclasses.replace(loop, actions=actions))
    assert not verdict.is_right
    assert make_small(dataclasses.replace(loop, actions=actions), verdict).actions == (wrong,)
