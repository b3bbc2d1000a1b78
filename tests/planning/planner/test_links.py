"""Probes between real processes over loopback: what is measured, and who is named if it fails."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gradlane.formats.link_report import LinkReport, PortFigures, RoundTrip
from gradlane.planning.probe import stream_endpoint
from gradlane.planning.probe.goodput_reference import receive_until
from gradlane.planning.probe.links import one_way_pairs
from gradlane.planning.probe.stream_endpoint import StreamEndpoint, StreamError
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.training.model.pool import FirstRanks

MODULE = "tests.planning.planner.session_programs"


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_have_the_same_report(pool: FirstRanks, world_size: int) -> None:
    first, *others = pool.run(f"{MODULE}:probe", ranks=world_size)
    assert others == [first] * (world_size - 1)
    assert [port["rank"] for port in first["ports"]] == list(range(world_size))
    for port in first["ports"]:
        for figure in ("send_bps", "receive_bps", "both_send_bps", "both_receive_bps"):
            assert port[figure] > 1e6
    assert len(first["round_trips"]) == world_size
    for pair in first["round_trips"]:
        assert pair["rank"] != pair["peer"]
        assert pair["round_trip_s"] > 0.0
    slowest = min(min(p["both_send_bps"], p["both_receive_bps"]) for p in first["ports"])
    assert first["rate_bps"] == pytest.approx(slowest * 1514 / 1448)


def test_without_directions_nothing_is_said_of_them(pool: FirstRanks) -> None:
    (report, _) = pool.run(f"{MODULE}:probe", ranks=2, directions=False)
    assert {port["send_bps"] for port in report["ports"]} == {None}


def test_one_rank_has_no_links(pool: FirstRanks) -> None:
    (report,) = pool.run(f"{MODULE}:probe", ranks=1)
    assert report == {"workers": 1, "window_s": 0.1, "ports": [], "round_trips": []}


def test_ranks_that_cannot_reach_each_other_are_named_everywhere(pool: FirstRanks) -> None:
    errors = pool.run(f"{MODULE}:probe", blocked=True)
    assert len(set(errors)) == 1
    assert errors[0].startswith("RendezvousError: rank ")
    assert "rank 2" in errors[0]
    assert "firewall" in errors[0]


def test_every_rank_sends_and_receives_alone_once() -> None:
    for world_size in range(2, 9):
        phases = one_way_pairs(world_size)
        for pairs in phases:
            ranks = [rank for pair in pairs for rank in pair]
            assert len(set(ranks)) == len(ranks)
        pairs = [pair for phase in phases for pair in phase]
        assert {rank for rank, _ in pairs} == set(range(world_size))
        assert {rank for _, rank in pairs} == set(range(world_size))


def test_a_connection_without_a_token_is_closed() -> None:
    with (
        StreamEndpoint(0, ["127.0.0.1"], None, b"secret", 0.05) as one,
        StreamEndpoint(1, ["127.0.0.1"], None, b"secret", 0.05) as other,
        socket.create_connection((one.host, one.port)) as stranger,
    ):
        stranger.sendall(b"x" * 32)
        other.connect([f"{one.host}:{one.port}", ""], [0], [])
        one.connect([], [], [1])
        assert one.connected_ranks == [1]
        assert stranger.recv(1) == b""


def test_silent_connections_block_no_rank() -> None:
    """Each was waited for alone, for two seconds, and a byte now and then renewed them."""
    with (
        contextlib.ExitStack() as stack,
        StreamEndpoint(0, ["127.0.0.1"], None, b"secret", 0.05) as one,
        StreamEndpoint(1, ["127.0.0.1"], None, b"secret", 0.05) as other,
    ):
        calls = [socket.create_connection((one.host, one.port)) for _ in range(100)]
        for stranger in calls:
            stack.enter_context(stranger)
        for stranger in calls[::2]:
            stranger.sendall(b"x")
        other.connect([f"{one.host}:{one.port}", ""], [0], [])
        one.connect([], [], [1])
        assert one.connected_ranks == [1]


@contextlib.contextmanager
def connected() -> Iterator[tuple[StreamEndpoint, StreamEndpoint]]:
    """Two ends; the second streams to the first."""
    with (
        StreamEndpoint(0, ["127.0.0.1"], None, b"secret", 0.05) as one,
        StreamEndpoint(1, ["127.0.0.1"], None, b"secret", 0.05) as other,
    ):
        other.connect([f"{one.host}:{one.port}", ""], [0], [])
        one.connect([], [], [1])
        yield one, other


def test_a_receiver_that_begins_late_ends_the_stream() -> None:
    """The sender's window had closed by then, and all that was left came before the receiver's."""
    with connected() as (one, other):
        sender = threading.Thread(target=other.stream)
        sender.start()
        time.sleep(0.5)  # ten windows
        assert one.stream()[1] > 0.0
        sender.join()


def test_a_window_without_a_processor_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = receive_until, 0

    def receive(connection: socket.socket, end_s: float) -> list[tuple[float, int]]:
        nonlocal calls
        calls += 1
        if calls == 1:
            time.sleep(max(0.0, end_s - time.monotonic()))
        return real(connection, end_s)

    monkeypatch.setattr(stream_endpoint, "receive_until", receive)
    with connected() as (one, other):
        sender = threading.Thread(target=other.stream)
        sender.start()
        assert one.stream()[1] > 0.0
        sender.join()
    assert calls >= 2


def test_a_missing_rank_is_named_despite_other_callers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream_endpoint, "CONNECT_TIMEOUT_S", 0.3)
    with StreamEndpoint(0, ["127.0.0.1"], None, b"secret", 0.05) as one:
        over = threading.Event()

        def crowd() -> None:
            while not over.is_set():
                with contextlib.suppress(OSError):
                    socket.create_connection((one.host, one.port)).close()

        thread = threading.Thread(target=crowd)
        thread.start()
        try:
            with pytest.raises(StreamError, match="rank 1 did not connect"):
                one.connect([], [], [2, 1])
        finally:
            over.set()
            thread.join()


def test_figures_of_a_report() -> None:
    ports = (
        PortFigures(0, None, None, 9.0e8, 5.0e8),
        PortFigures(1, None, None, 4.0e8, 8.0e8),
    )
    trips = (RoundTrip(0, 1, 0.002), RoundTrip(1, 0, 0.004))
    report = LinkReport(2, 1.0, ports, trips)
    assert report.rate_bps == pytest.approx(4.0e8 * 1514 / 1448)
    assert report.latency_s == pytest.approx(0.0015)


def test_the_command_under_torchrun(programs: ForkedPrograms, tmp_path: Path) -> None:
    path = tmp_path / "links.json"
    arguments = [
        *("--nproc-per-node", "2"),
        *("--master-addr", "127.0.0.1", "--master-port", str(reserve_port())),
        *("-m", "gradlane", "probe", "--window-s", "0.1", "--json", str(path)),
    ]
    (printed,) = programs.run_all(tmp_path, "torch.distributed.run", arguments, [{}])
    (line,) = [line for line in printed.splitlines() if "slowest" in line]
    report = json.loads(path.read_text())
    assert report["workers"] == 2
    assert "Gbit/s" in line or "Mbit/s" in line
