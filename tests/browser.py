"""Pages opened in a real browser without a window, and asked what they show."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs the chromium browser")

_EARLY = """<script>
  window.problems = [];
  addEventListener("error", (event) => problems.push(String(event.message)));
  addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
  for (const kind of ["error", "warn"]) {
    const before = console[kind];
    console[kind] = (...words) => { problems.push(words.join(" ")); before(...words); };
  }
</script>"""
_FRAME = """<!doctype html><body style="margin:0"><script>
  addEventListener("message", (event) => { document.body.dataset.result = event.data; });
</script>"""


def dump(url: str, folder: Path) -> str:
    """Open a served page, let its scripts run for some seconds of their time, and return it.

    Args:
        url: of the page.
        folder: for the browser's own files.
    """
    return _run_browser(url, folder)


def probe(page: Path, folder: Path, script: str, *, width: int = 1100) -> Any:
    """Open a page of this width in CSS pixels and return what a script in it says.

    Args:
        page: the page; a copy is opened, in which everything that goes wrong lands in `problems`.
        folder: for the copy and the browser's own files.
        script: calls `say(value)` once, with a value that JSON can carry; runs after the page's.
        width: a window cannot be made this narrow, so the page stands in a frame.
    """
    text = page.read_text(encoding="utf-8")
    late = (
        '<script>const say = (value) => parent.postMessage(JSON.stringify(value), "*");'
        f"{script}</script></body>"
    )
    copy, frame = folder / "probed.html", folder / "frame.html"
    copy.write_text(text.replace("<head>", f"<head>{_EARLY}", 1).replace("</body>", late), "utf-8")
    style = f"border:0;width:{width}px;height:900px"
    frame.write_text(f'{_FRAME}<iframe src="{copy.as_uri()}" style="{style}"></iframe>', "utf-8")
    found = re.search(r'data-result="([^"]*)"', _run_browser(frame.as_uri(), folder))
    assert found is not None, "the page's script did not come to its end"
    return json.loads(html.unescape(found.group(1)))


def _run_browser(url: str, folder: Path) -> str:
    assert BROWSER is not None
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=5000"]
    command += ["--window-size=1200,1000"]
    result = subprocess.run(
        [*command, url], capture_output=True, text=True, timeout=120, check=True
    )
    return result.stdout
