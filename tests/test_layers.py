"""Which package of gradlane imports which: only those that ARCHITECTURE.md has below it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.paths import PACKAGE, ROOT

FACADE = ("__init__", "__main__")
"""What `import gradlane` and `python -m gradlane` give; these name everything."""


def layers() -> list[set[str]]:
    """Lines of the list in ARCHITECTURE.md, the lowest first; names in one line may not import
    each other.
    """
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listing = re.search(r"```\n(commands .*?)```", text, re.DOTALL)
    assert listing is not None
    lines = listing[1].strip().splitlines()
    return [
        set(line.split(", ")) if re.fullmatch(r"\w+(, \w+)+", line) else {line.split()[0]}
        for line in reversed(lines)
    ]


def is_of_annotations(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of every package of gradlane that a module imports, here or in a function."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt) and is_of_annotations(node):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute here"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            yield from imported(node)
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "gradlane" and rest:
                yield node.lineno, rest.split(".")[0]


def test_each_package_stands_in_the_list_once() -> None:
    stand = [name for line in layers() for name in line]
    assert len(stand) == len(set(stand))
    there = {path.stem for path in PACKAGE.glob("*.py")} | {
        path.parent.name for path in PACKAGE.glob("*/__init__.py")
    }
    assert there - set(FACADE) == set(stand)


def test_packages_import_only_what_is_below_them() -> None:
    height = {name: index for index, line in enumerate(layers()) for name in line}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if own in FACADE:
            continue
        for line, other in imported(ast.parse(path.read_text())):
            if other in height and other != own and height[other] >= height[own]:
                wrong.append(f"{path.relative_to(ROOT)}:{line} imports {other}")
    assert not wrong
