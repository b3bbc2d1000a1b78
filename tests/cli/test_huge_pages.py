"""Commands that simulate many ranks start themselves anew with huge pages."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from gradlane.cli import huge_pages

HAS_GLIBC = platform.libc_ver()[0] == "glibc"


def starts(
    monkeypatch: pytest.MonkeyPatch, ranks: int, own: bool = True, tunables: str | None = None
) -> list[list[str]]:
    """Return the command lines that were started."""
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append(arguments))
    monkeypatch.setattr(sys, "argv", ["gradlane", "whatif", "resnet50"])
    line = ["python", "-X", "dev", "-m", "gradlane", "whatif", "resnet50"]
    monkeypatch.setattr(sys, "orig_argv", line if own else ["python", "-m", "pytest"])
    monkeypatch.setattr(os, "environ", {} if tunables is None else {"GLIBC_TUNABLES": tunables})
    huge_pages.prefer_huge_pages(ranks)
    return started


@pytest.mark.skipif(not HAS_GLIBC, reason="needs glibc")
def test_many_ranks_start_the_same_command_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    line = [sys.executable, "-X", "dev", "-m", "gradlane", "whatif", "resnet50"]
    assert starts(monkeypatch, huge_pages.MANY_RANKS) == [line]
    assert os.environ["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"


def test_what_would_not_gain_goes_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert starts(monkeypatch, huge_pages.MANY_RANKS - 1) == []
    assert starts(monkeypatch, 1000, own=False) == []
    assert starts(monkeypatch, 1000, tunables="glibc.malloc.check=0") == []


def test_a_command_that_started_anew_ends_as_usual(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    command = ["whatif", "resnet50", "--workers", "1000", "--rate", "10gbit"]
    options = ["--strategy", "ring-fused", "--json", str(path)]
    environment = {key: value for key, value in os.environ.items() if key != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-m", "gradlane", *command, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"wrote {path}") == 1
    assert {row["workers"] for row in json.loads(path.read_text())["rows"]} == {1000}
