"""Codecs beside the same thing done with PyTorch and NumPy: encode and decode, in turns.

PyTorch has no 4-bit, 1-bit or stochastic kernels on the CPU. Where it has the same encoding that is
used, else the nearest one, as its own DDP quantization hooks compute it
(`torch.distributed.algorithms.ddp_comm_hooks.quantization_hooks`, which ask for CUDA), or
the same codec written with tensor operations. NumPy's are the codecs' definitions over arrays;
hivemind's compression is compared where it is installed.

One thread everywhere. Every way encodes and decodes the same values once a turn, in an order that
changes from turn to turn, and medians of wall time are reported. What is decoded is checked against
the values first. gradlane's codecs write to memory that is there, as in training; the others make
their own, as they do in their hooks.

    python benchmarks/codec_comparison.py --json comparison.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from gradlane.codecs import Codec

BUCKET = 512
GOAL = 3.0
"""Faster than others by this factor is what the project asks of itself."""


@dataclass(frozen=True)
class OptimizerSupport:
    """One way to encode and decode.

    Attributes:
        codec: the codec of gradlane that it is compared with.
        by: who does it.
        what: how.
        encode: from values to whatever is sent.
        decode: and back to values.
        off_most: largest error over the largest magnitude; None: only that it is finite.
    """

    codec: str
    by: str
    what: str
    encode: Callable[[], Any]
    decode: Callable[[Any], Any]
    off_most: float | None


@dataclass
class Row:
    """Measurements of one implementation: medians of single calls; rates count the f32 side."""

    codec: str
    by: str
    what: str
    elements: int
    encode_s: float
    decode_s: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    slower_encode: float
    """Its time over gradlane's."""
    slower_decode: float


def main() -> None:
    """Measure, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=1 << 22, help="f32 values, 512 a bucket")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    if arguments.elements < BUCKET or arguments.elements % BUCKET or arguments.turns < 1:
        parser.error(f"--elements is a multiple of {BUCKET}, and there is a turn")
    torch.set_num_threads(1)
    # Quantized tensors are to leave PyTorch.
    warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
    rows, skipped = measure(arguments.elements, arguments.turns)
    print(f"{'codec':<10} {'by':<9} {'encode':>12} {'decode':>12}   times of gradlane's, and what")
    for row in rows:
        rates = [
            f"{rate / 1e9:>7.2f} GB/s" for rate in (row.encode_bytes_per_s, row.decode_bytes_per_s)
        ]
        beside = f"{row.slower_encode:>6.1f} {row.slower_decode:>6.1f}  {row.what}"
        print(f"{row.codec:<10} {row.by:<9} {rates[0]:>12} {rates[1]:>12} {beside}")
    for reason in skipped:
        print(f"skipped: {reason}")
    slow = [
        row
        for row in rows
        if row.by != "gradlane" and min(row.slower_encode, row.slower_decode) < GOAL
    ]
    print(f"{len(slow)} of {len(rows)} rows are less than {GOAL:g} times slower than gradlane")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            content = {"rows": [asdict(row) for row in rows], "skipped": skipped, "goal": GOAL}
            json.dump(
                {**content, "torch": torch.__version__, "numpy": np.__version__}, file, indent=2
            )


def measure(elements: int, turns: int) -> tuple[list[Row], list[str]]:
    """Check all ways, run them in turns; returns a row a way, and what was skipped and why."""
    values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32) * np.float32(0.01)
    ways = [*ours(values), *of_torch(values), *of_numpy(values)]
    skipped = []
    if importlib.util.find_spec("hivemind") is None:
        skipped.append("hivemind is not installed")
    else:
        ways += of_hivemind(values)
    largest = float(np.abs(values).max())
    for way in ways:
        off = np.abs(np.asarray(way.decode(way.encode())) - values).max()
        allowed = math.inf if way.off_most is None else way.off_most * largest
        if not off <= allowed:
            raise ArithmeticError(f"{way.codec} by {way.by} is off by {off}, more than {allowed}")
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in ways]
    for turn in range(turns + 1):
        if sys.stderr.isatty():
            print(f"\rturn {turn} of {turns}", end="", file=sys.stderr, flush=True)
        for place in range(len(ways)):
            index = (place + turn) % len(ways)
            begin_s = time.perf_counter()
            sent = ways[index].encode()
            middle_s = time.perf_counter()
            ways[index].decode(sent)
            end_s = time.perf_counter()
            # The first turn touches the memory.
            if turn > 0:
                times[index][0].append(middle_s - begin_s)
                times[index][1].append(end_s - middle_s)
    medians = [tuple(statistics.median(one) for one in both) for both in times]
    own = {way.codec: both for way, both in zip(ways, medians, strict=True) if way.by == "gradlane"}
    return [
        Row(
            codec=way.codec,
            by=way.by,
            what=way.what,
            elements=elements,
            encode_s=encode_s,
            decode_s=decode_s,
            encode_bytes_per_s=4 * elements / encode_s,
            decode_bytes_per_s=4 * elements / decode_s,
            slower_encode=encode_s / own[way.codec][0],
            slower_decode=decode_s / own[way.codec][1],
        )
        for way, (encode_s, decode_s) in zip(ways, medians, strict=True)
    ], skipped


def ours(values: np.ndarray[Any, Any]) -> list[OptimizerSupport]:
    """Return gradlane's codecs, into memory that is there, as in training."""
    specs = {
        "f16": ("f16", 2.0**-11),
        "int8": ("int8", 1.1 / 255),
        "qsgd-8": ("qsgd:bits=8", 1.1 / 127),
        "qsgd-4": ("qsgd:bits=4", 1.1 / 7),
        "onebit": ("onebit:bucket=64,residual=off", None),
        "topk": ("topk:ratio=0.001,residual=off", None),
    }

    def way(name: str, spec: str, off_most: float | None) -> OptimizerSupport:
        codec = Codec(spec, (values.size,))
        wire = np.empty(codec.wire_bytes_max(values.size), dtype=np.uint8)
        back = np.empty_like(values)

        def encode() -> Any:
            return wire[: codec.encode_into(values, wire)]

        def decode(sent: Any) -> Any:
            codec.decode_into(sent, back)
            return back

        return OptimizerSupport(name, "gradlane", codec.spec, encode, decode, off_most)

    return [way(name, *rest) for name, rest in specs.items()]


