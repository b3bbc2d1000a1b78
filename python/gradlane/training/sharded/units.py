"""The units of a sharded model: read and checked on one rank, then agreed on with all others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from gradlane.errors import UsageError
from gradlane.training.connection import SessionContext
from gradlane.training.model.optimizers import check_optimizer
from gradlane.training.model.several_optimizers import name_of
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, extra_entry, state_entry
from gradlane.training.sharded.fsdp import (
    ShardedUnit,
    local_of,
    parameters_outside,
    read_units,
)


def read_sharded(ctx: SessionContext, model: nn.Module, optimizer: Optimizer) -> list[ShardedUnit]:
    """Return a sharded model's units, checked on this rank.

    Raises:
        UsageError: torch lacks what is needed, or the model is sharded in a way that cannot be
            averaged between nodes; the message says what to write.
        ValueError: the optimizer does not fit the model.
    """
    units = read_units(model)
    if not units:
        raise UsageError(
            "the sharded model has no trained parameter (requires_grad=True): train one, or do "
            "without prepare()"
        )
    for unit in units:
        _check_unit(ctx, unit)
    outside = parameters_outside(model, units)
    if outside:
        raise UsageError(
            f"parameter {outside[0]!r} is in no unit of fully_shard, so that torch averages its "
            "gradient on no rank: call fully_shard on the whole model, too, and give it no "
            "ignored_params that are trained"
        )
    # An optimizer may hold frozen parameters, also of units without a trained one.
    entries = [
        (extra_entry if one.requires_grad else state_entry)(name, one)
        for name, one in model.named_parameters()
    ]
    check_optimizer(optimizer, entries)
    return units


def _check_unit(ctx: SessionContext, unit: ShardedUnit) -> None:
    mesh, rank_info = unit.mesh, ctx.rank_info
    if unit.replicates or mesh.ndim != 1:
        names = mesh.mesh_dim_names
        within = f"mesh[{names[-1]!r}]" if names else 'mesh["shard"], of named dimensions'
        raise UsageError(
            f"unit {unit.name!r} is on a mesh of {mesh.ndim} dimensions ({mesh}): torch would "
            "average between nodes, or shard in two ways; call fully_shard(module, mesh="
            f"{within}), the dimension within the node, and gradlane averages between nodes"
        )
    shards = mesh.size()
    if rank_info.world_size % shards or mesh.get_local_rank() != rank_info.rank % shards:
        raise UsageError(
            f"unit {unit.name!r} is sharded over {shards} ranks, of which rank {rank_info.rank} of "
            f"{rank_info.world_size} is number {mesh.get_local_rank()}: give fully_shard the mesh "
            'of the consecutive ranks of one node, such as init_device_mesh("cpu", (nodes, '
            'ranks_per_node), mesh_dim_names=("node", "shard"))["shard"]'
        )
    if unit.is_hooked:
        raise UsageError(
            f"unit {unit.name!r} has an all-reduce hook already, of another session or of the "
            "program (set_all_reduce_hook): close that session, or leave the hook out"
        )


def agree_on_units(
    ctx: SessionContext,
    scope: RendezvousScope,
    optimizer: Optimizer,
    units: Sequence[ShardedUnit],
) -> None:
    """Compare the model, its units and the options of all ranks, also of other columns.

    Raises:
        RanksDifferError: they differ; the same text on every rank.
    """
    options = {
        **ctx.options.agreed(),
        "world_size": ctx.rank_info.world_size,
        "optimizer": name_of(optimizer),
        "shards": units[0].mesh.size(),
        "units": [[unit.name, str(unit.reduce_dtype)] for unit in units],
    }
    tensors = [
        {**extra_entry(one.name, one.parameter).row(), "unit": unit.name}
        for unit in units
        for one in unit.trained
    ]
    scope.agree({"options": options, "tensors": tensors})


def initial_entries(
    model: nn.Module, units: Sequence[ShardedUnit], *, trained: bool = True
) -> list[TensorEntry]:
    """Return what step 0 broadcasts: shards of this rank, parameters in no unit, and buffers.

    Args:
        model: the user's.
        units: of the model.
        trained: whether shards of trained parameters are among them.
    """
    shards = {id(one.parameter) for unit in units for one in unit.parameters}
    found = [
        state_entry(one.name, local_of(one.parameter))
        for unit in units
        for one in unit.parameters
        if trained or not one.parameter.requires_grad
    ]
    others = [*model.named_parameters(), *model.named_buffers()]
    found += [
        state_entry(name, local_of(tensor)) for name, tensor in others if id(tensor) not in shards
    ]
    return [entry for entry in found if entry.nbytes]
