"""Parts of torch without a promise: one module names them, and none is missed in silence."""

from __future__ import annotations

import ast
import importlib.util
import logging
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training import torch_internals
from gradlane.training.modules import gradient_intake
from tests.paths import PACKAGE, PACKAGES
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits

HERE = PACKAGE / "training" / "torch_internals.py"
torch_internals.look_up_all()
NAMES = [*torch_internals.INTERNALS]
LACKING = {one.name for one in torch_internals.lost()}
"""Parts that an older torch does not have."""
KNOWN = {name.rpartition(".")[2] for name in NAMES} | {
    word
    for node in ast.walk(ast.parse(HERE.read_text()))
    for word in [node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)]
    if isinstance(word, str) and re.fullmatch(r"_[a-z]\w*|_[A-Z][a-z]\w*", word)
}
"""Last words of the parts that the module names, in its table or where it reads them."""


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each part of torch that a source names by a private name.

    Attributes of `self`, and slots, are the source's own.
    """
    own: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            path = text.split(".")
            is_own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            private = re.match(r"_(?!_)", node.attr) is not None
            if private and (path[0] == "torch" or (node.attr in KNOWN and not is_own)):
                yield node.lineno, text
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__slots__":
            own.update(map(id, ast.walk(node)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in own:
            if node.value in KNOWN or re.match(r"torch\.(\w+\.)*_\w", node.value):
                yield node.lineno, node.value
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None)
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                if re.match(r"torch\.(.*\.)?_[^_]", name):
                    yield node.lineno, name


def test_no_other_module_names_a_private_part_of_torch() -> None:
    wrong = [
        f"{path.relative_to(package)}:{line} {text}"
        for package in PACKAGES
        for path in sorted(package.rglob("*.py"))
        if path != HERE
        for line, text in uses(path.read_text())
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import _distributed_c10d",
        "from torch.utils._python_dispatch import is_traceable_wrapper_subclass",
        "from torch.optim.optimizer import _global_optimizer_pre_hooks",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch\ntorch.nn.Module._call_impl",
        "def version(tensor):\n    return tensor._version",
        "import importlib\nimportlib.import_module('torch._guards')",
        "def hooks(parameter):\n    return getattr(parameter, '_post_accumulate_grad_hooks')",
        "def order(group):\n    return group._reduce_scatter_param_indices",
    ],
)
def test_a_private_part_of_torch_is_found(source: str) -> None:
    assert [*uses(source)]


def test_own_attributes_are_none() -> None:
    assert not [*uses("class One:\n    def two(self):\n        return self._parameters")]


def test_this_torch_has_every_part() -> None:
    if torch.__version__.startswith("2.15"):
        assert torch_internals.lost() == []
    for one in torch_internals.INTERNALS.values():
        assert one.purpose and one.seen and one.without != ""


def load(monkeypatch: pytest.MonkeyPatch, refuses: str | None = None) -> ModuleType:
    """Load the module once more, by itself, and look everything up.

    Args:
        monkeypatch: undoes what is changed.
        refuses: the name of a part that is not there; None: all are.
    """
    spec = importlib.util.spec_from_file_location("torch_internals_again", HERE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    source = HERE.read_text()
    if refuses is not None:
        # The lookup finds what torch has; here it finds nothing of that name.
        before = "    part = _find(name) if found is None else found\n"
        assert before in source
        source = source.replace(
            before, f"{before}    part = _NOTHING if name == {refuses!r} else part\n"
        )
    exec(compile(source, str(HERE), "exec"), module.__dict__)
    module.look_up_all()
    return module


@pytest.mark.parametrize("name", NAMES)
def test_what_is_lost_is_refused_or_told(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    again = load(monkeypatch, name)
    (lost,) = [one for one in again.lost() if one.name == name]
    assert lost.name == name
    if lost.without is None:
        with pytest.raises(UsageError, match=rf"lacks torch\.{re.escape(name)}.*: use torch 2"):
            again.check_torch()
        return
    with caplog.at_level(logging.WARNING, "gradlane"):
        again.check_torch()
        again.check_torch()
    found = [one for one in caplog.records if f"lacks torch.{name}" in one.getMessage()]
    assert len(found) == lost.is_told
    if not found:
        assert lost.name == "_C._dynamo.eval_frame.get_eval_frame_callback"
        return
    (record,) = found
    assert f"lacks torch.{name}" in record.getMessage()
    assert f"without it, {lost.without}" in record.getMessage()


def test_a_part_that_is_really_gone_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_storage_Use_Count")
    monkeypatch.delattr(torch, "_foreach_copy_")
    assert {one.name for one in load(monkeypatch).lost()} == LACKING | {
        "_C._storage_Use_Count",
        "_foreach_copy_",
    }


def test_a_part_that_behaves_in_another_way_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_storage_Use_Count", lambda data: 1)
    monkeypatch.setattr(torch._C, "_current_graph_task_id", lambda: 0)
    assert {one.name for one in load(monkeypatch).lost()} == LACKING | {
        "_C._storage_Use_Count",
        "_C._current_graph_task_id",
    }


def test_a_call_of_what_is_lost_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    again = load(monkeypatch, "_C._current_graph_task_id")
    with pytest.raises(UsageError, match=r"torch\._C\._current_graph_task_id, by which gradlane"):
        again.graph_task_id()


class Called:
    """A callable whose references can be counted: those to functions are in use elsewhere."""

    def __call__(self, *arguments: Any) -> None:
        raise AssertionError("a frame was compiled")


def test_looking_at_the_compilers_callback_takes_no_reference_away() -> None:
    """Torch 2.7's own look does; without a callback, to None, which Python before 3.12 frees."""
    look, swap = torch_internals.frame_callback, torch_internals.swap_frame_callback
    torch_internals.load_compiler()
    none = sys.getrefcount(None)
    for _ in range(1000):
        look()
    assert abs(sys.getrefcount(None) - none) < 500
    callback = Called()
    if hasattr(look, "__code__"):
        return  # A frame of Python's, which would be compiled.
    count = sys.getrefcount(callback)
    before = swap(callback)
    seen = look()
    swap(before)
    assert seen is callback
    del seen
    assert sys.getrefcount(callback) == count


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_what_is_done_instead_has_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = load(monkeypatch, "_foreach_copy_")
    scales = load(monkeypatch, "_amp_foreach_non_finite_check_and_unscale_")
    sources = [torch.randn(5, 3).to(dtype), torch.randn(7).to(dtype)]
    results = []
    for module in (torch_internals, copies):
        results.append([torch.empty_like(one) for one in sources])
        module.foreach_copy(results[-1], sources)
    assert all(map(torch.equal, *results))
    factor = torch.tensor(1 / 3, dtype=torch.float32)
    results = []
    for module in (torch_internals, scales):
        results.append([one.clone() for one in sources])
        module.foreach_unscale(results[-1], torch.zeros(()), factor)
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("width", [3, 100])
@pytest.mark.parametrize("keeps", ["flat", "list"])
def test_kept_gradients_get_their_means_where_owners_cannot_be_counted(
    width: int, keeps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(width, width), nn.Linear(width, 2)))
        parameters = [*model.parameters()]
        flat = torch.zeros(sum(one.numel() for one in parameters))
        parts = torch.split(flat, [one.numel() for one in parameters])
        for one, part in zip(parameters, parts, strict=True):
            one.grad = part.view_as(one)
        kept = [flat] if keeps == "flat" else [one.grad for one in parameters]
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        session.prepare(model, optimizer)
        seen = []
        for step in range(4):
            (model(torch.ones(2, width)) * (session.rank + step)).sum().backward()
            seen += [one.clone() for one in kept if one is not None]
            optimizer.step()
            for held in kept:
                if held is not None:
                    held.zero_()
        return [*seen, *(one.detach().clone() for one in parameters)]

    expected = run_ranks(2, body)
    monkeypatch.setattr(gradient_intake, "count_owners", None)
    for found in run_ranks(2, body):
        assert same_bits(found, expected[0])
