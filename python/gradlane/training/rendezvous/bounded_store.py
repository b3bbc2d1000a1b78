"""The rendezvous store, with calls that time out.

Torch's `TCPStore` waits for a response in `recv`, whatever its timeout: a stopped host or a cut
link would block a caller forever. So one daemon thread makes all calls on a store, and callers wait
for that thread in short slices, up to a limit. A stuck thread blocks neither its callers nor the
end of the process. Values are signed and checked here, where the job has a secret.

No other module calls a store; `test_bounded_store.py` checks the sources for that.
"""

from __future__ import annotations

import atexit
import itertools
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import SILENCE
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.signatures import StoreSigner
from gradlane.training.rendezvous.torch_reports import hidden_reports
from gradlane.training.torch_internals import Store

_ABSENT = "\0"
"""Value that no rank writes."""
_SLICE_S = 0.1
_LIMIT_MIN_S = 1.0
_DRAIN_S = 2.0
_PAUSE_S = 0.02
_CAUSE_WAIT_S = 1.0
"""Time that a rank that has lost the store gives its channel to name the lost rank."""

PollHook = Callable[[], object]
"""Called while waiting; raises when waiting has become useless."""


class StoreLostError(RendezvousError):
    """The rendezvous store is gone, or does not respond."""


class _Call:
    """A call, and its result once it is done."""

    def __init__(self, operation: Callable[[], Any]) -> None:
        self.operation = operation
        self.done = threading.Event()
        self.result: Any = None
        self.error: Exception | None = None


_workers: weakref.WeakSet[_Worker] = weakref.WeakSet()
"""Threads that may be inside a call."""


@atexit.register
def _stop_workers() -> None:
    """End all threads before the interpreter does: one that came back later would abort."""
    for worker in list(_workers):
        worker.stop()


class _Worker:
    """The thread that waits for the store in place of its callers; it ends with this object."""

    def __init__(self) -> None:
        self.is_stuck = False
        _workers.add(self)
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_run_calls, args=(self._calls,), name="gradlane-store", daemon=True
        )
        self._thread.start()

    def __del__(self) -> None:
        self._calls.put(None)

    def recover(self, limit_s: float) -> None:
        """Wait for a stuck call to end, up to a limit, and take calls again if it has."""
        if self.is_stuck and self.submit(lambda: None).done.wait(limit_s):
            self.is_stuck = False

    def stop(self) -> None:
        """Finish the queued calls and end the thread; do not wait for a stuck call."""
        self._calls.put(None)
        if not self.is_stuck:
            self._thread.join(_DRAIN_S)
        self.is_stuck = True

    def submit(self, operation: Callable[[], Any]) -> _Call:
        """Queue a call."""
        call = _Call(operation)
        self._calls.put(call)
        return call

    def wait(self, call: _Call, limit_s: float, on_poll: PollHook | None) -> bool:
        """Wait for a call; return whether it was done in time."""
        deadline = SuspendAwareDeadline(limit_s)
        while not call.done.wait(min(_SLICE_S, limit_s)):
            if on_poll is not None:
                on_poll()
            if self.is_stuck or deadline.is_over(_SLICE_S):
                return False
        return True


