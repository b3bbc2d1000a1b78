"""Agreement of all ranks on the incarnation of their job: one start of its processes.

What ranks leave in the rendezvous store must not be read by a later start: the secret or address of
a process that has ended leads nowhere. Launchers count restarts, but torchrun counts them on each
node. Where a rank fails, the agent of its node counts a restart; another node's agent, which
restarts its ranks as well, may not; and where a node joins, no agent counts. So rank 0 draws a name
for the incarnation and sends it to each process that requests it. A request carries a number that
the process has drawn itself, so a process recognizes replies to its predecessor. No rank goes on
before all have acknowledged the reply: rank 0 names a missing rank, and all others raise the same
error.

Where the job has a secret, requests and replies are signed. A rank then knows that the reply is
rank 0's and younger than its request, and rank 0 knows that each acknowledgement is younger than
the name. All later keys carry the name, so that no value of an earlier start is taken for one of
this start.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from gradlane.errors import RendezvousError, UsageError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.presence import BUSY_TEXT, Presence, RankDeadline
from gradlane.training.rendezvous.signatures import StoreValueRefusedError

_PAUSE_LAST_S = 0.1
_RANK_0_GRACE_S = 2.0
_NAME_BYTES = 8
"""Random bytes of an incarnation's name, and of a request."""
_REFUSED = "refused"


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks.

    Attributes:
        name: part of store keys and of the job name of connections.
        generation: rank 0's count of restarts, sent in every frame.
    """

    name: str
    generation: int


_incarnations: dict[RankInfo, tuple[Incarnation, bool]] = {}
"""The agreed incarnation, by this rank's info, and whether the agreement was signed."""


def incarnation_of(
    store: BoundedStore,
    rank_info: RankInfo,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
    presence: Presence | None = None,
    request: str | None = None,
) -> Incarnation:
    """Return the incarnation of this process; the first call asks the other ranks.

    Args and errors: as for `agree_on_incarnation`.

    Raises:
        UsageError: an earlier session of this process had no secret, and this one has, or the other
            way round.
    """
    if rank_info not in _incarnations:
        agreed = agree_on_incarnation(store, rank_info, timeout_s, look, presence, request)
        _incarnations[rank_info] = (agreed, store.is_signed)
    incarnation, was_signed = _incarnations[rank_info]
    if was_signed != store.is_signed:
        # Strangers may have chosen the name where nobody signed it.
        raise UsageError(
            f"rank {rank_info.rank} has opened a session of job {rank_info.job!r} "
            f"{'with' if was_signed else 'without'} a secret before, and this one has "
            f"{'none' if was_signed else 'one'}: give all sessions of a process the same secret, "
            "or another job name"
        )
    return incarnation


def agree_on_incarnation(
    store: BoundedStore,
    rank_info: RankInfo,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
    presence: Presence | None = None,
    request: str | None = None,
) -> Incarnation:
    """Agree on the incarnation; a collective call of all ranks, dedicated servers included.

    Args:
        store: the rendezvous store.
        rank_info: this rank's.
        timeout_s: longest wait for ranks without a sign of life, in seconds.
        look: called while waiting; raises where waiting is in vain.
        presence: the ranks' signs of life; None: there are none.
        request: drawn by this rank; None: one is drawn here.

    Raises:
        RendezvousError: a rank did not appear, or the store is gone or does not respond.
        StoreValueRefusedError: a rank has no secret or another one, or a stranger has written.
    """
    if rank_info.ranks == 1:
        return Incarnation(str(rank_info.restart), rank_info.restart)
    store = store.with_prefix(f"gradlane/{rank_info.job}/start")
    if rank_info.rank > 0:
        return _request(store, rank_info, timeout_s, look, presence, request)
    drawn = secrets.token_hex(_NAME_BYTES)
    incarnation = Incarnation(f"{rank_info.restart}-{drawn}", rank_info.restart)
    _announce(store, rank_info, incarnation, timeout_s, look, presence)
    return incarnation


