"""The address at which other ranks reach this one.

With an interface given it is the interface's own, read from the kernel. Otherwise it is the local
address that the kernel would use towards the rendezvous store, so that ranks meet on the network
they share.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from pathlib import Path

from gradlane.errors import RefusedError

_SIOCGIFADDR = 0x8915
UNROUTED = ("192.0.2.1", 9)
"""An address reserved for documentation: looking up its route sends nothing."""


def is_literal(host: str) -> bool:
    """Return whether a host is an IPv4 or IPv6 address and not a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Return whether a host is an address that only this machine can reach."""
    return is_literal(host) and ipaddress.ip_address(host).is_loopback


def names_loopback(host: str) -> bool:
    """Return whether a host is a loopback address or `localhost`, and so asks for no other one.

    A machine's own name may lead to loopback on that machine alone.
    """
    return is_loopback(host) or host == "localhost"


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket that is bound to an address of this machine.

    Args:
        host: the address, or a name that leads to it.
        port: 0: any.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    address = resolve(host)
    bound = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((address, port))
    except BaseException:
        bound.close()
        raise
    return bound


def endpoint(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface, or else its global IPv6 address.

    Raises:
        ValueError: there is no such interface, or it has no address.
    """
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise RefusedError(f"no network interface {interface!r}; this machine has {sorted(names)}")
    address = _ipv4_address(interface) or _ipv6_address(interface)
    if address is None:
        raise RefusedError(f"network interface {interface!r} has no address")
    return address


def address_towards(host: str, port: int) -> str:
    """Return the local source address of packets to a host.

    Raises:
        OSError: the host is unknown or cannot be reached.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    local = _local_address(family, kind, protocol, address)
    if is_loopback(local) and not names_loopback(host):
        # Some systems map a machine's own name to loopback, where no other machine can reach it.
        try:
            return _local_address(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_UDP, UNROUTED)
        except OSError:
            return local
    return local


def listening_addresses(
    interface: str | None, advertised: str | None, store: tuple[str, int] | None
) -> list[str]:
    """Return the addresses for a rank to listen on, the one to try first in front.

    Args:
        interface: network interface to use, or None.
        advertised: address that other ranks reach this one at, or None.
        store: host and port of the rendezvous store; None: other ranks are on this machine.

    Raises:
        ValueError: there is no such interface, or it has no address.
        OSError: a host is unknown or cannot be reached.
    """
    if interface:
        return [interface_address(interface)]
    if advertised:
        literal = resolve(advertised)
        # Behind address translation this machine does not have the advertised address.
        return [literal, "::" if ":" in literal else "0.0.0.0"]
    return ["127.0.0.1"] if store is None else [address_towards(*store)]


def resolve(host: str) -> str:
    """Return an address of a host name, IPv4 if it has one; an address is returned unchanged.

    Raises:
        OSError: the name is unknown.
    """
    if is_literal(host):
        return host
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def port_rate_bps(address: str, ports: Path = Path("/sys/class/net")) -> float | None:
    """Return the rate of the port that has an address, in bits a second.

    Args:
        address: a literal address of this machine.
        ports: the kernel's folder of network interfaces.

    Returns:
        None where the rate is unknown: of loopback, of a port of a virtual machine or a container,
        and of an address that this machine does not have.
    """
    for _, name in socket.if_nameindex():
        if address not in (_ipv4_address(name), _ipv6_address(name)):
            continue
        # A virtual port names a rate that it does not have.
        if not any((ports / name / of).exists() for of in ("device", "bonding")):
            return None
        try:
            megabits = int((ports / name / "speed").read_text())
        except (OSError, ValueError):
            return None
        return megabits * 1e6 if megabits > 0 else None
    return None


def _local_address(family: int, kind: int, protocol: int, address: tuple[object, ...]) -> str:
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _ipv4_address(interface: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address(interface: str) -> str | None:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return None
    for line in table.read_text().splitlines():
        digits, _, _, scope, _, name = line.split()
        if name == interface and scope in ("00", "10"):
            # Link-local addresses (scope 20) need a zone and are left out.
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
