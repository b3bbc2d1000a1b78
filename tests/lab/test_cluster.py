"""The emulated cluster: its network, its ranks' fates, and that nothing of it is left behind.

Tests that make namespaces are skipped, with the reason, where that is not allowed. No measured
time or rate decides a test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.lab.cluster.counters import TrafficRecord, TrafficSampler
from gradlane.lab.cluster.errors import LabError, RankError
from gradlane.lab.cluster.namespaces import CONGESTION_CONTROL, INTERFACE, EmulatedCluster
from gradlane.lab.cluster.ranks import RankPool
from gradlane.lab.cluster.shaping import PortShape
from tests.namespaces import needs_namespaces
from tests.waiting import eventually

RATE_BPS = 200_000_000

FAKE_RANK = "tests.lab.fake_rank"


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    """Two nodes."""
    with EmulatedCluster(2, RATE_BPS) as two_nodes:
        yield two_nodes


def python(
    cluster: EmulatedCluster, node: int, code: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Run Python code on a node."""
    program = [sys.executable, "-I", "-c", textwrap.dedent(code)]
    return cluster.spawn(node, program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def output(child: subprocess.Popen[bytes]) -> str:
    """Return what a child printed, and require that it succeeded."""
    text, _ = child.communicate(timeout=20)
    assert child.returncode == 0, text.decode()
    return text.decode().strip()


def test_shape_follows_the_measured_recipe() -> None:
    """Burst and queue have a floor, and grow with the rate above it."""
    slow = PortShape(100_000_000)
    assert (slow.burst_bytes, slow.queue_bytes) == (32 * 1024, 200_000)
    fast = PortShape(2_500_000_000)
    assert fast.burst_bytes == 78_125  # 250 microseconds
    assert fast.queue_bytes == 3_125_000  # 10 milliseconds


@pytest.mark.parametrize("rate_bps", [0, -5, 999_999, 10**12])
def test_impossible_rates_are_refused(rate_bps: int) -> None:
    """A port cannot be shaped to just anything."""
    with pytest.raises(ValueError, match=f"{rate_bps} bit/s"):
        EmulatedCluster(2, rate_bps)


@pytest.mark.parametrize("nodes", [0, -1, 251])
def test_impossible_sizes_are_refused(nodes: int) -> None:
    """The number of nodes is bounded."""
    with pytest.raises(ValueError, match="nodes"):
        EmulatedCluster(nodes, RATE_BPS)


def test_a_cluster_that_is_not_entered_says_so() -> None:
    """Using it too early is a clear error."""
    with pytest.raises(LabError, match="with"):
        EmulatedCluster(2, RATE_BPS).set_rate(RATE_BPS)


@needs_namespaces
@pytest.mark.parametrize("version", [4, 6])
def test_nodes_reach_each_other_with_the_right_congestion_control(
    cluster: EmulatedCluster, version: int
) -> None:
    """Both address families work, and both ends of a connection use the routes' algorithm."""
    addresses = cluster.addresses if version == 4 else cluster.ipv6_addresses
    family = "AF_INET" if version == 4 else "AF_INET6"
    server = python(
        cluster,
        1,
        f"""
        import socket
        listener = socket.create_server(({addresses[1]!r}, 7000), family=socket.{family})
        listener.settimeout(15)
        print("listening", flush=True)
        peer, address = listener.accept()
        name = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        print(name.rstrip(bytes(1)).decode(), address[0])
        """,
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"listening\n"
    client = python(
        cluster,
        0,
        f"""
        import socket
        peer = socket.create_connection(({addresses[1]!r}, 7000), timeout=10)
        print(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
              .rstrip(bytes(1)).decode())
        """,
    )
    assert output(client) == CONGESTION_CONTROL
    assert output(server) == f"{CONGESTION_CONTROL} {addresses[0]}"


def shaped_rates_bps(route: Any, interface_index: int) -> list[int]:
    """Return the rates of all classes on an interface, as the kernel tells them."""
    return [
        8 * message.get_attr("TCA_OPTIONS").get_attr("TCA_HTB_PARMS")["rate"]
        for message in route.get_classes(index=interface_index)
        if message.get_attr("TCA_KIND") == "htb"
    ]


@needs_namespaces
def test_every_port_is_shaped_in_both_directions_and_in_place(cluster: EmulatedCluster) -> None:
    """The kernel knows the same rate at both ends of each link, before and after a change."""
    for rate_bps in (RATE_BPS, 50_000_000, 1_000_000_000):
        cluster.set_rate(rate_bps)
        assert cluster.rate_bps == rate_bps
        for node, member in enumerate(cluster.members):
            interface = member.interface(INTERFACE)
            assert shaped_rates_bps(member.route, interface) == [rate_bps]
            port = cluster.switch.interface(f"port{node}")
            assert shaped_rates_bps(cluster.switch.route, port) == [rate_bps]


@needs_namespaces
def test_the_machines_own_network_is_untouched() -> None:
    """No interface, no route and no named namespace appears outside of the cluster."""

    def seen() -> tuple[list[str], str, list[str]]:
        named = Path("/run/netns")
        return (
            sorted(os.listdir("/sys/class/net")),
            Path("/proc/net/route").read_text(),
            sorted(os.listdir(named)) if named.is_dir() else [],
        )

    before = seen()
    with EmulatedCluster(3, RATE_BPS):
        assert seen() == before
    assert seen() == before


SEND_DATAGRAM = """
    import socket
    sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sender.sendto(b"x", ({address!r}, 7000))
"""


@needs_namespaces
def test_a_pulled_cable_carries_nothing(cluster: EmulatedCluster) -> None:
    """Datagrams arrive before a link is cut and after it is mended, not between."""
    receiver = python(
        cluster,
        1,
        f"""
        import socket
        receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        receiver.bind(({cluster.addresses[1]!r}, 7000))
        receiver.settimeout(20)
        while True:
            receiver.recv(1)
            print("got", flush=True)
        """,
        environment={"PYTHONUNBUFFERED": "1"},
    )
    assert receiver.stdout is not None
    stream = receiver.stdout
    os.set_blocking(stream.fileno(), False)

    def arrives() -> bool:
        output(python(cluster, 0, SEND_DATAGRAM.format(address=cluster.addresses[1])))
        return bool(stream.read())

    assert eventually(arrives)
    cluster.set_link(1, connected=False)
    stream.read()
    assert not any(arrives() for _ in range(3))
    cluster.set_link(1, connected=True)
    assert eventually(arrives)


@needs_namespaces
def test_counters_see_what_a_node_sends_and_another_receives(cluster: EmulatedCluster) -> None:
    """A known number of bytes appears at the sender's and the receiver's port, and only there."""
    size_bytes = 2_000_000
    with TrafficSampler(cluster.counter_descriptors(), interval_s=0.005) as sampler:
        start_s = time.monotonic()
        server = python(
            cluster,
            1,
            f"""
            import socket
            listener = socket.create_server(({cluster.addresses[1]!r}, 7000))
            print("listening", flush=True)
            peer, _ = listener.accept()
            while peer.recv(1 << 16):
                pass
            """,
        )
        assert server.stdout is not None
        server.stdout.readline()
        output(
            python(
                cluster,
                0,
                f"""
                import socket
                peer = socket.create_connection(({cluster.addresses[1]!r}, 7000))
                peer.sendall(bytes({size_bytes}))
                """,
            )
        )
        output(server)
    moved = sampler.record.bytes_between(start_s, time.monotonic())
    received, sent = moved[1][0], moved[0][1]
    assert size_bytes <= sent < 1.2 * size_bytes
    assert size_bytes <= received < 1.2 * size_bytes
    assert moved[0][0] < 0.2 * size_bytes
    assert moved[1][1] < 0.2 * size_bytes


@given(
    st.lists(st.integers(0, 10**9), min_size=2, max_size=20),
    st.floats(0, 1),
)
def test_windows_of_a_record_add_up(deltas: list[int], cut: float) -> None:
    """Whatever was sampled, two windows that touch hold what their union holds."""
    record = TrafficRecord(1)
    total = 0
    for index, delta in enumerate(deltas):
        total += delta
        record.add_ports(float(index), [(total, 2 * total)])
    end_s = float(len(deltas) - 1)
    middle_s = cut * end_s
    (whole,) = record.bytes_between(0.0, end_s)
    (left,) = record.bytes_between(0.0, middle_s)
    (right,) = record.bytes_between(middle_s, end_s)
    assert left[0] + right[0] == pytest.approx(whole[0], abs=1e-3)
    assert whole == (total - deltas[0], 2 * (total - deltas[0]))


def test_counts_are_exact_whatever_was_sampled_when() -> None:
    """A window between the same moments would interpolate."""
    record = TrafficRecord(2)
    record.add_ports(0.0, [(0, 0), (0, 0)])
    record.add_count([(10, 20), (30, 40)])
    record.add_count([(110, 220), (330, 440)])
    record.add_ports(9.0, [(1000, 1000), (1000, 1000)])
    assert record.counted_bytes() == [(100, 200), (300, 400)]


def test_utilization_is_carried_over_carriable() -> None:
    """A port that sends at half its goodput and receives nothing is used by a quarter."""
    record = TrafficRecord(1)
    record.add_ports(0.0, [(0, 0)])
    record.add_ports(2.0, [(0, 1000)])
    assert record.utilization(0.0, 2.0, goodput_bps=8000.0) == pytest.approx(0.25)
    series = record.series(0.0, 2.0, goodput_bps=8000.0, points=4)
    assert series["time_s"] == pytest.approx([0.25, 0.75, 1.25, 1.75])
    assert series["transmit"] == pytest.approx([0.5] * 4)
    assert series["receive"] == [0.0] * 4


@needs_namespaces
def test_closing_kills_what_runs_in_the_cluster() -> None:
    """An exception inside the block leaves no process behind."""
    with contextlib.suppress(ZeroDivisionError), EmulatedCluster(2, RATE_BPS) as cluster:
        children = [python(cluster, node, "import time; time.sleep(60)") for node in (0, 1)]
        raise ZeroDivisionError
    assert [child.poll() for child in children] == [-signal.SIGKILL] * 2


def pool(cluster: EmulatedCluster, stall_timeout_s: float = 30.0) -> RankPool:
    """Return ranks that do as they are told."""
    return RankPool(cluster, program=FAKE_RANK, stall_timeout_s=stall_timeout_s)


@needs_namespaces
def test_ranks_answer_in_order_and_report_progress(cluster: EmulatedCluster) -> None:
    """One pool serves many requests."""
    progress: list[tuple[int, int]] = []
    with pool(cluster) as ranks:
        for value in range(3):
            request = {"acts": ["answer", "answer"], "value": value}
            results = ranks.ask([request] * 2, lambda rank, steps: progress.append((rank, steps)))
            assert results == [{"rank": rank, "value": value} for rank in (0, 1)]
        processes = ranks.processes()
    assert sorted(progress) == [(0, 3)] * 3 + [(1, 3)] * 3
    assert not any(Path(f"/proc/{process}").exists() for process in processes)


@needs_namespaces
def test_a_rank_waits_until_the_ports_are_counted(cluster: EmulatedCluster) -> None:
    """What it sends after its wait is in no count."""
    counts: list[int] = []
    with pool(cluster) as ranks:
        request = {"acts": ["answer", "count"], "value": 0}
        results = ranks.ask([request] * 2, on_count=lambda: counts.append(len(counts)))
    assert results[1] == {"kind": "counted"}
    assert counts == [0]


@needs_namespaces
@pytest.mark.parametrize(
    ("act", "message", "details"),
    [
        ("fail", "too much", "in some line"),
        ("exit", "status 7", "last words"),
        ("kill", "SIGKILL", ""),
        ("stall", "no rank made progress", "File "),
    ],
)
def test_a_failing_rank_is_named_and_the_others_are_ended(
    cluster: EmulatedCluster, act: str, message: str, details: str
) -> None:
    """The other rank, which would wait for ever, does not keep the request from failing."""
    stall_timeout_s = 1.0 if act == "stall" else 30.0
    with pool(cluster, stall_timeout_s) as ranks:
        processes = ranks.processes()
        acts = ["answer" if act == "stall" else "stall", act]
        with pytest.raises(RankError, match=message) as caught:
            ranks.ask([{"acts": acts, "value": 0}] * 2)
        assert caught.value.rank == 1
        assert details in caught.value.details
        assert not any(Path(f"/proc/{process}").exists() for process in processes)


@needs_namespaces
def test_a_rank_that_died_leads_the_ranks_that_failed_because_of_it(
    cluster: EmulatedCluster,
) -> None:
    """Both are named, the dead one first, whoever spoke first."""
    with pool(cluster) as ranks, pytest.raises(RankError) as caught:
        ranks.ask([{"acts": ["fail", "kill"], "value": 0}] * 2)
    assert caught.value.rank == 1
    assert "SIGKILL" in str(caught.value)
    assert "rank 0: ValueError: too much" in str(caught.value)


@needs_namespaces
def test_what_several_ranks_say_is_told_once(cluster: EmulatedCluster) -> None:
    with pool(cluster) as ranks, pytest.raises(RankError) as caught:
        ranks.ask([{"acts": ["fail", "fail"], "value": 0}] * 2)
    first = caught.value.rank
    assert str(caught.value) == f"rank {first}: ValueError: too much\n(rank {1 - first} too)"


@needs_namespaces
def test_a_module_that_cannot_be_run_is_told_in_its_own_words(cluster: EmulatedCluster) -> None:
    with pytest.raises(RankError, match="ended with status 1") as caught:
        RankPool(cluster, program="gradlane.lab.nothing").__enter__()
    assert "No module named gradlane.lab.nothing" in caught.value.details


@needs_namespaces
def test_a_killed_owner_takes_its_ranks_with_it(tmp_path: Path) -> None:
    """After SIGKILL of the one who holds the cluster, no rank and so no namespace lives on."""
    script = tmp_path / "owner.py"
    script.write_text(
        "import sys, time\n"
        "from gradlane.lab.cluster.namespaces import EmulatedCluster\n"
        "from gradlane.lab.cluster.ranks import RankPool\n"
        f"with EmulatedCluster(2, {RATE_BPS}) as cluster:\n"
        f"    with RankPool(cluster, program={FAKE_RANK!r}) as ranks:\n"
        "        print(*ranks.processes(), flush=True)\n"
        "        time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, env=environment)
    assert owner.stdout is not None
    ranks = owner.stdout.readline().split()
    assert len(ranks) == 2
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert eventually(
        lambda: not any(_alive(int(rank)) for rank in ranks),
    )


def _alive(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
