"""The part of `Session` that arrays go through: register, spread, push, wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gradlane.errors import UsageError
from gradlane.training.arrays.exchange import ArrayExchange
from gradlane.training.arrays.memory import Slot, make_slot

if TYPE_CHECKING:
    from gradlane.training.connection import SessionContext
    from gradlane.training.rendezvous.rendezvous import RendezvousScope


class SessionArrays:
    """The mean of any arrays over all ranks, as a session offers it beside `prepare`.

    ::

        for name, value in parameters.items():        # in the order of the forward pass
            session.register(name, value.shape, value.dtype)
        parameters = session.spread(parameters)       # rank 0's values everywhere
        for ...:                                      # backward: the last layer is done first
            session.push(name, gradient)
        for ...:                                      # forward, or before each update
            mean = session.wait(name)
    """

    _ctx: SessionContext

    def _start_arrays(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._exchange: ArrayExchange | None = None

    def _check_open(self) -> None:
        raise NotImplementedError

    def _meet(self) -> RendezvousScope:
        raise NotImplementedError

    def register(
        self, name: str, shape: Sequence[int], dtype: Any, position: int | None = None
    ) -> None:
        """Announce an array that will be averaged in each step; on all ranks alike.

        Args:
            name: any text, once.
            shape: sizes of its dimensions, row-major.
            dtype: f32, f16, bf16, f64 or complex: a NumPy dtype, a torch or JAX one, or a name.
            position: where the forward pass needs it; smaller is sooner, and travels before
                whatever else is on its way. None: after everything registered so far.

        Raises:
            ArrayRefusedError: there is nothing to average, or the dtype cannot be averaged.
            UsageError: the name is taken, or the first step has begun.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        if self._exchange is not None:
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
        """Give every rank rank 0's values, before the first push; a collective call.

        Args:
            arrays: one for every registered name, as it was registered. They are written in place
                where they may be.

        Returns:
            The arrays with rank 0's values: the same objects, but copies by NumPy of those that may
            not be written.

        Raises:
            ArrayRefusedError: an array is not as registered.
            UsageError: a push came before, or names are missing.
            RanksDifferError: the ranks registered different arrays, or not all spread values.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        if self._exchange is not None:
            raise UsageError("spread() after the first push() or spread(): it comes before them")
        return self._connected(arrays).spread_values()

    def push(self, name: str, array: Any, step: int | None = None) -> int:
        """Hand over this rank's part of a mean; returns at once, but for a step's first.

        Every rank pushes each registered array once a step, in any order: as early as it is done.
        A step begins with the first push after all were pushed, and waits for the end of the one
        before. Until `wait` the memory belongs to the session: neither write nor free it.

        Args:
            name: of a registered array.
            array: NumPy's, or anything with `__dlpack__` on the host, contiguous, of the registered
                shape and dtype. It is sent from where it is and its mean lands there, without a
                copy; one that may not be written is copied once. None: nothing here in this step,
                which counts as zeros.
            step: the step that this has to be, from 1 on, to be sure; None: the one that is due.

        Returns:
            The number of the step.

        Raises:
            ArrayRefusedError: the array is not as registered; nothing was sent, push another.
            UsageError: the name is unknown or was pushed in this step, or the step is another.
            RanksDifferError: the ranks registered different arrays; in the first push.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        exchange = self._exchange
        return (self._connected(None) if exchange is None else exchange).push(name, array, step)

    def wait(self, name: str, step: int | None = None) -> Any:
        """Wait for the mean over all ranks of what was pushed; again and again if one likes.

        It is `((a0 + a1) + ...) / N` in rank order, bit for bit the same on all ranks and the same
        as the gradients of a model that is prepared with torch.

        Args:
            name: of an array that was pushed.
            step: the step that this has to be, to be sure; None: that of the last push.

        Returns:
            The pushed array itself, with the mean in it; an array of NumPy's where that may not be
            written, or was None; None if every rank pushed None.

        Raises:
            UsageError: it was not pushed, or in another step.
            PeerLostError: another rank is lost.
            GradlaneError: the session has failed or is closed.
        """
        self._check_open()
        if self._exchange is None:
            raise UsageError(f"wait({name!r}) before anything was pushed")
        return self._exchange.wait(name, step)

    def _connected(self, initial: Mapping[str, Any] | None) -> ArrayExchange:
        options = self._ctx.options
        refusals = {
            'update="server"': options.update == "server",
            "checkpoint=": options.checkpoint is not None,
            "check_every=": bool(options.check_every),
            "stragglers=": options.leaves_out,
        }
        for option, is_given in refusals.items():
            if is_given:
                raise UsageError(
                    f"arrays are averaged, and updated by the program itself: {option} is for "
                    "models that are prepared; open a session without it for arrays"
                )
        if not self._slots:
            raise UsageError("no array is registered: call session.register() for each first")
        slots = sorted(self._slots.values(), key=lambda slot: slot.position)
        self._exchange = ArrayExchange(self._ctx, self._meet(), slots, initial)
        return self._exchange
