"""Checks of the machine that this process runs on."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gradlane.formats.provenance import NOT_INSTALLED, package_versions
from gradlane.formats.rates import format_rate
from gradlane.planning.doctor.findings import Finding, fault, ok, warning
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Network, Rendezvous
from gradlane.training.options.secret import secret_bits
from gradlane.training.rendezvous import addresses
from gradlane.training.rendezvous.environment import find_store_address

OLDEST_TORCH = (2, 4)
SEND_BUFFER_BYTES = 73_728
"""Bytes of socket buffer that each connection asks the kernel for."""
SHARED_MEMORY_BYTES = 1 << 30
"""Gradients of a node's ranks are added up there."""
DESCRIPTORS = 1024
_ADJTIMEX_UNSYNCHRONIZED = 5


@dataclass(frozen=True)
class MachineFacts:
    """The facts that are compared between ranks.

    Attributes:
        host: name of the machine.
        build: digest of the compiled core.
        python: version.
        torch: version.
        interface: the network interface that is taken; empty where none is known.
        address: its address.
        mtu: its largest packet, in bytes; 0 if unknown.
        rate_bps: its nominal rate; 0 where the kernel does not know it.
    """

    host: str
    build: str
    python: str
    torch: str
    interface: str
    address: str
    mtu: int
    rate_bps: float

    def to_json(self) -> dict[str, Any]:
        """Return all fields."""
        return asdict(self)


