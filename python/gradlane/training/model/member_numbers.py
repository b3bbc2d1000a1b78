"""Whole numbers that all members gather between two steps, where training goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence

from gradlane.errors import SessionFailedError, UsageError
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.number_exchange import NumberExchange
from gradlane.training.model.rank_status import RankNumbers
from gradlane.training.rendezvous.membership import Membership


class MemberNumbers:
    """Gathers numbers over the channel of one model."""

    def __init__(
        self,
        parts: KernelParts,
        update: StepUpdate,
        membership: Membership | None,
        numbers: NumberExchange,
    ) -> None:
        """Gather nothing yet.

        Args:
            parts: those below.
            update: settles the last step.
            membership: the ranks that train, where training goes on without lost ones, or None.
            numbers: exchanges bytes.
        """
        self._numbers = numbers
        self._phases = parts.phases
        self._exchange = parts.exchange
        self._update = update
        self._membership = membership

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Gather whole numbers of all members, between two steps; a collective call.

        Args:
            values: this rank's.

        Returns:
            Those of each member, by its rank; where members were lost meanwhile, new ones are in
            force when it returns.

        Raises:
            UsageError: the model is in the middle of a step, or training does not go on.
            GradlaneError: the session has failed, or a rank trains meanwhile.
        """
        membership, status = self._membership, self._exchange.layout.status
        assert membership is not None and status is not None, "the session goes on"
        if self._phases.phase in (Phase.BACKWARD, Phase.ATTACHED):
            raise UsageError(
                f"session.gather_integers() inside step {self._exchange.training_step}: call it "
                "after optimizer.step() or zero_grad()"
            )
        text = json.dumps(list(values)).encode()
        texts = dict.fromkeys(membership.members, b"")
        at, part_bytes = 0, status.part_bytes
        while True:
            found = self._gather_part(membership, len(text), text[at : at + part_bytes])
            for rank, one in found.items():
                texts[rank] = (texts.get(rank, b"") + one.part)[: one.size]
            at += part_bytes
            if all(one.size <= at for one in found.values()):
                break
        while any(rank not in found for rank in membership.members):
            # A member was lost; soon all others know who goes on.
            found = self._gather_part(membership, 0, b"")
            known = [one.generation or 0 for one in found.values()]
            membership.put_into_force(known, self._exchange.training_step_of)
        return [list(map(int, json.loads(texts[rank]))) for rank in membership.members]

    def _gather_part(
        self, membership: Membership, size: int, part: bytes
    ) -> dict[int, RankNumbers]:
        """Exchange some bytes of all ranks' numbers.

        Raises:
            SessionFailedError: a rank trains meanwhile.
        """
        failure = self._phases.failure
        failure.raise_failure()
        self._update.settle()
        with self._phases.lock:
            found = self._numbers.exchange(membership.known_generation, size, part)
        others = [rank for rank, one in found.items() if one.generation is None]
        if others:
            failure.fail_and_raise(
                SessionFailedError(
                    f"rank {others[0]} trains a step where this rank is in "
                    "session.gather_integers(): call it on all ranks, between the same two steps",
                    self._exchange.training_step,
                )
            )
        return found
