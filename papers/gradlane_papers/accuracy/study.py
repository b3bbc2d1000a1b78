"""The runs of the study, which of them are missing, and the rows that they leave.

A row is one run of one scheme on one task with one seed. All rows are in one file that is whole
after every run; a run that is in it is not made again.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from gradlane.lab.runs.folder import PresetFolder
from gradlane.lab.runs.rows import read_json, save_lines
from gradlane.lab.runs.run import LabProgress
from gradlane_papers.accuracy.asynchronous import check_ranks
from gradlane_papers.accuracy.curve import TrainingCurve
from gradlane_papers.accuracy.exchange import ALL, CONVOLUTIONS, LAYERS
from gradlane_papers.accuracy.run import FULL_PRECISION, REAL, Run, parse_scheme
from gradlane_papers.accuracy.tasks import CIFAR10, LANGUAGE, MIXTURE, TASKS, task_of
from gradlane_papers.accuracy.timing import local_steps_s, step_s
from gradlane_papers.accuracy.training import train

NAME = "accuracy"
RATES_BPS = (100_000_000, 1_000_000_000, 10_000_000_000)
WORKERS = 4
SPARSE_SCHEMES = ("topk:ratio=0.01,broadcast_ratio=0.04", "dgc:ratio=0.01,broadcast_ratio=0.04")
QUICK_SCHEMES = (
    FULL_PRECISION,
    "asgd",
    "asgd:lr=mean",
    "bf16",
    "qsgd:bits=8",
    "qsgd:bits=4",
    "qsgd:bits=2",
    "int8",
    "onebit",
    "onebit:bucket=64",
    *SPARSE_SCHEMES,
)
SCHEMES = (
    *QUICK_SCHEMES,
    "f16",
    "qsgd:bits=16",
    "qsgd:bits=2,residual=on",
    "asgd:order=random",
    "topk:ratio=0.01",
    "dgc:ratio=0.001,broadcast_ratio=0.004",
)
"""Codecs and rules; sparse means are sent whole, up to `workers` times the ratio."""
BUCKETS = (
    "qsgd:bits=4,bucket=64",
    "qsgd:bits=4,bucket=8192",
    "qsgd:bits=2,bucket=32",
    "qsgd:bits=2,bucket=2048",
    "onebit:bucket=512",
    "onebit:bucket=tensor",
)
"""Beside the default buckets of the same codecs."""
CONVOLUTION_SCHEMES = ("qsgd:bits=2", "onebit", "topk:ratio=0.01,broadcast_ratio=0.04")
STUDIED_CLOSELY = "resnet"
"""The task of the bucket sweep and of the comparison of layers."""
SETTINGS = ("", "/lr=0.025", "/lr=0.1", "/momentum=0.8", "/lr=0.025/momentum=0.95")
"""Hyperparameters of the settings under which DGC is compared, the task's own first."""
PAPERS_DGC = "dgc:ratio=0.001,broadcast_ratio=0.004"
PAPERS_ASGD = ("asgd", "asgd:lr=mean", "asgd:order=real", "asgd:order=real,lr=mean")
LAYER_SCHEMES = ("qsgd:bits=2", "onebit:bucket=64")
BETWEEN_SCHEMES = (
    FULL_PRECISION,
    "bf16",
    "qsgd:bits=8",
    "qsgd:bits=4",
    "powersgd",
    "local:steps=8,outer=average",
    "local:steps=8",
    "local:steps=32",
    "local:steps=128",
    "local:steps=32,fragments=4,overlap_steps=4,mix=0.5",
)
SPARSE_RATIO = 0.02
SPARSE_LOCO = (
    "local:steps={steps},outer=average + "
    f"topk:ratio={SPARSE_RATIO},broadcast_ratio={{ratio:g}},bits=2,bucket=4096,decay=0.95"
)
"""SparseLoCo, with room for what all workers have sent on the way back."""
NODES = (8, 16)
"""Workers beside the study's, with as many samples in all."""
EVERY = "all"
"""In place of a list of schemes: those of the full study, with buckets and layers."""


