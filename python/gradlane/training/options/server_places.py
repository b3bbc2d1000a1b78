"""Parse `--servers`: `3`, the first three ranks; `separate=2`, two ranks beside the workers."""

from __future__ import annotations

from typing import NamedTuple

from gradlane.errors import RefusedError

_SEPARATE = "separate="


class ServerPlaces(NamedTuple):
    """The ranks that are servers; at most one of the two is given."""

    servers: int | None = None
    """Number of training ranks, from rank 0 on, that own slices; None: all."""
    serving: int = 0
    """Number of ranks beside the training ones that own all slices."""


def parse_servers(text: str | None) -> ServerPlaces:
    """Parse the text of `--servers`.

    Raises:
        ValueError: the text is neither `N` nor `separate=N`.
    """
    if text is None:
        return ServerPlaces()
    number = text.removeprefix(_SEPARATE)
    if not number.isdecimal() or int(number) < 1:
        raise RefusedError(
            f"servers is {text!r}; use a number of ranks, 1 or more, such as 3, or separate=3 for "
            "ranks that only serve"
        )
    if number == text:
        return ServerPlaces(servers=int(number))
    return ServerPlaces(serving=int(number))


def servers_text(servers: int | None, serving: int) -> str:
    """Return the servers in a few words; empty if all training ranks own slices."""
    if serving:
        return f"{serving} more, which only serve" if serving > 1 else "one more, which only serves"
    return "" if servers is None else f"{servers} of them servers"
