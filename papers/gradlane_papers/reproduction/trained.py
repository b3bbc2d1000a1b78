"""Figures of accuracy, from small networks that `gradlane lab accuracy` trained.

`trained.json` has the runs of the `gradlane lab accuracy --papers` that its `command` is;
`studied.json` has what the tables of `docs/accuracy.md` say of the longer study. None of it is the
papers' own networks: 8x8 images of digits in minutes, where they trained for days.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradlane_papers.accuracy.curve import crossing
from gradlane_papers.accuracy.exchange import ALL, CONVOLUTIONS, LINEAR
from gradlane_papers.accuracy.study import (
    LAYER_SCHEMES,
    NODES,
    PAPERS_DGC,
    SETTINGS,
    STUDIED_CLOSELY,
    WORKERS,
)
from gradlane_papers.reproduction.comparison import Curve, Number, content_of, ours, reproduces
from gradlane_papers.reproduction.simulations import Simulations

TRAINED = Path(__file__).with_name("trained.json")
STUDIED = Path(__file__).with_name("studied.json")
_FULL_PRECISION = "p3"


def trained_content() -> dict[str, Any]:
    """Return the file of what was trained."""
    return content_of(TRAINED)


def studied_content() -> dict[str, Any]:
    """Return the file of the longer study: percent and points from P3, by task and scheme."""
    return content_of(STUDIED)


@dataclass(frozen=True)
class Trained:
    """Accuracies of one kind of run.

    Attributes:
        curves: percent of right answers at each evaluation, seed by seed.
        evaluated: numbers of steps before each evaluation.
        stale: updates that a gradient was old when it was applied, mean over seeds.
    """

    curves: tuple[tuple[float, ...], ...]
    evaluated: tuple[int, ...]
    stale: float | None

    @property
    def finals(self) -> tuple[float, ...]:
        """The last accuracies in percent, seed by seed."""
        return tuple(curve[-1] for curve in self.curves)

    @property
    def mean_curve(self) -> tuple[float, ...]:
        """The curve's mean over seeds."""
        return tuple(statistics.fmean(values) for values in zip(*self.curves, strict=True))

    @property
    def final(self) -> float:
        """The last accuracy in percent, mean over seeds."""
        return self.mean_curve[-1]

    def steps_to(self, accuracy: float) -> float | None:
        """Return the steps until the mean curve reaches a percentage; None if it never does."""
        return crossing(self.evaluated, self.mean_curve, accuracy)


def trained(
    scheme: str, *, setting: str = "", layers: str = ALL, workers: int = WORKERS
) -> Trained:
    """Return what one kind of run learned.

    Args:
        scheme: as `gradlane lab accuracy` takes it.
        setting: of `SETTINGS`.
        layers: those that were encoded.
        workers: how many took part.

    Raises:
        StopIteration: there is no such run.
    """
    wanted = (STUDIED_CLOSELY + setting, scheme, layers, workers)
    row = next(
        one
        for one in trained_content()["rows"]
        if (one["task"], one["scheme"], one["layers"], one["workers"]) == wanted
    )
    curves = tuple(tuple(100.0 * value for value in curve) for curve in row["accuracy"])
    return Trained(curves, tuple(row["evaluated"]), row["stale"])


def points_from_p3(scheme: str, setting: str = "") -> list[float]:
    """Return, for each seed of both, by how many points of accuracy a scheme ends above P3."""
    own, full = trained(scheme, setting=setting), trained(_FULL_PRECISION, setting=setting)
    return [one - other for one, other in zip(own.finals, full.finals, strict=False)]