@dataclass(frozen=True)
class Result(Run):
    """A run and what it learned.

    Attributes:
        codec: the canonical text of the scheme's codec.
        parameters: of the network.
        compute_s: nominal time of a worker's forward and backward.
        wire_bytes_per_step: of a worker's encoded gradient and the encoded means, mean over steps.
        wire_ratio: how many times fewer bytes these are than in full precision.
        final_loss: of the last evaluation; no number where it diverged.
        final_accuracy: of the last evaluation.
        diverged: whether a loss was no number.
        evaluated: numbers of steps before each evaluation.
        loss: at each evaluation, on held-out samples; None: it is no number.
        accuracy: at each evaluation, 0 to 1.
        time_s: nominal time at each evaluation, by the rate of ports as text.
        cpu_s: processor time of the run; with real processes that of the one which waits for them.
        stale: updates that a gradient was old when it was applied, mean; None where all were new.
    """

    codec: str
    parameters: int
    compute_s: float
    wire_bytes_per_step: float
    wire_ratio: float
    final_loss: float
    final_accuracy: float
    diverged: bool
    evaluated: list[int]
    loss: list[float | None]
    accuracy: list[float]
    time_s: dict[str, list[float]]
    cpu_s: float
    stale: float | None = None

    @property
    def run(self) -> Run:
        """The run without what it learned."""
        return Run(**{one.name: getattr(self, one.name) for one in fields(Run)})

    def times_s(self, rate_bps: int) -> list[float]:
        """Return the nominal time at each evaluation with ports of a rate."""
        return self.time_s[str(rate_bps)]

    def to_json(self) -> dict[str, Any]:
        """Return the row of the result."""
        return {"preset": NAME, **asdict(self)}


def runs_of(
    *,
    quick: bool,
    tasks: Sequence[str] = (),
    schemes: Sequence[str] = (),
    seeds: int | None = None,
    workers: int = WORKERS,
) -> list[Run]:
    """Return all runs of the study, seed by seed: an interrupted study has some of everything.

    Args:
        quick: fewer steps, seeds and schemes.
        tasks: only these; where none is named all but the one that needs data.
        schemes: in place of the study's, buckets and layers are left out then; or `all` alone, for
            those of the full study.
        seeds: in place of the study's 5, or 3 where it is quick.
        workers: how many are emulated.

    Raises:
        ValueError: a task or scheme is unknown, or a number is out of its range.
    """
    for task in tasks:
        task_of(task)
    every = list(schemes) == [EVERY]
    if every:
        schemes = ()
    for text in schemes:
        if parse_scheme(text, workers).order == REAL:
            for task in tasks:
                check_ranks(task_of(task))
    if seeds is None:
        seeds = 3 if quick else 5
    if not 1 <= seeds <= 1000:
        raise ValueError(f"seeds is {seeds}, but must be from 1 to 1000")
    if not 2 <= workers <= 16:
        raise ValueError(f"workers is {workers}, but must be from 2 to 16")
    chosen = list(tasks or (name for name in TASKS if name not in (CIFAR10, LANGUAGE, MIXTURE)))
    pairs = [
        (task, scheme, ALL)
        for scheme in (schemes or (QUICK_SCHEMES if quick and not every else SCHEMES))
        for task in chosen
    ]
    if not schemes and STUDIED_CLOSELY in chosen:
        pairs += [(STUDIED_CLOSELY, scheme, ALL) for scheme in BUCKETS]
        pairs += [(STUDIED_CLOSELY, scheme, CONVOLUTIONS) for scheme in CONVOLUTION_SCHEMES]
    return [
        Run(
            task,
            scheme,
            layers,
            seed,
            workers,
            task_of(task).quick_steps if quick else task_of(task).steps,
        )
        for seed in range(seeds)
        for task, scheme, layers in pairs
    ]


def between_runs(
    *, quick: bool, tasks: Sequence[str] = (), seeds: int | None = None, workers: int = WORKERS
) -> list[Run]:
    """Return the runs that compare fewer bits with fewer exchanges, seed by seed.

    Args:
        quick: fewer steps and seeds.
        tasks: the language model where none is named.
        seeds: how many; None: 5, or 3 where it is quick.
        workers: how many are emulated.
    """
    sparse = [SPARSE_LOCO.format(steps=steps, ratio=SPARSE_RATIO * workers) for steps in (8, 32)]
    return runs_of(
        quick=quick,
        tasks=tasks or (LANGUAGE,),
        schemes=(*BETWEEN_SCHEMES, *sparse),
        seeds=seeds,
        workers=workers,
    )


