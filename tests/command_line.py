"""The command line run in this process, as tests of commands do."""

from __future__ import annotations

import sys

import pytest

from gradlane.cli import main as cli


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    """Return exit status, output and errors of `gradlane ARGUMENTS`."""
    monkeypatch.setattr(sys, "argv", ["gradlane", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err
