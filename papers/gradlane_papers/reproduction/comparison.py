"""A number of a paper beside ours, and how a figure's numbers are kept together."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).with_name("published.json")
TABLES = Path(__file__).with_name("published_tables.json")
WORDS = Path(__file__).with_name("figures.json")
"""By figure: its title, how it is reproduced, and the words beside ours, with places for facts.

Words stand under `key:tag`, or `key` where there is no tag; those of all other numbers of a tag
under `:tag`, and those of all other numbers without one under an empty name.
"""


@dataclass(frozen=True)
class Published:
    """A number that a paper publishes.

    Attributes:
        figure: the figure's name here, such as `p3:fig7`.
        key: of the number within it.
        what: what the number is, in words.
        value: the number; None where the paper says it in words or a picture alone.
        unit: of the number.
        source: section, table or figure.
        says: the paper's words, where there is no number.
        note: how sure the reading is, where it is not.
        cannot: why nothing of ours stands beside it.
    """

    figure: str
    key: str
    what: str
    value: float | None
    unit: str
    source: str
    says: str = ""
    note: str = ""
    cannot: str = ""


@dataclass(frozen=True)
class Ours:
    """Our number for a published one.

    Attributes:
        key: of the published number that it stands beside.
        value: the number, in the published unit.
        why: why it differs, or that it does not.
        variant: what is different from the figure's setting, where a number has several answers.
        main: whether it is the answer that the table of all published numbers takes; the first one
            where none is.
        role: `input` where the published number goes into ours as it is, `fitted` where a constant
            was fitted to it, `smaller` where another network was trained: none is a prediction.
    """

    key: str
    value: float
    why: str
    variant: str = ""
    main: bool = False
    role: str = ""


@dataclass(frozen=True)
class Number:
    """A number that a figure's function gives; its words are in the file of figures.

    Attributes:
        key: of the published number that it stands beside.
        value: the number, in the published unit.
        tag: tells several numbers of a key apart.
        facts: what the words have places for.
    """

    key: str
    value: float
    tag: str
    facts: dict[str, Any]


def ours(key: str, value: float, tag: str = "", /, **facts: Any) -> Number:
    """Return a number, with the facts that its words in the file of figures have places for."""
    return Number(key, value, tag, facts)


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


ROLES = {
    "": "predicted",
    "fitted": "fitted",
    "input": "taken as input",
    "smaller": "from a smaller network",
    "none": "not reproduced",
}
"""Relations of ours to a published number: only predictions are counted by their deviation."""


@dataclass(frozen=True)
class Comparison:
    """A published number, and ours beside it; none where its figure was not reproduced."""

    published: Published
    ours: Ours | None

    @property
    def value(self) -> float | None:
        """Our number; None where it is not reproduced."""
        return None if self.ours is None else self.ours.value

    @property
    def why(self) -> str:
        """Why ours differs, or that it does not."""
        if self.ours is not None:
            return self.ours.why
        return self.published.cannot or ROLES["none"]

    @property
    def role(self) -> str:
        """One of `ROLES`."""
        return "none" if self.ours is None else self.ours.role

    @property
    def what(self) -> str:
        """The number in words, with the variant that ours is of."""
        variant = self.ours.variant if self.ours else ""
        return self.published.what + (f" ({variant})" if variant else "")

    @property
    def difference(self) -> float | None:
        """Ours less the published one, in its unit."""
        if self.published.value is None or self.value is None:
            return None
        return self.value - self.published.value

    @property
    def deviation(self) -> float | None:
        """The difference in percent; None where the published one is zero, or ours is another
        network's."""
        if self.difference is None or self.role == "smaller" or not self.published.value:
            return None
        return 100.0 * self.difference / abs(self.published.value)

    def is_within(self, percent: float) -> bool:
        """Return whether ours deviates by this much at most."""
        return self.deviation is not None and abs(self.deviation) <= percent

    def to_json(self) -> dict[str, Any]:
        """Return the comparison with its difference."""
        content = {**asdict(self.published), **(asdict(self.ours) if self.ours else {})}
        del content["value"]
        return {
            **content,
            "published": self.published.value,
            "ours": self.value,
            "difference": self.difference,
        }


@cache
def content_of(path: Path) -> dict[str, Any]:
    """Return a file of figures, read once."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def published_content() -> dict[str, Any]:
    """Return the file of published numbers."""
    return content_of(PUBLISHED)


def published_tables() -> dict[str, Any]:
    """Return the file of published tables: speeds, and the settings that they were measured at."""
    return content_of(TABLES)


@dataclass(frozen=True)
class Speed:
    """A legible cell of a table of samples a second."""

    network: str
    encoding: str
    gpus: int
    value: float
    note: str

    @property
    def key(self) -> str:
        """The cell's key within its table."""
        return f"{self.network}_{self.encoding}_{self.gpus}"


