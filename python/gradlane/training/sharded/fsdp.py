"""The parts of torch's FSDP2 that torch does not promise to keep; no other module names them.

`check_torch` tells which of them a version of torch lacks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.torch_internals import (
    DIVISORS,
    FSDP_GROUP,
    FSDP_GROUPS,
    FSDP_MODULE,
    NEW,
    fsdp_groups,
    fsdp_state,
    gradient_divisors,
    graph_task_id,
    local_shard,
    queue_callback,
    reduce_group,
    reduce_hook,
    reduce_order,
)

ReduceHook = Callable[[Tensor], None]
"""Called with a unit's reduce-scattered gradients, one flat buffer, before FSDP shares them out."""

_DIVISOR_ARGUMENTS = [
    *("reduce_scatter_group", "all_reduce_group", "reduce_dtype", "device_type", "factor"),
    "force_sum_reduction_for_comms",
]


@dataclass(frozen=True)
class ShardedParameter:
    """This rank's shard of a parameter.

    Attributes:
        name: as in `named_parameters()`.
        parameter: torch's, a DTensor.
        elements: that it takes in the unit's flat buffer, padding included.
        number: its place in the unit's parameter group.
    """

    name: str
    parameter: nn.Parameter
    elements: int
    number: int


class ShardedUnit:
    """The parameters that one call of `fully_shard` has grouped, whose gradients travel as one."""

    def __init__(self, name: str, module: Any, group: Any, names: Mapping[int, str]) -> None:
        """Read a unit.

        Args:
            name: of its module; empty for the model itself.
            module: that `fully_shard` was called with.
            group: its only parameter group.
            names: of the model's parameters, by `id`.
        """
        self.name = name or "<root>"
        self.module = module
        self._group = group
        shards = [
            ShardedParameter(
                names.get(id(one.sharded_param), f"{self.name}[{number}]"),
                one.sharded_param,
                one.padded_sharded_param_size.numel(),
                number,
            )
            for number, one in enumerate(group.fsdp_params)
        ]
        self.parameters = shards
        self.trained = [one for one in shards if one.parameter.requires_grad]
        self.elements = sum(one.elements for one in self.trained)
        """Of the flat buffer when every trained parameter has a gradient."""

    def gradient_of(self, shard: ShardedParameter, local: Tensor) -> Tensor:
        """Return a gradient of a parameter, as FSDP makes it.

        Args:
            shard: of the unit.
            local: this rank's part, of any shape and dtype; elements beyond it are padding.
        """
        own = local_of(shard.parameter)
        values = local.reshape(-1)[: own.numel()].view_as(own).to(own.dtype)
        made: Tensor = self._group.fsdp_params[shard.number].to_sharded_dtensor(values)
        return made

    @property
    def mesh(self) -> Any:
        """The mesh that the unit is sharded over."""
        return self._group.mesh_info.mesh

    @property
    def replicates(self) -> bool:
        """Whether torch averages over replicas itself (HSDP, or `replicate`)."""
        return type(self._group.mesh_info).__name__ != "FSDPMeshInfo"

    @property
    def is_hooked(self) -> bool:
        """Whether a hook is set already."""
        return reduce_hook(self._group) is not None

    @property
    def all_reduces(self) -> bool:
        """Whether gradients leave the node after this backward (`set_requires_all_reduce`)."""
        return bool(self._group.all_reduce_grads)

    @property
    def sums(self) -> bool:
        """Whether the program divides gradients itself (`set_gradient_divide_factor`)."""
        return self._group.gradient_divide_factor is not None

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype that gradients are reduced in: the policy's, else that of the parameters."""
        found = [
            one.mp_policy.reduce_dtype or one.sharded_param.dtype
            for one in self._group.fsdp_params
            if one.sharded_param.requires_grad
        ]
        dtype: torch.dtype = found[0]
        for other in found[1:]:
            dtype = torch.promote_types(dtype, other)
        return dtype

    def later_divisor(self, dtype: torch.dtype) -> float | None:
        """Return what FSDP divides the flat buffer by in place after the hook; None: nothing."""
        group = self._group
        factors = gradient_divisors()(
            reduce_group(group),
            None,
            dtype,
            group.device.type,
            group.gradient_divide_factor,
            group.force_sum_reduction_for_comms,
        )
        divisor: float | None = factors[1]
        return None if divisor in (None, 1) else divisor

    def in_buffer_order(self) -> list[ShardedParameter]:
        """Return the trained parameters in the order of the flat buffer, from the first forward
        on."""
        order = reduce_order(self._group)
        trained = {one.number: one for one in self.trained}
        return [trained[number] for number in order or sorted(trained) if number in trained]

    def set_hook(self, hook: ReduceHook | None) -> None:
        """Have FSDP call a hook, or none."""
        self.module.set_all_reduce_hook(hook)


