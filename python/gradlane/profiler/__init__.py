"""Records what a training step computes, and when gradients appear and parameters are needed.

`contents` says what a profile holds, `reading` reads one and finds what is wrong with it; neither
imports torch. `Recorder` takes a profile of a running training.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradlane.profiler.contents import (
    BatchTime,
    Profile,
    ProfileError,
    ProfileModule,
    ProfileTensor,
)

if TYPE_CHECKING:
    from gradlane.profiler.recorder import Recorder

__all__ = [
    "BatchTime",
    "Profile",
    "ProfileError",
    "ProfileModule",
    "ProfileTensor",
    "Recorder",
]


def __getattr__(name: str) -> Any:
    """Load what needs torch when it is first asked for."""
    if name == "Recorder":
        from gradlane.profiler import recorder

        return recorder.Recorder
    raise AttributeError(f"module 'gradlane.profiler' has no attribute {name!r}")
