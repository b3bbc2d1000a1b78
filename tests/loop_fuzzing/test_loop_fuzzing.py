"""A few random loops, all loops that were wrong once, and that the search finds what it is for."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlane import PeerLostError, ProgressTimeoutError, SessionFailedError, UsageError
from tests.loop_fuzzing.description import Action, Block, Loop, Model, Optimizer
from tests.loop_fuzzing.generate import generate
from tests.loop_fuzzing.mutations import MUTATIONS, Mutation, loops_to_find
from tests.loop_fuzzing.program import Note
from tests.loop_fuzzing.ranks import Outcome
from tests.loop_fuzzing.search import make_small
from tests.loop_fuzzing.siblings import siblings
from tests.loop_fuzzing.verdict import compare, judge

_REGRESSIONS = sorted((Path(__file__).parent / "regressions").glob("*.json"))
_FIXED_SEEDS = range(16)
_FRESH_LOOPS = 12
_FRESH_SIBLINGS = 40
_REAL_SEEDS = range(500, 510)
_ODD_SEEDS = range(400_000, 400_000 + _FRESH_LOOPS)
"""Fixed; `python -m tests.loop_fuzzing` searches for rare combinations and races."""


def check(loop: Loop, *, real: bool = False) -> None:
    verdict = judge(loop, real=real)
    if not verdict.is_right:
        smaller = make_small(loop, verdict, real)
        pytest.fail(f"seed {loop.seed}: {verdict.kind}\n{verdict.text}\n{smaller.to_json()}")


def test_fixed_loops() -> None:
    for seed in _FIXED_SEEDS:
        check(generate(seed, odd=False))


def test_fresh_loops() -> None:
    first = random.SystemRandom().randrange(10**9)
    for seed in range(first, first + _FRESH_LOOPS):
        print(f"seed {seed}")
        check(generate(seed, odd=False))


def test_odd_loops() -> None:
    for seed in _ODD_SEEDS:
        check(generate(seed))


def test_some_oddities_by_themselves() -> None:
    """All of them are `python -m tests.loop_fuzzing.siblings`."""
    everything = [one for one in siblings() if not one[0].startswith("buffer written")]
    for name, loop in random.Random(7).sample(everything, _FRESH_SIBLINGS):
        print(name)
        verdict = judge(loop)
        assert verdict.is_right, f"{name}: {verdict}"


def test_siblings_have_names_of_their_own() -> None:
    names = [name for name, _ in siblings()]
    assert len(set(names)) == len(names)


def test_oddities_may_be_refused_only_in_their_step() -> None:
    loop = _loop_of("write_buffer", how="data", value=0.25)
    expected: list[list[Note]] = [[], []]
    refusal = UsageError("not so")
    lost = PeerLostError("rank 0 gave up", 0)

    def kind(*ends: tuple[int, Exception | None]) -> str:
        return compare(loop, expected, [Outcome([], *one) for one in ends]).kind

    assert kind((1, refusal), (2, lost)) == "refused"
    assert kind((3, refusal), (3, lost)) == "refused"
    # Before it, after its step, on one rank alone, or in the words of somebody else.
    assert kind((0, refusal), (1, lost)).startswith("UsageError")
    assert kind((4, refusal), (4, lost)).startswith("UsageError")
    assert kind((2, refusal), (4, None)) == "refused on some ranks"
    assert kind((1, AttributeError("no")), (2, lost)).startswith("foreign AttributeError")
    assert kind((1, ProgressTimeoutError("no progress")), (2, lost)) == "hangs"


def test_what_is_documented_as_right_may_not_be_refused() -> None:
    loop = _loop_of("look_at_kept", via="parameters", how="clone")
    ends = [Outcome([], 1, UsageError("not so")), Outcome([], 2, PeerLostError("gave up", 0))]
    assert compare(loop, [[], []], ends).kind.startswith("UsageError")


def test_a_rank_that_does_nothing_odd_may_not_refuse() -> None:
    odd = Action("look_at_gradients", 0, (0,), {"via": "kept", "how": "clone"})
    loop = _loop_of(odd)
    lost = Outcome([], 2, PeerLostError("gave up", 0))
    refused = Outcome([], 1, UsageError("not so"))
    assert compare(loop, [[], []], [refused, lost]).kind == "refused"
    compared = Outcome([], 1, SessionFailedError("rank 0 changed 'tally'", 1))
    assert compare(loop, [[], []], [lost, compared]).kind == "refused"
    assert compare(loop, [[], []], [lost, refused]).kind.startswith("UsageError")


def _loop_of(odd: str | Action, **given: Any) -> Loop:
    """Return a loop with one odd action in its first of two steps."""
    action = odd if isinstance(odd, Action) else Action(odd, 0, None, given)
    backward = Action("backward", 0, None, {"through": [0], "data": 1})
    actions = (backward, action, Action("step"), backward, Action("step"))
    model = Model((Block("linear"),), ("tally",))
    return Loop(1, 2, (model,), (Optimizer("SGD", {"lr": 0.1}),), actions)


def test_loops_over_the_compiled_core() -> None:
    for seed in _REAL_SEEDS:
        check(generate(seed, odd=False), real=True)


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
        for odd in (False, True):
            loop = generate(seed, odd=odd)
            assert Loop.from_json(loop.to_json()) == loop
            assert generate(seed, odd=odd) == loop


def test_shrinking_keeps_what_fails() -> None:
    """A loop with a wrong action in it shrinks to that one and what it needs."""
    loop = generate(10, odd=False)
    wrong = Action("freeze", 0, None, {"block": 99, "trained": True})
    middle = len(loop.actions) // 2
    actions = (*loop.actions[:middle], wrong, *loop.actions[middle:])
    verdict = judge(dataclasses.replace(loop, actions=actions))
    assert not verdict.is_right
    assert make_small(dataclasses.replace(loop, actions=actions), verdict).actions == (wrong,)
