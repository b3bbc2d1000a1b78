"""Which settings make a training fastest on a cluster, decided by simulating them.

`coordinator` holds what is known about model and cluster and answers questions, `search` simulates
candidates and chooses, `plan` is the file with choices and reasons. `links` measures a real
cluster; `learning` has a session record its own steps and switch to what is best. Imports go from
the later to the earlier; only the last two need torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradlane.planner.settings import Settings

if TYPE_CHECKING:
    from gradlane.planner.coordinator import Coordinator
    from gradlane.planner.links import LinkReport, probe
    from gradlane.planner.plan import Plan, read_plan

__all__ = ["Coordinator", "LinkReport", "Plan", "Settings", "probe", "read_plan"]

_PLACES = {
    "Coordinator": "coordinator",
    "LinkReport": "links",
    "Plan": "plan",
    "probe": "links",
    "read_plan": "plan",
}


def __getattr__(name: str) -> Any:
    """Load what is asked for when it is first asked for."""
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"gradlane.planner.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'gradlane.planner' has no attribute {name!r}")
