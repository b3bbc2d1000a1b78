"""Chooses settings by simulating candidates: one setting after another.

Each setting is tried with what was chosen for those before it.
The base settings are kept unless something is predicted to be faster by more than `TIE`: below
that the simulator cannot tell them apart. Nothing here is random; with the same budget of frames
the same candidates are tried.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from gradlane.codec_choice import RAW
from gradlane.options import EXACT_STRATEGIES, SLICE_ELEMS
from gradlane.planner.settings import ClusterFacts, Settings
from gradlane.planner.simulations import predict_step_s, simulated_frames
from gradlane.whatif.costs import MachineCosts
from gradlane.whatif.profiles import Profile

TIE = 0.01
"""Share of a step by which something must be faster to be chosen over the base settings."""
SLICES = (12_500, 25_000, 100_000, 200_000, 500_000)
FRAMES = (32_768, 131_072, 262_144)
"""What is tried beside the base settings. Of send buffers only the transport's own: the simulator
knows no queue that overflows, and finds longer ones better than they are (docs/simulator.md)."""

_FRAMES_PER_S = 400_000
"""Frames that one thread simulates in a second on a slow machine."""

Value = str | int | None


@dataclass(frozen=True)
class Tried:
    """A value of a setting and the step time that it was predicted to give."""

    value: Value
    step_s: float


@dataclass(frozen=True)
class Choice:
    """What was chosen for one setting.

    Attributes:
        setting: its name, a field of `Settings`.
        value: what was chosen.
        base: what it would be without a plan.
        step_s: predicted step time with `value`.
        base_step_s: with `base`.
        tried: everything that was simulated, in the order of values.
        skipped: values that were not, since there was no time.
    """

    setting: str
    value: Value
    base: Value
    step_s: float
    base_step_s: float
    tried: tuple[Tried, ...]
    skipped: tuple[Value, ...] = ()

    @property
    def runner_up(self) -> Tried | None:
        """The fastest of what was not chosen; None if nothing else was tried."""
        others = [one for one in self.tried if one.value != self.value]
        return min(others, key=lambda one: one.step_s, default=None)


@dataclass(frozen=True)
class Found:
    """What a search came to.

    Attributes:
        settings: the best.
        step_s: predicted step time with them.
        base_step_s: predicted step time with the base settings.
        choices: one a setting.
    """

    settings: Settings
    step_s: float
    base_step_s: float
    choices: tuple[Choice, ...]


def number_of_candidates() -> int:
    """How many simulations a whole search takes at most."""
    return len(EXACT_STRATEGIES) + len(SLICES) + len(FRAMES) + 5


def search(
    profile: Profile,
    facts: ClusterFacts,
    base: Settings,
    *,
    budget_s: float = 60.0,
    costs: MachineCosts | None = None,
    on_simulated: Callable[[], None] = lambda: None,
) -> Found | None:
    """Choose the settings that are predicted to be fastest.

    Args:
        profile: what a step computes.
        facts: the cluster.
        base: the settings without a plan; its codec is one candidate, full precision the other.
        budget_s: candidates that would take longer than what is left of it are left out.
        costs: constants of the cluster's machines in place of the simulator's own.
        on_simulated: called after each simulation.

    Returns:
        The choice, or None if not even the base settings can be simulated in time.

    Raises:
        ValueError: the simulator refuses the profile or the cluster.
    """
    simulations = _Simulations(profile, facts, budget_s, costs, on_simulated)
    asked = base.codec
    if asked is not None:
        # Nothing is encoded that is not faster for it.
        base = replace(base, codec=RAW)
    simulations.run([base])
    base_step_s = simulations.step_s(base)
    if base_step_s is None:
        return None
    best, choices = base, []
    for setting, values in _candidates(base, asked):
        if setting == "slice_elems" and best.strategy not in SLICE_ELEMS:
            continue
        choice = _choose(simulations, best, base, setting, values)
        choices.append(choice)
        best = _with(best, setting, choice.value)
    step_s = simulations.step_s(best)
    assert step_s is not None
    return Found(best, step_s, base_step_s, tuple(choices))


def _candidates(base: Settings, codec: str | None) -> list[tuple[str, Sequence[Value]]]:
    slices = (base.slice_elems_in_force, *SLICES)
    encoded: list[tuple[str, Sequence[Value]]] = []
    if codec is not None and codec != RAW:
        encoded.append(("codec", (RAW, codec)))
    return [
        ("strategy", EXACT_STRATEGIES),
        ("slice_elems", sorted({value for value in slices if value is not None})),
        ("frame_bytes", sorted({base.frame_bytes, *FRAMES})),
        ("send_buffer_bytes", sorted({base.send_buffer_bytes, 0})),
        *encoded,
    ]


def _with(settings: Settings, setting: str, value: Value) -> Settings:
    changes: dict[str, Any] = {setting: value}
    if setting == "strategy" and value != settings.strategy:
        # Each strategy has a slice size of its own.
        changes["slice_elems"] = None
    return replace(settings, **changes)


def _choose(
    simulations: _Simulations,
    best: Settings,
    base: Settings,
    setting: str,
    values: Sequence[Value],
) -> Choice:
    """Choose the value of one setting, all others being as in `best`."""
    kept = getattr(best, setting)
    if setting == "slice_elems":
        kept = best.slice_elems_in_force
        values = sorted({*values, kept})  # type: ignore[type-var]
    candidates = {value: _with(best, setting, value) for value in values}
    simulations.run(list(candidates.values()))
    tried, skipped = [], []
    for value, settings in candidates.items():
        step_s = simulations.step_s(settings)
        if step_s is None:
            skipped.append(value)
        else:
            tried.append(Tried(value, step_s))
    kept_step_s = simulations.step_s(best)
    assert kept_step_s is not None
    fastest = min(tried, key=lambda one: one.step_s, default=Tried(kept, kept_step_s))
    chosen = Tried(kept, kept_step_s)
    if fastest.step_s < kept_step_s * (1.0 - TIE):
        # Of what is as fast, the one nearest to what was there.
        as_fast = [one for one in tried if one.step_s <= fastest.step_s * (1.0 + TIE / 4)]
        chosen = min(as_fast, key=lambda one: _distance(one.value, kept))
    return Choice(
        setting, chosen.value, kept, chosen.step_s, kept_step_s, tuple(tried), tuple(skipped)
    )


def _distance(value: Value, kept: Value) -> float:
    if isinstance(value, int) and isinstance(kept, int):
        return max((value + 1) / (kept + 1), (kept + 1) / (value + 1))
    known = value in EXACT_STRATEGIES
    return float(EXACT_STRATEGIES.index(str(value))) if known else 0.0


class _Simulations:
    """Simulations of one profile on one cluster, each done once, several at a time."""

    def __init__(
        self,
        profile: Profile,
        facts: ClusterFacts,
        budget_s: float,
        costs: MachineCosts | None,
        on_simulated: Callable[[], None],
    ) -> None:
        self._profile = profile
        self._facts = facts
        self._deadline_s = time.monotonic() + budget_s
        self._costs = costs
        self._on_simulated = on_simulated
        self._step_s: dict[Settings, float] = {}
        self._threads = min(4, os.cpu_count() or 1)

    def step_s(self, settings: Settings) -> float | None:
        """Predicted step time; None if it was left out."""
        return self._step_s.get(settings)

    def run(self, candidates: Sequence[Settings]) -> None:
        """Simulate what was not simulated yet and fits into the time that is left."""
        new = [one for one in dict.fromkeys(candidates) if one not in self._step_s]
        with ThreadPoolExecutor(self._threads) as pool:
            for settings, step_s in zip(new, pool.map(self._simulate, new), strict=True):
                if step_s is not None:
                    self._step_s[settings] = step_s

    def _simulate(self, settings: Settings) -> float | None:
        frames = simulated_frames(self._profile, self._facts, settings)
        if time.monotonic() + frames / _FRAMES_PER_S > self._deadline_s:
            return None
        step_s = predict_step_s(self._profile, self._facts, settings, self._costs)
        self._on_simulated()
        return step_s
