"""Ranks are lost where codecs keep residuals: means and residuals are those of a reference.

One process encodes what each rank contributes and what each owner sends, with the codec by itself:
each contribution leaves its rank's residual once, each mean its owner's, and what a lost rank has
held back is in no later mean.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.codecs import BROADCAST, Codec
from gradlane.training.core import load_core
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model
from tests.training.model.ranks import run_ranks
from tests.training.model.test_going_on_processes import (
    FATAL_STEP,
    STEPS,
    Means,
    Run,
    check_reference,
)

pytestmark = needs_core

CORE: Any = load_core()
CODECS = ["onebit", "topk:ratio=0.05"]


class HeldBack(Means):
    """The means of encoded gradients, and what all ranks have held back so far."""

    def __init__(
        self,
        codecs: Mapping[str, str],
        owners: Mapping[str, Sequence[int]],
        world_size: int,
        lost: Sequence[int] = (),
    ) -> None:
        """Hold nothing back yet.

        Args:
            codecs: by tensor, or `raw`.
            owners: of the slices of each tensor, which has to be one.
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
            if codecs[name] == "raw":
                continue
            (self._owners[name],) = owners[name]
            self._codecs[name] = Codec(codecs[name], tuple(parameter.shape))
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

    def let_in(self, rank: int) -> None:
        # Owners give all members what they hold back, and each holds more.
        for name, workers in self.workers.items():
            for one in workers.values():
                one.copy_((one + self.owner[name]) * ((rank + 1) / rank))
            workers[rank] = torch.zeros_like(self.owner[name])
            self.owner[name].zero_()

    def check(self, state: Mapping[str, Any], number: int, members: Sequence[int]) -> None:
        """Check the state of a member's session between two steps."""
        (of_model,) = state["models"]
        for kind in ("worker_residual", "owner_residual", "mean_worker_residual"):
            assert set(of_model[kind]) == self.names
        for name in self.names:
            own = [self.workers[name][rank] for rank in members]
            mean = own[0]
            for one in own[1:]:
                mean = mean + one
            for kind, right in (
                ("worker_residual", self.workers[name][number]),
                ("owner_residual", self._left_of_owner(name, members)),
                ("mean_worker_residual", mean / len(own)),
            ):
                found = of_model[kind][name].flatten()
                assert torch.equal(found, right), (kind, name, number)
                assert bool(right.any()) or kind == "owner_residual"

    def _left_of_owner(self, name: str, members: Sequence[int]) -> Tensor:
        held_back = self.owner[name]
        return held_back if self._owners[name] in members else torch.zeros_like(held_back)


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
    means = HeldBack(first["codecs"], first["owners"], world_size, [lost])
    lost_owner_has = means.owned_by(lost)
    seen: list[int] = []

    def look_on(step: int) -> None:
        if step in asks:
            seen.append(step)
            # At each of them it is clear who the members are.
            members = list(range(world_size)) if step < FATAL_STEP - 1 else run.survivors
            for rank in run.survivors:
                state = run.results[rank]["asked"][asks.index(step)]
                means.check(state, rank, members)
                (place,) = [(one["rank"], one["world_size"]) for one in state["models"]]
                # New members come into force a little after the loss.
                is_old = 0 < asks.index(step) < len(asks) - 1 and place == (rank, world_size)
                assert is_old or place == (members.index(rank), len(members))

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
    asks = [FATAL_STEP - 2, FATAL_STEP + 2, STEPS]
    ends = {0: ("sigkill", FATAL_STEP, "backward")}
    run = Run(programs, tmp_path, 2, ends, codec={"*.weight": codec}, asks=asks)
    means = check(run, 2, 0, asks)
    assert any(bool(one.any()) for one in means.owner.values())


@pytest.mark.parametrize("codec", CODECS)
def test_a_rank_is_lost_while_all_ask_for_the_state(
    programs: ForkedPrograms, tmp_path: Path, codec: str
) -> None:
    ends = {2: ("sigkill", FATAL_STEP, "asking")}
    asks = [FATAL_STEP, STEPS]
    run = Run(programs, tmp_path, 3, ends, codec={"*.weight": codec}, asks=asks)
    run.check_alike()
    first = run.results[0]
    # The steps that give the state are none of training, also where a rank hears of the loss first.
    assert first["lost"] == [[2, FATAL_STEP]]
    means = HeldBack(first["codecs"], first["owners"], 3, [2])

    def look_on(step: int) -> None:
        if step in asks:
            for rank in run.survivors:
                state = run.results[rank]["asked"][asks.index(step)]
                means.check(state, rank, run.survivors)

    words = check_reference(first["states"], 3, run.survivors, means, look_on)
    # Of the means that it owned it may have sent none to the others.
    assert words[: FATAL_STEP - 1] == ["old"] * (FATAL_STEP - 1)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)


