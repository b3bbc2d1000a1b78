"""Completion of the command line, as a shell asks for it and as it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

BASH = shutil.which("bash")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home folder with the command `gradlane` in `bin`."""
    command = tmp_path / "bin" / "gradlane"
    command.parent.mkdir()
    command.write_text(
        f"#!{sys.executable}\nfrom gradlane.cli.main import main\nmain()\n", encoding="utf-8"
    )
    command.chmod(0o755)
    return tmp_path


def run(home: Path, script: str) -> str:
    """Return what a bash script prints, started by a bash as a user's shell is."""
    assert BASH is not None
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {"HOME": str(home), "PATH": path, "PYTHONPATH": str(ROOT / "python")}
    # The second line keeps bash from replacing itself with the command: it looks for its parent.
    done = subprocess.run(
        [BASH, "-c", f"{script}\ntrue"],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.skipif(BASH is None, reason="needs bash")
def test_completion_is_installed_and_completes(home: Path) -> None:
    assert "completion installed" in run(home, "gradlane --install-completion")
    for words, completed in [
        ("gradlane wh", ["whatif"]),
        ("gradlane plan --work", ["--workers"]),
        ("gradlane lab r", ["run"]),
    ]:
        typed = f"COMP_WORDS=({words}) COMP_CWORD={len(words.split()) - 1}"
        shown = "_gradlane_completion gradlane; echo ${COMPREPLY[@]}"
        assert run(home, f"source ~/.bashrc; {typed}; {shown}").split() == completed


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell_is_printed(home: Path, shell: str) -> None:
    if BASH is None:
        pytest.skip("needs bash")
    script = run(home, f"_GRADLANE_COMPLETE=source_{shell} gradlane")
    assert "_GRADLANE_COMPLETE" in script and "gradlane" in script
