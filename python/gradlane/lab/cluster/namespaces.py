"""A cluster of network namespaces on one machine, joined by a bridge, each port shaped both ways.

The namespaces have no names: they live as long as this process holds descriptors of them, so the
kernel removes them after any kind of end, SIGKILL included, and nothing stale can be left. The
bridge lives in a namespace of its own: the machine's own network is never touched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from gradlane.formats.signals import signals_blocked
from gradlane.lab.cluster.errors import LabError
from gradlane.lab.cluster.limits import NODES_MAX
from gradlane.lab.cluster.privilege import in_network_namespace
from gradlane.lab.cluster.shaping import PortShape

INTERFACE = "eth0"
"""The shaped interface's name inside every node's namespace."""

CONGESTION_CONTROL = "cubic"
"""Set on the routes: the machine's default may be BBR, several times slower between namespaces."""

_FIRST_PORT = 20_001
_NO_DUPLICATE_ADDRESS_DETECTION = 0x02


class Namespace:
    """One anonymous network namespace, alive while this object or a process in it lives.

    Attributes:
        descriptor: open descriptor of the namespace.
        counters: open descriptor of its `/proc/net/dev`, readable from any thread with `pread`.
        route: a netlink socket inside the namespace.
    """

    def __init__(self) -> None:
        """Make a new namespace; raises `OSError` without the privilege."""
        self.descriptor = -1
        self.counters = -1
        in_network_namespace(None, self._open)
        try:
            self.route: Any = IPRoute(netns=f"/proc/self/fd/{self.descriptor}", flags=0)
        except BaseException:
            os.close(self.descriptor)
            os.close(self.counters)
            raise

    def _open(self) -> None:
        self.descriptor = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self.counters = os.open("/proc/thread-self/net/dev", os.O_RDONLY)
        # Cached thresholds of earlier connections would carry one run's rate into the next one.
        with contextlib.suppress(OSError):
            Path("/proc/sys/net/ipv4/tcp_no_metrics_save").write_text("1")

    def interface(self, name: str) -> int:
        """Return the index of the interface with this name."""
        return int(self.route.link_lookup(ifname=name)[0])

    def close(self) -> None:
        """Let go of the namespace; closing twice does nothing."""
        if self.descriptor >= 0:
            self.route.close()
            os.close(self.descriptor)
            os.close(self.counters)
            self.descriptor = self.counters = -1


