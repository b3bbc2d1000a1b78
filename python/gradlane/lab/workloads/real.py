"""The base class of workloads that compute for real: pacing, timings and evaluation.

Their data are a function of (seed, rank, step), their model a function of the seed. Each layer is
stretched to a fixed time, longer than it takes when four ranks share two cores, so that ranks do
not measure their fight for the cores.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.contract import Evaluation, Workload, WorkloadSpec
from gradlane.lab.workloads.paced_layers import Pacer
from gradlane.planning.models.timings import Stage, compute_s_of, timings_of

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and the classes to predict (int64)."""


class RealWorkload(Workload):
    """A model that computes for real on real data, at a stated pace."""

    replays = False
    loss_forward_s = 0.001
    """Nominal seconds of the loss function's forward."""

    def __init__(self, spec: WorkloadSpec, rank: int, world_size: int) -> None:
        """Load the data and build the model; see `gradlane.lab.workloads.build`.

        Raises:
            ValueError: a profile is given, or a batch time that is not positive.
        """
        if spec.profile_path is not None:
            raise ValueError(f"workload '{spec.name}' computes for real and takes no profile")
        super().__init__(spec, rank, world_size)
        self.pacer = Pacer(self.clock)
        self.load()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(spec.seed)
            self.model = self.make_model()
        if spec.batch_time_s is not None:
            if not spec.batch_time_s > 0.0:
                raise ValueError(f"batch time must be positive, got {spec.batch_time_s} s")
            self.pacer.scale = spec.batch_time_s / compute_s_of(self._stages())
        stages = self._stages()
        timings = {timing.name: timing for timing in timings_of(stages)}
        self.timings = [timings[name] for name, _ in self.model.named_parameters()]
        self.compute_s = compute_s_of(stages) if spec.paced else 0.0

    def _stages(self) -> list[Stage]:
        return self.pacer.stages(self.model, lambda: self.loss(self.model, self.batch(0)))

    @abstractmethod
    def load(self) -> None:
        """Load the data of this rank."""

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Build the model from torch's global generator, which has been seeded."""

    @abstractmethod
    def batch(self, step: int) -> Batch:
        """Return this rank's samples of `step`."""

    @abstractmethod
    def held_out(self) -> list[Batch]:
        """Return samples that no rank trains on, the same on every rank."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy of `model` on `batch`, in nats."""
        inputs, targets = batch
        return self.pacer.run(self.loss_forward_s, _cross_entropy, model(inputs), targets)

    def evaluate(self, model: nn.Module) -> Evaluation:
        """Judge `model` on the held-out samples, without pacing and without communication."""
        loss_sum, right, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, targets in self.held_out():
                scores = model(inputs).flatten(0, -2)
                targets = targets.flatten()
                loss_sum += float(functional.cross_entropy(scores, targets, reduction="sum"))
                right += int((scores.argmax(dim=-1) == targets).sum())
                count += targets.numel()
        return Evaluation(loss_sum / count, right / count, count)


def _cross_entropy(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())
