"""Ranks are lost where codecs keep residuals: means and residuals are those of a reference.

One process encodes what each rank contributes and what each owner sends, with the codec by itself:
each contribution leaves its rank's residual once, each mean its owner's, and what a lost rank has
held back is in no later mean.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradlane.codecs import BROADCAST, Codec
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model
from tests.training.model.test_going_on_processes import (
    FATAL_STEP,
    STEPS,
    Means,
    Run,
    check_reference,
)

pytestmark = needs_core

CODECS = ["onebit", "topk:ratio=0.05"]


class HeldBack(Means):
    """The means of encoded gradients, and what all ranks have held back so far."""

    def __init__(self, result: Mapping[str, Any], world_size: int, lost: Sequence[int]) -> None:
        """Hold nothing back yet.

        Args:
            result: of a rank; each tensor has to be one slice.
            world_size: ranks at the start.
            lost: those that are lost.
        """
        self._lost = lost
        self._codecs: dict[str, Codec] = {}
        self._owners: dict[str, int] = {}
        self.workers: dict[str, dict[int, Tensor]] = {}
        """By tensor and rank, f32 values in one dimension."""
        self.owner: dict[str, Tensor] = {}
        self._next: dict[tuple[str, tuple[int, ...]], tuple[dict[int, Tensor], Tensor]] = {}
        for name, parameter in Model().named_parameters():
            if result["codecs"][name] == "raw":
                continue
            (self._owners[name],) = result["owners"][name]
            self._codecs[name] = Codec(result["codecs"][name], tuple(parameter.shape))
            assert self._codecs[name].residual_width == 1
            zeros = torch.zeros(parameter.numel())
            self.workers[name] = {rank: zeros.clone() for rank in range(world_size)}
            self.owner[name] = zeros.clone()
        assert self._codecs

    @property
    def names(self) -> set[str]:
        """The tensors that are encoded."""
        return set(self._codecs)

    def owned_by(self, rank: int) -> set[str]:
        """Return the encoded tensors that a rank owned at the start."""
        return {name for name, owner in self._owners.items() if owner == rank}

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        codec = self._codecs.get(name)
        if codec is None:
            return super().over(name, gradients)
        workers, owner = copy.deepcopy(self.workers[name]), self.owner[name].clone()
        total = torch.zeros(0)
        for rank, gradient in gradients.items():
            values = gradient.detach().cpu().flatten()
            wire = codec.encode(values, residual=workers[rank], leg=rank)
            if total.numel() == 0:
                total = torch.as_tensor(codec.decode(wire, values.numel()))
            else:
                codec.decode_add(wire, total)
        if self._owners[name] not in gradients and self._owners[name] in self._lost:
            # The first mean without it has a new owner.
            owner.zero_()
        wire = codec.encode(total / len(gradients), residual=owner, leg=BROADCAST)
        mean = torch.as_tensor(codec.decode(wire, total.numel()))
        self._next[name, tuple(gradients)] = workers, owner
        first = next(iter(gradients.values()))
        return mean.reshape(first.shape).to(first.device)

    def take(self, name: str, ranks: Sequence[int]) -> None:
        if name in self._codecs:
            self.workers[name], self.owner[name] = self._next[name, tuple(ranks)]
            if self._owners[name] not in ranks:
                # Its new owner is one of the others, which are all there in this test.
                self._owners[name] = ranks[0]

    def check(self, state: Mapping[str, Any], number: int, members: Sequence[int]) -> None:
        """Check the state of a member's session between two steps."""
        (of_model,) = state["models"]
        place = (of_model["rank"], of_model["world_size"])
        assert place == (members.index(number), len(members))
        for kind in ("worker_residual", "owner_residual", "mean_worker_residual"):
            assert set(of_model[kind]) == self.names
        for name in self.names:
            own = [self.workers[name][rank] for rank in members]
            mean = own[0]
            for one in own[1:]:
                mean = mean + one
            for kind, right in (
                ("worker_residual", self.workers[name][number]),
                ("owner_residual", self.owner[name]),
                ("mean_worker_residual", mean / len(own)),
            ):
                found = of_model[kind][name].flatten()
                assert torch.equal(found, right), (kind, name, number)
                assert bool(right.any()) or kind == "owner_residual"


def check(run: Run, world_size: int, lost: int, asks: Sequence[int] = ()) -> HeldBack:
    """Check all steps of all survivors, and their states after some steps, against the reference.

    Args:
        run: of the ranks.
        world_size: ranks at the start.
        lost: the one that was killed.
        asks: steps after which the states were asked for, the last one among them.
    """
    run.check_alike()
    first = run.results[run.survivors[0]]
    means = HeldBack(first, world_size, [lost])
    lost_owner_has = means.owned_by(lost)
    seen: list[int] = []

    def look_on(step: int) -> None:
        if step in asks:
            seen.append(step)
            # At each of them it is clear who the members are.
            members = list(range(world_size)) if step < FATAL_STEP - 1 else run.survivors
            for rank in run.survivors:
                means.check(run.results[rank]["asked"][asks.index(step)], rank, members)

    words = check_reference(first["states"], world_size, run.survivors, means, look_on)
    assert seen == list(asks)
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)
    assert first["residuals"] == [len(means.names)]
    assert lost_owner_has and lost_owner_has != means.names, "the test shows little"
    return means


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("victim", "moment"), [(0, "backward"), (1, "after backward"), (2, "forward")]
)
def test_what_survivors_hold_back_is_right(
    programs: ForkedPrograms, tmp_path: Path, codec: str, victim: int, moment: str
) -> None:
    asks = [FATAL_STEP - 2, FATAL_STEP + 2, STEPS]
    ends = {victim: ("sigkill", FATAL_STEP, moment)}
    run = Run(programs, tmp_path, 3, ends, codec={"*.weight": codec}, asks=asks)
    check(run, 3, victim, asks)


@pytest.mark.parametrize("codec", CODECS)
def test_the_last_rank_goes_on_with_what_it_holds_back(
    programs: ForkedPrograms, tmp_path: Path, codec: str
) -> None:
    asks = [FATAL_STEP + 1, STEPS]
    ends = {0: ("sigkill", FATAL_STEP, "backward")}
    run = Run(programs, tmp_path, 2, ends, codec={"*.weight": codec}, asks=asks)
    means = check(run, 2, 0, asks)
    assert any(bool(one.any()) for one in means.owner.values())
