"""Shape one network interface to a rate with the kernel's traffic control.

A port is an `htb` class over a byte-limited queue. Its burst lets whole segmentation-offload
packets through: with a smaller one the goodput collapses. A rate is changed in place, so that
connections and queues live on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pyroute2.netlink.rtnl.tcmsg import plugins, sched_pfifo

from gradlane.lab.cluster.limits import check_port_rate

# The kernel's bfifo takes the same options as pfifo (a limit, in bytes instead of packets), but
# pyroute2 ships no entry for it and would send it without options.
plugins.setdefault("bfifo", sched_pfifo)

_ROOT_HANDLE = 0x10000
_CLASS_HANDLE = 0x10001
_LEAF_HANDLE = 0x100000
_DEFAULT_CLASS_MINOR = 1


@dataclass(frozen=True)
class PortShape:
    """The parameters of a shaped port; they hold for one direction of it.

    Attributes:
        rate_bps: bits a second on the wire, headers included; real, not nominal.
    """

    rate_bps: int

    def __post_init__(self) -> None:
        """Raise `ValueError` for a rate that cannot be shaped."""
        check_port_rate(self.rate_bps)

    @property
    def rate_bytes_per_s(self) -> int:
        """Bytes a second on the wire."""
        return self.rate_bps // 8

    @property
    def burst_bytes(self) -> int:
        """Bytes that may leave at once: 250 microseconds of traffic, and no less than 32 kB."""
        return max(32 * 1024, self.rate_bytes_per_s // 4000)

    @property
    def queue_bytes(self) -> int:
        """Bytes that may wait: 10 milliseconds of traffic, and no less than 200 kB."""
        return max(200_000, self.rate_bytes_per_s // 100)

    def apply(self, route: Any, interface_index: int, *, change: bool = False) -> None:
        """Shape what leaves an interface.

        Args:
            route: a `pyroute2.IPRoute` of the interface's namespace.
            interface_index: the interface.
            change: alter a shape that is there already, instead of making one.
        """
        if not change:
            route.tc("add", "htb", interface_index, _ROOT_HANDLE, default=_DEFAULT_CLASS_MINOR)
        route.tc(
            "change-class" if change else "add-class",
            "htb",
            interface_index,
            _CLASS_HANDLE,
            parent=_ROOT_HANDLE,
            rate=self.rate_bytes_per_s,
            ceil=self.rate_bytes_per_s,
            burst=self.burst_bytes,
            cburst=self.burst_bytes,
            quantum=60_000,
        )
        route.tc(
            "change" if change else "add",
            "bfifo",
            interface_index,
            _LEAF_HANDLE,
            parent=_CLASS_HANDLE,
            limit=self.queue_bytes,
        )
