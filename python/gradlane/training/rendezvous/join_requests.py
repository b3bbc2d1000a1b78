"""Requests of ranks that want to join a training that runs, through the job's store.

Keys are under `gradlane/{job}/join`, and numbers of requests count up from 1:

- `world`: how many ranks train; the first member keeps it up to date.
- `request/N`: of a rank that wants to join; it takes the first free number.
- `call/N`, `here/N`: the first member calls, and the rank answers with the same word, so that
  nobody waits for a rank that has ended since.
- `precopy/N`: where the first members give it their state, while they train on.
- `ready/N`: it has nearly what they have, so that they may let it in.
- `invitation/N`: which rank it will be, and where the new world meets.
- `outcome/N`: whether it joined, or why not.

The first member looks for requests in a thread of its own, and calls the others in the statuses of
a training step: `2 N` to give the state, `2 N + 1` to let the rank in. Where the job has a secret,
all values are signed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradlane.errors import RendezvousError, UsageError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.log import log
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.membership import Membership

_LOOK_EVERY_S = 0.5
_LOOK_EVERY_WHILE_ONE_JOINS_S = 0.1
_ANSWER_S = 3.0
"""How long the first member waits for the answer to its call."""
_POLL_S = 0.02
JOINED = "joined"
_REFUSED = "refused: "
"""An outcome that begins so would be the same another time."""
_UNANSWERED = "this rank did not answer the first member's call"


@dataclass(frozen=True)
class Invitation:
    """What a rank that joins has to know of the world that it joins.

    Attributes:
        rank: its rank there; the last one.
        world_size: number of ranks, this one included.
        generation: number of the membership.
        step: training steps that have ended.
        job: name of the world in the store.
    """

    rank: int
    world_size: int
    generation: int
    step: int
    job: str


def join_keys(store: BoundedStore, job: str) -> BoundedStore:
    """Return a job's store for requests to join."""
    return store.with_prefix(f"gradlane/{job}/join")


