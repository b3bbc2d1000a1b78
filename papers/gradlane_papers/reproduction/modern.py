"""Networks of today on Ethernet: where the order of sending still helps, and where it does not.

`p3`, urgency across the barrier, is simulated with the engine, with the lanes and threads that a
session takes behind such a port on a usual host, each as fast as the project's own; DDP is the
formula of `whatif`, its buckets tuned.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradlane.formats.profile import DTYPE_BYTES
from gradlane.formats.rates import format_rate
from gradlane.planning.advice.causes import GOAL
from gradlane.planning.advice.ways import KINDS, SPARSE_RATIO, candidates, smaller_changes
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.models.transformers import H100_UTILIZATION
from gradlane.planning.simulation.bound import bound_step_s
from gradlane.planning.simulation.grid import (
    GOODPUT_SHARE,
    WORKER,
    cluster_bound_s,
    simulate,
)
from gradlane.planning.simulation.hosts import USUAL_PROCESSORS, host_with
from gradlane.planning.simulation.profiles import Profile, synthetic_profile, timings_in
from gradlane.planning.simulation.scenarios import DDP, Cluster
from gradlane.planning.simulation.threads import in_threads, usual_threads
from gradlane.report.console import text_table
from gradlane.report.markdown import filled, markdown_table
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.local_updates import Local, parse_local
from gradlane_papers.reproduction.simulations import Simulations

DTYPES = {
    "gpt2_small": "bf16",
    "gpt2_medium": "bf16",
    "bert_base": "bf16",
    "vit_b16": "bf16",
    "llama_1b": "bf16",
    "dlrm": "f32",
}
"""Dtypes of gradients on the wire: bf16 where the model is trained in it, f32 for DLRM's tables."""
RATES_GBPS = (1, 10, 25, 100)
WORKERS = (4, 8, 16)
HOST = host_with(USUAL_PROCESSORS)
STEPS = 2
"""Simulated; a third one moves the step by less than 0.3 %."""
LEFT_OUT = {"llama_1b": (8,), "dlrm": (8,)}
"""Workers that are not simulated: two gigabytes a step take their time, and lie between."""
FRAME_BYTES = 131_072
"""A slice of 50,000 bf16 elements goes in one frame: fewer events, and nothing else changes."""
TEMPLATE = Path(__file__).with_name("modern.md")
"""The page's text."""
ENOUGH = GOAL
EXACT, NOTHING = "exact, by DDP or `p3`", "none of these"
"""Ways to 95 %: without any change of what is learned; and where no change was enough."""
_RARE = "an exchange"
HELPS = 0.05
"""Gain from which on scheduling counts as a help."""
SLOWER = 0.02
"""Loss from which on DDP is faster."""


@dataclass(frozen=True)
class NetworkRow:
    """One network on one cluster.

    Attributes:
        model: name of the network.
        workers: accelerators, each behind a port of its own.
        rate_bps: of every port.
        gradient_bytes: of one step.
        compute_s: forward and backward.
        ddp_step_s: step of DDP with tuned buckets.
        p3_step_s: step with urgency.
        bound_step_s: what no order can beat.
        scaling_8bit: what no order can beat with 8 bits an element, compute over step.
        scaling_1bit: the same with one bit.
        fewer_needed: by how much bytes have to shrink, or batches to grow, for 95 % scaling with
            perfect overlap.
        change: the smallest change of what is learned that reaches 95 %, in words; None: of those
            that `plan --fewer` tries none does. Where exact training is enough, `EXACT`.
    """

    model: str
    workers: int
    rate_bps: float
    gradient_bytes: int
    compute_s: float
    ddp_step_s: float
    p3_step_s: float
    bound_step_s: float
    scaling_8bit: float
    scaling_1bit: float
    fewer_needed: float
    change: str | None = None

    @property
    def gain(self) -> float:
        """Gain in throughput of urgency over DDP, as a share."""
        return self.ddp_step_s / self.p3_step_s - 1.0

    @property
    def is_slower(self) -> bool:
        """Whether DDP is faster by more than what the simulator cannot tell."""
        return self.gain < -SLOWER

    @property
    def verdict(self) -> str:
        """The remedy here, in a word."""
        if self.compute_s / self.ddp_step_s >= ENOUGH:
            return "nothing is needed"
        if self.compute_s / self.p3_step_s >= ENOUGH:
            return "scheduling is enough"
        if self.gain >= HELPS:
            return "scheduling helps, bytes decide"
        if self.is_slower:
            return "fewer bytes; exact: DDP"
        return "only fewer bytes help"

    def to_json(self) -> dict[str, Any]:
        """Return the row with what follows from it."""
        return {**asdict(self), "gain": self.gain, "verdict": self.verdict}


