"""`make audit` passes only where both databases have answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

UNKNOWN = "Dependency not found on PyPI and could not be audited: one (1.0)"


def audit(folder: Path, answer: str, *, deny: int | None = 0) -> subprocess.CompletedProcess[str]:
    """Run the script beside tools that give these answers.

    Args:
        folder: of the tools, and of what the script writes.
        answer: standard output of `pip-audit`.
        deny: exit status of `cargo deny`; None: it is not installed.
    """
    tools = folder / ".cache" / "audit-tools" / "bin"
    for path, text in (
        (tools / "pip-audit", f"cat {folder}/answer; echo it broke >&2; exit 1"),
        (folder / "bin" / "cargo", f"exit {deny}"),
        (folder / "bin" / "cargo-deny", "exit 1"),
        # Its freeze names a package; all else is Python's.
        (
            folder / "venv" / "bin" / "python",
            f'[ "$1" = -m ] && echo one==1.0+cpu || exec {sys.executable} "$@"',
        ),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    (folder / "answer").write_text(answer)
    if deny is None:
        (folder / "bin" / "cargo-deny").unlink()
    return subprocess.run(
        ["bash", str(ROOT / "scripts" / "audit"), str(folder / "venv")],
        cwd=folder,
        env={**os.environ, "PATH": f"{folder / 'bin'}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )


def of_packages(*packages: dict[str, Any]) -> str:
    return json.dumps({"dependencies": packages})


SOUND = {"name": "one", "version": "1.0", "vulns": []}
WEAK = {**SOUND, "name": "two", "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1"]}]}
SKIPPED = {"name": "three", "skip_reason": UNKNOWN}


def test_it_passes_where_both_databases_know_no_weakness(tmp_path: Path) -> None:
    done = audit(tmp_path, of_packages(SOUND))
    assert done.returncode == 0, done.stderr
    assert "1 packages, no known weakness" in done.stdout
    asked = tmp_path / ".cache" / "audit-tools" / "packages.txt"
    assert asked.read_text() == "one==1.0\n"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (of_packages(SOUND, WEAK), "two 1.0: PYSEC-1, mended in 1.1"),
        (of_packages(SOUND, SKIPPED), f"not audited: three: {UNKNOWN}"),
        (of_packages(SKIPPED), "the database answers for none of 1"),
        ("", "pip-audit did not come to its end: it broke"),
    ],
)
def test_it_fails_where_a_weakness_is_known_or_nobody_was_asked(
    answer: str, message: str, tmp_path: Path
) -> None:
    done = audit(tmp_path, answer)
    assert done.returncode == 1
    assert message in done.stderr


def test_crates_that_were_not_audited_fail_it_and_packages_are_still_asked(tmp_path: Path) -> None:
    without = audit(tmp_path, of_packages(SOUND), deny=None)
    assert without.returncode == 1
    assert "not audited: the crates; missing: cargo-deny" in without.stderr
    assert "no known weakness" in without.stdout
    assert audit(tmp_path, of_packages(SOUND), deny=1).returncode == 1
