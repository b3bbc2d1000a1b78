"""A model of CNTK's exchange on one machine with K GPUs (Grubic et al., EDBT 2018).

A step is a GPU's share of the batch and then the exchange, which CNTK does not hide behind
backward. Its parts, with the paper's section that describes each:

- `link`: each GPU's own copies, 2 (K - 1) / K of the encoded gradients (section 3.2.1: MPI's go
  through the host's memory; section 2.4.2: NCCL's from GPU to GPU).
- `memory`: what all GPUs copy through the host's memory, 2 (K - 1) of the encoded gradients. MPI's.
- `messages`: each gradient matrix is sent separately (section 3.2.1), in 2 (K - 1) messages.
- `scales`: a kernel finds the scale of each bucket or column, on both ways (section 3.2.1).
- `averages`: 1-bit SGD's kernels average and sign each value, on both ways (section 2.2).

One constant each, fitted to ResNet-152 alone, whose GPUs have the same share of 16 samples in every
column, so that its time is that of one GPU. All other networks are held out. Where a GPU's share is
smaller than the batch of one GPU, its time is taken from the *other* primitive's cell with the
fewest bits, which hardly moves bytes, less that exchange by this model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod

import numpy as np

from gradlane.lab.runs.fitting import non_negative
from gradlane.planning.models import ARCHITECTURES, ModelLayer, ParameterShape
from gradlane_papers.reproduction.comparison import Speed, published_tables, speeds

QUANTIZED_SHARE = 0.99
"""Small tensors travel in full precision, as long as more than this share of all is quantized."""
FITTED = "resnet152"
"""The network that the constants are fitted to."""
PARTS: Mapping[str, tuple[str, ...]] = {
    "mpi": ("link", "memory", "messages", "scales", "averages"),
    "nccl": ("link", "messages"),
}
"""Parts with a constant of the primitive's own; NCCL's kernels are those of MPI."""
KERNELS = ("scales", "averages")
TABLES = {"mpi": "lowprec:fig10", "nccl": "lowprec:fig11"}
_WORD_BITS = 32
"""Of a packed word, and of a scale."""


def qsgd_bytes(elements: int, bits: int, bucket: int) -> int:
    """Return the bytes of a tensor under QSGD: a scale for each bucket of consecutive values."""
    return math.ceil(elements * bits / 8) + 4 * math.ceil(elements / bucket)


def one_bit_bytes(elements: int, column: int) -> int:
    """Return the bytes of a tensor under 1-bit SGD: two averages and packed bits a column."""
    columns = math.ceil(elements / column)
    return columns * (8 + 4 * math.ceil(column / _WORD_BITS))


def column_of(layer: ModelLayer, parameter: ParameterShape) -> int:
    """Return the length of a column in CNTK, whose first dimension is our last.

    Of a convolution that is the width of its kernel, of a matrix its outputs.
    """
    if layer.kind == "Conv2d" and len(parameter.shape) == 4:
        return parameter.shape[-1]
    return parameter.shape[0] if parameter.shape else 1


@dataclass(frozen=True)
class Encoding:
    """One of the paper's encodings, with its bucket (section 4.4)."""

    bits: int
    bucket: int | None
    """Values that share a scale; None: a column."""

    def bucket_of(self, layer: ModelLayer, one: ParameterShape) -> int:
        """Return the values that share a scale in a tensor."""
        return self.bucket if self.bucket is not None else column_of(layer, one)

    def size_bytes(self, layer: ModelLayer, one: ParameterShape) -> int:
        """Return the bytes of an encoded tensor."""
        if self.bits == 1:
            return one_bit_bytes(one.numel, self.bucket_of(layer, one))
        return qsgd_bytes(one.numel, self.bits, self.bucket_of(layer, one))


