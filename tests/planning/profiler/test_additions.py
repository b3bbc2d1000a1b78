"""`gradlane additions`: what it measures is what `whatif --additions` reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gradlane.cli import additions as command
from gradlane.planning.profiler.additions import measure_additions
from gradlane.planning.simulation.lists import read_additions
from tests.command_line import run


def test_a_file_of_additions_goes_into_whatif(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "ELEMENTS", (1_000, 1_000_000))
    csv, content = tmp_path / "added.csv", tmp_path / "added.json"
    status, printed, errors = run(
        monkeypatch, capsys, "additions", str(csv), "--device", "cpu", "--json", str(content)
    )
    assert (status, errors) == (0, "")
    assert "1,000,000 elements" in printed and f"wrote {csv}" in printed
    written = json.loads(content.read_text(encoding="utf-8"))
    assert written["device"] == "cpu"
    points = {one["elements"]: one["seconds"] for one in written["additions"]}
    assert dict(read_additions(csv)) == pytest.approx(points)
    asked = ("resnet50", "--workers", "8", "--rate", "100gbit", "--strategy", "ring-fused")
    status, printed, errors = run(monkeypatch, capsys, "whatif", *asked, "--additions", str(csv))
    assert status == 0 and "ring-fused" in printed, errors


def test_each_size_is_told_as_it_is_measured_and_costs_time() -> None:
    told: list[int] = []
    found = measure_additions(
        torch.device("cpu"), (10, 100_000), lambda one: told.append(one.elements)
    )
    assert told == [one.elements for one in found] == [10, 100_000]
    assert all(0 < one.seconds < 1 for one in found)


@pytest.mark.parametrize("device", ["x", "cuda:99", "meta:cpu"])
def test_a_device_that_torch_cannot_use_is_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    device: str,
) -> None:
    path = tmp_path / "added.csv"
    status, _, errors = run(monkeypatch, capsys, "additions", str(path), "--device", device)
    assert status == 2 and f"torch cannot use device {device!r} here" in errors
    assert not path.exists()
