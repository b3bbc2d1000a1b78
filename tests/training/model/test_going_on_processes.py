"""Processes are lost, and the others train on: the same bits, each mean over one set of ranks."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import TCPStore

from tests.built import needs_core
from tests.forked_programs import ForkedPrograms, rank_environments
from tests.training.model.going_rank import Model, loss_of, mean_over, optimizer_of

pytestmark = needs_core

STEPS = 12
FATAL_STEP = 4
PATIENT_S = 120.0


class Run:
    """The ranks of one training, as they have ended."""

    def __init__(
        self,
        programs: ForkedPrograms,
        folder: Path,
        world_size: int,
        ends: Mapping[int, tuple[str, int, str]],
        *,
        steps: int = STEPS,
        looks: bool = True,
        kill_after_s: float | None = None,
        numbers: Sequence[int] | None = None,
        asks: Sequence[int] = (),
        local_size: int = 1,
        **options: Any,
    ) -> None:
        """Start all ranks, and wait for those that survive.

        Args:
            programs: forks the ranks.
            folder: for files.
            world_size: number of ranks.
            ends: of the victims: how, in which step and at which moment.
            steps: of training.
            looks: whether each step waits for its end.
            kill_after_s: seconds from the start of the ranks to a kill of the victims from outside.
            numbers: by rank, the one whose batches it has; None: its own.
            asks: steps after which all ranks ask for the session's state.
            local_size: ranks of an emulated node; all of a victim's are lost.
            options: further options.
        """
        # It outlives every rank.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        path = folder / "job.json"
        job = {
            "port": store.port,
            "folder": str(folder),
            "world_size": world_size,
            "steps": steps,
            "looks": looks,
            "numbers": list(range(world_size) if numbers is None else numbers),
            "asks": list(asks),
            "ends": {str(rank): end for rank, end in ends.items() if end[0]},
            "options": {
                "going_on": True,
                "connect_timeout_s": PATIENT_S,
                "silence_timeout_s": PATIENT_S,
                "progress_timeout_s": PATIENT_S,
                **options,
            },
        }
        path.write_text(json.dumps(job))
        pids: list[int] = []
        lost = {rank // local_size for rank in ends}
        self.survivors = [rank for rank in range(world_size) if rank // local_size not in lost]
        self.left_behind = [
            rank for rank in range(world_size) if rank not in ends and rank not in self.survivors
        ]
        """Ranks of the victims' nodes, which end with them."""
        try:
            environments = rank_environments(world_size, local_size)
            program = "tests.training.model.going_rank"
            started = programs.start_all(folder, program, [str(path)], environments)
            names, pids = list(started), list(started.values())
            if kill_after_s is not None:
                time.sleep(kill_after_s)
                for rank in ends:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[rank], signal.SIGKILL)
            deadline = time.monotonic() + 2 * PATIENT_S
            self.codes = {
                rank: programs.wait(names[rank], max(0.1, deadline - time.monotonic()))
                for rank in (*self.survivors, *self.left_behind)
            }
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.errors = {rank: (folder / f"errors-{rank}").read_text() for rank in range(world_size)}
        self.results: dict[int, dict[str, Any]] = {
            rank: torch.load(folder / f"rank-{rank}.pt")
            for rank in self.survivors
            if self.codes[rank] == 0
        }

    def check_alike(self) -> None:
        """Check that all survivors came to their end with the same bits and the same changes."""
        codes = {rank: self.codes[rank] for rank in self.survivors}
        assert set(codes.values()) == {0}, self.errors
        first = self.results[self.survivors[0]]
        for result in self.results.values():
            for step, states in enumerate(result["states"], 1):
                for one, other in zip(states, first["states"][step - 1], strict=True):
                    assert torch.equal(one, other), step
            assert all(map(torch.equal, result["final"], first["final"]))
            plain = [{**change, "rank": 0} for change in result["changes"]]
            assert plain == [{**change, "rank": 0} for change in first["changes"]]
            assert result["gathered"] == first["gathered"]
            assert result["lost"] == first["lost"]


