"""Broadcast everything that training has changed from one rank, over a channel of its own.

Step 0 of a channel broadcasts its rank 0's values; the ranks are numbered anew for it, from the
source on. A description of the optimizer's state goes through the rendezvous store, since it may be
missing on the other side: as JSON and bytes, so that nothing that is read can run code.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradlane.errors import UsageError
from gradlane.formats.serialization.pieces import pack, unpack
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import UnstorableError
from gradlane.training.carrier import broadcast_from_host
from gradlane.training.connection import (
    SessionContext,
    node_layout,
    open_channel,
    ranks_in_errors,
)
from gradlane.training.core import Channel, translate_error
from gradlane.training.model.deferred_update import differing, own_values
from gradlane.training.model.lazy_state import plain_state
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.rendezvous.connecting import to_world_ranks
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, same_layout, state_entry

_GOODBYE_S = 60.0


def broadcast_state(
    ctx: SessionContext,
    scope: RendezvousScope,
    entries: Sequence[TensorEntry],
    optimizer: Optimizer,
    attributes: dict[str, Any],
    source: int,
) -> None:
    """Give every rank one rank's tensors and its optimizer's state; a collective call.

    Args:
        ctx: the session's.
        scope: where the ranks meet for this; for nothing else.
        entries: the model's tensor table.
        optimizer: of the model; its parameters are those of the table.
        attributes: what `attributes_of` gave in `prepare`; those that changed are given, too.
        source: the rank whose values everyone gets.

    Raises:
        UsageError: the optimizer keeps a value that cannot be sent; on every rank.
        GradlaneError: a rank was lost.
    """
    is_source = ctx.rank_info.rank == source
    told = describe_state(optimizer, attributes) if is_source else b""
    if is_source:
        scope.put("state", told)
    # The source reads its own words, so that all fail alike.
    told = told or scope.get("state", source)
    adopt_state(optimizer, told, ctx.rank_info.rank, source)
    everything = [*entries, *state_entries(optimizer)]
    rows = [entry.bytes_row() for entry in everything]
    channel = open_channel(ctx, scope, rows, node_layout(ctx, scope), update="worker", first=source)
    ranks = ranks_in_errors(ctx, channel, source)
    doing = f"receiving the state of rank {source}"
    broadcast_and_finish(ctx, channel, everything, is_source, ranks, doing)
    scope.delete_keys()


def broadcast_and_finish(
    ctx: SessionContext,
    channel: Channel,
    entries: Sequence[TensorEntry],
    is_source: bool,
    ranks: Sequence[int],
    doing: str,
    goodbye_s: float = _GOODBYE_S,
) -> None:
    """Broadcast tensors over a channel that was opened for them, and part from its ranks.

    Args:
        ctx: the session's.
        channel: on which no step has begun.
        entries: the tensors.
        is_source: whether they are this rank's values.
        ranks: the world's, by their numbers in the channel's errors.
        doing: what that is, for errors.
        goodbye_s: how long to wait for the ranks' goodbyes, in seconds.

    Raises:
        GradlaneError: a rank was lost.
    """
    try:
        broadcast_from_host(channel, entries, is_source)
    except ctx.core.ChannelError as error:
        text, rank = to_world_ranks(error, ranks)
        named = type(error)(text, *error.args[1:2], rank)
        raise translate_error(ctx.core, named, doing) from error
    finally:
        with contextlib.suppress(ctx.core.ChannelError):
            channel.finish(goodbye_s)


def with_current_buffers(entries: Sequence[TensorEntry], model: nn.Module) -> list[TensorEntry]:
    """Return a tensor table with the buffers that a model has now.

    Raises:
        UsageError: a buffer was replaced by one of another shape or dtype.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    found = []
    for entry in entries:
        buffer = buffers.get(entry.name, entry.tensor)
        if buffer.shape != entry.shape or buffer.dtype is not entry.dtype:
            raise UsageError(
                f"buffer {entry.name!r} is {tuple(buffer.shape)} {buffer.dtype} now, and was "
                f"{tuple(entry.shape)} {entry.dtype} in prepare(), so that it cannot be handed "
                "over: call prepare() again on all ranks"
            )
        found.append(dataclasses.replace(entry, tensor=buffer))
    return found


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of what an optimizer keeps in attributes, such as a count of its steps.

    Those that refer to parameters are left out: they are each rank's own.
    """
    return {
        f"{number}.{name}": value
        for number, member in enumerate(members_of(optimizer))
        for name, value in own_values(member).items()
        if not _refers_to_tensors(vars(member)[name])
    }


def _refers_to_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(isinstance(one, Tensor) or _refers_to_tensors(one) for one in value)
    return isinstance(value, (nn.Parameter, dict))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    """Return all parameters, also those without elements: nothing is sent, but they have state."""
    groups = optimizer.param_groups
    return [one for group in groups for one in list.__iter__(group["params"])]


def describe_state(optimizer: Optimizer, attributes: dict[str, Any]) -> bytes:
    """Pack what an optimizer's state consists of; its tensors by shape, everything else by value.

    Args:
        optimizer: all its parameters have their updates.
        attributes: what `attributes_of` gave in `prepare`; those that changed are given, too.
    """
    parameters = _parameters(optimizer)
    rows: dict[int, dict[str, Any]] = {}
    states = plain_state(optimizer)
    numbers = {id(parameter): index for index, parameter in enumerate(parameters)}
    # In the state's own order, which programs may go by.
    for parameter, own in states.items():
        index = numbers.get(id(parameter))
        if index is None:
            continue
        rows[index] = {}
        for key, value in own.items():
            if isinstance(value, Tensor):
                on_cpu = value.device.type == "cpu"
                value = {
                    "shape": list(value.shape),
                    # Of the bytes that are sent.
                    "stride": list(state_entry(str(key), value).stride),
                    "dtype": value.dtype,
                    "on_cpu": on_cpu,
                }
            else:
                value = [value]
            rows[index][key] = value
    # Some optimizers keep state that is of no parameter.
    others = {key: value for key, value in states.items() if not isinstance(key, Tensor)}
    groups = hyperparameters_of(optimizer)
    now = attributes_of(optimizer)
    changed = {name: now[name] for name in differing(attributes, now)}
    try:
        return pack(
            {"state": rows, "others": others, "param_groups": groups, "attributes": changed}
        )
    except UnstorableError as error:
        return pack({"refused": f"in its optimizer, {error}"})


def adopt_state(optimizer: Optimizer, described: bytes, rank: int, source: int) -> None:
    """Give an optimizer state of another rank's form; tensors get their values later.

    Args:
        optimizer: of this rank; the source's own stays as it is.
        described: what `describe_state` has returned on the source.
        rank: this rank.
        source: the other.

    Raises:
        UsageError: it is not what the optimizer can have.
    """
    parameters = _parameters(optimizer)
    device = parameters[0].device if parameters else torch.device("cpu")
    try:
        state = unpack(described, device)
        if "refused" in state:
            raise UsageError(f"rank {source} cannot hand its state over: {state['refused']}")
        if rank != source:
            _adopt(parameters, optimizer, state)
    except (FormatError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"rank {rank} cannot take over the state of rank {source}: {error!r}; do all ranks "
            "have the same model, optimizer and version of gradlane?"
        ) from error


def _adopt(parameters: Sequence[Tensor], optimizer: Optimizer, told: dict[str, Any]) -> None:
    expected: dict[int, dict[str, Any]] = told["state"]
    states = plain_state(optimizer)
    for index, parameter in enumerate(parameters):
        rows = expected.get(index)
        if rows is None:
            states.pop(parameter, None)
            continue
        state = states[parameter]
        for key in [key for key in state if key not in rows]:
            del state[key]
        for key, value in rows.items():
            state[key] = _formed(state.get(key), value, parameter)
    for index in expected:
        states[parameters[index]] = states.pop(parameters[index])
    for key, value in told["others"].items():
        states[key] = value
    adopt_hyperparameters(optimizer, told["param_groups"])
    for key, value in told["attributes"].items():
        number, _, name = key.partition(".")
        vars(members_of(optimizer)[int(number)])[name] = value


def hyperparameters_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return everything in an optimizer's groups but the parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def adopt_hyperparameters(optimizer: Optimizer, told_groups: list[dict[str, Any]]) -> None:
    """Take over what `hyperparameters_of` has returned on another rank.

    Groups share a tensor where the source's do. A tensor of this rank stays where it fits, since
    the program may keep it, as a learning rate.
    """
    ours: dict[int, Tensor] = {}
    taken: set[int] = set()
    for group, settings in zip(optimizer.param_groups, told_groups, strict=True):
        for key, told in settings.items():
            if isinstance(told, Tensor) and id(told) not in ours:
                own: Any = group.get(key)
                fits = _is_formed(own, told.shape, told.dtype) and id(own) not in taken
                ours[id(told)] = own if fits else told
                taken.add(id(ours[id(told)]))
                with torch.inference_mode(False), torch.no_grad():
                    ours[id(told)].copy_(told)
            group[key] = ours.get(id(told), told)


def _is_formed(own: Any, shape: torch.Size, dtype: torch.dtype) -> bool:
    return isinstance(own, Tensor) and own.shape == shape and own.dtype is dtype


def _formed(own: Any, told: Any, parameter: Tensor) -> Any:
    if isinstance(told, list):
        return told[0]
    shape, stride, dtype = torch.Size(told["shape"]), tuple(told["stride"]), told["dtype"]
    if _is_formed(own, shape, dtype) and same_layout(own, stride):
        return own
    device = torch.device("cpu") if told["on_cpu"] else parameter.device
    with torch.inference_mode(False):
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()


def state_entries(optimizer: Optimizer) -> list[TensorEntry]:
    """Return the tensors of an optimizer's state, in the order of its parameters."""
    return [
        state_entry(f"{key} of the optimizer", value)
        for parameter in _parameters(optimizer)
        for key, value in sorted(plain_state(optimizer).get(parameter, {}).items(), key=_by_name)
        if isinstance(value, Tensor) and value.numel() > 0
    ]


def _by_name(item: tuple[Any, Any]) -> str:
    return repr(item[0])
