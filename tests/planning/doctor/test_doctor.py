"""`gradlane doctor`: each check on a machine made for it, and real ranks with a fault between."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.formats.link_report import LinkReport, PortFigures, RoundTrip
from gradlane.formats.provenance import NOT_INSTALLED
from gradlane.planning.doctor import cluster, machine
from gradlane.planning.doctor.findings import Finding, Verdict, merged, ok, warning
from gradlane.planning.doctor.machine import LocalMachine, MachineFacts
from gradlane.planning.doctor.reach import unreached
from gradlane.planning.probe.stream_endpoint import listen_on
from gradlane.training import torch_internals
from gradlane.training.options.option_groups import Network
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.paths import ROOT
from tests.ports import reserve_port

FACTS = MachineFacts("a", "0123", "3.11.7", "2.15.0", "ens5f0", "10.0.0.1", 1500, 10e9)


def findings_of(
    root: Path, environment: dict[str, str] | None = None, **network: Any
) -> dict[str, Finding]:
    found = LocalMachine(environment or {}, Network(**network), root).examine()
    return {one.check: one for one in found}


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_a_machine_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"python": "3.11.7", "torch": NOT_INSTALLED, "gradlane": "0.1.0"}
    monkeypatch.setattr(machine, "package_versions", lambda: versions)
    found = findings_of(tmp_path)
    assert found["torch"].verdict is Verdict.FAULT and "accelerators" not in found


@pytest.mark.parametrize(
    ("command", "words"),
    [("doctor", "cannot be loaded"), ("probe", "package torch is missing: `pip install torch`")],
)
def test_commands_say_that_torch_cannot_be_loaded(command: str, words: str) -> None:
    code = "import sys; sys.modules['torch'] = None; from gradlane.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, command],
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1 and words in done.stdout + done.stderr


@needs_core
def test_a_machine_that_lacks_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"python": "3.11.7", "torch": "2.1.0+cpu", "gradlane": "0.1.0"}
    monkeypatch.setattr(machine, "package_versions", lambda: versions)
    monkeypatch.setattr(machine, "clock_state", lambda: 5)
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    write(tmp_path, "proc/sys/net/core/wmem_max", "65536\n")
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: 570.86\n")
    write(tmp_path, "sys/class/net/lo/mtu", "1280\n")
    write(tmp_path, "sys/fs/cgroup/cpu.max", "100000 100000\n")
    found = findings_of(
        tmp_path, {"MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2"}, secret="short"
    )
    assert found["secret"].verdict is Verdict.FAULT
    assert "has 30 bits" in found["secret"].found and "secret new" in found["secret"].remedy
    assert found["torch"].verdict is Verdict.FAULT
    assert "2.4 or newer" in found["torch"].remedy
    for check, words in {
        "accelerators": "NVRM version: 570.86",
        "network interface": "reaches this machine only",
        "MTU": "1280 bytes on lo",
        "send buffers": "net.core.wmem_max is 65,536 bytes",
        "/dev/shm": "missing",
        "open files": "at most 256",
        "processors": "limited to 1, for 2 ranks",
        "clock": "not synchronized",
    }.items():
        assert found[check].verdict is Verdict.WARNING, check
        assert words in found[check].found
        assert found[check].remedy


@needs_core
def test_an_interface_that_is_not_there_and_a_secret_file_that_is_not(tmp_path: Path) -> None:
    found = findings_of(tmp_path, interface="nonesuch0", secret_file=str(tmp_path / "key"))
    assert found["network interface"].verdict is Verdict.FAULT
    assert "'nonesuch0'; this machine has" in found["network interface"].found
    assert found["secret"].verdict is Verdict.FAULT
    assert "cannot be read" in found["secret"].found


@needs_core
@pytest.mark.parametrize(("without", "verdict"), [(None, "fault"), ("it is slower", "warning")])
def test_a_torch_that_lacks_a_part(
    without: str | None, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = torch_internals.Internal("_C._part", "sees gradients", "2.15", without)
    monkeypatch.setattr(torch_internals, "lost", lambda: [part])
    found = findings_of(Path("/"))["torch's internals"]
    assert found.verdict is Verdict(verdict)
    assert "lacks torch._C._part, by which gradlane sees gradients" in found.found
    assert found.remedy == "pip install torch==2.15.*"


@needs_core
def test_this_machine_can_train() -> None:
    found = findings_of(Path("/"), {"MASTER_ADDR": "127.0.0.1"})
    assert not [one for one in found.values() if one.verdict is Verdict.FAULT]


@needs_core
def test_a_job_without_a_secret_is_not_called_well() -> None:
    found = findings_of(Path("/"))["secret"]
    assert found.verdict is Verdict.WARNING and "secret new" in found.remedy
    found = findings_of(Path("/"), secret="0123456789abcdef" * 2)["secret"]
    assert found.verdict is Verdict.OK


def test_behind_address_translation_all_addresses_are_listened_on() -> None:
    """The advertised address is not one of this machine's, for a session and for the doctor."""
    found = LocalMachine({}, Network(advertise="192.0.2.55"), Path("/")).listening_addresses()
    assert found == ["192.0.2.55", "0.0.0.0"]
    with listen_on(found, None) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"


