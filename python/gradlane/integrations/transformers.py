"""Hugging Face's `Trainer`: the loop is its own, gradients are averaged by gradlane.

The trainer goes on to divide the data, evaluate and save through torch.distributed; only its
wrapping of the model in `DistributedDataParallel` is left out. Gradients are clipped, by default
too, by `session.clip_grad_norm_`, which waits for no mean.
"""

from __future__ import annotations

import functools
from typing import Any

from transformers import Trainer, TrainerCallback

from gradlane.errors import RefusedError
from gradlane.integrations.accelerate import attach as attach_accelerator
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.session.session import Session


class _PrepareOnTrainBegin(TrainerCallback):  # type: ignore[misc]
    """Prepares the model once the trainer has made its optimizer and loaded its checkpoint."""

    def __init__(self, session: Session) -> None:
        """Prepare in this session."""
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Prepare the trainer's model and the optimizer behind Accelerate's wrapper of it."""
        model, optimizer = objects["model"], objects["optimizer"]
        self._session.prepare(model, getattr(optimizer, "optimizer", optimizer))
        if hasattr(model, "num_parameters"):
            # The trainer counts them in each step, for its count of operations.
            model.num_parameters = functools.cache(model.num_parameters)

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Have every parameter right before the trainer saves or returns."""
        self._session.synchronize()
        objects["model"].__dict__.pop("num_parameters", None)


def attach(trainer: Trainer, session: Session) -> Trainer:
    """Have a trainer train with gradlane.

    Call it once, before `trainer.train()`, on every rank. `train()` can be called once: a second
    one makes a new optimizer, which needs a new session.

    Args:
        trainer: made with a model, not sharded by FSDP or DeepSpeed.
        session: an open one.

    Returns:
        The same trainer.

    Raises:
        ValueError: the trainer shards the model, or runs several processes in a session that goes
            on when ranks are lost.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        shards = {Feature.WRAPPER_SHARDS: "a model that it shards (FSDP or DeepSpeed)"}
        raise RefusedError(refusal({Feature.ATTACHED: "attach() of a trainer"}, shards))
    attach_accelerator(trainer.accelerator, session)
    trainer.add_callback(_PrepareOnTrainBegin(session))
    return trainer