class JoinRequests:
    """The requests to join, as the members see them."""

    def __init__(self, store: BoundedStore, membership: Membership) -> None:
        """Look for nothing yet.

        Args:
            store: of `join_keys`.
            membership: the ranks that train; learns what to call the others for.
        """
        self._store = store
        self._membership = membership
        self.precopies = False
        """Whether the members can give their state while they train on."""
        self.refusal = ""
        """Why no rank can join at all; empty: some can."""
        self._given_by = 0
        """Generation of the members that have begun to."""
        self._passed = 0
        """Number of the last request that is settled, or whose rank did not answer."""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Look for requests from now on, while this rank is the first member."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="gradlane-joins", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._closing.set()

    def note_given(self) -> None:
        """Note that the members in force give their state to the rank of a request."""
        self._given_by = self._membership.generation

    def tell_precopy(self, number: int, plan: str) -> None:
        """Tell the rank of a request where it is given the state; each that gives it does.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        self._store.set(f"precopy/{number}", plan)

    def invite(self, number: int, invitation: Invitation) -> None:
        """Invite the rank of a request.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        self._store.set(f"invitation/{number}", json.dumps(dataclasses.asdict(invitation)))

    def settle(self, number: int, outcome: str) -> None:
        """Tell the rank of a request whether it has joined, unless another member has."""
        with contextlib.suppress(RendezvousError):
            self._store.set_if_absent(f"outcome/{number}", outcome)

    def _run(self) -> None:
        told = 0
        pause_s = _LOOK_EVERY_S
        try:
            while not self._closing.wait(pause_s):
                membership = self._membership
                if not membership.leads or membership.request:
                    continue
                if told != membership.world_size:
                    told = membership.world_size
                    self._store.set("world", json.dumps(told))
                number = self._next_request()
                if number is not None and self.refusal:
                    self.settle(number, f"{_REFUSED}{self.refusal}")
                elif number is not None:
                    membership.request = self._call_for(number)
                pause_s = _LOOK_EVERY_S if number is None else _LOOK_EVERY_WHILE_ONE_JOINS_S
        except RendezvousError as error:
            if not self._closing.is_set():
                log.warning("no rank can join any more: %s", error)

    def _call_for(self, number: int) -> int:
        """Return what to call the other members for, at the request of a rank; 0: nothing yet."""
        if not self._answers(number):
            self._passed = number
            self.settle(number, _UNANSWERED)
            return 0
        has_begun = self._membership.answered == 2 * number
        if self.precopies and not has_begun:
            return 2 * number
        if has_begun and self._membership.known_generation != self._given_by:
            # It asks again, and gets the state from those that are left.
            self._passed = number
            self.settle(number, "a member was lost meanwhile")
            return 0
        if has_begun and self._store.read(f"ready/{number}", None) is None:
            return 0
        return 2 * number + 1

    def _next_request(self) -> int | None:
        """Return the number of the first request that is not settled; None: there is none."""
        number = max((self._membership.answered - 1) // 2, self._passed) + 1
        while self._store.read(f"request/{number}", None) is not None:
            # Another first member may have settled it, also one of an earlier start of the job.
            if self._store.read(f"outcome/{number}", None) is None:
                return number
            self._passed, number = number, number + 1
        return None

    def _answers(self, number: int) -> bool:
        """Return whether the rank of a request is still there."""
        word = secrets.token_hex(8)
        self._store.set(f"call/{number}", word)
        deadline = SuspendAwareDeadline(_ANSWER_S)
        while not deadline.is_over(_POLL_S):
            answer = self._store.read(f"here/{number}", None)
            if answer is not None and answer.decode() == word:
                return True
            time.sleep(_POLL_S)
        return False


class JoinRequest:
    """A request to join, as its rank sees it."""

    def __init__(self, store: BoundedStore) -> None:
        """Write a request.

        Args:
            store: of `join_keys`.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        self._store = store
        word = secrets.token_hex(8)
        self.number = 1
        while store.set_if_absent(f"request/{self.number}", word) != word:
            self.number += 1

    def wait_for_invitation(
        self, deadline: SuspendAwareDeadline, begin_precopy: Callable[[bytes], Callable[[], bool]]
    ) -> Invitation:
        """Wait until the members have invited this rank, at the end of a step.

        Args:
            deadline: for it, from when the state is here that they give before, or from when they
                have last called the rank of an earlier request.
            begin_precopy: begins to take that over, by the plan that they have told; what it
                returns tells whether this rank is nearly where they are, or will not come nearer.

        Raises:
            UsageError: no rank can join the training as it is.
            RendezvousError: they do not until the deadline; or the store is lost.
        """
        called, called_before = "", b""
        has_caught_up: Callable[[], bool] | None = None
        is_ready = False
        names = ("outcome", "invitation", "precopy", "call")
        keys: dict[str, int | None] = {f"{name}/{self.number}": None for name in names}
        while True:
            found = self._store.read_first(keys, limit_s=deadline.remaining_s)
            key, value = ("", b"") if found is None else found
            if key.startswith("outcome/"):
                outcome = value.decode()
                if outcome.startswith(_REFUSED):
                    raise UsageError(f"this rank cannot join: {outcome.removeprefix(_REFUSED)}")
                raise RendezvousError(f"the members did not let this rank in: {outcome}")
            if key.startswith("invitation/"):
                return Invitation(**json.loads(value))
            if key.startswith("precopy/"):
                has_caught_up = begin_precopy(value)
                del keys[key]
            elif key and value.decode() != called:
                called = value.decode()
                self._store.set(f"here/{self.number}", called)
            if has_caught_up is not None and not is_ready:
                deadline = SuspendAwareDeadline(deadline.limit_s)
                is_ready = has_caught_up()
                if is_ready:
                    self._store.set(f"ready/{self.number}", "")
            if deadline.is_over(_POLL_S):
                ahead = b"" if called else self._last_call_before()
                if ahead != called_before:
                    # Others join before this rank.
                    called_before = ahead
                    deadline = SuspendAwareDeadline(deadline.limit_s)
                    continue
                state = (
                    "a rank found its request, but takes no step" if called else "no rank found it"
                )
                raise RendezvousError(
                    f"this rank has waited {deadline.limit_s:g} s to be invited to join: {state}; "
                    "is a training under way, with going_on, two ranks or more, and the same job "
                    f"and store? (longer waits: {CONNECT})"
                )
            time.sleep(_POLL_S)

    def _last_call_before(self) -> bytes:
        """Return the last call of the rank of an earlier request; empty where none is open."""
        for number in range(1, self.number):
            if self._store.read(f"outcome/{number}", None) is None:
                return self._store.read(f"call/{number}", None) or b""
        return b""

    def has_joined(self) -> bool:
        """Return whether the members have agreed that this rank joins.

        Raises:
            RendezvousError: they have agreed that it does not.
        """
        outcome = self._store.read(f"outcome/{self.number}", None)
        if outcome is not None and outcome.decode() != JOINED:
            raise RendezvousError(f"this rank did not join: {outcome.decode()}")
        return outcome is not None

    def wait_for_outcome(self, deadline: SuspendAwareDeadline, look: Callable[[], object]) -> None:
        """Wait until the members have agreed that this rank has joined.

        Args:
            deadline: for it.
            look: called while waiting; raises when the connections to the members are lost.

        Raises:
            RendezvousError: they have agreed that it has not, or not in time.
        """
        while not self.has_joined():
            look()
            if deadline.is_over(_POLL_S):
                raise RendezvousError(
                    f"the members have not agreed in {deadline.limit_s:g} s that this rank joins; "
                    "look at their logs, and start it again"
                )
            time.sleep(_POLL_S)


def ranks_in_training(store: BoundedStore, deadline: SuspendAwareDeadline) -> int:
    """Wait until a training is under way; return how many ranks it has.

    Args:
        store: of `join_keys`.
        deadline: for it.

    Raises:
        RendezvousError: none is under way until the deadline.
    """
    while True:
        world = store.read("world", None, limit_s=deadline.remaining_s)
        if world is not None:
            return int(world)
        if deadline.is_over(_LOOK_EVERY_S):
            raise RendezvousError(
                f"no training that can be joined was found in {deadline.limit_s:g} s: it runs with "
                "going_on and two ranks or more, under the same job name, and in the same store "
                f"(longer waits: {CONNECT})"
            )
        time.sleep(_POLL_S)
