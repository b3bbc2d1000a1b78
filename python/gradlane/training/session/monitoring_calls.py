"""`session.monitoring`: where numbers are served, and how tensors travel."""

from __future__ import annotations

from typing import Any

from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.session.parts import SessionParts
from gradlane.training.session.staleness import StalenessSums
from gradlane.training.session.world import World


class MonitoringCalls:
    """Tells how the tensors of a session travel, and where its numbers are served."""

    def __init__(self, parts: SessionParts, world: World) -> None:
        """Tell of a session's parts.

        Args:
            parts: the models and arrays.
            world: the ranks that this one is connected to.
        """
        self._parts = parts
        self._world = world

    @property
    def codecs(self) -> list[CodecChoice]:
        """The codec of each trained tensor and of each array, with the reason."""
        return [choice for part in self._parts.all() for choice in part.codecs]

    @property
    def schemes(self) -> dict[str, str]:
        """How each trained tensor of the models is aggregated, by name.

        `ps`, `ring`, `sfb` or `adam`, or `rows` of a sparse gradient.
        """
        found: dict[str, str] = {}
        for prepared in self._parts.models.prepared:
            found.update(prepared.schemes)
        if self._parts.models.local is not None:
            found.update(self._parts.models.local.schemes)
        return found

    def staleness(self) -> list[dict[str, Any]]:
        """Return how stale gradients were, with `strategy="asgd"`; empty with all others.

        The staleness of a gradient is the number of updates that its slice had had since this
        gradient's rank received it. Every rank counts the gradients that it applied as an owner of
        slices, an even part of the whole.

        Returns:
            For each rank whose gradients were applied here: `rank`, `pushes`, `mean`, `max` and
            `histogram` (pushes by staleness from 0 on; entry 64 counts that and all above).
        """
        total: dict[int, StalenessSums] = {}
        for prepared in self._parts.models.prepared:
            for rank, reading in enumerate(prepared.staleness()):
                total.setdefault(rank, StalenessSums()).add(reading)
        return [{"rank": rank, **tally.to_json()} for rank, tally in sorted(total.items())]

    @property
    def prometheus_port(self) -> int | None:
        """Port that this rank answers Prometheus at, or None."""
        return self._world.ctx.observer.prometheus_port

    @property
    def dashboard_url(self) -> str | None:
        """URL of the live page that this rank serves, or None."""
        return self._world.ctx.observer.dashboard_url

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and forget the trace of frames, one list for all models.

        Returns:
            Rows (time in ns, "tx" or "rx", kind, peer, step, tensor, slice, priority), empty
            unless the session was opened with `Monitoring(frame_trace=True)`.
        """
        return [row for part in self._parts.all() for row in part.channel.take_trace()]
