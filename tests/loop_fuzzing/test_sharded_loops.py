"""A few loops over sharded models; `python -m tests.loop_fuzzing --sharded` draws others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.loop_fuzzing.description import Action, Block, Loop, Model, Optimizer, Sharding
from tests.loop_fuzzing.program import Note
from tests.loop_fuzzing.sharded_loops import generate_sharded
from tests.loop_fuzzing.sharded_ranks import results_in
from tests.loop_fuzzing.sharded_verdict import first_difference, verdict_of
from tests.training.sharded.fsdp2 import needs_fsdp2
from tests.training.sharded.test_bits import start

_PROGRAM = "tests.loop_fuzzing.sharded_ranks"
_SEEDS = range(8)
_SAME = {"kind": "same", "text": "", "sums": [[7]], "goes_on": True}


@needs_core
@needs_fsdp2
def test_loops_have_the_bits_of_torch_alone(programs: ForkedPrograms, tmp_path: Path) -> None:
    printed = start(programs, tmp_path, _PROGRAM, [str(seed) for seed in _SEEDS])
    found = [results_in(text) for text in printed]
    for number, seed in enumerate(_SEEDS):
        loop = generate_sharded(seed)
        verdict = verdict_of(loop, [one[number] for one in found])
        assert verdict.kind == "same", f"seed {seed}: {verdict}\n{loop.to_json()}"


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