class Means:
    """The means of gradients that travel as they are; keeps nothing."""

    def parts(self, name: str) -> list[slice]:
        """Return the elements of a tensor whose means may be over different ranks."""
        return [slice(None)]

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        """Return the mean of a tensor over some ranks' gradients."""
        return mean_over(list(gradients.values()))

    def take(self, name: str, ranks: Sequence[int]) -> None:
        """Note that training has gone on with the mean of a tensor over some ranks."""

    def let_in(self, rank: int) -> None:
        """Have a rank join, which is the last one then."""


class Bf16Means(Means):
    """The means where weights travel as bf16; a rank alone sends nothing."""

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        if not name.endswith(".weight") or len(gradients) == 1:
            return super().over(name, gradients)
        sent = [gradient.bfloat16().float() for gradient in gradients.values()]
        return mean_over(sent).bfloat16().float()


class RingMeans(Means):
    """The means of a ring: until a rank is lost, it adds up in an order of each part's own."""

    BLOCK_ELEMS = 16_384

    def __init__(self, owners: Mapping[str, Sequence[int]], world_size: int) -> None:
        """Hold the rank on which each part's sums end, of so many ranks at the start."""
        self._owners, self._world_size = owners, world_size

    def parts(self, name: str) -> list[slice]:
        size = self.BLOCK_ELEMS
        return [slice(size * it, size * (it + 1)) for it in range(len(self._owners[name]))]

    def over(self, name: str, gradients: Mapping[int, Tensor]) -> Tensor:
        count, ranks = self._world_size, list(gradients.values())
        if len(ranks) < count:
            return self.of_servers(name, ranks)
        mean = torch.empty_like(ranks[0])
        for part, owner in zip(self.parts(name), self._owners[name], strict=True):
            turns = [ranks[(owner + 1 + turn) % count].view(-1)[part] for turn in range(count)]
            mean.view(-1)[part] = self.around(name, turns)
        return mean

    def of_servers(self, name: str, gradients: Sequence[Tensor]) -> Tensor:
        """Return the mean once a rank was lost."""
        return mean_over(gradients)

    def around(self, name: str, gradients: Sequence[Tensor]) -> Tensor:
        """Return the mean of a part, which all ranks add to in this order."""
        return mean_over(gradients)


