"""Whole numbers that all members gather between two steps, where training goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from gradlane.errors import SessionFailedError
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.rank_status import Gathered, RankNumbers
from gradlane.training.rendezvous.membership import Membership


class MemberNumbers:
    """Gathers numbers over the channel of one model."""

    def __init__(
        self,
        membership: Membership,
        failure: FailureLatch,
        exchange: Callable[[int, int, bytes], dict[int, RankNumbers]],
        part_bytes: int,
        training_step_of: Callable[[int], int],
        check: Callable[[], int],
    ) -> None:
        """Gather nothing yet.

        Args:
            membership: the ranks that train.
            failure: of the model.
            exchange: gives all ranks the newest membership that this one knows, how many bytes it
                has in all, and some of them; returns what came of each rank in the step.
            part_bytes: how many bytes travel at once.
            training_step_of: turns a step of the channel into one of training.
            check: raises `UsageError` in the middle of a step, and returns the last one's number.
        """
        self._membership = membership
        self._failure = failure
        self._exchange = exchange
        self._part_bytes = part_bytes
        self._training_step_of = training_step_of
        self._check = check

    def gather_integers(self, values: Sequence[int]) -> list[list[int]]:
        """Gather whole numbers of all members, between two steps; a collective call.

        Args:
            values: this rank's.

        Returns:
            Those of each member, by its rank; where members were lost meanwhile, new ones are in
            force when it returns.

        Raises:
            UsageError: the model is in the middle of a step.
            GradlaneError: the session has failed, or a rank trains meanwhile.
        """
        membership = self._membership
        step = self._check()
        text = json.dumps(list(values)).encode()
        texts = dict.fromkeys(membership.members, b"")
        at = 0
        while True:
            found = self._gather_part(len(text), text[at : at + self._part_bytes], step)
            for rank, one in found.items():
                texts[rank] = (texts.get(rank, b"") + one.part)[: one.size]
            at += self._part_bytes
            if all(one.size <= at for one in found.values()):
                break
        while any(rank not in found for rank in membership.members):
            # A member was lost; soon all others know who goes on.
            found = self._gather_part(0, b"", step)
            known = [one.generation for one in found.values()]
            membership.put_into_force(known, self._training_step_of)
        return [list(map(int, json.loads(texts[rank]))) for rank in membership.members]

    def _gather_part(self, size: int, part: bytes, step: int) -> dict[int, RankNumbers]:
        """Exchange some bytes of all ranks' numbers.

        Raises:
            SessionFailedError: a rank trains meanwhile.
        """
        self._failure.raise_failure()
        found = self._exchange(self._membership.known_generation, size, part)
        others = [rank for rank, one in found.items() if one.kind is not Gathered.INTEGERS]
        if others:
            self._failure.fail_and_raise(
                SessionFailedError(
                    f"rank {others[0]} trains a step where this rank is in "
                    "session.gather_integers(): call it on all ranks, between the same two steps",
                    step,
                )
            )
        return found
