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


def make(folder: Path, python: Path) -> str:
    """Run the script in a folder as the Makefile does, with a maturin that builds nothing."""
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
    (folder / "scripts").symlink_to(ROOT / "scripts")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "choice").write_text("chosen\n")
    (folder / "constraints.txt").write_text("torch==2.15.0\nmaturin==1.16.0\n")
    done = subprocess.run(
        ["bash", "scripts/make-venv", ".venv", "constraints.txt", ".cache/choice"],
        cwd=folder,
        env={
            "PATH": PATH,
            "HOME": str(folder),
            "PYTHON": str(python),
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(wheels),
        },
        capture_output=True,
        text=True,
    )
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


def test_torch_of_a_virtual_environment_is_used(tmp_path: Path) -> None:
    python = in_one_place(tmp_path)
    printed = make(tmp_path / "clone", python)
    assert f"using the torch of {python}" in printed and "installing torch" not in printed
    assert imported(tmp_path / "clone", "import torch; print(torch.version)") == "2.9.1"
    assert "torch==" not in (tmp_path / "clone" / ".venv" / "constraints.txt").read_text()


def test_a_torch_that_works_in_its_own_place_only_is_named(tmp_path: Path) -> None:
    python = in_one_place(tmp_path)
    site = next((tmp_path / "own").glob("lib/python*/site-packages"))
    (site / "torch" / "__init__.py").write_text("import other\n")
    printed = make(tmp_path / "clone", python)
    assert f"the torch of {python} does not work" in printed
    assert "No module named 'other'" in printed and "installing torch" in printed
