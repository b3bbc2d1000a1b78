"""The fragments of a model: parts of whole layers that are exchanged in turn."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from gradlane.training.rendezvous.tensor_table import TensorEntry


def divide(
    model: nn.Module, trained: Sequence[TensorEntry], fragments: int
) -> list[tuple[int, ...]]:
    """Divide the trained parameters of a model into fragments, the same on all ranks.

    A layer is a module with trained parameters of its own; one that several modules hold goes with
    the first. In the order of the model each layer joins the fragment with the fewest bytes, so
    that equal layers are interleaved, as in Streaming DiLoCo.

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
    if len(layers) < fragments:
        raise ValueError(
            f"fragments is {fragments}, but the model has {len(layers)} layers with trained "
            f"parameters, and a fragment holds whole layers: give {len(layers)} or fewer"
        )
    held: list[list[int]] = [[] for _ in range(fragments)]
    nbytes = [0] * fragments
    for layer in layers:
        least = min(range(fragments), key=lambda number: (nbytes[number], number))
        held[least] += layer
        nbytes[least] += sum(trained[index].nbytes for index in layer)
    return [tuple(sorted(one)) for one in held]


def _layers(model: nn.Module, trained: Sequence[TensorEntry]) -> list[list[int]]:
    left = {id(entry.tensor): index for index, entry in enumerate(trained)}
    found = []
    for module in model.modules():
        own = [left.pop(id(one)) for one in module.parameters(recurse=False) if id(one) in left]
        if own:
            found.append(own)
    return found
