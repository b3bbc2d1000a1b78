"""The command line: exit statuses, messages without tracebacks, and files that are written.

Commands run in this process where they end before anything is started, else as a child.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gradlane.cli import main as cli
from gradlane.cli.profile import unsteady
from gradlane.formats.profile import BatchTime
from tests.children import descendants_of
from tests.command_line import run
from tests.namespaces import needs_namespaces


def test_help_names_the_commands(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Help needs nothing and succeeds."""
    status, out, _ = run(monkeypatch, capsys, "--help")
    assert status == 0
    for command in ("demo", "lab", "report", "version"):
        assert command in out


def test_help_is_wrapped_by_the_terminal_and_not_by_its_source(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", 400)
    monkeypatch.setenv("COLUMNS", "400")
    status, out, _ = run(monkeypatch, capsys, "store", "--help")
    assert status == 0
    first, last = "Every rank is started with GRADLANE_STORE=HOST:PORT", "refuse what others wrote."
    assert any(first in line and last in line for line in out.splitlines())


READERS = {
    "lab predict FILE": "lab run --json",
    "report FILE": "lab run --json",
    "whatif FILE --workers 4 --rate 10gbit": "gradlane profile --json",
    "plan FILE --workers 4 --rate 10gbit": "gradlane profile --json",
    "lab run --workload resnet50 --profile FILE": "gradlane profile --json",
    "trace merge FILE --output joined.json": "Monitoring(trace=",
    "whatif resnet50 --workers 4 --rate 10gbit --costs FILE": "lab calibrate --json",
    "plan resnet50 --workers 4 --rate 10gbit --costs FILE": "lab calibrate --json",
    "lab grid --costs FILE": "lab calibrate --json",
    "whatif resnet50 --workers 4 --rate 10gbit --additions FILE": "gradlane additions",
}
"""Commands that read a file, and what makes one."""


@pytest.mark.parametrize("content", [None, "no JSON", '{"a": 1}'])
@pytest.mark.parametrize("command", READERS)
def test_a_file_that_cannot_be_read_is_refused_with_what_makes_one(
    command: str,
    content: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("file.json").write_text(content)
    status, _, err = run(monkeypatch, capsys, *command.replace("FILE", "file.json").split())
    assert status == 2
    assert "file.json" in err and READERS[command] in err
    assert "Traceback" not in err


def test_help_does_not_import_torch() -> None:
    """Mistakes are answered at once: the import alone takes seconds."""
    code = "import sys, gradlane.cli.main; sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


@pytest.mark.parametrize(
    ("command", "most", "without"),
    [
        # The 21 modules that were there when this was written, and a few.
        ([], 26, ("gradlane.planning", "gradlane.lab", "gradlane.training.options.options")),
        (["store", "--help"], 26, ("gradlane.planning", "gradlane.lab", "gradlane_papers")),
        (["whatif", "--help"], 90, ("gradlane.lab", "gradlane_papers")),
    ],
)
def test_a_command_loads_its_own_options_alone(
    command: list[str], most: int, without: tuple[str, ...]
) -> None:
    code = (
        "import sys; from gradlane.cli.main import app\n"
        "if sys.argv[1:]: app(standalone_mode=False)\n"
        "print(*(one for one in sys.modules if one.startswith('gradlane')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = done.stdout.splitlines()[-1].split()
    assert len(loaded) <= most, loaded
    assert not [one for one in loaded if one.startswith(without)]


def test_version_prints_what_it_writes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Text and file say the same."""
    path = tmp_path / "version.json"
    status, out, _ = run(monkeypatch, capsys, "version", "--json", str(path))
    assert status == 0
    versions = json.loads(path.read_text())
    assert dict(line.split(" ", 1) for line in out.splitlines()) == versions
    assert versions["python"] == sys.version.split()[0]
    assert run(monkeypatch, capsys, "--version") == (0, out, "")


def test_a_new_secret_is_its_owners_alone_and_is_not_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, written = tmp_path / "job.secret", tmp_path / "secret.json"
    before = os.umask(0)
    try:
        status, out, _ = run(
            monkeypatch, capsys, "secret", "new", str(path), "--json", str(written)
        )
    finally:
        os.umask(before)
    assert status == 0 and path.stat().st_mode & 0o777 == 0o600
    secret = path.read_text().strip()
    assert len(secret) == 64 and int(secret, 16)
    assert secret not in out and f"export GRADLANE_SECRET_FILE={path}" in out
    content = json.loads(written.read_text())
    assert content == {
        "path": str(path),
        "bits": 256,
        "environment": {"GRADLANE_SECRET_FILE": str(path)},
    }
    status, _, errors = run(monkeypatch, capsys, "secret", "new", str(path))
    assert status == 2 and "exists; give another path" in errors
    assert path.read_text().strip() == secret


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "alexnet2"], "alexnet2"),
        (["--workload", "resnet50", "--strategy", "p4"], "p4"),
        (["--workload", "resnet50", "--rate", "fast"], "fast"),
        (["--workload", "resnet50", "--workers", "1"], "workers is 1"),
        (["--workload", "resnet50", "--json", "/nowhere/out.json"], "/nowhere"),
        (["--workload", "resnet50", "--html", "/"], "folder"),
        (["--workload", "resnet50", "--profile", "/nowhere.json"], "/nowhere.json"),
    ],
)
def test_wrong_arguments_end_with_two_and_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    """The sentence names what was wrong; there is no traceback."""
    status, _, errors = run(monkeypatch, capsys, "lab", "run", *arguments)
    assert status == 2
    assert message in errors
    assert "Traceback" not in errors


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--debug` the error itself comes through."""
    arguments = ["gradlane", "--debug", "lab", "run", "--workload", "alexnet2"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(ValueError, match="alexnet2"):
        cli.main()


def test_a_missing_optional_package_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the lab's extras, the message says how to install them."""
    monkeypatch.setitem(sys.modules, "pyroute2", None)
    for name in [name for name in sys.modules if name.startswith("gradlane.lab.")]:
        # A package keeps its modules as attributes too: those come back with them.
        parent, _, child = name.rpartition(".")
        if hasattr(sys.modules[parent], child):
            monkeypatch.setattr(sys.modules[parent], child, sys.modules[name])
    for name in [name for name in sys.modules if name.startswith("gradlane.lab.")]:
        monkeypatch.delitem(sys.modules, name)
    status, _, errors = run(monkeypatch, capsys, "lab", "run", "--workload", "resnet50")
    assert status == 1
    assert "pyroute2" in errors
    assert "gradlane[lab]" in errors


@pytest.mark.parametrize("content", [None, "not json", "{}", "[]", '[{"kernel": "sum"}]'])
def test_a_report_of_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    content: str | None,
) -> None:
    """The file is named, whether it is missing or holds no rows."""
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    status, _, errors = run(monkeypatch, capsys, "report", str(path))
    assert status == 2
    assert str(path) in errors
    assert not path.with_suffix(".html").exists()


@needs_namespaces
def test_an_interrupted_run_leaves_nothing() -> None:
    """After Ctrl-C: status 130, no traceback, and no rank alive."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "gradlane", "lab", "run", "--workload", "resnet50"]
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline_s = time.monotonic() + 100
    started: list[int] = []
    try:
        # The process that forks the ranks, and the four; later those that keep processors awake.
        while len(started) < 5 and time.monotonic() < deadline_s:
            started = descendants_of(child.pid)
            time.sleep(0.02)
        assert len(started) >= 5
    except BaseException:
        child.kill()
        child.communicate()
        raise
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=100)
    assert child.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in started)


UNPRIVILEGED = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--"]


def _can_drop_privilege() -> bool:
    try:
        return subprocess.run([*UNPRIVILEGED, "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.skipif(not _can_drop_privilege(), reason="unshare cannot make a user namespace here")
def test_without_privilege_a_user_namespace_is_entered() -> None:
    """An ordinary account that may not make network namespaces starts anew where it may."""
    code = (
        "from gradlane.lab.cluster.privilege import ensure_namespaces, why_no_namespaces\n"
        "assert why_no_namespaces() is not None\n"
        "ensure_namespaces(['version'])\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [*UNPRIVILEGED, sys.executable, "-c", code]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert child.returncode == 0, child.stderr
    assert "python " in child.stdout


@pytest.mark.skipif(not _can_drop_privilege(), reason="unshare cannot make a user namespace here")
def test_without_any_way_the_advice_is_given() -> None:
    """Status 1 and how to get the privilege, once even the user namespace did not help."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "GRADLANE_LAB_USER_NAMESPACE": "1",
    }
    command = [*UNPRIVILEGED, sys.executable, "-m", "gradlane"]
    command += ["lab", "run", "--workload", "resnet50"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert child.returncode == 1
    assert "--cap-add" in child.stderr
    assert "Traceback" not in child.stderr


WRITES: dict[str, list[str]] = {
    "version": ["version"],
    "whatif": ["whatif", "resnet50", "--workers", "2", "--rate", "1gbit"],
    "plan": ["plan", "resnet50", "--workers", "2", "--rate", "1gbit", "--budget-s", "0.1"],
    "doctor": ["doctor"],
    "lab predict": ["lab", "predict", "ROWS"],
    "lab grid": ["lab", "grid", "ROWS"],
    "secret new": ["secret", "new", "ABSENT"],
}
"""Commands with --json that need no cluster; ROWS stands for a file of measured rows, ABSENT for
one that is not there."""
MEASURES: dict[str, tuple[str, str, str, Any]] = {
    "lab transport": ("gradlane.lab.transport", "measurement.run_transport", "tables", []),
    "lab calibrate": (
        "gradlane.lab.calibration",
        "calibrate.run_calibration",
        "calibrate",
        {"constants": {}},
    ),
}
"""Commands that measure first: the package, what measures, the module that prints, a result."""
OTHERS = {
    "lab run",
    "demo",
    "probe",
    "profile",
    "reproduce",
    "serve",
    "store",
    "watch",
    "additions",
}
OTHERS |= {"secret sign", "additions"}
"""Those whose file is there since their first run (`lab run`, `demo`), or that need other ranks, a
session or checkpoints, or that print while they measure."""


def test_commands_with_a_file_are_all_known() -> None:
    """A new one has to be among those that are tested to write it before they print."""
    root = cli.all_commands()
    found, groups = set(), [("", root)]
    for prefix, group in groups:
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                groups.append((f"{name} ", command))
            elif any("--json" in option.opts for option in command.params):
                found.add(f"{prefix}{name}")
    assert found == {*WRITES, *MEASURES, *OTHERS}


@pytest.mark.parametrize("command", WRITES)
def test_files_are_written_before_anything_is_printed(command: str, tmp_path: Path) -> None:
    """Standard output is a disk without room: the command fails, and its file is whole."""
    path, rows = tmp_path / "content.json", tmp_path / "rows.json"
    row = {"workload": "resnet50", "strategy": "p3", "rate_bps": 4e9, "step_s_median": 0.35}
    row |= {"workers": 4, "dilation": 6.7, "compute_s": 0.3, "codec": "raw", "goodput_bps": 3.8e9}
    row |= {"machine": {"processors": 2}, "versions": {"kernel": "6", "torch": "2"}}
    rows.write_text(json.dumps([row]), encoding="utf-8")
    paths = {"ROWS": str(rows), "ABSENT": str(tmp_path / "absent")}
    arguments = [paths.get(word, word) for word in WRITES[command]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with open("/dev/full", "w", encoding="utf-8") as full:
        child = subprocess.run(
            [sys.executable, "-u", "-m", "gradlane", *arguments, "--json", str(path)],
            stdout=full,
            stderr=subprocess.PIPE,
            env=environment,
            text=True,
            check=False,
        )
    assert child.returncode == 1 and "No space left on device" in child.stderr, child.stderr
    assert json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("command", MEASURES)
def test_what_was_measured_is_written_before_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    command: str,
) -> None:
    package, measures, prints, result = MEASURES[command]
    path = tmp_path / "content.json"

    def fails(*_: object) -> None:
        raise OSError("there is no terminal")

    monkeypatch.setattr("gradlane.lab.cluster.privilege.ensure_namespaces", lambda _: None)
    monkeypatch.setattr(f"{package}.{measures}", lambda *_: result)
    printer = "print_transport" if command == "lab transport" else "print_constants"
    monkeypatch.setattr(f"{package}.{prints}.{printer}", fails)
    status, _, errors = run(monkeypatch, capsys, *command.split(), "--json", str(path))
    assert status == 1 and "no terminal" in errors
    assert json.loads(path.read_text(encoding="utf-8")) == result


def test_a_reader_that_goes_away_costs_no_result(tmp_path: Path) -> None:
    """As `gradlane ... | head` does: what was printed before the files are written is not lost."""
    path = tmp_path / "whatif.json"
    arguments = ["whatif", "resnet50", "--workers", "4", "--rate", "1gbit", "--json", str(path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    reader, writer = os.pipe()
    os.close(reader)
    child = subprocess.run(
        [sys.executable, "-u", "-m", "gradlane", *arguments],
        stdout=writer,
        stderr=subprocess.PIPE,
        env=environment,
        check=False,
    )
    os.close(writer)
    assert (child.returncode, child.stderr) == (0, b"")
    assert len(json.loads(path.read_text(encoding="utf-8"))["rows"]) == 2


@pytest.mark.parametrize(
    ("quartiles_ms", "is_told"), [((325, 1283), True), ((800, 1210), True), ((800, 1190), False)]
)
def test_a_profile_of_unsteady_steps_says_so(quartiles_ms: tuple[int, int], is_told: bool) -> None:
    lower_s, upper_s = (one / 1e3 for one in quartiles_ms)
    note = unsteady(BatchTime(20, 0.9, lower_s, upper_s))
    assert (note is not None) == is_told
    assert note is None or (str(quartiles_ms[0]) in note and "900 ms" in note)
    assert unsteady(None) is None
