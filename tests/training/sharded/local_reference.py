"""The rounds of local updates of sharded models, written out with torch alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import gradlane
from gradlane.training.local_updates.fragments import divide
from gradlane.training.rendezvous.tensor_table import extra_entry
from tests.training.local_updates.reference import LocalReference
from tests.training.model.reference import mean_in_rank_order


class Shards:
    """This rank's shards of a model, as the reference looks at a whole one."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def get_parameter(self, name: str) -> Tensor:
        """Return this rank's memory of a parameter."""
        return self._local(dict(self.model.named_parameters())[name])

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's memory of each parameter."""
        for name, parameter in self.model.named_parameters():
            yield name, self._local(parameter)

    @staticmethod
    def _local(parameter: Any) -> Tensor:
        shard: Tensor = parameter._local_tensor.detach()
        return shard


class ShardedReference(LocalReference):
    """The rounds of this rank's shards: each mean is taken in the order of nodes."""

    group: Any = None
    """The ranks with the same shard."""

    def means(self, names: Sequence[str]) -> list[tuple[str, Tensor]]:
        """Return the mean differences of all nodes; whole parameters are dropped."""
        reshard(self.models[0].model)  # type: ignore[arg-type]
        found = []
        for name in names:
            own = self.common[name] - self.models[0].get_parameter(name)
            parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
            dist.all_gather(parts, own, group=self.group)
            mean = mean_in_rank_order(parts)
            assert mean is not None
            found.append((name, mean))
        return found

    def use(self, means: Sequence[tuple[str, Tensor]], mix: float) -> None:
        """Move the common values, and mix them in; whole parameters are dropped.

        In other steps torch goes on with those that a forward has left, also stale ones.
        """
        if means:
            reshard(self.models[0].model)  # type: ignore[arg-type]
        super().use(means, mix)

    def synchronize(self) -> None:
        """End the round; whole parameters are dropped."""
        reshard(self.models[0].model)  # type: ignore[arg-type]
        super().synchronize()


def reshard(model: nn.Module) -> None:
    """Drop whole parameters, which a forward may have left."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def reference_of(
    model: nn.Module, optimizer: Any, local: gradlane.Local, group: Any
) -> ShardedReference:
    """Return the rounds of a model that is at a common point.

    Args:
        model: sharded.
        optimizer: of it.
        local: how often and how nodes exchange.
        group: the ranks with the same shard.
    """
    trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    whole = [extra_entry(name, one) for name, one in trained]
    reference = ShardedReference(
        [Shards(model)],  # type: ignore[list-item]
        [optimizer],
        [[trained[at][0] for at in one] for one in divide(model, whole, local.fragments)],
        local.steps,
        local.outer,
        local.outer_lr,
        local.outer_momentum,
        local.overlap_steps,
        local.mix,
    )
    reference.group = group
    return reference
