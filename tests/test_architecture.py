"""ARCHITECTURE.md against the tree: what its tables name exists, and they name what there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.paths import PACKAGE, ROOT

TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
TRANSPORT = ROOT / "crates/gradlane-net/src"
ENGINE = ROOT / "crates/gradlane-engine/src"
CODECS = ROOT / "crates/gradlane-codec/src/encode"
BASES = ("crates/gradlane-", "python/gradlane/", "papers/gradlane_papers/", "")
"""Starts of paths that tables leave out."""


def section(title: str) -> str:
    """Return the text of a section of the page, without its subsections' titles."""
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> Iterator[tuple[str, str]]:
    """Yield the first and the last cell of each row of a section's tables, headings included."""
    for line in section(title).splitlines():
        if line.startswith("|") and not line.startswith("| ---"):
            cells = line.strip("| ").split(" | ")
            yield cells[0], cells[-1].strip("| ")


def places() -> list[tuple[str, str]]:
    """Return the cells that say where something is, with the folder that their names are below."""
    found = []
    base = ""
    for wanted, where in rows("Where things are"):
        heading = re.match(r"\*\*.*?\*\*(?: \(`(.*)`\))?", wanted)
        if heading is not None:
            base = heading[1] or ""
        else:
            found.append((base, where))
    for folder, modules in rows("The transport"):
        found.append((f"{(TRANSPORT / folder.strip('`')).relative_to(ROOT)}/", modules))
    return found


def files(path: str) -> list[Path]:
    """Return the file or folder of a path as the tables write it, with or without its ending."""
    if "*" in path:
        return list(ROOT.glob(path))
    found = [ROOT / f"{path}{ending}" for ending in (".rs", ".py", "")]
    return [one for one in found if one.exists()][:1]


def unknown(base: str, where: str) -> list[str]:
    """Return the names of a cell that are neither paths nor defined in the files that it names.

    A name may be relative to a folder, at any height, of one that stands before it in its cell.
    """
    folders = [*BASES, base]
    source = ""
    others = []
    for name in re.findall(r"`([^`]+)`", where):
        found = next((one for start in reversed(folders) if (one := files(start + name))), [])
        for path in found:
            inside = path if path.is_dir() else path.with_suffix("")
            above = reversed(path.relative_to(ROOT).parents)
            folders += [f"{folder}/" for folder in (*above, inside.relative_to(ROOT))]
            source += path.read_text(encoding="utf-8") if path.is_file() else ""
        if not found:
            others.append(name)
    keywords = r"^\s*(?:pub(?:\(\w+\))? )?(?:async )?(?:def|class|fn|struct|enum|trait)"
    defined = set(re.findall(rf"{keywords} (\w+)", source, re.MULTILINE))
    return [name for name in others if name not in defined]


def test_every_name_in_the_tables_exists() -> None:
    assert len(places()) > 90
    assert {where: wrong for base, where in places() if (wrong := unknown(base, where))} == {}


def test_every_folder_of_the_engines_walls_is_one_and_all_are_named() -> None:
    names = set(re.findall(r"^  (\w+(?:/|\.rs)) ", section("Walls of the engine"), re.MULTILINE))
    assert [name for name in names if not (ENGINE / name).exists()] == []
    assert {f"{one.name}/" for one in ENGINE.iterdir() if one.is_dir()} <= names | {"engine/"}


@pytest.mark.parametrize(
    "package",
    [TRANSPORT, ENGINE, CODECS, PACKAGE / "training"],
    ids=["transport", "engine", "codecs", "training"],
)
def test_every_module_is_named(package: Path) -> None:
    named = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", TEXT))))
    named |= set(re.findall(r"\w+", section("Walls of the engine").split("```")[1]))
    modules = [
        path
        for path in (*package.rglob("*.rs"), *package.rglob("*.py"))
        if path.stem not in ("__init__", "lib", "tests")
        and not path.stem.endswith("_tests")
        and "tests" not in path.relative_to(package).parts
    ]
    assert len(modules) > 20
    missing = sorted(str(one.relative_to(ROOT)) for one in modules if one.stem not in named)
    assert missing == [], "name them in ARCHITECTURE.md"


def test_names_that_are_nowhere_are_found() -> None:
    where = "`engine/src/ps.rs`, `ps/` (`owner`, `nowhere`); `model/hooks.py` (`nobody`)"
    assert unknown("", where) == ["nowhere", "model/hooks.py", "nobody"]
    assert unknown("python/gradlane/training/", where) == ["nowhere", "nobody"]