ENCODINGS: Mapping[str, Encoding | None] = {
    "32bit": None,
    "16bit": Encoding(16, 8192),
    "8bit": Encoding(8, 512),
    "4bit": Encoding(4, 512),
    "2bit": Encoding(2, 128),
    "1bit": Encoding(1, None),
    "1bit_reshaped": Encoding(1, 64),
}
"""None: full precision."""


@dataclass(frozen=True)
class Encoded:
    """Bytes and work of an encoding for a network's gradients.

    Attributes:
        size_bytes: of all tensors, the small ones whole (section 3.2.2).
        scales: buckets or columns.
        averaged: values that 1-bit SGD's kernels average.
        tensors: of the network; each is sent separately.
    """

    size_bytes: int
    scales: int
    averaged: int
    tensors: int


@cache
def encoded(network: str, encoding: str) -> Encoded:
    """Return what an encoding makes of a network's gradients."""
    pairs = [
        (layer, parameter)
        for layer in ARCHITECTURES[network]().layers
        for parameter in layer.parameters
    ]
    total = sum(prod(one.shape) for _, one in pairs)
    known = ENCODINGS[encoding]
    quantized = size_bytes = scales = 0
    for layer, one in sorted(pairs, key=lambda pair: -pair[1].numel):
        # Columns are CNTK's own, which quantizes every tensor.
        small = quantized > QUANTIZED_SHARE * total and encoding != "1bit"
        if known is None or small:
            size_bytes += 4 * one.numel
            continue
        size_bytes += known.size_bytes(layer, one)
        scales += math.ceil(one.numel / known.bucket_of(layer, one))
        quantized += one.numel
    averaged = quantized if known is not None and known.bits == 1 else 0
    return Encoded(size_bytes, scales, averaged, len(pairs))


def units(network: str, encoding: str, gpus: int) -> dict[str, float]:
    """Return how much of each part there is: bytes, messages, scales and values."""
    made = encoded(network, encoding)
    ways = 2.0 * (gpus - 1)
    return {
        "link": ways / gpus * made.size_bytes,
        "memory": ways * made.size_bytes,
        "messages": ways * made.tensors,
        "scales": 2.0 * made.scales,
        "averages": 2.0 * made.averaged,
    }


def batch_of(network: str, gpus: int) -> int:
    """Return the batch of all GPUs (figure 4)."""
    batches = published_tables()["batches"]
    return int(batches["rows"][network][batches["gpus"].index(gpus)])


def alone_s(network: str, gpus: int) -> float:
    """Return the time of a GPU's share of the batch, at the speed of one GPU."""
    return share_of(network, gpus) / one_gpu(network)


@cache
def one_gpu(network: str) -> float:
    """Return the samples a second of one GPU."""
    return next(
        one.value
        for table in TABLES.values()
        for one in speeds(table)
        if (one.network, one.gpus) == (network, 1)
    )


@cache
def cells(primitive: str) -> dict[tuple[str, str, int], Speed]:
    """Return the published cells of several GPUs, by network, encoding and GPUs."""
    table = speeds(TABLES[primitive])
    return {(one.network, one.encoding, one.gpus): one for one in table if one.gpus > 1}


@cache
def constants(primitive: str) -> Mapping[str, float]:
    """Return the seconds of a unit of each part, fitted to `FITTED`."""
    known = {} if primitive == "mpi" else {name: constants("mpi")[name] for name in KERNELS}
    names = PARTS[primitive]
    rows, wanted = [], []
    for (network, encoding, gpus), cell in cells(primitive).items():
        if network != FITTED:
            continue
        step_s = batch_of(network, gpus) / cell.value
        amounts = units(network, encoding, gpus)
        rest_s = step_s - alone_s(network, gpus)
        rest_s -= sum(known[name] * amounts[name] for name in known)
        # Relative errors of steps count the same.
        rows.append([amounts[name] / step_s for name in names])
        wanted.append(rest_s / step_s)
    return known | dict(zip(names, non_negative(rows, wanted), strict=True))


