"""The cost of lost machines over a long run, with and without going on, in closed form.

Machines fail independently at a constant rate, one every `mtbf_s` each, and each is replaced. A
share is that of all machine-hours, those of missing machines included, in which batches are
computed that count in the model. `docs/simulator.md` has the formulas;
`tests/planning/simulation/test_faults.py` compares them with random runs.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from gradlane.formats.durations import format_duration_s, parse_duration_s
from gradlane.planning.simulation.scenarios import FORMULAS
from gradlane.training.options.option_fields import on_command_line, option, option_rules
from gradlane.training.options.option_groups import Network

if TYPE_CHECKING:
    from gradlane.planning.simulation.grid import SimulatedRow

AGREEMENT_S = 1.0
"""Seconds in which the ranks that are left agree on who goes on; an upper bound."""
STATE_TIMES = 3
"""Bytes of parameters and optimizer state over those of the gradients, as for Adam."""
COPY_BYTES_PER_S = 1e9
"""Rate at which one rank copies the state for a checkpoint, while training stands still."""
JOIN_SLOWDOWN = 0.15
"""Share of a step's time that a joining rank costs the others; an upper bound."""
JOIN_STRETCH = 1.3
"""Time in which a joining rank gets the state over that of its bytes at the rate of its port; an
upper bound."""
INTERVAL_MOST_S = 3600.0
"""Longest best time between two checkpoints, however rare the losses that they are for."""
PROGRESS_LEAST = 0.05
"""Share below which training makes no progress; that is as near as the formulas are there."""
WAITS, SHRINKS = "waits", "shrinks"
"""Kinds of restart: with all ranks, once the lost machine is replaced; or at once with those that
are left, and again when the new machine is there."""
_TIME_MOST_S = 100 * 365 * 86400.0


@dataclass(frozen=True)
class FaultSettings:
    """How often machines are lost, and what it takes to have them back.

    Raises:
        ValueError: a value is out of range; the text names the command's option.
    """

    mtbf_s: float = option(
        name="mtbf",
        doc="Mean time between failures of one machine, such as 6h: tells what faults cost, with "
        "and without going on. The ranks of a node fail together (--ranks-per-node); else each "
        "rank is a machine.",
        read=parse_duration_s,
        least=1.0,
    )
    restart_s: float = option(
        name="restart_time",
        doc="From the start of a process until it can train. 60s if absent.",
        read=parse_duration_s,
        text="60s",
        least=0.0,
    )
    replacement_s: float = option(
        name="replacement_time",
        doc="Until another machine is there in place of a lost one. 5min if absent.",
        read=parse_duration_s,
        text="5min",
        least=0.0,
    )
    detection_s: float = option(
        name="detection_time",
        doc="Until others know of a loss. silence_timeout_s, "
        f"{Network.silence_timeout_s:g}s, if absent.",
        read=parse_duration_s,
        text=f"{Network.silence_timeout_s:g}s",
        least=0.0,
    )
    checkpoint_interval_s: float | None = option(
        None,
        "Training between two checkpoints. The best one if absent.",
        name="checkpoint_interval",
        read=parse_duration_s,
        least=0.001,
    )
    checkpoint_s: float | None = option(
        None,
        "How long training stands still for a checkpoint. A copy of parameters and optimizer state "
        "if absent.",
        name="checkpoint_time",
        read=parse_duration_s,
        least=0.0,
    )

    def __post_init__(self) -> None:
        for field, rules in option_rules(self).items():
            value, least_s = getattr(self, field), rules.least or 0.0
            if value is not None and not least_s <= value <= _TIME_MOST_S:
                raise ValueError(
                    f"--{on_command_line(rules.name)} is {value:g} s: use "
                    f"{format_duration_s(least_s)} to 36500 d"
                )


