"""Which start of a job's ranks this is, as the processes that are there agree on it.

What ranks leave in the rendezvous store must not be read by those of another start: a secret or an
address of processes that have ended would lead nowhere. Launchers count restarts, but torchrun's
count is one of each node: where a rank fails, the agent of its node counts a restart, and another
node's agent, which starts its ranks again with it, may not; where a node joins, nobody counts. So
rank 0 draws a name for the start and tells it to each process that asks. A process asks with a
number that it has drawn itself, so that it knows an answer to itself from one to the process
before it.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass

from torch._C._distributed_c10d import PrefixStore, Store

from gradlane.errors import RendezvousError
from gradlane.ranks.environment import Place
from gradlane.ranks.patience import Patience

_PAUSE_LAST_S = 0.1


@dataclass(frozen=True)
class Start:
    """One start of all ranks.

    Attributes:
        name: in keys of the store and in the job that connections are for.
        generation: in every frame: rank 0's count of restarts.
    """

    name: str
    generation: int


_agreed: dict[Place, Start] = {}
"""What the ranks of a job have agreed on, by this one's place."""


def start_of(store: Store, place: Place, timeout_s: float) -> Start:
    """Return which start this process is of; the first time it asks the others.

    Args and errors: as `agree_on_start`.
    """
    if place not in _agreed:
        _agreed[place] = agree_on_start(store, place, timeout_s)
    return _agreed[place]


def agree_on_start(store: Store, place: Place, timeout_s: float) -> Start:
    """Find out which start this is; a collective call of all ranks, those that only serve too.

    Args:
        store: the rendezvous store.
        place: this rank's.
        timeout_s: how long to wait for other ranks, in seconds.

    Raises:
        RendezvousError: a rank did not appear, or the store is gone.
    """
    if place.ranks == 1:
        return Start(str(place.restart), place.restart)
    hall = PrefixStore(f"gradlane/{place.job}/start", store)
    try:
        if place.rank == 0:
            start = Start(f"{place.restart}-{secrets.token_hex(4)}", place.restart)
            _welcome(hall, place, start, timeout_s)
        else:
            start = _ask(hall, place, timeout_s)
    except RuntimeError as error:
        if isinstance(error, RendezvousError):
            raise
        raise RendezvousError(
            f"rank {place.rank} lost the rendezvous store while the ranks of job {place.job!r} "
            f"came together: {error}"
        ) from error
    return start


def _welcome(hall: Store, place: Place, start: Start, timeout_s: float) -> None:
    """Answer every rank, also one that comes again, until all have heard the answer."""
    answered: dict[int, str] = {}
    missing = list(range(1, place.ranks))
    patience = Patience(timeout_s)
    pause_s = 0.0005
    while missing:
        before = len(missing), len(answered)
        for rank in list(missing):
            asked = _read(hall, f"asked/{rank}")
            if asked is None:
                continue
            if answered.get(rank) != asked:
                answered[rank] = asked
                told = json.dumps([asked, start.name, start.generation])
                hall.set(f"told/{rank}", told)
            elif _read(hall, f"heard/{rank}") == start.name:
                missing.remove(rank)
        if (len(missing), len(answered)) != before:
            pause_s = 0.0005
        elif patience.is_over(pause_s):
            raise _missed(place, missing, timeout_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)


def _ask(hall: Store, place: Place, timeout_s: float) -> Start:
    own = secrets.token_hex(8)
    hall.set(f"asked/{place.rank}", own)
    patience = Patience(timeout_s)
    pause_s = 0.0005
    while True:
        told = _read(hall, f"told/{place.rank}")
        if told is not None:
            asked, name, generation = json.loads(told)
            if asked == own:
                hall.set(f"heard/{place.rank}", name)
                return Start(name, generation)
        if patience.is_over(pause_s):
            raise _missed(place, [0], timeout_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_LAST_S)


def _read(hall: Store, key: str) -> str | None:
    return bytes(hall.get(key)).decode() if hall.check([key]) else None


def _missed(place: Place, missing: list[int], timeout_s: float) -> RendezvousError:
    named = ", ".join(map(str, missing[:8])) + (", …" if len(missing) > 8 else "")
    ranks = f"rank {named}" if len(missing) == 1 else f"ranks {named}"
    return RendezvousError(
        f"rank {place.rank} waited {timeout_s:g} s for {ranks} of job {place.job!r}; is every rank "
        "running, and does it call gradlane.init and prepare as often as the others, or serve?"
    )
