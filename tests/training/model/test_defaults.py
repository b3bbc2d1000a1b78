"""A program's default device and dtype are for its own tensors: nothing here takes them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils._device import _device_constructors

from tests.built import needs_core
from tests.paths import PACKAGES, ROOT
from tests.training.model.pool import RankPool

HERE = "tests.training.model.default_scenarios"
MAKES = {function.__name__ for function in _device_constructors()} | {"normal"}
"""Functions of torch whose tensors are on the default device, or of the default dtype."""
LEGACY = {"Tensor", "FloatTensor", "DoubleTensor", "get_default_dtype", "get_default_device"}

OPTIONS: dict[str, dict[str, Any]] = {
    "worker": {},
    "ring": {"strategy": "ring"},
    "server": {"update": "server", "optimizer_name": "adamw"},
    "codec": {"codec": "onebit"},
    "sparse": {"codec": "topk:ratio=0.1"},
    "factors": {"scheme": "sfb"},
    "asynchronous": {"strategy": "asgd", "update": "server"},
    "late": {"stragglers": "backup=1", "late": "carry", "codec": "onebit"},
    "leader": {"local": "leader"},
    "shared": {"local": "shared"},
    "collective": {"local": "leader", "local_sums": "collective"},
    "checked": {"check_every": 1},
}


def calls_of_torch(tree: ast.AST) -> Iterator[tuple[ast.AST, str, set[str | None]]]:
    for node in ast.walk(tree):
        function = node.func if isinstance(node, ast.Call) else node
        if (
            isinstance(function, ast.Attribute)
            and isinstance(function.value, ast.Name)
            and function.value.id == "torch"
        ):
            keywords = node.keywords if isinstance(node, ast.Call) else []
            yield node, function.attr, {keyword.arg for keyword in keywords}


def test_every_tensor_is_made_with_a_device_and_a_dtype() -> None:
    wrong = []
    for path in sorted(path for package in PACKAGES for path in package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        # A function that is passed on, such as a dataclass's factory, is called without arguments.
        called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        annotated = {
            id(part)
            for node in ast.walk(tree)
            for field in ("annotation", "returns")
            if isinstance(getattr(node, field, None), ast.AST)
            for part in ast.walk(getattr(node, field))
        }
        for node, name, keywords in calls_of_torch(tree):
            if id(node) in called or id(node) in annotated:
                continue
            is_call = isinstance(node, ast.Call)
            lacks = name in MAKES and not {"device", "dtype"} <= keywords
            if lacks or (is_call and name in LEGACY):
                wrong.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {name}")
    assert not wrong


@needs_core
@pytest.mark.parametrize("kind", OPTIONS)
def test_sessions_give_the_same_bits_under_other_defaults(pool: RankPool, kind: str) -> None:
    options = OPTIONS[kind]
    plain, other = (
        pool.run(f"{HERE}:trained", are_set=are_set, **options) for are_set in (False, True)
    )
    if kind == "asynchronous" or kind == "late":
        return  # Their bits depend on who is late.
    assert plain == other


@needs_core
def test_checkpoints_under_other_defaults(pool: RankPool, tmp_path: Path) -> None:
    plain, other = (
        pool.run(
            f"{HERE}:checkpointed", ranks=2, are_set=are_set, folder=str(tmp_path / str(are_set))
        )
        for are_set in (False, True)
    )
    assert plain == other


@needs_core
def test_arrays_under_other_defaults(pool: RankPool) -> None:
    plain, other = (
        pool.run(f"{HERE}:pushed", ranks=2, are_set=are_set) for are_set in (False, True)
    )
    assert plain == other


@needs_core
@pytest.mark.parametrize("route", ["gather", "shards"])
@pytest.mark.parametrize("spec", ["onebit", "topk:ratio=0.1"])
@pytest.mark.filterwarnings("ignore:topk over shards")
def test_the_ddp_hook_under_other_defaults(pool: RankPool, spec: str, route: str) -> None:
    plain, other = (
        pool.run(f"{HERE}:under_ddp", ranks=2, are_set=are_set, spec=spec, route=route)
        for are_set in (False, True)
    )
    assert plain == other
