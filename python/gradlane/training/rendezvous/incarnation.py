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
_AFTER_RANK_0_S = 2.0


@dataclass(frozen=True)
class Incarnation:
    """One start of all ranks.

    Attributes:
        name: in keys of the store and in the job that connections are for.
        generation: in every frame: rank 0's count of restarts.
    """

    name: str
    generation: int


_agreed: dict[RankInfo, Incarnation] = {}
"""What the ranks of a job have agreed on, by this one's place."""


def incarnation_of(store: BoundedStore, place: RankInfo, timeout_s: float) -> Incarnation:
    """Return which start this process is of; the first time it asks the others.

    Args and errors: as `agree_on_incarnation`.
    """
    if place not in _agreed:
        _agreed[place] = agree_on_incarnation(store, place, timeout_s)
    return _agreed[place]


def agree_on_incarnation(store: BoundedStore, place: RankInfo, timeout_s: float) -> Incarnation:
    """Find out which start this is; a collective call of all ranks, those that only serve too.

    Args:
        store: the rendezvous store.
        place: this rank's.
        timeout_s: how long to wait for other ranks, in seconds.

    Raises:
        RendezvousError: a rank did not appear, or the store is gone or does not answer.
    """
    if place.ranks == 1:
        return Incarnation(str(place.restart), place.restart)
    hall = store.under(f"gradlane/{place.job}/start")
    if place.rank > 0:
        return _ask(hall, place, timeout_s)
    start = Incarnation(f"{place.restart}-{secrets.token_hex(4)}", place.restart)
    _welcome(hall, place, start, timeout_s)
    return start


def _welcome(hall: BoundedStore, place: RankInfo, start: Incarnation, timeout_s: float) -> None:
    """Answer every rank, also one that comes again, until all have heard the answer."""
    answered: dict[int, str] = {}
    missing = list(range(1, place.ranks))
    patience = SuspendAwareDeadline(timeout_s)
    pause_s = 0.0005
    reason = ""
    while missing and not reason:
        before = len(missing), len(answered)
        for rank in list(missing):
            asked = _read(hall, f"asked/{rank}", patience)
            if asked is None:
                continue
            if answered.get(rank) != asked:
                answered[rank] = asked
                told = json.dumps([asked, start.name, start.generation])
                hall.set(f"told/{rank}", told)
            elif _read(hall, f"heard/{rank}", patience) == start.name:
                missing.remove(rank)
        if (len(missing), len(answered)) != before:
            pause_s = 0.0005
        elif patience.is_over(pause_s):
            reason = _missed(place, missing, timeout_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)
    for rank, asked in answered.items():
        hall.set(f"told/{rank}", json.dumps([asked, start.name, start.generation, reason]))
    if reason:
        there = set(answered).difference(missing)
        # The store may end with this process.
        hall.wait_for({f"left/{start.name}/{rank}" for rank in there}, _AFTER_RANK_0_S)
        raise RendezvousError(reason)


def _ask(hall: BoundedStore, place: RankInfo, timeout_s: float) -> Incarnation:
    own = secrets.token_hex(8)
    hall.set(f"asked/{place.rank}", own)
    patience = SuspendAwareDeadline(timeout_s)
    pause_s = 0.0005
    heard = ""
    while True:
        told = _read(hall, f"told/{place.rank}", patience)
        asked, name, generation, *reason = json.loads(told) if told is not None else ("", "", 0)
        if asked == own and name != heard:
            hall.set(f"heard/{place.rank}", name)
            heard = name
            # Rank 0 began to wait for the others before it answered, and speaks first.
            patience = SuspendAwareDeadline(timeout_s + _AFTER_RANK_0_S)
        if asked == own and reason:
            if reason[0]:
                hall.set(f"left/{name}/{place.rank}", "")
                raise RendezvousError(reason[0])
            return Incarnation(name, generation)
        if patience.is_over(pause_s):
            raise RendezvousError(_missed(place, [0], patience.limit_s))
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)


def _read(hall: BoundedStore, key: str, patience: SuspendAwareDeadline) -> str | None:
    value = hall.read(key, limit_s=patience.left_s)
    return None if value is None else value.decode()


def _missed(place: RankInfo, missing: list[int], timeout_s: float) -> str:
    named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    ranks = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
    return (
        f"rank {place.rank} waited {timeout_s:g} s for {ranks} of job {place.job!r}; is every rank "
        "running, and does it call gradlane.init and prepare as often as the others, or serve?"
    )
