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

from gradlane.lab.accuracy.curve import crossing
from gradlane.lab.accuracy.exchange import ALL, CONVOLUTIONS, LINEAR
from gradlane.lab.accuracy.study import (
    LAYER_SCHEMES,
    NODES,
    PAPERS_ASGD,
    PAPERS_DGC,
    SETTINGS,
    STUDIED_CLOSELY,
    WORKERS,
)
from gradlane.lab.papers.comparison import Curve, Figure, Ours, content_of
from gradlane.lab.papers.simulations import Simulations

TRAINED = Path(__file__).with_name("trained.json")
STUDIED = Path(__file__).with_name("studied.json")
_FULL_PRECISION = "p3"
SMALLER = "smaller"
"""Role of a number of another network than the paper's."""
_SMALL = "A small network on easy images, not theirs"


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


def _smaller(key: str, value: float, why: str, variant: str = "", *, main: bool = False) -> Ours:
    return Ours(key, value, why, variant, main=main, role=SMALLER)


def figure_11(_: Simulations) -> Sequence[Ours]:
    """Compare DGC with P3 under several settings."""
    points = [points_from_p3(PAPERS_DGC, setting) for setting in SETTINGS]
    ends = {
        scheme: [trained(scheme, setting=setting).final for setting in SETTINGS]
        for scheme in (_FULL_PRECISION, PAPERS_DGC)
    }
    ranges = [f"{min(own):.1f} to {max(own):.1f} %" for own in ends.values()]
    by_setting = ", ".join(
        f"{setting[1:].replace('/', ' ') or 'the default'} {_spread(own)}"
        for setting, own in zip(SETTINGS, points, strict=True)
    )
    return [
        _smaller(
            "dgc_points",
            statistics.fmean(one for own in points for one in own),
            f"P3 ends at {ranges[0]} over the settings, DGC at {ranges[1]}; points by setting: "
            f"{by_setting}. {_SMALL}.",
            f"0.1 %, {len(SETTINGS)} settings, {len(points[0])} seeds",
            main=True,
        ),
    ]


_ORDERS = {"asgd": "in turn", "asgd:order=real": "real processes"}


def _asgd_of(order: str, *, share: bool) -> str:
    return order + ((",lr=mean" if ":" in order else ":lr=mean") if share else "")


def figure_15(_: Simulations) -> Sequence[Ours]:
    """Compare ASGD with P3: each worker's gradient is applied alone."""
    found = []
    for share in (False, True):
        for order, text in _ORDERS.items():
            scheme = _asgd_of(order, share=share)
            assert scheme in PAPERS_ASGD
            points, stale = points_from_p3(scheme), trained(scheme).stale
            lr = "a worker's share of the learning rate" if share else "P3's learning rate"
            why = (
                f"{_spread(points)} over {len(points)} seeds; gradients are {stale:.1f} updates "
                "old. "
            )
            why += (
                "A fourth of the learning rate for each of four times as many updates."
                if share
                else "Four times as many updates as P3 with the same learning rate and momentum "
                "0.9: it diverges, whoever orders them."
            )
            main = order == "asgd:order=real" and not share
            variant = f"{text}, {lr}"
            found.append(
                _smaller(
                    "asgd_points", statistics.fmean(points), f"{why} {_SMALL}.", variant, main=main
                )
            )
    return found


def section_b2(_: Simulations) -> Sequence[Ours | Curve]:
    """Compare where P3 and ASGD end, and when they come to 80/93 of where P3 ends."""
    full = trained(_FULL_PRECISION)
    alike, own = (trained(_asgd_of("asgd:order=real", share=share)) for share in (False, True))
    emulated = trained(_asgd_of("asgd", share=True))
    goal = full.final * 80.0 / 93.0
    steps, full_steps = own.steps_to(goal), full.steps_to(goal)
    assert full_steps is not None
    # A run that never gets there has taken at least all of its steps.
    reached = own.evaluated[-1] if steps is None else steps
    text = "at least, it never gets there" if steps is None else "later, as published"
    apart = full.evaluated[1] - full.evaluated[0]
    in_turn = emulated.steps_to(goal)
    return [
        _smaller("final_p3", full.final, f"{_SMALL}."),
        _smaller(
            "final_asgd",
            own.final,
            "Real processes, a worker's share of the learning rate; with all of it "
            f"{alike.final:.1f} %. {_SMALL}.",
        ),
        _smaller(
            "time_to_80",
            reached / full_steps,
            f"To {goal:.1f} %, 80/93 of where P3 ends: {text}. Read between evaluations {apart} "
            f"steps apart, the first of which P3 passes after {full_steps:.0f}: the ratio is "
            "somewhat small. Steps take as long, since both send "
            "a gradient and get parameters, and 1 Gbit/s is the limit; emulated in turn "
            f"{'never' if in_turn is None else f'{in_turn / full_steps:.1f}x'}. {_SMALL}.",
            "real processes, a worker's share of the learning rate",
        ),
        *(
            Curve(name, "steps", "% right", tuple(zip(one.evaluated, one.mean_curve, strict=True)))
            for name, one in {"P3": full, "ASGD, real processes": own}.items()
        ),
    ]


