"""The same training in one process, over the sets of ranks that each of its exchanges was over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.faults.going_on.rank_program import Batches, checksum, loss_of, model_of
from tests.faults.going_on.replay import ReplayError, mean_over, seeding
from tests.faults.local_updates.scenario import STEPS, LocalScenario
from tests.training.local_updates.reference import LocalReference


def replay(
    scenario: LocalScenario, rank: int, sets: Sequence[Sequence[int]], events: list[dict[str, Any]]
) -> None:
    """Train as a rank did, in one process, and compare each loss and each common value.

    A rank that is lost trains on by itself here, in no exchange of the others.

    Args:
        scenario: the faults, of a training without a codec.
        rank: whose events follow.
        sets: the members, at first and after each change.
        events: of the rank.

    Raises:
        ReplayError: an exchange is over a set of ranks that it cannot have, or over none, or a
            loss is another one.
    """
    outer = {name: scenario.update[name] for name in ("steps", "outer")}
    with seeding:
        built = [model_of(nn.Identity()) for _ in range(scenario.world_size)]
    models = [model for model, _ in built]
    names = [name for name, _ in models[0].named_parameters()]
    reference = LocalReference(models, [one for _, one in built], [names], **outer)
    run = _Run(scenario, reference, names, sets)
    batches = [Batches(number, STEPS) for number in range(scenario.world_size)]
    step = 0
    for event in events:
        kind = event["event"]
        # What follows the update of a step comes before the step is written down.
        if kind in ("sent", "moved", "mixed", "changed", "step") and step == run.written < STEPS:
            step += 1
            losses = run.take_step(batches, step)
        if kind == "step":
            if event["loss"] != losses[rank]:
                raise ReplayError(f"step {step}: the loss was {event['loss']}, not {losses[rank]}")
            run.written = step
        elif kind == "sent":
            run.send(event["indices"])
        elif kind == "moved":
            run.move(event["index"], event["crc"], step)
        elif kind == "mixed":
            reference.mix_in(names[event["index"]], event["share"])
        elif kind == "changed":
            run.change(sets.index(tuple(event["members"])))
        elif kind == "closed":
            found = [checksum(one) for one in models[rank].parameters()]
            if found != event["crcs"]:
                raise ReplayError(f"parameters in the end: {event['crcs']}, not {found}")


class _Run:
    def __init__(
        self,
        scenario: LocalScenario,
        reference: LocalReference,
        names: Sequence[str],
        sets: Sequence[Sequence[int]],
    ) -> None:
        self.written = 0
        self._local_size = scenario.local_size
        self._reference = reference
        self._names = names
        self._sets = sets
        self._least = self._newest = 0
        self._differences: dict[int, list[list[Tensor]]] = {}

    def take_step(self, batches: Sequence[Batches], step: int) -> list[float]:
        """Step all ranks by themselves; return their losses."""
        losses = []
        pairs = zip(self._reference.models, self._reference.optimizers, strict=True)
        for number, (model, optimizer) in enumerate(pairs):
            loss = loss_of(model, batches[number][step - 1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @torch.no_grad()
    def send(self, indices: Sequence[int]) -> None:
        """Take all ranks' differences as they are now."""
        self._least = max(self._least, self._newest)
        self._differences = {}
        for index in indices:
            name = self._names[index]
            common = self._reference.common[name]
            models = self._reference.models
            own = [[common - model.get_parameter(name)] for model in models]
            self._differences[index] = own

    def move(self, index: int, crc: int, step: int) -> None:
        """Move a common value by the mean over the one set of ranks that gives these bits."""
        name, reference = self._names[index], self._reference
        before, momentum = reference.common[name], reference.buffers.get(name)
        for number in range(self._least, len(self._sets)):
            members = self._sets[number]
            reference.common[name] = before
            if momentum is None:
                reference.buffers.pop(name, None)
            else:
                reference.buffers[name] = momentum
            found = mean_over(self._differences[index], members, 0, self._local_size)
            reference.move(name, found)
            if checksum(reference.common[name]) == crc:
                self._newest = max(self._newest, number)
                return
        possible = self._sets[self._least :]
        raise ReplayError(f"step {step}: the move of parameter {index} is over none of {possible}")

    def change(self, number: int) -> None:
        """Have all later exchanges be over these members, or fewer."""
        self._newest = max(self._newest, number)