def test_a_checkpoint_after_a_loss_has_each_members_own(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    folder = str(tmp_path / "checkpoints")
    options: dict[str, Any] = {
        "codec": {"*.weight": "onebit"},
        "checkpoint_folder": folder,
        "checkpoint_every": FATAL_STEP + 4,
    }
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    ends = {1: ("sigkill", FATAL_STEP, "backward")}
    run = Run(programs, tmp_path / "first", 3, ends, **options)
    means = check(run, 3, 1)
    again = Run(programs, tmp_path / "second", 2, {}, numbers=[0, 2], **options)
    again.check_alike()
    for rank, number in enumerate(run.survivors):
        result = again.results[rank]
        assert result["begun"] == FATAL_STEP + 4
        assert len(result["states"]) == STEPS - result["begun"]
        for one, other in zip(result["states"], run.results[0]["states"][-4:], strict=True):
            # But for statistics of batch norm, which are the first rank's.
            assert all(map(torch.equal, one, other))
        assert number in means.workers["first.weight"]


def test_a_checkpoint_before_a_loss_has_what_the_lost_rank_held_back(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    folder, taken = str(tmp_path / "checkpoints"), FATAL_STEP - 1
    options: dict[str, Any] = {"codec": {"*.weight": "onebit"}, "checkpoint_folder": folder}
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    ends = {1: ("sigkill once saved", FATAL_STEP, "backward")}
    run = Run(
        programs,
        tmp_path / "first",
        3,
        ends,
        steps=FATAL_STEP + 1,
        checkpoint_every=taken,
        asks=[taken],
        **options,
    )
    run.check_alike()
    again = Run(
        programs, tmp_path / "second", 2, {}, steps=taken + 1, checkpoint_every=100, **options
    )
    (before,) = run.results[0]["asked"][0]["models"]
    for result in again.results.values():
        assert result["begun"] == taken
        (found,) = result["asked"][0]["models"]
        for name, mean in before["mean_worker_residual"].items():
            assert bool(mean.any()) and torch.equal(found["worker_residual"][name], mean)
            assert torch.equal(found["owner_residual"][name], before["owner_residual"][name])


class GivesUpError(Exception):
    """A rank's end."""


def train(
    session: gradlane.Session, steps: range, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    own = session.rank
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + own)
        values = torch.randn(4, 40, generator=generator).to(next(model.parameters()).dtype)
        model(values).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def start(
    session: gradlane.Session, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(40, 40, bias=False, dtype=dtype) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    session.prepare(model, optimizer)
    return model, optimizer


class Halves:
    """A channel on which a rank may end when it reads the second halves of residuals."""

    def __init__(self, core: LeavesHalf, channel: Any) -> None:
        self._core, self._channel = core, channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def read_state(self, kind: str, half: int) -> None:
        if self._core.gives_up and half == 1:
            raise GivesUpError
        self._channel.read_state(kind, half)


class LeavesHalf:
    """The compiled core, over which rank 1 may end between two halves."""

    gives_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(CORE, name)

    def Channel(self, listener: Any, options: str, *rest: Any) -> Any:  # noqa: N802
        channel = CORE.Channel(listener, options, *rest)
        return Halves(self, channel) if json.loads(options)["rank"] == 1 else channel


def test_no_half_of_a_residual_stays_where_its_owner_is_lost_between_the_halves() -> None:
    core: Any = LeavesHalf()

    def body(session: gradlane.Session) -> Any:
        model, optimizer = start(session, torch.bfloat16)
        train(session, range(1, 4), model, optimizer)
        (whole,) = session.state_dict()["models"]
        if session.rank == 1:
            core.gives_up = True
        (left,) = session.state_dict()["models"]
        return whole["owner_residual"], left["owner_residual"]

    codec = "onebit:bucket=32"
    results = run_ranks(3, body, core=core, expect_errors=True, going_on=True, codec=codec)
    assert "GivesUpError" in str(results[1]) or isinstance(results[1], GivesUpError)
    lost = []
    for whole, left in (results[0], results[2]):
        for name, value in whole.items():
            assert bool(value.any())
            is_there = torch.equal(left[name], value)
            assert is_there or not bool(left[name].any()), name
            assert torch.equal(left[name], results[0][1][name])
            lost += [] if is_there else [name]
    assert lost and len(lost) < 2 * len(results[0][0])


def test_a_state_is_loaded_before_a_loss_and_refused_after_it_on_all_ranks() -> None:
    def body(session: gradlane.Session) -> Any:
        own = session.rank
        model, optimizer = start(session)
        train(session, range(1, 4), model, optimizer)
        state = session.state_dict()
        train(session, range(4, 6), model, optimizer)
        session.load_state_dict(state)
        again = session.state_dict()
        # Connecting anew takes them along, too.
        session.prepare(model, optimizer)
        anew = session.state_dict()
        if own == 2:
            raise GivesUpError
        with pytest.raises(gradlane.UsageError, match="2 of 3 ranks"):
            session.load_state_dict(state)
        train(session, range(6, 9), model, optimizer)
        lost = session.metrics()["lost"]
        values = [parameter.detach().clone() for parameter in model.parameters()]
        return state, again, anew, lost, values

    results = run_ranks(
        3, body, core=CORE, expect_errors=True, going_on=True, codec="topk:ratio=0.1"
    )
    assert isinstance(results[2], GivesUpError)
    for state, again, anew, lost, values in results[:2]:
        for kind in ("worker_residual", "owner_residual", "mean_worker_residual"):
            for name, value in state["models"][0][kind].items():
                assert bool(value.any())
                assert torch.equal(again["models"][0][kind][name], value)
                assert torch.equal(anew["models"][0][kind][name], value)
        assert [(row["rank"], row["residuals"]) for row in lost] == [(2, 4)]
        assert all(map(torch.equal, values, results[0][4]))
