"""`make build PYTHON=…` takes the torch of any Python, and the commands of none."""

from __future__ import annotations

import os
import subprocess
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.paths import ROOT

PATH = "/usr/bin:/bin"
BACKEND = """\
import zipfile
def build_editable(folder, config_settings=None, metadata_directory=None):
    name = "gradlane_papers-1.0-py3-none-any.whl"
    about = "gradlane_papers-1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        text = "Metadata-Version: 2.1\\nName: gradlane-papers\\nVersion: 1.0\\n"
        wheel.writestr(f"{about}/METADATA", text)
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        wheel.writestr(f"{about}/RECORD", "")
    return name
"""


def environment(folder: Path) -> Path:
    """Make a virtual environment without pip; returns its folder of packages."""
    venv.create(folder, symlinks=True)
    return next(folder.glob("lib/python*/site-packages"))


def add(site: Path, name: str, *requires: str, version: str = "1.0", module: str = "") -> None:
    """Install a package of one module, with a command."""
    path = site / (module or f"{name}/__init__.py")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"version = {version!r}\n")
    metadata = site / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    needs = "".join(f"Requires-Dist: {one}\n" for one in requires)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
    )
    (metadata / "RECORD").write_text(
        f"{path.relative_to(site)},,\n{metadata.name}/METADATA,,\n../../../bin/{name},,\n"
    )


def clone(folder: Path) -> None:
    """Lay out what the Makefile and the script need, with a maturin that builds nothing."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    with zipfile.ZipFile(wheels / "maturin-1.16.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("maturin.py", "def main(): print('maturin develop')\n")
        about = "maturin-1.16.0.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: maturin\nVersion: 1.16.0\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/entry_points.txt", "[console_scripts]\nmaturin = maturin:main\n")
        wheel.writestr(f"{about}/RECORD", "")
    with zipfile.ZipFile(wheels / "flit_core-4.2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("flit_core/buildapi.py", BACKEND)
        about = "flit_core-4.2.0.dist-info"
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: flit_core\nVersion: 4.2.0\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    (folder / "papers").mkdir()
    (folder / "papers" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "flit_core.buildapi"\n'
    )
    for name in ("Makefile", "scripts"):
        (folder / name).symlink_to(ROOT / name)
    for name in (".cache/tools", "pyproject.toml", "Cargo.toml"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "crates").mkdir()
    (folder / "constraints.txt").write_text("torch==2.15.0\nmaturin==1.16.0\n")


def run_make(
    folder: Path, python: str | Path | None = None, path: str = PATH
) -> subprocess.CompletedProcess[str]:
    """Make the environment, with a Python that is named or not."""
    given = {} if python is None else {"PYTHON": str(python)}
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder / "wheels")}
    return subprocess.run(
        ["make", ".venv/.installed"],
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), **offline, **given},
        capture_output=True,
        text=True,
    )


def make(folder: Path, python: Path) -> str:
    """Make the environment in a new folder; returns what is printed."""
    clone(folder)
    done = run_make(folder, python)
    assert done.returncode == 0, done.stderr
    assert "maturin develop" in done.stdout
    return done.stdout


def imported(folder: Path, code: str) -> str:
    """Return what code prints in the environment that was made."""
    bare = {"PATH": PATH, "HOME": os.devnull}
    python = folder / ".venv" / "bin" / "python"
    done = subprocess.run([python, "-c", code], env=bare, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def in_one_place(folder: Path) -> Path:
    site = environment(folder / "own")
    add(site, "torch", "filelock>=3", "kit[one, two]", 'ruff; extra == "dev"', version="2.9.1")
    add(site, "filelock")
    add(site, "kit", 'part; extra == "two"', 'other; extra == "three"')
    for name in ("part", "other", "ruff"):
        add(site, name)
    return folder / "own" / "bin" / "python"


def in_two_places(folder: Path) -> Path:
    """Have what torch requires in a folder that a `.pth` file names, with one name in both."""
    site, second = environment(folder / "own"), folder / "second"
    (site / "second.pth").write_text(f"{second}\n")
    needs = ("filelock", "part", "nvidia-one", "nvidia-two")
    add(site, "torch", *needs, version="2.9.1")
    for name in ("filelock", "part", "ruff"):
        add(second, name)
    add(site, "nvidia-one", module="nvidia/one.py")
    add(second, "nvidia-two", module="nvidia/two.py")
    return folder / "own" / "bin" / "python"


def editable(folder: Path) -> Path:
    python = in_one_place(folder)
    site = next((folder / "own").glob("lib/python*/site-packages"))
    (folder / "source").mkdir()
    (site / "torch").rename(folder / "source" / "torch")
    (site / "torch.pth").write_text(f"{folder / 'source'}\n")
    (site / "torch-2.9.1.dist-info" / "RECORD").write_text("torch.pth,,\n")
    return python


def without_record(folder: Path) -> Path:
    """As packages of a distribution are."""
    python = in_one_place(folder)
    for path in (folder / "own").glob("lib/python*/site-packages/*/RECORD"):
        path.unlink()
    return python


def reuse(folder: Path, python: Path) -> Path:
    """Make an environment that sees the torch of a Python; returns the folder it is in."""
    site = environment(folder / ".venv")
    (folder / "torch").mkdir()
    command = [str(python), str(ROOT / "scripts" / "reuse-torch"), str(folder / "torch")]
    seen = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (site / "reused-torch.pth").write_text(seen)
    return folder


def seen_through_links(folder: Path) -> Path:
    """Have an environment that sees the torch of another one."""
    return reuse(folder / "before", in_two_places(folder)) / ".venv" / "bin" / "python"


@pytest.mark.parametrize(
    "make_python", [in_one_place, in_two_places, editable, without_record, seen_through_links]
)
def test_torch_and_what_it_requires_is_seen(
    make_python: Callable[[Path], Path], tmp_path: Path
) -> None:
    clone = reuse(tmp_path / "clone", make_python(tmp_path))
    assert imported(clone, "import torch, filelock, part; print(torch.version)") == "2.9.1"
    version = "from importlib.metadata import version; print(version('torch'))"
    assert imported(clone, version) == "2.9.1"
    if make_python in (in_two_places, seen_through_links):
        imported(clone, "import nvidia.one, nvidia.two")
    if make_python is in_one_place:
        code = "import importlib.util as u; print([u.find_spec(n) for n in ('ruff', 'other')])"
        assert imported(clone, code) == "[None, None]"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder in which the environment is made, with the torch of another one."""
    folder = tmp_path_factory.mktemp("made")
    python = in_one_place(folder)
    printed = make(folder / "clone", python)
    assert f"using the torch of {python}" in printed and "installing torch" not in printed
    return folder / "clone"


