"""Updates of `update="server"`, as one rank's steps see them: settings out, counts kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from gradlane.training.model.optimizers import server_rows
from gradlane.training.model.served_parameters import ServedParameters
from gradlane.training.rendezvous.tensor_table import TensorEntry


class ServerUpdates:
    """Tells the servers the optimizer's settings, and counts the steps that tensors take."""

    def __init__(
        self,
        optimizer: Optimizer,
        trained: Sequence[TensorEntry],
        parameters: ServedParameters,
        check_unchanged: Callable[[], None],
        *,
        is_asynchronous: bool,
    ) -> None:
        """Start with tensors that have taken no step.

        Args:
            optimizer: the user's, checked by `check_server_optimizer`.
            trained: table entries of the trained parameters, by tensor number.
            parameters: their memory.
            check_unchanged: raises `UsageError` if the model is not the one that was prepared.
            is_asynchronous: whether each rank's push is a step, which the owners count.
        """
        self._optimizer = optimizer
        self._parameters = parameters
        self._check_unchanged = check_unchanged
        self._is_asynchronous = is_asynchronous
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(trained)}
        self.steps = [0] * len(trained)
        """Steps that each tensor has taken."""
        self.buffered: set[int] = set()
        """Tensors whose owners keep a momentum buffer."""
        self.with_momentum: frozenset[int] = frozenset()
        """Tensors whose next step makes a momentum buffer."""

    def checked_rows(self) -> str:
        """Return what `rows` does, once the core certainly writes into the model's parameters.

        Raises:
            UsageError: it would write into memory that is no parameter's any more.
            ValueError: a setting makes no sense; the message names group and key.
        """
        self._parameters.check_unmoved()
        self._check_unchanged()
        return self.rows()

    def rows(self) -> str:
        """Return every tensor's settings for the next step as the JSON that the core reads.

        Raises:
            ValueError: a setting makes no sense; the message names group and key.
        """
        rows, self.with_momentum = server_rows(self._optimizer, self._index_of, self.steps)
        return rows

    def note_update(self, index: int) -> None:
        """Note that a tensor has taken a step."""
        self._parameters.note_written(index)
        if self._is_asynchronous:
            # Steps are the owners' to count: other ranks' gradients make some, too.
            return
        self._parameters.note_values(index)
        self.steps[index] += 1
        if index in self.with_momentum:
            self.buffered.add(index)
