"""Runs the tests of training's kernel with other versions of Python and torch.

`python -m tests.version_matrix` makes an environment for each pair, one after the other, runs the
tests there against this tree and its extension, which fits them all, writes the outcomes into
`docs/research/torch-versions.json` and the table of `docs/support.md` from that. Pairs that are
not run keep their rows. An environment has torch's CUDA packages, 4 to 7 GB, since the registry has
no others for x86-64. CI does not run it.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.paths import ROOT

PAIRS = ("3.10:2.4.0", "3.11:2.7.1", "3.13:2.11.0", "3.13:2.15.0")
"""Python and torch."""
TESTS = ("tests/training/test_torch_internals.py", "tests/training/model")
SELECTION = "unit and not slow"
"""Processes, sockets and kills do not depend on torch, and take most of the time."""
RESULTS = ROOT / "docs" / "research" / "torch-versions.json"
PAGE = ROOT / "docs" / "support.md"
MARKS = ("<!-- versions: begin -->", "<!-- versions: end -->")
OLDEST = ROOT / "constraints-oldest.txt"
PACKAGES = ("numpy", "typer", "rich", "pyroute2", "pytest", "pytest-timeout", "pytest-xdist")
ROOM_GB = 9
_COPIED = "each gradient is copied before it is sent"


# ---- what came out


def read_outcomes(report: Path) -> dict[str, Any]:
    """Return `passed` (a count), `failed` (names), `skipped` (counts by reason) of a report."""
    passed, failed, skipped = 0, [], Counter[str]()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif skip is not None:
            skipped[skip.get("message", "")] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": sorted(failed), "skipped": dict(sorted(skipped.items()))}


def probe() -> dict[str, Any]:
    """Return what this Python's torch has of the parts that gradlane uses without a promise."""
    import torch

    from gradlane.training import torch_internals
    from gradlane.training.modules.gradient_intake import is_alone

    torch_internals.look_up_all()
    alone: list[bool] = []
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
        lambda one: alone.append(is_alone(one.grad))
    )
    (parameter * torch.tensor([2.0, 3.0])).sum().backward()  # type: ignore[no-untyped-call]
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__.partition("+")[0],
        "lost": {one.name: one.without for one in torch_internals.lost()},
        "sends_gradients_uncopied": alone == [True],
    }


def release_of(torch: str) -> str:
    """Return the release of a version: `2.4.0` is of `2.4`."""
    return ".".join(torch.split(".")[:2])


# ---- the page


def _differences(run: dict[str, Any]) -> Iterable[str]:
    for name, without in run["lost"].items():
        yield f"no `torch.{name}`: {without or 'refused'}"
    if not run["sends_gradients_uncopied"]:
        yield f"autograd holds gradients while its hooks run: {_COPIED}"
    for reason, count in run["skipped"].items():
        if re.search(r"torch \d|(this|older) torch|torch newer", reason):
            yield f"not tested ({count}): {reason}"


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return the table of all runs, and the names of tests that have failed."""
    lines = [
        "| Python | torch | passed | failed | skipped | run | differs |\n",
        "| --- | --- | --- | --- | --- | --- | --- |\n",
    ]
    for run in runs:
        lines.append(
            f"| {run['python']} | {run['torch']} | {run['passed']} | {len(run['failed'])} "
            f"| {sum(run['skipped'].values())} | {run['date']}, `{run['commit']}` "
            f"| {'; '.join(_differences(run)) or 'nothing'} |\n"
        )
    failed = [f"- torch {run['torch']}: `{name}`\n" for run in runs for name in run["failed"]]
    return "".join([*lines, *(["\nFailed:\n\n", *failed] if failed else [])])


def with_table(page: str, text: str) -> str:
    """Return a page with another text between its marks."""
    head, begin, rest = page.partition(MARKS[0])
    _, end, tail = rest.partition(MARKS[1])
    if not (begin and end):
        raise ValueError(f"the page lacks {MARKS[0]} or {MARKS[1]}")
    return f"{head}{begin}\n{text}{end}{tail}"


def _order(run: dict[str, Any]) -> list[int]:
    return [int(part) for part in run["torch"].split(".")]


def _write(run: dict[str, Any]) -> None:
    """Write a run in the place of the one with the same release of torch."""
    runs = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    runs = [one for one in runs if release_of(one["torch"]) != release_of(run["torch"])]
    RESULTS.write_text(json.dumps(sorted([*runs, run], key=_order), indent=1) + "\n")


def _render() -> None:
    PAGE.write_text(with_table(PAGE.read_text(), table(json.loads(RESULTS.read_text()))))


# ---- environments


def _python_of(version: str) -> str | None:
    """Return a Python of a version that runs and can make environments."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for one in (f"python{version}", *map(str, root.glob(f"versions/{version}.*/bin/python"))):
        check = (
            "import sys, venv, ensurepip; print(sys.executable); "
            f"sys.exit('%d.%d' % sys.version_info[:2] != {version!r})"
        )
        try:
            found = subprocess.run([one, "-c", check], capture_output=True, text=True)
        except OSError:
            continue
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def _missing(pairs: Sequence[str], home: Path) -> list[str]:
    """Return what is missing, each with what brings it."""
    found = []
    if importlib.util.find_spec("gradlane._core") is None:
        found.append("gradlane's extension: make build")
    for version in {pair.partition(":")[0] for pair in pairs}:
        if _python_of(version) is None:
            found.append(
                f"Python {version} with venv: sudo apt-get install python{version} "
                f"python{version}-venv, or pyenv install {version}"
            )
    free_gb = shutil.disk_usage(home).free // 2**30
    if free_gb < ROOM_GB:
        found.append(f"{ROOM_GB} GB in {home} (free: {free_gb} GB)")
    return found


