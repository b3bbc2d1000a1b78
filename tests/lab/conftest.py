"""Fixtures of the lab's tests."""

from __future__ import annotations

import pytest

from gradlane.lab.calibration import calibrate
from gradlane.lab.runs import run


@pytest.fixture(autouse=True)
def short_streams(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Measure the goodput of ports once, for half a second: no test is decided by what it is."""
    if "whole_streams" in request.fixturenames:
        return
    monkeypatch.setattr(run, "STREAM_RAMP_S", 0.2)
    monkeypatch.setattr(run, "STREAM_WINDOW_S", 0.3)
    monkeypatch.setattr(run, "GOODPUT_TRIES", 1)
    monkeypatch.setitem(calibrate.STREAM, "ramp_s", 0.2)
    monkeypatch.setitem(calibrate.STREAM, "window_s", 0.3)


@pytest.fixture
def whole_streams() -> None:
    """Measure the goodput of ports for as long as users do."""
