"""Checks of a cluster: what differs between ranks, who reaches whom, what their ports carry."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlane.formats.link_report import LinkReport
from gradlane.formats.rank_names import ranks_text
from gradlane.formats.rates import format_rate
from gradlane.formats.untrusted import escaped
from gradlane.planning.doctor.findings import Finding, Verdict, fault, merged, ok, warning
from gradlane.planning.doctor.group import CHECK, group_finding
from gradlane.planning.doctor.machine import LocalMachine, MachineFacts
from gradlane.planning.doctor.reach import unreached
from gradlane.planning.probe.stream_endpoint import listen_on
from gradlane.training.options.option_groups import Network
from gradlane.training.rendezvous.addresses import endpoint

if TYPE_CHECKING:
    # Loads torch and its compiler, which one machine is examined without.
    from gradlane.training.session.session import Session

CLOCKS_APART_S = 1.0
SLOW_SHARE = 0.7
"""A port below this share of its nominal rate is worth a warning."""


@dataclass(frozen=True)
class Examination:
    """The findings of all ranks.

    Attributes:
        findings: of all checks; equal ones of several ranks once.
        ranks: facts of each rank, in rank order.
        links: what the ports carry; None where it was not measured.
    """

    findings: list[Finding]
    ranks: list[dict[str, Any]]
    links: LinkReport | None = None

    @property
    def is_fit(self) -> bool:
        """Whether a training can start."""
        return not any(one.verdict is Verdict.FAULT for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return everything, with units in the keys."""
        return {
            "fit": self.is_fit,
            "findings": [one.to_json() for one in self.findings],
            "ranks": self.ranks,
            "links": None if self.links is None else self.links.to_json(),
        }


def examine_alone(machine: LocalMachine) -> Examination:
    """Examine this machine alone."""
    return Examination(machine.examine(), [machine.facts().to_json()])


def examine_all(
    session: Session,
    machine: LocalMachine,
    network: Network,
    *,
    window_s: float,
    on_phase: Callable[[str], None],
) -> Examination:
    """Examine the machines of all ranks and the links between them; a collective call.

    Args:
        session: of all ranks, without a model.
        machine: this rank's.
        network: as the session was given it.
        window_s: seconds that each stream is measured.
        on_phase: called with the name of each phase.

    Returns:
        The same on every rank.

    Raises:
        RendezvousError: a rank did not come.
    """
    on_phase("machines")
    facts, own = machine.facts(), machine.examine()
    sent_s = time.time()
    rows = session.exchange(
        {
            "facts": facts.to_json(),
            "findings": [one.to_json() for one in own],
            "time_s": sent_s,
        }
    )
    everyone = [MachineFacts(**row["facts"]) for row in rows]
    findings = merged([[Finding.from_json(one) for one in row["findings"]] for row in rows])
    findings += differences(everyone)
    findings.append(clocks([row["time_s"] for row in rows]))
    on_phase("connections between all pairs")
    reached = _reach(session, machine, facts, network)
    findings += reached
    links = None
    if all(one.verdict is Verdict.OK for one in reached):
        links = session.planning.probe(window_s=window_s, on_phase=on_phase)
        findings += goodputs(links, everyone)
        on_phase(CHECK)
        findings.append(group_finding(session, network))
    return Examination(findings, [one.to_json() for one in everyone], links)


def differences(everyone: Sequence[MachineFacts]) -> list[Finding]:
    """Compare what ranks have to have alike; those with another secret are not here."""
    found = []
    for name, verdict, remedy in (
        ("build", fault, "install the same build of gradlane on all machines"),
        ("torch", warning, "install the same torch everywhere: bits of results depend on it"),
        ("python", warning, "use the same Python everywhere"),
        ("mtu", warning, "give all ports the same MTU, switches too, or long packets are dropped"),
    ):
        by_value: dict[str, list[int]] = {}
        for rank, facts in enumerate(everyone):
            by_value.setdefault(str(getattr(facts, name)), []).append(rank)
        if len(by_value) > 1:
            text = "; ".join(
                f"{value} on {ranks_text(ranks, most=len(everyone))}"
                for value, ranks in by_value.items()
            )
            found.append(verdict(f"the same {name}", escaped(text), remedy))
        else:
            found.append(ok(f"the same {name}", f"{escaped(next(iter(by_value)))} on all ranks"))
    return found


