"""Texts for choices, with figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gradlane.planning.planner.candidates import TIE
from gradlane.planning.planner.search import Choice, SearchResult, Value
from gradlane.planning.schemes.costs import Cost, Counts, Layer
from gradlane.planning.schemes.step_time import HybridStep
from gradlane.planning.simulation.bound import Bound, describe_binding
from gradlane.training.options.codec_options import RAW
from gradlane.training.plans.settings import ClusterFacts

_NO_DIFFERENCE = 0.002
_VALUE_TEXTS = {
    "strategy": {
        "p3": "slices, the most urgent first",
        "slicing": "slices, first come first served",
        "wfbp": "slices of 2 MB, first come first served, and a barrier between steps",
        "kvstore": "whole tensors, first come first served, pulled after a notice",
        "deferred-pull": "whole tensors, pulled when the next step begins",
        "ring": "slices round a ring, the most urgent first",
    },
    "local": {
        "off": "each rank talks to the network for itself",
        "leader": "aggregate in the node first, its first rank sends for all",
        "shared": "aggregate in the node first, each rank sends its share",
    },
    "schemes": {
        "sfb": "factors of every layer",
        "ps+sfb": "factors of some layers, servers for the rest",
        "ring+sfb": "factors of some layers, a ring for the rest",
        "ps+ring": "a ring for large layers, servers for small ones",
        "ps+ring+sfb": "factors, a ring for other large layers, servers for small ones",
    },
}


def reason_of(choice: Choice) -> str:
    """Return the reason for a value in one sentence."""
    if choice.setting == "codec":
        return _codec_reason(choice)
    runner_up = choice.runner_up
    skipped = ""
    if choice.skipped:
        skipped = f"; no time to simulate {', '.join(map(format_value, choice.skipped))}"
    if runner_up is None:
        return f"kept: nothing else was simulated{skipped}{_declined_reason(choice)}"
    times = [one.step_s for one in choice.tried]
    if choice.value != choice.base:
        gain = _percent(choice.base_step_s / choice.step_s - 1.0)
        text = (
            f"{_value_text(choice)}{gain} faster than {format_value(choice.base)} "
            f"({_ms(choice.base_step_s)}); next best {format_value(runner_up.value)}, "
            f"{_ms(runner_up.step_s)}"
        )
    elif max(abs(time_s / choice.step_s - 1.0) for time_s in times) <= _NO_DIFFERENCE:
        text = "kept: makes no difference here"
    elif abs(runner_up.step_s / choice.step_s - 1.0) <= _NO_DIFFERENCE:
        text = f"{_value_text(choice)}kept: {format_value(runner_up.value)} is as fast"
    elif runner_up.step_s < choice.step_s:
        gain = _percent(1.0 - runner_up.step_s / choice.step_s)
        text = (
            f"kept: {format_value(runner_up.value)} would give {_ms(runner_up.step_s)}, {gain} "
            f"less, and below {TIE * 100:g} % the simulator cannot tell"
        )
    else:
        loss = _percent(runner_up.step_s / choice.step_s - 1.0)
        text = (
            f"{_value_text(choice)}kept: next best is {format_value(runner_up.value)}, "
            f"{_ms(runner_up.step_s)}, {loss} slower"
        )
    return text + skipped + _declined_reason(choice)


def _declined_reason(choice: Choice) -> str:
    """Describe the faster values that may not be chosen."""
    text = ""
    for reason_text in dict.fromkeys(one.why for one in choice.declined):
        values = [
            f"{one.value} would give {_ms(one.step_s)}, "
            f"{_percent(1.0 - one.step_s / choice.step_s)} less"
            for one in choice.declined
            if one.why == reason_text
        ]
        text += f"; declined: {', and '.join(values)}, but {reason_text}"
    return text


def _codec_reason(choice: Choice) -> str:
    """Return why gradients are encoded, or why not although a codec was given."""
    if choice.value != RAW:
        gain = _percent(choice.base_step_s / choice.step_s - 1.0)
        return (
            f"{gain} faster than full precision ({_ms(choice.base_step_s)}); it changes what is "
            "learned"
        )
    other = choice.runner_up
    if other is None:
        return "declined: no time to simulate it"
    change = other.step_s / choice.step_s - 1.0
    how = f"{_percent(abs(change))} {'less' if change < 0 else 'more'}"
    return (
        f"declined: communication is not the limit; {other.value} would give "
        f"{_ms(other.step_s)}, {how} than full precision"
    )


def summary_of(found: SearchResult, facts: ClusterFacts, bound: Bound) -> str:
    """Return the plan's effect, and what limits it."""
    step_s = found.step_s
    where = facts.where
    reached = f"{_ms(step_s)} a step, {bound.compute_s / step_s * 100:.0f} % of linear scaling"
    if facts.workers == 1:
        return "One worker: nothing is sent, so nothing is to be planned."
    compute_binds = bound.step_s <= bound.compute_s * (1.0 + TIE)
    if _is_base(found):
        if compute_binds and step_s <= bound.compute_s * (1.0 + 2.0 * TIE):
            return (
                f"Nothing helps here: the compute is the bound, and {where} reach it ({reached}); "
                "the settings stay as they are."
            )
        head = f"The settings stay as they are: nothing that was simulated is faster ({reached})"
    else:
        gain = _percent(found.base_step_s / step_s - 1.0)
        head = (
            f"The plan gives {reached}, {gain} faster than a session without one "
            f"({_ms(found.base_step_s)})"
        )
    limit = f"nothing exact can be faster than {_ms(bound.step_s)}"
    if compute_binds:
        return f"{head}; the compute is the bound: {limit}."
    return (
        f"{head}; the bound is {describe_binding(bound.binding)}: {limit}, unless fewer bytes "
        "travel or the link is faster."
    )


