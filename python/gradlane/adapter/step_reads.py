"""Reads of a prepared model: each waits for the updates of what it is about to see, or raises."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from gradlane.adapter.step_state import Phase, StepState
from gradlane.errors import UsageError
from gradlane.modules.forward_order import inside_backward


class StepReads(StepState):
    """What hooks and waiting mappings call before somebody reads."""

    def before_read(self, parameter: Tensor, evaluates: bool = False) -> None:
        """Wait until a parameter that is about to be read has its update.

        Args:
            parameter: the parameter.
            evaluates: whether its module is in evaluation mode.
        """
        if self._bypassed or self._applying:
            return
        index = self._index_of.get(id(parameter))
        if index is not None:
            self.before_forward((index,), training=False if evaluates else None)
        else:
            self.raise_failure()

    def before_forward(self, indices: Sequence[int], training: bool | None) -> None:
        """Wait until parameters that a module is about to use have their updates.

        Args:
            indices: their numbers.
            training: whether the module is in training mode; None: the read is none of a module's.
        """
        self.raise_failure()
        if self._order is not None:
            self._order.note(indices, training=training is not False)
        if self._server_rows is not None and self._phase is Phase.BACKWARD:
            self._check_server_forward(training)
        if self._pending:
            self._settle_some(indices)

    def before_list(self, parameters: Iterable[Tensor | None]) -> None:
        """Make parameters that are about to be listed right, and their `.grad` right or absent."""
        if self._bypassed or self._applying:
            return
        self.raise_failure()
        if self._phase is Phase.BACKWARD:
            if inside_backward() or self.accumulates:
                return
            if self._server_rows is not None:
                raise UsageError(
                    f"parameters() between backward() and optimizer.step() in step {self.step}: "
                    'with update="server" the averaged gradients stay on the servers, so nothing '
                    'can be clipped or read; use update="worker" for that'
                )
            self.reads_averages = True
            self.attach()
        else:
            self._settle_these(parameters)

    def before_values(self, parameters: Iterable[Tensor | None]) -> None:
        """Make parameters that are about to be copied or saved right; their `.grad` goes not along.

        Between backward and `optimizer.step()` there is nothing to wait for, so that one rank may
        do it alone.
        """
        if not (self._bypassed or self._applying):
            self.raise_failure()
            self._settle_these(parameters)

    def _settle_these(self, parameters: Iterable[Tensor | None]) -> None:
        if self._pending:
            found = (self._index_of.get(id(parameter)) for parameter in parameters)
            indices = [index for index in found if index is not None]
            self._settle_some([*indices, self._buffers_index])

    def before_buffers(self) -> None:
        """Wait until buffers that are about to be read are those that all ranks agreed on."""
        if self._bypassed or self._applying:
            return
        self.raise_failure()
        if self._pending:
            self._settle_some((self._buffers_index,))

    def before_optimizer_state(self) -> None:
        """Make the optimizer's state right before it is read or replaced.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        self.raise_failure()
        if self._server_rows is not None and self._phase is Phase.BACKWARD:
            raise UsageError(
                f"the optimizer's state between backward() and optimizer.step() in step "
                f'{self.step}: with update="server" the update has already begun; call '
                "optimizer.step() first"
            )
        self.settle()

    def _check_server_forward(self, training: bool | None) -> None:
        if training and torch.is_grad_enabled() and not inside_backward():
            raise UsageError(
                f"a forward after backward() and before optimizer.step() in step {self.step}: "
                'with update="server" the update has already begun; call optimizer.step() first'
            )
