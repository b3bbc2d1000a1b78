"""Factors of gradients as layers give them in backward, in place of gradients."""

from __future__ import annotations

from torch import Tensor

from gradlane.training.factors.block import Part
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.parts import KernelParts
from gradlane.training.modules.gradient_intake import raw_grad


class FactorIntake:
    """Takes the parts of gradients that travel as factors, and submits each with its last part."""

    def __init__(self, parts: KernelParts, intake: Intake) -> None:
        """Take nothing yet.

        Args:
            parts: those below.
            intake: takes whole gradients.
        """
        self._phases = parts.phases
        self._exchange = parts.exchange
        self._captured = parts.exchange.layout.captured
        self._intake = intake

    def wants_factors(self, index: int) -> bool:
        """Whether factors may take the place of a gradient now: those that add up may not."""
        captures = index in self._captured and not self._phases.accumulates
        return captures and self._phases.failure.error is None

    def take_factors(self, index: int, part: Part) -> None:
        """Note factors of a part of a parameter's fresh gradient.

        Raises:
            UsageError: they come after the last ones that were to be expected.
            GradlaneError: the session has failed.
        """
        with self._phases.lock:
            self._intake.note_backward()
            self._intake.check_in_time(index)
            self._exchange.factors.hold(index, part)

    def take_dense(self, index: int, parameter: Tensor) -> None:
        """Note a gradient that came in place of factors, as one more part: the hook.

        Raises:
            UsageError: the gradient comes at a moment, or in a form, that has no meaning.
            GradlaneError: the session has failed.
        """
        if self._phases.steps_whole:
            self._intake.refuse_inside_step(index)
        with self._phases.lock:
            # Where factors were taken, torch runs the hook anyway.
            if raw_grad(parameter) is not None and self._intake.admit(index, parameter):
                self._exchange.hold_dense(index)

    def end_parts(self, index: int) -> None:
        """Submit the factors that a backward gave for a parameter, if they are whole.

        Called once in each backward, after all layers that use the parameter, as the hook of a
        gradient is: it counts the same whether factors or gradients came.
        """
        with self._phases.lock:
            if self._exchange.factors.end_parts(index) and self._intake.count(index):
                self._exchange.submit(index)
