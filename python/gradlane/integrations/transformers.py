"""Hugging Face's `Trainer`: the loop is its own, gradients are averaged by gradlane.

The trainer goes on to divide the data, evaluate and save through torch.distributed; only its
wrapping of the model in `DistributedDataParallel` is left out. It clips gradients by default, which
makes every update wait for all gradients: `max_grad_norm=0` lets them overlap with the forward.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import Trainer, TrainerCallback

from gradlane.training.session.session import Session


class _PrepareOnTrainBegin(TrainerCallback):  # type: ignore[misc]
    """Prepares the model once the trainer has made its optimizer and loaded its checkpoint."""

    def __init__(self, session: Session) -> None:
        """Prepare in this session."""
        self._session = session

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Prepare the trainer's model and the optimizer behind Accelerate's wrapper of it."""
        optimizer = objects["optimizer"]
        self._session.prepare(objects["model"], getattr(optimizer, "optimizer", optimizer))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Have every parameter right before the trainer saves or returns."""
        self._session.synchronize()


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
        ValueError: the trainer shards the model, or accumulates gradients.
    """
    if trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        raise ValueError(
            "the trainer shards its model (FSDP or DeepSpeed); gradlane keeps whole parameters on "
            "every rank: leave these options out"
        )
    no_sync = getattr(session, "no_sync", None)
    if trainer.args.gradient_accumulation_steps > 1 and no_sync is None:
        raise ValueError("gradient_accumulation_steps > 1 needs session.no_sync(): use 1")
    accelerator = trainer.accelerator
    prepare_model = accelerator.prepare_model

    def prepare_unwrapped(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        """Place the model, without wrapping it for torch.distributed."""
        prepared: nn.Module = prepare_model(model, *arguments, **{**options, **_UNWRAPPED})
        return prepared

    accelerator.prepare_model = prepare_unwrapped
    if no_sync is not None:
        accelerator.no_sync = lambda model=None: no_sync()
    trainer.add_callback(_PrepareOnTrainBegin(session))
    return trainer


_UNWRAPPED = {"evaluation_mode": True}
"""What keeps `Accelerator.prepare_model` from wrapping."""
