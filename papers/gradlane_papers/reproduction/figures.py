"""All figures that can be asked for, and those that cannot yet with what is missing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# Importing a module registers its figures.
from gradlane_papers.reproduction import (  # noqa: F401
    lowprec,
    p3,
    poseidon,
    poseidon_others,
    trained,
    whatif_paper,
)
from gradlane_papers.reproduction.comparison import (
    REPRODUCED,
    WORDS,
    Comparison,
    Curve,
    Figure,
    compared,
    content_of,
    published_content,
)
from gradlane_papers.reproduction.simulations import Simulations

FIGURES: dict[str, Figure] = {name: REPRODUCED[name] for name in content_of(WORDS)}


@dataclass(frozen=True)
class Reproduction:
    """A figure with its numbers beside the paper's.

    Attributes:
        figure: what it is.
        setting: how it was reproduced, and from which inputs.
        rows: numbers that the paper gives, or describes.
        curves: lines of its picture, ours alone.
    """

    figure: Figure
    setting: str
    rows: tuple[Comparison, ...]
    curves: tuple[Curve, ...]

    def to_json(self) -> dict[str, Any]:
        """Return everything, units in the rows."""
        return {
            "figure": self.figure.name,
            "paper": paper_of(self.figure.name),
            "title": self.figure.title,
            "setting": self.setting,
            "rows": [row.to_json() for row in self.rows],
            "curves": [curve.to_json() for curve in self.curves],
        }


def paper_of(name: str) -> str:
    """Return the title of a figure's paper."""
    title: str = published_content()["papers"][name.partition(":")[0]]
    return title


def chosen(names: Sequence[str]) -> list[Figure]:
    """Return the figures that somebody means: by name, a paper's name for all of its, or `all`.

    Raises:
        ValueError: there is no such figure.
    """
    found: dict[str, Figure] = {}
    for name in names:
        wanted = [
            one for one in FIGURES.values() if name in ("all", one.name, one.name.partition(":")[0])
        ]
        if not wanted:
            raise ValueError(
                f"there is no figure {name!r}; `gradlane reproduce --list` shows them all"
            )
        found |= {one.name: one for one in wanted}
    return list(found.values())


def reproduce(
    figures: Sequence[Figure],
    simulations: Simulations,
    on_done: Callable[[Reproduction], None] = lambda made: None,
) -> list[Reproduction]:
    """Compute figures, one after another.

    Args:
        figures: of `chosen`.
        simulations: where they are simulated.
        on_done: called with each.
    """
    made = []
    for figure in figures:
        found = figure.run(simulations)
        curves = tuple(one for one in found if isinstance(one, Curve))
        rows = tuple(compared(figure, found))
        made.append(Reproduction(figure, figure.setting_of(simulations), rows, curves))
        on_done(made[-1])
    return made
