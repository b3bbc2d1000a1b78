"""Samples a second of low-precision communication (Grubic et al., EDBT 2018), by bytes.

One machine with K GPUs: a step is the batch's share at the speed of one GPU, and then the exchange,
which CNTK does not hide behind backward. MPI reduces and broadcasts through the host's memory, so
all 2 (K - 1) copies share one rate; NCCL's ring moves 2 (K - 1) / K of the gradients at each GPU's
own. Both rates are fitted to *one* number each, ResNet-152 in full precision; the rest is predicted
from the bytes that each encoding makes of the network's shapes. Encoding takes no time here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from math import prod

from gradlane.lab.papers.comparison import Figure, Ours, Reproduce, given, published_of
from gradlane.lab.papers.simulations import Simulations
from gradlane.planning.models import ARCHITECTURES, Layer, ParameterShape

NETWORKS = ("resnet50", "resnet152", "bn_inception", "vgg19")
QUANTIZED_SHARE = 0.99
"""Small tensors travel in full precision, as long as more than this share of all is quantized."""
FITTED = "resnet152_32bit"
FLAT = {"resnet50": 62, "bn_inception": 53}
"""Figure 10's samples a second at 2 bits on 16 GPUs over 16 times those of one, in percent."""
_WORD_BITS = 32
"""Of a packed word, and of a scale."""


def qsgd_bytes(elements: int, bits: int, bucket: int) -> int:
    """Return the bytes of a tensor under QSGD: a scale for each bucket of consecutive values."""
    return math.ceil(elements * bits / 8) + 4 * math.ceil(elements / bucket)


def one_bit_bytes(elements: int, column: int) -> int:
    """Return the bytes of a tensor under 1-bit SGD: two averages and packed bits a column."""
    columns = math.ceil(elements / column)
    return columns * (8 + 4 * math.ceil(column / _WORD_BITS))


def column_of(layer: Layer, parameter: ParameterShape) -> int:
    """Return the length of a column in CNTK, whose first dimension is our last.

    Of a convolution that is the width of its kernel, of a matrix its outputs.
    """
    if layer.kind == "Conv2d" and len(parameter.shape) == 4:
        return parameter.shape[-1]
    return parameter.shape[0] if parameter.shape else 1


ENCODINGS: dict[str, Callable[[Layer, ParameterShape], int]] = {
    "32bit": lambda layer, one: 4 * one.numel,
    "16bit": lambda layer, one: qsgd_bytes(one.numel, 16, 8192),
    "8bit": lambda layer, one: qsgd_bytes(one.numel, 8, 512),
    "4bit": lambda layer, one: qsgd_bytes(one.numel, 4, 512),
    "2bit": lambda layer, one: qsgd_bytes(one.numel, 2, 128),
    "1bit": lambda layer, one: one_bit_bytes(one.numel, column_of(layer, one)),
    "1bit_reshaped": lambda layer, one: one_bit_bytes(one.numel, 64),
}
"""Bytes of a tensor by the paper's encodings and bucket sizes (section 4.4)."""


@cache
def encoded_bytes(network: str, encoding: str) -> int:
    """Return the bytes of a network's gradients; small tensors stay whole (section 3.2.2)."""
    pairs = [
        (layer, parameter)
        for layer in ARCHITECTURES[network]().layers
        for parameter in layer.parameters
    ]
    total = sum(prod(one.shape) for _, one in pairs)
    quantized = 0
    size_bytes = 0
    for layer, one in sorted(pairs, key=lambda pair: -pair[1].numel):
        if quantized > QUANTIZED_SHARE * total and encoding != "1bit":
            size_bytes += 4 * one.numel
        else:
            size_bytes += ENCODINGS[encoding](layer, one)
        quantized += one.numel
    return size_bytes


def exchanged_bytes(network: str, encoding: str, gpus: int, primitive: str) -> float:
    """Return the bytes that share one rate: all copies for MPI, one GPU's for NCCL."""
    copies = 2.0 * (gpus - 1)
    if primitive == "nccl":
        copies /= gpus
    return copies * encoded_bytes(network, encoding)