def poseidon_9b(_: Simulations) -> Sequence[Ours]:
    """Compare errors after equally many epochs on more nodes."""
    errors = {
        workers: 1.0 - trained(_FULL_PRECISION, workers=workers).final / 100.0
        for workers in (WORKERS, *NODES)
    }
    text = ", ".join(f"{error:.3f} on {workers}" for workers, error in errors.items())
    why = (
        f"After {trained(_FULL_PRECISION).evaluated[-1]} steps of {WORKERS} workers, and as many "
        f"samples in larger batches: {text} workers. As published, more "
        f"nodes end alike in as many epochs. {_SMALL}."
    )
    return [_smaller("error", errors[NODES[-1]], why, f"{NODES[-1]} workers")]


def poseidon_11(_: Simulations) -> Sequence[Ours]:
    """Compare full precision with 1-bit fully connected layers."""
    full, onebit = trained(_FULL_PRECISION), trained(LAYER_SCHEMES[1], layers=LINEAR)
    third = len(full.evaluated) // 3
    points = [one - other for one, other in zip(onebit.finals, full.finals, strict=True)]
    why = (
        f"Full precision ends at {1 - full.final / 100:.3f}, 1-bit fully connected layers at "
        f"{1 - onebit.final / 100:.3f}: {_spread(points)} points over {len(points)} seeds, where "
        "theirs stays at 0.5. Ours keep the residual on both ways; theirs is Caffe's "
        f"with one. {_SMALL}."
    )
    return [
        _smaller(
            "poseidon_error",
            1.0 - full.mean_curve[third] / 100.0,
            f"After a third of the steps, {full.evaluated[third]}. {why}",
        ),
        _smaller("onebit_error", 1.0 - onebit.final / 100.0, f"After all steps. {why}"),
        _smaller("accuracy", full.final, f"{_SMALL}."),
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


def lowprec_5(_: Simulations) -> Sequence[Ours]:
    """Compare where each precision ends."""
    tasks: dict[str, Any] = studied_content()["tasks"]
    own, every = tasks[STUDIED_CLOSELY], tuple(tasks)
    found = []
    for key, scheme in _ENCODINGS.items():
        percent, points, spread = own[scheme]
        why = (
            "Full precision."
            if scheme == "p3"
            else f"{points:+.1f} ± {spread} from full precision."
        )
        found.append(_smaller(f"resnet50_{key}", percent, f"{why} {_SMALL}.", "a small ResNet"))
    gains = {
        (task, scheme): tasks[task][scheme][1]
        for task in _IMAGES
        for scheme in tasks[task]
        if scheme.startswith(("qsgd", "onebit"))
    }
    (task, scheme), gain = max(gains.items(), key=lambda one: one[1])
    found.append(
        _smaller("best_gain", gain, f"`{scheme}` on {task}: noise of five seeds. {_SMALL}.")
    )
    for key, scheme, over in (
        ("qsgd_2bit", "qsgd:bits=2", _IMAGES),
        ("alexnet_bucket_8192", "qsgd:bits=4,bucket=8192", (STUDIED_CLOSELY,)),
        ("onebit_most", "onebit", _IMAGES),
        ("onebit_summary", "onebit", every),
        ("qsgd_4bit_summary", "qsgd:bits=4", every),
    ):
        lost, text = _lost(scheme, over)
        found.append(
            _smaller(key, lost, f"Points from full precision: {text}. {_SMALL}.", "largest")
        )
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
    why = f"{text}. By the kind of layer, {trained('p3').evaluated[-1]} steps: {kinds}. {_SMALL}."
    found.append(_smaller("alexnet_onebit_512", lost, why))
    best = max(every, key=lambda task: tasks[task]["qsgd:bits=8"][1])
    _, gain, spread = tasks[best]["qsgd:bits=8"]
    found.append(
        _smaller("qsgd_8bit_summary", gain, f"On {best}, ± {spread}: noise. {_SMALL}.", "largest")
    )
    return found


_SEEDS = len(trained(_FULL_PRECISION).curves)
_SETTING = (
    f"a small ResNet on 8x8 images of digits, {_SEEDS} seeds, trained by "
    f"`{trained_content()['command']}`; theirs "
    "{theirs}"
)
_DIGITS = _SETTING.format(theirs="are 160 epochs of ResNet-110 on CIFAR-10")
FIGURES = (
    Figure("p3:fig11", "accuracy of P3 and DGC", _DIGITS, figure_11),
    Figure("p3:fig15", "accuracy of P3 and ASGD", _DIGITS, figure_15),
    Figure("p3:secB2", "ResNet-110 by P3 and ASGD, over time", _DIGITS, section_b2),
)
"""Figures of P3; other papers' stand among their own figures."""
POSEIDON_9B = Figure(
    "poseidon:fig9b",
    "ResNet-152: error over epochs",
    _SETTING.format(theirs="are 90 epochs of ImageNet"),
    poseidon_9b,
)
POSEIDON_11 = Figure(
    "poseidon:fig11",
    "convergence with 1-bit gradients",
    _SETTING.format(theirs="is CIFAR-10 quick"),
    poseidon_11,
)
LOWPREC_5 = Figure(
    "lowprec:fig5",
    "accuracy of each precision",
    "four small networks of `gradlane lab accuracy --seeds 5` (docs/accuracy.md: 440 to 1,200 "
    "steps), kinds of layers by `--papers`; theirs are ImageNet, CIFAR-10 and AN4",
    lowprec_5,
)