def _make(pair: str, home: Path) -> Path:
    """Return the Python of an environment, which is made if it is not there."""
    version, _, torch = pair.partition(":")
    folder = home / f"{version}-{torch}"
    python = folder / "bin" / "python"
    if (folder / "made").exists():
        return python
    shutil.rmtree(folder, ignore_errors=True)
    base = _python_of(version)
    assert base is not None
    subprocess.run([base, "-m", "venv", folder], check=True)
    settings = {**os.environ, "PIP_NO_COMPILE": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    if f"torch=={torch}\n" in OLDEST.read_text():
        settings["PIP_CONSTRAINT"] = str(OLDEST)
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    subprocess.run([*install, f"torch=={torch}", *PACKAGES, "hypothesis"], check=True, env=settings)
    (folder / "made").touch()
    return python


def _run(python: Path, tests: Sequence[str], jobs: int, commit: str) -> dict[str, Any]:
    """Run tests in an environment; returns the row."""
    settings = {**os.environ, "PYTHONPATH": f"{ROOT / 'python'}:{ROOT / 'papers'}"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(python), "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
        command += ["-n", str(jobs), "--dist", "loadfile"]
        command += ["-m", SELECTION, f"--junitxml={report}", *tests]
        began_s = time.monotonic()
        subprocess.run(command, cwd=ROOT, env=settings)
        took_s = round(time.monotonic() - began_s)
        outcomes = read_outcomes(report)
    command = [str(python), "-m", "tests.version_matrix", "--probe"]
    found = subprocess.run(
        command, cwd=ROOT, env=settings, check=True, stdout=subprocess.PIPE, text=True
    )
    return {
        **json.loads(found.stdout),
        **outcomes,
        "tests": [*tests, "-m", SELECTION],
        "seconds": took_s,
        "load": round(os.getloadavg()[1], 1),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()


def main() -> None:
    """Run pairs and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pairs", nargs="*", help=f"Python:torch; default: {' '.join(PAIRS)}")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--home", type=Path, default=ROOT / ".cache" / "torch-versions")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tests", nargs="+", default=None, help="others; nothing is written")
    parser.add_argument("--render", action="store_true", help="write the page alone")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.probe:
        print(json.dumps(probe()))
        return
    if given.render:
        _render()
        return
    pairs = given.pairs or PAIRS
    given.home.mkdir(parents=True, exist_ok=True)
    missing = _missing(pairs, given.home)
    if missing:
        sys.exit("\n".join(f"missing: {one}" for one in missing))
    has_failed = False
    # Rows are written between runs.
    commit = _git("rev-parse", "--short", "HEAD") + ("+" if _git("diff", "HEAD") else "")
    for pair in pairs:
        print(f"== Python and torch {pair}", flush=True)
        python = _make(pair, given.home)
        run = _run(python, given.tests or TESTS, given.jobs, commit)
        has_failed |= bool(run["failed"])
        if given.tests is None:
            _write(run)
            _render()
        if not given.keep:
            shutil.rmtree(python.parent.parent)
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
