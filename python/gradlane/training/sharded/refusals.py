"""What does not go with sharded models, each with its remedy; no other module refuses it."""

from __future__ import annotations

from typing import Any

from gradlane.errors import UsageError
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import ASGD

_ALLOWED = ("p3", "slicing", "wfbp", "ring")
_CALLS = {
    "best_scheme()": "plans know whole models alone; leave it out",
    "clip_grad_norm_()": (
        "gradients are the means when backward() returns: call "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)"
    ),
    "gather_integers()": "it needs going_on; use session.exchange()",
    "join()": (
        "torch's collectives in the node need every rank in each step; give all ranks as many "
        "batches"
    ),
    "no_sync()": (
        "call model.set_requires_gradient_sync(False) before all backward calls but the last, "
        "and True before that"
    ),
    "query()": "plans know whole models alone; leave it out",
    "weight()": "torch averages in the node over ranks; scale each loss by its share of samples",
}
"""Methods of `Session`, and what to do in place of them."""


def refuse_call(call: str) -> None:
    """Refuse a method of the session that does not know sharded models.

    Raises:
        UsageError: always, for the methods of `_CALLS`.
    """
    raise UsageError(f"session.{call} with a model that fully_shard has sharded: {_CALLS[call]}")


def option_refusal(options: Options, serving: int) -> str:
    """Return the first option that excludes sharded models, and what to do; empty if none does.

    Args:
        options: the session's.
        serving: number of ranks that only serve.
    """
    if options.going_on.on:
        return (
            "going_on: the ranks of a node hold a part of the model each, and none can go on "
            "without the others; open the session without it and restart from a checkpoint"
        )
    if options.stragglers.leaves_out:
        return (
            f"stragglers={options.stragglers.rule!r}: each shard would leave out other ranks; use "
            'stragglers="wait"'
        )
    if options.local_updates is not None:
        return (
            "update=Local(...): shards are averaged in every backward, and exchanges every so many "
            'steps are built for whole models alone; use update="worker"'
        )
    if options.strategy.name == ASGD or options.update == "server":
        return 'update="server": FSDP gathers the parameters that ranks update; use "worker"'
    if options.strategy.factors:
        return (
            f"scheme={options.strategy.factors!r}: what FSDP hands over are gradients, no factors; "
            "leave it out"
        )
    if options.strategy.name not in _ALLOWED:
        return f"strategy={options.strategy.name!r}: use one of {', '.join(_ALLOWED)}"
    if serving or options.servers is not None:
        return "servers= or workers=: the ranks that hold a shard own its slices; leave them out"
    if options.local.mode not in ("off", "auto"):
        return (
            f"local={options.local.mode!r}: the ranks of a node hold different shards, so there is "
            "nothing that they could add up; leave it out"
        )
    if options.checkpoints.folder is not None:
        return (
            "checkpoints=: use torch.distributed.checkpoint with get_state_dict(model, optimizer), "
            "as with FSDP alone"
        )
    if not isinstance(options.codec, str):
        return (
            "a dictionary of codecs: the gradients of a unit travel as one; give one codec for all"
        )
    return ""


def argument_refusal(defer: bool | None, buffers: str, plan: Any) -> str:
    """Return the first argument of `prepare` that excludes sharded models; empty if none does."""
    if defer:
        return (
            "defer=True: gradients are the means when backward() returns, and step() is torch's "
            "own; leave defer out"
        )
    if buffers == "average":
        return (
            'buffers="average": FSDP leaves buffers to each rank; give buffers="local", and '
            "average them where the program needs it"
        )
    if plan is not None:
        return "plan=: plans know whole models alone; leave plan out"
    return ""


def keeps_residual(codec: str) -> UsageError:
    """Return the refusal of a codec that keeps what it has lost."""
    return UsageError(
        f"codec={codec!r} keeps what it has lost, and checkpoints of torch have no place for it: "
        "give a codec without error feedback, such as 'qsgd:bits=8' or 'bf16', or none"
    )
