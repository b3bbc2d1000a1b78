"""The interface of a workload: a model, an optimizer, batches, and when each gradient is due.

Times in this file are nominal seconds, those of the accelerator that a workload stands for;
dilation multiplies them only where real time passes. Importing this file does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlane.lab.workloads.pacing import PacingClock
from gradlane.planning.models.timings import TensorTiming

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class WorkloadSpec:
    """A workload to build, the same on every rank.

    Attributes:
        name: one of `gradlane.lab.workloads.NAMES`.
        seed: decides the model's initial parameters, the data and the gradients.
        dilation: factor by which every operation takes longer than its nominal time.
        profile_path: for replay workloads, a recorded profile (JSON) whose tensors and times
            replace those of the built-in model.
        batch_time_s: nominal seconds of one step's forward and backward together, in place of
            the workload's own. For real workloads it must leave time to compute.
        paced: false lets every operation take only the time that it really needs.
    """

    name: str
    seed: int = 0
    dilation: float = 1.0
    profile_path: str | None = None
    batch_time_s: float | None = None
    paced: bool = True


@dataclass(frozen=True)
class Evaluation:
    """Quality of a model on held-out samples."""

    loss: float
    """Mean cross entropy in nats."""
    accuracy: float
    """Share of predictions that are right, 0 to 1."""
    samples: int
    """Number of predictions that were judged."""


class Workload(ABC):
    """A model to train and all that a rank needs to train it for one run.

    The loop of a rank is::

        workload = build(WorkloadSpec(name), rank, world_size)
        optimizer = workload.make_optimizer(model)
        for step in range(steps):
            workload.begin_step(step)
            workload.loss(model, workload.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    where `model` is `workload.model` or a wrapper of it that forwards its call.
    """

    model: torch.nn.Module
    """The model: its parameters are a function of the seed alone, hence the same on each rank."""
    batch_size: int
    """Samples a rank and step."""
    timings: list[TensorTiming]
    """One for each parameter, in `named_parameters()` order, undilated."""
    compute_s: float
    """Nominal seconds of forward and backward; 0 where nothing is paced."""
    replays: bool
    """True where the accelerator is replaced by sleeping, false where the model is computed."""

    def __init__(self, spec: WorkloadSpec, rank: int, world_size: int) -> None:
        """Build the workload of `rank`; see `gradlane.lab.workloads.build`."""
        self.name = spec.name
        self.seed = spec.seed
        self.rank = rank
        self.world_size = world_size
        self.clock = PacingClock(spec.dilation, enabled=spec.paced)
        """The clock that stretches the operations to their time."""

    def begin_step(self, step: int) -> None:  # noqa: B027  (most workloads have nothing to do)
        """Tell the workload which step comes next; call it before the step's forward.

        Args:
            step: number of the step, from 0. Gradients of replay workloads depend on it.
        """

    @abstractmethod
    def make_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that the workload is trained with, over `model.parameters()`."""

    @abstractmethod
    def batch(self, step: int) -> Any:
        """Return this rank's samples of `step`: a function of (seed, rank, step) alone."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Run the forward of `model` on `batch` and return the scalar loss, with its graph."""
