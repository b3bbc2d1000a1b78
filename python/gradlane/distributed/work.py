"""A call that has begun, as torch sees it."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistBackendError

from gradlane.distributed.forwarding import answer
from gradlane.training.torch_internals import c10d, leave_work_list

if TYPE_CHECKING:
    from gradlane.distributed.core import CoreGroup, CoreWork

PATIENCE_S = 0.001
"""For how long what has ended is left to a thread that may be waiting in a callback."""
IDLE_THREADS_MAX = 2
_NO_TIMEOUT = timedelta(0)


class GradlaneWork(c10d.Work):  # type: ignore[misc]
    """One call, or several that end together.

    Keeps the tensors of the call until it has ended. When nobody keeps the work itself, its
    tensors stay with `Futures` until then.
    """

    def __init__(
        self,
        futures: Futures,
        group: CoreGroup,
        works: Sequence[CoreWork],
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        failure: Callable[[Exception], Exception],
        finish: Callable[[], None] | None,
        number: int = 0,
    ) -> None:
        super().__init__()
        self._number = number
        self._futures, self._group, self._works = futures, group, works
        self._tensors: list[torch.Tensor] | None = tensors
        self._outputs, self._failure, self._finish = outputs, failure, finish
        self._future: Any = None
        self._lock = threading.Lock()

    @classmethod
    def joined(
        cls,
        works: Sequence[GradlaneWork],
        futures: Futures,
        group: CoreGroup,
        failure: Callable[[Exception], Exception],
        *,
        outputs: list[torch.Tensor] | None = None,
        then: Callable[[], None] = lambda: None,
    ) -> GradlaneWork:
        """Return one work for several, which ends with the last of them.

        Args:
            works: of one group.
            futures: of the group.
            group: theirs.
            failure: makes torch's exception of the core's.
            outputs: in place of those of the works.
            then: called once all works have ended.
        """

        def finish() -> None:
            for work in works:
                work._complete()
            then()

        calls = [call for work in works for call in work._works]
        # Outputs of its own are kept until `then`, also where nobody keeps the work.
        kept = outputs or []
        if outputs is None:
            outputs = [output for work in works for output in work._outputs]
        number = works[-1]._number if works else 0
        return cls(futures, group, calls, kept, outputs, failure, finish, number)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait until the call has ended.

        Args:
            timeout: zero: the time of the call or its group, after which the group ends.

        Raises:
            DistBackendError: it failed, or `timeout` is over, after which it goes on.
        """
        seconds = timeout.total_seconds() if timeout > _NO_TIMEOUT else None
        try:
            for work in self._works:
                self._group.wait(work, seconds)
        except Exception as error:
            raise self._failure(error) from None
        self._complete()
        leave_work_list(self._outputs)
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended; its results are in their tensors then."""
        is_done = all(self._group.poll(work) for work in self._works)
        if is_done and self.exception() is None:
            self._complete()
        return is_done

    def is_success(self) -> bool:
        """Return whether the call has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of a call that has failed."""
        for work in self._works:
            try:
                work.result()
            except Exception as error:
                return self._failure(error)
        return None

    def _get_sequence_number(self) -> int:
        """Return how many collectives this rank had begun in the group, with this one."""
        return self._number

    def missing_ranks(self) -> list[int]:
        """Return the ranks that did not come in time to a call that timed out."""
        for work in self._works:
            try:
                work.result()
            except Exception as error:
                if len(error.args) == 3 and error.args[1] == "timed out":
                    return list(error.args[2])
        return []

    def source_rank(self) -> int:
        """Return the rank of the group that a received message is from."""
        rank = self._works[0].result()
        if rank is None:
            raise DistBackendError("the message has not come yet: wait for it first")
        return rank

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of a call that has ended."""
        self.wait()
        return self._outputs

    def get_future(self) -> Any:
        """Return a future of the output tensors."""
        asked = answer(self)
        if asked is not None:
            return asked
        with self._lock:
            if self._future is None:
                self._future = torch.futures.Future()
                is_new = True
            else:
                is_new = False
        if is_new:
            self._futures.add(self._resolve, self._works)
        return self._future

    def __del__(self) -> None:
        """Keep the tensors of a call that runs and that nobody waits for."""
        if self._tensors and self._futures.is_of_this_process():
            self._futures.add(
                functools.partial(_finish, self._works, self._tensors, self._finish), self._works
            )

    def _resolve(self) -> None:
        """Complete the future of a call that has ended."""
        error = self.exception()
        if error is None:
            try:
                self._complete()
            except Exception as failed:
                error = failed
        if error is None:
            self._future.set_result(self._outputs)
        else:
            self._future.set_exception(error)

    def _complete(self) -> None:
        with self._lock:
            finish, self._finish, self._tensors = self._finish, None, None
            if finish is not None:
                finish()


