"""The site of `make docs`, and the reference pages that are made from the code."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gradlane
from gradlane.cli.reference import cli_page, variables_page
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.planning.simulation.scenarios import STRATEGIES as SIMULATED
from gradlane.training.node.rules import NODE_STRATEGIES
from gradlane.training.options import strategy as strategies
from tests.paths import PACKAGE, ROOT

DOCS = ROOT / "docs"
SITE = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("material") is None, reason="needs the extra `docs`"
)


@pytest.mark.parametrize(
    ("name", "text"), [("cli.md", cli_page()), ("environment.md", variables_page())]
)
def test_pages_from_the_code_are_up_to_date(name: str, text: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == text, (
        "write it again: python -m gradlane.cli.reference docs"
    )


def test_the_navigation_has_every_page() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.glob("*.md")}
    assert pages == set(re.findall(r"[\w-]+\.md", SITE)) - {
        "ARCHITECTURE.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
    }, "mkdocs.yml lists the pages of docs"
    folders = {path.parent.name for path in DOCS.glob("*/*.md")}
    assert folders == set(re.findall(r"\[(\w+)/\*\]", SITE))


def first_cells(page: str) -> list[str]:
    """Return the code in the first cells of a page's tables."""
    text = (DOCS / page).read_text(encoding="utf-8")
    return re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (.*?) \|", text, re.MULTILINE)))


def test_every_strategy_has_a_row() -> None:
    shown = first_cells("strategies.md")
    assert set(strategies.STRATEGIES) <= set(shown)
    # Schemes and nodes have rows of their own, or a page that the table of settings names.
    text = (DOCS / "strategies.md").read_text(encoding="utf-8")
    for name in (*SIMULATED, *NODE_STRATEGIES, *strategies.SCHEMES):
        assert f"`{name}`" in text, name
    for name in shown:
        if name not in SIMULATED:
            parse_strategy(name)


def test_every_error_has_a_row() -> None:
    public = [name for name in gradlane.__all__ if name.endswith("Error")]
    rows = first_cells("errors.md")
    assert sorted(rows) == sorted(set(public) - {"GradlaneError"})
    text = (DOCS / "errors.md").read_text(encoding="utf-8")
    bases = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", text, re.MULTILINE)
    assert len(bases) == len(rows)
    for name, base in bases:
        assert issubclass(getattr(gradlane, name), getattr(builtins, base)), f"{name} is no {base}"


def test_refusals_are_of_the_class_that_the_page_names() -> None:
    """A plain ValueError would be in no row, and a rank of the lab would print its calls."""
    folders = ("training", "ddp", "integrations")
    files = [path for folder in folders for path in (PACKAGE / folder).rglob("*.py")]
    files += [PACKAGE / "codecs.py", PACKAGE / "jax.py"]
    assert not [path for path in files if "raise ValueError(" in path.read_text(encoding="utf-8")]


def test_every_public_name_is_in_the_reference() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^::: gradlane\.([\w.]+)$", text, re.MULTILINE))
    errors = {name for name in gradlane.__all__ if hasattr(gradlane.errors, name)}
    assert shown >= set(gradlane.__all__) - errors - {"__version__"}
    assert "errors" in shown


@needs_mkdocs
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    site = tmp_path / "site"
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert built.returncode == 0 and "WARNING" not in built.stderr, built.stderr
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for tag in re.findall(r"<(?:script|link|img|source|iframe)\b[^>]*>", text):
            assert not re.search(r'(?:src|href|srcset)="(?:https?:)?//', tag), f"{page}: {tag}"
    api = (site / "api.html").read_text(encoding="utf-8")
    assert all(f'id="gradlane.{name}"' in api for name in ("init", "Session.prepare", "profile"))
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    assert any(entry["location"].startswith("examples/plain_loop") for entry in index["docs"])
