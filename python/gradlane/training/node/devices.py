"""The choice between collectives and shared memory for the sums of a node's ranks.

All ranks exchange a description of their devices and reach the same decision, with its reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradlane.errors import RefusedError
from gradlane.formats.untrusted import escaped
from gradlane.training.node.layout import NodeLayout
from gradlane.training.node.rules import AUTO, HOST
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.rendezvous import RendezvousScope

NCCL, GLOO = "nccl", "gloo"
_EXACT_RANKS = 2
"""Largest number of ranks whose sum is the same in any order: a + b is b + a."""


@dataclass(frozen=True)
class SumBackend:
    """The backend that adds up the gradients of a node's ranks.

    Attributes:
        backend: `"nccl"` or `"gloo"` collectives; empty: shared memory.
        reason: of the choice, in words.
    """

    backend: str
    reason: str


ON_HOST = SumBackend("", "nothing else was asked for")


def agree_on_sum_backend(
    options: Options, scope: RendezvousScope, layout: NodeLayout, gradients: Sequence[Tensor]
) -> SumBackend:
    """Choose the backend of sums; a collective call of all ranks with one `local_sums`.

    Args:
        options: the session's.
        scope: for the agreement of the ranks.
        layout: which ranks share nodes.
        gradients: tensors on the devices that this rank's gradients will be on; none where what
            is averaged is in the host's memory anyway, as arrays are.

    Raises:
        ValueError: collectives were asked for and cannot be; the same text on every rank.
    """
    if options.local.where == HOST or layout.local_size == 1 or not gradients:
        return ON_HOST
    rank_info = scope.rank_info
    scope.put(f"local/device/{rank_info.rank}", json.dumps(_describe_devices(gradients)))
    reports = [
        json.loads(scope.get(f"local/device/{rank}", rank)) for rank in range(rank_info.world_size)
    ]
    obstacle = escaped(collective_obstacle(reports, layout.local_size))
    if options.local.where == AUTO:
        obstacle = obstacle or default_obstacle(
            reports, layout.local_size, options.strategy.exact_order
        )
        return (
            SumBackend("", obstacle)
            if obstacle
            else SumBackend(_backend(reports), "all gradients are on devices")
        )
    if obstacle:
        raise RefusedError(f'local_sums={options.local.where!r}: {obstacle}; use local_sums="host"')
    return SumBackend(_backend(reports), "asked for")


def collective_obstacle(reports: Sequence[Mapping[str, Any]], local_size: int) -> str:
    """Return why collectives cannot add up the ranks' gradients; empty if they can.

    Args:
        reports: by rank: `devices` of its gradients, `accelerator` of the first of them, and
            `backends` of its torch.
        local_size: ranks of a node, which are blocks of consecutive ranks.
    """
    backend = _backend(reports)
    for rank, report in enumerate(reports):
        if len(report["devices"]) > 1:
            devices = " and ".join(report["devices"])
            return f"rank {rank} has gradients on {devices}, and its collectives run on one device"
        if _device_type(report) != _device_type(reports[0]):
            return (
                f"rank 0 has its gradients on {_device_type(reports[0])}, rank {rank} on "
                f"{_device_type(report)}"
            )
        if backend not in report["backends"]:
            return f"torch on rank {rank} was built without {backend}"
    if backend == NCCL:
        holders: dict[tuple[int, str], int] = {}
        for rank, report in enumerate(reports):
            other = holders.setdefault((rank // local_size, report["accelerator"]), rank)
            if other != rank:
                return f"ranks {other} and {rank} share one accelerator, which {backend} refuses"
    return ""


def default_obstacle(
    reports: Sequence[Mapping[str, Any]], local_size: int, exact_order: bool
) -> str:
    """Return why `local_sums="auto"` does not use collectives; empty if it does."""
    if _backend(reports) != NCCL:
        return "the gradients are in the host's memory already"
    if exact_order and local_size > _EXACT_RANKS:
        return (
            f"collectives of {local_size} ranks add up in another order than that of the ranks: "
            'exact_order=False, or local_sums="collective", allows it'
        )
    return ""


def _describe_devices(gradients: Sequence[Tensor]) -> dict[str, Any]:
    """Describe this rank's devices and backends for the other ranks."""
    devices = sorted({str(one.device) for one in gradients})
    backends = [GLOO] if dist.is_available() and dist.is_gloo_available() else []
    if dist.is_available() and dist.is_nccl_available():
        backends.append(NCCL)
    return {
        "devices": devices,
        "accelerator": accelerator_id(torch.device(devices[0])),
        "backends": backends,
    }


def accelerator_id(device: torch.device) -> str:
    """Return a name that no other accelerator of the machine has, in any process."""
    if device.type == "cpu":
        return ""
    unique = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if unique is not None:
        return str(unique)
    # An older torch does not say. Launchers show each rank all devices, or its own one alone.
    return f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{device.index}"


def _device_type(report: Mapping[str, Any]) -> str:
    device: str = report["devices"][0]
    return device.partition(":")[0]


def _backend(reports: Sequence[Mapping[str, Any]]) -> str:
    return GLOO if _device_type(reports[0]) == "cpu" else NCCL