def _finish(
    works: Sequence[CoreWork], tensors: list[torch.Tensor], finish: Callable[[], None] | None
) -> None:
    """Give the results of a call that nobody waits for to its tensors, which are kept so long."""
    del tensors
    with contextlib.suppress(Exception):
        for work in works:
            work.result()
        if finish is not None:
            finish()


@dataclass(eq=False)
class _Waiting:
    """A function to call, and how many calls have to end before."""

    ended: Callable[[], None]
    works: Sequence[CoreWork]
    left: int


class Futures:
    """Calls functions when a group's works have ended, on threads that begin with the first.

    A function may wait for another work of the group, as the callbacks of DDP's PowerSGD do. One
    thread takes what has ended; another waits beside it, and takes what was left for `PATIENCE_S`.
    """

    def __init__(self, group: CoreGroup) -> None:
        self._group = group
        self._lock = threading.RLock()
        # By key. A work may be waited for twice: by a future, and for its tensors.
        self._waiting: dict[int, tuple[CoreWork, list[_Waiting]]] = {}
        self._is_begun = False
        self._idle_threads = 0
        self._has_first = False
        """Whether one of the idle threads takes what has ended at once."""
        self._is_over = False
        self._process_id = os.getpid()

    def is_of_this_process(self) -> bool:
        """Return whether the group is not that of a parent process."""
        return self._process_id == os.getpid()

    def add(self, ended: Callable[[], None], works: Sequence[CoreWork]) -> None:
        """Call a function when all works have ended, at once where they have."""
        waiting = _Waiting(ended, works, len(works))
        with self._lock:
            is_done = self._is_over or all(one.is_done() for one in works)
            if not is_done:
                for one in works:
                    self._waiting.setdefault(one.key(), (one, []))[1].append(waiting)
                if not self._is_begun:
                    self._is_begun = True
                    self._start_thread()
        if is_done:
            ended()
            return
        for one in works:
            self._group.watch(one)

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._idle_threads >= IDLE_THREADS_MAX:
                    return
                self._idle_threads += 1
                is_first, self._has_first = not self._has_first, True
            key = self._group.next_ended(0.0 if is_first else PATIENCE_S)
            with self._lock:
                self._idle_threads -= 1
                self._has_first &= not is_first
                is_alone = self._idle_threads == 0
            if key is None:
                break
            if is_alone:
                self._start_thread()
            for ended in self._ended_by(key):
                ended()
        self._end()

    def _start_thread(self) -> None:
        threading.Thread(target=self._run, name="gradlane-futures", daemon=True).start()

    def _end(self) -> None:
        """Call what is left: the group is closed, and all of its works have ended."""
        with self._lock:
            self._is_over = True
            rest = {id(one): one for _, waiting in self._waiting.values() for one in waiting}
            self._waiting.clear()
        for one in rest.values():
            one.ended()

    def _ended_by(self, key: int) -> list[Callable[[], None]]:
        with self._lock:
            work, waiting = self._waiting.get(key, (None, []))
            # A work may be reported twice, and a newer one have its key by then.
            if work is None or not work.is_done():
                return []
            del self._waiting[key]
            for one in waiting:
                one.left -= 1
            return [one.ended for one in waiting if one.left == 0]
