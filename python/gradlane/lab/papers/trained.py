"""Figures of accuracy, from small networks that `gradlane lab accuracy` trained with five seeds.

What they learned is kept in `trained.json`, which that command writes with `--summary`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from gradlane.lab.papers.comparison import Curve, Figure, Ours
from gradlane.lab.papers.simulations import Simulations

TRAINED = Path(__file__).with_name("trained.json")
_FULL_PRECISION = "p3"
NEAREST = "resnet"
"""The task whose network is most like the paper's."""
SMALLER = "smaller"
"""Role of a number of another network than the paper's."""


@cache
def trained_content() -> dict[str, Any]:
    """Return the file of what was trained."""
    content: dict[str, Any] = json.loads(TRAINED.read_text(encoding="utf-8"))
    return content


def points_from_p3(task: str, scheme: str) -> list[float]:
    """Return, seed by seed, by how many points of accuracy a scheme ends above P3."""
    accuracy = trained_content()["tasks"][task]["accuracy"]
    pairs = zip(accuracy[scheme], accuracy[_FULL_PRECISION], strict=True)
    return [100.0 * (own - full) for own, full in pairs]


def _compared(key: str, schemes: dict[str, str]) -> list[Ours | Curve]:
    found: list[Ours | Curve] = []
    for scheme, setting in schemes.items():
        for task, facts in trained_content()["tasks"].items():
            points = points_from_p3(task, scheme)
            full = facts["accuracy"][_FULL_PRECISION]
            seeds = "one seed"
            if len(points) > 1:
                seeds = f"{len(points)} seeds: ± {statistics.stdev(points):.1f}"
            why = (
                f"{facts['what']}, {facts['steps']} steps, {facts['workers']} workers, "
                f"{seeds}; P3 itself ends at "
                f"{100.0 * statistics.fmean(full):.1f} %. A small network, not ResNet-110."
            )
            found.append(
                Ours(
                    key,
                    statistics.fmean(points),
                    why,
                    f"{task}, {setting}",
                    main=task == NEAREST,
                    role=SMALLER,
                )
            )
    return found


def figure_11(simulations: Simulations) -> Sequence[Ours | Curve]:
    """Compare DGC with P3."""
    return _compared("dgc_points", {"dgc:ratio=0.01,broadcast_ratio=0.04": "1 % of the gradients"})


def figure_15(simulations: Simulations) -> Sequence[Ours | Curve]:
    """Compare ASGD with P3, whose gradients are applied alone."""
    return _compared(
        "asgd_points",
        {"asgd": "P3's learning rate", "asgd:lr=mean": "a worker's share of the learning rate"},
    )


_SETTING = (
    "small networks, trained with emulated workers by `gradlane lab accuracy --quick`; the paper's "
    "five settings are 160 epochs of ResNet-110 on CIFAR-10 each"
)
FIGURES = (
    Figure("p3:fig11", "accuracy of P3 and DGC", _SETTING, figure_11),
    Figure("p3:fig15", "accuracy of P3 and ASGD", _SETTING, figure_15),
    Figure(
        "p3:secB2",
        "ResNet-110 by P3 and ASGD, over time",
        needs="160 epochs of training ResNet-110 on CIFAR-10; small networks instead, with the "
        "time to an accuracy: docs/accuracy.md, written by `gradlane lab accuracy`",
    ),
)
