"""PowerSGD as DDP's hook has it: gradients of matrices travel as two thin factors.

Vogels et al. 2019, with torch's choices (`powerSGD_hook`): factors begin where the last step's
ended, each worker keeps what the product left, and a matrix that would not be half as large stays
as it is. Its first steps are exact, two of them, the fewest that the hook takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EXACT_STEPS = 2
LEAST_COMPRESSION = 2


class PowerSgdExchange:
    """Averages gradients of emulated workers by factors.

    Attributes:
        push_bytes: that one worker has given to all-reduces in the last step.
        broadcast_bytes: that it has got from them.
        factors: of the last step, by tensor number, the same on all workers.
        errors: what products left, by tensor number and worker.
    """

    def __init__(self, model: nn.Module, rank: int, *, workers: int, seed: int) -> None:
        """Draw the first factors, the same on all workers.

        Args:
            model: whose gradients will be averaged.
            rank: columns of a factor.
            workers: how many send.
            seed: of the first factors.
        """
        self._rank = rank
        self._step = 0
        self.push_bytes = self.broadcast_bytes = 0.0
        generator = torch.Generator().manual_seed(seed)
        self.factors: dict[int, Tensor] = {}
        self.errors: dict[tuple[int, int], Tensor] = {}
        for number, parameter in enumerate(model.parameters()):
            rows, columns = self._matrix(parameter).shape
            if (rows + columns) * rank * LEAST_COMPRESSION < rows * columns:
                self.factors[number] = torch.randn(
                    columns, rank, generator=generator, dtype=torch.float32, device="cpu"
                )
                for worker in range(workers):
                    self.errors[number, worker] = torch.zeros(
                        rows, columns, dtype=torch.float32, device="cpu"
                    )

    def average(self, gradients: Sequence[Sequence[Tensor]], step: int) -> list[Tensor]:
        """Return the mean that all workers have, for each tensor.

        Args:
            gradients: of each worker, of each tensor, f32.
            step: number of the step, from 0.
        """
        sent = 0
        means = []
        for number, first in enumerate(gradients[0]):
            own = [worker[number] for worker in gradients]
            if step < EXACT_STEPS or number not in self.factors:
                means.append(_mean(own))
                sent += first.numel()
                continue
            matrices = [
                self._matrix(one) + self.errors[number, worker] for worker, one in enumerate(own)
            ]
            right = self.factors[number]
            left = torch.linalg.qr(_mean([matrix @ right for matrix in matrices])).Q
            right = self.factors[number] = _mean([matrix.T @ left for matrix in matrices])
            product = left @ right.T
            for worker, matrix in enumerate(matrices):
                self.errors[number, worker] = matrix - product
            means.append(product.view_as(first))
            sent += left.numel() + right.numel()
        self.push_bytes = self.broadcast_bytes = 4.0 * sent
        return means

    @staticmethod
    def _matrix(tensor: Tensor) -> Tensor:
        return tensor.detach().reshape(tensor.shape[0] if tensor.dim() else 1, -1)


def _mean(values: Sequence[Tensor]) -> Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total / len(values)
