"""The live page of a session: one HTML file that asks its own server for `state.json`.

Nothing of a session is in the file. The browser is told to run nothing but the script in it, and to
load nothing from elsewhere.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from gradlane.report.page import asset


@dataclass(frozen=True)
class LivePage:
    """The page, and the headers that it is served with."""

    content: bytes
    headers: Mapping[str, str]


@functools.cache
def live_page() -> LivePage:
    """Return the page."""
    style = asset("page.css") + asset("live.css")
    script = asset("page.js") + asset("live.js")
    html = asset("live.html").replace("{{style}}", style).replace("{{script}}", script)
    policy = (
        "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; "
        f"form-action 'none'; frame-ancestors 'none'; style-src {_digest(style)}; "
        f"script-src {_digest(script)}"
    )
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"}
    return LivePage(html.encode(), headers)


def _digest(text: str) -> str:
    """Return how a policy names an inline style or script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
