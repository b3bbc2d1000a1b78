"""Imports between the packages of gradlane: only those that ARCHITECTURE.md has below a package."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.paths import PACKAGE, ROOT

FACADE = ("__init__", "__main__")
"""Modules behind `import gradlane` and `python -m gradlane`; these import from every wing."""
WINGS = ("training", "planning", "lab")
"""Packages whose own packages are listed one by one."""
COMPILED = "_core"
"""The compiled module, below everything."""


def layers() -> list[set[str]]:
    """Return the lines of the list in ARCHITECTURE.md, the lowest first.

    Names in one line do not import each other.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listing = re.search(r"```\n(cli .*?)```", text, re.DOTALL)
    assert listing is not None
    lines = listing[1].strip().splitlines()
    return [set(re.split(r"\s{2,}", line)[0].split(", ")) for line in reversed(lines)]


def package_of(module: str) -> str:
    """Return the listed package of a dotted module below `gradlane`."""
    parts = module.split(".")
    return "/".join(parts[: 2 if parts[0] in WINGS else 1])


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and listed package of every import of gradlane, at any depth of a module.

    An empty name stands for `gradlane` itself.
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
                yield node.lineno, package_of(rest)


def packages() -> set[str]:
    """Return all modules and packages that are to be listed."""
    found = {path.stem for path in PACKAGE.glob("*.py")} - set(FACADE)
    found |= {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - set(WINGS)
    for wing in WINGS:
        found |= {f"{wing}/{path.stem}" for path in (PACKAGE / wing).glob("*.py")}
        found |= {f"{wing}/{path.parent.name}" for path in (PACKAGE / wing).glob("*/__init__.py")}
        found.discard(f"{wing}/__init__")
    return found


def test_each_package_stands_in_the_list_once() -> None:
    listed = [name for line in layers() for name in line]
    assert len(listed) == len(set(listed))
    assert packages() == set(listed)


def test_packages_import_only_what_is_below_them() -> None:
    height = {name: index for index, line in enumerate(layers()) for name in line}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = package_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        if own in FACADE or own.endswith("/__init__"):
            continue
        for line, other in imported(ast.parse(path.read_text())):
            facade = height["training/session"] + 1
            if other != own and height.get(other, facade - 1) >= height[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other or 'gradlane'}")
    assert not wrong
