"""The fragments of a model: parts of whole layers that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradlane.training.local_updates.rounds import balance
from gradlane.training.rendezvous.tensor_table import TensorEntry


def divide(
    model: nn.Module, trained: Sequence[TensorEntry], fragments: int
) -> list[tuple[int, ...]]:
    """Divide the trained parameters of a model into fragments, the same on all ranks.

    A layer is a module with trained parameters of its own; one that several modules hold goes with
    the first. Equal layers are interleaved, as in Streaming DiLoCo (`balance`).

    Args:
        model: the user's.
        trained: table entries of its trained parameters.
        fragments: number of them.

    Returns:
        Tensor numbers, ascending, by fragment.

    Raises:
        ValueError: there are fewer layers.
    """
    layers = _layers(model, trained)
    held = balance([sum(trained[index].nbytes for index in layer) for layer in layers], fragments)
    return [tuple(sorted(index for layer in one for index in layers[layer])) for one in held]


def _layers(model: nn.Module, trained: Sequence[TensorEntry]) -> list[list[int]]:
    left = {id(entry.tensor): index for index, entry in enumerate(trained)}
    found = []
    for module in model.modules():
        own = [left.pop(id(one)) for one in module.parameters(recurse=False) if id(one) in left]
        if own:
            found.append(own)
    return found
