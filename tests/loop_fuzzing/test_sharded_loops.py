"""A few loops over sharded models; `python -m tests.loop_fuzzing --sharded` draws others."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.built import needs_core
from tests.loop_fuzzing.description import Action, Block, Loop, Model, Optimizer, Sharding
from tests.loop_fuzzing.program import Note
from tests.loop_fuzzing.sharded_loops import generate_sharded
from tests.loop_fuzzing.sharded_ranks import ShardedRanks
from tests.loop_fuzzing.sharded_verdict import first_difference, judge_sharded, verdict_of
from tests.training.sharded.fsdp2 import needs_fsdp2

_SEEDS = range(8)
_SAME = {"kind": "same", "text": "", "sums": [[7]], "goes_on": True}


@needs_core
@needs_fsdp2
@pytest.mark.usefixtures("programs")
def test_loops_have_the_bits_of_torch_alone() -> None:
    for seed in _SEEDS:
        loop = generate_sharded(seed)
        verdict = judge_sharded(loop)
        assert verdict.kind == "same", f"seed {seed}: {verdict}\n{loop.to_json()}"


@needs_core
@needs_fsdp2
@pytest.mark.usefixtures("programs")
def test_a_loop_that_hangs_ends_its_ranks_alone() -> None:
    loop = _loop()
    waits = dataclasses.replace(loop.actions[0], ranks=(3,))
    ranks = ShardedRanks(4, 2)
    try:
        hanging = ranks.run(dataclasses.replace(loop, actions=(waits,)), timeout_s=8.0)
        assert verdict_of(loop, hanging).kind == "hangs"
        assert verdict_of(loop, ranks.run(loop)).kind == "same"
    finally:
        ranks.close()


def test_descriptions_survive_json() -> None:
    for seed in range(300):
        loop = generate_sharded(seed, (4, 8))
        assert Loop.from_json(loop.to_json()) == loop
        assert generate_sharded(seed, (4, 8)) == loop


def _loop(**options: Any) -> Loop:
    backward = Action("backward", 0, None, {"through": [0], "data": 1})
    actions = (backward, Action("step"), backward)
    model, optimizer = Model((Block("linear"),)), Optimizer("SGD", {"lr": 0.1})
    return Loop(1, 4, (model,), (optimizer,), actions, options, sharding=Sharding())


def _notes(*values: float) -> list[Note]:
    return [Note(2 * at, "loss", (torch.tensor(one),)) for at, one in enumerate(values)]


def test_differences_are_found() -> None:
    exact, coded = _loop(), _loop(codec="bf16")
    assert first_difference(exact, _notes(1.0, 2.0), _notes(1.0, 2.0)) == ("same", "")
    assert first_difference(exact, _notes(1.0, 2.0), _notes(1.0, 2.1))[0] == "loss: values"
    # What a codec rounds is close until a step was taken with it.
    assert first_difference(coded, _notes(1.0, 2.0), _notes(1.1, 9.0)) == ("same", "")
    assert first_difference(coded, _notes(1.0, 2.0), _notes(2.0, 2.0))[0] == "loss: values"


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({}, "same"),
        ({"kind": "loss: values"}, "loss: values"),
        ({"kind": "error", "error": "UsageError: rank 3 fails"}, "UsageError: rank # fails"),
        ({"sums": [[8]]}, "nodes differ"),
        (None, "hangs"),
    ],
)
def test_one_rank_is_enough(changed: dict[str, Any] | None, kind: str) -> None:
    """The last one, of the second node."""
    last: Any = "nothing after 1 s" if changed is None else {**_SAME, **changed}
    assert verdict_of(_loop(), [_SAME, _SAME, _SAME, last]).kind == kind
