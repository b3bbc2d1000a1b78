"""How long a step takes at a rate: the perfect-overlap bound for the bytes that were encoded.

Under local updates a step takes its compute, and waits for an exchange that is not over when its
result is due.

Compute takes the task's nominal time, equally divided among its layers and with backward twice as
long as forward. The time of encoding itself is not counted; `make bench` shows what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gradlane.planning.models.timings import Stage, TensorTiming, timings_of
from gradlane.planning.simulation.bound import bound_step_s
from gradlane_papers.accuracy.tasks import task_of

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


def local_steps_s(
    task: str,
    wire_bytes: Sequence[int],
    uses_exchange: Sequence[bool],
    rate_bps: float,
    workers: int,
) -> list[float]:
    """Return the nominal time of each step under local updates; the last one ends its round.

    Args:
        task: its name.
        wire_bytes: of the exchange that begins after each step, as for `step_s`; 0: none does.
        uses_exchange: whether each step ends with the result of one, of its own where none was
            under way.
        rate_bps: of every port, in each direction.
        workers: each with a port and a share of the slices.
    """
    compute_s = task_of(task).compute_s
    byte_s = 8 * (workers - 1) / workers / (GOODPUT_SHARE * rate_bps)
    steps_s = []
    now_s, done_s, is_under_way = 0.0, 0.0, False
    for sent, uses in zip(wire_bytes, uses_exchange, strict=True):
        before_s, now_s = now_s, now_s + compute_s
        if uses and is_under_way:
            now_s, is_under_way, uses = max(now_s, done_s), False, False
        if sent:
            done_s, is_under_way = now_s + sent * byte_s, True
        if uses and is_under_way:
            now_s, is_under_way = done_s, False
        steps_s.append(now_s - before_s)
    if is_under_way and steps_s:
        steps_s[-1] += max(0.0, done_s - now_s)
    return steps_s
