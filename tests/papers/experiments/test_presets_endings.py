"""Presets that end early: a clear message, a status that is not 0, and nothing left behind.

Each is ended while real ranks are up, from outside, as it would be in use; what was written before
is whole.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gradlane.lab.cluster.errors import LabError
from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.rows import Row, read_rows, save_rows, write_failure
from tests.children import children_of
from tests.namespaces import needs_namespaces

UNPRIVILEGED = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]
WORKERS = 2
COMMAND = ["--workload", "resnet50", "--rate", "4gbit", "--strategy", "p3", "--steps", "500"]


def _can_mount() -> bool:
    folder = tempfile.mkdtemp()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", folder], capture_output=True
    )
    if mounted.returncode == 0:
        subprocess.run(["umount", folder], check=True)
    shutil.rmtree(folder, ignore_errors=True)
    return mounted.returncode == 0


needs_mount = pytest.mark.skipif(
    shutil.which("mount") is None or not _can_mount(), reason="no file system can be mounted here"
)


class Started:
    """`gradlane lab bandwidth` under way, with its own folder for temporary files."""

    def __init__(self, output: Path, scratch: Path, arguments: list[str] | None = None) -> None:
        self.scratch = scratch
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(scratch),
            # Torch's compiler keeps a cache for all programs of this machine.
            "TORCHINDUCTOR_CACHE_DIR": str(scratch.parent / "inductor"),
        }
        command = [sys.executable, "-m", "gradlane", "lab", "bandwidth", *(arguments or COMMAND)]
        command += ["--workers", str(WORKERS), "--output", str(output)]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def ranks(self, count: int = WORKERS) -> list[int]:
        """Wait until so many ranks have been started; returns them, and the one that forks them."""
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and self.process.poll() is None:
            for child in children_of(self.process.pid):
                found = children_of(child)
                if len(found) >= count:
                    return [*found, child]
            time.sleep(0.01)
        raise AssertionError(f"no ranks were started: {self.process.communicate()}")

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns status and errors."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def nothing_is_left(started: Started, ranks: list[int]) -> None:
    """The ranks are gone, so their anonymous namespaces are; and no temporary file stays."""
    assert not [rank for rank in ranks if Path(f"/proc/{rank}").exists()]
    assert list(started.scratch.iterdir()) == []


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    one = Started(tmp_path / "results", scratch)
    yield one
    if one.process.poll() is None:
        one.process.kill()
        one.process.communicate()


@needs_namespaces
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("number", "status", "message", "ranks_up"),
    [(signal.SIGINT, 130, "interrupted", 0), (signal.SIGTERM, 143, "terminated", WORKERS)],
)
def test_a_signal_ends_a_preset_in_order(
    started: Started, number: signal.Signals, status: int, message: str, ranks_up: int
) -> None:
    """While torch is being loaded for the ranks, and while they are up."""
    ranks = started.ranks(ranks_up)
    started.process.send_signal(number)
    found, errors = started.end()
    assert found == status, errors
    assert errors.strip() == message, "one word, and no traceback"
    nothing_is_left(started, ranks)


@needs_namespaces
@pytest.mark.timeout(120)
def test_a_rank_that_dies_is_named(started: Started) -> None:
    ranks = started.ranks()
    os.kill(ranks[1], signal.SIGKILL)
    status, errors = started.end()
    assert status == 1
    assert "rank 1" in errors and "SIGKILL" in errors and "Traceback" not in errors
    nothing_is_left(started, ranks)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.timeout(180)
def test_a_killed_preset_goes_on(tmp_path: Path) -> None:
    """SIGKILL after the first row: nothing is left, and the same command measures the rest.

    A row that a busy machine spoilt is no evidence and measured again, so that nothing is said of
    such ones but that they are there.
    """
    scratch, output = tmp_path / "scratch", tmp_path / "results"
    scratch.mkdir()
    arguments = ["--workload", "resnet50", "--rate", "300mbit,200mbit", "--dilation", "1"]
    arguments += ["--strategy", "none", "--steps", "1"]
    first = Started(output, scratch, arguments)
    processes = first.ranks()
    deadline_s = time.monotonic() + 90
    while not (before := read_rows(output / "results.json")):
        assert time.monotonic() < deadline_s and first.process.poll() is None
        time.sleep(0.02)
    first.process.kill()
    first.end()
    while any(Path(f"/proc/{process}").exists() for process in processes):
        assert time.monotonic() < deadline_s, "ranks outlive the one who started them"
        time.sleep(0.02)
    second = Started(output, scratch, arguments)
    status, errors = second.end()
    assert status == 0 or "evidence" in errors, errors
    after = {row.rate_bps: row for row in read_rows(output / "results.json")}
    assert after.keys() == {200_000_000, 300_000_000}
    for row in before:
        assert row.cpu_bound or after[row.rate_bps].step_s == row.step_s
    assert not list(output.glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 200 kB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(folder)]
    subprocess.run(command, check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@needs_mount
def test_a_full_disk_is_found_before_anything_is_measured(small_disk: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    started = Started(small_disk / "results", scratch)
    status, errors = started.end()
    assert status == 1
    assert "MB of free space" in errors and "--output" in errors and "Traceback" not in errors
    nothing_is_left(started, [])


@needs_mount
def test_a_disk_that_fills_up_keeps_what_was_written(small_disk: Path) -> None:
    """The rows before are whole, no half file stays, and the message says what to do."""
    folder = PresetFolder(small_disk)
    before = Row(workload="resnet50", strategy="p3", rate_bps=1, step_s_median=1.0)
    save_rows([before], folder.results)
    (small_disk / "other").write_bytes(b"x" * 150_000)
    with pytest.raises(LabError, match=r"No space left on device; make room"):
        save_rows([replace(before, step_s=[0.25] * 50_000)], folder.results)
    assert read_rows(folder.results) == [before]
    with pytest.raises(LabError, match=re.escape(str(folder.table))):
        folder.write_table([{"name": "x" * 1000}] * 200)
    assert {path.name for path in small_disk.iterdir()} == {"results.json", "other"}


def test_other_failures_to_write_say_what_and_where() -> None:
    text = str(write_failure(Path("/there/results.json"), OSError(errno.EROFS, "read-only")))
    assert text == "cannot write /there/results.json: read-only"


def _can_drop_privilege() -> bool:
    try:
        return subprocess.run([*UNPRIVILEGED, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_drop_privilege(), reason="unshare cannot make a user namespace here")
def test_without_privilege_the_advice_is_given(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GRADLANE_LAB_USER_NAMESPACE": "1",
    }
    tmp_path.chmod(0o777)
    command = [*UNPRIVILEGED, sys.executable, "-m", "gradlane", "lab", "bandwidth", *COMMAND]
    command += ["--output", str(tmp_path / "results")]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert child.returncode == 1
    assert "--cap-add" in child.stderr and "Traceback" not in child.stderr
