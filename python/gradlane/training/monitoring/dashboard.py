"""The live page of a session: its address, the page itself, and its state as JSON."""

from __future__ import annotations

import socket

from gradlane.formats.live_state import STATE_PATH
from gradlane.formats.serialization.strict_json import dumps
from gradlane.report.live_page import live_page
from gradlane.training.log import log
from gradlane.training.monitoring.endpoint import Endpoint, Page, open_endpoint
from gradlane.training.monitoring.live import LiveView


def serve_dashboard(host: str, port: int, view: LiveView, rank: int) -> Endpoint:
    """Start to serve the page, and say where it is.

    Args:
        host: address to listen on.
        port: port to listen on; 0 for any that is free.
        view: makes the state, when someone looks.
        rank: this rank.

    Raises:
        ValueError: the address cannot be listened on; the message names it.
    """
    endpoint = open_endpoint(
        host,
        port,
        pages_of(view),
        name=f"the live page of rank {rank}",
        option="dashboard",
        remedy=", or 0 for any port that is free; another session may have this one",
    )
    url = url_of(endpoint)
    address = url.removeprefix("http://").rstrip("/")
    log.info("rank %d shows the training at %s and to `gradlane watch %s`", rank, url, address)
    if not endpoint.is_loopback:
        log.warning(
            "the live page has no password: anybody who reaches %s reads names of layers and "
            "figures of this training; 127.0.0.1 is for this machine alone",
            address,
        )
    return endpoint


def pages_of(view: LiveView) -> dict[str, Page]:
    """Return the page and its state, by path."""
    page = live_page()
    headers = tuple(f"{name}: {value}" for name, value in page.headers.items())
    return {
        "/": Page("text/html; charset=utf-8", lambda: page.content, headers),
        STATE_PATH: Page("application/json", lambda: dumps(view.state())),
    }


def url_of(endpoint: Endpoint) -> str:
    """Return the URL of an endpoint; one for all addresses has this machine's name."""
    host = endpoint.address[0]
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    return f"http://[{host}]:{endpoint.port}/" if ":" in host else f"http://{host}:{endpoint.port}/"
