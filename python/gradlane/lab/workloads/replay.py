"""Replay workloads: real tensors, real hooks and real bytes, with an accelerator that sleeps.

Two cores can so stand for any number of accelerators. The gradients are known in advance for
each rank and step, so that what arrives over a network can be verified to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from gradlane.formats.profile import Profile
from gradlane.lab.workloads.codec_error import UPDATES_OFF_MOST, is_sum_of_gradients, mean_error
from gradlane.lab.workloads.contract import Workload, WorkloadSpec
from gradlane.lab.workloads.gradients import Float32Array, Float64Array, GradientPattern
from gradlane.lab.workloads.replay_model import (
    UPDATED_ELEMENTS,
    Accelerator,
    ReplayModel,
    SleepingLayer,
    factor_index,
    product_at,
    updated_elements,
)
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.schedule import (
    layers_from_architecture,
    layers_from_profile,
    merge_short_layers,
)
from gradlane.planning.models.timings import compute_s_of, timings_of
from gradlane.planning.simulation.profiles import profile_of_layers

LEARNING_RATE = 0.01


class ReplayOptimizer(torch.optim.Optimizer):
    """Gradient descent on a sample of each parameter's elements.

    It stands for the update that a real accelerator runs in its own memory at no cost to the
    host's cores: updating all elements would cost the host several passes over the model.
    The sample spreads over the whole tensor, so that `ReplayWorkload.verify` sees whether the
    gradients of every step arrived. Each update rounds twice (product, difference), without
    fusing, so that NumPy can repeat it. Parameters whose `.grad` is None are left alone.
    """

    steps_per_parameter = True
    """Each parameter is updated by itself: gradlane may step them as their gradients arrive."""

    def __init__(self, params: Iterable[Any], lr: float = LEARNING_RATE) -> None:
        """Create the optimizer over parameters or parameter groups.

        Args:
            params: contiguous float32 parameters, or groups of them.
            lr: learning rate, not negative.

        Raises:
            ValueError: if `lr` is negative.
        """
        if lr < 0.0:
            raise ValueError(f"learning rate must not be negative, got {lr}")
        super().__init__(params, {"lr": lr, "momentum": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the sampled elements of every parameter that has a gradient.

        Args:
            closure: evaluated first where given, with gradients enabled.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                numel = parameter.numel()
                stride = max(1, numel // UPDATED_ELEMENTS)
                start = (numel - 1) % stride
                values = parameter.view(-1)[start::stride]
                values.sub_(parameter.grad.reshape(-1)[start::stride] * group["lr"])
        return loss


class ReplayWorkload(Workload):
    """A model that sleeps for the times of a profile and yields gradients of its sizes."""

    replays = True

    def __init__(self, spec: WorkloadSpec, rank: int, world_size: int) -> None:
        """Build the model; see `gradlane.lab.workloads.build` for the arguments."""
        super().__init__(spec, rank, world_size)
        architecture = ARCHITECTURES[spec.name]()
        if spec.profile_path is None:
            layers = layers_from_architecture(architecture, spec.batch_time_s)
        else:
            layers = layers_from_profile(Path(spec.profile_path), spec.batch_time_s)
        layers = merge_short_layers(layers, spec.dilation)
        self.batch_size = architecture.batch_size
        self.pattern = GradientPattern(spec.seed)
        # Rebuilding gradients is arithmetic like that of the step itself, and as fast.
        operations = 3.0 * architecture.operations * self.batch_size
        speed = operations / compute_s_of([layer.stage() for layer in layers])
        self._accelerator = Accelerator(self.clock, self.pattern, rank, speed)
        self._layers = layers
        self.flops = (
            architecture.operations * self.batch_size if spec.profile_path is None else None
        )
        self._chain = ReplayModel(layers, self._accelerator, self.batch_size)
        self.model = self._chain
        stages = [layer.stage() for layer in layers]
        timings = {timing.name: timing for timing in timings_of(stages)}
        named = list(self.model.named_parameters())
        self.timings = [timings[name] for name, _ in named]
        self.compute_s = compute_s_of(stages)
        # Gradients are numbered in forward order, tensors in the order of registration.
        forward_index = {name: index for index, name in enumerate(timings)}
        self._gradient_index = [forward_index[name] for name, _ in named]
        self._initial = {
            name: parameter.detach().view(-1)[_sample(parameter)].numpy().copy()
            for name, parameter in named
        }

    def profile(self) -> Profile:
        """Return the profile that the model replays, with the layers that have factors."""
        profile = profile_of_layers(self.name, self.batch_size, self._layers)
        return replace(profile, flops=self.flops)

    def factor_bytes(self) -> dict[str, int]:
        """Return the bytes of a rank's factors, by the name of the weight, where it has any."""
        return {
            self.timings[index].name: layer.factor_bytes
            for index, layer in self._factored_layers().items()
        }

    def _factored_layers(self) -> dict[int, SleepingLayer]:
        """Return the layers that can give factors, by the number of their weight."""
        numbers = {id(one): index for index, one in enumerate(self.model.parameters())}
        found = {}
        for layer in self._chain.layers:
            if layer.gives_factors:
                found[numbers[id(next(layer.parameters(recurse=False)))]] = layer
        return found

    def _mean_of_factors(
        self, index: int, layer: SleepingLayer, step: int, elements: npt.NDArray[np.int64]
    ) -> Float32Array:
        """Return elements of the mean gradient by all ranks' factors, added up in rank order."""
        outputs, inputs = layer.weight_shape
        number = self._gradient_index[index]
        total = np.zeros(len(elements), dtype=np.float32)
        for rank in range(self.world_size):
            values = [
                self.pattern.gradient(
                    factor_index(number, one), rank, step, layer.factor_elements(one)
                )
                for one in (0, 1)
            ]
            product = product_at(
                values[0].reshape(-1, inputs), values[1].reshape(-1, outputs), elements
            )
            total = np.add(total, product)
        mean: Float32Array = np.divide(total, np.float32(self.world_size))
        return mean

    def begin_step(self, step: int) -> None:
        """Make gradients of `step` from now on."""
        self._accelerator.begin_step(step)

    def make_optimizer(self, model: nn.Module) -> ReplayOptimizer:
        """Return an optimizer that updates a sample of each parameter."""
        return ReplayOptimizer(model.parameters())

    def batch(self, step: int) -> torch.Tensor:
        """Return a stand-in for the batch: one zero, float32."""
        return torch.zeros(1, dtype=torch.float32, device="cpu")

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        """Run forward and return a loss of zero whose backward yields the step's gradients."""
        result: torch.Tensor = model(batch).sum()
        return result

    def own_gradient(
        self, tensor_index: int, step: int, elements: npt.NDArray[np.int64] | None = None
    ) -> Float32Array:
        """Return this rank's gradient before any communication: flat, float32.

        Args:
            tensor_index: number of the tensor in `named_parameters()` order.
            step: number of the step.
            elements: flat indices that are wanted; None for all.
        """
        index, numel = self._gradient_index[tensor_index], self.timings[tensor_index].numel
        return self.pattern.gradient(index, self.rank, step, numel, elements)

    def expected_gradient(
        self,
        tensor_index: int,
        step: int,
        world_size: int | None = None,
        elements: npt.NDArray[np.int64] | None = None,
    ) -> Float32Array:
        """Return the mean over all ranks, summed in rank order: flat, float32, exact to the bit.

        Args:
            tensor_index: number of the tensor in `named_parameters()` order.
            step: number of the step.
            world_size: number of ranks; the workload's own where it is None.
            elements: flat indices that are wanted; None for all.
        """
        index, numel = self._gradient_index[tensor_index], self.timings[tensor_index].numel
        ranks = self.world_size if world_size is None else world_size
        return self.pattern.mean_gradient(index, step, ranks, numel, elements)

    def verify(
        self,
        model: nn.Module,
        steps: int,
        world_size: int | None = None,
        *,
        exact: bool = True,
        codecs: Sequence[str] = (),
        ring_ranks: int | None = None,
    ) -> list[str]:
        """Check that the model is what steps 0 to `steps` - 1 of averaged gradients make of it.

        Only `ReplayOptimizer`, at its default learning rate, may have updated the model.

        Args:
            model: the model, or a wrapper that keeps the order of its parameters.
            steps: number of steps that were run, counted from step 0.
            world_size: number of ranks; the workload's own where it is None.
            exact: require equal bits, as the rank-order mean gives; where false (another order
                of summation), allow a relative and absolute difference of 1e-5 for each step.
            codecs: how each gradient travelled, in canonical texts; what a codec may be off is
                allowed. Tensors of codecs that send more than gradients are not looked at.
            ring_ranks: ranks of the ring that they went round; None: they went to servers.

        Returns:
            One line for each tensor that differs, naming it; empty if all is well.
        """
        wrong: list[str] = []
        rate = np.float32(LEARNING_RATE)
        parameters: Sequence[nn.Parameter] = list(model.parameters())
        layers = self._factored_layers()
        for index, (timing, parameter) in enumerate(zip(self.timings, parameters, strict=True)):
            elements = updated_elements(timing.numel)
            expected = self._initial[timing.name].copy()
            layer = layers.get(index)
            for step in range(steps):
                if layer is not None and step in layer.factor_steps:
                    mean = self._mean_of_factors(index, layer, step, elements)
                else:
                    mean = self.expected_gradient(index, step, world_size, elements)
                expected = np.subtract(expected, np.multiply(mean, rate))
            found = parameter.detach().view(-1)[_sample(parameter)].numpy()
            codec = codecs[index] if codecs else "raw"
            if codec != "raw":
                off = np.abs(found.astype(np.float64) - expected)
                wrong += self._far_off(timing.name, codec, expected, off, steps, ring_ranks)
                continue
            tolerance = 0.0 if exact else 1e-5 * max(steps, 1)
            near = np.isclose(found, expected, rtol=tolerance, atol=tolerance)
            if not near.all():
                first = int(np.flatnonzero(~near)[0])
                wrong.append(
                    f"tensor '{timing.name}': element {elements[first]} is {found[first]!r}, "
                    f"expected {expected[first]!r} after {steps} steps "
                    f"({int((~near).sum())} of {len(elements)} sampled elements differ)"
                )
        return wrong

    def _far_off(
        self,
        name: str,
        codec: str,
        expected: Float32Array,
        off: Float64Array,
        steps: int,
        ring_ranks: int | None,
    ) -> list[str]:
        """Say how a tensor is further off than its codec allows; empty if it is not."""
        if not is_sum_of_gradients(codec):
            return []
        if not np.isfinite(off).all():
            return [f"tensor '{name}' is not finite under {codec}"]
        # Factors of gradients are below 1.5 (see `GradientPattern.shift_and_scale`).
        largest = 1.5 * float(np.abs(self.pattern.values).max())
        allowed = mean_error(codec, largest, ring_ranks)
        if allowed is not None:
            limit = steps * (LEARNING_RATE * allowed + 1e-5)
            worst = float(off.max())
            return [
                f"tensor '{name}' is off by {worst:.3g} after {steps} steps of {codec}, which "
                f"allows {limit:.3g}"
            ] * (worst > limit)
        moved = float(np.linalg.norm(expected - self._initial[name]))
        error = float(np.linalg.norm(off))
        return [
            f"tensor '{name}' is off by {error:.3g} where it should have moved by {moved:.3g} in "
            f"{steps} steps of {codec}"
        ] * (len(off) >= UPDATED_ELEMENTS and error > UPDATES_OFF_MOST * moved)


def _sample(parameter: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(updated_elements(parameter.numel()))
