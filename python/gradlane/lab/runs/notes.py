"""Sentences and tables beside the rows of one workload at one rate, on a terminal and a page."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from rich.table import Table

from gradlane.lab.runs.rows import Row
from gradlane.report.console import text_table
from gradlane.training.options.strategy import FACTOR_SCHEMES

EVEN_BELOW = 1.1
"""Largest over mean below which unevenness is not worth a line."""
REPLAYED = (
    "Replayed factors: only the elements that are checked are rebuilt, and the time of the whole "
    "product is slept, at the speed of the step's own arithmetic. Digests are other ones than "
    "those of strategies without factors, since gradients and factors are invented apart."
)
_UNDER_BOUND = 0.95
"""A step of less of its bound is no step of a long run; ports are measured to a few per cent."""
SPANS = 5
"""Parts of the steps whose mean loss is shown."""


def factor_notes(rows: Iterable[Row]) -> list[str]:
    """Return what factors save by the schemes' costs and what was sent; empty without factors."""
    last = {row.strategy: row for row in rows}
    plain = last.get("p3")
    notes = []
    for strategy, row in last.items():
        by_scheme = row.metrics.get("tensors_by_scheme", {})
        tensors = sum(by_scheme.get(scheme, 0) for scheme in FACTOR_SCHEMES)
        if not tensors or not row.expected_tx_bytes or not row.tx_bytes_per_step:
            continue
        note = (
            f"{strategy}: factors for {tensors} tensors, {row.expected_tx_bytes / 1e6:.1f} MB a "
            f"port and step by the schemes' costs, {row.tx_bytes_per_step / 1e6:.1f} MB sent with "
            "headers"
        )
        if plain is not None and plain.expected_tx_bytes and plain.tx_bytes_per_step:
            by_cost = row.expected_tx_bytes / plain.expected_tx_bytes
            sent = row.tx_bytes_per_step / plain.tx_bytes_per_step
            note += f"; {by_cost:.3f} of p3's by cost, {sent:.3f} sent"
        notes.append(f"{note}.")
    return [*notes, REPLAYED] if notes else []


def norm_notes(rows: Sequence[Row]) -> list[str]:
    """Return how far norms of clipped gradients are from DDP's; empty where none was clipped."""
    ddp = {row.repeat: row for row in reversed(rows) if row.is_baseline and any(row.norms)}
    apart: dict[str, list[float]] = {}
    for row in rows:
        base = ddp.get(row.repeat)
        if base is None or row.is_baseline or not row.communicates:
            continue
        pairs = zip(row.norms, base.norms, strict=False)
        found = [abs(own / other - 1) for own, other in pairs if own and other]
        apart[row.strategy] = apart.get(row.strategy, []) + found
    return [
        f"{strategy}: norms of all gradients differ from DDP's by at most {max(found):.1e} of them "
        f"({len(found)} steps)."
        for strategy, found in apart.items()
        if found
    ]


def balance_notes(rows: Iterable[Row]) -> list[str]:
    """Return a line for each strategy whose ports or owners are uneven."""
    # Greetings alone are uneven, and nobody minds.
    last = {row.strategy: row.balance for row in rows if row.communicates}
    notes = []
    for strategy, balance in last.items():
        if not balance or max(balance.port_imbalance, balance.owned_imbalance) < EVEN_BELOW:
            continue
        busiest = max(balance.nodes, key=lambda node: node.busier_bytes)
        least = min(node.busier_bytes for node in balance.nodes)
        note = (
            f"{strategy}: node {busiest.node} is busiest with {busiest.busier_bytes / 1e6:.1f} MB "
            f"a step one way, {balance.port_imbalance:.2f} times the mean; the least busy has "
            f"{least / 1e6:.1f} MB"
        )
        if any(owner.owned_bytes for owner in balance.owners):
            most = max(balance.owners, key=lambda owner: owner.owned_bytes)
            note += (
                f"; rank {most.rank} owns {most.owned_bytes / 1e6:.1f} MB, "
                f"{balance.owned_imbalance:.2f} times the mean"
            )
        notes.append(f"{note}.")
    return notes


def loss_over_time(row: Row) -> tuple[list[float], list[float]]:
    """Return the nominal time, in seconds, at which each measured step was over, and its loss."""
    times_s = list(itertools.accumulate(row.step_s))
    return times_s, row.loss[-len(times_s) :]


def loss_table(rows: Sequence[Row]) -> Table | None:
    """Return mean losses by steps, and when the fastest strategy ended; None without a straggler.

    Late ranks cost time under `wait`, and gradients under the other rules; only both tell which is
    worth more. Of each strategy the first row is shown.
    """
    first = {row.strategy: row for row in reversed(rows) if row.has_losses}
    shown = [row for row in reversed(first.values()) if row.straggler is not None]
    if not shown:
        return None
    curves = {row.strategy: loss_over_time(row) for row in shown}
    span = max(1, shown[0].steps // SPANS)
    end_s = min(times_s[-1] for times_s, _ in curves.values())
    starts = range(0, shown[0].steps - span + 1, span)
    headings = [f"{start + 1}-{start + span}" for start in starts]
    body = []
    for row in shown:
        times_s, losses = curves[row.strategy]
        cells = [statistics.fmean(losses[start : start + span]) for start in starts]
        done = sum(time_s <= end_s for time_s in times_s)
        cells.append(statistics.fmean(losses[max(0, done - span) : max(1, done)]))
        quality = (row.evaluation or {}).get("accuracy")
        accuracy = "-" if quality is None else f"{quality:.1%}"
        body.append([row.strategy, *(f"{loss:.3f}" for loss in cells), accuracy])
    columns = ("strategy", *headings, f"after {end_s:.2f} s", "test accuracy")
    return text_table("mean losses", columns, body)


def _least_step_s(row: Row) -> float:
    """Return the median of the steps or their mean, of which samples a second are: the less."""
    return min(row.step_s_median, statistics.fmean(row.step_s or [row.step_s_median]))


def bound_notes(rows: Sequence[Row]) -> list[str]:
    """Return a line about strategies whose step is shorter than any can be in the long run."""
    under = dict.fromkeys(
        row.strategy
        for row in rows
        if row.communicates
        and row.bound_step_s
        and _least_step_s(row) < _UNDER_BOUND * row.bound_step_s
    )
    if not under:
        return []
    return [
        f"{', '.join(under)}: below the bound, as few steps can be, of which one waits for no "
        "earlier one: no evidence; take more --warmup and --steps."
    ]
