"""The constructs that people's training programs are made of, and what comes of each.

Each entry says what a reader of `docs/constructs.md` wants to know, right or refused, and carries
the check that proves it; `test_constructs.py` runs every check, and fails when the page is out of
date. To add constructs, put a module into this package with a list `CONSTRUCTS`; to write the page
again, run `python -m tests.training.model.constructs`.

A check is called with `defer`, as `Session.prepare` has it, and asserts that the result is right.
For a refused construct it must let the error through, and the error's text must contain
`refused`. What is compared with what is the check's own business: constructs about *reads* use
`comparison.compare`, whose core delivers nothing that was not waited for; others can use
`tests.training.model.ranks.run_ranks` with the reference of `tests.training.model.reference`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

from tests.paths import ROOT

PAGE = ROOT / "docs" / "constructs.md"

_HEAD = """# Constructs

What gradlane does with the constructs of PyTorch programs. *Right* means: bit for bit what the
same loop gives without gradlane, both with deferred updates (the default) and with
`prepare(..., defer=False)`; every line is a test. *Refused* means: an error with this message.
`python -m tests.training.model.constructs` writes this page; a test fails when it is out of date.

Parameters and gradients that a program keeps are right, too: touching a parameter waits, and kept
gradients have their means when `backward()` returns. Not so tensors that merely share their memory,
such as the tensors of an old `state_dict()`, a kept `p.data`, or a state kept out of
`optimizer.state[p]`: call `session.synchronize()` before, or use `defer=False`. The same holds for
kept parameters that are given to code that takes their memory past Python: transforms of
`torch.func`, TorchScript, `torch.tensor(p)`, nested tensors, DLPack, extensions in C++; parameters
read from the model (`model.weight`) are right there. Buffers that one rank alone writes through
`.data` or NumPy are noticed late, since nothing counts such writes.
"""


@dataclass(frozen=True)
class Construct:
    """One line of the table.

    Attributes:
        section: heading under which it stands.
        name: the construct, in Markdown, as the page has it.
        check: called with `defer`; asserts, or raises the error that refuses.
        refused: part of the error's text, or None if the construct is right.
        note: what a reader should know besides, in Markdown.
        defers: the values of `defer` that the check is run with.
        needs: a module that must be installed, or None.
        newer_than: the last release of torch, such as `2.4`, with which it is not so; or empty.
    """

    section: str
    name: str
    check: Callable[[bool | None], None]
    refused: str | None = None
    note: str = ""
    defers: tuple[bool | None, ...] = (None, False)
    needs: str | None = None
    newer_than: str = ""

    @property
    def result(self) -> str:
        """What the page says."""
        result = (
            "right" if self.refused is None else f'refused: "{self.refused}"'.replace("][", "]\\[")
        )
        torch = f"with torch newer than {self.newer_than}" if self.newer_than else ""
        return "; ".join(part for part in (result, self.note, torch) if part)


def all_constructs() -> list[Construct]:
    """Return the constructs of all modules of this package, in the order of their names."""
    found: list[Construct] = []
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda one: one.name):
        if module.name != "__main__":
            entries = importlib.import_module(f"{__name__}.{module.name}")
            found += getattr(entries, "CONSTRUCTS", [])
    return found


def page(constructs: list[Construct]) -> str:
    """Return the page for a list of constructs."""
    sections: dict[str, list[Construct]] = {}
    for construct in constructs:
        sections.setdefault(construct.section, []).append(construct)
    parts = [_HEAD]
    for section, members in sections.items():
        rows = "".join(f"| {one.name} | {one.result} |\n" for one in members)
        parts.append(f"## {section}\n\n| construct | result |\n| --- | --- |\n{rows}")
    return "\n".join(parts)