def profile_of(model: str) -> Profile:
    """Return what an H100 computes, with the gradients' type on the wire."""
    profile = synthetic_profile(model)
    tensors = tuple(replace(tensor, dtype=DTYPES[model]) for tensor in profile.tensors)
    return replace(profile, tensors=tensors)


def study(
    simulations: Simulations,
    models: Sequence[str] = tuple(DTYPES),
    workers: Sequence[int] = WORKERS,
    rates_gbps: Sequence[float] = RATES_GBPS,
) -> list[NetworkRow]:
    """Simulate every network on every cluster.

    Args:
        simulations: where they are simulated.
        models: keys of `DTYPES`.
        workers: numbers of accelerators.
        rates_gbps: rates of ports.
    """
    cases = [
        (model, _cluster(count, rate))
        for model in models
        for count in workers
        for rate in rates_gbps
        if count not in LEFT_OUT.get(model, ())
    ]
    profiles = {model: profile_of(model) for model in models}
    jobs = [(profiles[model], cluster) for model, cluster in cases]
    steps_s = simulations.profile_steps_s(jobs, frame_bytes=FRAME_BYTES)
    rows = [_row(*job, step_s) for job, step_s in zip(jobs, steps_s, strict=True)]
    changes = in_threads(lambda at: _change(*jobs[at], rows[at]), range(len(rows)), usual_threads())
    return [replace(row, change=change) for row, change in zip(rows, changes, strict=True)]


def _change(profile: Profile, cluster: Cluster, row: NetworkRow) -> str | None:
    """Return the smallest change that is enough; see `NetworkRow`."""
    if row.compute_s / min(row.ddp_step_s, row.p3_step_s) >= ENOUGH:
        return EXACT

    def may_be_enough(other: Cluster) -> bool:
        return profile.compute_s / cluster_bound_s(profile, other) >= ENOUGH

    tried = smaller_changes(
        cluster, KINDS, lambda other: simulate(profile, other)[0], may_be_enough
    )
    if not tried or tried[-1].scaling_factor < ENOUGH:
        return None
    last = tried[-1]
    return _in_words(None if last.update == WORKER else parse_local(last.update), last.codec)


def _in_words(update: Local | None, codec: str) -> str:
    found = [] if update is None else [f"{_RARE} every {update.steps} steps"]
    if update is not None and update.overlap_steps:
        found.append("overlapped")
    if codec.startswith("topk"):
        found.append(f"{SPARSE_RATIO:.0%} of the values".replace("%", " %"))
    elif codec.startswith("qsgd:bits="):
        found.append(f"{codec.removeprefix('qsgd:bits=')} bits")
    elif codec != RAW:
        found.append(codec)
    return ", ".join(found)


def _cluster(workers: int, rate_gbps: float) -> Cluster:
    return Cluster(workers, rate_gbps * 1e9, "p3", steps=STEPS, host=HOST)


def _row(profile: Profile, cluster: Cluster, p3_s: float) -> NetworkRow:
    ddp, _ = simulate(profile, replace(cluster, strategy=DDP))

    def bound_s(ratio: float) -> float:
        return bound_step_s(
            timings_in(profile),
            workers=cluster.workers,
            goodput_bps=cluster.rate_bps * GOODPUT_SHARE,
            compute_s=profile.compute_s,
            codec_ratio=ratio,
        ).step_s

    bits = 8 * DTYPE_BYTES[profile.tensors[0].dtype]
    low, high = 1.0, 1.0
    while profile.compute_s / bound_s(high) < ENOUGH:
        low, high = high, 2.0 * high
    for _ in range(20):
        middle = (low + high) / 2.0
        if profile.compute_s / bound_s(middle) < ENOUGH:
            low = middle
        else:
            high = middle
    return NetworkRow(
        model=profile.model,
        workers=cluster.workers,
        rate_bps=cluster.rate_bps,
        gradient_bytes=profile.size_bytes,
        compute_s=profile.compute_s,
        ddp_step_s=ddp.step_s,
        p3_step_s=p3_s,
        bound_step_s=bound_s(1.0),
        scaling_8bit=profile.compute_s / bound_s(bits / 8),
        scaling_1bit=profile.compute_s / bound_s(bits),
        fewer_needed=high if high > 1.0 else 1.0,
    )


