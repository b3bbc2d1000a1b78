"""A small convolutional network on scikit-learn's handwritten digits: 1,797 images of 8x8.

Every rank draws its part of each epoch's permutation, so that no image is seen twice in an epoch.
The network is smooth (tanh and average pooling, as in LeNet-5): at kinks (ReLU, maximum pooling)
the last bits of a sum decide which side an activation falls on, and 200 steps turn them into
percents of the loss.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.paced_layers import PacedConvolution, PacedLinear, Pacer
from gradlane.lab.workloads.real import Batch, RealWorkload

HELD_OUT = 360
"""Images kept for evaluation; 1,437 are trained on."""
CONVOLUTION_FORWARD_S = 0.008
LINEAR_FORWARD_S = 0.004
LEARNING_RATE = 0.05
MOMENTUM = 0.9


def _tanh_pool(images: torch.Tensor) -> torch.Tensor:
    return functional.avg_pool2d(torch.tanh(images), 2)


class DigitsNetwork(nn.Module):
    """Two convolutions and two fully connected layers: 283,786 parameters in 8 tensors."""

    def __init__(self, pacer: Pacer) -> None:
        """Create the network from torch's global generator."""
        super().__init__()
        self.convolution1 = PacedConvolution(pacer, 1, 32, CONVOLUTION_FORWARD_S, torch.tanh)
        self.convolution2 = PacedConvolution(pacer, 32, 64, CONVOLUTION_FORWARD_S, _tanh_pool)
        self.linear1 = PacedLinear(pacer, 64 * 4 * 4, 256, LINEAR_FORWARD_S, torch.tanh)
        self.linear2 = PacedLinear(pacer, 256, 10, LINEAR_FORWARD_S)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 1, 8, 8) to scores (samples, 10)."""
        features = self.convolution2(self.convolution1(images))
        scores: torch.Tensor = self.linear2(self.linear1(features.flatten(1)))
        return scores


class DigitsCnn(RealWorkload):
    """Classification of handwritten digits, trained with momentum."""

    batch_size = 32

    def load(self) -> None:
        """Load the digits and split them; the split depends on the seed alone.

        Raises:
            ValueError: if one step of all ranks needs more images than there are.
        """
        from sklearn.datasets import load_digits

        images, classes = load_digits(return_X_y=True)
        order = np.random.default_rng((self.seed, 0)).permutation(len(classes))
        pixels = torch.from_numpy((images[order] / 16.0).astype(np.float32))
        self._images = pixels.reshape(-1, 1, 8, 8)
        self._classes = torch.from_numpy(classes[order].astype(np.int64))
        self._training = len(classes) - HELD_OUT
        self._steps_per_epoch = self._training // (self.batch_size * self.world_size)
        if self._steps_per_epoch == 0:
            raise ValueError(
                f"{self.world_size} ranks with {self.batch_size} images each need more than the "
                f"{self._training} images of digits-cnn; use fewer ranks"
            )
        self._permutation: tuple[int, np.ndarray] | None = None

    def make_model(self) -> nn.Module:
        """Build the network."""
        return DigitsNetwork(self.pacer)

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return stochastic gradient descent with momentum."""
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def batch(self, step: int) -> Batch:
        """Return 32 images (float32, 0 to 1) and their digits; epochs differ in their order."""
        epoch, position = divmod(step, self._steps_per_epoch)
        if self._permutation is None or self._permutation[0] != epoch:
            generator = np.random.default_rng((self.seed, 1, epoch))
            self._permutation = (epoch, generator.permutation(self._training))
        start = (position * self.world_size + self.rank) * self.batch_size
        chosen = torch.from_numpy(self._permutation[1][start : start + self.batch_size])
        return self._images[chosen], self._classes[chosen]

    def held_out(self) -> list[Batch]:
        """Return the images kept for evaluation in one batch."""
        return [(self._images[self._training :], self._classes[self._training :])]
