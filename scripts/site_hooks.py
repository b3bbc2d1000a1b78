"""Hooks of MkDocs for `make docs`: folders in the navigation, and files from outside of `docs`.

An entry `FOLDER/*` of the navigation stands for the folder's pages. The pages of the root and the
examples become pages of the site, and links to them lead there.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
ROOT_PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
_PAGE_NAME = re.compile(r"\(`docs/([\w-]+)\.md`\)")
_EXAMPLE_LINK = re.compile(r"\]\((?:\.\./)+examples(?:/(\w+)\.py)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder in place of `FOLDER/*`."""
    config.nav = _expanded(config.nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and one for each example."""
    pages = {name: (ROOT / name).read_text(encoding="utf-8") for name in ROOT_PAGES}
    # The README of the root is for readers of the repository: the site has its own first page.
    pages = {
        name: text.replace("](docs/", "](").replace("](README.md)", "](../README.md)")
        for name, text in pages.items()
    }
    listed = "".join(f"- [{path.name}]({path.stem}.md)\n" for path in EXAMPLES)
    pages["examples/README.md"] = f"# Examples\n\n{listed}"
    for path in EXAMPLES:
        code = path.read_text(encoding="utf-8")
        pages[f"examples/{path.stem}.md"] = f"# {path.name}\n\n```python\n{code}```\n"
    for name, text in pages.items():
        level = InclusionLevel.NOT_IN_NAV if "/" in name else InclusionLevel.UNDEFINED
        files.append(File.generated(config, name, content=text, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links to examples to their pages, and let names of pages in options be links."""
    if page.file.src_uri == "options.md":
        markdown = _PAGE_NAME.sub(r"([\1](\1.md))", markdown)
    return _EXAMPLE_LINK.sub(lambda match: f"](examples/{match[1] or 'README'}.md)", markdown)


def _expanded(entry: Any, docs: Path) -> Any:
    """Return a part of the navigation with the pages of folders in it."""
    if isinstance(entry, dict):
        return {title: _expanded(below, docs) for title, below in entry.items()}
    if not isinstance(entry, list):
        return entry
    found: list[Any] = []
    for one in entry:
        if isinstance(one, str) and one.endswith("/*"):
            names = sorted(path.name for path in (docs / one[:-2]).glob("*.md"))
            names.sort(key=lambda name: name != "README.md")
            found += [f"{one[:-2]}/{name}" for name in names]
        else:
            found.append(_expanded(one, docs))
    return found