def scheme_reason(layer: Layer, counts: Counts, best: Cost, costs: Sequence[Cost]) -> str:
    """Return the reason for a layer's scheme in one sentence."""
    reason = f"{best.scheme}: {best.node_floats / 1e6:.2f} million numbers a node and step"
    others = [cost for cost in costs if cost is not best]
    if not others:
        return f"{reason}, the only scheme that there is for it"
    reason += "; " + ", ".join(f"{one.scheme} {one.node_floats / 1e6:.2f}" for one in others)
    rows = f"{counts.rows:,} rows a worker"
    if layer.rows is None:
        rows += " (the batch: how often the layer is applied was not recorded)"
    return f"{reason}; factors of {rows}"


def poseidon_summary(
    schemes: Mapping[str, str],
    hybrid: HybridStep,
    plain: HybridStep,
    facts: ClusterFacts,
    steps_s: Mapping[str, float | None],
) -> str:
    """Return the savings of factors.

    Args:
        schemes: by layer.
        hybrid: predicted from bytes alone.
        plain: the same for servers alone.
        facts: of the cluster.
        steps_s: simulated, `step_s` with the schemes and `base_step_s` with servers alone; None
            where there was no time for it.
    """
    factored = [name for name, scheme in schemes.items() if scheme == "sfb"]
    where = facts.where
    if not factored:
        return f"Factors are fewer numbers for no layer on {where}: all by servers."
    share = max(hybrid.node_bytes) / max(plain.node_bytes) if max(plain.node_bytes) else 1.0
    step_s, base_step_s = steps_s["step_s"], steps_s["base_step_s"]
    if step_s is None or base_step_s is None:
        how, step_s, base_step_s = "By bytes alone a step takes", hybrid.step_s, plain.step_s
    else:
        how = "Simulated, a step takes"
    return (
        f"Factors for {len(factored)} of {len(schemes)} layers: {_percent(share)} of the bytes "
        f"of servers alone, {max(hybrid.node_bytes) / 1e6:.1f} MB a node and step. {how} "
        f"{_ms(step_s)} on {where}, {_ms(base_step_s)} with servers alone "
        f"({_ms(hybrid.rebuild_s)} of it for rebuilding gradients)."
    )


def format_value(value: Value) -> str:
    """Return a value as text."""
    if isinstance(value, int):
        return f"{value:,}" if value else "fitted"
    return str(value)


def _value_text(choice: Choice) -> str:
    text = _VALUE_TEXTS.get(choice.setting, {}).get(str(choice.value))
    return f"{text}; " if text else ""


def _is_base(found: SearchResult) -> bool:
    return all(choice.value == choice.base for choice in found.choices)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"