def test_differences_between_ranks_are_named() -> None:
    other = replace(FACTS, host="b", build="4567", torch="2.14.0", mtu=9000)
    found = cluster.differences([FACTS, FACTS, other])
    by_check = {one.check: one for one in found}
    assert by_check["the same build"].verdict is Verdict.FAULT
    assert by_check["the same build"].found == "0123 on ranks 0, 1; 4567 on rank 2"
    assert by_check["the same torch"].verdict is Verdict.WARNING
    assert by_check["the same mtu"].found == "1500 on ranks 0, 1; 9000 on rank 2"
    assert by_check["the same python"].verdict is Verdict.OK
    many = cluster.differences([*[FACTS] * 12, other])[0].found
    assert many == "0123 on ranks 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11; 4567 on rank 12", "all"
    assert cluster.clocks([100.0, 103.5, 100.1]).found.startswith("up to 3.5 s apart (rank 1")
    assert cluster.clocks([100.0, 100.1]).verdict is Verdict.OK


def test_a_port_below_its_name_is_found() -> None:
    ports = (PortFigures(0, None, None, 9e9, 9.1e9), PortFigures(1, None, None, 9e9, 1.2e9))
    links = LinkReport(2, 1.0, ports, (RoundTrip(0, 1, 1e-4),))
    (slow,) = cluster.goodputs(links, [FACTS, FACTS])
    assert slow.verdict is Verdict.WARNING
    assert "rank 1 (ens5f0) carries 1.2 Gbit/s" in slow.found and "10 Gbit/s" in slow.found
    assert "--rate 1200mbit" in slow.remedy
    unknown = replace(FACTS, rate_bps=0.0)
    (well,) = cluster.goodputs(links, [unknown, unknown])
    assert well.verdict is Verdict.OK


def test_equal_findings_are_joined_and_texts_of_ranks_escaped() -> None:
    one, other = ok("clock", "synchronized"), warning("clock", "not synchronized", "run chrony")
    assert [(found.found, found.ranks) for found in merged([[one], [other], [one]])] == [
        ("synchronized", (0, 2)),
        ("not synchronized", (1,)),
    ]
    sent = {"check": "\x1b[2J", "verdict": "ok", "found": "a\nb", "remedy": ""}
    assert Finding.from_json(sent) == ok("\\x1b[2J", "a\\nb")
    with pytest.raises(ValueError, match="without 'found'"):
        Finding.from_json({"check": "", "verdict": "ok"})


def test_ranks_that_are_not_reached_are_told_with_the_reason() -> None:
    with listen_on(["127.0.0.1"], None) as listener:
        closed = reserve_port()
        port = listener.getsockname()[1]
        found = unreached({1: ("127.0.0.1", port), 2: ("127.0.0.1", closed)})
    assert list(found) == [2] and "refused" in found[2]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=r"cannot listen on 127\.0\.0\.1: "):
            listen_on(["127.0.0.1"], (port, port))


BLOCKED = """
import os
from gradlane.planning.doctor import cluster
real = cluster.unreached
def unreached(peers):
    found = real(peers)
    if os.environ["RANK"] == "1":
        found[0] = "timed out"
    return found
cluster.unreached = unreached
from gradlane.cli.main import main
main()
"""


def ranks(
    programs: ForkedPrograms, folder: Path, program: str = "gradlane"
) -> list[tuple[int, str, str]]:
    """Return exit status, output and errors of two ranks; what they find is in `found.json`."""
    port = str(reserve_port())
    files = {rank: (folder / f"output-{rank}", folder / f"errors-{rank}") for rank in range(2)}
    for rank, (output, errors) in files.items():
        programs.start(
            str(output),
            program=program,
            arguments=["doctor", "--window-s", "0.1", "--json", str(folder / "found.json")],
            output=str(output),
            errors=str(errors),
            environment={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            },
        )
    return [
        (programs.wait(str(output), 120), output.read_text(), errors.read_text())
        for output, errors in files.values()
    ]


@needs_core
def test_real_ranks_are_examined_together(programs: ForkedPrograms, tmp_path: Path) -> None:
    (first, out, err), (second, silent, _) = ranks(programs, tmp_path)
    assert (first, second) == (0, 0), err
    assert "all 2 (each pair, both ways)" in out and "Ready to train" in out
    assert "all_reduce of 4 bytes over all ranks in" in out or "not looked at" in out
    assert not silent
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["fit"] and len(found["ranks"]) == 2 and found["links"]["rate_bps"] > 0


@needs_core
def test_a_blocked_direction_is_a_fault_that_names_both(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    (tmp_path / "blocked.py").write_text(BLOCKED)
    (first, out, _), _ = ranks(programs, tmp_path, str(tmp_path / "blocked.py"))
    assert first == 1 and "Not ready: 1 fault" in out
    found = json.loads((tmp_path / "found.json").read_text())
    (fault,) = [one for one in found["findings"] if one["verdict"] == "fault"]
    assert fault["found"].startswith("rank 1 does not reach rank 0 at 127.0.0.1:")
    assert "ports=(20000, 20100)" in fault["remedy"] and found["links"] is None
