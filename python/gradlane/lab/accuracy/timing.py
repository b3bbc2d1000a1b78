"""How long a step takes at a rate: the perfect-overlap bound for the bytes that were encoded.

Compute takes the task's nominal time, equally divided among its layers and with backward twice as
long as forward. The time of encoding itself is not counted; `make bench` shows what it is.
"""

from __future__ import annotations

from functools import lru_cache

from gradlane.lab.accuracy.tasks import task_of
from gradlane.planning.models.timings import Stage, TensorTiming, timings_of
from gradlane.planning.simulation.bound import bound_step_s

GOODPUT_SHARE = 0.956
"""Payload of a port's bits: 1448 of 1514 bytes of a packet."""


@lru_cache(maxsize=16)
def timings(task: str) -> tuple[TensorTiming, ...]:
    """Return when each gradient of a task's network is ready and needed."""
    chosen = task_of(task)
    model = chosen.build(0)
    layers = [
        (name, [(f"{name}.{key}", one.numel(), 4) for key, one in own])
        for name, module in model.named_modules()
        if (own := list(module.named_parameters(recurse=False)))
    ]
    share_s = chosen.compute_s / (3 * len(layers))
    stages = [Stage(name, share_s, 2 * share_s, tuple(own)) for name, own in layers]
    return tuple(timings_of(stages))


@lru_cache(maxsize=4096)
def step_s(task: str, wire_bytes: int, rate_bps: float, workers: int) -> float:
    """Return the nominal time of a step.

    Args:
        task: its name.
        wire_bytes: of one worker's encoded gradient, and of the encoded means, taken together.
        rate_bps: of every port, in each direction.
        workers: each with a port and a share of the slices.
    """
    own = timings(task)
    plain_bytes = 2 * sum(timing.size_bytes for timing in own)
    bound = bound_step_s(
        own,
        workers=workers,
        goodput_bps=GOODPUT_SHARE * rate_bps,
        compute_s=task_of(task).compute_s,
        codec_ratio=plain_bytes / wire_bytes,
    )
    return bound.step_s
