"""`session.arrays`: means of arrays of any framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.training.arrays.registered import RegisteredArrays
from gradlane.training.options.compatibility import Feature
from gradlane.training.session.ending import SessionEnding
from gradlane.training.session.models import PreparedModels


class ArrayCalls:
    """Averages arrays over all ranks::

    for name, value in parameters.items():        # in the order of the forward pass
        session.arrays.register(name, value.shape, value.dtype)
    parameters = session.arrays.spread(parameters)     # rank 0's values everywhere
    for ...:                                      # backward: the last layer is done first
        session.arrays.push(name, gradient)
    for ...:                                      # forward, or before each update
        mean = session.arrays.wait(name)
    """

    def __init__(
        self, arrays: RegisteredArrays, models: PreparedModels, ending: SessionEnding
    ) -> None:
        """Offer the calls of a session.

        Args:
            arrays: the registered ones.
            models: know what does not go together.
            ending: knows whether the session is open.
        """
        self._arrays = arrays
        self._models = models
        self._ending = ending

    def register(
        self, name: str, shape: Sequence[int], dtype: Any, position: int | None = None
    ) -> None:
        """Announce an array that will be averaged in each step; on all ranks alike.

        Args:
            name: any text, once.
            shape: sizes of its dimensions, row-major.
            dtype: f32, f16, bf16, f64 or complex: a NumPy dtype, a torch or JAX one, or a name.
            position: where the forward pass needs it; smaller is sooner and travels before the
                rest. None: after all arrays registered so far.

        Raises:
            ArrayRefusedError: there is nothing to average, or the dtype cannot be averaged.
            UsageError: the name is taken, or the first step has begun.
            GradlaneError: the session has failed or is closed.
        """
        self._ending.check_open()
        self._models.check_call(Feature.REGISTER)
        self._arrays.register(name, shape, dtype, position)

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
        self._ending.check_open()
        return self._arrays.spread(arrays)

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
        self._ending.check_open()
        return self._arrays.push(name, array, step)

    def wait(self, name: str, step: int | None = None) -> Any:
        """Wait for the mean over all ranks of a pushed array; any number of times.

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
        self._ending.check_open()
        return self._arrays.wait(name, step)
