"""Who waits for what: forwards, reads, lists and state for updates, `.grad` for means."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.model.kernel.phases import Phase
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.model.stages.stage import StepStage, Touch
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.modules.gradient_intake import set_raw_grad
from gradlane.training.torch_internals import DisableTorchFunctionSubclass

_MOVES = nn.Module._apply.__code__
"""Takes gradients along in `model.to(...)` and its like; no program sees them there."""


class Gate:
    """Lets a touch of parameters, gradients, buffers or state through once it is right."""

    def __init__(self, parts: KernelParts, update: StepUpdate) -> None:
        """Guard a model.

        Args:
            parts: those below.
            update: waits for means and updates.
        """
        self._phases = parts.phases
        self._failure = parts.phases.failure
        self._exchange = parts.exchange
        self._update = update
        self._updates = parts.updates
        self._stages = parts.stages
        self.exempt = parts.exempt
        self._trained = parts.exchange.layout.trained
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        self._buffers = (parts.exchange.layout.buffers_index,)

    def bypass(self, call: Callable[[], None]) -> None:
        """Run a call whose reads of parameters need no update, such as the model's `zero_grad`."""
        # Neither pending updates nor its class matter; without this each read is a detour. Another
        # thread may be in the middle of an update, which needs gradients that must not go now.
        with self._phases.lock, DisableTorchFunctionSubclass():
            self.exempt.run(call)

    # ---- parameters, buffers and state

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
            self._failure.raise_failure()

    def before_forward(self, indices: Sequence[int], training: bool | None) -> None:
        """Wait until parameters that a module is about to use have their updates.

        Args:
            indices: their numbers.
            training: whether the module is in training mode; None: the read is none of a module's.
        """
        phases = self._phases
        self._failure.raise_failure()
        if phases.notes_forwards:
            for stage in self._stages.on[StepStage.forward]:
                stage.forward(indices, training=training is not False)
        if (
            training
            and phases.phase is Phase.BACKWARD
            and torch.is_grad_enabled()
            and not inside_backward()
        ):
            self._touch(Touch.FORWARD)
            if self._stages.changes_means:
                # Another backward before optimizer.step(): its gradients add up on the changed
                # means.
                self._update.attach()
        # Numbers leave the set after the update of their parameters.
        if not phases.pending.isdisjoint(indices):
            self._update.wait_for(indices)

    def before_list(self, parameters: Iterable[Tensor | None]) -> None:
        """Make parameters that are about to be listed, copied or saved right.

        Between backward and `optimizer.step()` there is nothing to wait for, so that one rank may
        do it alone: `.grad` of each of them waits by itself.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._phases.pending:
            found = (self._index_of.get(id(parameter)) for parameter in parameters)
            indices = [index for index in found if index is not None]
            self._update.wait_for([*indices, *self._buffers])

    def before_operation(self, parameter: Tensor) -> None:
        """Wait until a parameter that is about to be used has its update.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        index = self._index_of.get(id(parameter))
        if index is None:
            return  # One of the program's, which has copied the class.
        if self._phases.phase is Phase.BACKWARD and not inside_backward():
            self._touch(Touch.VALUE, index)
        if self._phases.pending:
            self._update.wait_for((index,))

    def before_buffers(self) -> None:
        """Wait until buffers that are about to be read are those that all ranks agreed on."""
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._phases.pending:
            self._update.wait_for(self._buffers)

    def before_optimizer_state(self) -> None:
        """Make the optimizer's state right before it is read or replaced.

        Raises:
            UsageError: the servers are in the middle of an update.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        if self._phases.phase is Phase.BACKWARD:
            self._touch(Touch.STATE)
        self._update.wait_for_all()

    def _touch(self, touch: Touch, index: int | None = None) -> None:
        """Have stages refuse what is touched, if they do."""
        name = "" if index is None else self._trained[index].name
        for stage in self._stages.on[StepStage.touched]:
            stage.touched(touch, name, self._exchange.training_step)

    # ---- gradients

    def write_grad(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Set `.grad` of a parameter, once it may be written.

        Raises:
            UsageError: the mean cannot be had here or now.
        """
        # Not in the middle of an update that another thread makes.
        with self._phases.lock:
            if not self.exempt.depth:
                self._failure.raise_failure()
                index = self._index_of.get(id(parameter))
                if index is None:
                    pass
                elif self._phases.phase is Phase.BACKWARD:
                    self._attach_for(index)
                else:
                    if self._updates.is_held(index):
                        self._update.wait_for((index,))
                    self._updates.note_written(index)
            set_raw_grad(parameter, gradient)

    def before_grad(self, parameter: Tensor) -> None:
        """Make `.grad` of a parameter right before it is read.

        After backward it is the mean over all ranks, and stays so until it is reset.

        Raises:
            UsageError: the mean cannot be had here or now.
        """
        if self.exempt.depth:
            return
        self._failure.raise_failure()
        index = self._index_of.get(id(parameter))
        if index is None:
            return
        if self._phases.phase is Phase.BACKWARD:
            self._attach_for(index)
        else:
            self._update.wait_for((index,))
            moves = sys._getframe(2).f_code is _MOVES
            if self._stages.hides_gradients and not moves:
                self._touch(Touch.OLD_GRADIENT, index)

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
        self._touch(Touch.GRADIENT, index)
        if self._phases.accumulates:
            self._refuse_grad(
                index,
                "inside session.no_sync()",
                "gradients of this step are being averaged already; leave the context first, or "
                "run every backward() of the step but the last inside it",
            )
        if self._phases.running_backwards:
            self._refuse_grad(
                index,
                "while another thread runs backward()",
                "it has no mean before that ends; wait for the thread first",
            )
        for stage in self._stages.on[StepStage.waited]:
            why = "looks at .grad between backward() and optimizer.step()"
            stage.waited(self._exchange.training_step, why)
        self._update.attach()

    def _refuse_grad(self, index: int, when: str, why: str) -> NoReturn:
        raise UsageError(
            f".grad of {self._trained[index].name!r} is touched {when} in step "
            f"{self._exchange.training_step}: {why}"
        )
