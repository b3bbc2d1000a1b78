"""The search for settings by simulating candidates, one setting after another.

Each setting is tried with the values chosen for the settings before it. The base settings are kept
unless a candidate is predicted to be faster by more than `TIE`: the simulator cannot distinguish
smaller differences. The search is deterministic: the same budget of frames tries the same
candidates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradlane.planning.planner.candidates import TIE, Candidate, CandidateSimulator
from gradlane.planning.planner.scheme_search import (
    OTHER_ORDER,
    SchemeRestrictions,
    SchemeSearchResult,
    choose_schemes,
)
from gradlane.planning.schemes.layers import Schemes
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile
from gradlane.training.node.rules import AUTO, LEADER, OFF, SHARED
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.stragglers import LEAVES_OUT
from gradlane.training.options.strategy import (
    EXACT_STRATEGIES,
    RING,
    SLICE_ELEMS,
    own_slice_elems,
    ring_refusal,
)
from gradlane.training.plans.settings import ClusterFacts, Settings, local_of_session

SLICES = (16_667, 33_334, 100_000, 200_000, 500_000)
"""Slice sizes that are tried besides the base settings': below 50,000 elements those that fill
whole frames of the usual size with four bytes an element. Sizes between them were measured or
simulated slower (docs/experiments.md)."""
FRAMES = (32_768, 131_072, 262_144)
"""Frame sizes that are tried besides the base settings'. Of send buffers only the transport's own
is tried: the simulator does not model overflowing queues and overrates longer buffers
(docs/simulator.md)."""

_RING_SLICES = (4_096, 8_192, 16_384, 32_768)
"""Slice sizes of a ring, which are smaller."""

NODE_RULES = ("p3", "slicing", "wfbp", RING)
"""Strategies under which the ranks of a node can add up."""

Value = str | int | None


@dataclass(frozen=True)
class SimulatedValue:
    """A value of a setting, and its predicted step time."""

    value: Value
    step_s: float


@dataclass(frozen=True)
class DeclinedValue:
    """A value that is predicted to be faster but is not allowed."""

    value: Value
    step_s: float
    why: str


@dataclass(frozen=True)
class Choice:
    """The choice of one setting.

    Attributes:
        setting: its name, a field of `Settings`, or `schemes`.
        value: the chosen one.
        base: the value without a plan.
        step_s: predicted step time with `value`.
        base_step_s: predicted step time with `base`.
        tried: all simulated values, in their order.
        skipped: values without time to simulate them.
        declined: faster values that are not allowed, the fastest first.
        codec: that all these steps were simulated in; of the choice of a codec: the chosen one.
    """

    setting: str
    value: Value
    base: Value
    step_s: float
    base_step_s: float
    tried: tuple[SimulatedValue, ...]
    skipped: tuple[Value, ...] = ()
    declined: tuple[DeclinedValue, ...] = ()
    codec: str = RAW

    @property
    def runner_up(self) -> SimulatedValue | None:
        """The fastest value that was not chosen; None if there was no other."""
        others = [one for one in self.tried if one.value != self.value]
        return min(others, key=lambda one: one.step_s, default=None)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        settings: the fastest ones.
        step_s: predicted step time with them.
        base_step_s: predicted step time with the base settings.
        choices: one a setting.
        schemes: layers whose scheme is not the strategy's.
        scheme_reasons: by layer; none for layers without a choice.
    """

    settings: Settings
    step_s: float
    base_step_s: float
    choices: tuple[Choice, ...]
    schemes: Schemes = ()
    scheme_reasons: Mapping[str, str] = field(default_factory=dict)


def candidate_count() -> int:
    """Return the largest number of simulations of a search, without those of single layers."""
    # Full precision and a codec have sizes of their own.
    return len(EXACT_STRATEGIES) + 2 * (len(SLICES) + len(FRAMES)) + 11


