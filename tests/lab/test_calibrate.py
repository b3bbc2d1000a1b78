"""Calibration: its arithmetic on made-up counters, and what it measures here.

The test under namespaces judges what must hold on any machine; no threshold of speed is in it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlane.lab.calibration import calibrate
from gradlane.lab.calibration.calibrate import (
    load_of,
    print_constants,
    run_calibration,
)
from gradlane.lab.calibration.options import CalibrationOptions
from gradlane.lab.runs.fitting import non_negative
from gradlane.planning.simulation.codec_costs import CALIBRATED_CODECS
from gradlane.planning.simulation.costs import HOST_CONSTANTS, read_costs
from gradlane.report.console import wide_console
from tests.namespaces import needs_namespaces


def test_two_costs_are_told_apart() -> None:
    counts = [(100.0, 1e6), (800.0, 1e6), (100.0, 2e6)]
    seconds = [frames * 5e-6 + bytes_ * 3e-10 for frames, bytes_ in counts]
    frame_s, byte_s = non_negative(counts, seconds)
    assert frame_s == pytest.approx(5e-6) and byte_s == pytest.approx(3e-10)


def test_a_cost_is_never_negative() -> None:
    for first, second in ((0.0, 2.08), (2.08, 0.0)):
        counts = [(1.0, 1.0), (1.0, 2.0)] if first == 0.0 else [(1.0, 1.0), (2.0, 1.0)]
        assert list(non_negative(counts, [2.0, 4.2])) == pytest.approx([first, second])


def test_a_load_is_what_each_rank_had_to_do() -> None:
    result = {
        "gradlane_tx_frames": 10.0,
        "gradlane_tx_bytes": 1000.0,
        "gradlane_rx_bytes": 1200.0,
        "gradlane_io_cpu_s": 0.5,
        "gradlane_work_cpu_s": 0.25,
    }
    load = load_of([result] * 4, [1000, 500], 600, steps=2)
    assert (load.frames, load.frame_bytes) == (20.0, 2200.0)
    # Two slices of the first tensor and one of the second, each reduced by one of four ranks.
    assert (load.jobs, load.contribution_bytes) == (1.5, 12000.0)


def test_options_that_cannot_be_measured_are_refused() -> None:
    with pytest.raises(ValueError, match="repeat is 0"):
        CalibrationOptions(repeat=0)


@needs_namespaces
def test_this_machine_is_calibrated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "CALIBRATED_CODECS", CALIBRATED_CODECS[:2])
    content = run_calibration(CalibrationOptions(megabytes=2.0, repeat=1, steps=1, trials=3))
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    costs = read_costs(path)
    assert set(costs.host) == set(HOST_CONSTANTS) - {
        "between_steps_s",
        "seal_byte_s",
        "open_byte_s",
    }
    assert all(0.0 <= value < 0.1 for value in costs.host.values())
    assert 0.0 < costs.network["goodput_share"] <= 1.0
    # Linux doubles the 72 kB that it is asked for.
    assert costs.network["send_buffer_floor_bytes"] == 144 << 10
    print_constants(wide_console(), content)
    assert "send_frame_s" in capsys.readouterr().out