_CELLS: Mapping[str, Callable[[NetworkRow], str]] = {
    "network": lambda row: row.model,
    "workers": lambda row: str(row.workers),
    "rate": lambda row: format_rate(row.rate_bps),
    "compute ms": lambda row: f"{row.compute_s * 1e3:.1f}",
    "DDP ms": lambda row: f"{row.ddp_step_s * 1e3:.1f}",
    "p3 ms": lambda row: f"{row.p3_step_s * 1e3:.1f}",
    "bound ms": lambda row: f"{row.bound_step_s * 1e3:.1f}",
    "DDP scaling": lambda row: f"{100 * row.compute_s / row.ddp_step_s:.1f} %",
    "p3 scaling": lambda row: f"{100 * row.compute_s / row.p3_step_s:.1f} %",
    "p3 gains": lambda row: f"{100 * row.gain:+.1f} %",
    "8 bits: at most": lambda row: f"{100 * row.scaling_8bit:.1f} %",
    "1 bit: at most": lambda row: f"{100 * row.scaling_1bit:.1f} %",
    "95 % needs": lambda row: f"{row.fewer_needed:.1f}x" if row.fewer_needed > 1.001 else "-",
    "what helps": lambda row: row.verdict,
}
"""Cells of a row, by heading."""
COLUMNS = tuple(_CELLS)
_ON_THE_PAGE = tuple(
    name
    for name in COLUMNS
    if name not in ("compute ms", "DDP scaling", "p3 scaling", "what helps")
)
"""Columns of the page of text, which says the others once for a network or a rate."""


def cells_of(row: NetworkRow) -> tuple[str, ...]:
    """Return a row's cells, in the order of `COLUMNS`."""
    return tuple(cell(row) for cell in _CELLS.values())


def answers(rows: Sequence[NetworkRow]) -> list[str]:
    """Say in words what the rows show."""
    found = []
    for rate_bps in sorted({row.rate_bps for row in rows}):
        here = [row for row in rows if row.rate_bps == rate_bps]
        helped = [row for row in here if row.gain >= HELPS]
        fine = [row for row in here if row.verdict == "nothing is needed"]
        closed = [row for row in here if row.verdict == "scheduling is enough"]
        slower = [row for row in here if row.is_slower]
        best = max(here, key=lambda row: row.gain)
        most = f" (most: {_cluster_text(best)})" if helped else ""
        needs = [row.fewer_needed for row in here if row.compute_s / row.p3_step_s < ENOUGH]
        text = (
            f"{format_rate(rate_bps)}: of {len(here)} clusters {len(fine)} need nothing, in "
            f"{len(closed)} scheduling alone reaches 95 %, in {len(helped)} it gains 5 % or more"
            f"{most}, and in {len(slower)} it loses more than 2 %"
        )
        if slower:
            text += f" (most: {_cluster_text(min(here, key=lambda row: row.gain))})"
        text += "."
        eight = sum(row.scaling_8bit >= ENOUGH for row in here)
        one = sum(row.scaling_1bit >= ENOUGH for row in here)
        text += f" 8 bits an element could bring {eight} to 95 %, one bit {one}."
        if needs:
            text += (
                f" Without fewer bytes {len(needs)} stay below: they need {min(needs):.1f} to "
                f"{max(needs):,.0f} times fewer, or batches that much larger between two "
                "exchanges."
            )
        found.append(text)
    return found


def _cluster_text(row: NetworkRow) -> str:
    return f"{100 * abs(row.gain):.0f} %, {row.model} on {row.workers}"


def print_study(console: Console, rows: Sequence[NetworkRow]) -> None:
    """Print every row, and the answer."""
    console.print(text_table("", COLUMNS, map(cells_of, rows), texts=COLUMNS))
    for text in (ways_in_words(rows), *answers(rows)):
        console.print(text, highlight=False)


def ways_table(rows: Sequence[NetworkRow]) -> str:
    """Return how many clusters reach 95 % by which way, the smallest change first, by rate."""
    rates = sorted({row.rate_bps for row in rows})
    counts = Counter((row.change or NOTHING, row.rate_bps) for row in rows)
    tried = candidates(Cluster(WORKERS[0], rates[0]), KINDS)
    body: list[list[str]] = []
    for way in (EXACT, *(_in_words(one.update, one.codec) for one in tried), NOTHING):
        here = [counts[way, rate] for rate in rates]
        body.append([way, *map(str, here), str(sum(here))])
    columns = ("way", *map(format_rate, rates), "all")
    return markdown_table(columns, body, numbers="-" + "n" * (len(columns) - 1)) + "\n"


