"""Rows that measure the machine in place of the network are no evidence."""

from __future__ import annotations

import pytest

from gradlane.lab.cluster.counters import TrafficRecord, read_processor_ticks
from gradlane.lab.runs import run as lab_run
from gradlane.lab.runs.rows import CPU_BOUND_SHARE, STOLEN_SHARE_MAX, measures_machine
from gradlane.lab.runs.run import Goodput


@pytest.mark.parametrize(
    ("cpu_share", "stolen_share", "measures"),
    [
        (CPU_BOUND_SHARE, 0.0, False),
        (CPU_BOUND_SHARE + 0.01, 0.0, True),
        (0.1, STOLEN_SHARE_MAX, False),
        (0.1, STOLEN_SHARE_MAX + 0.01, True),
    ],
)
def test_busy_processors_and_other_virtual_machines_both_count(
    cpu_share: float, stolen_share: float, measures: bool
) -> None:
    assert measures_machine(cpu_share, stolen_share) == measures


def test_shares_of_a_window_are_those_of_its_ticks() -> None:
    record = TrafficRecord(1)
    for time_s, ticks in [(0.0, (100, 1000, 10)), (1.0, (150, 1200, 10)), (2.0, (250, 1400, 60))]:
        record.add_processors(time_s, ticks)
    assert record.processor_share(0.0, 1.0) == pytest.approx(0.25)
    assert record.stolen_share(0.0, 1.0) == 0.0
    assert record.processor_share(1.0, 2.0) == pytest.approx(0.5)
    assert record.stolen_share(1.0, 2.0) == pytest.approx(0.25)


def test_stolen_ticks_are_busy_ones_of_all() -> None:
    busy, total, stolen = read_processor_ticks()
    assert 0 <= stolen <= busy <= total


@pytest.mark.parametrize(
    ("shares", "chosen"),
    [([0.0], 0), ([0.2, 0.01], 1), ([0.2, 0.1, 0.3], 1)],
)
def test_goodput_is_measured_again_where_others_had_the_processors(
    monkeypatch: pytest.MonkeyPatch, shares: list[float], chosen: int
) -> None:
    """Of three tries the least disturbed counts, and the first one that is not ends it."""
    ticks = [(0, 0, 0)]
    for share in shares:
        _, total, stolen = ticks[-1]
        ticks += [ticks[-1], (0, total + 1000, stolen + round(1000 * share))]
    read = iter(ticks[1:])
    monkeypatch.setattr(lab_run, "read_processor_ticks", lambda: next(read))
    monkeypatch.setattr(lab_run, "GOODPUT_TRIES", 3)
    streams = iter(range(1, 10))
    measured = lab_run.least_disturbed(lambda: float(next(streams)), 10.0)
    assert measured == Goodput(10.0 * (chosen + 1), shares[chosen])
    assert next(read, None) is None