def of_torch(array: np.ndarray[Any, Any]) -> list[OptimizerSupport]:
    """Return PyTorch's casts, quantizers and tensor operations."""
    values = torch.from_numpy(array)
    rows = values.view(-1, BUCKET)
    count = rows.shape[0]

    def per_tensor() -> torch.Tensor:
        # As in quantization_pertensor_hook, with torch's own observer.
        observer = torch.ao.quantization.MinMaxObserver()
        observer(values)
        scale, zero = observer.calculate_qparams()
        return torch.quantize_per_tensor(values, scale.item(), int(zero.item()), torch.quint8)

    def per_bucket() -> torch.Tensor:
        # As in quantization_perchannel_hook, which has buckets of 512 values as well.
        observer = torch.ao.quantization.PerChannelMinMaxObserver()
        observer(rows)
        scales, zeros = observer.calculate_qparams()
        return torch.quantize_per_channel(rows, scales, zeros, 0, torch.quint8)

    def stochastic(half: int) -> tuple[torch.Tensor, torch.Tensor]:
        scales = rows.abs().amax(dim=1, keepdim=True)
        codes = (rows * (half / scales) + torch.rand_like(rows)).floor_().add_(half)
        codes = codes.clamp_(0, 2 * half).to(torch.uint8).view(-1)
        return scales, codes if half > 7 else codes[0::2] | (codes[1::2] << 4)

    def from_stochastic(half: int, sent: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        scales, codes = sent
        if half <= 7:
            codes = torch.stack((codes & 15, codes >> 4), dim=1).view(-1)
        return ((codes.view(count, BUCKET).float() - half) * (scales / half)).view(-1)

    def one_bit() -> tuple[torch.Tensor, ...]:
        parts = values.view(-1, 64)
        positive = parts >= 0
        many = positive.sum(dim=1, keepdim=True).clamp_(min=1)
        few = (64 - positive.sum(dim=1, keepdim=True)).clamp_(min=1)
        above = (parts * positive).sum(dim=1, keepdim=True) / many
        below = (parts * ~positive).sum(dim=1, keepdim=True) / few
        weights = 2 ** torch.arange(8, dtype=torch.uint8)
        bits = (positive.view(-1, 8).to(torch.uint8) * weights).sum(dim=1, dtype=torch.uint8)
        return above, below, bits

    def from_one_bit(sent: tuple[torch.Tensor, ...]) -> torch.Tensor:
        above, below, bits = sent
        shifts = torch.arange(8, dtype=torch.uint8)
        positive = ((bits.unsqueeze(1) >> shifts) & 1).bool().view(-1, 64)
        return torch.where(positive, above, below).view(-1)

    def largest() -> tuple[torch.Tensor, torch.Tensor]:
        places = values.abs().topk(max(1, values.numel() // 1000), sorted=False).indices
        return values[places], places

    def from_largest(sent: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return torch.zeros_like(values).index_put_((sent[1],), sent[0])

    def eight() -> Any:
        return stochastic(127)

    def four() -> Any:
        return stochastic(7)

    steps = 1.1 / 255
    return [
        OptimizerSupport(
            "f16", "torch", "to(float16)", values.half, lambda sent: sent.float(), 2.0**-11
        ),
        OptimizerSupport(
            "int8",
            "torch",
            "quantize_per_tensor",
            per_tensor,
            lambda it: it.dequantize(),
            2 * steps,
        ),
        OptimizerSupport(
            "int8",
            "torch",
            "quantize_per_channel, 512 a bucket",
            per_bucket,
            lambda it: it.dequantize().view(-1),
            2 * steps,
        ),
        OptimizerSupport(
            "qsgd-8",
            "torch",
            "tensor operations",
            eight,
            lambda it: from_stochastic(127, it),
            1.1 / 127,
        ),
        OptimizerSupport(
            "qsgd-4", "torch", "tensor operations", four, lambda it: from_stochastic(7, it), 1.1 / 7
        ),
        OptimizerSupport("onebit", "torch", "tensor operations", one_bit, from_one_bit, None),
        OptimizerSupport("topk", "torch", "topk of the magnitudes", largest, from_largest, None),
    ]


def of_numpy(values: np.ndarray[Any, Any]) -> list[OptimizerSupport]:
    """Return the definitions of the codecs over whole arrays."""
    rows = values.reshape(-1, BUCKET)
    generator = np.random.default_rng(1)

    def int8() -> Any:
        least = rows.min(axis=1, keepdims=True)
        step = (rows.max(axis=1, keepdims=True) - least) / np.float32(255)
        return least, step, np.rint((rows - least) / step).astype(np.uint8)

    def stochastic(half: int) -> Any:
        scales = np.abs(rows).max(axis=1, keepdims=True)
        draws = generator.random(rows.shape, dtype=np.float32)
        codes = np.floor(rows * (np.float32(half) / scales) + draws) + np.float32(half)
        codes = np.clip(codes, 0, 2 * half).astype(np.uint8).reshape(-1)
        return scales, codes if half > 7 else codes[0::2] | (codes[1::2] << 4)

    def from_stochastic(half: int, sent: Any) -> Any:
        scales, codes = sent
        if half <= 7:
            codes = np.stack((codes & 15, codes >> 4), axis=1)
        codes = codes.reshape(-1, BUCKET).astype(np.float32) - np.float32(half)
        return (codes * (scales / np.float32(half))).reshape(-1)

    def one_bit() -> Any:
        parts = values.reshape(-1, 64)
        positive = parts >= 0
        many = np.maximum(positive.sum(axis=1, keepdims=True), 1)
        few = np.maximum(64 - positive.sum(axis=1, keepdims=True), 1)
        above = np.where(positive, parts, 0).sum(axis=1, keepdims=True) / many
        below = np.where(positive, 0, parts).sum(axis=1, keepdims=True) / few
        bits = np.packbits(positive, axis=None, bitorder="little")
        return above.astype(np.float32), below.astype(np.float32), bits

    def from_one_bit(sent: Any) -> Any:
        above, below, bits = sent
        positive = np.unpackbits(bits, bitorder="little").reshape(-1, 64).astype(bool)
        return np.where(positive, above, below).reshape(-1)

    def largest() -> Any:
        count = max(1, values.size // 1000)
        places = np.argpartition(np.abs(values), values.size - count)[values.size - count :]
        return places, values[places]

    def from_largest(sent: Any) -> Any:
        back = np.zeros_like(values)
        back[sent[0]] = sent[1]
        return back

    def half() -> Any:
        return values.astype(np.float16)

    whole = "over whole arrays"
    return [
        OptimizerSupport(
            "f16", "numpy", "astype(float16)", half, lambda it: it.astype(np.float32), 2.0**-11
        ),
        OptimizerSupport(
            "int8", "numpy", whole, int8, lambda it: (it[0] + it[2] * it[1]).reshape(-1), 1.1 / 255
        ),
        OptimizerSupport(
            "qsgd-8",
            "numpy",
            whole,
            lambda: stochastic(127),
            lambda it: from_stochastic(127, it),
            1.1 / 127,
        ),
        OptimizerSupport(
            "qsgd-4",
            "numpy",
            whole,
            lambda: stochastic(7),
            lambda it: from_stochastic(7, it),
            1.1 / 7,
        ),
        OptimizerSupport("onebit", "numpy", whole, one_bit, from_one_bit, None),
        OptimizerSupport(
            "topk", "numpy", "argpartition of the magnitudes", largest, from_largest, None
        ),
    ]


def of_hivemind(array: np.ndarray[Any, Any]) -> list[OptimizerSupport]:
    """Return hivemind's compression of tensors, as it is on the wire."""
    from hivemind.compression import (  # type: ignore[import-not-found]
        Float16Compression,
        Uniform8BitQuantization,
    )

    values = torch.from_numpy(array)

    def way(codec: str, what: str, made: Any, off_most: float | None) -> OptimizerSupport:
        info = made.__class__.__name__
        return OptimizerSupport(
            codec,
            "hivemind",
            f"{what} ({info})",
            lambda: made.compress(values),
            made.extract,
            off_most,
        )

    # Its 8 bits cut what is far from the mean.
    return [
        way("f16", "clipped cast", Float16Compression(), 2.0**-11),
        way("int8", "levels by standard deviation", Uniform8BitQuantization(), None),
    ]


if __name__ == "__main__":
    main()
