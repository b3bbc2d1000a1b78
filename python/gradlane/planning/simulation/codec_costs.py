"""Host costs of codecs, and the codecs of a profile's tensors, for simulations.

Costs are seconds a byte of *values* (four an f32 element) on one core: of encoding a contribution,
with its residual if the codec keeps one, and of decoding a contribution and adding it up.
`USUAL_COSTS` are medians of processor time by `measure_cost` on a virtual core with AVX-512;
`gradlane lab calibrate` measures them on another machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradlane.planning.simulation.profiles import Profile
from gradlane.training.options.codec_choice import (
    CodecChoice,
    CodecRules,
    CodedTensor,
    choose_codecs,
)
from gradlane.training.options.codec_options import RAW

CALIBRATED_CODECS = (
    "bf16",
    "f16",
    "fp8:format=e4m3,bucket=128",
    "int8",
    "onebit:bucket=64",
    "qsgd:bits=1,bucket=128,norm=max,levels=uniform",
    "qsgd:bits=2,bucket=128,norm=max,levels=sign",
    "qsgd:bits=2,bucket=128,norm=max,levels=optimal",
    "qsgd:bits=4,bucket=512,norm=max,levels=optimal",
    "qsgd:bits=4,bucket=512,norm=max,levels=sign",
    "qsgd:bits=8,bucket=512,norm=max,levels=sign",
    "qsgd:bits=16,bucket=8192,norm=max,levels=sign",
    "topk:ratio=0.001",
)
"""Codecs that `gradlane lab calibrate` measures."""
_ELEMENTS = 1 << 20
_REPEATS = 5


@dataclass(frozen=True)
class CodecCost:
    """Seconds a byte of values.

    Attributes:
        encode_byte_s: encoding them.
        decode_byte_s: decoding them and adding them to others.
    """

    encode_byte_s: float
    decode_byte_s: float


USUAL_COSTS: Mapping[str, CodecCost] = {
    "bf16": CodecCost(0.08e-9, 0.08e-9),
    "f16": CodecCost(0.09e-9, 0.08e-9),
    "fp8": CodecCost(0.12e-9, 0.08e-9),
    "int8": CodecCost(0.08e-9, 0.06e-9),
    "onebit": CodecCost(0.18e-9, 0.07e-9),
    "qsgd": CodecCost(0.19e-9, 0.08e-9),
    "qsgd:levels=optimal": CodecCost(12e-9, 1.9e-9),
    "topk": CodecCost(0.25e-9, 0.03e-9),
    "dgc": CodecCost(0.55e-9, 0.04e-9),
}
"""Costs by the name of the codec, whatever its options but levels that are chosen by bucket."""


def measure_cost(codec: str) -> CodecCost:
    """Measure a codec on this machine by processor time, in about a tenth of a second.

    Raises:
        ValueError: the text names no codec.
    """
    import numpy as np

    from gradlane.codecs import Codec

    made = Codec(codec, (_ELEMENTS,))
    values = np.random.default_rng(0).standard_normal(_ELEMENTS, dtype=np.float32)
    residual = np.zeros(_ELEMENTS * made.residual_width, dtype=np.float32)
    wire = np.empty(made.wire_bytes_max(_ELEMENTS), dtype=np.uint8)
    encode_s, decode_s = [], []
    for step in range(_REPEATS + 1):
        begin_s = time.thread_time()
        kept = residual if made.residual_width else None
        used = made.encode_into(values, wire, residual=kept, step=step + 1)
        middle_s = time.thread_time()
        made.decode_add(wire[:used], values)
        end_s = time.thread_time()
        encode_s.append(middle_s - begin_s)
        decode_s.append(end_s - middle_s)
    # The first run touches the memory.
    return CodecCost(
        statistics.median(encode_s[1:]) / values.nbytes,
        statistics.median(decode_s[1:]) / values.nbytes,
    )


def cost_of(codec: str, measured: Mapping[str, CodecCost]) -> CodecCost:
    """Return the cost of a codec: as measured, by its text or its name, else the usual one.

    Args:
        codec: its canonical text.
        measured: by text, of the machine at hand.
    """
    # The simulator charges for adding up codes separately.
    codec = codec.replace(",ring=integer", "")
    name = _name_of(codec)
    by_name = {_name_of(text): cost for text, cost in measured.items()}
    return (
        measured.get(codec)
        or by_name.get(name)
        or USUAL_COSTS.get(name)
        or CodecCost(0.3e-9, 0.15e-9)
    )


def _name_of(codec: str) -> str:
    """Return the key of `USUAL_COSTS` that a codec's text has."""
    is_optimal = "levels=optimal" in codec
    return "qsgd:levels=optimal" if is_optimal else codec.partition(":")[0]


def codecs_in(
    profile: Profile, rules: CodecRules, ring_ranks: int | None = None
) -> list[CodecChoice]:
    """Choose the codec of each tensor of a profile.

    Args:
        profile: its tensors.
        rules: from `codec_rules`.
        ring_ranks: ranks of the ring; None: servers.

    Raises:
        ValueError: a codec is unknown, or cannot go round.
    """
    return choose_codecs(rules, coded_tensors(profile), ring_ranks)


def coded_tensors(profile: Profile) -> list[CodedTensor]:
    """Return a profile's tensors as codecs see them."""
    return [
        CodedTensor(tensor.name, tensor.dtype, tuple(tensor.shape) or (1,))
        for tensor in profile.tensors
    ]


def wire_bytes(profile: Profile, choices: Sequence[CodecChoice]) -> list[float]:
    """Return the encoded bytes of each tensor's gradient, without headers: of codecs whose bytes
    depend on the values those of an average step."""
    return [
        float(tensor.size_bytes if choice.facts is None else choice.facts.wire_bytes_expected)
        for tensor, choice in zip(profile.tensors, choices, strict=True)
    ]


def mean_cost(
    profile: Profile, choices: Sequence[CodecChoice], measured: Mapping[str, CodecCost]
) -> CodecCost | None:
    """Return the mean cost a byte of the encoded tensors of a profile.

    Returns:
        None if no tensor is encoded.
    """
    coded = [
        (tensor.size_bytes, cost_of(choice.codec, measured))
        for tensor, choice in zip(profile.tensors, choices, strict=True)
        if choice.codec != RAW
    ]
    total = sum(size for size, _ in coded)
    if not total:
        return None
    return CodecCost(
        sum(size * cost.encode_byte_s for size, cost in coded) / total,
        sum(size * cost.decode_byte_s for size, cost in coded) / total,
    )
