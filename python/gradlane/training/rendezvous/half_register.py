"""The word of the job's store on which of two halves of the ranks goes on.

The register is one key. Rank 0 writes it before the ranks connect, and each claim is added to those
before. So a half that finds no register, or one without a claim that it knows of, does not go on:
somebody has removed a key, or put an earlier value back. Each rank of a half that goes on also says
so in a key of its own, and looks at those of all others for as long as it trains: a half that comes
late finds the word of the first, and two that go on nevertheless find each other, and end.

Values are signed where the job has a secret. A party that decides at each moment what each half
reads from the store can still make both go on (`docs/security.md`).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from gradlane.errors import RendezvousError
from gradlane.training.log import log
from gradlane.training.rendezvous.bounded_store import StoreLostError
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_KEY = "halves"
_LOOK_FIRST_S = 0.05
_LOOK_LAST_S = 1.0


class RegisterError(RendezvousError):
    """The register cannot tell any more which half goes on."""


class HalfRegister:
    """The register of a world, as one rank reads and writes it."""

    def __init__(self, scope: RendezvousScope) -> None:
        """Know no claim yet.

        Args:
            scope: of the world's channel.
        """
        self._scope = scope.outlasting_session()
        self._rank = scope.rank_info.rank
        self._others = [rank for rank in range(scope.rank_info.ranks) if rank != self._rank]
        self._claims: dict[str, str] = {}
        """Values by generation, as far as this rank knows."""
        self._lock = threading.Lock()
        self._said: bytes | None = None
        """The word of this rank in the store; None: it goes on by no claim."""
        self._is_watching = False
        self._done = threading.Event()

    def open(self) -> None:
        """Write the register, on rank 0, before any rank is connected.

        Raises:
            RendezvousError: the store is gone or does not answer.
        """
        if self._rank == 0:
            self._scope.put(_KEY, json.dumps({}))

    def claim(self, generation: int, value: str) -> str:
        """Return what the store holds for a generation: this value if it held none.

        Args:
            generation: number of the membership.
            value: the ranks that go on, in the core's words.

        Raises:
            RendezvousError: the store is gone or does not answer; or it was changed so that it
                cannot tell.
        """
        key = str(generation)
        with self._lock:
            while True:
                self._hear_others()
                found = self._read()
                if key in self._claims:
                    return self._claims[key]
                if any(int(one) > generation for one in self._claims):
                    raise RegisterError(
                        f"other ranks are at membership {max(map(int, self._claims))} already, and "
                        f"rank {self._rank} was to claim {generation}"
                    )
                wanted = json.dumps({**self._claims, key: value})
                now = self._scope.replace(_KEY, found, wanted)
                if now is None:
                    raise self._changed("was removed")
                if now == wanted.encode():
                    self._claims[key] = value
                    self._say()
                    # The other half may have claimed it since this one has looked.
                    self._hear_others()
                    return value

    def watch(self, generation: int, fail: Callable[[str], object]) -> None:
        """Say that this rank goes on by a claim, and look for others from now on, in a thread.

        Args:
            generation: number of the membership that was claimed.
            fail: called with the reason for which this rank must not go on.
        """
        if self._is_watching:
            return
        self._is_watching = True
        threading.Thread(
            target=self._watch, args=(generation, fail), name="gradlane-halves", daemon=True
        ).start()

    def check(self) -> None:
        """Check once more that no other half goes on, where this one has claimed.

        Raises:
            RegisterError: one does, or the store was changed.
        """
        if self._said is None:
            return
        with self._lock:
            try:
                self._look()
            except StoreLostError:
                # Nobody can claim in it any more.
                return

    def close(self) -> None:
        """Look no more."""
        self._done.set()

    def _watch(self, generation: int, fail: Callable[[str], object]) -> None:
        pause_s = _LOOK_FIRST_S
        try:
            with self._lock:
                if str(generation) not in self._claims:
                    found = self._scope.peek(_KEY, None)
                    if found is None or str(generation) not in json.loads(found):
                        # A majority has decided, of which not all go on.
                        self._is_watching = False
                        return
                    self._read()
                    self._say()
            while not self._done.wait(pause_s):
                with self._lock:
                    self._look()
                pause_s = min(2 * pause_s, _LOOK_LAST_S)
        except StoreLostError as error:
            if not self._done.is_set():
                log.warning(
                    "rank %d looks no more whether another half goes on: %s", self._rank, error
                )
        except RendezvousError as error:
            if not self._done.is_set():
                fail(str(error))

    def _look(self) -> None:
        if self._scope.peek(self._own_key, self._rank) != self._said:
            raise self._changed(f"has lost the word of rank {self._rank}")
        self._read()
        self._hear_others()
        if json.dumps(self._claims).encode() != self._said:
            self._say()

    @property
    def _own_key(self) -> str:
        return f"{_KEY}/{self._rank}"

    def _say(self) -> None:
        # It outlives the session, so that a half that comes later finds it.
        text = json.dumps(self._claims)
        self._scope.put_lasting(self._own_key, text)
        self._said = text.encode()

    def _hear_others(self) -> None:
        for rank in self._others:
            said = self._scope.peek(f"{_KEY}/{rank}", rank)
            if said is not None:
                self._learn(json.loads(said), f"rank {rank} goes on in another half")

    def _read(self) -> bytes:
        """Read the register; return what it holds."""
        found = self._scope.peek(_KEY, None)
        if found is None:
            raise self._changed("was removed")
        claims = json.loads(found)
        for generation, value in self._claims.items():
            if claims.get(generation, value) != value or generation not in claims:
                raise self._changed("has lost a claim")
        self._learn(claims, "another half goes on")
        return found

    def _learn(self, claims: dict[str, str], conflict: str) -> None:
        for generation, value in claims.items():
            if self._claims.setdefault(generation, value) != value:
                raise RegisterError(
                    f"{conflict} than rank {self._rank} by membership {generation}: the register "
                    f"of halves in the job's store was changed; {_REMEDY}"
                )

    def _changed(self, what: str) -> RegisterError:
        return RegisterError(
            f"the register of halves in the job's store {what}, which no rank does: rank "
            f"{self._rank} cannot tell whether another half goes on; {_REMEDY}"
        )


_REMEDY = (
    "keep strangers away from the store, or give GoingOn(min_ranks=...) of more than half of the "
    "ranks, and restart from the last checkpoint"
)
