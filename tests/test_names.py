"""Names in the sources: tests look at no object's private ones, and no class has another's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.paths import PACKAGES, ROOT

TESTS = (ROOT / "tests", ROOT / "benchmarks")
NOT_REACHES = {
    "_buffers": "a dictionary of `nn.Module`",
    "_core": "the compiled module, whose functions are public",
    "_get_sequence_number": "a method of the works of torch",
    "_init_group": "a method of torch's optimizers",
    "_parameters": "a dictionary of `nn.Module`",
    "_version": "counts writes to a tensor",
}
"""Names that the package defines, too; names that others alone define are not looked for."""
_KILLS = "no call of a public function marks the moment at which a process is to be killed"
_BREAKS = "what the fuzzer must notice is that the package is broken inside"
_WAITS = "shortens or lengthens a wait whose length the package alone chooses"
ALLOWED = {
    ("tests/faults/going_on/rank_program.py", "_LOOK_EVERY_S"): _WAITS,
    ("tests/faults/going_on/rank_program.py", "_answer"): _KILLS,
    ("tests/faults/going_on/rank_program.py", "_hand_over"): _KILLS,
    ("tests/faults/going_on/rank_program.py", "_move"): _KILLS,
    ("tests/loop_fuzzing/mutations.py", "_before_list"): _BREAKS,
    ("tests/loop_fuzzing/mutations.py", "_wait"): _BREAKS,
    ("tests/loop_fuzzing/mutations.py", "_wait_for_absences"): _BREAKS,
    ("tests/training/rendezvous/test_join_requests.py", "_ANSWER_S"): _WAITS,
    ("tests/training/rendezvous/test_join_requests.py", "_LOOK_EVERY_S"): _WAITS,
}
"""Reaches that stay, each with its reason."""


def is_private(name: str) -> bool:
    return len(name) > 1 and name.startswith("_") and not name.startswith("__")


def is_own(attribute: ast.Attribute) -> bool:
    """Whether an attribute is looked up on `self`, `cls` or `super()`."""
    of = attribute.value.func if isinstance(attribute.value, ast.Call) else attribute.value
    return isinstance(of, ast.Name) and of.id in ("self", "cls", "super")


@cache
def sources(*folders: Path) -> dict[str, ast.Module]:
    """Return the parsed modules of some folders, by their paths."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def defined(source: str) -> set[str]:
    """Return the private names that a source defines, as what it may be, or sets on `self`."""
    set_or_defined = r"(?:def |class |self\.)(_(?!_)\w+)|^ *(_(?!_)\w+)(?:: | = )"
    return {name for pair in re.findall(set_or_defined, source, re.M) for name in pair if name}


def reaches(tree: ast.AST) -> Iterator[str]:
    """Yield private names of others: attributes, imports, and texts such as `setattr` takes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            if not is_own(node):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (one.name for one in node.names if is_private(one.name))
        elif isinstance(node, ast.Call):
            for position, given in enumerate(node.args[:2]):
                if isinstance(given, ast.Constant) and isinstance(given.value, str):
                    module, _, name = given.value.rpartition(".")
                    # The first one is the path of a module's attribute, as `monkeypatch` takes it.
                    if is_private(name) and (module or position == 1):
                        yield name


def twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Return the names of public classes that several modules define, with these modules."""
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_public_classes_have_names_of_their_own() -> None:
    assert len(sources(*PACKAGES)) > 300
    assert twice(sources(*PACKAGES)) == {}, "let each name say what its class is, or merge them"
    other = ast.parse("class Session: ...\nclass _Session: ...")
    assert twice({"a.py": other, "b.py": other}) == {"Session": ["a.py", "b.py"]}


def test_tests_do_not_reach_into_private_attributes() -> None:
    paths = [path for folder in (*PACKAGES, *TESTS) for path in folder.rglob("*.py")]
    own = {name for path in paths for name in defined(path.read_text(encoding="utf-8"))}
    found = {
        (path, name)
        for path, tree in sources(*TESTS).items()
        for name in reaches(tree)
        if name in own and name not in NOT_REACHES
    }
    assert found - set(ALLOWED) == set(), "look at what a user or a neighbour can see"
    assert set(ALLOWED) - found == set(), "these are no reaches any more"


def test_reaches_are_found() -> None:
    source = """
from gradlane.training import _hidden
class Own:
    def __init__(self):
        super()._begun()
        self._own = self.other._theirs
        cls._own
def test(monkeypatch, session):
    session._models.prepared[0]._step = None
    monkeypatch.setattr(module, "_LIMIT_S", 1.0)
    monkeypatch.setattr("gradlane.module._WAIT_S", 1.0)
    "a-b_total".replace("-", "_").endswith("_total")
"""
    assert sorted(reaches(ast.parse(source))) == sorted(
        ["_hidden", "_theirs", "_models", "_step", "_LIMIT_S", "_WAIT_S"]
    )
    definitions = "_A = 1\nclass _B:\n    _c: int\n    def _d(self):\n        self._e = f(x._g)\n"
    assert defined(definitions) == {"_A", "_B", "_c", "_d", "_e"}
