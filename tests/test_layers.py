"""Imports of gradlane: between packages only those that ARCHITECTURE.md has below a package, and
between modules none in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import PACKAGE, PAPERS, ROOT

FACADE = ("__init__", "__main__")
"""Modules behind `import gradlane` and `python -m gradlane`; these import from every wing."""
WINGS = {
    "training": PACKAGE / "training",
    "planning": PACKAGE / "planning",
    "lab": PACKAGE / "lab",
    "papers": PAPERS,
}
"""Packages whose own packages are listed one by one; `papers` is the second distribution's."""
COMPILED = "_core"
"""The compiled module, below everything."""


def layers() -> list[set[str]]:
    """Return the lines of the list in ARCHITECTURE.md, the lowest first.

    Names in one line do not import each other.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listing = re.search(r"```\n(papers/plugin .*?)```", text, re.DOTALL)
    assert listing is not None
    lines = listing[1].strip().splitlines()
    return [set(re.split(r"\s{2,}", line)[0].split(", ")) for line in reversed(lines)]


def package_of(module: str) -> str:
    """Return the listed package of a module by its dotted name, as `modules` gives it."""
    parts = module.split(".")
    return "/".join(parts[: 2 if parts[0] in WINGS else 1])


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name, as `modules` gives it, of every import, at any depth of a module.

    Imports in functions count, and those of annotations alone (`if TYPE_CHECKING:`). A name may be
    a module's, or a module's and what it defines; an empty one stands for `gradlane` itself.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "gradlane" and rest != COMPILED:
                yield node.lineno, rest
            elif package == PAPERS.name:
                yield node.lineno, f"papers.{rest}".rstrip(".")


def modules() -> dict[str, Path]:
    """Return the files of both distributions by dotted names below `gradlane`, or `papers`."""
    found = {}
    for package, start in ((PACKAGE, ()), (PAPERS, ("papers",))):
        for path in sorted(package.rglob("*.py")):
            parts = (*start, *path.relative_to(package).with_suffix("").parts)
            found[".".join(parts)] = path
    return found


def packages() -> set[str]:
    """Return all modules and packages that are to be listed."""
    found = {path.stem for path in PACKAGE.glob("*.py")} - set(FACADE)
    found |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - set(WINGS)
    for wing, folder in WINGS.items():
        found |= {f"{wing}/{path.stem}" for path in folder.glob("*.py")}
        found |= {f"{wing}/{path.parent.name}" for path in folder.glob("*/__init__.py")}
        found.discard(f"{wing}/__init__")
    return found


def test_each_package_stands_in_the_list_once() -> None:
    listed = [name for line in layers() for name in line]
    assert len(listed) == len(set(listed))
    assert packages() == set(listed)


def test_packages_import_only_what_is_below_them() -> None:
    height = {name: index for index, line in enumerate(layers()) for name in line}
    wrong = []
    for module, path in modules().items():
        own = package_of(module)
        if own in FACADE or own.endswith("/__init__"):
            continue
        for line, name in imported(ast.parse(path.read_text())):
            other = package_of(name)
            facade = height["training/session"] + 1
            if other != own and height.get(other, facade - 1) >= height[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other or 'gradlane'}")
    assert not wrong


def circle(sources: Mapping[str, str]) -> list[str]:
    """Return modules that import each other, in the order of their imports; empty if none do.

    Args:
        sources: of modules, by their names below `gradlane`.
    """
    imports: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = [name for _, name in imported(ast.parse(source))]
        used = {one if one in sources else one.rpartition(".")[0] for one in names}
        imports[module] = used & sources.keys() - {module}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found[::-1]
    return []


def test_no_modules_import_each_other() -> None:
    sources = {}
    for module, path in modules().items():
        name = module.removesuffix(".__init__")
        if name not in FACADE:
            sources[name] = path.read_text()
    assert circle(sources) == []


@pytest.mark.parametrize(
    "back",
    [
        "import gradlane.lab.cells",
        "if TYPE_CHECKING:\n    from gradlane.lab.cells import Cell",
        "def late():\n    from gradlane.lab import cells",
    ],
)
def test_annotations_and_late_imports_make_a_circle(back: str) -> None:
    sources = {"lab.cells": "from gradlane.lab.rows import Row", "lab.rows": back}
    assert circle({**sources, "lab": "", "errors": "import os"})
    assert circle({**sources, "lab.rows": "from gradlane import _core"}) == []
