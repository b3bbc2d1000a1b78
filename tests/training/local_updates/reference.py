"""What local updates must give: written out in torch alone, one rank after the other.

It knows nothing of gradlane but the order of layers in fragments, which tests give it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.model.reference import mean_in_rank_order


@dataclass
class LocalReference:
    """All ranks' models, stepped by themselves and moved by outer gradients.

    Attributes:
        models: of each rank, equal at the start.
        optimizers: of each rank.
        fragments: names of parameters, by fragment.
        steps: of a round.
        outer: `average`, `sgd` or `nesterov`.
        lr: of the outer optimizer.
        momentum: of the outer optimizer.
        overlap: steps until a result is used.
        mix: share of the common value.
    """

    models: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    fragments: Sequence[Sequence[str]]
    steps: int
    outer: str = "nesterov"
    lr: float = 0.7
    momentum: float = 0.9
    overlap: int = 0
    mix: float = 1.0
    step: int = 0
    common: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    waiting: dict[int, list[tuple[str, Tensor]]] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = dict(self.models[0].named_parameters())
        self.common = {name: one.detach().clone() for name, one in first.items()}

    def train(self, steps: int, loss: Callable[[nn.Module, int, int], Any]) -> None:
        """Take some steps on every rank; `loss` is of model, rank and step."""
        for _ in range(steps):
            for rank, (model, optimizer) in enumerate(
                zip(self.models, self.optimizers, strict=True)
            ):
                optimizer.zero_grad()
                loss(model, rank, self.step + 1).backward()
                optimizer.step()
            self.end_step()

    def end_step(self) -> None:
        """Do what follows a step of all optimizers."""
        self.step += 1
        self.use(self.waiting.pop(self.step, []), self.mix)
        position = (self.step - 1) % self.steps + 1
        for number, names in enumerate(self.fragments):
            if position == self.steps * (number + 1) // len(self.fragments):
                means = self.means(names)
                self.sent[number] = self.step
                if self.overlap:
                    self.waiting[self.step + self.overlap] = means
                else:
                    self.use(means, self.mix)

    def means(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return the mean differences of all ranks as they are now."""
        found = []
        with torch.no_grad():
            for name in names:
                own = [self.common[name] - model.get_parameter(name) for model in self.models]
                mean = mean_in_rank_order(own)
                assert mean is not None
                found.append((name, mean))
        return found

    @torch.no_grad()
    def use(self, means: Sequence[tuple[str, Tensor]], mix: float) -> None:
        """Move the common values, and mix them in."""
        for name, mean in means:
            self.move(name, mean)
            self.mix_in(name, mix)

    @torch.no_grad()
    def mix_in(self, name: str, share: float) -> None:
        """Give all ranks a share of a common value."""
        common = self.common[name]
        for model in self.models:
            own = model.get_parameter(name)
            own.copy_(common if share == 1 else torch.lerp(own, common, share))

    def move(self, name: str, mean: Tensor) -> None:
        """Move one common value."""
        if self.outer == "average":
            self.common[name] = self.common[name] - mean
            return
        if name in self.buffers:
            self.buffers[name] = self.buffers[name] * self.momentum + mean
        else:
            self.buffers[name] = mean.clone()
        step = self.buffers[name]
        if self.outer == "nesterov":
            step = mean + self.buffers[name] * self.momentum
        self.common[name] = self.common[name] - step * self.lr

    def synchronize(self) -> None:
        """Exchange what has moved since its last exchange, and begin a round."""
        for step in sorted(self.waiting):
            self.use(self.waiting.pop(step), self.mix)
        for number, names in enumerate(self.fragments):
            self.use(self.means(names) if self.sent.get(number, 0) < self.step else [], 1.0)
            with torch.no_grad():
                for name in names:
                    for model in self.models:
                        model.get_parameter(name).copy_(self.common[name])
        self.step, self.sent = 0, {}