def _announce(
    store: BoundedStore,
    rank_info: RankInfo,
    incarnation: Incarnation,
    timeout_s: float,
    look: Callable[[], object],
    presence: Presence | None,
) -> None:
    """Reply to every rank, also to a restarted one, until all have acknowledged."""
    replied: dict[int, str] = {}
    missing = list(range(1, rank_info.ranks))
    deadline = RankDeadline(timeout_s, presence)
    pause_s = 0.0005
    reason = ""
    while missing and not reason:
        before = len(missing), len(replied)
        try:
            for rank in list(missing):
                request = _read_text(store, f"asked/{rank}", rank, deadline)
                if request is None:
                    continue
                if replied.get(rank) != request:
                    replied[rank] = request
                    reply = json.dumps([request, incarnation.name, incarnation.generation])
                    store.set(f"told/{rank}", reply)
                    continue
                heard = _read_text(store, f"heard/{rank}", rank, deadline) or ""
                if heard == incarnation.name:
                    missing.remove(rank)
                elif heard.startswith(f"{_REFUSED} {request} "):
                    reason = heard.removeprefix(f"{_REFUSED} {request} ")
        except StoreValueRefusedError as error:
            reason = str(error)
        if (len(missing), len(replied)) != before:
            pause_s = 0.0005
        elif not reason and deadline.is_over(pause_s, missing):
            reason = _timeout_text(rank_info, missing, deadline)
        look()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)
    for rank in range(1, rank_info.ranks):
        # A rank without the secret learns that there is one.
        last = [replied.get(rank, ""), incarnation.name, incarnation.generation, reason]
        store.set(f"told/{rank}", json.dumps(last))
    if reason:
        there = set(replied).difference(missing)
        # The store may end with this process.
        with contextlib.suppress(StoreValueRefusedError):
            store.wait_for(
                {f"left/{incarnation.name}/{rank}": rank for rank in there}, _RANK_0_GRACE_S
            )
        raise RendezvousError(reason)


def _request(
    store: BoundedStore,
    rank_info: RankInfo,
    timeout_s: float,
    look: Callable[[], object],
    presence: Presence | None,
    request: str | None,
) -> Incarnation:
    own_request = request or secrets.token_hex(_NAME_BYTES)
    store.set(f"asked/{rank_info.rank}", own_request)
    deadline = RankDeadline(timeout_s, presence)
    pause_s = 0.0005
    acknowledged = answered = ""
    while True:
        try:
            reply = _read_text(store, f"told/{rank_info.rank}", 0, deadline)
        except StoreValueRefusedError as error:
            # Rank 0 tells the others, and names this rank.
            store.set(f"heard/{rank_info.rank}", f"{_REFUSED} {own_request} {error}")
            raise
        answered, name, generation, *reason = (
            json.loads(reply) if reply is not None else ("", "", 0)
        )
        if answered == own_request and name != acknowledged:
            store.set(f"heard/{rank_info.rank}", name)
            acknowledged = name
            # Rank 0 began to wait before it replied, so it times out first.
            deadline = RankDeadline(timeout_s, presence, _RANK_0_GRACE_S)
        if answered == own_request and reason:
            if reason[0]:
                store.set(f"left/{name}/{rank_info.rank}", "")
                raise RendezvousError(reason[0])
            return Incarnation(name, generation)
        if deadline.is_over(pause_s, [0]):
            text = _timeout_text(rank_info, [0], deadline)
            if answered not in ("", own_request):
                text += "; its last reply answers a request of an earlier start"
            raise RendezvousError(text)
        look()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)


def _read_text(store: BoundedStore, key: str, writer: int, deadline: RankDeadline) -> str | None:
    value = store.read(key, writer, limit_s=deadline.remaining_s)
    return None if value is None else value.decode()


def _timeout_text(rank_info: RankInfo, missing: list[int], deadline: RankDeadline) -> str:
    waited = f"rank {rank_info.rank} waited {deadline.describe(missing)} of job {rank_info.job!r}"
    if not deadline.silent(missing):
        return f"{waited}, {BUSY_TEXT}"
    return (
        f"{waited}; is every rank running, and does it call gradlane.init and prepare as often as "
        f"the others, or serve? (longer waits for ranks to appear: {CONNECT})"
    )