def ways_in_words(rows: Sequence[NetworkRow]) -> str:
    """Say how many clusters reach 95 %, exactly, in fewer bits and with fewer exchanges."""
    rare = sum(row.change is not None and row.change.startswith(_RARE) for row in rows)
    exact, none = (sum(row.change == one for row in rows) for one in (EXACT, None))
    return (
        f"Of {len(rows)} clusters {exact} reach 95 % of compute alone exactly, "
        f"{len(rows) - exact - rare - none} in fewer bits, {rare} with fewer exchanges, and {none} "
        "by none of the ways that were tried."
    )


def _table(rows: Sequence[NetworkRow]) -> str:
    numbers = "-" + "n" * (len(_ON_THE_PAGE) - 1)
    cells = ([_CELLS[name](row) for name in _ON_THE_PAGE] for row in rows)
    return markdown_table(_ON_THE_PAGE, cells, numbers=numbers) + "\n"


def _assumptions(row: NetworkRow) -> str:
    """Return the row of a network in the table of what is assumed."""
    architecture = ARCHITECTURES[row.model]()
    tokens = architecture.batch_size * architecture.layers[0].positions
    samples = f"{architecture.batch_size:,} samples"
    if tokens > architecture.batch_size:
        samples += f", {tokens:,} tokens"
    cells = (
        row.model,
        f"{architecture.numel / 1e6:,.0f} million",
        samples,
        f"{row.compute_s * 1e3:.1f} ms",
        f"{row.gradient_bytes / 1e6:,.0f} MB {DTYPES[row.model]}",
        f"{8 * row.gradient_bytes / row.compute_s / 1e9:,.0f} Gbit/s",
    )
    return "| " + " | ".join(cells) + " |"


def markdown_of(rows: Sequence[NetworkRow], command: str) -> str:
    """Return the page of text: `modern.md` with its places filled."""
    gains = sorted(row.gain for row in rows)
    first = {row.model: row for row in reversed(rows)}
    return filled(
        TEMPLATE,
        command=command,
        helped=sum(gain >= HELPS for gain in gains),
        slower=sum(row.is_slower for row in rows),
        clusters=len(rows),
        median_gain=f"{100 * gains[len(gains) // 2]:.1f}",
        largest_gain=f"{100 * gains[-1]:.0f}",
        largest_loss=f"{100 * max(0.0, -gains[0]):.1f}",
        ways=ways_table(rows),
        reached=ways_in_words(rows),
        answers="\n".join(f"- {text}" for text in answers(rows)),
        assumed="\n".join(_assumptions(first[model]) for model in DTYPES if model in first),
        host=str(HOST),
        utilization=f"{100 * H100_UTILIZATION:.0f}",
        rows=_table(rows),
    )


def write_page(rows: Sequence[NetworkRow], path: Path) -> None:
    """Write the page with plots: scaling over rate, a plot for each number of workers.

    Raises:
        OSError: it cannot be written.
    """
    from gradlane.report.page import Block, Paragraph, Section, measured_here, write_report
    from gradlane.report.page import Table as PageTable
    from gradlane.report.plots import line_plot

    blocks: list[Block] = [Paragraph(text) for text in (ways_in_words(rows), *answers(rows))]
    for model in dict.fromkeys(row.model for row in rows):
        series: dict[str, tuple[list[float], list[float | None]]] = {}
        for row in rows:
            if row.model == model:
                for name, step_s in (("DDP", row.ddp_step_s), ("p3", row.p3_step_s)):
                    xs, ys = series.setdefault(f"{name}, {row.workers} workers", ([], []))
                    xs.append(row.rate_bps / 1e9)
                    ys.append(100.0 * row.compute_s / step_s)
        blocks.append(
            line_plot(
                model,
                series,
                x_label="Gbit/s",
                y_label="scaling, %",
                markers=True,
                y_from_zero=True,
            )
        )
    blocks.append(PageTable(COLUMNS, [cells_of(row) for row in rows]))
    sections = [Section("", blocks), Section("", [measured_here()])]
    write_report(path, "Networks of today on Ethernet", sections)