def parts_s(primitive: str, network: str, encoding: str, gpus: int) -> dict[str, float]:
    """Return the seconds of each part of an exchange."""
    amounts = units(network, encoding, gpus)
    return {name: each * amounts[name] for name, each in constants(primitive).items()}


def _quiet_cell(primitive: str, network: str, gpus: int) -> Speed | None:
    """Return the other primitive's cell of the same share that moves the fewest bytes."""
    table = cells("nccl" if primitive == "mpi" else "mpi")
    found = (table.get((network, encoding, gpus)) for encoding in ("2bit", "1bit_reshaped"))
    return next((cell for cell in found if cell is not None), None)


def share_of(network: str, gpus: int) -> float:
    """Return the samples of each GPU."""
    return batch_of(network, gpus) / gpus


def is_share_measured(primitive: str, network: str, gpus: int) -> bool:
    """Return whether `share_s` rests on a cell of the same share."""
    same = share_of(network, gpus) == batch_of(network, 1)
    return same or _quiet_cell(primitive, network, gpus) is not None


def share_s(primitive: str, network: str, gpus: int) -> float:
    """Return the time of a GPU's share of the batch.

    Where the share is smaller than one GPU's batch: that of the other primitive's quietest cell, of
    the same share or, a sample, of 8 GPUs; at one GPU's speed where there is no such cell.
    """
    if share_of(network, gpus) == batch_of(network, 1):
        return alone_s(network, gpus)
    for known in dict.fromkeys((gpus, 8)):
        cell = _quiet_cell(primitive, network, known)
        if cell is not None:
            other = "nccl" if primitive == "mpi" else "mpi"
            exchange_s = sum(parts_s(other, network, cell.encoding, known).values())
            seconds = batch_of(network, known) / cell.value - exchange_s
            return seconds * share_of(network, gpus) / share_of(network, known)
    return alone_s(network, gpus)


def step_s(
    primitive: str, network: str, encoding: str, gpus: int, *, without: Collection[str] = ()
) -> float:
    """Return a step's seconds by the model.

    Args:
        primitive: `mpi` or `nccl`.
        network: one of figure 3's images.
        encoding: one of `ENCODINGS`.
        gpus: of the machine.
        without: parts that are switched off, `shares` among them: shares then take one GPU's time.
    """
    compute_s = alone_s(network, gpus)
    if "shares" not in without:
        compute_s = share_s(primitive, network, gpus)
    parts = parts_s(primitive, network, encoding, gpus)
    return compute_s + sum(seconds for name, seconds in parts.items() if name not in without)


def samples_per_s(primitive: str, network: str, encoding: str, gpus: int) -> float:
    """Return what the model says; of one GPU, what is published."""
    if gpus == 1:
        return one_gpu(network)
    return batch_of(network, gpus) / step_s(primitive, network, encoding, gpus)


@dataclass(frozen=True)
class Errors:
    """How far the model is from the published cells.

    Attributes:
        cells: counted.
        mean: of the absolute deviations, in percent.
        median: of the same.
        within: cells within 5, 10 and 25 percent.
    """

    cells: int
    mean: float
    median: float
    within: tuple[int, int, int]


def errors(primitive: str, networks: Collection[str], *, without: Collection[str] = ()) -> Errors:
    """Return the model's errors over the cells of networks, parts switched off."""
    deviations = []
    for (network, encoding, gpus), cell in cells(primitive).items():
        if network in networks:
            step = step_s(primitive, network, encoding, gpus, without=without)
            ours = batch_of(network, gpus) / step
            deviations.append(abs(100.0 * (ours / cell.value - 1.0)))
    within = tuple(sum(one <= limit for one in deviations) for limit in (5, 10, 25))
    return Errors(
        len(deviations),
        float(np.mean(deviations)),
        float(np.median(deviations)),
        (within[0], within[1], within[2]),
    )
