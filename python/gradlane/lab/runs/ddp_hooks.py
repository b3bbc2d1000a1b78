"""Hooks that encode DDP's gradients in the lab: PyTorch's own by name, and gradlane's codecs."""

# Annotations are evaluated here: DDP compares those of a communication hook with its own types.
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

POWERSGD_RANK = 2
"""Of the matrices that PowerSGD sends in place of a gradient (Vogels et al. 2019)."""


def register_hook(wrapped: nn.parallel.DistributedDataParallel, hook: str) -> None:
    """Let a hook encode DDP's gradients.

    Args:
        wrapped: the model.
        hook: `fp16` and `bfloat16` (PyTorch's `bf16_compress_hook`), `powersgd[:RANK]`, or the
            text of a codec.

    Raises:
        ValueError: there is no such hook.
    """
    name, _, argument = hook.partition(":")
    if name == "fp16":
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif name == "bfloat16":
        wrapped.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif name == "powersgd":
        wrapped.register_comm_hook(_PowerSgd(int(argument or POWERSGD_RANK)), _powersgd)
    else:
        import gradlane.ddp

        wrapped.register_comm_hook(*gradlane.ddp.ddp_hook(hook, model=wrapped))


class _Bucket:
    """The parts of a bucket that PowerSGD reads: a bucket does not outlive a hook's call."""

    def __init__(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        self._buffer: torch.Tensor = bucket.buffer()
        self._gradients: list[torch.Tensor] = bucket.gradients()
        self._parameters: list[torch.Tensor] = bucket.parameters()
        self._index: int = bucket.index()
        self._is_last: bool = bucket.is_last()

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def gradients(self) -> list[torch.Tensor]:
        return self._gradients

    def parameters(self) -> list[torch.Tensor]:
        return self._parameters

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._is_last


class _PowerSgd:
    """PyTorch's PowerSGD, one bucket after another.

    Its later collectives begin in callbacks, which Gloo runs in no order: with several buckets at
    once, ranks would begin them in different orders. One thread keeps the order, and backward goes
    on meanwhile.
    """

    def __init__(self, rank: int) -> None:
        self._state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2
        )
        self._thread = ThreadPoolExecutor(1, "powersgd")

    def submit(self, bucket: _Bucket) -> torch.futures.Future[torch.Tensor]:
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._thread.submit(self._run, bucket, done)
        return done

    def _run(self, bucket: _Bucket, done: torch.futures.Future[torch.Tensor]) -> None:
        try:
            done.set_result(powerSGD_hook.powerSGD_hook(self._state, bucket).wait())
        except Exception as error:
            # Its declared type is that of the future's value.
            done.set_exception(error)  # type: ignore[arg-type]


def _powersgd(
    state: _PowerSgd,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    return state.submit(_Bucket(bucket))
