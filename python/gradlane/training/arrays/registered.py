"""The arrays of a session: registered, spread, pushed, waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gradlane.errors import UsageError
from gradlane.training.arrays.exchange import ArrayExchange
from gradlane.training.arrays.memory import Slot, make_slot
from gradlane.training.connection import SessionContext
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.rendezvous.rendezvous import RendezvousScope


class RegisteredArrays:
    """Averages arrays over all ranks; `Session` documents the calls."""

    def __init__(self, ctx: SessionContext, meet: Callable[[], RendezvousScope]) -> None:
        """Register nothing yet.

        Args:
            ctx: what the session gives.
            meet: opens the place where the ranks agree.
        """
        self._ctx = ctx
        self._meet = meet
        self._slots: dict[str, Slot] = {}
        self.exchange: ArrayExchange | None = None
        """The exchange, from the first push or spread on."""

    def register(self, name: str, shape: Sequence[int], dtype: Any, position: int | None) -> None:
        """Announce an array."""
        if self.exchange is not None:
            raise UsageError(
                f"register({name!r}) after the first push() or spread(): register all arrays "
                "before, or open another session for more"
            )
        if name in self._slots:
            raise UsageError(f"array {name!r} is registered already; every name is taken once")
        if position is None:
            position = max((slot.position for slot in self._slots.values()), default=-1) + 1
        self._slots[name] = make_slot(name, shape, dtype, position)

    def spread(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Give every rank rank 0's values."""
        if self.exchange is not None:
            raise UsageError("spread() after the first push() or spread(): it comes before them")
        return self._connect(arrays).spread_values()

    def push(self, name: str, array: Any, step: int | None) -> int:
        """Hand over this rank's part of a mean."""
        exchange = self.exchange
        return (self._connect(None) if exchange is None else exchange).push(name, array, step)

    def wait(self, name: str, step: int | None) -> Any:
        """Wait for a mean."""
        if self.exchange is None:
            raise UsageError(f"wait({name!r}) before anything was pushed")
        return self.exchange.wait(name, step)

    def _connect(self, initial: Mapping[str, Any] | None) -> ArrayExchange:
        why = refusal({Feature.ARRAYS: "arrays"}, self._ctx.options.features)
        if why:
            raise UsageError(why)
        if not self._slots:
            raise UsageError(
                "no array is registered: call session.arrays.register() for each first"
            )
        slots = sorted(self._slots.values(), key=lambda slot: slot.position)
        self.exchange = ArrayExchange(self._ctx, self._meet(), slots, initial)
        return self.exchange
