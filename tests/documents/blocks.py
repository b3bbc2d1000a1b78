"""Code blocks of the pages, with the place of each."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "sh", "json", "text"}
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

_HERE_DOCUMENT = re.compile(r"^(.*) <<(\w+)\n.*?^\2\n", re.MULTILINE | re.DOTALL)
_PACKAGES = ("accelerate", "jax", "lightning", "transformers")
_SPAN = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:gradlane|make|pip|python3?|torchrun|cargo|srun|mpirun) [^`]+)`"
)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: the page's path below the root.
        line: line of the page that the block begins at.
        language: the word behind its fence.
        text: its lines.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Return page and line, as tests name the block."""
        return f"{self.page}:{self.line}"


def blocks_of(path: Path) -> list[Block]:
    """Return the code blocks of a page in their order."""
    text = path.read_text(encoding="utf-8")
    page = path.relative_to(ROOT).as_posix()
    return [
        Block(page, text.count("\n", 0, match.start()) + 1, match[2], textwrap.dedent(match[3]))
        for match in _BLOCK.finditer(text)
    ]


def all_blocks(language: str) -> list[Block]:
    """Return the blocks in a language of all pages."""
    return [block for path in PAGES for block in blocks_of(path) if block.language == language]


def shell_lines(block: Block) -> Iterator[str]:
    """Yield the command lines of a block: joined at `\\`, without comments and empty lines.

    What a command reads from the block itself (`<<END`) is none.
    """
    text = _HERE_DOCUMENT.sub(r"\1\n", block.text.replace("\\\n", " "))
    for line in text.splitlines():
        if command := re.sub(r"(^|\s)#.*", "", line).strip():
            yield command


def spans_of(path: Path) -> list[str]:
    """Return the command lines within a page's sentences: code that begins with a program."""
    prose = _BLOCK.sub("", path.read_text(encoding="utf-8"))
    return [" ".join(span.split()) for span in _SPAN.findall(prose)]


@dataclass(frozen=True)
class Program:
    """What a Python block says: one program, or one of two that stand side by side.

    Attributes:
        block: the block.
        name: empty, `before` or `after`.
        text: the program.
    """

    block: Block
    name: str
    text: str

    @property
    def place(self) -> str:
        """Return page, line and name."""
        return f"{self.block.place}{self.name and '-'}{self.name}"

    @property
    def packages(self) -> list[str]:
        """Names of the packages that the program needs and gradlane does not install."""
        return [name for name in _PACKAGES if re.search(rf"\b{name}\b", self.text)]


def programs_of(block: Block) -> list[Program]:
    """Return the programs of a block: two where `# before` and `# after` head its columns."""
    lines = block.text.splitlines()
    at = lines[0].find("# after")
    if not (lines[0].startswith("# before") and at > 0):
        return [Program(block, "", block.text)]
    for line in lines:
        assert line[at - 1 : at] in ("", " "), f"{block.place}: no column ends in {line!r}"
    before, after = [line[:at].rstrip() for line in lines], [line[at:] for line in lines]
    return [Program(block, "before", "\n".join(before)), Program(block, "after", "\n".join(after))]


PROGRAMS = [program for block in all_blocks("python") for program in programs_of(block)]
