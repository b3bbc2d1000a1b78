"""The comparison of fewer bits with fewer exchanges as a page, `docs/between-nodes.md`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from gradlane.formats.rates import format_rate
from gradlane.report.markdown import filled, markdown_table
from gradlane.report.page import Cell, Table
from gradlane_papers.accuracy.curve import crossing
from gradlane_papers.accuracy.findings import Spread, final_loss, schemes_of, select, tasks_of
from gradlane_papers.accuracy.run import FULL_PRECISION, Run
from gradlane_papers.accuracy.study import RATES_BPS, Result
from gradlane_papers.accuracy.tasks import task_of

TEMPLATE = Path(__file__).with_name("between.md")
LOSS_MARGIN = 0.15
"""Above the final loss of full precision, as a share of it: what time is measured to."""
LIMITS = (
    "One learning rate for all, the one of exact training: an outer learning rate, or a smaller "
    "inner one, was not searched for. Few rounds: of 128 steps a round there are only six in a "
    "run, and of SparseLoCo's values a fiftieth travels in each round, so what it has not sent is "
    "a large part of so short a way. The papers train for thousands of rounds."
)


def losses_table(rows: Sequence[Result]) -> Table:
    """Return a line for each scheme of a task: bytes, held-out losses, and times to a loss."""
    full = select(rows, scheme=FULL_PRECISION)
    exact = final_loss(full).mean if full else None
    columns = (
        "scheme",
        "times fewer bytes",
        "loss of each seed",
        "mean",
        "over exact",
        *(f"seconds at {format_rate(rate)}" for rate in RATES_BPS),
    )
    body: list[list[Cell]] = []
    for scheme in schemes_of(rows):
        here = sorted(select(rows, scheme=scheme), key=lambda row: row.seed)
        losses = final_loss(here)
        over = "" if exact is None else f"{100 * (losses.mean / exact - 1):+.1f} %"
        times: list[Cell] = [None] * len(RATES_BPS)
        if exact is not None:
            goal = (1 + LOSS_MARGIN) * exact
            times = [_seconds_to(here, rate, goal) for rate in RATES_BPS]
        body.append(
            [
                f"`{scheme}`",
                f"{Spread(tuple(row.wire_ratio for row in here)).mean:.4g}",
                " ".join(f"{loss:.3f}" for loss in losses.values),
                f"{losses.mean:.3f}",
                over,
                *times,
            ]
        )
    return Table(columns, body)


def _seconds_to(rows: Sequence[Result], rate_bps: int, goal: float) -> Cell:
    found = [
        crossing(
            row.times_s(rate_bps),
            [-float("inf") if loss is None else -loss for loss in row.loss],
            -goal,
        )
        for row in rows
    ]
    reached = [one for one in found if one is not None]
    return f"{statistics.fmean(reached):.4g}" if len(reached) == len(found) else None


def curves_table(rows: Sequence[Result]) -> Table:
    """Return the mean held-out loss of each scheme after so many steps."""
    first = rows[0]
    body: list[list[Cell]] = []
    for scheme in schemes_of(rows):
        here = select(rows, scheme=scheme)
        losses = [
            [one for one in column if one is not None]
            for column in zip(*(row.loss for row in here), strict=True)
        ]
        body.append(
            [f"`{scheme}`", *(f"{statistics.fmean(one):.3f}" if one else None for one in losses)]
        )
    return Table(("steps", *map(str, first.evaluated)), body)


def page_text(rows: Sequence[Result], command: str, missing: Sequence[Run] = ()) -> str:
    """Return `docs/between-nodes.md`: `between.md` with its places filled.

    Args:
        rows: of the comparison; at least one.
        command: what made them.
        missing: runs that have not been made yet.
    """
    seeds = len({row.seed for row in rows})
    parts = []
    for task in tasks_of(rows):
        own = select(rows, task=task)
        what, optimizer = task_of(task).what, task_of(task).optimizer
        parts += [
            f"## {task}",
            f"{what[0].upper()}{what[1:]}: {own[0].parameters:,} parameters, {optimizer}, "
            f"{1e3 * own[0].compute_s:g} ms of compute a step.",
            *(
                markdown_table(table.columns, table.rows)
                for table in (losses_table(own), curves_table(own))
            ),
        ]
    return filled(
        TEMPLATE,
        command=command,
        workers=rows[0].workers,
        seeds=seeds,
        spread="" if seeds > 1 else "One seed: how far seeds lie apart is not known.",
        steps=", ".join(f"{task} {select(rows, task=task)[0].steps}" for task in tasks_of(rows)),
        tasks="\n\n".join(part.strip() for part in parts),
        margin=f"{LOSS_MARGIN:.0%}".replace("%", " %"),
        missing=_missing_in_words(missing),
        limits=LIMITS,
    )


def _missing_in_words(runs: Sequence[Run]) -> str:
    if not runs:
        return ""
    names = dict.fromkeys(f"`{run.scheme}`" for run in runs)
    return f"Not run yet, in some seed at least: {', '.join(names)}."
