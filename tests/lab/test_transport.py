"""The transport measurements: their arithmetic, and the order in which frames leave.

The test under namespaces judges the order alone; no measured time or rate decides it.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import pytest
from rich.console import Console

from gradlane.lab.transport.measurement import (
    URGENT_PER_STEP,
    ExchangeRow,
    RunConditions,
    UrgencyRow,
    run_transport,
    summarize_turn,
)
from gradlane.lab.transport.options import TransportOptions
from gradlane.lab.transport.tables import print_transport
from gradlane.lab.transport.trace import (
    BROADCAST,
    PUSH,
    TraceRow,
    urgent_slices,
)
from gradlane.planning.planner.frame_count import frame_count
from tests.namespaces import needs_namespaces

SEND_TURN_BYTES = 1 << 20
"""What the core's I/O thread sends before it listens again, for each socket it heard from."""

MS = 1_000_000
CONDITIONS = RunConditions(4, 10**9, {}, 0.5)
LARGE = 1
"""Number of the less urgent tensor in the made-up traces; the urgent one is 0."""


def frames_ahead_limit(frame_bytes: int, credit_bytes: int, low_water_bytes: int) -> int:
    """Return how many less urgent frames may still leave to one rank once an urgent one is ready.

    The engine has chosen at most a credit's worth of frames (one in any case) that the kernel has
    not taken; and the turn of the I/O thread that is under way may fill the kernel's queue up to
    its low-water mark, the last frame reaching beyond it.

    Args:
        frame_bytes: largest payload of a frame.
        credit_bytes: bytes that may be chosen and not yet in the kernel's hands, a peer.
        low_water_bytes: bytes that may wait unsent in the kernel, a peer.
    """
    chosen = max(1, credit_bytes // frame_bytes)
    return chosen + math.ceil(low_water_bytes / frame_bytes)


def sent(time_ms: int, peer: int, tensor: int, kind: int = PUSH, way: str = "tx") -> TraceRow:
    """Return a row of step 1."""
    return (time_ms * MS, way, kind, peer, 1, tensor, tensor, -tensor)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 1}, "workers is 1"),
        ({"megabytes": 0.0}, "megabytes is 0"),
        ({"repeat": -1}, "repeat is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"urgent_trials": -1}, "trials is -1"),
    ],
)
def test_wrong_options_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    """Nothing is started for options that cannot work."""
    with pytest.raises(ValueError, match=message):
        TransportOptions(**change)


def test_a_hundred_megabytes_on_four_ranks_are_150_sent_by_each() -> None:
    """2 (N-1)/N of the model, for servers on all ranks as for a ring."""
    options = TransportOptions(workers=4, megabytes=100)
    assert options.tensor_elems == [1_000_000] * 25
    assert options.sent_bytes_per_step == 150e6


def counted(start_s: float, end_s: float, **counters: float) -> dict[str, Any]:
    """Return what a rank counted in two steps."""
    names = (
        "gradlane_tx_bytes",
        "gradlane_rx_bytes",
        "user_s",
        "system_s",
        "machine_busy_s",
        "machine_softirq_s",
        "machine_stolen_s",
        "machine_total_s",
        "sent_bytes",
        "received_bytes",
    )
    values: dict[str, Any] = {name: counters.get(name, 0.0) for name in names}
    return {"boundaries_s": [start_s, (start_s + end_s) / 2, end_s], **values}


def test_a_turn_lasts_from_the_slowest_start_to_the_slowest_end() -> None:
    """Goodput counts headers, processor seconds are per payload gigabyte that a rank sends."""
    machine = {
        "machine_busy_s": 3.0,
        "machine_softirq_s": 0.5,
        "machine_stolen_s": 0.25,
        "machine_total_s": 4.0,
    }
    results = [
        counted(
            10.0, 14.0, gradlane_tx_bytes=2.1e9, gradlane_rx_bytes=2.1e9, user_s=1.0, **machine
        ),
        counted(
            10.5, 14.5, gradlane_tx_bytes=2.1e9, gradlane_rx_bytes=2.1e9, user_s=2.0, system_s=1.0
        ),
    ]
    turn = summarize_turn(results, "gradlane", 2, 1e9)
    assert turn.step_s == 2.0
    assert turn.port_bytes_per_step == 1.05e9
    assert turn.goodput_bps == pytest.approx(8 * 1.05e9 / 2.0)
    assert turn.cpu_s_per_gb == pytest.approx(1.0)
    assert turn.user_s_per_gb == pytest.approx(0.75)
    assert turn.machine_s_per_gb == pytest.approx(0.75)
    assert turn.softirq_s_per_gb == pytest.approx(0.125)
    assert turn.cpu_share == 0.75
    assert turn.stolen_share == 0.0625
    gloo = summarize_turn(results, "gloo", 2, 1e9)
    assert gloo.port_bytes_per_step == 1e9


