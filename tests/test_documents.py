"""Every `gradlane` command that the README and the pages print is one that the program takes, and
every link in them leads somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.core import TyperGroup

from gradlane.cli.main import app
from tests.paths import ROOT

CLAIMS = ROOT / "docs" / "claims.md"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(gradlane [^`]+)`")
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
_ENDS = {"|", "||", "&&", ";", ">", "2>"}
_LAUNCHED = re.compile(r"^(?:\S+=\S+ |sudo |(?:\S*/)?python3? -m |torchrun .*? -m )*gradlane ")


def commands_in(text: str) -> list[str]:
    """Return the command lines of a page: those of code blocks, and those within sentences."""
    found = []
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            if match := _LAUNCHED.match(line.strip()):
                found.append("gradlane " + line.strip()[match.end() :])
    prose = _BLOCK.sub("", text)
    return [*found, *(" ".join(one.split()) for one in _INLINE.findall(prose))]


def words_of(line: str) -> list[str]:
    """Return the arguments of a command line, up to what the shell takes."""
    words = shlex.split(line, comments=True)[1:]
    end = next((at for at, word in enumerate(words) if word in _ENDS), len(words))
    # Three dots stand for what is of no concern there.
    return [word for word in words[:end] if word not in ("…", "...")]


def check(line: str) -> str | None:
    """Return what is wrong with a command; what is left out in prose is not."""
    command: Any = typer.main.get_command(app)
    context = command.context_class(command, info_name="gradlane")
    words = words_of(line)
    while isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        name = words.pop(0)
        found = command.get_command(context, name)
        if found is None:
            return f"{context.info_name} has no command {name!r}"
        command = found
        context = command.context_class(command, info_name=name, parent=context)
    known = {"--help"}.union(*(one.opts + one.secondary_opts for one in command.params))
    passes_on = command.context_settings.get("ignore_unknown_options", False)
    passes_on |= not command.context_settings.get("allow_interspersed_args", True)
    for word in () if passes_on else words:
        if word.startswith("--") and word.partition("=")[0] not in known:
            return f"{context.info_name} has no option {word}"
    if isinstance(command, TyperGroup) or "--help" in words:
        return None
    try:
        command.make_context(context.info_name, list(words), parent=context.parent)
    except Exception as error:
        # Typer has its own copy of click from some version on.
        kind = type(error).__name__
        if kind == "MissingParameter" or kind == "Exit":
            return None
        text = str(error.format_message()) if hasattr(error, "format_message") else repr(error)
        # A file of the reader's, or a word in capitals in place of a number.
        is_placeholder = any(re.fullmatch(r"[A-Z_]+", word) for word in words)
        return None if "does not exist" in text or is_placeholder else text
    return None


LINKING = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]
LINES = sorted({(page.name, line) for page in PAGES for line in commands_in(page.read_text())})


def test_there_are_commands() -> None:
    assert len(LINES) > 60
    assert {"README.md", "planning.md", "experiments.md"} <= {page for page, _ in LINES}


def test_every_printed_command_parses() -> None:
    wrong = [f"{page}: {line}: {found}" for page, line in LINES if (found := check(line))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gradlane lab nothing", "no command 'nothing'"),
        ("gradlane lab run --wokload resnet50", "--wokload"),
        ("gradlane lab run --workers two", "valid integer"),
        ("gradlane version now", "extra argument"),
    ],
)
def test_wrong_commands_are_found(line: str, words: str) -> None:
    assert words in (check(line) or "")


def test_what_holds_a_claim_exists() -> None:
    """Tests that the page of claims names are there, in the files that it names."""
    named = re.findall(r"`((?:tests|crates)/[^`:]+)(?:::(\w+))?`", CLAIMS.read_text())
    assert len(named) >= 20
    for path, test in named:
        text = (ROOT / path).read_text()
        assert not test or re.search(rf"\b(?:def|fn) {test}\b", text), f"{path} has no {test}"


def headings_of(page: Path) -> set[str]:
    """Return what links to a page's headings end with, as GitHub makes it."""
    lines = re.findall(r"^#+ (.+)$", _BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for path, heading in _LINK.findall(_BLOCK.sub("", page.read_text())):
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {path}"
        assert not heading or heading in headings_of(target), f"{page.name}: {path}#{heading}"


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages == {name for name in re.findall(r"\]\(([^)/]+\.md)\)", index)}


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