def paper_runs(seeds: int) -> list[Run]:
    """Return the runs behind the papers' figures of accuracy, seed by seed.

    Args:
        seeds: how many.
    """
    own, steps = STUDIED_CLOSELY, TASKS[STUDIED_CLOSELY].steps
    chosen = [(own + one, scheme) for one in SETTINGS for scheme in (FULL_PRECISION, PAPERS_DGC)]
    chosen += [(own, scheme) for scheme in PAPERS_ASGD]
    return [
        run
        for seed in range(seeds)
        for run in (
            *(Run(task, scheme, ALL, seed, WORKERS, steps) for task, scheme in chosen),
            *(
                Run(own, scheme, layers, seed, WORKERS, steps)
                for scheme in LAYER_SCHEMES
                for layers in LAYERS
            ),
            *(
                Run(own, FULL_PRECISION, ALL, seed, nodes, steps * WORKERS // nodes)
                for nodes in NODES
            ),
        )
    ]


def make_run(run: Run, progress: LabProgress) -> Result:
    """Make a run and return its result."""
    task, scheme = run.parsed()
    start_s = time.process_time()
    curve = train(run, progress.advance)
    sizes = [parameter.numel() for parameter in task.build(0).parameters()]
    mean_bytes = sum(curve.wire_bytes) / len(curve.wire_bytes)
    times_s = {str(rate_bps): _times_s(run, curve, rate_bps) for rate_bps in RATES_BPS}
    return Result(
        **asdict(run),
        codec=scheme.codec_for(task.optimizer, run.steps, task.momentum),
        parameters=sum(sizes),
        compute_s=task.compute_s,
        wire_bytes_per_step=mean_bytes,
        wire_ratio=2 * 4 * sum(sizes) / mean_bytes,
        final_loss=curve.loss[-1],
        final_accuracy=curve.accuracy[-1],
        diverged=curve.diverged,
        evaluated=curve.evaluated,
        # JSON has no number that is none.
        loss=[value if math.isfinite(value) else None for value in curve.loss],
        accuracy=curve.accuracy,
        time_s=times_s,
        cpu_s=time.process_time() - start_s,
        stale=curve.stale,
    )


def _times_s(run: Run, curve: TrainingCurve, rate_bps: int) -> list[float]:
    """Return the nominal time at each evaluation."""
    where = (float(rate_bps), run.workers)
    if curve.uses_exchange:
        steps_s = local_steps_s(run.task, curve.wire_bytes, curve.uses_exchange, *where)
    else:
        steps_s = [step_s(run.task, one, *where) for one in curve.wire_bytes]
    ends_s = [0.0, *itertools.accumulate(steps_s)]
    return [ends_s[steps] for steps in curve.evaluated]


def read_results(path: Path) -> list[Result]:
    """Return the results so far; none where there is no file yet.

    Raises:
        ValueError: the file is none of this study's.
    """
    try:
        return results_of(read_json(path))
    except (AttributeError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} holds other rows than this study's; name another folder"
        ) from error


def results_of(content: Sequence[Mapping[str, Any]]) -> list[Result]:
    """Return the results of a file's rows.

    Raises:
        KeyError: a row is none of this study's.
    """
    names = [one.name for one in fields(Result)]
    if any(row.get("preset") != NAME for row in content):
        raise KeyError("preset")
    # Rows of before have no staleness.
    return [Result(**{name: row[name] for name in names if name in row}) for row in content]


def missing(runs: Sequence[Run], results: Sequence[Result]) -> list[Run]:
    """Return the runs that have no result."""
    have = {result.run for result in results}
    return [run for run in runs if run not in have]


def make_missing(
    runs: Sequence[Run], folder: PresetFolder, progress: LabProgress, *, budget_s: float
) -> list[Result]:
    """Make the runs that are missing, as many as fit, and return all results.

    Args:
        runs: of the study.
        folder: its file of rows is whole after every run.
        progress: told of runs and steps.
        budget_s: real seconds after which no further run is begun; one is always made.
    """
    results = read_results(folder.results)
    end_s = time.monotonic() + budget_s
    for number, run in enumerate(missing(runs, results)):
        if number > 0 and time.monotonic() >= end_s:
            break
        layers = "" if run.layers == ALL else f", {run.layers} only"
        progress.phase(f"{run.task} with {run.scheme}{layers}, seed {run.seed}")
        results.append(make_run(run, progress))
        save_lines([result.to_json() for result in results], folder.results)
    return results
