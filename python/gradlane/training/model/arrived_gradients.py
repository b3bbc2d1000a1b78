"""What has come back of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradlane.training.rendezvous.tensor_table import TensorEntry, in_layout, is_dense
from gradlane.training.torch_internals import DisableTorchFunctionSubclass

_stride = Tensor.stride


@dataclass
class ArrivedGradients:
    """The tensors that have come back.

    Attributes:
        gradients: tensor numbers and averaged gradients.
        indices: all tensor numbers that are done with, also without a gradient.
        averaged: those of trained parameters that some rank had a gradient for.
    """

    gradients: list[tuple[int, Tensor]]
    indices: list[int]
    averaged: list[int]

    def match_layouts(self, trained: Sequence[TensorEntry], *, are_dense: bool) -> None:
        """Give gradients the layout of parameters that were laid out anew after prepare().

        Fused optimizers take both for flat memory in the same order.

        Args:
            trained: table entries of the trained parameters, by tensor number.
            are_dense: whether no gradient is sparse.
        """
        # Parameters whose update is due make a detour of each look at them.
        with DisableTorchFunctionSubclass():
            # Loops outside of Python: there may be thousands, in each step.
            parameters = [trained[index].tensor for index, _ in self.gradients]
            means = [gradient for _, gradient in self.gradients]
            if are_dense and [*map(_stride, parameters)] == [*map(_stride, means)]:
                return
            for position, (index, gradient) in enumerate(self.gradients):
                if gradient.layout is not torch.strided:
                    continue
                parameter = trained[index].tensor
                if parameter.stride() != gradient.stride() and is_dense(parameter):
                    with torch.no_grad(), torch.inference_mode(False):
                        laid_out = in_layout(gradient, parameter.stride())
                    self.gradients[position] = (index, laid_out)
