"""Counts what a newcomer meets in training's kernel: `python benchmarks/kernel_figures.py [TREE]`.

It reads the sources of a tree, this one by default, so that two can be compared, and traces one
step of it: `run_ranks` of its tests trains two ranks, threads over the compiled core, and each
file of gradlane that one of them enters from the begin of `backward()` to the end of the next
forward is noted. A file is on the gradients' way if it is entered at least once for each tensor.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
SHORT_NAMES = ("take", "run", "note", "follow", "settle")
"""Names of methods that say little without their class."""
REFUSALS = ("UsageError", "RefusedError", "ValueError", "NotImplementedError")
TRACED = ("--traced",)
LAYERS, WIDTH = 6, 512
"""Of the traced model; its weights are too large to travel with others."""


def classes_of(trees: Mapping[Path, ast.Module]) -> Iterator[tuple[Path, ast.ClassDef]]:
    """Yield all classes, each with its file."""
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield path, node


def methods_of(one: ast.ClassDef) -> list[str]:
    """Return the names of a class's methods, properties included."""
    return [node.name for node in one.body if isinstance(node, ast.FunctionDef)]


def is_protocol(one: ast.ClassDef) -> bool:
    """Return whether a class is a structural type."""
    return any(ast.unparse(base).partition("[")[0] == "Protocol" for base in one.bases)


def lines_of(path: Path) -> int:
    """Return the number of a file's lines."""
    return len(path.read_text().splitlines())


def private_torch(tree: ast.Module) -> set[str]:
    """Return the private parts of torch that a module names by their path."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= set(re.findall(r"^torch\.(?:\w+\.)*_[a-zA-Z]\w*", ast.unparse(node)))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            for alias in node.names:
                found |= set(re.findall(r"^torch\..*\b_[a-zA-Z].*", f"{node.module}.{alias.name}"))
    return found


def rows_of(training: Path) -> int:
    """Return the number of rows of the table of compatibility; 0 where there is none."""
    path = training / "options" / "compatibility.py"
    if not path.exists():
        return 0
    for node in ast.walk(ast.parse(path.read_text())):
        is_table = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "ROWS"
        if is_table and isinstance(node.value, ast.Tuple):
            return len(node.value.elts)
    return 0


def read_sources(package: Path) -> dict[str, Any]:
    """Return the figures of a tree's sources.

    Args:
        package: the folder `gradlane` of the tree.
    """
    training = package / "training"
    trees = {path: ast.parse(path.read_text()) for path in sorted(training.rglob("*.py"))}
    model = [path for path in trees if path.is_relative_to(training / "model")]
    kernel = [path for path in model if path.parent.name == "kernel"]
    in_model = [one for path, one in classes_of(trees) if path in model]
    largest = max(in_model, key=lambda one: len(methods_of(one)))
    protocols = [(path, one.name) for path, one in classes_of(trees) if is_protocol(one)]
    core_face = [name for path, name in protocols if path == training / "core.py"]
    session = next(one for _, one in classes_of(trees) if one.name == "Session")
    names = Counter(name for one in in_model for name in methods_of(one) if name in SHORT_NAMES)
    raised = Counter(
        node.exc.func.id
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and isinstance(node.exc.func, ast.Name)
        and node.exc.func.id in REFUSALS
    )
    outside = {path: tree for path, tree in trees.items() if path.name != "torch_internals.py"}
    return {
        "lines of training": sum(map(lines_of, trees)),
        "lines of training/model": sum(map(lines_of, model)),
        "files of training/model": len(model),
        "lines of its kernel": sum(map(lines_of, kernel)),
        "largest class of training/model": largest.name,
        "methods of the largest class": len(methods_of(largest)),
        "lines of the largest class": (largest.end_lineno or 0) - largest.lineno + 1,
        "Protocols of training": len(protocols),
        "Protocols that are the core's face": len(core_face),
        "refusals raised in training": sum(raised.values()),
        "rows of the table of compatibility": rows_of(training),
        "public members of Session": len({m for m in methods_of(session) if m[0] != "_"}),
        "private names of torch elsewhere": len(set().union(*map(private_torch, outside.values()))),
        "methods with short names": sum(names.values()),
        **{f"methods named {name}": names[name] for name in SHORT_NAMES},
    }


def trace_step(package: Path) -> dict[str, Any]:
    """Return the files that a step enters, with the largest number of calls of one function."""
    import torch
    from tests.training.model.ranks import run_ranks
    from torch import nn

    calls: Counter[Any] = Counter()

    def note_call(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1

    def body(session: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        loss = model(torch.ones(2, WIDTH)).sum()
        for step in range(4):
            optimizer.zero_grad()
            is_traced = step == 2 and session.rank == 0
            if is_traced:
                sys.setprofile(note_call)
            loss.backward()
            optimizer.step()
            loss = model(torch.ones(2, WIDTH)).sum()
            sys.setprofile(None)

    run_ranks(2, body)
    entered: dict[str, int] = {}
    for code, count in calls.items():
        path = Path(code.co_filename)
        if path.is_relative_to(package):
            name = str(path.relative_to(package))
            entered[name] = max(entered.get(name, 0), count)
    return entered


def main() -> None:
    """Print the figures of a tree."""
    given = [one for one in sys.argv[1:] if one not in TRACED]
    tree = Path(given[0]).resolve() if given else HERE
    package = tree / "python" / "gradlane"
    if sys.argv[1:] != given:
        print(json.dumps(trace_step(package)))
        return
    for name, figure in read_sources(package).items():
        print(f"{figure!s:>24}  {name}")
    command = [sys.executable, __file__, *TRACED, str(tree)]
    paths = f"{package.parent}:{tree}"
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    entered = json.loads(done.stdout.splitlines()[-1])
    on_the_way = sorted(name for name, count in entered.items() if count >= LAYERS)
    print(f"{len(entered):>24}  files that a step enters, from backward to the next forward")
    print(f"{len(on_the_way):>24}  of them entered for each gradient:")
    for name in on_the_way:
        print(f"{'':>24}  - {name}")


if __name__ == "__main__":
    main()
