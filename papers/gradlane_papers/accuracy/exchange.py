"""The data flow of the `ps` scheme in one process, with the kernels that training uses.

Each worker's gradient is encoded with its own residual; the owner decodes and adds the workers' in
rank order, divides, and encodes the mean with its residual; all workers decode the same bytes.
Tensors are cut into slices as the engine cuts them; small ones stay in full precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gradlane.codecs import BROADCAST, Codec
from gradlane.training.options.codec_choice import smallest_encoded

SLICE_ELEMS = 50_000
"""Elements of a slice: the default of `p3`."""
ALL, CONVOLUTIONS, LINEAR = "all", "convolutions", "linear"
LAYERS: dict[str, tuple[type[nn.Conv2d | nn.Linear], ...]] = {
    ALL: (),
    CONVOLUTIONS: (nn.Conv2d,),
    LINEAR: (nn.Linear,),
}
"""The kinds of layers whose weights alone are encoded; none: all tensors are."""


@dataclass
class Slice:
    """A slice of a tensor, with what workers and its owner keep of it."""

    codec: Codec
    tensor: int
    first: int
    numel: int
    wire: torch.Tensor
    worker: list[torch.Tensor] = field(default_factory=list)
    owner: torch.Tensor | None = None


class EmulatedExchange:
    """Averages the gradients of emulated workers as encoded gradients are averaged.

    Attributes:
        push_bytes: that one worker has sent for its gradients in the last step, mean over workers.
        broadcast_bytes: of the encoded means of the last step.
    """

    def __init__(
        self,
        model: nn.Module,
        codec: str,
        *,
        workers: int,
        seed: int,
        layers: str = ALL,
        small_elems: int | None = None,
    ) -> None:
        """Cut the model's tensors.

        Args:
            model: whose gradients will be averaged.
            codec: text of the codec.
            workers: how many send.
            seed: of the draws of stochastic codecs.
            layers: of `LAYERS`: keep everything but the weights of these in full precision.
            small_elems: tensors with fewer elements stay f32; None: the 99 % rule, whatever the
                codec, so that all codecs are compared on the same tensors.
        """
        self.workers = workers
        self.seed = seed
        self.push_bytes = 0.0
        self.broadcast_bytes = 0.0
        parameters = list(model.parameters())
        kinds = LAYERS[layers]
        weights = {id(one.weight) for one in model.modules() if isinstance(one, kinds)}
        if small_elems is None:
            small_elems = smallest_encoded(one.numel() for one in parameters)
        self.slices: list[list[Slice]] = []
        for number, parameter in enumerate(parameters):
            plain = parameter.numel() < small_elems
            plain |= bool(kinds) and id(parameter) not in weights
            made = Codec("f32" if plain else codec, list(parameter.shape))
            self.slices.append(self._cut(made, number, parameter.numel()))

    def _cut(self, codec: Codec, tensor: int, numel: int) -> list[Slice]:
        width = max(SLICE_ELEMS // codec.granule, 1) * codec.granule
        slices = []
        for first in range(0, numel, width):
            count = min(width, numel - first)
            wire = torch.empty(codec.wire_bytes_max(count), dtype=torch.uint8, device="cpu")
            one = Slice(codec, tensor, first, count, wire)
            if codec.residual_width:
                kept = count * codec.residual_width
                zeros = torch.zeros(kept, dtype=torch.float32, device="cpu")
                one.worker = [zeros.clone() for _ in range(self.workers)]
                one.owner = zeros
            slices.append(one)
        return slices

    def average(
        self,
        gradients: Sequence[Sequence[torch.Tensor]],
        step: int,
        tensors: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return what every worker decodes, for each tensor.

        Args:
            gradients: of each worker, of each tensor, f32.
            step: number of the step.
            tensors: numbers of those that are exchanged; None: all.
        """
        self.push_bytes = self.broadcast_bytes = 0.0
        means = []
        given = range(len(self.slices)) if tensors is None else tensors
        for number, slices in enumerate(self.slices[tensor] for tensor in given):
            flat = [worker[number].reshape(-1) for worker in gradients]
            mean = torch.empty_like(flat[0])
            for one in slices:
                self._average_slice(one, flat, mean[one.first : one.first + one.numel], step)
            means.append(mean.view_as(gradients[0][number]))
        return means

    def _average_slice(
        self, one: Slice, gradients: Sequence[torch.Tensor], mean: torch.Tensor, step: int
    ) -> None:
        for rank, gradient in enumerate(gradients):
            values = gradient[one.first : one.first + one.numel]
            residual = one.worker[rank] if one.worker else None
            used = self._encode(one, values, residual, step, rank)
            self.push_bytes += used / self.workers
            take = one.codec.decode_add if rank else one.codec.decode_into
            take(one.wire[:used], mean)
        mean /= self.workers
        used = self._encode(one, mean, one.owner, step, BROADCAST)
        self.broadcast_bytes += used
        one.codec.decode_into(one.wire[:used], mean)

    def _encode(
        self, one: Slice, values: torch.Tensor, residual: torch.Tensor | None, step: int, leg: int
    ) -> int:
        needed = one.codec.wire_bytes_max(one.numel, step=step, leg=leg)
        if needed > len(one.wire):
            one.wire = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return one.codec.encode_into(
            values,
            one.wire,
            residual=residual,
            seed=self.seed,
            step=step,
            tensor=one.tensor,
            leg=leg,
            first_element=one.first,
        )
