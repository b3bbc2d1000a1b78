"""What the lab asks of a workload: a model, an optimizer, batches, and when each gradient is due.

Times in this file are nominal seconds, those of the accelerator that a workload stands for;
dilation multiplies them only where real time passes. Importing this file does not import torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gradlane.lab.workloads.pacing import PacingClock


@dataclass(frozen=True)
class TensorTiming:
    """When the gradient of one parameter appears, and when its parameter is next read."""

    name: str
    """Name as in `named_parameters()`."""
    numel: int
    """Number of elements."""
    dtype_bytes: int
    """Bytes an element."""
    ready_s: float
    """Time since the start of the step's forward at which backward has its gradient."""
    need_s: float
    """Time since the start of the *next* step's forward at which that forward first reads it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole gradient."""
        return self.numel * self.dtype_bytes


@dataclass(frozen=True)
class Stage:
    """One operation of the accelerator: a layer's forward and backward, with its parameters."""

    name: str
    """Module name."""
    forward_s: float
    """Nominal duration of the forward."""
    backward_s: float
    """Nominal duration of the backward."""
    parameters: tuple[tuple[str, int, int], ...] = ()
    """(name, number of elements, bytes an element) of each parameter read by the stage."""


def timings_of(stages: Sequence[Stage]) -> list[TensorTiming]:
    """Timings of every parameter of stages that run one after another.

    Forward runs `stages` in order and backward runs them in reverse, without gaps. A parameter
    is needed when its first stage starts, and its gradient is ready when the backward of that
    stage, the last to contribute, ends.

    Args:
        stages: the stages in forward order; a parameter may occur in several (tied weights).

    Returns:
        One timing for each parameter, in the order of first use.
    """
    forward_end_s = sum(stage.forward_s for stage in stages)
    starts_s: list[float] = []
    now_s = 0.0
    for stage in stages:
        starts_s.append(now_s)
        now_s += stage.forward_s
    ready_s = [0.0] * len(stages)
    now_s = forward_end_s
    for index in range(len(stages) - 1, -1, -1):
        now_s += stages[index].backward_s
        ready_s[index] = now_s
    timings: dict[str, TensorTiming] = {}
    for index, stage in enumerate(stages):
        for name, numel, dtype_bytes in stage.parameters:
            if name not in timings:
                timings[name] = TensorTiming(
                    name, numel, dtype_bytes, ready_s[index], starts_s[index]
                )
    return list(timings.values())


def compute_s_of(stages: Sequence[Stage]) -> float:
    """Nominal seconds of one step's forward and backward together."""
    return sum(stage.forward_s + stage.backward_s for stage in stages)


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

        workload = build(name, rank=rank, world_size=world_size)
        optimizer = workload.make_optimizer(model)
        for step in range(steps):
            workload.begin_step(step)
            workload.loss(model, workload.batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    where `model` is `workload.model` or a wrapper of it that forwards its call.
    """

    name: str
    """The name it was built by."""
    model: torch.nn.Module
    """The model: its parameters are a function of the seed alone, hence the same on each rank."""
    batch_size: int
    """Samples a rank and step."""
    timings: list[TensorTiming]
    """One for each parameter, in `named_parameters()` order, undilated."""
    compute_s: float
    """Nominal seconds of forward and backward; 0 where nothing is paced."""
    clock: PacingClock
    """The clock that stretches the operations to their time."""
    replays: bool
    """True where the accelerator is replaced by sleeping, false where the model is computed."""

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