def search(
    profile: Profile,
    facts: ClusterFacts,
    base: Settings,
    *,
    budget_s: float = 60.0,
    costs: MachineCosts | None = None,
    any_rounding: bool = False,
    on_simulated: Callable[[], None] = lambda: None,
) -> SearchResult | None:
    """Choose the settings with the shortest predicted step.

    Args:
        profile: of a step.
        facts: the cluster.
        base: the settings without a plan; its codec is one candidate, full precision the other.
        budget_s: seconds in all; candidates that would exceed it are skipped.
        costs: constants of the cluster's machines; None: the simulator's own.
        any_rounding: whether gradients may be added up in another order than that of the ranks,
            on a ring or from factors, so that results differ in their last bits.
        on_simulated: called after each simulation.

    Returns:
        The choice, or None if not even the base settings can be simulated in time.

    Raises:
        ValueError: the simulator refuses the profile or the cluster.
    """
    simulator = CandidateSimulator(profile, facts, budget_s, costs, on_simulated)
    by_default = base.local in (None, AUTO)
    base = replace(base, local=local_of_session(base, facts))
    given_codec = base.codec
    if given_codec is not None:
        # Encoding is chosen only if it is faster.
        base = replace(base, codec=RAW)
    simulator.run([Candidate(base)])
    base_step_s = simulator.step_s(Candidate(base))
    if base_step_s is None:
        return None
    restrictions = SchemeRestrictions.of(facts, any_rounding, given_codec)
    # Nodes that add up by default need not, where other roundings are allowed.
    start = replace(base, local=OFF) if by_default and any_rounding and base.local else base
    best = Candidate(start)
    strategy = _choose_setting(simulator, best, "strategy", _strategies(start, facts, restrictions))
    best = _with_setting(best, "strategy", strategy.value)
    choices = [strategy]
    reasons: Mapping[str, str] = {}
    # Only sums on servers can go on without late ranks.
    if best.settings.adds_up_on_nodes and by_default and given_codec is None:
        # All ranks of a node may talk to the network, with the same bits.
        local = _choose_setting(simulator, best, "local", (LEADER, SHARED))
        choices.append(local)
        best = _with_setting(best, "local", local.value)
    elif not best.settings.adds_up_on_nodes and not facts.leaves_out:
        schemes = choose_schemes(simulator, profile, facts, best, restrictions)
        choices += _scheme_choice(schemes)
        best, reasons = schemes.best, schemes.reasons
        for local in choose_local(simulator, facts, best, any_rounding, given_codec):
            choices.append(local)
            best = _with_setting(best, "local", local.value)
    plain = best._replace(schemes=())
    if best.settings.adds_up_on_nodes and not restrictions.factor_obstacle:
        # What was found for ranks by themselves is found anew for nodes.
        simulator.run([plain])
        if simulator.step_s(plain) is not None:
            schemes = choose_schemes(simulator, profile, facts, plain, restrictions)
            choices = [one for one in choices if one.setting != "schemes"]
            choices += _scheme_choice(schemes)
            best, reasons = schemes.best, schemes.reasons
    encoded = _with_setting(best, "codec", given_codec)
    best, tuning = _tune_sizes(simulator, best, base)
    if given_codec not in (None, RAW):
        best, tuning = _choose_codec(simulator, encoded, base, best, tuning)
    choices += tuning
    step_s = simulator.step_s(best)
    assert step_s is not None
    return SearchResult(best.settings, step_s, base_step_s, tuple(choices), best.schemes, reasons)


def _strategies(
    base: Settings, facts: ClusterFacts, restrictions: SchemeRestrictions
) -> Sequence[Value]:
    if facts.leaves_out:
        return LEAVES_OUT
    if base.adds_up_on_nodes:
        # Pulls from servers are made rank by rank.
        return tuple(one for one in EXACT_STRATEGIES if one in NODE_RULES)
    if base.strategy == RING and restrictions.ring_obstacle:
        # Between a ring and servers results differ in the last bits.
        return (RING,)
    if restrictions.ring_obstacle or ring_refusal(Settings.strategy, facts.update):
        return EXACT_STRATEGIES
    return (*EXACT_STRATEGIES, RING)


def choose_local(
    simulator: CandidateSimulator,
    facts: ClusterFacts,
    best: Candidate,
    any_rounding: bool,
    codec: str | None,
) -> list[Choice]:
    """Choose the sums on nodes (`local`).

    Args:
        simulator: where candidates are simulated; `best` has been.
        facts: the cluster.
        best: what was chosen so far, each rank talking for itself.
        any_rounding: whether gradients may be added up in another order.
        codec: one that is asked for, or None.

    Returns:
        The choice; empty if there is nothing to choose.
    """
    unable = facts.update == "server" or codec not in (None, RAW)
    if facts.ranks_per_node == 1 or facts.nodes == 1 or unable:
        return []
    if best.settings.strategy not in NODE_RULES:
        return []
    choice = _choose_setting(simulator, best, "local", (OFF, LEADER, SHARED))
    if any_rounding or choice.value == OFF:
        return [choice]
    kept = next(one for one in choice.tried if one.value == OFF)
    faster = sorted(
        (one for one in choice.tried if one.step_s < kept.step_s * (1.0 - TIE)),
        key=lambda one: one.step_s,
    )
    declined = tuple(DeclinedValue(one.value, one.step_s, OTHER_ORDER) for one in faster)
    return [
        replace(choice, value=OFF, step_s=kept.step_s, tried=(kept,), declined=declined),
    ]


def _scheme_choice(found: SchemeSearchResult) -> list[Choice]:
    """Return the choice of schemes as a row like those of settings; empty if there was none."""
    if len(found.tried) < 2 and not found.declined:
        return []
    tried = tuple(SimulatedValue(label, step_s) for label, step_s in found.tried)
    return [
        Choice(
            "schemes",
            found.label,
            found.base_label,
            found.step_s,
            found.base_step_s,
            tried,
            found.skipped,
            tuple(DeclinedValue(*one) for one in found.declined),
        )
    ]


