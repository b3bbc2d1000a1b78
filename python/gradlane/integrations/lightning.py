"""A Lightning strategy: the loop is Lightning's, gradients are averaged by gradlane.

Processes, samplers, reductions of metrics and barriers are those of Lightning's `DDPStrategy`;
only its wrapping of the module in `DistributedDataParallel` is left out.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

import gradlane
from gradlane.errors import RefusedError
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.session.session import Session


class GradlaneStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains a module with one optimizer, with automatic optimization.

    `Trainer(strategy=GradlaneStrategy(), ...)`. `gradient_clip_val` clips by the session, which
    waits for no mean. Hooks that look at gradients, and clipping by value, make every update wait
    for all of them.
    """

    def __init__(self, *, defer: bool | None = None, options: Any = None, **settings: Any) -> None:
        """Make a strategy.

        Args:
            defer: as in `Session.prepare`.
            options: a dictionary of options for `gradlane.init`, or None.
            settings: for Lightning's `DDPStrategy`.

        Raises:
            ValueError: the session would go on when ranks are lost.
        """
        super().__init__(**settings)
        self._defer = defer
        self._options = dict(options or {})
        going_on = self._options.get("going_on", False)
        if getattr(going_on, "on", going_on):
            words = Feature.LIGHTNING.label
            raise RefusedError(refusal({Feature.LIGHTNING: words, Feature.GOING_ON: "going_on"}))
        self._session: Session | None = None

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def setup(self, trainer: Trainer) -> None:
        """Set everything up, then prepare the module and its optimizer.

        Raises:
            ValueError: the module has several optimizers or steps them by itself.
        """
        super().setup(trainer)
        if trainer.state.fn != TrainerFn.FITTING:
            return
        module = self._module()
        words = Feature.LIGHTNING.label
        if len(self.optimizers) != 1:
            several = {Feature.SEVERAL: f"{len(self.optimizers)} optimizers"}
            raise RefusedError(refusal({Feature.LIGHTNING: words}, several))
        if not module.automatic_optimization:
            manual = {Feature.MANUAL: Feature.MANUAL.label}
            raise RefusedError(refusal({Feature.LIGHTNING: words}, manual))
        optimizer = self.optimizers[0]
        self._session = gradlane.init(**self._options)
        self._session.prepare(
            module, getattr(optimizer, "_optimizer", optimizer), defer=self._defer
        )
        self.precision_plugin.clip_grad_by_norm = self._clip_by_session

    def _clip_by_session(self, optimizer: Any, clip_val: float) -> None:
        """Clip the averaged gradients, in place of `Precision.clip_grad_by_norm`."""
        assert self._session is not None, "gradients are clipped while fitting"
        if clip_val > 0:
            self._session.clip_grad_norm_(clip_val)

    def teardown(self) -> None:
        """Close the session, then everything else."""
        session, self._session = self._session, None
        if session is not None:
            session.close()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Tell the other ranks why this one gives up."""
        session, self._session = self._session, None
        if session is not None:
            session.abort(f"{type(exception).__name__}: {exception}")
        super().on_exception(exception)

    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None, "Lightning sets the module before anything else"
        return module
