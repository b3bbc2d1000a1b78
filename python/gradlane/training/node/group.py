"""A torch.distributed group of the ranks of one node, made from nothing but this node.

It stands beside the program's own groups and asks for none: its ranks meet in a store that the
node's first rank keeps on the loopback interface, and that ends with the session. The classes are
those that `torch.distributed.new_group` makes groups of; a group made by that function would need a
default group of all ranks, which a program that only uses gradlane does not have.

One thread alone uses a group, from its making to its end.
"""

from __future__ import annotations

import datetime
import socket
from typing import Any, Protocol

import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from gradlane.training.node.devices import NCCL
from gradlane.training.node.layout import Layout
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_LOOPBACK = "127.0.0.1"
_NEVER = datetime.timedelta(days=1)
"""Whoever waits for a group's work here gives up long before: torch's own limits, which end the
whole process, count time in which it was suspended as well."""


class Work(Protocol):
    """A collective that was issued."""

    def is_completed(self) -> bool:
        """Whether it has ended, in whatever way."""

    def wait(self) -> bool:
        """Wait for the end on the host (Gloo), or make the current stream wait (NCCL)."""


class Group(Protocol):
    """What adds up and spreads among the ranks of a node."""

    def reduce(self, values: Tensor, root: int) -> Work:
        """Give a rank of the node the sum of all ranks' values, in place of its own."""

    def broadcast(self, values: Tensor, root: int) -> Work:
        """Give all ranks of the node the values of one."""

    def abort(self) -> None:
        """End the group at once, whatever is under way."""


def open_node_store(layout: Layout, scope: RendezvousScope, timeout_s: float) -> Store:
    """Return a store of the ranks of this node, which others cannot reach.

    Args:
        layout: which ranks share nodes.
        scope: where the first rank of the node says where it is.
        timeout_s: how long to wait for a rank.

    Raises:
        RendezvousError: the first rank did not come.
    """
    limit = datetime.timedelta(seconds=timeout_s)
    key = f"local/store/{layout.node}"
    if layout.local_rank > 0:
        port = int(scope.get(key, layout.rank_of(layout.node, 0)))
        return TCPStore(_LOOPBACK, port, is_master=False, timeout=limit, wait_for_workers=False)
    # The store would listen on all interfaces by itself. Torch 2.4 takes another socket with libuv
    # off only.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_LOOPBACK, 0))
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        use_libuv=False,
    )
    scope.put(key, str(port))
    return store


class NodeGroup:
    """A group of torch.distributed's."""

    def __init__(self, backend: str, store: Store, layout: Layout) -> None:
        """Connect to the other ranks of the node; blocks until they are there.

        Args:
            backend: `"nccl"` or `"gloo"`.
            store: of the ranks of this node.
            layout: where this rank is.
        """
        make = _nccl if backend == NCCL else _gloo
        self._group: Any = make(store, layout.local_rank, layout.local_size)

    def reduce(self, values: Tensor, root: int) -> Work:
        """Give a rank of the node the sum of all ranks' values; those of others are undefined."""
        work: Work = self._group.reduce(values, root)
        return work

    def broadcast(self, values: Tensor, root: int) -> Work:
        """Give all ranks of the node the values of one."""
        work: Work = self._group.broadcast(values, root)
        return work

    def abort(self) -> None:
        """End the group: what is under way on a device ends, too, with values of no meaning."""
        group, self._group = self._group, None
        # By version of torch; Gloo ends as soon as nobody holds it and nothing is under way.
        for name in ("abort", "_abort", "_shutdown"):
            stop = getattr(group, name, None)
            if stop is not None:
                stop()
                return


def _gloo(store: Store, rank: int, size: int) -> Any:
    kind: Any = c10d.ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=_LOOPBACK)]
    options._timeout = _NEVER
    return kind(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int) -> Any:
    kind: Any = c10d.ProcessGroupNCCL
    options = kind.Options()
    options._timeout = _NEVER
    return kind(store, rank, size, options)
