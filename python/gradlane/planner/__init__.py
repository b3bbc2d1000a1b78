"""Which settings make a training fastest on a cluster, decided by simulating them.

`coordinator` holds what is known about model and cluster and answers questions, `search` simulates
candidates and chooses, `plan` is the file with choices and reasons. `learning` has a session record
its own steps and switch to what is best; it alone needs torch, with `probe`, which measures a real
cluster's links.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradlane.planner.settings import Settings

if TYPE_CHECKING:
    from gradlane.planner.coordinator import Coordinator
    from gradlane.planner.plan import Plan, read_plan
    from gradlane.probe.links import LinkReport, probe

__all__ = ["Coordinator", "LinkReport", "Plan", "Settings", "probe", "read_plan"]

_PLACES = {
    "Coordinator": "planner.coordinator",
    "LinkReport": "probe.links",
    "Plan": "planner.plan",
    "probe": "probe.links",
    "read_plan": "planner.plan",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is first asked for."""
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"gradlane.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'gradlane.planner' has no attribute {name!r}")