class LocalMachine:
    """This machine, read from `/proc` and `/sys`."""

    def __init__(self, environment: Mapping[str, str], network: Network, root: Path) -> None:
        """Look at nothing yet.

        Args:
            environment: variables of the process.
            network: which interface and ports a session would take.
            root: `/`, or another folder in tests.
        """
        self._environment = environment
        self._network = network
        self._root = root

    def facts(self) -> MachineFacts:
        """Return what is compared between ranks."""
        address, interface = self._taken()
        return MachineFacts(
            platform.node(),
            _build(),
            platform.python_version(),
            package_versions()["torch"],
            interface,
            address,
            self._number(f"sys/class/net/{interface}/mtu") if interface else 0,
            self.nominal_bps(interface),
        )

    def nominal_bps(self, interface: str) -> float:
        """Return the rate that a network card negotiated; 0 where the kernel does not know it."""
        return max(0, self._number(f"sys/class/net/{interface}/speed")) * 1e6 if interface else 0.0

    def examine(self) -> list[Finding]:
        """Return the findings of all checks."""
        return [
            *self._versions(),
            *self._accelerators(),
            self._interface(),
            self._mtu(),
            self._send_buffers(),
            self._congestion_control(),
            self._shared_memory(),
            self._descriptors(),
            self._processors(),
            self._clock(),
            self._secret(),
        ]

    def _versions(self) -> list[Finding]:
        versions = package_versions()
        found, torch = [ok("Python", versions["python"])], versions["torch"]
        if torch == NOT_INSTALLED:
            return [*found, fault("torch", torch, "pip install torch")]
        parts = torch.split("+")[0].split(".")
        known = tuple(int(part) for part in parts[:2] if part.isdigit())
        if known < OLDEST_TORCH:
            oldest = ".".join(map(str, OLDEST_TORCH))
            found.append(
                fault("torch", torch, f"gradlane needs {oldest} or newer: pip install -U torch")
            )
        else:
            found.append(ok("torch", torch))
        found.append(ok("gradlane", f"{versions['gradlane']}, core {_build()}"))
        return found

    def _accelerators(self) -> list[Finding]:
        version = package_versions()["torch"]
        if version == NOT_INSTALLED:
            return []
        try:
            import torch
        except (ImportError, OSError) as error:
            found = f"{version} cannot be loaded: {error}"
            return [fault("torch", found, "pip install --force-reinstall torch")]
        return [self._accelerators_of(torch), *_internals()]

    def _accelerators_of(self, torch: ModuleType) -> Finding:
        check = "accelerators"
        driver = self._text("proc/driver/nvidia/version").splitlines()
        if torch.cuda.is_available():
            names = [
                torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
            ]
            return ok(check, f"{len(names)} ({', '.join(dict.fromkeys(names))})")
        if driver:
            return warning(
                check,
                f"torch {torch.__version__} sees none, but there is a driver: {driver[0]}",
                "install a build of torch with CUDA that fits the driver",
            )
        return ok(check, "none; training runs on the processors")

    def listening_addresses(self) -> list[str]:
        """Return the addresses that a session would try to listen on; none without a route."""
        network = self._network
        try:
            given = with_environment(Rendezvous(), self._environment).store_address
            store = given or find_store_address(self._environment)
        except ValueError:
            # No launcher: what is asked is which way leads out.
            store = addresses.UNROUTED
        try:
            return addresses.listening_addresses(network.interface, network.advertise, store)
        except (OSError, ValueError):
            return []

    def _taken(self) -> tuple[str, str]:
        """Return address and interface that a session would take; empty where there is none."""
        address = next(iter(self.listening_addresses()), "")
        names = (name for _, name in socket.if_nameindex() if _address_of(name) == address)
        return address, next(names, "") if address else ""

    def _interface(self) -> Finding:
        check = "network interface"
        if self._network.interface:
            try:
                addresses.interface_address(self._network.interface)
            except ValueError as error:
                return fault(check, str(error), "give one of these to Network(interface=...)")
        address, name = self._taken()
        others = [
            f"{other} {addresses.endpoint(found, 0).removesuffix(':0')}"
            for _, other in socket.if_nameindex()
            if other not in (name, "lo") and (found := _address_of(other))
        ]
        beside = f"; others: {', '.join(others)}" if others else ""
        if not address:
            return fault(
                check,
                f"none has a route to other machines{beside}",
                "give Network(interface=...), or GRADLANE_INTERFACE",
            )
        if addresses.is_loopback(address):
            return warning(
                check,
                f"{name or address}: reaches this machine only{beside}",
                "for several machines set MASTER_ADDR (or GRADLANE_STORE) to an address of the "
                "network, or give Network(interface=...)",
            )
        rate_bps = self.nominal_bps(name)
        rate = format_rate(rate_bps) if rate_bps else "rate unknown to the kernel"
        return ok(check, f"{name or 'unnamed'} {address}, {rate}{beside}")

    def _mtu(self) -> Finding:
        _, name = self._taken()
        mtu = self._number(f"sys/class/net/{name}/mtu") if name else 0
        if 0 < mtu < 1500:
            return warning(
                "MTU",
                f"{mtu} bytes on {name}",
                "an overlay or tunnel shortens packets; train over the network below it if it can "
                "be reached",
            )
        return ok("MTU", f"{mtu} bytes on {name}" if mtu else "unknown")

    def _send_buffers(self) -> Finding:
        most = self._number("proc/sys/net/core/wmem_max")
        if 0 < most < SEND_BUFFER_BYTES:
            return warning(
                "send buffers",
                f"net.core.wmem_max is {most:,} bytes; connections ask for {SEND_BUFFER_BYTES:,}",
                "sysctl -w net.core.wmem_max=4194304",
            )
        return ok("send buffers", f"net.core.wmem_max {most:,} bytes" if most else "unknown")

    def _congestion_control(self) -> Finding:
        name = self._text("proc/sys/net/ipv4/tcp_congestion_control").strip()
        return ok("congestion control", name or "unknown")

    def _shared_memory(self) -> Finding:
        check, path = "/dev/shm", self._root / "dev/shm"
        if not path.is_dir():
            return warning(
                check,
                "missing, so the ranks of a machine cannot add up in it",
                'mount it (docker run --shm-size=8g), or use local="off"',
            )
        free = shutil.disk_usage(path).free
        text = f"{free / 2**30:.1f} GiB free"
        if free < SHARED_MEMORY_BYTES:
            return warning(
                check,
                text,
                "several ranks on a machine add up there, in two to three times the bytes of the "
                'model: docker run --shm-size=8g, or local="off"',
            )
        return ok(check, text)

    def _descriptors(self) -> Finding:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < DESCRIPTORS:
            return warning("open files", f"at most {soft}", f"ulimit -n {min(hard, 65_536)}")
        return ok("open files", f"at most {soft:,}")

    def _processors(self) -> Finding:
        usable = len(os.sched_getaffinity(0))
        text = f"{usable} usable of {os.cpu_count()}"
        ranks = int(self._environment.get("LOCAL_WORLD_SIZE", "1") or "1")
        quota = self._text("sys/fs/cgroup/cpu.max").split()
        if len(quota) == 2 and quota[0].isdigit() and int(quota[1]):
            limit = int(quota[0]) / int(quota[1])
            text += f", limited to {limit:g}"
            usable = min(usable, int(limit) or 1)
        if usable < 2 * ranks:
            return warning(
                "processors",
                f"{text}, for {ranks} rank{'s' * (ranks > 1)}",
                "a rank sends and adds up on two threads of its own beside the training: give it "
                "two processors or more",
            )
        return ok("processors", text)

    def _clock(self) -> Finding:
        state = clock_state()
        if state == _ADJTIMEX_UNSYNCHRONIZED:
            return warning(
                "clock",
                "not synchronized",
                "run chrony or systemd-timesyncd, so that logs and timelines of ranks agree",
            )
        return ok("clock", "synchronized" if state >= 0 else "unknown")

    def _secret(self) -> Finding:
        check = "secret"
        try:
            secret = self._network.read_secret()
        except (OSError, ValueError) as error:
            return fault(check, str(error), "gradlane secret new PATH writes a good one")
        if secret is None:
            return warning(
                check,
                "none: any process that reaches the job's store may join it",
                "gradlane secret new writes one; give all ranks GRADLANE_SECRET_FILE",
            )
        return ok(check, f"{secret_bits(secret)} bits")

    def _text(self, path: str) -> str:
        try:
            return (self._root / path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def _number(self, path: str) -> int:
        text = self._text(path).strip()
        return int(text) if text.lstrip("-").isdigit() else 0


def _internals() -> list[Finding]:
    """Look for the parts of torch that it does not promise to keep."""
    from gradlane.training import torch_internals

    torch_internals.look_up_all()
    check, remedy = "torch's internals", f"pip install torch=={torch_internals.NEW}.*"
    lost = torch_internals.lost()
    if not lost:
        return [ok(check, f"{len(torch_internals.INTERNALS)} are as expected")]
    return [
        fault(check, one.loss, remedy) if one.without is None else warning(check, one.loss, remedy)
        for one in lost
    ]


def _address_of(interface: str) -> str:
    try:
        return addresses.interface_address(interface)
    except ValueError:
        return ""


def _build() -> str:
    """Return a digest of the compiled core; ranks with another one may speak another language."""
    core = sys.modules.get("gradlane._core")
    if core is None or core.__file__ is None:
        from gradlane.training.core import load_core

        load_core()
        core = sys.modules["gradlane._core"]
    assert core.__file__ is not None
    return hashlib.sha256(Path(core.__file__).read_bytes()).hexdigest()[:12]


def clock_state() -> int:
    """Return what `adjtimex(2)` says of the clock; -1 where it cannot be asked."""
    try:
        # A `struct timex` of zeros asks and sets nothing.
        return int(ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(512)))
    except (AttributeError, OSError):
        return -1
