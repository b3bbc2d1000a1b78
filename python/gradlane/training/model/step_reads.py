"""Reads of a prepared model: each waits for the updates of what it is about to see, or raises."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.model.step_state import Phase, StepState
from gradlane.training.modules.forward_order import inside_backward

_MOVES = nn.Module._apply.__code__
"""Takes gradients along in `model.to(...)` and its like; no program sees them there."""
_ON_SERVERS = (
    'with update="server" the averaged gradients stay on the servers, so nothing can be clipped '
    'or read; use update="worker" for that'
)


class StepReads(StepState):
    """What hooks and waiting mappings call before somebody reads."""

    def before_read(self, parameter: Tensor, evaluates: bool = False) -> None:
        """Wait until a parameter that is about to be read has its update.

        Args:
            parameter: the parameter.
            evaluates: whether its module is in evaluation mode.
        """
        if self.exempt.depth:
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
        """Make parameters that are about to be listed, copied or saved right.

        Between backward and `optimizer.step()` there is nothing to wait for, so that one rank may
        do it alone: `.grad` of each of them waits by itself.
        """
        if self.exempt.depth:
            return
        self.raise_failure()
        if self._pending:
            found = (self._index_of.get(id(parameter)) for parameter in parameters)
            indices = [index for index in found if index is not None]
            self._settle_some([*indices, self._buffers_index])

    def before_operation(self, parameter: Tensor) -> None:
        """Wait until a parameter that is about to be used has its update.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
        self.raise_failure()
        if self._server_rows is not None and self._phase is Phase.BACKWARD:
            if inside_backward():
                return
            raise UsageError(
                f"{self._name_of(parameter)} is used between backward() and optimizer.step() in "
                f'step {self.step}: with update="server" its update has already begun; call '
                "optimizer.step() first"
            )
        if self._pending:
            self._settle_some((self._index_of[id(parameter)],))

    def before_grad(self, parameter: Tensor, *, write: bool) -> None:
        """Make `.grad` of a parameter right before it is read or written.

        After backward it is the mean over all ranks, and stays so until it is reset.

        Raises:
            UsageError: the mean cannot be had here or now.
        """
        if self.exempt.depth:
            return
        self.raise_failure()
        index = self._index_of[id(parameter)]
        if self._phase is Phase.BACKWARD:
            self._attach_for(index)
        elif write:
            with self._lock:
                self._driver.update.note_written(index)
        else:
            self._settle_some((index,))
            moves = sys._getframe(2).f_code is _MOVES
            if self._server_rows is not None and not self._zeroed and not moves:
                self._refuse_grad(index, "after optimizer.step()", _ON_SERVERS)

    def _attach_for(self, index: int) -> None:
        """Put all averaged gradients into `.grad`, since one of them is about to be touched."""
        if inside_backward():
            if self._exchange.has_taken(index):
                self._refuse_grad(
                    index,
                    "inside backward()",
                    "this rank's own gradient is under way already; touch it in a hook that is "
                    "registered on the parameter itself, or after backward()",
                )
            return
        if self._server_rows is not None:
            self._refuse_grad(index, "between backward() and optimizer.step()", _ON_SERVERS)
        if self.accumulates:
            self._refuse_grad(
                index,
                "inside session.no_sync()",
                "gradients of this step are being averaged already; leave the context first, or "
                "run every backward() of the step but the last inside it",
            )
        if self._backwards:
            self._refuse_grad(
                index,
                "while another thread runs backward()",
                "it has no mean before that ends; wait for the thread first",
            )
        self.reads_averages = True
        self.attach()

    def _refuse_grad(self, index: int, when: str, why: str) -> NoReturn:
        raise UsageError(
            f".grad of {self._trained[index].name!r} is touched {when} in step {self.step}: {why}"
        )

    def _name_of(self, parameter: Tensor) -> str:
        return f"parameter {self._trained[self._index_of[id(parameter)]].name!r}"

    def before_buffers(self) -> None:
        """Wait until buffers that are about to be read are those that all ranks agreed on."""
        if self.exempt.depth:
            return
        self.raise_failure()
        if self._pending:
            self._settle_some((self._buffers_index,))

    def before_optimizer_state(self) -> None:
        """Make the optimizer's state right before it is read or replaced.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
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
