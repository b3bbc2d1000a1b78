"""Machines whose ports and ways are not all alike: ports of other rates, slow links, racks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradlane.formats.rates import format_rate, parse_rate
from gradlane.training.options.option_fields import option


@dataclass(frozen=True)
class PortRate:
    """The port of one machine, in bits a second."""

    machine: int
    rate_bps: float


@dataclass(frozen=True)
class Link:
    """The way between two machines, in bits a second each way."""

    one: int
    other: int
    rate_bps: float


@dataclass(frozen=True)
class Racks:
    """Racks of machines that share a line to the others."""

    machines: int
    """Machines in each, numbered one after the other; the last may have fewer."""
    uplink_bps: float | None
    """Rate of a rack's line each way; None: by `oversubscription`."""
    oversubscription: float = 1.0
    """Rate of a rack's ports together over that of its line."""

    def line_bps(self, port_bps: float) -> float:
        """Return the rate of a rack's line, by the rate of the ports."""
        return self.uplink_bps or self.machines * port_bps / self.oversubscription

    def __str__(self) -> str:
        """Return the racks in words."""
        line = f"oversubscribed {self.oversubscription:g} times"
        if self.uplink_bps is not None:
            line = f"with a line of {format_rate(self.uplink_bps)} to the others"
        return f"racks of {self.machines} machines {line}"


def _port(text: str) -> PortRate:
    machine, _, rate = text.partition("=")
    if not machine.strip().isdigit() or not rate:
        raise ValueError(
            f"port is {text!r}; it is written 3=1gbit: a machine's number and its rate"
        )
    return PortRate(int(machine), float(parse_rate(rate)))


def _link(text: str) -> Link:
    between, _, rate = text.partition("=")
    one, _, other = (end.strip() for end in between.partition("-"))
    if not (one.isdigit() and other.isdigit() and rate) or int(one) == int(other):
        raise ValueError(
            f"link is {text!r}; it is written 0-2=1gbit: the numbers of two machines and the rate"
        )
    return Link(int(one), int(other), float(parse_rate(rate)))


def _racks(text: str) -> Racks:
    machines, _, line = (part.strip() for part in text.partition("="))
    usage = (
        f"racks is {text!r}; it is written 4=10gbit (machines in a rack, and the rate of its line "
        "to the others) or 4=3x (its ports together carry 3 times as much as that line)"
    )
    if not machines.isdigit() or int(machines) < 1 or not line:
        raise ValueError(usage)
    times = line.removesuffix("x")
    if times == line:
        return Racks(int(machines), float(parse_rate(line)))
    try:
        oversubscription = float(times)
    except ValueError:
        raise ValueError(usage) from None
    if not 1.0 <= oversubscription <= 1e4:
        raise ValueError(usage)
    return Racks(int(machines), None, oversubscription)


@dataclass(frozen=True)
class Paths:
    """What differs from a cluster's rate."""

    ports: tuple[PortRate, ...] = option(
        (),
        "A machine whose port has another rate, by its number: 3=1gbit; several, each after "
        "--port. Dedicated servers come after the workers.",
        name="port",
        read=_port,
        repeated=True,
    )
    links: tuple[Link, ...] = option(
        (),
        "A link between two machines that is slower than their ports: 0-2=1gbit; several, each "
        "after --link.",
        name="link",
        read=_link,
        repeated=True,
    )
    racks: Racks | None = option(
        None,
        "Machines of a rack and what its line to the others carries: 4=10gbit, or 4=3x where its "
        "ports together carry 3 times as much (oversubscription).",
        read=_racks,
    )

    def __post_init__(self) -> None:
        """Raise `ValueError` where a machine's port or a link is named twice."""
        machines = [port.machine for port in self.ports]
        ends = [frozenset((link.one, link.other)) for link in self.links]
        if len({*machines}) < len(machines) or len({*ends}) < len(ends):
            raise ValueError("a --port or a --link is given twice: leave one of them out")

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.ports or self.links or self.racks)

    def check(self, machines: int) -> None:
        """Check that all machines are there.

        Raises:
            ValueError: one is not; the text names it.
        """
        named = [port.machine for port in self.ports]
        named += [end for link in self.links for end in (link.one, link.other)]
        if named and max(named) >= machines:
            raise ValueError(
                f"machine {max(named)} has a rate of its own, and there are {machines}, from 0 on: "
                "give other numbers to --port and --link, or more --workers"
            )

    def faster(self, times: float) -> Paths:
        """Return the same with rates so many times higher."""
        racks = self.racks
        if racks is not None and racks.uplink_bps is not None:
            racks = replace(racks, uplink_bps=times * racks.uplink_bps)
        return Paths(
            tuple(replace(port, rate_bps=times * port.rate_bps) for port in self.ports),
            tuple(replace(link, rate_bps=times * link.rate_bps) for link in self.links),
            racks,
        )

    def to_scenario(self, rate_bps: float, compression: float) -> dict[str, Any]:
        """Return it as a scenario has it.

        Args:
            rate_bps: of the cluster's ports.
            compression: rates are so many times higher, in place of fewer bytes.
        """
        racks = self.racks
        return {
            "ports": [
                {"machine": port.machine, "rate_bps": compression * port.rate_bps}
                for port in self.ports
            ],
            "links": [
                {"between": [link.one, link.other], "rate_bps": compression * link.rate_bps}
                for link in self.links
            ],
            "racks": None
            if racks is None
            else {
                "machines": racks.machines,
                "uplink_bps": compression * racks.line_bps(rate_bps),
            },
        }

    def slowest_port_bps(self, rate_bps: float) -> float:
        """Return the rate of the slowest port."""
        return min([rate_bps, *(port.rate_bps for port in self.ports)])

    def ring_bps(self, machines: int, rate_bps: float) -> float:
        """Return the rate at which a ring over neighbours goes round: that of its slowest way."""
        slowest = self.slowest_port_bps(rate_bps)
        for link in self.links:
            if (link.one - link.other) % machines in (1, machines - 1):
                slowest = min(slowest, link.rate_bps)
        if self.racks is not None and self.racks.machines < machines:
            slowest = min(slowest, self.racks.line_bps(rate_bps))
        return slowest

    def all_to_all_bps(self, machines: int, rate_bps: float) -> float:
        """Return the rate of equal ports that carry as much a second, where every machine sends
        as much to each other one.

        A link carries one part of a port's bytes in N - 1, so its rate counts N - 1 times; a
        rack's line carries what its R machines send to the N - R others.
        """
        slowest = self.slowest_port_bps(rate_bps)
        for link in self.links:
            slowest = min(slowest, (machines - 1) * link.rate_bps)
        racks = self.racks
        if racks is not None and racks.machines < machines:
            others = racks.machines * (machines - racks.machines) / (machines - 1)
            slowest = min(slowest, racks.line_bps(rate_bps) / others)
        return slowest

    def __str__(self) -> str:
        """Return what differs in words."""
        parts = [
            f"machine {port.machine} has a port of {format_rate(port.rate_bps)}"
            for port in self.ports
        ]
        parts += [
            f"the link between {link.one} and {link.other} carries {format_rate(link.rate_bps)}"
            for link in self.links
        ]
        return ", ".join([*parts, *([] if self.racks is None else [str(self.racks)])])
