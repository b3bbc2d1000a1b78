"""The memory of parameters that the core updates in place (`update="server"`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.core import Channel
from gradlane.training.rendezvous.tensor_table import TensorEntry


class ServedParameters:
    """Tells the core where the trained parameters of a model are."""

    def __init__(self, channel: Channel, trained: Sequence[TensorEntry]) -> None:
        """Begin without any memory known.

        Args:
            channel: the channel that updates them.
            trained: table entries of the trained parameters, by tensor number.
        """
        self._channel = channel
        self._trained = trained
        self._pointers: list[int] = []
        self._written: list[Tensor] = []

    def register(self) -> None:
        """Tell the core where the parameters are, between steps.

        Raises:
            UsageError: one was converted since `prepare`.
        """
        pointers = [entry.tensor.data_ptr() for entry in self._trained]
        if pointers == self._pointers:
            return
        for index, entry in enumerate(self._trained):
            tensor = entry.tensor
            if tensor.dtype is not entry.dtype or tensor.stride() != entry.stride:
                raise UsageError(
                    f"parameter {entry.name!r} was converted after prepare(): convert the model "
                    "before prepare()"
                )
            self._channel.set_parameter(index, pointers[index], entry.nbytes)
        self._pointers = pointers
        # The core may write into memory that the program swaps in mid-step: it must not be freed.
        self._written = [entry.tensor.detach() for entry in self._trained]

    def check_unmoved(self) -> None:
        """Check that the core would write into the parameters.

        Raises:
            UsageError: it would write into memory that is no parameter's any more.
        """
        for entry, pointer in zip(self._trained, self._pointers, strict=True):
            if entry.tensor.data_ptr() != pointer:
                raise UsageError(
                    f"the memory of parameter {entry.name!r} was replaced (.data = ..., .to(...)) "
                    'between backward() and optimizer.step(): with update="server" the update has '
                    "already begun there; do it after optimizer.step()"
                )

    def pull(self, step: int) -> None:
        """Take the servers' parameters as they are, in a step of its own.

        Args:
            step: its number in the channel.
        """
        self._channel.step_begin(step)
        for index, entry in enumerate(self._trained):
            self._channel.tensor_absent(index, step, entry.tensor.data_ptr(), entry.nbytes)
        self._channel.step_end(step)
        self._channel.wait_step(step)
        self._channel.take_ready(step)
