"""Hugging Face's Accelerate: loop and accelerator stay, gradients are averaged by gradlane."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn

from gradlane.errors import RefusedError
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.session.session import Session

_UNWRAPPED = {"evaluation_mode": True}
"""Argument that keeps `Accelerator.prepare_model` from wrapping."""


def attach(accelerator: Accelerator, session: Session) -> Accelerator:
    """Have an accelerator leave models unwrapped, and clip and accumulate through a session.

    Call it before `accelerator.prepare(...)`, on every rank; prepare the model and its optimizer in
    the session as well. `accelerator.clip_grad_norm_` then is `session.clip_grad_norm_`, which
    waits for no mean, and `accelerator.no_sync` and `accumulate` are `session.no_sync`. Its
    `save_state` and `load_state` take the session's models along, also those that
    `accelerator.prepare` was not given: these come last.

    Args:
        accelerator: without FSDP or DeepSpeed.
        session: an open one.

    Returns:
        The same accelerator.

    Raises:
        ValueError: the accelerator shards models, or runs several processes in a session that goes
            on when ranks are lost.
    """
    if session.goes_on and accelerator.num_processes > 1:
        words = f"an accelerator of {accelerator.num_processes} processes"
        raise RefusedError(refusal({Feature.ACCELERATOR: words, Feature.GOING_ON: "going_on"}))
    if getattr(accelerator, "is_fsdp2", False) or str(accelerator.distributed_type).endswith(
        ("FSDP", "DEEPSPEED", "MEGATRON_LM")
    ):
        shards = {Feature.WRAPPER_SHARDS: f"models that it shards ({accelerator.distributed_type})"}
        raise RefusedError(refusal({Feature.ATTACHED: "attach() of an accelerator"}, shards))
    prepare_model, clip_by_torch = accelerator.prepare_model, accelerator.clip_grad_norm_

    def prepare_unwrapped(model: nn.Module, *arguments: Any, **options: Any) -> nn.Module:
        """Place the model, without wrapping it for torch.distributed."""
        prepared: nn.Module = prepare_model(model, *arguments, **{**options, **_UNWRAPPED})
        return prepared

    def clip_by_session(
        parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Clip the gradients of a prepared model by the session, and any others by torch."""
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        trained = {id(parameter) for parameter in given if parameter.requires_grad}
        for model in session.models:
            if trained == {id(one) for one in model.parameters() if one.requires_grad}:
                accelerator.unscale_gradients()
                return session.clip_grad_norm_(max_norm, norm_type, model=model)
        norm: Tensor | None = clip_by_torch(given, max_norm, norm_type)
        return norm

    def no_sync(model: nn.Module | None = None) -> AbstractContextManager[None]:
        """Let gradients add up on this rank."""
        return session.no_sync()

    def left_out(models: list[nn.Module]) -> list[nn.Module]:
        """Return the session's models that the accelerator does not know."""
        known = {id(accelerator.unwrap_model(model)) for model in models}
        return [
            model for model in session.models if id(accelerator.unwrap_model(model)) not in known
        ]

    def save_others(models: list[nn.Module], weights: list[Any], folder: str) -> None:
        """Save the session's other models as well."""
        weights += [model.state_dict() for model in left_out(models)]

    def load_others(models: list[nn.Module], folder: str) -> None:
        """Load the session's other models as well."""
        models += left_out(models)

    accelerator.register_save_state_pre_hook(save_others)
    accelerator.register_load_state_pre_hook(load_others)
    session.has_accelerator = True
    accelerator.prepare_model = prepare_unwrapped
    accelerator.clip_grad_norm_ = clip_by_session
    accelerator.no_sync = no_sync
    return accelerator
