"""Where the gradients of a node's ranks are, and whether collectives can add them up there.

All ranks hear what each of them has and come to the same answer, which names its reason.
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

from gradlane.training.node.layout import Layout
from gradlane.training.node.rules import AUTO, HOST
from gradlane.training.options.options import Options
from gradlane.training.rendezvous.rendezvous import RendezvousScope

NCCL, GLOO = "nccl", "gloo"
_EXACT_RANKS = 2
"""So many ranks a node have the same sum in any order: a + b is b + a."""


@dataclass(frozen=True)
class Sums:
    """Where the ranks of each node add up.

    Attributes:
        backend: of the collectives, `"nccl"` or `"gloo"`; empty: in the host's memory.
        reason: why there, in words.
    """

    backend: str
    reason: str


ON_HOST = Sums("", "nothing else was asked for")


def agree_on_sums(
    options: Options, meeting: RendezvousScope, layout: Layout, gradients: Sequence[Tensor]
) -> Sums:
    """Decide where sums are taken; a collective call of all ranks with one `local_sums`.

    Args:
        options: the session's.
        meeting: where the ranks agree.
        layout: which ranks share nodes.
        gradients: tensors on the devices that this rank's gradients will be on; none where what
            is averaged is in the host's memory anyway, as arrays are.

    Raises:
        ValueError: collectives were asked for and cannot be; the same text on every rank.
    """
    if options.local.where == HOST or layout.local_size == 1 or not gradients:
        return ON_HOST
    place = meeting.place
    meeting.put(f"local/device/{place.rank}", json.dumps(_word(gradients)))
    words = [
        json.loads(meeting.get(f"local/device/{rank}", rank)) for rank in range(place.world_size)
    ]
    why = why_not(words, layout.local_size)
    if options.local.where == AUTO:
        why = why or why_not_unasked(words, layout.local_size, options.strategy.exact_order)
        return Sums("", why) if why else Sums(_backend(words), "all gradients are on devices")
    if why:
        raise ValueError(f'local_sums={options.local.where!r}: {why}; use local_sums="host"')
    return Sums(_backend(words), "asked for")


def why_not(words: Sequence[Mapping[str, Any]], local_size: int) -> str:
    """Say why collectives cannot add up what the ranks have; empty if they can.

    Args:
        words: of each rank: `devices` of its gradients, `accelerator` that the first of them is,
            `backends` that its torch has.
        local_size: ranks of a node, which are blocks of consecutive ranks.
    """
    backend = _backend(words)
    for rank, word in enumerate(words):
        if len(word["devices"]) > 1:
            devices = " and ".join(word["devices"])
            return f"rank {rank} has gradients on {devices}, and its collectives run on one device"
        if _kind(word) != _kind(words[0]):
            return f"rank 0 has its gradients on {_kind(words[0])}, rank {rank} on {_kind(word)}"
        if backend not in word["backends"]:
            return f"torch on rank {rank} was built without {backend}"
    if backend == NCCL:
        holders: dict[tuple[int, str], int] = {}
        for rank, word in enumerate(words):
            other = holders.setdefault((rank // local_size, word["accelerator"]), rank)
            if other != rank:
                return f"ranks {other} and {rank} share one accelerator, which {backend} refuses"
    return ""


def why_not_unasked(words: Sequence[Mapping[str, Any]], local_size: int, exact_order: bool) -> str:
    """Say why collectives that could add up are not used unless asked for; empty if they are."""
    if _backend(words) != NCCL:
        return "the gradients are in the host's memory already"
    if exact_order and local_size > _EXACT_RANKS:
        return (
            f"collectives of {local_size} ranks add up in another order than that of the ranks: "
            'exact_order=False, or local_sums="collective", allows it'
        )
    return ""


def _word(gradients: Sequence[Tensor]) -> dict[str, Any]:
    """Return what the other ranks hear of this one."""
    devices = sorted({str(one.device) for one in gradients})
    backends = [GLOO] if dist.is_available() and dist.is_gloo_available() else []
    if dist.is_available() and dist.is_nccl_available():
        backends.append(NCCL)
    return {
        "devices": devices,
        "accelerator": _accelerator(torch.device(devices[0])),
        "backends": backends,
    }


def _accelerator(device: torch.device) -> str:
    """Return what tells an accelerator from all others of its machine, in whatever process."""
    if device.type == "cpu":
        return ""
    unique = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if unique is not None:
        return str(unique)
    # An older torch does not say. Launchers show each rank all devices, or its own one alone.
    return f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')}:{device.index}"


def _kind(word: Mapping[str, Any]) -> str:
    device: str = word["devices"][0]
    return device.partition(":")[0]


def _backend(words: Sequence[Mapping[str, Any]]) -> str:
    return GLOO if _kind(words[0]) == "cpu" else NCCL