def compute_s(network: str, gpus: int) -> float:
    """Return the time of a GPU's share of the batch, at the speed of one GPU."""
    batch = float(given(f"lowprec_{network}_batch_{gpus}"))
    return float(batch / gpus / given(f"lowprec_{network}_one"))


@cache
def fitted_rate(primitive: str) -> float:
    """Return the bytes a second with which ResNet-152 in full precision comes out right."""
    figure, gpus = ("lowprec:fig6", 16) if primitive == "mpi" else ("lowprec:fig7", 8)
    published = published_of(figure)[FITTED].value
    assert published is not None
    step_s = float(given(f"lowprec_resnet152_batch_{gpus}")) / published
    size = exchanged_bytes("resnet152", "32bit", gpus, primitive)
    return size / (step_s - compute_s("resnet152", gpus))


def samples_per_s(network: str, encoding: str, gpus: int, primitive: str) -> float:
    """Return what the model says."""
    exchange_s = exchanged_bytes(network, encoding, gpus, primitive) / fitted_rate(primitive)
    batch = given(f"lowprec_{network}_batch_{gpus}")
    return float(batch / (compute_s(network, gpus) + exchange_s))


def _why(network: str, encoding: str, primitive: str) -> str:
    if f"{network}_{encoding}" == FITTED:
        return "The number that was fitted."
    ratio = encoded_bytes(network, "32bit") / encoded_bytes(network, encoding)
    text = f"{ratio:.1f}x fewer bytes" if ratio >= 1 else f"{1 / ratio:.1f}x more bytes"
    if network == "vgg19":
        return f"{text}; small batches ran faster than the single GPU's speed says (section 5.2)."
    if network in FLAT and encoding != "32bit" and primitive == "mpi":
        return (
            f"{text}; at 2 bits, with hardly any bytes, theirs still reaches {FLAT[network]} % of "
            "linear scaling: something beside the exchange holds it."
        )
    if encoding == "1bit":
        return f"{text}: columns as short as a kernel is wide."
    if encoding == "32bit":
        return f"The rate of ResNet-152 for all; their {primitive.upper()} was not equally fast."
    return f"{text}; encoding takes time, which the model leaves out."


def _rows(figure: str, gpus: int, primitive: str) -> Reproduce:
    """Return the numbers of a figure."""

    def run(simulations: Simulations) -> list[Ours]:
        del simulations
        found = []
        for key in published_of(figure):
            network = next(name for name in NETWORKS if key.startswith(f"{name}_"))
            encoding = key.removeprefix(f"{network}_")
            value = samples_per_s(network, encoding, gpus, primitive)
            found.append(Ours(key, value, _why(network, encoding, primitive)))
        return found

    return run


def figure_3(simulations: Simulations) -> list[Ours]:
    """Parameters of the networks."""
    del simulations
    why = "The same layers, or torchvision's; the paper rounds."
    return [
        Ours(name, ARCHITECTURES[name]().numel / 1e6, why) for name in published_of("lowprec:fig3")
    ]


_BYTES = "the model of bytes in `lab/papers/lowprec.py`, one rate fitted to one number"
_RUNS = "training runs of these networks. Small ones instead: `gradlane lab accuracy`"
FIGURES = (
    Figure("lowprec:fig3", "the networks", "counted", figure_3),
    Figure("lowprec:fig5", "accuracy of each precision", needs=_RUNS),
    Figure(
        "lowprec:fig6",
        "16 GPUs with MPI (table: figure 10)",
        _BYTES,
        _rows("lowprec:fig6", 16, "mpi"),
    ),
    Figure(
        "lowprec:fig7",
        "8 GPUs with NCCL (table: figure 11)",
        _BYTES,
        _rows("lowprec:fig7", 8, "nccl"),
    ),
    Figure("lowprec:fig8", "DGX-1 with MPI", needs="numbers: the picture has none"),
    Figure("lowprec:fig9", "DGX-1 with NCCL", needs="numbers: the picture has none"),
    Figure("lowprec:fig16", "price against accuracy", needs=_RUNS),
)