def _run_calls(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (call := calls.get()) is not None:
        try:
            with hidden_reports():
                call.result = call.operation()
        except Exception as error:
            call.error = error
        call.done.set()
        # The thread keeps no reference to a store that its session has released.
        del call


class BoundedStore:
    """A store, or its keys under one prefix."""

    def __init__(
        self, rank: int, where: str, limit_s: float, *, job: str = "", secret: str | None = None
    ) -> None:
        """Start without a store; `connect` follows.

        Args:
            rank: this rank.
            where: the store's address and host, for errors.
            limit_s: longest response time of the store, in seconds.
            job: name of the job.
            secret: signs the values of the job; None: values are not signed.
        """
        self._rank = rank
        self.ends_with_rank_0 = False
        """Whether rank 0's process hosts it."""
        self._where = where
        self._signer = StoreSigner.of(rank, secret, job, where)
        self._limit_s = limit_s
        self._prefix = ""
        self._worker = _Worker()
        self._store: Any = None

    @classmethod
    def wrapping(
        cls,
        store: Store,
        rank: int,
        where: str,
        limit_s: float,
        *,
        job: str = "",
        secret: str | None = None,
    ) -> BoundedStore:
        """Wrap a store that is connected already."""
        bounded = cls(rank, where, limit_s, job=job, secret=secret)
        bounded._store = store
        return bounded

    def connect(self, open_store: Callable[[], Store], timeout_s: float) -> Store | None:
        """Connect to the store.

        Args:
            open_store: returns the store; runs in the thread, its errors are raised here.
            timeout_s: seconds that it may take.

        Returns:
            The store; None if it did not respond in time.
        """
        call = self._worker.submit(open_store)
        if not self._worker.wait(call, timeout_s, None):
            self._worker.is_stuck = True
            return None
        if call.error is not None:
            raise call.error
        self._store = call.result
        return self.store

    @property
    def store(self) -> Store:
        """The store itself, for its address."""
        store: Store = self._store
        return store

    @property
    def is_signed(self) -> bool:
        """True if the job has a secret, and values are signed with it."""
        return self._signer.key is not None

    def with_prefix(self, prefix: str) -> BoundedStore:
        """Return the same store for keys with a prefix."""
        part = object.__new__(BoundedStore)
        part.__dict__.update(self.__dict__, _prefix=f"{self._prefix}{prefix}/")
        return part

    def as_rank(self, rank: int) -> BoundedStore:
        """Return the same store for this process under another rank."""
        part = object.__new__(BoundedStore)
        part.__dict__.update(self.__dict__, _rank=rank, _signer=replace(self._signer, rank=rank))
        return part

    def set(self, key: str, value: str | bytes, *, on_poll: PollHook | None = None) -> None:
        """Write a key.

        Raises:
            StoreLostError: the store is gone or does not respond.
        """
        path = self._prefix + key
        signed = self._signer.sign(path, value)
        self._run(lambda store: store.set(path, signed), None, on_poll)

    def read_first(
        self,
        writers: Mapping[str, int | None],
        *,
        limit_s: float | None = None,
        on_poll: PollHook | None = None,
    ) -> tuple[str, bytes] | None:
        """Return the first of some keys that exists, with its value, without waiting for any.

        Args:
            writers: the rank that writes each key, None for any, in the keys' order of precedence;
                a later key counts only if the earlier ones are still absent after it was found, so
                writes in that order are read in that order.
            limit_s: longest response time, if shorter than the usual one.
            on_poll: called while waiting.

        Raises:
            StoreLostError: the store is gone or does not respond.
            StoreValueRefusedError: the value is not signed as the job's secret signs it.
        """
        paths = {self._prefix + key: key for key in writers}

        def read(store: Any) -> tuple[str, bytes] | None:
            for path in paths:
                if (value := _value_in(store, path)) is not None:
                    # An earlier key may have been written since it was looked for, before this one.
                    for one in itertools.takewhile(path.__ne__, paths):
                        if (earlier := _value_in(store, one)) is not None:
                            return one, earlier
                    return path, value
            return None

        found: tuple[str, bytes] | None = self._run(read, limit_s, on_poll)
        if found is None:
            return None
        path, stored = found
        return paths[path], self._signer.check(path, stored, writers[paths[path]])

    def read(
        self,
        key: str,
        writer: int | None,
        *,
        limit_s: float | None = None,
        on_poll: PollHook | None = None,
    ) -> bytes | None:
        """Return the value of a key, or None if it is not there; errors as for `read_first`.

        Args:
            key: the key.
            writer: the rank that writes it; None: any rank may.
            limit_s: longest response time, if shorter than the usual one.
            on_poll: called while waiting.
        """
        found = self.read_first({key: writer}, limit_s=limit_s, on_poll=on_poll)
        return None if found is None else found[1]

    def read_claimed(self, key: str, on_poll: PollHook | None = None) -> tuple[bytes, bool] | None:
        """Return the value of a key, and whether it is signed as it should be, or None.

        Args:
            key: the key, which any rank writes.
            on_poll: called while waiting.

        Raises:
            StoreLostError: the store is gone or does not respond.
        """
        path = self._prefix + key
        stored: bytes | None = self._run(lambda store: _value_in(store, path), None, on_poll)
        return None if stored is None else self._signer.claimed(path, stored)

    def set_if_absent(self, key: str, value: str, *, limit_s: float | None = None) -> str:
        """Write a key, which any rank may write, unless it exists; return its value.

        Raises:
            StoreLostError: the store is gone or does not respond.
            StoreValueRefusedError: the value is not signed as the job's secret signs it.
        """
        path = self._prefix + key
        signed = self._signer.sign(path, value).decode()
        stored: bytes = self._run(lambda store: store.compare_set(path, "", signed), limit_s, None)
        return self._signer.check(path, stored, None).decode()

    def replace(self, key: str, old: bytes, new: str) -> bytes | None:
        """Write a key, which any rank may write, if it has an old value; return its value then.

        Args:
            key: the key.
            old: the value that it is to have.
            new: the value that it gets; another one than the old.

        Returns:
            The new value, or what is there instead; None if the key is not there.

        Raises:
            StoreLostError: the store is gone or does not respond.
            StoreValueRefusedError: the value is not signed as the job's secret signs it.
        """
        path = self._prefix + key
        stored: bytes | None = self._run(lambda store: _value_in(store, path), None, None)
        if stored is None:
            return None
        found = self._signer.check(path, stored, None)
        if found != old:
            return found
        signed = self._signer.sign(path, new)
        now: bytes = self._run(
            lambda store: store.compare_set(path, stored.decode(), signed.decode()), None, None
        )
        # A store returns what it was to find where it finds nothing.
        return None if now == stored else self._signer.check(path, now, None)

    def increment(self, key: str, *, on_poll: PollHook | None = None) -> int:
        """Add one to a counter that starts at 0, and is not signed; return it.

        Args:
            key: of the counter.
            on_poll: called while waiting.

        Raises:
            StoreLostError: the store is gone or does not respond.
        """
        number: int = self._run(lambda store: store.add(self._prefix + key, 1), None, on_poll)
        return number

    def wait_for(self, writers: Mapping[str, int | None], limit_s: float) -> None:
        """Wait until all given keys exist, up to a limit; errors as for `read_first`.

        Args:
            writers: the rank that writes each key, None for any.
            limit_s: longest wait, in seconds.
        """
        deadline = SuspendAwareDeadline(limit_s)
        missing = dict(writers)
        while missing := {
            key: writer
            for key, writer in missing.items()
            if self.read(key, writer, limit_s=deadline.remaining_s) is None
        }:
            if deadline.is_over(_PAUSE_S):
                return
            time.sleep(_PAUSE_S)

    def delete(self, key: str) -> None:
        """Delete a key in the background, if the store supports it."""
        if not self._worker.is_stuck:
            store, whole = self._store, self._prefix + key
            self._worker.submit(lambda: store.delete_key(whole))

    @property
    def answers(self) -> bool:
        """False if a call has found that the store does not respond."""
        return not self._worker.is_stuck

    def wait_until_it_answers(self, limit_s: float) -> None:
        """Wait until a store that did not respond does so, up to a limit.

        Args:
            limit_s: longest wait, in seconds.
        """
        self._worker.recover(limit_s)

    def drain(self) -> None:
        """Wait shortly for background calls to finish."""
        self._worker.wait(self._worker.submit(lambda: None), _DRAIN_S, None)

    def close(self) -> None:
        """Release the store; later calls fail."""
        self._worker.stop()

    def _run(
        self, operation: Callable[[Any], Any], limit_s: float | None, on_poll: PollHook | None
    ) -> Any:
        limit_s = self._limit_s if limit_s is None else min(limit_s, self._limit_s)
        limit_s = max(limit_s, _LIMIT_MIN_S)
        store, worker = self._store, self._worker
        call = None if worker.is_stuck else worker.submit(lambda: operation(store))
        if call is None or not worker.wait(call, limit_s, on_poll):
            worker.is_stuck = True
            if on_poll is not None:
                _wait_for_cause(on_poll, 0.0 if call is None else _CAUSE_WAIT_S)
            raise StoreLostError(
                f"rank {self._rank}: the rendezvous store {self._where}, does not answer (waited "
                f"{limit_s:g} s): its process or host stands still, or the network to it is cut; "
                "look there, and restart from the last checkpoint (longer pauses of it: "
                f"{SILENCE}, of which it has a quarter more)"
            )
        if call.error is None:
            return call.result
        if not isinstance(call.error, RuntimeError):
            raise call.error
        if on_poll is not None:
            _wait_for_cause(on_poll, _CAUSE_WAIT_S)
        reason = str(call.error).splitlines() or [type(call.error).__name__]
        raise StoreLostError(
            f"rank {self._rank} lost the rendezvous store {self._where}: its process has ended, or "
            f"the network to it is cut ({reason[0]})"
        ) from call.error


def _value_in(store: Any, path: str) -> bytes | None:
    """Return the value of a key in one call; a `get` after a `check` may meet a deleted key."""
    # A store returns what it was to find where it finds nothing.
    value = bytes(store.compare_set(path, _ABSENT, _ABSENT))
    return None if value == _ABSENT.encode() else value


def _wait_for_cause(on_poll: PollHook, limit_s: float) -> None:
    """Let the channel raise first, which knows the lost rank or link."""
    deadline_s = time.monotonic() + limit_s
    on_poll()
    while time.monotonic() < deadline_s:
        time.sleep(_SLICE_S / 2)
        on_poll()