class EmulatedCluster:
    """N nodes on one switch, as a context manager.

    Every node has the interface `eth0` with the IPv4 address `addresses[node]` and the IPv6
    address `ipv6_addresses[node]`. What a node sends is shaped on its own interface, what it
    receives is shaped on its port of the bridge, so a link is full duplex and incast is felt.

    Attributes:
        nodes: how many.
        rate_bps: real bits a second of every port in each direction.
    """

    def __init__(self, nodes: int, rate_bps: int) -> None:
        """Plan a cluster; the namespaces are made on entry.

        Raises:
            ValueError: the number of nodes or the rate is out of range.
        """
        if not 1 <= nodes <= NODES_MAX:
            raise ValueError(f"cannot emulate {nodes} nodes: choose 1 to {NODES_MAX}")
        self.nodes = nodes
        self._shape = PortShape(rate_bps)
        self.addresses = [f"10.77.{node // 250}.{node % 250 + 1}" for node in range(nodes)]
        self.ipv6_addresses = [f"fd77::{node + 1:x}" for node in range(nodes)]
        self._switch: Namespace | None = None
        self._members: list[Namespace] = []
        self._children: list[subprocess.Popen[bytes]] = []
        self._ports = itertools.count(_FIRST_PORT)

    @property
    def rate_bps(self) -> int:
        """Real bits a second of every port in each direction."""
        return self._shape.rate_bps

    def next_port(self) -> int:
        """Return a TCP port that no program of the cluster has had: a closed one lingers."""
        return next(self._ports)

    def __enter__(self) -> EmulatedCluster:
        """Make the namespaces, links, addresses, routes and shapes."""
        try:
            with signals_blocked():
                self._switch = Namespace()
                switch = self._switch.route
                switch.link("add", ifname="switch", kind="bridge")
                switch.link("set", index=self._switch.interface("switch"), state="up")
            for node in range(self.nodes):
                with signals_blocked():
                    self._add_node(self._switch, node)
        except (OSError, NetlinkError) as failure:
            self.close()
            raise LabError(
                f"cannot build the emulated cluster: {failure}; the kernel needs the modules "
                "veth, bridge, sch_htb and tcp_cubic (modprobe them as root)"
            ) from failure
        except BaseException:
            self.close()
            raise
        return self

    def _add_node(self, switch: Namespace, node: int) -> None:
        member = Namespace()
        self._members.append(member)
        port_name = f"port{node}"
        switch.route.link(
            "add",
            ifname=port_name,
            kind="veth",
            mtu=1500,
            peer={"ifname": INTERFACE, "mtu": 1500, "net_ns_fd": member.descriptor},
        )
        port = switch.interface(port_name)
        switch.route.link("set", index=port, master=switch.interface("switch"), state="up")
        interface = member.interface(INTERFACE)
        member.route.link("set", index=member.interface("lo"), state="up")
        member.route.link("set", index=interface, state="up")
        member.route.addr("add", index=interface, address=self.addresses[node], prefixlen=16)
        member.route.addr(
            "add",
            index=interface,
            address=self.ipv6_addresses[node],
            prefixlen=64,
            flags=_NO_DUPLICATE_ADDRESS_DETECTION,
        )
        for network in ({"dst": "10.77.0.0/16", "scope": 253}, {"dst": "fd77::/64"}):
            member.route.route(
                "replace",
                oif=interface,
                proto="kernel",
                metrics={"cc_algo": CONGESTION_CONTROL},
                **({"priority": 256} if ":" in str(network["dst"]) else {}),
                **network,
            )
        self._shape.apply(member.route, interface)
        self._shape.apply(switch.route, port)

    def __exit__(self, *failure: object) -> None:
        """Kill what still runs in the cluster and remove it."""
        self.close()

    def close(self) -> None:
        """Kill what still runs in the cluster and remove it; closing twice does nothing."""
        for child in self._children:
            if child.poll() is None:
                child.kill()
        for child in self._children:
            child.wait()
            for pipe in (child.stdin, child.stdout, child.stderr):
                if pipe is not None:
                    with contextlib.suppress(OSError):
                        pipe.close()
        self._children.clear()
        with signals_blocked():
            self._remove()

    def _remove(self) -> None:
        for member in self._members:
            member.close()
        self._members.clear()
        if self._switch is not None:
            self._switch.close()
            self._switch = None

    def set_rate(self, rate_bps: int) -> None:
        """Change the rate of every port in both directions, in place.

        Raises:
            ValueError: the rate is out of range.
        """
        shape = PortShape(rate_bps)
        switch = self.switch
        for node, member in enumerate(self._members):
            with signals_blocked():
                shape.apply(member.route, member.interface(INTERFACE), change=True)
                shape.apply(switch.route, switch.interface(f"port{node}"), change=True)
        self._shape = shape

    def set_link(self, node: int, *, connected: bool) -> None:
        """Pull a node's cable out of the switch, or plug it in again."""
        switch = self.switch
        with signals_blocked():
            port = switch.interface(f"port{node}")
            switch.route.link("set", index=port, state="up" if connected else "down")

    def spawn(
        self,
        node: int,
        program: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdin: int | IO[bytes] | None = subprocess.DEVNULL,
        stdout: int | IO[bytes] | None = None,
        stderr: int | IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a program in a node's namespace; it is killed when the cluster closes.

        The program has a session of its own: Ctrl-C reaches this process alone, which then ends
        the program in order.

        Args:
            node: where.
            program: the executable's absolute path and its arguments.
            environment: added to this process's environment.
            stdin: as for `subprocess.Popen`; nothing to read by default.
            stdout: as for `subprocess.Popen`.
            stderr: as for `subprocess.Popen`.
        """

        def start() -> None:
            child = subprocess.Popen(
                program,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
            self._children.append(child)

        # A signal between the start and the list would leave a program that nobody knows.
        with signals_blocked():
            in_network_namespace(self.members[node].descriptor, start)
        return self._children[-1]

    def namespace_descriptor(self, node: int) -> int:
        """Return an open descriptor of a node's namespace, owned by the cluster."""
        return self.members[node].descriptor

    def counter_descriptors(self) -> list[int]:
        """Return each node's open `/proc/net/dev`, owned by the cluster."""
        return [member.counters for member in self.members]

    @property
    def members(self) -> list[Namespace]:
        """The nodes' namespaces, owned by the cluster."""
        self._require_up()
        return self._members

    @property
    def switch(self) -> Namespace:
        """The namespace of the switch, whose interface `portN` leads to node N."""
        return self._require_up()

    def _require_up(self) -> Namespace:
        if self._switch is None:
            raise LabError("the cluster is not up: use it inside its `with` block")
        return self._switch