@dataclass(frozen=True)
class FaultCost:
    """The cost of lost machines for one row of a what-if; shares are 0 to 1."""

    strategy: str
    codec: str
    topology: str
    stragglers: str
    workers: int
    ranks_per_node: int
    rate_bps: float
    compression: float
    machines: int
    """Workers over `ranks_per_node`: the ranks of a node are lost together."""
    step_s: float
    checkpoint_s: float
    """Seconds in which training stands still for each checkpoint."""
    restart: str
    """The better kind of restart without going on: `waits` or `shrinks`."""
    checkpoint_interval_s: float
    """Seconds of training between checkpoints without going on."""
    checkpoint_every: int
    """The same in steps, as for `gradlane.Checkpoints(every=)`."""
    train_share: float
    """Share of the machine-hours that train without going on."""
    samples_per_s: float
    """Of the cluster over a long run without going on."""
    going_on_checkpoint_interval_s: float | None
    """Seconds of training between checkpoints with going on, which loses more than half of the
    machines at once so rarely; None, here and below: the strategy is a formula, not gradlane's."""
    going_on_checkpoint_every: int | None
    going_on_train_share: float | None
    going_on_samples_per_s: float | None

    @property
    def makes_progress(self) -> bool:
        """Return whether the share without going on is worth a name."""
        return self.train_share >= PROGRESS_LEAST

    @property
    def going_on_makes_progress(self) -> bool | None:
        """Return the same with going on; None where the strategy has no such thing."""
        share = self.going_on_train_share
        return None if share is None else share >= PROGRESS_LEAST

    def to_json(self) -> dict[str, Any]:
        """Return the fields with the units in their keys, and whether there is progress."""
        return {
            **asdict(self),
            "makes_progress": self.makes_progress,
            "going_on_makes_progress": self.going_on_makes_progress,
        }


def fault_cost(settings: FaultSettings, row: SimulatedRow, gradient_bytes: int) -> FaultCost:
    """Return what faults cost a simulated cluster, all of whose steps take `row.step_s`.

    Args:
        settings: of the faults.
        row: of the cluster.
        gradient_bytes: of the model, from which the size of its state follows.
    """
    machines = row.workers // row.ranks_per_node
    state_bytes = STATE_TIMES * gradient_bytes
    write_s = settings.checkpoint_s
    if write_s is None:
        write_s = state_bytes / COPY_BYTES_PER_S
    kinds = {
        kind: share_without(settings, machines, row.step_s, write_s, kind=kind)
        for kind in (WAITS, SHRINKS)[: min(machines, 2)]
    }
    restart = max(kinds, key=lambda kind: kinds[kind][0])
    share, interval_s = kinds[restart]
    with_it: tuple[float, float] | None = None
    if row.strategy not in FORMULAS:
        join_s = 8 * state_bytes * row.ranks_per_node / row.rate_bps * JOIN_STRETCH * JOIN_SLOWDOWN
        with_it = (share, interval_s)
        # Of one machine nobody is left to go on.
        if machines > 1:
            with_it = share_with(settings, machines, row.step_s, write_s, join_s)
    return FaultCost(
        strategy=row.strategy,
        codec=row.codec,
        topology=row.topology,
        stragglers=row.stragglers,
        workers=row.workers,
        ranks_per_node=row.ranks_per_node,
        rate_bps=row.rate_bps,
        compression=row.compression,
        machines=machines,
        step_s=row.step_s,
        checkpoint_s=write_s,
        restart=restart,
        checkpoint_interval_s=interval_s,
        checkpoint_every=max(1, round(interval_s / row.step_s)),
        train_share=share,
        samples_per_s=share * row.samples_per_s,
        going_on_checkpoint_interval_s=None if with_it is None else with_it[1],
        going_on_checkpoint_every=None
        if with_it is None
        else max(1, round(with_it[1] / row.step_s)),
        going_on_train_share=None if with_it is None else with_it[0],
        going_on_samples_per_s=None if with_it is None else with_it[0] * row.samples_per_s,
    )


def share_without(
    settings: FaultSettings, machines: int, step_s: float, write_s: float, *, kind: str
) -> tuple[float, float]:
    """Return the share that trains without going on, and the seconds between checkpoints.

    Args:
        settings: of the faults.
        machines: number of them.
        step_s: seconds a step.
        write_s: seconds in which training stands still for a checkpoint.
        kind: of restart, `WAITS` or `SHRINKS`.
    """
    if kind == WAITS:
        rate = machines / settings.mtbf_s
        outage_s = max(settings.detection_s, settings.replacement_s)
        down_s = _time_until_quiet_s(
            (outage_s, (machines - 1) / settings.mtbf_s), (settings.restart_s, rate)
        )
        present = 1.0
    else:
        cycle_s = settings.mtbf_s + settings.replacement_s
        # Each loss is a restart of the others, and each machine that comes back one of all.
        restarts = 2 * machines - 1
        rate = restarts / cycle_s
        mean_s = settings.restart_s + settings.detection_s * (machines - 1) / restarts
        down_s = _time_until_quiet_s((mean_s, rate))
        present = settings.mtbf_s / cycle_s
    interval_s = _interval_s(settings, rate, write_s, step_s)
    return present * _kept_share(rate, interval_s, write_s, down_s), interval_s