def test_targets_are_held_against_the_medians_of_ratios() -> None:
    """One bad repeat of three does not decide."""
    rows = []
    for repeat, (frame_bytes, user_s) in enumerate([(2.0e9, 1.0), (1.5e9, 9.0), (2.0e9, 1.2)]):
        ranks = [
            counted(
                0.0,
                4.0,
                gradlane_tx_bytes=frame_bytes,
                gradlane_rx_bytes=frame_bytes,
                user_s=user_s,
                machine_busy_s=1.0,
                machine_total_s=4.0,
            )
        ]
        gloo = summarize_turn([counted(0.0, 4.0, user_s=1.0, machine_total_s=4.0)], "gloo", 2, 1e9)
        ours = summarize_turn(ranks, "gradlane", 2, 1e9)
        rows.append(ExchangeRow.of(CONDITIONS, repeat, ours, gloo, 4e9))
    median = ExchangeRow.median(rows)
    assert median.goodput_share == 1.0
    assert median.to_json()["goodput_share_met"]
    assert median.cpu_ratio == pytest.approx(1.2)
    assert median.to_json()["cpu_ratio_met"]
    assert not median.cpu_bound
    console = Console(width=110, record=True, quiet=False)
    with console.capture() as captured:
        print_transport(console, [*rows, median])
    assert "median" in captured.get()
    assert "100.0%" in captured.get()


def test_frames_ahead_are_counted_from_credit_and_low_water_mark() -> None:
    """One frame goes whatever the credit; a part of a frame below the mark lets a whole one in."""
    assert frames_ahead_limit(65_536, 65_536, 65_536) == 2
    assert frames_ahead_limit(50_000, 50_000, 65_536) == 3
    assert frames_ahead_limit(50_000, 10_000, 1) == 2
    assert frames_ahead_limit(16_000, 64_000, 64_000) == 8


def test_a_push_is_followed_from_ready_to_the_other_side() -> None:
    """Less urgent frames are counted apart: same rank or any, before the first, up to the last."""
    trace0 = [
        sent(1, 1, LARGE),
        # Rank 0 calls gradient_ready from 2 to 3 ms; what left in between is nobody's fault.
        sent(3, 1, LARGE),
        sent(4, 1, LARGE),
        sent(5, 2, LARGE),
        sent(6, 1, 0),
        sent(7, 2, LARGE),
        sent(8, 1, 0),
        sent(9, 1, LARGE),
    ]
    trace1 = [sent(7, 0, 0, way="rx"), sent(11, 0, 0, way="rx")]
    (push,) = urgent_slices([trace0, trace1, []], [[(1, 0, 2 * MS, 3 * MS)], [], []])
    assert (push.direction, push.rank, push.peer, push.frames) == ("push", 0, 1, 2)
    assert (push.first_left_ms, push.last_left_ms, push.received_ms) == (4.0, 6.0, 9.0)
    assert (push.less_urgent_same_peer, push.less_urgent_any_peer) == (1, 2)
    assert (push.less_urgent_within, push.less_urgent_until_last) == (0, 3)
    assert push.saturated


def test_a_reply_counts_from_the_last_push_and_idle_ports_do_not_count() -> None:
    """A slice that found nothing else on its way says nothing about urgency."""
    trace = [
        sent(5, 1, 0, way="rx"),
        sent(7, 2, 0, way="rx"),
        sent(9, 1, 0, BROADCAST),
        sent(10, 1, LARGE, BROADCAST),
        sent(11, 1, 0, BROADCAST),
    ]
    (reply,) = urgent_slices([trace, [], []], [[(1, 0, 1 * MS, 1 * MS)], [], []])
    assert (reply.direction, reply.first_left_ms, reply.last_left_ms) == ("reply", 2.0, 4.0)
    assert reply.received_ms is None
    assert reply.less_urgent_within == 1
    assert not reply.saturated
    row = UrgencyRow(CONDITIONS, "all ranks at once", "reply", [reply]).to_json()
    assert (row["slices"], row["saturated_slices"]) == (1, 0)
    assert row["last_left_ms_max"] is None


@needs_namespaces
def test_urgent_slices_overtake_on_saturated_ports() -> None:
    """Once an urgent slice is ready, hardly anything less urgent leaves before it.

    Hundreds of frames are waiting when it becomes ready. To its own rank nothing comes between
    its frames. What may leave ahead is what was chosen already, and what the I/O thread's turn
    under way still sends, which is more where the thread had to wait for a processor: the median
    is held against the first, each slice against both.
    """
    options = TransportOptions(
        workers=3, repeat=0, urgent_trials=2 * URGENT_PER_STEP, urgent_megabytes=30
    )
    rows = [row.to_json() for row in run_transport(options)]
    settings = options.effective_settings
    frame_bytes = settings["frame_bytes"]
    # A session's credit is one frame.
    limit = frames_ahead_limit(frame_bytes, frame_bytes, settings["low_water_bytes"])
    # Frames divide a slice evenly, so they are shorter than they might be.
    shortest = 200_000 // frame_count(200_000, frame_bytes)
    turn = options.workers * (SEND_TURN_BYTES // shortest + 1)
    others = options.workers - 1
    assert [(row["way"], row["direction"]) for row in rows] == [
        ("one rank at a time", "push"),
        ("one rank at a time", "reply"),
        ("all ranks at once", "push"),
        ("all ranks at once", "reply"),
    ]
    for row in rows:
        samples = row["samples"]
        # Every slice travels from all but its server, and from there to all of them.
        assert len(samples) == 2 * URGENT_PER_STEP * others
        # Frames grow with the rate of their connection, to three times the size at most.
        counts = {frame_count(200_000, times * frame_bytes) for times in (1, 2, 3)}
        assert {sample["frames"] for sample in samples} <= counts
        assert [sample["less_urgent_within"] for sample in samples] == [0] * len(samples)
        if row["direction"] == "push":
            assert row["saturated_slices"] > 0
            ahead = [sample["less_urgent_any_peer"] for sample in samples if sample["saturated"]]
            assert statistics.median(ahead) <= others * limit
            assert max(ahead) <= others * limit + turn
