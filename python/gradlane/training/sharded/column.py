"""The channel of a column: the ranks that hold the same shard, one of each node.

The core numbers them by nodes; errors and counters name ranks of the world here.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from gradlane.errors import GradlaneError, UsageError
from gradlane.training.connection import SessionContext
from gradlane.training.core import Channel, CoreModule, CoreRow
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.node.failure import failure_in_world_ranks, mark_world_ranks
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER


def column_of(rank: int, world_size: int, shards: int) -> list[int]:
    """Return the ranks that hold the same shard as a rank.

    Args:
        rank: of the world.
        world_size: number of ranks.
        shards: ranks of a node.
    """
    return list(range(rank % shards, world_size, shards))


class ColumnChannel:
    """A channel of the core between the ranks of a column."""

    def __init__(
        self, core: CoreModule, channel: Any, column: Sequence[int], world_size: int
    ) -> None:
        """Wrap an open channel.

        Args:
            core: defines the errors.
            channel: of the core.
            column: its ranks, in its order.
            world_size: number of all ranks.
        """
        self._core = core
        self._channel = channel
        self._column = column
        self._world_size = world_size

    def __getattr__(self, name: str) -> Any:
        """Return a call of the channel whose errors name ranks of the world."""
        call = getattr(self._channel, name)
        return self._translated(call) if callable(call) else call

    def abort(self, reason: str) -> None:
        """Abort and tell every rank of the column the reason."""
        self._channel.abort(mark_world_ranks(reason))

    def metrics_json(self) -> str:
        """Return counters as a JSON object."""
        reading: dict[str, Any] = json.loads(self._channel.metrics_json())
        for table in ("peers", "stragglers"):
            by_node = reading.get(table, [])
            empty = dict.fromkeys(by_node[0], 0) if by_node else {}
            rows = [dict(empty) for _ in range(self._world_size)]
            for rank, row in zip(self._column, by_node, strict=False):
                rows[rank] = row
            reading[table] = rows if by_node else []
        return json.dumps(reading)

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and clear the trace."""
        return [(*row[:3], self._column[row[3]], *row[4:]) for row in self._channel.take_trace()]

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        """Return and clear the trace with begin times and jobs, and the number of rows that were
        dropped."""
        rows, dropped = self._channel.take_timeline()
        return [(*row[:3], self._column[row[3]], *row[4:]) for row in rows], dropped

    def _translated(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def translated(*arguments: Any, **options: Any) -> Any:
            try:
                return call(*arguments, **options)
            except self._core.ChannelError as error:
                failure = failure_in_world_ranks(self._core, error, self._column.__getitem__)
                raise failure.to_error(self._core) from error

        return translated


class ColumnCalls:
    """Calls of a column's channel: errors are the package's own, and the first is kept."""

    def __init__(self, ctx: SessionContext, channel: Channel, name: str) -> None:
        """Guard a channel.

        Args:
            ctx: the session's.
            channel: of the column.
            name: of the model and its column, among those that wait.
        """
        self._ctx = ctx
        self._channel = channel
        self._name = name
        self.failure = FailureLatch()

    def check(self) -> None:
        """Raise the first failure, if there is one."""
        self.failure.raise_failure()

    def fail(self, error: GradlaneError) -> NoReturn:
        """Give the session up, tell all ranks why, and raise an error."""
        self.failure.fail(error)
        with contextlib.suppress(self._ctx.core.ChannelError):
            self._channel.abort(str(error))
        self.failure.fail_and_raise(error)

    def refuse(self, reason: str) -> NoReturn:
        """Give the session up since the program cannot be trained rightly; raises `UsageError`."""
        self.fail(UsageError(reason))

    def translating(self, doing: str) -> contextlib.AbstractContextManager[None]:
        """Turn errors of the channel into the package's own, and keep the first.

        Args:
            doing: what this rank does meanwhile, for the message.
        """
        return self.failure.translating(self._ctx.core, doing)

    @contextlib.contextmanager
    def waiting(self, step: int) -> Iterator[None]:
        """Tell what this rank waits for: a step of the channel."""
        with WAIT_NOTIFIER, self._ctx.deadlocks.waiting(self._name, step, None):
            yield