def clocks(times_s: Sequence[float]) -> Finding:
    """Compare the clocks; ranks have read them one after the other."""
    apart_s = max(times_s) - min(times_s)
    if apart_s > CLOCKS_APART_S:
        last = max(range(len(times_s)), key=times_s.__getitem__)
        return warning(
            "clocks",
            f"up to {apart_s:.1f} s apart (rank {last} the latest), the time of coming here "
            "included",
            "synchronize them (chrony), so that logs and timelines agree",
        )
    return ok("clocks", f"at most {apart_s:.1f} s apart")


def _reach(
    session: Session, machine: LocalMachine, facts: MachineFacts, network: Network
) -> list[Finding]:
    """Connect each rank to each other one; both directions of a pair are two connections."""
    check = "connections"
    with contextlib.ExitStack() as stack:
        try:
            listener = stack.enter_context(listen_on(machine.listening_addresses(), network.ports))
            own: list[Any] = [[network.advertise or facts.address, listener.getsockname()[1]], ""]
        except OSError as error:
            own = [None, str(error)]
        addresses, obstacles = zip(*session.exchange(own), strict=True)
        peers = {
            rank: _host_and_port(address)
            for rank, address in enumerate(addresses)
            if rank != session.rank and address
        }
        failed = session.exchange({str(rank): why for rank, why in unreached(peers).items()})
    found = [
        fault(
            check,
            escaped(
                f"rank {rank} does not reach rank {peer} at "
                f"{endpoint(*_host_and_port(address))}: {why}"
            ),
            _firewall(network),
        )
        for rank, failures in enumerate(failed)
        for peer, why in failures.items()
        if (address := addresses[int(peer)])
    ]
    found += [
        fault(check, escaped(f"rank {rank} {why}"), "give other Network(ports=...)")
        for rank, why in enumerate(obstacles)
        if why
    ]
    count = len(addresses) * (len(addresses) - 1)
    return found or [ok(check, f"all {count} (each pair, both ways)")]


def _host_and_port(address: Sequence[Any]) -> tuple[str, int]:
    return str(address[0]), int(address[1])


def _firewall(network: Network) -> str:
    if network.ports is None:
        return (
            "a firewall, or an address of another network: give Network(ports=(20000, 20100)) and "
            "open these between all machines, or Network(interface=...)"
        )
    low, high = network.ports
    return f"open TCP ports {low} to {high} between all machines, or give Network(interface=...)"


def goodputs(links: LinkReport, everyone: Sequence[MachineFacts]) -> list[Finding]:
    """Compare what ports carry with what they are called."""
    rates = {port.rank: min(port.both_send_bps, port.both_receive_bps) for port in links.ports}
    slow = []
    for rank, goodput_bps in rates.items():
        nominal_bps = everyone[rank].rate_bps
        if nominal_bps and goodput_bps < SLOW_SHARE * nominal_bps:
            slow.append(
                warning(
                    "port goodput",
                    f"rank {rank} ({everyone[rank].interface}) carries {format_rate(goodput_bps)} "
                    f"both ways at once; it is called {format_rate(nominal_bps)}",
                    "is it shared, another card than you think, or is the processor the limit? "
                    f"simulate with what it carries: --rate {goodput_bps / 1e6:.0f}mbit",
                )
            )
    if slow:
        return slow
    least = min(rates.values())
    return [
        ok(
            "port goodput",
            f"at least {format_rate(least)} both ways at once, {links.latency_s * 1e3:.3g} ms one "
            "way",
        )
    ]
