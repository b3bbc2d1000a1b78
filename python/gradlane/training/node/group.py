"""A torch.distributed process group of the ranks of one node, independent of the program's groups.

Its ranks meet in a store that the node's first rank hosts on the loopback interface until the
session ends. The classes are those behind `torch.distributed.new_group`, which itself would need a
default group of all ranks, and a program that uses only gradlane has none.

A single thread uses a group, from its creation to its end.
"""

from __future__ import annotations

import datetime
from typing import Any, Protocol

from torch import Tensor

from gradlane.training.node.devices import NCCL
from gradlane.training.node.layout import NodeLayout
from gradlane.training.rendezvous.addresses import bind
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.store_server import serve_on
from gradlane.training.rendezvous.torch_reports import hidden_reports
from gradlane.training.torch_internals import (
    Store,
    TCPStore,
    abort_group,
    c10d,
    gloo_options,
    nccl_options,
)

_LOOPBACK = "127.0.0.1"
_NEVER = datetime.timedelta(days=1)
"""Torch's own timeouts end the whole process and count suspended time, so callers time out
earlier."""


class Work(Protocol):
    """A collective that was issued."""

    def is_completed(self) -> bool:
        """Return whether it has ended, also by an error."""

    def wait(self) -> bool:
        """Wait for the end on the host (Gloo), or make the current stream wait (NCCL)."""


def open_node_store(layout: NodeLayout, scope: RendezvousScope, timeout_s: float) -> Store:
    """Return a store of the ranks of this node, which no other node can reach.

    Args:
        layout: of the ranks on nodes.
        scope: carries the port from the node's first rank to the others.
        timeout_s: longest wait for a rank, in seconds.

    Raises:
        RendezvousError: the first rank did not come.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    key = f"local/store/{layout.node}"
    if layout.local_rank > 0:
        port = int(scope.get(key, layout.rank_of(layout.node, 0)))
        with hidden_reports():
            return TCPStore(_LOOPBACK, port, is_master=False, timeout=limit, wait_for_workers=False)
    listener = bind(_LOOPBACK, 0)
    port = listener.getsockname()[1]
    store = serve_on(
        listener, _LOOPBACK, port, is_master=True, timeout=limit, wait_for_workers=False
    )
    scope.put(key, str(port))
    return store


class NodeGroup:
    """A process group of torch.distributed."""

    def __init__(self, backend: str, store: Store, layout: NodeLayout) -> None:
        """Connect to the other ranks of the node; blocks until they are there.

        Args:
            backend: `"nccl"` or `"gloo"`.
            store: of the ranks of this node.
            layout: of the ranks on nodes.
        """
        make = _nccl if backend == NCCL else _gloo
        with hidden_reports():
            self._group: Any = make(store, layout.local_rank, layout.local_size)

    def reduce(self, values: Tensor, root: int) -> Work:
        """Replace the root's values by the sum; those of the other ranks become undefined."""
        work: Work = self._group.reduce(values, root)
        return work

    def broadcast(self, values: Tensor, root: int) -> Work:
        """Copy the root's values to all ranks of the node."""
        work: Work = self._group.broadcast(values, root)
        return work

    def abort(self) -> None:
        """End the group; collectives in flight on a device end with undefined values."""
        group, self._group = self._group, None
        abort_group(group)


def _gloo(store: Store, rank: int, size: int) -> Any:
    return c10d.ProcessGroupGloo(store, rank, size, gloo_options(_LOOPBACK, _NEVER))


def _nccl(store: Store, rank: int, size: int) -> Any:
    return c10d.ProcessGroupNCCL(store, rank, size, nccl_options(_NEVER))
