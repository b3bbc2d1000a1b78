"""How commands say which ranks are servers: `3`, the first three; `separate=2`, two beside."""

from __future__ import annotations

from typing import NamedTuple

SERVERS_HELP = (
    "3: the first three ranks own slices; separate=2: two ranks beside the workers own them, and "
    "only serve; all workers if absent."
)
"""Of the option `--servers`."""
_SEPARATE = "separate="


class ServerPlaces(NamedTuple):
    """Which ranks are servers; of both at most one is given."""

    servers: int | None = None
    """The first so many of those that train."""
    serving: int = 0
    """So many beside those that train."""


def parse_servers(text: str | None) -> ServerPlaces:
    """Read what `--servers` says.

    Raises:
        ValueError: it is neither a number nor `separate=` with one.
    """
    if text is None:
        return ServerPlaces()
    number = text.removeprefix(_SEPARATE)
    if not number.isdecimal() or int(number) < 1:
        raise ValueError(
            f"servers is {text!r}; use a number of ranks, 1 or more, such as 3, or separate=3 for "
            "ranks that only serve"
        )
    if number == text:
        return ServerPlaces(servers=int(number))
    return ServerPlaces(serving=int(number))


def servers_text(servers: int | None, serving: int) -> str:
    """Say which ranks are servers, in a few words; empty if all that train are."""
    if serving:
        return f"{serving} more, which only serve" if serving > 1 else "one more, which only serves"
    return "" if servers is None else f"{servers} of them servers"
