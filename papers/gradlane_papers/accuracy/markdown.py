"""The study in words and tables: for the terminal, the page and `docs/accuracy.md`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gradlane.formats.rates import format_rate
from gradlane.report.markdown import filled, markdown_table
from gradlane.report.page import Cell, Table
from gradlane_papers.accuracy import findings
from gradlane_papers.accuracy.exchange import ALL, CONVOLUTIONS, LINEAR
from gradlane_papers.accuracy.findings import (
    Spread,
    final_accuracy,
    final_loss,
    schemes_of,
    select,
    tasks_of,
)
from gradlane_papers.accuracy.run import FULL_PRECISION
from gradlane_papers.accuracy.study import BUCKETS, RATES_BPS, STUDIED_CLOSELY, Result
from gradlane_papers.accuracy.tasks import task_of

TEMPLATE = Path(__file__).with_name("page.md")
PAGE_RATE_BPS = 1_000_000_000
"""The rate whose times the page of text has; files and the page with plots have all."""
FEW_SAVED = 0.5
"""Of the saving on the best task: less on another is worth a sentence."""
SPREAD = """
Tables are means over seeds ± standard deviation. Each seed is compared with the same seed of `p3`,
which is full precision; a difference is called noise where its 95 % interval over seeds (Student's
t) holds zero, or where it rounds to no tenth of a point. With few seeds that interval is wide, so
a large loss that is marked as noise needs more seeds.
""".strip()


def points(change: Spread) -> str:
    """Return a difference of accuracies in points, with its spread over seeds."""
    noise = " (noise)" if findings.is_noise(change) else ""
    if len(change.values) == 1:
        noise = " (one seed)"
    return f"{100 * change.mean:+.1f}{_spread(change)}{noise}"


def _percent(values: Spread) -> str:
    return f"{100 * values.mean:.1f}{_spread(values)}"


def _spread(values: Spread) -> str:
    """Return what stands behind a mean; one seed has no spread."""
    return f" ± {100 * values.deviation:.1f}" if len(values.values) > 1 else ""


def _ratio(rows: Sequence[Result]) -> str:
    return f"{Spread(tuple(row.wire_ratio for row in rows)).mean:.2f}"


def main_table(rows: Sequence[Result], task: str) -> Table:
    """Return a line for each scheme of a task: what it sends, and what it learned."""
    own = [row for row in select(rows, task=task, layers=ALL) if row.scheme not in BUCKETS]
    full = select(own, scheme=FULL_PRECISION)
    goal = findings.target(rows, task)

    def at_equal_time(here: Sequence[Result], rate_bps: int) -> Cell:
        time_s = findings.equal_time_s(rows, task, rate_bps)
        if time_s is None:
            return None
        found = [findings.accuracy_at(row, rate_bps, time_s) for row in here]
        return f"{100 * Spread(tuple(found)).mean:.1f}"

    def faster(here: Sequence[Result], rate_bps: int) -> Cell:
        speedup = None if goal is None else findings.speedup_to(here, full, rate_bps, goal)
        return None if speedup is None else f"{speedup:.2f}"

    columns = (
        "scheme",
        "times fewer bytes",
        "loss",
        "accuracy, %",
        "points from p3",
        *(f"accuracy, % in equal time at {format_rate(rate)}" for rate in RATES_BPS),
        *(f"x p3's time to accuracy at {format_rate(rate)}" for rate in RATES_BPS),
    )
    body: list[list[Cell]] = []
    for scheme in schemes_of(own):
        here = select(own, scheme=scheme)
        body.append(
            [
                scheme,
                _ratio(here),
                f"{final_loss(here).mean:.3f}",
                _percent(final_accuracy(here)),
                points(findings.difference(here, full)) if full else None,
                *(at_equal_time(here, rate_bps) for rate_bps in RATES_BPS),
                *(faster(here, rate_bps) for rate_bps in RATES_BPS),
            ]
        )
    return Table(columns, body, spread_caption(own))


def spread_caption(rows: Sequence[Result]) -> str:
    """Return how a table shows the differences of seeds."""
    if len({row.seed for row in rows}) == 1:
        return "One seed: how far seeds lie apart is not known."
    return "Means over seeds ± standard deviation."


def _learned(here: Sequence[Result], full: Sequence[Result]) -> list[Cell]:
    return [_ratio(here), _percent(final_accuracy(here)), points(findings.difference(here, full))]


def buckets_table(rows: Sequence[Result]) -> Table:
    """Return a line for each codec with each of its buckets."""
    own = select(rows, task=STUDIED_CLOSELY, layers=ALL)
    full = select(own, scheme=FULL_PRECISION)

    def without_bucket(scheme: str) -> str:
        return scheme.split(",bucket")[0].split(":bucket")[0]

    swept = set(map(without_bucket, BUCKETS))
    chosen = sorted(scheme for scheme in schemes_of(own) if without_bucket(scheme) in swept)
    if not full or not any(scheme in BUCKETS for scheme in chosen):
        chosen = []
    groups = [select(own, scheme=scheme) for scheme in chosen]
    return Table(
        ["codec", "times fewer bytes", "accuracy, %", "points from p3"],
        [[here[0].codec, *_learned(here, full)] for here in groups],
        f"Of the task {STUDIED_CLOSELY}; the canonical text names the bucket.",
    )


def convolutions_table(rows: Sequence[Result]) -> Table:
    """Return a line for each codec of which convolutions alone were encoded."""
    own = select(rows, task=STUDIED_CLOSELY)
    full = select(own, scheme=FULL_PRECISION, layers=ALL)
    return Table(
        ["codec", "layers", "times fewer bytes", "accuracy, %", "points from p3"],
        [
            [scheme, layers, *_learned(here, full)]
            for scheme in schemes_of(select(own, layers=CONVOLUTIONS))
            for layers in (CONVOLUTIONS, LINEAR, ALL)
            if (here := select(own, scheme=scheme, layers=layers)) and full
        ],
        f"Of the task {STUDIED_CLOSELY}.",
    )


def sweep_tables(rows: Sequence[Result]) -> dict[str, Table]:
    """Return the tables of what was swept, by title, without those that have no line."""
    tables = {
        "Buckets": buckets_table(rows),
        "Convolutions or all layers": convolutions_table(rows),
    }
    return {title: table for title, table in tables.items() if table.rows}


def _markdown(table: Table) -> str:
    """Return a table, with columns of one rate alone where it has some of several."""
    shown = [
        at
        for at, column in enumerate(table.columns)
        if " at " not in column or column.endswith(f" at {format_rate(PAGE_RATE_BPS)}")
    ]
    rows = ([row[at] for at in shown] for row in table.rows)
    return markdown_table([table.columns[at] for at in shown], rows)


def losses_in_words(rows: Sequence[Result]) -> str:
    """Return a sentence for each scheme that ends below full precision by more than noise."""
    if len({row.seed for row in rows}) == 1:
        return f"{spread_caption(rows)}\n"
    found = findings.loses(rows)
    if not found:
        return "No codec ends below full precision by more than the noise of seeds.\n"
    by_scheme: dict[str, list[str]] = {}
    for task, scheme, change in found:
        by_scheme.setdefault(scheme, []).append(f"{task} {points(change)}")
    return "".join(f"- `{scheme}`: {'; '.join(texts)}\n" for scheme, texts in by_scheme.items())


def eight_bits_in_words(rows: Sequence[Result]) -> str:
    """Return whether 8-bit QSGD ends where full precision does."""
    texts = []
    for task in tasks_of(rows):
        own = select(rows, task=task, layers=ALL)
        full = select(own, scheme=FULL_PRECISION)
        change = findings.difference(select(own, scheme="qsgd:bits=8"), full)
        if change.values:
            texts.append(f"{task} {points(change)}")
    if not texts:
        return ""
    return f"Points of 8-bit QSGD from full precision: {'; '.join(texts)}.\n"


def bytes_in_words(rows: Sequence[Result]) -> str:
    """Return a sentence for each scheme that saves far fewer bytes on some task than on another."""
    lines = []
    for scheme in schemes_of(rows):
        own = select(rows, scheme=scheme, layers=ALL)
        ratios = {row.task: row.wire_ratio for row in own}
        least, most = min(ratios, key=ratios.__getitem__), max(ratios, key=ratios.__getitem__)
        if ratios[least] < FEW_SAVED * ratios[most]:
            why = (
                "; it sends two averages for each run of the last dimension, which is short in "
                "convolutions"
                if own[0].codec.startswith("onebit:bucket=column")
                else ""
            )
            lines.append(
                f"- `{scheme}` saves few bytes on {least}: {ratios[least]:.1f} times fewer, where "
                f"{most} has {ratios[most]:.1f}{why}\n"
            )
    return "".join(lines)


def page_text(rows: Sequence[Result], command: str) -> str:
    """Return `docs/accuracy.md`: `page.md` with its places filled.

    Args:
        rows: of the study; at least one.
        command: what made them.
    """
    seeds = len({row.seed for row in rows})
    parts = []
    for task in tasks_of(rows):
        one = select(rows, task=task)[0]
        what, optimizer = task_of(task).what, task_of(task).optimizer
        parts += [
            f"## {task}",
            f"{what[0].upper()}{what[1:]}: {one.parameters:,} "
            f"parameters, {optimizer}, {1e3 * one.compute_s:g} ms of compute a step.",
            _markdown(main_table(rows, task)),
        ]
    for title, table in sweep_tables(rows).items():
        parts += [f"## {title}", table.caption, _markdown(table)]
    return filled(
        TEMPLATE,
        command=command,
        workers=rows[0].workers,
        seeds=seeds,
        spread=SPREAD if seeds > 1 else spread_caption(rows),
        steps=", ".join(f"{task} {select(rows, task=task)[0].steps}" for task in tasks_of(rows)),
        share=f"{findings.EQUAL_TIME_SHARE:.0%}",
        margin=round(100 * findings.TARGET_MARGIN),
        losses=losses_in_words(rows) + bytes_in_words(rows),
        eight_bits=eight_bits_in_words(rows),
        tasks="\n\n".join(part.strip() for part in parts),
    )