def share_with(
    settings: FaultSettings, machines: int, step_s: float, write_s: float, join_s: float
) -> tuple[float, float]:
    """Return the share that trains with going on, and the seconds between checkpoints.

    Args:
        settings: of the faults.
        machines: number of them, at least two.
        step_s: seconds a step.
        write_s: seconds in which training stands still for a checkpoint.
        join_s: seconds of training that a joining machine costs all others.
    """
    pause_s = settings.detection_s + AGREEMENT_S + step_s
    away_s = settings.replacement_s + settings.restart_s
    cycle_s = settings.mtbf_s + away_s
    present = settings.mtbf_s / cycle_s
    losses = machines / cycle_s
    # A machine that is away anyway loses nothing by the pause that it causes.
    paused_s = (machines - 1) * pause_s + max(0.0, pause_s - away_s)
    unpaused = math.exp(-(paused_s + machines * join_s) / cycle_s)
    rate = _rate_of_ends(settings.mtbf_s, machines, present, pause_s)
    down_s = _time_until_quiet_s((settings.detection_s + settings.restart_s, losses))
    interval_s = _interval_s(settings, rate, write_s, step_s)
    return present * unpaused * _kept_share(rate, interval_s, write_s, down_s), interval_s


def best_interval_s(mtbf_s: float, write_s: float) -> float:
    """Return the best seconds of training between two checkpoints.

    Young's first order (A first order approximation to the optimum checkpoint interval, CACM 17,
    1974) in Daly's higher one (A higher order estimate of the optimum checkpoint interval for
    restart dumps, FGCS 22, 2006), equation 37.

    Args:
        mtbf_s: mean seconds between losses that cost the steps since a checkpoint.
        write_s: seconds in which training stands still for a checkpoint.
    """
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write_s


def _interval_s(settings: FaultSettings, rate: float, write_s: float, step_s: float) -> float:
    interval_s = settings.checkpoint_interval_s
    if interval_s is None:
        longest_s = INTERVAL_MOST_S
        interval_s = min(longest_s, best_interval_s(1 / rate, write_s)) if rate else longest_s
    return max(step_s, interval_s)


def _kept_share(rate: float, interval_s: float, write_s: float, down_s: float) -> float:
    """Return the share of the time whose steps a checkpoint keeps.

    Args:
        rate: losses a second, at random.
        interval_s: seconds of training before each checkpoint.
        write_s: seconds of the checkpoint.
        down_s: mean seconds from a loss until training goes on at the last checkpoint.
    """
    whole_s = interval_s + write_s
    if rate * whole_s > 700 or math.isinf(down_s):
        return 0.0
    # `expm1(x) / x` is 1 at 0.
    lost = math.expm1(rate * whole_s) / (rate * whole_s) if rate else 1.0
    return interval_s / (whole_s * lost * (1 + rate * down_s))


def _time_until_quiet_s(*spans: tuple[float, float]) -> float:
    """Return the mean seconds until all spans passed one after another without a loss.

    A loss begins with the first span again.

    Args:
        spans: seconds of each, and its losses a second.
    """
    exponent = sum(length_s * rate for length_s, rate in spans)
    if exponent > 700:
        return math.inf
    tried_s, survival = 0.0, 1.0
    for length_s, rate in spans:
        tried_s += survival * (-math.expm1(-rate * length_s) / rate if rate else length_s)
        survival *= math.exp(-rate * length_s)
    return tried_s / survival


def _rate_of_ends(mtbf_s: float, machines: int, present: float, pause_s: float) -> float:
    """Return how often a second more than half of the members are lost in one pause.

    A loss in a pause begins it again.

    Args:
        mtbf_s: of one machine.
        machines: number of them.
        present: share of the time in which a machine is there.
        pause_s: seconds of a pause.
    """
    total = 0.0
    for members in range(1, machines + 1):
        chance = _binomial(machines, members, present) * members / mtbf_s
        for lost in range(1, members // 2 + 1):
            if chance < 1e-15:
                break
            chance *= -math.expm1(-(members - lost) * pause_s / mtbf_s)
        total += chance
    return total


def _binomial(count: int, hits: int, chance: float) -> float:
    """Return the probability of so many hits in `count` tries."""
    if chance in (0.0, 1.0):
        return float(hits == (count if chance else 0))
    ways = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    return math.exp(ways + hits * math.log(chance) + (count - hits) * math.log1p(-chance))
