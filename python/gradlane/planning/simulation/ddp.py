"""The step of PyTorch's DistributedDataParallel, which is what people run: a formula.

Gradients go into buckets in the order in which backward has them; a full bucket is reduced by a
ring over all ranks as soon as the one before it is, and the optimizer waits for all (Li et al.,
"PyTorch Distributed", VLDB 2020, section 3.2). Each bucket costs the host a constant time
and its bytes, for copies and sums that the ring does not overlap. Both constants are fitted to the
ResNet-50 rows of `docs/predictions.json` (Gloo, two processors, time stretched) and of
`docs/research/cuda.md` (Gloo and NCCL over TCP, sixteen processors and an H200);
`tests/planning/simulation/test_ddp.py` holds those and all others against them.
"""

from __future__ import annotations

from collections.abc import Iterable

from gradlane.planning.simulation.bound import port_bytes
from gradlane.planning.simulation.profiles import Profile, timings_in
from gradlane.training.options.strategy import RING

BUCKET_S = 1.0e-3
"""Seconds of the host for each bucket."""
BYTE_S = 0.1e-9
"""Seconds of the host for each byte of a bucket."""
TUNED_MB = (None, 4.0, 1.0)
"""Buckets of a tuned DDP: torch's own, and `bucket_cap_mb=`; the fastest counts."""
_MB = 1 << 20
_FIRST_BYTES, _LATER_BYTES = _MB, 25 * _MB
"""Of torch's own buckets."""


def buckets_of(profile: Profile, bucket_mb: float | None) -> list[tuple[float, int]]:
    """Return when each bucket is full, in seconds from the start of forward, and its bytes.

    Args:
        profile: of a step.
        bucket_mb: `bucket_cap_mb` of DDP, in 2^20 bytes; None: torch's own, of which the first is
            smaller.
    """
    limit = _FIRST_BYTES if bucket_mb is None else bucket_mb * _MB
    later = _LATER_BYTES if bucket_mb is None else limit
    found: list[tuple[float, int]] = []
    size, ready_s = 0, 0.0
    for timing in sorted(timings_in(profile), key=lambda timing: timing.ready_s):
        size, ready_s = size + timing.size_bytes, timing.ready_s
        if size >= limit:
            found.append((ready_s, size))
            size, limit = 0, later
    return [*found, (ready_s, size)] if size else found


def ddp_step_s(
    profile: Profile,
    *,
    workers: int,
    goodput_bps: float,
    latency_s: float = 0.0,
    compression: float = 1.0,
    free_host: bool = False,
    buckets_mb: Iterable[float | None] = TUNED_MB,
) -> float:
    """Return the seconds of a step, with the fastest of some bucket sizes.

    Args:
        profile: of a step.
        workers: ranks on the ring, each behind a port, or several of them behind one: a ring over
            neighbours crosses each port once.
        goodput_bps: bits a second of payload that a port carries in each direction.
        latency_s: one-way time between two ports.
        compression: bytes of a gradient over bytes that travel for it.
        free_host: whether the host takes no time.
        buckets_mb: as for `buckets_of`.
    """
    if workers == 1:
        return profile.compute_s
    byte_s = 8 * port_bytes(1.0, workers=workers, scheme=RING) / (goodput_bps * compression)
    bucket_s = 2 * (workers - 1) * latency_s
    if not free_host:
        bucket_s, byte_s = bucket_s + BUCKET_S, byte_s + BYTE_S

    def end_s(bucket_mb: float | None) -> float:
        done_s = 0.0
        for ready_s, size in buckets_of(profile, bucket_mb):
            done_s = max(done_s, ready_s) + bucket_s + size * byte_s
        return done_s

    return max(profile.compute_s, min(map(end_s, buckets_mb)))
