"""A recommendation model in the manner of DLRM: tables of vectors, and small dense layers."""

from __future__ import annotations

from itertools import pairwise

from gradlane.planning.models.layers import Architecture, LayerList

CRITEO_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194,
    27, 14_992, 5_461_306, 10, 5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Values of each of the 26 categories of the Criteo Kaggle data set."""
WIDTH = 16
BATCH_SIZE = 2048
BATCH_TIME_S = 0.003
"""Assumed: tables are read at memory's speed, not the arithmetic's, so no count of operations says
it. A step of this size takes single-digit milliseconds on accelerators of the last years."""


def dlrm() -> Architecture:
    """DLRM on Criteo Kaggle: 540,677,217 parameters, 99.9 % in its tables; batches of 2,048.

    Naumov et al. 2019 with the sizes of its public benchmark: vectors of 16, dense layers
    13-512-256-64-16 below and 512-256-1 above. Its tables' gradients are taken as dense here, as a
    plain data-parallel loop has them; in truth a batch touches few of their rows.
    """
    dense = LayerList()
    _tower(dense, "bot_l", (13, 512, 256, 64, WIDTH))
    vectors = len(CRITEO_ROWS) + 1
    interactions = vectors * (vectors - 1) // 2
    _tower(dense, "top_l", (interactions + WIDTH, 512, 256, 1))
    layers = LayerList()
    # Assumed: reading the tables takes as long as all products together.
    reading = sum(layer.operations for layer in dense.layers) // len(CRITEO_ROWS)
    for number, rows in enumerate(CRITEO_ROWS):
        layers.add(f"emb_l.{number}", reading, "EmbeddingBag", weight=(rows, WIDTH))
    layers.layers.extend(dense.layers)
    return Architecture(
        "dlrm", tuple(layers.layers), BATCH_SIZE, BATCH_TIME_S, "an assumed accelerator of today"
    )


def _tower(layers: LayerList, name: str, widths: tuple[int, ...]) -> None:
    for number, (inputs, outputs) in enumerate(pairwise(widths)):
        # An activation stands between two layers and has a number of its own.
        layers.linear(f"{name}.{2 * number}", inputs, outputs)
