"""An interactive page from the rows of a what-if, with sliders over the computed grid.

The page shows the simulated values only: each slider has a stop for each value of the grid. It
starts at the rate at which another order of sending gains most, since that change is free.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradlane.formats.rates import format_rate
from gradlane.planning.advice.causes import GOAL
from gradlane.planning.advice.faults import COLUMNS, cells_of
from gradlane.planning.simulation.grid import WORKER
from gradlane.report.page import (
    Block,
    Cell,
    Details,
    Measurement,
    Paragraph,
    Section,
    Table,
    Widget,
    measured_here,
    write_report,
)
from gradlane.training.options.codec_options import RAW

Row = Mapping[str, Any]
RING_FUSED = "ring-fused"
"""The strategy that is a formula."""
REQUIRED = (
    "strategy",
    "workers",
    "ranks_per_node",
    "rate_bps",
    "compression",
    "scaling_factor",
    "step_s",
    "bound_scaling_factor",
    "compute_s",
    "samples_per_s",
)
"""Fields that a row must have."""
ANSWER_FIELDS = (
    "workers",
    "ranks_per_node",
    "rate_bps",
    "bottleneck",
    "text",
    "baseline_scaling_factor",
)
DIMENSIONS = (
    ("workers", "Workers"),
    ("ranks_per_node", "Workers on a node"),
    ("rate_bps", "Link"),
    ("compression", "Compression"),
)


def report_from_whatif(
    content: Mapping[str, Any], path: str | Path, *, command: str | None = None
) -> None:
    """Write a page about simulated clusters.

    Args:
        content: `profile`, `rows`, `answers` and `needs` as `gradlane whatif --json` writes them,
            and `faults` where `--mtbf` was given; `tensors` and `pictures` (one step of some of
            the clusters) where there are any.
        path: the HTML file to write.
        command: the command line; None: that of this process.

    Raises:
        ValueError: there are no rows, or a row lacks a field or has it twice.
        OSError: the file cannot be written.
    """
    rows = _check_rows(_with_nodes(content.get("rows")))
    content = {**content, "answers": _with_nodes(content.get("answers") or [])}
    profile = content.get("profile") or {}
    model = str(profile.get("model") or rows[0].get("model") or "a model")
    sections = [Section("", [_explorer(content, rows)])]
    if content.get("needs"):
        sections.append(Section("What 95 % takes", _needs(content["needs"])))
    if content.get("answers"):
        sections.append(Section("In words", [_answers(content["answers"])]))
    if content.get("faults"):
        sections.append(Section("What faults cost", _faults(content["faults"])))
    codecs = dict.fromkeys(str(row.get("codec") or RAW) for row in rows)
    sections.append(Section("All rows", [_all_rows(rows, codec) for codec in codecs]))
    sections.append(Section("", [_computed(profile, rows, command)]))
    write_report(
        path, f"{model}: is the network the bottleneck?", sections, summary=_summary(profile)
    )


def _with_nodes(rows: Any) -> Any:
    """Add the field `ranks_per_node`, which older files lack."""
    if not isinstance(rows, Sequence):
        return rows
    return [{"ranks_per_node": 1, **row} if isinstance(row, Mapping) else row for row in rows]


def _check_rows(rows: Any) -> Sequence[Row]:
    if not isinstance(rows, Sequence) or not rows:
        raise ValueError("there are no rows of a what-if to report")
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(rows):
        for key in REQUIRED:
            if not isinstance(row, Mapping) or row.get(key) is None:
                raise ValueError(f"what-if row {number} has no '{key}'")
        position = (_series(row), *(row[key] for key, _ in DIMENSIONS))
        if position in seen:
            raise ValueError(
                f"what-if row {number} is there twice: {', '.join(map(str, position))}"
            )
        seen.add(position)
    return rows


def _series(row: Row) -> str:
    """Return the name of a row among those at the same position: strategy, topology, codec."""
    name = str(row["strategy"])
    if row.get("topology") not in (None, "flat"):
        name += f" {row['topology']}"
    if row.get("codec") not in (None, "raw"):
        name += f" {row['codec']}"
    if row.get("update") not in (None, WORKER):
        name += f" {row['update']}"
    return name


def _summary(profile: Mapping[str, Any]) -> str:
    if not profile.get("gradient_bytes"):
        return ""
    return (
        f"{profile['gradient_bytes'] / 1e6:.1f} MB of gradients in {profile['tensors']} tensors a "
        f"step, {profile['compute_s'] * 1e3:.0f} ms of compute for {profile['batch_size']} samples "
        "on each worker. Simulated with gradlane's own engine; move the sliders to your cluster."
    )


def _explorer(content: Mapping[str, Any], rows: Sequence[Row]) -> Widget:
    values = {key: sorted({row[key] for row in rows}) for key, _ in DIMENSIONS}
    names = list(dict.fromkeys(_series(row) for row in rows))
    texts = {
        "workers": [f"{count}" for count in values["workers"]],
        "ranks_per_node": [f"{count}" for count in values["ranks_per_node"]],
        "rate_bps": [format_rate(rate) for rate in values["rate_bps"]],
        "compression": [
            "none" if ratio == 1 else f"{ratio:g}\N{MULTIPLICATION SIGN}"
            for ratio in values["compression"]
        ],
    }
    answers = content.get("answers") or []
    baseline = str(answers[0]["baseline"]) if answers else names[0]
    data = {
        "goal": GOAL,
        "values": values,
        "texts": texts,
        "series": names,
        "baseline": baseline if baseline in names else names[0],
        "rings": sorted({_series(row) for row in rows if row["strategy"] == RING_FUSED}),
        "rows": [[_series(row), *(row[key] for key in REQUIRED[1:])] for row in rows],
        "columns": ["series", *REQUIRED[1:]],
        "answers": [[answer[key] for key in ANSWER_FIELDS] for answer in answers],
        "tensors": content.get("tensors") or [],
        "pictures": content.get("pictures") or [],
        "start": _start_position(rows, values, names, baseline),
    }
    return Widget(_markup(values, texts), data, "explorer")


def _start_position(
    rows: Sequence[Row], values: Mapping[str, Sequence[Any]], names: Sequence[str], baseline: str
) -> dict[str, int]:
    """Return the first position: the rate at which other strategies gain most without
    compression."""
    workers = values["workers"][len(values["workers"]) // 2]
    each = values["ranks_per_node"][0]
    least = values["compression"][0]
    gains: dict[Any, float] = {}
    for rate in values["rate_bps"]:
        here = {
            _series(row): float(row["scaling_factor"])
            for row in rows
            if tuple(row[key] for key, _ in DIMENSIONS) == (workers, each, rate, least)
            # A formula that charges hosts nothing promises more than an order of sending brings.
            and (row["strategy"] != RING_FUSED or baseline == RING_FUSED)
        }
        if here:
            gains[rate] = max(here.values()) - here.get(baseline, min(here.values()))
    best = max(gains, key=lambda rate: gains[rate], default=values["rate_bps"][0])
    return {
        "workers": values["workers"].index(workers),
        "ranks_per_node": 0,
        "rate_bps": values["rate_bps"].index(best),
        "compression": 0,
    }


def _markup(values: Mapping[str, Sequence[Any]], texts: Mapping[str, Sequence[str]]) -> str:
    controls, fixed = [], []
    for key, label in DIMENSIONS:
        if len(values[key]) > 1:
            controls.append(
                f'<div class="control"><label for="control-{key}">{label}</label>'
                f'<output id="shown-{key}" for="control-{key}"></output>'
                f'<input type="range" id="control-{key}" data-control="{key}" min="0" '
                f'max="{len(values[key]) - 1}" step="1"></div>'
            )
        elif key != "ranks_per_node" or values[key] != [1]:
            fixed.append(f"{label.lower()} {html.escape(texts[key][0])}")
    fixed_text = f'<p class="fixed">The same throughout: {", ".join(fixed)}.</p>' if fixed else ""
    plots = "".join(
        f'<figure><h3>Scaling against {what}</h3><div class="plot" role="img" '
        f'id="against-{key}" data-against="{key}"></div></figure>'
        for key, what in (
            ("rate_bps", "bandwidth"),
            ("workers", "workers"),
            ("ranks_per_node", "workers on a node"),
            ("compression", "compression"),
        )
        if len(values[key]) > 1
    )
    return (
        '<div class="explorer" data-explorer>'
        f'<form class="controls" aria-label="Cluster">{"".join(controls)}</form>{fixed_text}'
        '<div class="verdict" aria-live="polite"><p class="state" id="state"></p>'
        '<ul id="answer"></ul></div>'
        '<h3 id="here"></h3><div class="scroll" tabindex="0"><table class="bars" '
        'aria-describedby="here"><thead><tr><th scope="col">strategy</th><th scope="col">share of '
        'ideal speed</th><th scope="col" class="number">step</th><th scope="col" class="number">'
        'samples/s</th></tr></thead><tbody id="bars"></tbody></table></div>'
        '<p class="caption">Ideal speed is compute alone, without any communication. '
        '<span class="key goal-key"></span>95 %. <span class="key bound-key"></span>The bound: no '
        "order of sending can do better.</p>"
        f'<div class="against">{plots}</div>'
        '<div id="steps"><h3>Where the time of one step goes</h3>'
        '<p class="caption">From the begin of backward to the end of the next forward, on rank 0. '
        'Colours tell layers: <span class="ramp" aria-hidden="true"></span> from those that the '
        "next forward needs first to those that it needs last. Drag over a part to enlarge it, "
        'double-click to go back.</p><div id="pictures"></div></div></div>'
    )


def _needs(needs: Sequence[Mapping[str, Any]]) -> list[Block]:
    columns = list(dict.fromkeys((_series(need), need["compression"]) for need in needs))
    body: list[list[Cell]] = []
    needs = _with_nodes(needs)
    for position in dict.fromkeys((need["workers"], need["ranks_per_node"]) for need in needs):
        cells = {
            (_series(need), need["compression"]): _need(need)
            for need in needs
            if (need["workers"], need["ranks_per_node"]) == position
        }
        workers, each = position
        named: Cell = workers if each == 1 else f"{workers}, {each} on a node"
        body.append([named, *(cells.get(column) for column in columns)])
    several = len({compression for _, compression in columns}) > 1
    headings = [
        f"{name}, {compression:g}\N{MULTIPLICATION SIGN}" if several and compression > 1 else name
        for name, compression in columns
    ]
    text = (
        "The slowest simulated link from which on each strategy reaches 95 % of ideal speed; "
        "“more”: none of them does; “none”: no link does, however fast."
    )
    return [Paragraph(text), Table(["workers", *headings], body)]


def _need(need: Mapping[str, Any]) -> str:
    if need["rate_bps"] is None:
        return "more" if need.get("any_link", True) else "none"
    rate = format_rate(float(need["rate_bps"]))
    return f"\N{LESS-THAN OR EQUAL TO} {rate}" if need["from_slowest"] else rate


def _answers(answers: Sequence[Mapping[str, Any]]) -> Details:
    summary = f"The answer for each of {len(answers)} clusters"
    return Details(summary, [str(answer["text"]) for answer in answers])


def _faults(faults: Mapping[str, Any]) -> list[Block]:
    cells: list[list[Cell]] = [[*cells_of(cost)] for cost in faults["rows"]]
    sentences = [Paragraph(text) for text in faults["verdicts"]]
    return [*sentences, Table(COLUMNS, cells, faults["assumptions"])]


def _all_rows(rows: Sequence[Row], codec: str) -> Table:
    """Return a line for each row of a codec: encoded steps are other steps."""
    columns = (
        "strategy",
        "workers",
        "on nodes of",
        "rate",
        "compression",
        "scaling, %",
        "bound, %",
        "step, ms",
        "samples/s",
    )
    body: list[list[Cell]] = [
        [
            _series(row),
            row["workers"],
            row["ranks_per_node"],
            float(row["rate_bps"]) / 1e9,
            float(row["compression"]),
            round(100.0 * float(row["scaling_factor"]), 1),
            round(100.0 * float(row["bound_scaling_factor"]), 1),
            round(1e3 * float(row["step_s"]), 1),
            float(row["samples_per_s"]),
        ]
        for row in rows
        if (row.get("codec") or RAW) == codec
    ]
    travelling = "" if codec == RAW else f"Gradients in {codec}. "
    return Table(
        [name if name != "rate" else "rate, Gbit/s" for name in columns],
        body,
        f"{travelling}Scaling: compute time over step time. Bound: what no order of sending can "
        "beat. Samples/s of all workers together.",
    )


def _computed(profile: Mapping[str, Any], rows: Sequence[Row], command: str | None) -> Measurement:
    here = measured_here(command)
    facts = {name: text for name, text in here.facts.items() if name in ("when", "gradlane")}
    facts["clusters simulated"] = str(len(rows))
    facts.update(
        {
            name.replace("_", " "): f"{value:.6g}" if isinstance(value, float) else f"{value}"
            for name, value in profile.items()
        }
    )
    facts["kind"] = "simulated, not measured"
    return Measurement(here.command, facts, title="How this was computed")
