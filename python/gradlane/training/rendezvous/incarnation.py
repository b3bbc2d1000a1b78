"""Which start of a job's ranks this is, as the processes that are there agree on it.

What ranks leave in the rendezvous store must not be read by those of another start: a secret or an
address of processes that have ended would lead nowhere. Launchers count restarts, but torchrun's
count is one of each node: where a rank fails, the agent of its node counts a restart, and another
node's agent, which starts its ranks again with it, may not; where a node joins, nobody counts. So
rank 0 draws a name for the start and tells it to each process that asks. A process asks with a
number that it has drawn itself, so that it knows an answer to itself from one to the process
before it. Nobody goes on before all have heard the answer: a rank that does not come is named by
rank 0, and in its words by all others.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass

from gradlane.errors import RendezvousError
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo

_PAUSE_LAST_S = 0.1
_RANK_0_GRACE_S = 2.0


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks.

    Attributes:
        name: in keys of the store and in the job that connections are for.
        generation: in every frame: rank 0's count of restarts.
    """

    name: str
    generation: int


_incarnations: dict[RankInfo, Incarnation] = {}
"""What the ranks of a job have agreed on, by this one's place."""


def incarnation_of(store: BoundedStore, rank_info: RankInfo, timeout_s: float) -> Incarnation:
    """Return which start this process is of; the first time it asks the others.

    Args and errors: as `agree_on_incarnation`.
    """
    if rank_info not in _incarnations:
        _incarnations[rank_info] = agree_on_incarnation(store, rank_info, timeout_s)
    return _incarnations[rank_info]


def agree_on_incarnation(store: BoundedStore, rank_info: RankInfo, timeout_s: float) -> Incarnation:
    """Find out which start this is; a collective call of all ranks, those that only serve too.

    Args:
        store: the rendezvous store.
        rank_info: this rank's.
        timeout_s: how long to wait for other ranks, in seconds.

    Raises:
        RendezvousError: a rank did not appear, or the store is gone or does not answer.
    """
    if rank_info.ranks == 1:
        return Incarnation(str(rank_info.restart), rank_info.restart)
    store = store.with_prefix(f"gradlane/{rank_info.job}/start")
    if rank_info.rank > 0:
        return _request(store, rank_info, timeout_s)
    incarnation = Incarnation(f"{rank_info.restart}-{secrets.token_hex(4)}", rank_info.restart)
    _announce(store, rank_info, incarnation, timeout_s)
    return incarnation


def _announce(
    store: BoundedStore, rank_info: RankInfo, incarnation: Incarnation, timeout_s: float
) -> None:
    """Answer every rank, also one that comes again, until all have heard the answer."""
    replied: dict[int, str] = {}
    missing = list(range(1, rank_info.ranks))
    deadline = SuspendAwareDeadline(timeout_s)
    pause_s = 0.0005
    reason = ""
    while missing and not reason:
        before = len(missing), len(replied)
        for rank in list(missing):
            request = _read_text(store, f"asked/{rank}", deadline)
            if request is None:
                continue
            if replied.get(rank) != request:
                replied[rank] = request
                reply = json.dumps([request, incarnation.name, incarnation.generation])
                store.set(f"told/{rank}", reply)
            elif _read_text(store, f"heard/{rank}", deadline) == incarnation.name:
                missing.remove(rank)
        if (len(missing), len(replied)) != before:
            pause_s = 0.0005
        elif deadline.is_over(pause_s):
            reason = _timeout_text(rank_info, missing, timeout_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)
    for rank, request in replied.items():
        store.set(
            f"told/{rank}", json.dumps([request, incarnation.name, incarnation.generation, reason])
        )
    if reason:
        there = set(replied).difference(missing)
        # The store may end with this process.
        store.wait_for({f"left/{incarnation.name}/{rank}" for rank in there}, _RANK_0_GRACE_S)
        raise RendezvousError(reason)


def _request(store: BoundedStore, rank_info: RankInfo, timeout_s: float) -> Incarnation:
    own_request = secrets.token_hex(8)
    store.set(f"asked/{rank_info.rank}", own_request)
    deadline = SuspendAwareDeadline(timeout_s)
    pause_s = 0.0005
    acknowledged = ""
    while True:
        reply = _read_text(store, f"told/{rank_info.rank}", deadline)
        request, name, generation, *reason = json.loads(reply) if reply is not None else ("", "", 0)
        if request == own_request and name != acknowledged:
            store.set(f"heard/{rank_info.rank}", name)
            acknowledged = name
            # Rank 0 began to wait for the others before it answered, and speaks first.
            deadline = SuspendAwareDeadline(timeout_s + _RANK_0_GRACE_S)
        if request == own_request and reason:
            if reason[0]:
                store.set(f"left/{name}/{rank_info.rank}", "")
                raise RendezvousError(reason[0])
            return Incarnation(name, generation)
        if deadline.is_over(pause_s):
            raise RendezvousError(_timeout_text(rank_info, [0], deadline.limit_s))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)


def _read_text(store: BoundedStore, key: str, deadline: SuspendAwareDeadline) -> str | None:
    value = store.read(key, limit_s=deadline.remaining_s)
    return None if value is None else value.decode()


def _timeout_text(rank_info: RankInfo, missing: list[int], timeout_s: float) -> str:
    named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    ranks = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
    return (
        f"rank {rank_info.rank} waited {timeout_s:g} s for {ranks} of job {rank_info.job!r}; is "
        "every rank "
        "running, and does it call gradlane.init and prepare as often as the others, or serve?"
    )
