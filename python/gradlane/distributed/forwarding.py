"""Methods of works that torch does not forward to works written in Python.

Torch wraps the work that a backend in Python returns, and its wrapper forwards `wait` and
`get_future` alone: `is_completed` is False for ever, and a receive from any rank cannot tell the
rank. While gradlane's backend is registered, these methods find the work behind the wrapper by way
of `get_future`; works of other backends answer as before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from torch.futures import Future

from gradlane.training.torch_internals import c10d

_FORWARDED = (
    "is_completed",
    "is_success",
    "exception",
    "source_rank",
    "_source_rank",
    "result",
    "_get_sequence_number",
)


class _Probe(threading.local):
    """The question of a thread to the work behind a wrapper: `asks`, and what has answered."""

    asks = False
    found: Any = None


_probe = _Probe()


def answer(work: Any) -> Any:
    """Return a future for the asking thread if this thread asks for the work itself, else None."""
    if not _probe.asks:
        return None
    _probe.found = work
    return Future()


def forward_methods() -> None:
    """Replace the methods of torch's `Work`, once."""
    for name in _FORWARDED:
        original = getattr(c10d.Work, name)
        if not hasattr(original, "forwards"):
            setattr(c10d.Work, name, _forwarding(name, original))


def _forwarding(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(work: Any) -> Any:
        # A wrapper says that it has not completed, and has succeeded, whatever is behind it.
        if name == "is_completed" and original(work):
            return True
        behind = _behind(work)
        return original(work) if behind is None else getattr(behind, name)()

    call.forwards = name  # type: ignore[attr-defined]
    return call


def _behind(work: Any) -> Any:
    """Return gradlane's work behind a wrapper, or None."""
    _probe.asks = True
    try:
        work.get_future()
    except RuntimeError:
        # The work of a backend without futures.
        return None
    finally:
        found, _probe.asks, _probe.found = _probe.found, False, None
    return found