def is_sharded(model: Any) -> bool:
    """Return whether `fully_shard` was called with a model, or with a part of it."""
    return isinstance(model, nn.Module) and any(map(_is_unit, model.modules()))


def _is_unit(module: nn.Module) -> bool:
    return any(
        base.__name__ == "FSDPModule" and base.__module__.startswith("torch.")
        for base in type(module).__mro__
    )


def read_units(model: nn.Module) -> list[ShardedUnit]:
    """Return a sharded model's units that have trained parameters, in the order of its modules.

    Raises:
        UsageError: this version of torch lacks what is needed, or a unit has several meshes.
    """
    found: dict[int, tuple[str, Any, Any]] = {}
    for name, module in model.named_modules():
        if not _is_unit(module):
            continue
        _check_module(module)
        groups = fsdp_groups(fsdp_state(module))
        if len(groups) > 1:
            raise UsageError(
                f"unit {name or '<root>'!r} has parameters on {len(groups)} meshes (a placement "
                "function of fully_shard), whose gradients torch does not hand over; give all of "
                "a unit one mesh, or use native HSDP"
            )
        for group in groups:
            _check_group(group)
            if group.is_unsharded:
                # A forward has left whole parameters, in place of this rank's shards.
                module.reshard()
            found.setdefault(id(group), (name, module, group))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    units = [ShardedUnit(*one, names) for one in found.values()]
    return [unit for unit in units if unit.trained]


def reshard(model: nn.Module) -> None:
    """Have all units hold shards, also frozen ones, where a forward has left whole parameters."""
    for module in model.modules():
        if _is_unit(module) and any(one.is_unsharded for one in fsdp_groups(fsdp_state(module))):
            cast(Any, module).reshard()


def parameters_outside(model: nn.Module, units: Sequence[ShardedUnit]) -> list[str]:
    """Return the names of trained parameters that are in no unit: torch averages none of them."""
    inside = {id(one.parameter) for unit in units for one in unit.parameters}
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and id(parameter) not in inside
    ]


def local_of(tensor: Tensor) -> Tensor:
    """Return the memory of this rank's shard; a plain tensor itself."""
    return local_shard(tensor).detach()


def in_backward() -> bool:
    """Return whether autograd runs a backward on this thread."""
    return graph_task_id() != -1


def after_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the backward that runs, before `backward()` returns."""
    queue_callback(callback)


def _check_module(module: Any) -> None:
    missing = [name for name in FSDP_MODULE if not hasattr(module, name)]
    if missing:
        _refuse(f"FSDPModule.{missing[0]}")
    if not hasattr(fsdp_state(module), FSDP_GROUPS):
        _refuse("the parameter groups of a unit")


def _check_group(group: Any) -> None:
    missing = [name for name in FSDP_GROUP if not hasattr(group, name)]
    if missing:
        _refuse(f"FSDPParamGroup.{missing[0]}")
    divisors = gradient_divisors()
    if divisors is None or list(inspect.signature(divisors).parameters) != _DIVISOR_ARGUMENTS:
        _refuse(f"{DIVISORS} in the form that is known")


def _refuse(what: str) -> None:
    raise UsageError(
        f"torch {torch.__version__} has not {what}, by which gradlane takes a sharded model's "
        f"gradients: use torch {NEW}, with which this is tested, or native HSDP "
        "(a mesh of two dimensions, without session.prepare)"
    )
