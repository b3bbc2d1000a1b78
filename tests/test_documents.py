"""Every link of the README and the pages leads somewhere, and every page is in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.documents.blocks import PAGES
from tests.paths import ROOT

CLAIMS = ROOT / "docs" / "claims.md"
_BLOCK = re.compile(r"^```[a-z]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


LINKING = [*PAGES, ROOT / "ARCHITECTURE.md", ROOT / "CHANGELOG.md"]


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
def test_pictures_exist(page: Path) -> None:
    for path in re.findall(r'\b(?:src|srcset)="([^"]+)"', page.read_text(encoding="utf-8")):
        assert (page.parent / path).is_file(), f"{page.name} shows {path}"


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


SCREEN_LINES = 45
SCREEN_WORDS = 600


def section_of(page: Path, heading: str) -> str:
    """Return a page's section under a heading, or what stands before its first one."""
    lines = page.read_text().splitlines()
    starts = [at for at, line in enumerate(lines) if line.startswith("## ")]
    if not heading:
        return "\n".join(lines[: min(starts, default=len(lines))])
    begins = [
        at
        for at, line in enumerate(lines)
        if (found := re.match(r"#+ (.+)$", line))
        and re.sub(r"[^\w\- ]", "", found[1].lower()).replace(" ", "-") == heading
    ]
    begin = begins[0]
    end = min((at for at in starts if at > begin), default=len(lines))
    return "\n".join(lines[begin:end])


def test_each_question_is_answered_on_one_screen() -> None:
    """The index asks what a new user asks; each answer is one click away, and short."""
    index = (ROOT / "docs" / "README.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (\[.+?) \|$", index.split("## First steps")[0], re.MULTILINE)
    assert len(rows) >= 10
    for question, answers in rows:
        found = _LINK.findall(answers)
        assert found, question
        for path, heading in found:
            text = section_of(ROOT / "docs" / path, heading)
            size = len(text.splitlines()), len(text.split())
            assert size[0] <= SCREEN_LINES and size[1] <= SCREEN_WORDS, (question, path, size)


QUESTIONS = {
    "is it the network": "is-it-the-network.md",
    "launch it on slurm": "launching.md#slurm",
    "on kubernetes": "launching.md#kubernetes",
    "why is it not faster": "first-evening.md#5-faster",
    "what does this error mean": "errors.md",
    "change what is learned": "first-evening.md#4-the-same-learning",
    "my model is sharded": "sharded.md",
    "a rank dies": "going-on.md",
    "which options first": "options.md#which-options-first",
    "back to ddp": "coming-from-ddp.md#back-to-ddp",
}
"""Words of ten questions of new users, and where each is answered."""


def test_the_ten_questions_are_two_clicks_from_the_front_page() -> None:
    assert "(docs/README.md)" in (ROOT / "README.md").read_text()
    index = (ROOT / "docs" / "README.md").read_text().split("## First steps")[0]
    rows = re.findall(r"^\| (.+?) \| (\[.+?) \|$", index, re.MULTILINE)
    for words, place in QUESTIONS.items():
        answers = [links for question, links in rows if words in question.lower()]
        assert any(place in links for links in answers), (words, answers)


UNCLEAR = re.compile(r"\b(those of|that of|of which|so many|what there is of)\b")
"""Words that send a reader back to find what they stand for."""


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str
)
def test_pages_name_what_they_speak_of(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text())
    found = [text[max(0, at.start() - 40) : at.end() + 20] for at in UNCLEAR.finditer(text)]
    assert not found


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