def check_reference(
    states: list[list[Tensor]],
    world_size: int,
    survivors: list[int],
    means: Means | None = None,
    looks_on: Callable[[int], object] = lambda step: None,
    *,
    training: tuple[nn.Module, torch.optim.Optimizer] | None = None,
    loss_of: Callable[[Any, int, int], Any] = loss_of,
    ranks: Sequence[int] | None = None,
    first_step: int = 1,
) -> list[str]:
    """Check each tensor after each step against one process; return whose mean each step had.

    Args:
        states: after each step.
        world_size: ranks at the start.
        survivors: those that are left.
        means: how they are made; None: of gradients that travel as they are.
        looks_on: called after each step.
        training: the model and its optimizer before the first step; None: those of the start.
        loss_of: what the model learns on a rank in a step.
        ranks: the numbers of those of the start, in their order; None: from 0 on.
        first_step: the one of the first states.

    Returns:
        By step, `old`, `new`, or `both` where some parts had the one and some the other.
    """
    if training is None:
        started = Model()
        training = started, optimizer_of(started)
    model, optimizer = training
    ranks = range(world_size) if ranks is None else ranks
    means = means or Means()
    names = [name for name, _ in model.named_parameters()]
    keys = list(model.state_dict())
    words = []
    is_new = False
    for step, state in enumerate(states, first_step):
        gradients: dict[int, dict[str, Any]] = {}
        for rank in ranks:
            model.zero_grad()
            loss_of(model, rank, step).backward()
            gradients[rank] = {name: one.grad for name, one in model.named_parameters()}
        before = [one.detach().clone() for one in model.parameters()]
        saved = copy.deepcopy(optimizer.state_dict())
        moved: dict[str, Any] = {}
        after: dict[str, list[Tensor]] = {}
        members = {"old": list(ranks), "new": survivors}
        for word, numbers in members.items():
            with torch.no_grad():
                for one, value in zip(model.parameters(), before, strict=True):
                    one.copy_(value)
            # Updates write into what was loaded.
            optimizer.load_state_dict(copy.deepcopy(saved))
            for name, parameter in model.named_parameters():
                parameter.grad = means.over(name, {rank: gradients[rank][name] for rank in numbers})
            optimizer.step()
            after[word] = [one.detach().to("cpu", copy=True) for one in model.parameters()]
            moved[word] = copy.deepcopy(optimizer.state_dict()["state"])
        chosen: list[tuple[int, slice, str]] = []
        for index, name in enumerate(names):
            value = state[keys.index(name)].view(-1)
            for part in means.parts(name):
                fits = [
                    word
                    for word, values in after.items()
                    if torch.equal(value[part], values[index].view(-1)[part])
                ]
                assert fits, f"{name}, {part} in step {step} is over neither set"
                # A parameter can have the same bits with both.
                chosen.append((index, part, fits[-1] if is_new else fits[0]))
        found = {word for _, _, word in chosen}
        assert not is_new or found == {"new"}, (step, chosen)
        is_new = "new" in found
        words.append(found.pop() if len(found) == 1 else "both")
        saved["state"] = copy.deepcopy(moved["new"])
        with torch.no_grad():
            for index, part, word in chosen:
                means.take(names[index], members[word])
                one = list(model.parameters())[index]
                one.view(-1)[part] = after[word][index].view(-1)[part].to(one.device)
                for key, moment in moved[word][index].items():
                    if moment.dim():
                        saved["state"][index][key].view(-1)[part] = moment.view(-1)[part]
        optimizer.load_state_dict(saved)
        looks_on(step)
    return words


@pytest.mark.parametrize(
    ("victim", "moment", "lanes"),
    [
        (0, "forward", 1),
        (0, "backward", 2),
        (2, "backward", 1),
        (2, "after backward", 2),
        (0, "after step", 1),
    ],
)
def test_a_killed_rank_costs_no_step(
    programs: ForkedPrograms, tmp_path: Path, victim: int, moment: str, lanes: int
) -> None:
    run = Run(programs, tmp_path, 4, {victim: ("sigkill", FATAL_STEP, moment)}, lanes=lanes)
    run.check_alike()
    first = run.results[run.survivors[0]]
    words = check_reference(first["states"], 4, run.survivors)
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)
    (change,) = first["changes"]
    assert change["members"] == tuple(run.survivors) and change["lost"] == (victim,)
    assert FATAL_STEP - 1 <= change["step"] <= change["at"] + 1
    assert {one["lanes"] for one in run.results.values()} == {lanes}
    assert first["gathered"] == [[[rank, change["at"]] for rank in run.survivors]]
    assert [rank for rank, _ in first["lost"]] == [victim]
    assert f"training goes on without rank {victim}" in run.errors[run.survivors[0]]
    assert f"went on without rank {victim}" in run.errors[run.survivors[0]]


@pytest.mark.parametrize(
    ("world_size", "victim", "moment"),
    [(4, 2, "backward"), (3, 0, "after backward"), (2, 1, "backward")],
)
def test_a_killed_rank_costs_no_step_of_encoded_gradients(
    programs: ForkedPrograms, tmp_path: Path, world_size: int, victim: int, moment: str
) -> None:
    ends = {victim: ("sigkill", FATAL_STEP, moment)}
    run = Run(programs, tmp_path, world_size, ends, codec={"*.weight": "bf16"})
    run.check_alike()
    first = run.results[run.survivors[0]]
    words = check_reference(first["states"], world_size, run.survivors, Bf16Means())
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)


