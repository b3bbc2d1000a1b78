"""gradlane: communication for data-parallel training that hides behind the computation.

`init` opens a session, `Session.prepare` hooks a model and its optimizer; the training loop stays
as it is. `profile` says what a training step computes. Importing this package is cheap: torch and
the compiled core are loaded by the first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradlane.errors import (
    ArrayRefused,
    CheckpointError,
    GradlaneError,
    PeerLost,
    ProgressTimeout,
    RanksDiffer,
    RendezvousError,
    SessionClosed,
    SessionFailed,
    UnevenData,
    UsageError,
)

if TYPE_CHECKING:
    from gradlane.profiler.measure import profile
    from gradlane.session.session import Session
    from gradlane.session.start import init

__version__ = "0.1.0"

__all__ = [
    "ArrayRefused",
    "CheckpointError",
    "GradlaneError",
    "PeerLost",
    "ProgressTimeout",
    "RanksDiffer",
    "RendezvousError",
    "Session",
    "SessionClosed",
    "SessionFailed",
    "UnevenData",
    "UsageError",
    "__version__",
    "init",
    "profile",
]

_PARTS = ("codecs", "integrations", "jax", "planner", "profiler", "torch")
"""Modules that programs use by name; each is loaded when it is first asked for."""


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name in ("init", "Session"):
        from gradlane.session import start

        return getattr(start, name)
    if name == "profile":
        from gradlane.profiler import measure

        return measure.profile
    if name in _PARTS:
        return importlib.import_module(f"gradlane.{name}")
    raise AttributeError(f"module 'gradlane' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Name what there is, loaded or not."""
    return sorted([*__all__, *_PARTS])