def test_torch_of_a_virtual_environment_is_used(made: Path) -> None:
    code = "from importlib.metadata import version; print(version('gradlane-papers'))"
    assert imported(made, code) == "1.0"
    assert imported(made, "import torch; print(torch.version)") == "2.9.1"
    assert "torch==" not in (made / ".venv" / "constraints.txt").read_text()


def test_a_torch_that_works_in_its_own_place_only_is_named(tmp_path: Path) -> None:
    python = in_one_place(tmp_path)
    site = next((tmp_path / "own").glob("lib/python*/site-packages"))
    (site / "torch" / "__init__.py").write_text("import other\n")
    printed = make(tmp_path / "clone", python)
    assert f"the torch of {python} does not work" in printed
    assert "No module named 'other'" in printed and "installing torch" in printed


def its_own(made: Path) -> str:
    return str(made / ".venv" / "bin" / "python")


def its_own_by_another_path(made: Path) -> str:
    link = made.parent / "linked"
    if not link.is_symlink():
        link.symlink_to(made)
    return str(link / ".venv" / "bin" / "python3")


def absent(made: Path) -> str:
    return str(made / "nowhere" / "python")


def too_old(made: Path) -> str:
    python = made.parent / "old-python"
    python.write_text("#!/bin/sh\necho Python 3.8.0\nexit 1\n")
    python.chmod(0o755)
    return str(python)


@pytest.mark.parametrize("wrong", [its_own, its_own_by_another_path, absent, too_old])
def test_a_python_that_cannot_make_it_is_refused_before_anything_is_deleted(
    wrong: Callable[[Path], str], made: Path
) -> None:
    before = (made / ".cache" / "choice").read_text()
    done = run_make(made, wrong(made))
    assert done.returncode != 0
    assert ".venv is as it was" in done.stderr and "make PYTHON=" in done.stderr
    assert wrong(made) in done.stderr
    assert imported(made, "import torch; print(torch.version)") == "2.9.1"
    assert (made / ".cache" / "choice").read_text() == before
    again = run_make(made)
    assert again.returncode == 0, again.stderr


def test_the_python_of_an_active_environment_does_not_make_it_anew(made: Path) -> None:
    (made / "pyproject.toml").touch()
    done = run_make(made, "python3", f"{made / '.venv' / 'bin'}:{PATH}")
    assert done.returncode != 0 and "deactivate" in done.stderr
    assert imported(made, "import torch; print(torch.version)") == "2.9.1"


def test_a_python_that_is_absent_from_the_start_is_not_remembered(tmp_path: Path) -> None:
    clone(tmp_path)
    (tmp_path / ".cache" / "tools").unlink()
    done = run_make(tmp_path, absent(tmp_path))
    assert done.returncode != 0 and f"no {absent(tmp_path)} here" in done.stderr
    assert absent(tmp_path) not in (tmp_path / ".cache" / "choice").read_text()
