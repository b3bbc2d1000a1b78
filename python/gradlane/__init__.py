"""gradlane: communication for data-parallel training that hides behind the computation.

`init` opens a session, `Session.prepare` hooks a model and its optimizer; the training loop stays
as it is. `profile` says what a training step computes. Importing this package loads neither torch
nor the compiled core; the first use does. Names in `__all__`, `gradlane.codecs`, `gradlane.ddp`,
`gradlane.distributed`, `gradlane.jax` and `gradlane.integrations` are public; everything else is
private by its place.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gradlane.errors import (
    ArrayRefusedError,
    CheckpointError,
    GradlaneError,
    PeerLostError,
    ProgressTimeoutError,
    RanksDifferError,
    RefusedError,
    RendezvousError,
    SessionClosedError,
    SessionFailedError,
    UnevenDataError,
    UsageError,
)
from gradlane.formats.version import __version__

if TYPE_CHECKING:
    from gradlane.formats.profile import Profile, ProfileError
    from gradlane.planning.planner.coordinator import Coordinator
    from gradlane.planning.profiler.measure import profile
    from gradlane.planning.profiler.operations import synthetic_profile
    from gradlane.planning.profiler.recorder import Recorder
    from gradlane.training.options.going_on import GoingOn
    from gradlane.training.options.local_updates import Local
    from gradlane.training.options.option_groups import Checkpoints, Monitoring, Network, Rendezvous
    from gradlane.training.options.stragglers import Stragglers
    from gradlane.training.options.strategy import LocalSums, Strategy
    from gradlane.training.plans.plan import Plan, PlanError, read_plan
    from gradlane.training.rendezvous.membership import MembershipChange
    from gradlane.training.sampler.sampler import ElasticSampler
    from gradlane.training.session.init import init
    from gradlane.training.session.session import Session

__all__ = [
    "ArrayRefusedError",
    "CheckpointError",
    "Checkpoints",
    "Coordinator",
    "ElasticSampler",
    "GoingOn",
    "GradlaneError",
    "Local",
    "LocalSums",
    "MembershipChange",
    "Monitoring",
    "Network",
    "PeerLostError",
    "Plan",
    "PlanError",
    "Profile",
    "ProfileError",
    "ProgressTimeoutError",
    "RanksDifferError",
    "Recorder",
    "RefusedError",
    "Rendezvous",
    "RendezvousError",
    "Session",
    "SessionClosedError",
    "SessionFailedError",
    "Stragglers",
    "Strategy",
    "UnevenDataError",
    "UsageError",
    "__version__",
    "init",
    "profile",
    "read_plan",
    "synthetic_profile",
]

_MODULES = {
    "Checkpoints": "training.options.option_groups",
    "Coordinator": "planning.planner.coordinator",
    "ElasticSampler": "training.sampler.sampler",
    "GoingOn": "training.options.going_on",
    "Local": "training.options.local_updates",
    "LocalSums": "training.options.strategy",
    "MembershipChange": "training.rendezvous.membership",
    "Monitoring": "training.options.option_groups",
    "Network": "training.options.option_groups",
    "Plan": "training.plans.plan",
    "PlanError": "training.plans.plan",
    "Profile": "formats.profile",
    "ProfileError": "formats.profile",
    "Recorder": "planning.profiler.recorder",
    "Rendezvous": "training.options.option_groups",
    "Session": "training.session.session",
    "Stragglers": "training.options.stragglers",
    "Strategy": "training.options.strategy",
    "init": "training.session.init",
    "profile": "planning.profiler.measure",
    "read_plan": "training.plans.plan",
    "synthetic_profile": "planning.profiler.operations",
}
"""Names that need torch or the core, and the modules that hold them."""
_PARTS = ("codecs", "ddp", "distributed", "integrations", "jax")
"""Public modules, loaded when they are first asked for."""


def __getattr__(name: str) -> Any:
    """Load a name that needs torch or the core when it is first asked for."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"gradlane.{_MODULES[name]}"), name)
    if name in _PARTS:
        return importlib.import_module(f"gradlane.{name}")
    raise AttributeError(f"module 'gradlane' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all public names, loaded or not."""
    return sorted([*__all__, *_PARTS])