def _tune_sizes(
    simulator: CandidateSimulator, best: Candidate, base: Settings
) -> tuple[Candidate, list[Choice]]:
    """Choose the sizes of slices, frames and buffers for a strategy and a codec."""
    choices = []
    for setting, values in _sizes(best.settings, base):
        if setting == "slice_elems" and best.settings.strategy not in SLICE_ELEMS:
            continue
        choice = _choose_setting(simulator, best, setting, values)
        choices.append(choice)
        best = _with_setting(best, setting, choice.value)
    return best, choices


def _choose_codec(
    simulator: CandidateSimulator,
    encoded: Candidate,
    base: Settings,
    raw: Candidate,
    raw_tuning: list[Choice],
) -> tuple[Candidate, list[Choice]]:
    """Choose between a codec and full precision, each with its own best sizes.

    With fewer bytes on the port, the host's cost of a slice or frame weighs more.
    """
    raw_step_s = simulator.step_s(raw)
    assert raw_step_s is not None
    simulator.run([encoded])
    codec = encoded.settings.codec
    plain = SimulatedValue(RAW, raw_step_s)
    if simulator.step_s(encoded) is None:
        choice = Choice("codec", RAW, RAW, raw_step_s, raw_step_s, (plain,), (codec,))
        return raw, [*raw_tuning, choice]
    best, tuning = _tune_sizes(simulator, encoded, base)
    step_s = simulator.step_s(best)
    assert step_s is not None
    tried = (plain, SimulatedValue(codec, step_s))
    if step_s < raw_step_s * (1.0 - TIE):
        choice = Choice("codec", codec, RAW, step_s, raw_step_s, tried, codec=codec or RAW)
        return best, [*tuning, choice]
    return raw, [*raw_tuning, Choice("codec", RAW, RAW, raw_step_s, raw_step_s, tried)]


def _sizes(settings: Settings, base: Settings) -> list[tuple[str, Sequence[Value]]]:
    slices = [base.slice_elems_in_force, *SLICES]
    if settings.strategy == RING:
        most = own_slice_elems(RING, encoded=settings.codec not in (None, RAW))
        assert most is not None
        slices = [min(elems, most) for elems in (*_RING_SLICES, *slices) if elems is not None]
    return [
        ("slice_elems", sorted({value for value in slices if value is not None})),
        ("frame_bytes", sorted({base.frame_bytes, *FRAMES})),
        ("send_buffer_bytes", sorted({base.send_buffer_bytes, 0})),
    ]


def _with_setting(candidate: Candidate, setting: str, value: Value) -> Candidate:
    changes: dict[str, Any] = {setting: value}
    if setting == "strategy" and value != candidate.settings.strategy:
        # Each strategy has a slice size of its own.
        changes["slice_elems"] = None
    return candidate._replace(settings=replace(candidate.settings, **changes))


def _choose_setting(
    simulator: CandidateSimulator, best: Candidate, setting: str, values: Sequence[Value]
) -> Choice:
    """Choose the value of one setting, with all others as in `best`."""
    kept = getattr(best.settings, setting)
    if setting == "slice_elems":
        kept = best.settings.slice_elems_in_force
        values = sorted({*values, kept})  # type: ignore[type-var]
    candidates = {value: _with_setting(best, setting, value) for value in values}
    simulator.run(list(candidates.values()))
    tried, skipped = [], []
    for value, candidate in candidates.items():
        step_s = simulator.step_s(candidate)
        if step_s is None:
            skipped.append(value)
        else:
            tried.append(SimulatedValue(value, step_s))
    kept_step_s = simulator.step_s(best)
    assert kept_step_s is not None
    fastest = min(tried, key=lambda one: one.step_s, default=SimulatedValue(kept, kept_step_s))
    chosen = SimulatedValue(kept, kept_step_s)
    if fastest.step_s < kept_step_s * (1.0 - TIE):
        # Among equally fast values, the one nearest to the previous one.
        as_fast = [one for one in tried if one.step_s <= fastest.step_s * (1.0 + TIE / 4)]
        chosen = min(as_fast, key=lambda one: _distance(one.value, kept))
    return Choice(
        setting,
        chosen.value,
        kept,
        chosen.step_s,
        kept_step_s,
        tuple(tried),
        tuple(skipped),
        codec=best.settings.codec or RAW,
    )


def _distance(value: Value, kept: Value) -> float:
    if isinstance(value, int) and isinstance(kept, int):
        return max((value + 1) / (kept + 1), (kept + 1) / (value + 1))
    # Strategies with another order of addition come last.
    order = (*EXACT_STRATEGIES, RING, OFF, LEADER, SHARED)
    return float(order.index(str(value))) if value in order else 0.0
