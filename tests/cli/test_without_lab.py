"""The planning commands in an environment without the extra `lab`."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.built import needs_core
from tests.paths import ROOT

EXTRA = ("pyroute2", "plotly", "sklearn", "scikit_learn", "scipy", "joblib")
"""Packages of the extra and what they bring, as they are called in site-packages."""

RUN = """
import sys
from gradlane.cli.main import main
options = [*sys.modules]
status = 0
try:
    main()
except SystemExit as end:
    status = end.code
loaded = [name for name in sys.modules if name.startswith("gradlane.lab") and name not in options]
sys.exit(status or (f"loaded {loaded}" if loaded else 0))
"""

TRAINING = """
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(8):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the interpreter of an environment with all packages but those of the extra."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    inside = {"base": str(folder), "platbase": str(folder)}
    site = Path(sysconfig.get_path("purelib", "venv", inside))
    # This environment's own packages come first, then those that it takes from other places.
    for packages in map(Path, sys.path):
        for entry in packages.iterdir() if any(packages.glob("*.dist-info")) else ():
            is_extra = entry.name.lower().startswith(EXTRA)
            if not is_extra and entry.suffix != ".pth" and not (site / entry.name).exists():
                (site / entry.name).symlink_to(entry)
    return folder / "bin" / "python"


def run(python: Path, folder: Path, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    program = folder / "run.py"
    program.write_text(RUN)
    done = subprocess.run(
        [str(python), *launcher, str(program), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(
    importlib.util.find_spec("pyroute2") is None, reason="the extra is not installed here"
)
def test_the_environment_lacks_the_extra(python: Path) -> None:
    for package in ("pyroute2", "plotly", "sklearn"):
        done = subprocess.run([str(python), "-c", f"import {package}"], capture_output=True)
        assert b"ModuleNotFoundError" in done.stderr


def test_a_page_is_refused_before_the_work_for_it(python: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"pip install 'gradlane\[lab\]'"):
        run(python, tmp_path, "whatif", "missing.json", "--html", "page.html")


@pytest.mark.slow
@needs_core
def test_planning_commands_run_without_the_lab(python: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING)
    run(python, tmp_path, "profile", "--steps", "5", "--warmup", "2", "train.py")
    table = run(python, tmp_path, "whatif", "profile.json", "--workers", "4", "--rate", "1gbit")
    assert "p3" in table
    run(
        python,
        tmp_path,
        *("plan", "profile.json", "--workers", "4", "--rate", "1gbit", "--json", "plan.json"),
    )
    assert json.loads((tmp_path / "plan.json").read_text())["format"] == "gradlane-plan"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    options = ("--window-s", "0.1", "--json", "links.json")
    run(python, tmp_path, "probe", *options, launcher=launcher)
    assert json.loads((tmp_path / "links.json").read_text())["workers"] == 2
