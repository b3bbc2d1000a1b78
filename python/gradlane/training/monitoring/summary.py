"""The summary line of a run: the share of waiting, the slowest layer and the latest rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gradlane.training.monitoring.metrics import Metrics, waited_s

_NOTABLE_RATIO = 1.5
"""A rank is named if it comes last this many times as often as by chance."""


_NEGLIGIBLE_SHARE = 0.005
"""Smaller shares of the time are not explained."""
WORTH_A_MOVE = 1.02
"""How many times faster than DDP is worth leaving it."""


@dataclass(frozen=True)
class LateRank:
    """Lateness of a rank, over the slices of all owners.

    Attributes:
        rank: the rank.
        last_share: share of the slices to which it contributed last.
        late_s_mean: mean seconds after the rank before it.
    """

    rank: int
    last_share: float
    late_s_mean: float


def late_ranks(owner_reports: Iterable[Mapping[str, Any]]) -> list[LateRank]:
    """Sum up the owners' reports; the rank that was last most often comes first.

    Args:
        owner_reports: by owner, `stragglers` (rows by rank, with `last_count` and `late_s`) and
            `gathered_slices`.
    """
    gathered = 0
    counts: dict[int, int] = {}
    late_s: dict[int, float] = {}
    for report in owner_reports:
        gathered += report.get("gathered_slices") or 0
        for rank, row in enumerate(report.get("stragglers") or ()):
            counts[rank] = counts.get(rank, 0) + row["last_count"]
            late_s[rank] = late_s.get(rank, 0.0) + row["late_s"]
    rows = [
        LateRank(rank, count / gathered, late_s[rank] / count)
        for rank, count in counts.items()
        if count and gathered
    ]
    return sorted(rows, key=lambda row: row.last_share, reverse=True)


def beside_ddp(ddp_s: float, step_s: float) -> str:
    """Return what DDP would take, and whether to stay with it.

    Args:
        ddp_s: seconds of a step with DDP.
        step_s: the same with gradlane.
    """
    text = f"DDP with its best bucket size would take {_duration(ddp_s)} a step"
    if ddp_s < WORTH_A_MOVE * step_s:
        return f"{text}: stay with DDP"
    return f"{text}, {ddp_s / step_s:.2f} times as long"


def summary_line(metrics: Metrics, late: Sequence[LateRank], ddp_s: float | None = None) -> str:
    """Return the line.

    Args:
        metrics: of the first rank.
        late: the ranks that came last, the most frequent one first.
        ddp_s: seconds of a step with DDP, as simulated for the plan; None: there is no plan.
    """
    steps = metrics["steps"]
    share = min(1.0, steps["wait_share"])
    parts = [
        f"{metrics['step']} steps, {_duration(steps['median_s'])} each (median)",
        f"{share:.0%} of the time waiting for other ranks "
        f"({_duration(share * steps['mean_s'])} a step on average)" + _slowest_layer(metrics),
    ]
    named = _latest_rank(late, metrics["world_size"])
    if named:
        parts.append(named)
    parts += [
        f"went on without rank {one['rank']} in step {one['step']}" for one in metrics["lost"]
    ]
    parts += [f"rank {one['rank']} joined in step {one['step']}" for one in metrics["joined"]]
    left_out = _left_out_ranks(metrics)
    if left_out:
        parts.append(left_out)
    if metrics["clip_steps"]:
        clipped = metrics["clipped_steps"] / metrics["clip_steps"]
        mean = metrics["clip_factor_mean"]
        parts.append(f"gradients clipped in {clipped:.0%} of the steps, by {mean:.3g} on average")
    if ddp_s is not None:
        beside = beside_ddp(ddp_s, steps["median_s"])
        parts.append(f"{beside} (simulated with the profile and the links of the plan)")
    return "; ".join(parts)


def _slowest_layer(metrics: Metrics) -> str:
    most = next(iter(metrics["layer_waits"]), None)
    if most is None or waited_s(most) <= 0.0 or metrics["steps"]["wait_share"] < _NEGLIGIBLE_SHARE:
        return ""
    longest = f", {_duration(most['wait_s_max'])} in step {most['max_step']} at worst"
    shown = longest if most["max_step"] else ""
    return f", most of it for {most['name']!r} ({most['wait_share']:.0%}{shown})"


def _latest_rank(late: Sequence[LateRank], world_size: int) -> str:
    if not late or world_size == 1:
        return ""
    first = late[0]
    if first.last_share * world_size < _NOTABLE_RATIO:
        return "no rank stands out as the last"
    return (
        f"rank {first.rank} came last for {first.last_share:.0%} of the slices, by "
        f"{_duration(first.late_s_mean)} on average"
    )


def _left_out_ranks(metrics: Metrics) -> str:
    rows = sorted(metrics["left_out"], key=lambda row: row["left_out_share"], reverse=True)
    named = [
        f"rank {row['rank']} {row['left_out_share']:.0%}"
        + (f" ({_duration(row['late_s_mean'])} late)" if row["late_count"] else "")
        for row in rows
        if row["left_out_steps"]
    ]
    if not named:
        return ""
    return f"steps that went on without: {', '.join(named)}"


def _duration(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} us"
