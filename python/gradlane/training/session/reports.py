"""What a session reports of itself to the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gradlane.training.monitoring.metrics import Metrics
from gradlane.training.monitoring.tensorboard import ScalarWriter

if TYPE_CHECKING:
    from gradlane.training.arrays.exchange import ArrayExchange
    from gradlane.training.model.prepared import PreparedModel
    from gradlane.training.monitoring.observer import Observer


class SessionReports:
    """The part of `Session` that numbers come through."""

    _observer: Observer

    def _parts(self) -> list[PreparedModel | ArrayExchange]:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def metrics(self) -> Metrics:
        """Return what this rank has counted since the start; from any thread, also after the end.

        Bytes, queues, waits by layer, late ranks, step times: see `docs/observability.md`. All are
        dictionaries, lists and numbers. Numbers are sums over all models; `channels` has the
        core's own, one of each model.

        Raises:
            SessionClosedError: this is a forked child.
        """
        return self._observer.metrics()

    def log_to(self, writer: ScalarWriter, every: int = 10) -> None:
        """Write scalars for TensorBoard every so many training steps of the first model.

        What fails there is warned of, and the training goes on without it.

        Args:
            writer: a `torch.utils.tensorboard.SummaryWriter`, or whatever has its `add_scalar`.
            every: steps from one writing to the next.

        Raises:
            ValueError: `every` is below 1.
            TypeError: the writer has no `add_scalar`.
            SessionClosedError: the session has ended.
        """
        self._check_open()
        self._observer.log_to(writer, every)

    @property
    def prometheus_port(self) -> int | None:
        """Port that this rank answers Prometheus at, or None."""
        return self._observer.prometheus_port

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and forget the trace of frames, one list for all models.

        Returns:
            Rows (time in ns, "tx" or "rx", kind, peer, step, tensor, slice, priority), empty
            unless the session was opened with `trace=True`.
        """
        return [row for part in self._parts() for row in part.channel.take_trace()]
