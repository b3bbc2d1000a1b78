"""A call that has begun, as torch sees it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistBackendError

from gradlane.distributed.forwarding import answer
from gradlane.training.torch_internals import c10d

if TYPE_CHECKING:
    from gradlane.distributed.core import CoreGroup, CoreWork

_NO_TIMEOUT = timedelta(0)


class GradlaneWork(c10d.Work):  # type: ignore[misc]
    """One call, or several that end together.

    Keeps the tensors of the call until it has ended.
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
    ) -> None:
        super().__init__()
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
    ) -> GradlaneWork:
        """Return one work for several, which ends with the last of them."""

        def finish() -> None:
            for work in works:
                work._complete()

        calls = [call for work in works for call in work._works]
        outputs = [output for work in works for output in work._outputs]
        return cls(futures, group, calls, [], outputs, failure, finish)

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
        return True

    def is_completed(self) -> bool:
        """Return whether the call has ended."""
        return all(work.is_done() for work in self._works)

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
            self._futures.add(self, self._works)
        return self._future

    def resolve(self) -> None:
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


class Futures:
    """Completes the futures of a group's works, on a thread that begins with the first one."""

    def __init__(self, group: CoreGroup) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._waiting: dict[int, tuple[GradlaneWork, list[Any]]] = {}
        self._thread: threading.Thread | None = None

    def add(self, work: GradlaneWork, works: Sequence[CoreWork]) -> None:
        """Complete a work's future when all of its calls have ended."""
        if all(one.is_done() for one in works):
            work.resolve()
            return
        left = [one.key() for one in works]
        with self._lock:
            for key in left:
                self._waiting[key] = (work, left)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="gradlane-futures", daemon=True
                )
                self._thread.start()
        for one in works:
            self._group.watch(one)

    def _run(self) -> None:
        while True:
            ended = self._group.next_ended(60.0)
            if ended is None:
                return
            for key in ended:
                with self._lock:
                    found = self._waiting.pop(key, None)
                    if found is None:
                        continue
                    work, left = found
                    left.remove(key)
                    is_last = not left
                if is_last:
                    work.resolve()
