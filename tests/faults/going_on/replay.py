"""The same training in one process, over the sets of ranks that each of its means was over."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradlane
from tests.faults.going_on.rank_program import Batches, checksum, loss_of, model_of
from tests.faults.outcome import complete_checkpoints

seeding = threading.Lock()
"""Held while a model is made from torch's own random numbers."""


class ReplayError(Exception):
    """Raised when a rank's bits are not those of training over its members without faults."""


@dataclass(frozen=True)
class Change:
    """New members; see `gradlane.MembershipChange`.

    Attributes:
        members: by their numbers of the start; one that joins has the next one.
        step: the first whose means are all over them.
        joined: whether a rank has joined: no mean of the step before is over it.
    """

    members: tuple[int, ...]
    step: int
    joined: bool = False


def replay(
    world_size: int,
    changes: Sequence[Change],
    means: Sequence[Sequence[int]],
    rank: int,
    losses: list[float],
    local_size: int = 1,
) -> dict[int, str]:
    """Train as a rank did, in one process, and compare each mean's and each loss's bits.

    Args:
        world_size: number of ranks at the start.
        changes: of the members.
        means: of each parameter, the checksums of the means that it was updated with, by step.
        rank: whose losses follow.
        losses: of each step.
        local_size: ranks of a node, which add up first.

    Returns:
        A digest of parameters and momenta after each step.

    Raises:
        ReplayError: a mean is over a set of ranks that its step cannot have, or over none, or a
            loss is another one.
    """
    with seeding:
        model, optimizer = model_of(nn.Identity())
    parameters = list(model.parameters())
    sets = [tuple(range(world_size)), *(change.members for change in changes)]
    # In the step in which a rank is lost some means are over the old and some over the new.
    begins = [0, *(change.step - (not change.joined) for change in changes)]
    ends = [*(change.step for change in changes), len(losses) + 2]
    numbers = sorted({number for members in sets for number in members})
    batches = [Batches(number, len(losses)) for number in numbers]
    digests = {}
    for step, said in enumerate(losses, 1):
        gradients: list[list[Tensor]] = []
        for number in numbers:
            loss = loss_of(model, batches[number][step - 1])
            loss.backward()  # type: ignore[no-untyped-call]
            if number == rank and loss.item() != said:
                raise ReplayError(f"step {step}: the loss was {said!r}, and is {loss.item()!r}")
            gradients.append([one.grad for one in parameters if one.grad is not None])
            optimizer.zero_grad()
        possible = {
            members: None
            for members, begin, end in zip(sets, begins, ends, strict=True)
            if begin <= step < end
        }
        for index, parameter in enumerate(parameters):
            found = {
                checksum(mean): mean
                for mean in (
                    mean_over(gradients, members, index, local_size) for members in possible
                )
            }
            try:
                parameter.grad = found[means[index][step - 1]]
            except KeyError:
                raise ReplayError(
                    f"step {step}: the mean of parameter {index} is over none of {list(possible)}"
                ) from None
        optimizer.step()
        optimizer.zero_grad()
        digests[step] = state_digest(model, optimizer)
    return digests


def restore(root: Path) -> tuple[int, str]:
    """Return the step of the newest checkpoint, and the digest of what one rank restores of it."""
    with seeding:
        model, optimizer = model_of(nn.Identity())
    options: dict[str, Any] = {
        "rendezvous": gradlane.Rendezvous(rank=0, world_size=1),
        "monitoring": gradlane.Monitoring(summary=False),
    }
    with gradlane.init(checkpoints=gradlane.Checkpoints(root), **options) as session:
        session.prepare(model, optimizer)
        step = session.restore()
        return step, state_digest(model, optimizer)


def files_by_step(root: Path) -> Mapping[int, int]:
    """Return how many ranks' files each complete checkpoint has, by step."""
    return {
        step: len(list(folder.glob("*.safetensors")))
        for step, folder in complete_checkpoints(root).items()
    }


def state_digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all parameters and their momenta."""
    state = hashlib.sha256()
    for parameter in model.parameters():
        momentum = optimizer.state[parameter].get("momentum_buffer")
        state.update(parameter.detach().numpy().tobytes())
        if momentum is not None:
            state.update(momentum.numpy().tobytes())
    return state.hexdigest()[:16]


def mean_over(
    gradients: Sequence[Sequence[Tensor]], members: Sequence[int], index: int, local_size: int
) -> Tensor:
    """Return the mean of a parameter's gradients, added up in the order of the ranks."""
    parts = [gradients[rank][index] for rank in members]
    if local_size > 1:
        nodes = [parts[at : at + local_size] for at in range(0, len(parts), local_size)]
        parts = [_mean_of(of_node) for of_node in nodes]
    return _mean_of(parts)


def _mean_of(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts)
