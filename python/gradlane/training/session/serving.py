"""The part of `Session` for ranks that only serve."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from gradlane.errors import UsageError
from gradlane.training.connection import SessionContext, listen
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.serving import ServedStats, Server, ServerRegistry

_TOLD_EVERY_S = 0.5


class SessionServing:
    """Calls for ranks that own slices and train nothing."""

    _ctx: SessionContext
    _store: BoundedStore
    _server: Server | None
    _ended: str | None

    def close(self) -> None:
        """Part from the other ranks."""
        raise NotImplementedError

    @property
    def serves(self) -> bool:
        """Whether this rank only serves: it trains nothing, and calls `serve` in place of that."""
        return self._server is not None

    def serve(
        self, on_tick: Callable[[list[ServedStats]], None] | None = None
    ) -> list[ServedStats]:
        """Serve the ranks that train until they have closed their sessions, and close this one.

        Takes no model: what there is to serve, and all settings that must be the same everywhere,
        come from rank 0.

        Args:
            on_tick: told some times a second what was served so far, by channel; None: a line on
                stderr for each channel that is connected, unless the session's `summary` is off.

        Returns:
            What was served, by channel: models and arrays of the ranks that train, in the order in
            which they were connected.

        Raises:
            UsageError: this rank trains.
            RanksDifferError: rank 0 says something else of who trains, or has another version.
            RendezvousError: the other ranks do not come, or cannot be reached.
            GradlaneError: a rank was lost, fell silent or gave up; the message names it.
        """
        if self._server is None:
            raise UsageError(
                f"rank {self._ctx.rank_info.rank} trains: serve() is for ranks that only serve, "
                "those from gradlane.init(workers=...) on"
            )
        server = self._server
        last = time.monotonic()

        def tick() -> None:
            nonlocal last
            if on_tick is not None and time.monotonic() - last > _TOLD_EVERY_S:
                last = time.monotonic()
                on_tick(server.served())

        server.run(self._say, tick)
        served = server.served()
        self.close()
        return served

    def _say(self, connected: ServedStats) -> None:
        """Print what is served from now on."""
        if not self._ctx.options.summary:
            return
        place = self._ctx.rank_info
        print(
            f"gradlane: rank {place.rank} serves {connected.owned_bytes / 1e6:.1f} of "
            f"{connected.total_bytes / 1e6:.1f} MB in {connected.tensors} tensors",
            file=sys.stderr,
        )

    def _make_server(self, registry: ServerRegistry) -> Server:
        ctx = self._ctx
        return Server(
            ctx.core,
            registry,
            self._store,
            ctx.secret,
            lambda rank_info: listen(replace(ctx, rank_info=rank_info)),
            work_threads=ctx.options.work_threads,
            io_threads=ctx.options.io_threads,
            idle_timeout_s=ctx.options.progress_timeout_s,
        )

    def _check_trains(self) -> None:
        """Refuse what only ranks that train can do."""
        if self._server is not None:
            raise UsageError(
                f"rank {self._ctx.rank_info.rank} only serves: of {self._ctx.rank_info.ranks} "
                f"ranks the first {self._ctx.rank_info.world_size} train; call session.serve()"
            )

    def _stop_serving(self, reason: str = "") -> None:
        """Tell the ranks that serve that there is no more to do; on one, give up what is open."""
        if self._ctx.announcements is not None:
            self._ctx.announcements.end(reason)
        if self._server is not None:
            self._server.abort(reason or f"rank {self._ctx.rank_info.rank} closed its session")
