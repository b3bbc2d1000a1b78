"""The files in `examples/launch` start ranks that find each other."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.built import needs_core
from tests.paths import ROOT
from tests.ports import reserve_port

FOLDER = ROOT / "examples" / "launch"
PROGRAM = """
import os

import torch

import gradlane

model = torch.nn.Linear(2, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
with torch.no_grad():
    model.weight.zero_()
with gradlane.init(going_on=True, monitoring=gradlane.Monitoring(summary=False)) as session:
    session.prepare(model, optimizer)
    model(torch.full((1, 2), session.rank + 1.0)).sum().backward()
    optimizer.step()
    line = f"{session.rank} of {session.world_size}: {model.weight.tolist()[0]}"
print(f"{line} {os.environ['GRADLANE_STORE']}\\n", end="", flush=True)
"""
SRUN = """#!/bin/sh
echo "$@" > "$RECORD"
while [ "${1#-}" != "$1" ]; do shift; done
pids=
for rank in 0 1 2 3; do
    SLURM_PROCID=$rank SLURM_LOCALID=$rank SLURM_STEP_NUM_TASKS=4 SLURM_STEP_ID=0 "$@" &
    pids="$pids $!"
done
for pid in $pids; do wait "$pid" || exit 1; done
"""


@pytest.fixture
def commands(tmp_path: Path) -> Path:
    """A folder with the commands that a cluster's machines have; all are one machine here."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scripts = {
        "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n',
        "gradlane": f'#!/bin/sh\nexec "{sys.executable}" -m gradlane "$@"\n',
        "scontrol": "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.2\n",
        "srun": SRUN,
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "train.py").write_text(PROGRAM)
    return folder


def environment(commands: Path, **more: str) -> dict[str, str]:
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("GRADLANE_", "SLURM_")) and "RANK" not in key
    }
    path = f"{commands}:{kept['PATH']}"
    return {
        **kept,
        "PYTHONPATH": str(ROOT / "python"),
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        **more,
    }


@contextlib.contextmanager
def hosted(command: list[str], around: dict[str, str]) -> Iterator[None]:
    """Run a store until the end, from when it is ready."""
    with subprocess.Popen([*command, "--json"], env=around, stdout=subprocess.PIPE) as store:
        assert store.stdout is not None
        try:
            assert json.loads(store.stdout.readline())
            yield
        finally:
            store.terminate()


def check(said: str, store: str) -> None:
    mean = [-2.5, -2.5]
    assert sorted(said.splitlines()) == [f"{rank} of 4: {mean} {store}" for rank in range(4)]


@needs_core
def test_a_batch_file_of_slurm_starts_all_ranks(commands: Path, tmp_path: Path) -> None:
    record, port = tmp_path / "srun", reserve_port()
    script, own_port = (FOLDER / "slurm.sbatch").read_text(), "$((29600 + SLURM_JOB_ID % 1000))"
    assert own_port in script
    path = tmp_path / "slurm.sbatch"
    path.write_text(script.replace(own_port, str(port)))
    job = {"RECORD": str(record), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-4]"}
    ran = subprocess.run(
        ["bash", str(path), str(tmp_path / "train.py")],
        env=environment(commands, **job),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    check(ran.stdout, f"127.0.0.1:{port}")
    given = record.read_text().split()
    assert given[:3] == ["--no-kill", "--kill-on-bad-exit=0", "--wait=0"]
    for line in ("--no-kill", "--nodes=4", "--ntasks-per-node=8"):
        assert f"#SBATCH {line}\n" in script


@needs_core
def test_the_pods_of_a_manifest_find_each_other(commands: Path, tmp_path: Path) -> None:
    text = (FOLDER / "kubernetes.yaml").read_text()
    service, deployment, job = parts = text.split("---\n")
    store, rank = (json.loads(re.findall(r"command: (\[.*\])", part)[0]) for part in parts[1:])
    named = dict(re.findall(r"- name: (\w+)\n +value: \"?([^\"\n]+)\"?\n", job))
    host, port = named["GRADLANE_STORE"].split(":")
    assert f"name: {host}\n" in service and f"port: {port}\n" in service
    assert f"containerPort: {port}\n" in deployment and f"port: {port}\n" in deployment
    assert int(named["WORLD_SIZE"]) == int(re.findall(r"completions: (\d+)", job)[0])
    secret = tmp_path / "gradlane.secret"
    around = environment(commands)
    subprocess.run([commands / "gradlane", "secret", "new", str(secret)], env=around, check=True)
    here = f"127.0.0.1:{reserve_port()}"
    named |= {"GRADLANE_STORE": here, "GRADLANE_JOB": "uid", "GRADLANE_SECRET": secret.read_text()}
    hosting = [str(commands / store[0]), *store[1:], "--port", here.split(":")[1]]
    with hosted(hosting, around):
        pods = [
            subprocess.Popen(
                rank,
                env={**around, **named, "JOB_COMPLETION_INDEX": str(index)},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(4)
        ]
        said = "".join(pod.communicate(timeout=120)[0] for pod in pods)
    assert [pod.returncode for pod in pods] == [0] * 4
    check(said, here)