@pytest.mark.parametrize(
    ("world_size", "victim", "moment"),
    [(4, 2, "backward"), (4, 0, "after backward"), (3, 1, "forward"), (2, 0, "backward")],
)
def test_a_killed_rank_of_a_ring_costs_no_step(
    programs: ForkedPrograms, tmp_path: Path, world_size: int, victim: int, moment: str
) -> None:
    ends = {victim: ("sigkill", FATAL_STEP, moment)}
    run = Run(programs, tmp_path, world_size, ends, strategy="ring")
    run.check_alike()
    first = run.results[run.survivors[0]]
    means = RingMeans(first["owners"], world_size)
    words = check_reference(first["states"], world_size, run.survivors, means)
    assert words[: FATAL_STEP - 2] == ["old"] * (FATAL_STEP - 2)
    assert words[FATAL_STEP:] == ["new"] * (STEPS - FATAL_STEP)


def test_survivors_of_random_rounding_have_the_same_bits(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    ends = {1: ("sigkill", FATAL_STEP, "backward")}
    run = Run(programs, tmp_path, 4, ends, codec="qsgd:bits=8")
    run.check_alike()
    assert run.results[0]["changes"][0]["members"] == (0, 2, 3)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_world_of_two_goes_on_with_one(
    programs: ForkedPrograms, tmp_path: Path, victim: int
) -> None:
    run = Run(programs, tmp_path, 2, {victim: ("sigkill", FATAL_STEP, "backward")})
    run.check_alike()
    check_reference(run.results[1 - victim]["states"], 2, run.survivors)


@pytest.mark.parametrize("kind", ["raise", "sigterm"])
def test_a_rank_that_gives_up_is_lost_with_its_reason(
    programs: ForkedPrograms, tmp_path: Path, kind: str
) -> None:
    run = Run(programs, tmp_path, 3, {1: (kind, FATAL_STEP, "after backward")})
    run.check_alike()
    check_reference(run.results[0]["states"], 3, run.survivors)
    reason = run.results[0]["changes"][0]["reason"]
    assert ("the loss is not a number" if kind == "raise" else "SIGTERM") in reason


def test_a_silent_rank_is_lost(programs: ForkedPrograms, tmp_path: Path) -> None:
    run = Run(
        programs,
        tmp_path,
        3,
        {0: ("sigstop", FATAL_STEP, "backward")},
        silence_timeout_s=6.0,
    )
    run.check_alike()
    check_reference(run.results[1]["states"], 3, run.survivors)


def test_two_ranks_are_lost_at_different_moments(programs: ForkedPrograms, tmp_path: Path) -> None:
    ends = {0: ("sigkill", FATAL_STEP, "backward"), 3: ("sigkill", FATAL_STEP + 3, "forward")}
    run = Run(programs, tmp_path, 5, ends, steps=STEPS + 4)
    run.check_alike()
    changes = run.results[1]["changes"]
    assert changes[-1]["members"] == (1, 2, 4)
    assert {rank for rank, _ in run.results[1]["lost"]} == {0, 3}


def test_too_few_ranks_end_with_an_error(programs: ForkedPrograms, tmp_path: Path) -> None:
    ends = {2: ("sigkill", FATAL_STEP, "backward")}
    run = Run(programs, tmp_path, 3, ends, min_ranks=3)
    assert set(run.codes.values()) == {1}
    for rank in run.survivors:
        assert "gradlane.errors." in run.errors[rank] and "rank 2" in run.errors[rank]


@pytest.mark.parametrize("seed", range(2))
def test_a_kill_at_any_moment_of_a_training_that_never_waits(
    programs: ForkedPrograms, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    victim = draw.randrange(4)
    run = Run(
        programs,
        tmp_path,
        4,
        {victim: ("", 0, "")},
        steps=500,
        looks=False,
        lanes=1 + seed,
        kill_after_s=draw.uniform(1.0, 2.5),
        # On a busy machine the victim is killed before it comes, and the others wait for so long.
        connect_timeout_s=20.0,
    )
    # A kill before all are connected ends the start, on all ranks.
    if set(run.codes.values()) == {0}:
        run.check_alike()
    else:
        assert set(run.codes.values()) == {1}
        assert all("RendezvousError" in run.errors[rank] for rank in run.survivors), run.errors
