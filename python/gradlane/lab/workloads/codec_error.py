"""How far a codec may be off, so that a replay under it can be checked against NumPy's exact sum.

A gradient is encoded twice, by its rank and as a mean by the owner of each slice. Where each
encoding is off by at most a share e of the largest magnitude G, a step's mean is off by at most
e (2 + e) G. On a ring the k-th hop encodes a sum of k gradients, and the last rank the mean; where
codes are added up as integers, every rank encodes once and nothing else is encoded. Codecs that
send a mere hint of the gradient and keep the rest have no such bound; there the updates as a whole
must be near to the exact ones.
"""

from __future__ import annotations

import math

from gradlane.training.options.codec_options import (
    F16,
    Bf16,
    Dgc,
    Fp8,
    Int8,
    OneBit,
    Qsgd,
    TopK,
    parse_codec,
)

UPDATES_OFF_MOST = 1.2
"""Largest 2-norm of the error of a tensor's updates, over that of the updates, without a bound."""


def largest_error(codec: str) -> float | None:
    """Return the largest error of one encoding over the largest magnitude that is encoded.

    Args:
        codec: its text, or `raw`.

    Returns:
        None where a single encoding has no useful bound, since the rest comes later.

    Raises:
        ValueError: it is a codec that this file does not know.
    """
    match parse_codec(codec):
        case None:
            return 0.0
        case Bf16():
            return 2.0**-8
        case F16():
            # Values too small for f16 are off by less than the smallest f16.
            return 2.0**-10
        case Int8():
            return 2.0 / 255.0
        case Fp8(format=format):
            return 2.0**-4 if format == "e4m3" else 2.0**-3
        case Qsgd(bits=bits, levels_in_force=levels, norm=norm) as qsgd:
            # Optimal levels may leave nearly all of the range to two of them.
            steps = {"optimal": 0.5, "uniform": (2.0**bits - 1) / 2, "sign": 2.0 ** (bits - 1) - 1}
            step = 1.0 / steps[levels]
            # The 2-norm of a bucket is at most this many times its largest magnitude.
            return step * (math.sqrt(qsgd.bucket_values) if norm == "l2" else 1.0)
        case OneBit() | TopK() | Dgc():
            return None
    raise ValueError(
        f"no bound is known for codec {codec!r}: write it into lab/workloads/codec_error.py"
    )


def mean_error(codec: str, largest: float, ring_ranks: int | None = None) -> float | None:
    """Return how far a step's mean may be off, or None as for `largest_error`.

    Args:
        codec: a canonical text, or `raw`.
        largest: the largest magnitude in any rank's gradient.
        ring_ranks: ranks of the ring that gradients go round; None: they go to servers.
    """
    error = largest_error(codec)
    if error is None:
        return None
    if ring_ranks is None:
        return error * (2.0 + error) * largest
    if codec.endswith("ring=integer") or ",ring=integer," in codec:
        return error * largest
    off = 0.0
    for hop in range(1, ring_ranks):
        off += error * (hop * largest + off)
    off /= ring_ranks
    return off + error * (largest + off)


def is_sum_of_gradients(codec: str) -> bool:
    """Return whether what arrives adds up to the gradients; `dgc` sends momentum, too."""
    return not codec.startswith("dgc")
