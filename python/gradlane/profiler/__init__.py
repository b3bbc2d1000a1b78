"""Records what a training step computes, and when gradients appear and parameters are needed.

`contents` says what a profile holds, `reading` reads one and finds what is wrong with it; neither
imports torch. `Recorder` records a training that somebody else runs, `profile` runs some steps
itself, `synthetic` makes a profile from operation counts.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradlane.profiler.contents import (
    BatchTime,
    Profile,
    ProfileError,
    ProfileModule,
    ProfileTensor,
)

if TYPE_CHECKING:
    from gradlane.profiler.measure import profile
    from gradlane.profiler.operations import synthetic
    from gradlane.profiler.recorder import Recorder

__all__ = [
    "BatchTime",
    "Profile",
    "ProfileError",
    "ProfileModule",
    "ProfileTensor",
    "Recorder",
    "profile",
    "synthetic",
]

_MODULES = {"Recorder": "recorder", "profile": "measure", "synthetic": "operations"}
"""Where what needs torch is."""


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name in _MODULES:
        module = importlib.import_module(f"gradlane.profiler.{_MODULES[name]}")
        return getattr(module, name)
    raise AttributeError(f"module 'gradlane.profiler' has no attribute {name!r}")