def _spread(values: Sequence[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return f"{mean} ± {statistics.stdev(values):.1f}" if len(values) > 1 else f"{mean} (one seed)"


_RUNS = {
    "seeds": len(trained(_FULL_PRECISION).curves),
    "command": trained_content()["command"],
}
"""Facts of the figures' settings."""


@reproduces("p3:fig11", **_RUNS)
def figure_11(_: Simulations) -> list[Number]:
    """Compare DGC with P3 under several settings."""
    points = [points_from_p3(PAPERS_DGC, setting) for setting in SETTINGS]

    def ends(scheme: str) -> str:
        own = [trained(scheme, setting=setting).final for setting in SETTINGS]
        return f"{min(own):.1f} to {max(own):.1f} %"

    by_setting = ", ".join(
        f"{setting[1:].replace('/', ' ') or 'the default'} {_spread(own)}"
        for setting, own in zip(SETTINGS, points, strict=True)
    )
    return [
        ours(
            "dgc_points",
            statistics.fmean(one for own in points for one in own),
            p3=ends(_FULL_PRECISION),
            dgc=ends(PAPERS_DGC),
            by_setting=by_setting,
            settings=len(SETTINGS),
            seeds=len(points[0]),
        ),
    ]


@reproduces("p3:fig15", **_RUNS)
def figure_15(_: Simulations) -> list[Number]:
    """Compare ASGD with P3: each worker's gradient is applied alone."""
    found = []
    for scheme in ("asgd", "asgd:order=real", "asgd:lr=mean", "asgd:order=real,lr=mean"):
        points, stale = points_from_p3(scheme), trained(scheme).stale
        mean = statistics.fmean(points)
        facts = {"points": _spread(points), "seeds": len(points), "stale": stale}
        found.append(ours("asgd_points", mean, scheme, **facts))
    return found


@reproduces("p3:secB2", **_RUNS)
def section_b2(_: Simulations) -> list[Number | Curve]:
    """Compare where P3 and ASGD end, and when they come to 80/93 of where P3 ends."""
    full = trained(_FULL_PRECISION)
    alike, own = trained("asgd:order=real"), trained("asgd:order=real,lr=mean")
    emulated = trained("asgd:lr=mean")
    goal = full.final * 80.0 / 93.0
    steps, full_steps = own.steps_to(goal), full.steps_to(goal)
    assert full_steps is not None
    # A run that never gets there has taken at least all of its steps.
    reached = own.evaluated[-1] if steps is None else steps
    text = "at least, it never gets there" if steps is None else "later, as published"
    apart = full.evaluated[1] - full.evaluated[0]
    in_turn = emulated.steps_to(goal)
    return [
        ours("final_p3", full.final),
        ours("final_asgd", own.final, alike=alike.final),
        ours(
            "time_to_80",
            reached / full_steps,
            goal=goal,
            text=text,
            apart=apart,
            full_steps=full_steps,
            in_turn="never" if in_turn is None else f"{in_turn / full_steps:.1f}x",
        ),
        *(
            Curve(name, "steps", "% right", tuple(zip(one.evaluated, one.mean_curve, strict=True)))
            for name, one in {"P3": full, "ASGD, real processes": own}.items()
        ),
    ]


@reproduces("poseidon:fig9b", **_RUNS)
def poseidon_9b(_: Simulations) -> list[Number]:
    """Compare errors after equally many epochs on more nodes."""
    errors = {
        workers: 1.0 - trained(_FULL_PRECISION, workers=workers).final / 100.0
        for workers in (WORKERS, *NODES)
    }
    return [
        ours(
            "error",
            errors[NODES[-1]],
            nodes=NODES[-1],
            steps=trained(_FULL_PRECISION).evaluated[-1],
            workers=WORKERS,
            text=", ".join(f"{error:.3f} on {workers}" for workers, error in errors.items()),
        )
    ]


@reproduces("poseidon:fig11", **_RUNS)
def poseidon_11(_: Simulations) -> list[Number]:
    """Compare full precision with 1-bit fully connected layers."""
    full, onebit = trained(_FULL_PRECISION), trained(LAYER_SCHEMES[1], layers=LINEAR)
    third = len(full.evaluated) // 3
    points = [one - other for one, other in zip(onebit.finals, full.finals, strict=True)]
    facts = {
        "third": full.evaluated[third],
        "full": 1 - full.final / 100,
        "onebit": 1 - onebit.final / 100,
        "points": _spread(points),
        "seeds": len(points),
    }
    return [
        ours("poseidon_error", 1.0 - full.mean_curve[third] / 100.0, **facts),
        ours("onebit_error", 1.0 - onebit.final / 100.0, **facts),
        ours("accuracy", full.final),
    ]


_IMAGES = ("mlp", STUDIED_CLOSELY)
_ENCODINGS = {"32bit": "p3", "1bit": "onebit", "4bit": "qsgd:bits=4", "8bit": "qsgd:bits=8"}


def _lost(scheme: str, tasks: Sequence[str]) -> tuple[float, str]:
    """Return the largest loss of a scheme in points, and the losses of all tasks in words."""
    found = {task: studied_content()["tasks"][task][scheme] for task in tasks}
    text = ", ".join(
        f"{task} {points:+.1f} ± {spread}" for task, (_, points, spread) in found.items()
    )
    return -min(points for _, points, _ in found.values()), text


@reproduces("lowprec:fig5")
def lowprec_5(_: Simulations) -> list[Number]:
    """Compare where each precision ends."""
    tasks: dict[str, Any] = studied_content()["tasks"]
    own, every = tasks[STUDIED_CLOSELY], tuple(tasks)
    found = []
    for key, scheme in _ENCODINGS.items():
        percent, points, spread = own[scheme]
        tag = "" if scheme == "p3" else "encoded"
        found.append(ours(f"resnet50_{key}", percent, tag, points=points, spread=spread))
    gains = {
        (task, scheme): tasks[task][scheme][1]
        for task in _IMAGES
        for scheme in tasks[task]
        if scheme.startswith(("qsgd", "onebit"))
    }
    (task, scheme), gain = max(gains.items(), key=lambda one: one[1])
    found.append(ours("best_gain", gain, task=task, scheme=scheme))
    for key, scheme, over in (
        ("qsgd_2bit", "qsgd:bits=2", _IMAGES),
        ("alexnet_bucket_8192", "qsgd:bits=4,bucket=8192", (STUDIED_CLOSELY,)),
        ("onebit_most", "onebit", _IMAGES),
        ("onebit_summary", "onebit", every),
        ("qsgd_4bit_summary", "qsgd:bits=4", every),
    ):
        lost, text = _lost(scheme, over)
        found.append(ours(key, lost, "lost", text=text))
    lost, text = _lost("onebit:bucket=512", (STUDIED_CLOSELY,))
    kinds = "; ".join(
        f"`{scheme}` "
        + ", ".join(
            f"{trained(scheme, layers=layers).final:.1f} % with {words}"
            for layers, words in (
                (CONVOLUTIONS, "convolutions"),
                (LINEAR, "fully connected layers"),
                (ALL, "all layers encoded"),
            )
        )
        for scheme in LAYER_SCHEMES
    )
    steps = trained("p3").evaluated[-1]
    found.append(ours("alexnet_onebit_512", lost, text=text, kinds=kinds, steps=steps))
    best = max(every, key=lambda task: tasks[task]["qsgd:bits=8"][1])
    _, gain, spread = tasks[best]["qsgd:bits=8"]
    return [*found, ours("qsgd_8bit_summary", gain, task=best, spread=spread)]
