"""One number of a paper beside ours, and how a figure's numbers are kept together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).with_name("published.json")


@dataclass(frozen=True)
class Published:
    """What a paper says.

    Attributes:
        figure: the figure's name here, such as `p3:fig7`.
        key: of the number within it.
        what: what the number is, in words.
        value: the number; None where the paper says it in words or a picture alone.
        unit: of the number.
        source: section, table or figure.
        says: the paper's words, where there is no number.
    """

    figure: str
    key: str
    what: str
    value: float | None
    unit: str
    source: str
    says: str = ""


@dataclass(frozen=True)
class Ours:
    """What gradlane makes of it.

    Attributes:
        key: of the published number that it stands beside.
        value: the number, in the published unit.
        why: why it differs, or that it does not.
        variant: what is different from the figure's setting, where a number has several answers.
    """

    key: str
    value: float
    why: str
    variant: str = ""


@dataclass(frozen=True)
class Curve:
    """A line of a picture that has no numbers: ours alone.

    Attributes:
        name: what it is a line of.
        x: what the horizontal axis shows, with its unit.
        y: what the vertical axis shows.
        points: pairs of both.
    """

    name: str
    x: str
    y: str
    points: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return the curve."""
        return asdict(self)


@dataclass(frozen=True)
class Comparison:
    """A published number, ours, and why they differ."""

    figure: str
    key: str
    what: str
    published: float | None
    ours: float
    unit: str
    source: str
    says: str
    variant: str
    why: str

    @property
    def difference(self) -> float | None:
        """Ours less the published one, in its unit."""
        return None if self.published is None else self.ours - self.published

    def to_json(self) -> dict[str, Any]:
        """Return the comparison with its difference."""
        return {**asdict(self), "difference": self.difference}


@cache
def published_content() -> dict[str, Any]:
    """Return the file of published numbers."""
    content: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return content


def published_of(figure: str) -> dict[str, Published]:
    """Return what a paper says in one figure, by key, in the order of the file."""
    entries = published_content()["figures"].get(figure, {})
    return {
        key: Published(
            figure,
            key,
            entry["what"],
            entry.get("value"),
            entry.get("unit", ""),
            entry["source"],
            entry.get("says", ""),
        )
        for key, entry in entries.items()
    }


def given(name: str) -> Any:
    """Return something that a paper states about its setting, such as a batch time."""
    return published_content()["settings"][name]["value"]


def compared(figure: str, ours: Sequence[Ours | Curve]) -> list[Comparison]:
    """Put ours beside what is published; curves have nothing to stand beside.

    Raises:
        KeyError: a number that the file of published ones does not have.
    """
    published = published_of(figure)
    return [
        Comparison(
            figure,
            one.key,
            published[one.key].what,
            published[one.key].value,
            one.value,
            published[one.key].unit,
            published[one.key].source,
            published[one.key].says,
            one.variant,
            one.why,
        )
        for one in ours
        if isinstance(one, Ours)
    ]


Reproduce = Callable[[Any], Sequence[Ours | Curve]]


@dataclass(frozen=True)
class Figure:
    """A figure that can be asked for, or that cannot yet.

    Attributes:
        name: such as `p3:fig7`.
        title: what it shows.
        setting: how it is reproduced.
        run: computes ours, given the simulations; None where something is missing.
        needs: what is missing.
    """

    name: str
    title: str
    setting: str = ""
    run: Reproduce | None = None
    needs: str = ""