@cache
def speeds(table: str) -> tuple[Speed, ...]:
    """Return the legible cells of a table of samples a second."""
    content = published_tables()["speeds"][table]
    return tuple(
        Speed(row["network"], row["encoding"], gpus, value, row.get("note", ""))
        for row in content["rows"]
        for gpus, value in zip(content["gpus"], row["values"], strict=True)
        if value is not None
    )


def _table_of(table: str) -> dict[str, Published]:
    """Return a table's cells as published numbers."""
    content = published_tables()["speeds"].get(table)
    if content is None:
        return {}
    networks, encodings = published_tables()["networks"], published_tables()["encodings"]
    return {
        one.key: Published(
            table,
            one.key,
            f"{networks[one.network]}, {encodings[one.encoding]}, {one.gpus} GPU"
            f"{'s' if one.gpus > 1 else ''}, {content['primitive'].upper()}",
            one.value,
            content["unit"],
            content["source"],
            note=one.note,
        )
        for one in speeds(table)
    }


def published_of(figure: str) -> dict[str, Published]:
    """Return what a paper says in one figure, by key, in the order of the file."""
    table = _table_of(figure)
    if table:
        return table
    entries = published_content()["figures"].get(figure, {})
    blank = {"value": None, "unit": ""}
    return {key: Published(figure, key, **{**blank, **entry}) for key, entry in entries.items()}


def given(name: str) -> Any:
    """Return something that a paper states about its setting, such as a batch time."""
    return published_content()["settings"][name]["value"]


def first_above(
    function: Callable[[float], float], wanted: float, low: float, high: float, rounds: int = 40
) -> float:
    """Return where a function that grows from `low` to `high` reaches a value, by bisection."""
    for _ in range(rounds):
        middle = (low * high) ** 0.5
        if function(middle) < wanted:
            low = middle
        else:
            high = middle
    return high


Reproduce = Callable[[Any], Sequence[Number | Curve]]
"""Computes a figure, given the simulations."""


@dataclass(frozen=True)
class Figure:
    """A figure that can be asked for.

    Attributes:
        name: such as `p3:fig7`.
        title: what it shows.
        setting: how it is reproduced.
        words: of each of our numbers, by key and tag.
        role: of all of ours, where they have one.
        run: its function.
        inputs: names the inputs that the simulations have, where they depend on a folder.
    """

    name: str
    title: str
    setting: str
    words: dict[str, dict[str, Any]]
    role: str
    run: Reproduce
    inputs: Callable[[Any], str] | None

    def setting_of(self, simulations: Any) -> str:
        """Return how it is reproduced with the inputs that there are."""
        return f"{self.setting}; {self.inputs(simulations)}" if self.inputs else self.setting

    def worded(self, one: Number) -> Ours:
        """Return one of its numbers with the words of the file.

        Raises:
            KeyError: it has no words, or these have a place for a fact that it lacks.
        """
        tag = f":{one.tag}" if one.tag else ""
        words = self.words.get(f"{one.key}{tag}") or self.words[tag]
        why, variant = words["why"], words.get("variant", "")
        return Ours(
            *(one.key, one.value, why.format(**one.facts), variant.format(**one.facts)),
            main=words.get("main", False),
            role=words.get("role", self.role),
        )


REPRODUCED: dict[str, Figure] = {}
"""Figures by name; those of a module are here once it is imported."""


def reproduces(
    *names: str, inputs: Callable[[Any], str] | None = None, **facts: Any
) -> Callable[[Reproduce], Reproduce]:
    """Mark the function that computes figures of the file.

    Args:
        names: of the figures.
        inputs: as for `Figure`.
        facts: what the words of the setting have places for.
    """

    def mark(run: Reproduce) -> Reproduce:
        for name in names:
            words = content_of(WORDS)[name]
            setting, own = words["setting"].format(**facts), words.get("ours", {})
            role = words.get("role", "")
            REPRODUCED[name] = Figure(name, words["title"], setting, own, role, run, inputs)
        return run

    return mark


def compared(figure: Figure, found: Sequence[Number | Curve]) -> list[Comparison]:
    """Put ours beside what is published; curves have nothing to stand beside. Numbers of which
    nothing can be here stand alone.

    Raises:
        KeyError: a number that the file of published ones does not have, or one without words.
    """
    published = published_of(figure.name)
    rows = [
        Comparison(published[one.key], figure.worded(one))
        for one in found
        if isinstance(one, Number)
    ]
    return rows + [Comparison(one, None) for one in published.values() if one.cannot]
