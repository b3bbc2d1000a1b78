"""Seconds to a given held-out loss behind slow ports, of several ways to average gradients.

`python -m benchmarks.time_to_loss --minutes 15 --docs` (root: network namespaces and `tc`) trains
the lab's character transformer on four ranks with AdamW, once for each way, from the same values,
with the same batches and learning rate. Computing is real and stretched to a fixed time, as an
accelerator would take. Processes of all ways are there from the beginning and take turns of whole
rounds, the way with the fewest seconds so far first, so all meet the same load and end after the
same time. Held-out losses are measured between turns, outside of these seconds.

`--docs` writes the rows, the page with its picture, and the sentence of the README; `--render`
writes the last three anew from the rows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import json
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.compared_with import LOCAL, RANKS, ROUND, Ranks, Way, between
from benchmarks.time_to_loss_chart import draw_curves

from gradlane.formats.atomic_io import atomic_write_text
from gradlane.formats.rates import parse_rate
from gradlane.lab.cluster.counters import read_port_bytes
from gradlane.lab.cluster.namespaces import EmulatedCluster

EXACT = "gradlane, exact"
EIGHT_BITS, SIXTEEN_BITS, POWER_SGD = "gradlane, 8 bits", "DDP, 16 bits", "DDP, PowerSGD"
DILOCO = f"gradlane, exchange every {ROUND} steps"
COURSES = {
    EXACT: Way("exact", "gradlane"),
    EIGHT_BITS: Way("8 bits", "gradlane", options={"codec": "qsgd:bits=8"}),
    "gradlane, mean every 8 steps": Way(
        "mean", "gradlane", options={"update": "local:steps=8,outer=average"}, is_local=True
    ),
    DILOCO: Way("DiLoCo", "gradlane", options={"update": LOCAL}, is_local=True),
    "DDP": Way("DDP", "ddp"),
    SIXTEEN_BITS: Way("16 bits", "ddp", "fp16"),
    POWER_SGD: Way("PowerSGD", "ddp", "powersgd:4"),
}
"""Ways by their names in the table."""
FOLDER = Path("docs/research")
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
README_MARKS = ("<!-- time to a loss: begin -->", "<!-- time to a loss: end -->")
_OFFSETS = (0.4, 0.2, 0.0, -0.2)


@dataclass(frozen=True)
class Point:
    """Where a training of one way stands after a turn.

    Attributes:
        steps: so far.
        seconds: that they took.
        loss: on held-out text.
        load: of the machine, in the minute before.
    """

    steps: int
    seconds: float
    loss: float
    load: float


class Course:
    """One way's training, turn by turn."""

    def __init__(self, cluster: EmulatedCluster, name: str, seed: int, compute_s: float) -> None:
        """Start the ranks and judge the initial values."""
        self.name = name
        self._cluster = cluster
        self.ranks = Ranks(cluster, COURSES[name], seed, batch_time_s=compute_s)
        self._bytes = self._busy_s = 0.0
        self.points = [Point(0, 0.0, self._loss(), os.getloadavg()[0])]

    @property
    def seconds(self) -> float:
        """Seconds of training so far."""
        return self.points[-1].seconds

    def take_turn(self) -> None:
        """Train for a round and judge the values."""
        before = self._port_bytes()
        found = self.ranks.ask(ROUND)
        after = self._port_bytes()
        self._bytes += max(late - early for early, late in zip(before, after, strict=True))
        self._busy_s += ROUND * statistics.mean(one["cpu_s"] for one in found)
        seconds = self.seconds + ROUND * max(one["step_s"] for one in found)
        load = os.getloadavg()[0]
        steps = self.points[-1].steps + ROUND
        self.points.append(Point(steps, seconds, self._loss(), load))

    def row(self) -> dict[str, Any]:
        """Return what was measured, for JSON."""
        steps = self.points[-1].steps
        return {
            "way": self.name,
            "bytes": self._bytes / steps,
            "cpu_s": self._busy_s / steps,
            "points": [asdict(point) for point in self.points],
        }

    def _port_bytes(self) -> list[int]:
        ports = [read_port_bytes(one) for one in self._cluster.counter_descriptors()]
        return [direction for port in ports for direction in port]

    def _loss(self) -> float:
        losses = [one["loss"] for one in self.ranks.ask(0)]
        if max(losses) - min(losses) > 1e-4:
            raise SystemExit(f"{self.name}: ranks have other values, their losses are {losses}")
        return losses[0]


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train all ways in turns until the time is over; return the content of the JSON file."""
    end_s = time.monotonic() + 60.0 * given.minutes
    content = {
        "date": time.strftime("%-d %b %Y", time.gmtime()),
        "rate": given.rate,
        "compute_s": given.compute_ms / 1e3,
        "minutes": given.minutes,
        "seed": given.seed,
        "processors": os.cpu_count(),
        "versions": {"torch": importlib.metadata.version("torch")},
    }
    with EmulatedCluster(RANKS, round(parse_rate(given.rate))) as cluster:
        courses: list[Course] = []
        try:
            for name in COURSES:
                courses.append(Course(cluster, name, given.seed, content["compute_s"]))
            while time.monotonic() < end_s or min(len(one.points) for one in courses) == 1:
                course = min(courses, key=lambda one: one.seconds)
                course.take_turn()
                last = course.points[-1]
                print(
                    f"{course.name}: {last.steps} steps, {last.seconds:.1f} s, "
                    f"loss {last.loss:.4f}, load {last.load:.1f}",
                    flush=True,
                )
        finally:
            for course in courses:
                course.ranks.close()
    return content | {"rows": [course.row() for course in courses]}


def points_of(row: dict[str, Any]) -> list[Point]:
    """Return the points of a row."""
    return [Point(**point) for point in row["points"]]


def seconds_to(points: Sequence[Point], loss: float) -> float | None:
    """Return when a loss was reached first, on a straight line between two points; None: never."""
    for before, after in itertools.pairwise(points):
        if after.loss <= loss:
            share = (before.loss - loss) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    return None


def given_loss(content: dict[str, Any]) -> float:
    """Return the lowest tenth that exact training has reached."""
    exact = next(row for row in content["rows"] if row["way"] == EXACT)
    lowest = min(point.loss for point in points_of(exact))
    tenths = int(-(-lowest * 1000 // 100))
    return tenths / 10


def _seconds(points: Sequence[Point], loss: float) -> str:
    found = seconds_to(points, loss)
    return "-" if found is None else f"{found:.0f}"


def table(content: dict[str, Any]) -> str:
    """Return the Markdown of what was measured: a table, who is faster, and how it was measured."""
    by_name = {row["way"]: points_of(row) for row in content["rows"]}
    given = given_loss(content)
    losses = [round(given + offset, 1) for offset in _OFFSETS]
    losses = [
        loss
        for loss in losses
        if any(seconds_to(points, loss) is not None for points in by_name.values())
    ]
    common = min(points[-1].steps for points in by_name.values())
    at_common = {
        name: next(point.loss for point in points if point.steps == common)
        for name, points in by_name.items()
    }
    lines = [
        "| | "
        + " | ".join(f"s to {loss:.1f}" for loss in losses)
        + f" | loss after {common} steps | ms a step | kB a step and port | processor ms a step |",
        "| --- |" + " ---: |" * (len(losses) + 4),
    ]
    for row in content["rows"]:
        points = by_name[row["way"]]
        cells = [_seconds(points, loss) for loss in losses]
        cells += [
            f"{at_common[row['way']]:.3f}",
            f"{1e3 * points[-1].seconds / points[-1].steps:.0f}",
            f"{row['bytes'] / 1e3:,.0f}",
            f"{1e3 * row['cpu_s']:.0f}",
        ]
        lines.append(f"| {row['way']} | " + " | ".join(cells) + " |")
    reached = {name: seconds_to(points, given) for name, points in by_name.items()}
    order = sorted((seconds, name) for name, seconds in reached.items() if seconds is not None)
    never = [name for name, seconds in reached.items() if seconds is None]
    first = order[0][0]
    said = [
        f"- To a loss of {given:.1f}, the fastest first: "
        + "; ".join(
            f"{name}, {seconds:.0f} s" + (f" ({seconds / first:.2f} times)" if at else "")
            for at, (seconds, name) in enumerate(order)
        )
        + (f"; not reached: {', '.join(never)}" if never else "")
        + ".",
        f"- At equal samples ({common} steps), over the loss of exact training: "
        + "; ".join(
            f"{name} {100 * (loss / at_common[EXACT] - 1):+.1f} %"
            for name, loss in at_common.items()
            if name != EXACT
        )
        + ".",
    ]
    loads = [point.load for points in by_name.values() for point in points[1:]]
    how = (
        f"{content['date']}; {RANKS} ranks, ports of {content['rate']}, "
        f"{1e3 * content['compute_s']:.0f} ms of compute a step, seed {content['seed']}; "
        f"load {min(loads):.1f} to {max(loads):.1f} (median {statistics.median(loads):.1f}) on "
        f"{content['processors']} processors; torch {content['versions']['torch']}. Made by"
    )
    command = (
        f"    python -m benchmarks.time_to_loss --rate {content['rate']} "
        f"--compute-ms {1e3 * content['compute_s']:.0f} --minutes {content['minutes']:g} --docs"
    )
    return "\n".join([*lines, "", *said, "", how, "", command])


def sentence(content: dict[str, Any]) -> str:
    """Return the sentence of the README."""
    given = given_loss(content)
    last_s = min(points_of(row)[-1].seconds for row in content["rows"])

    def said(name: str) -> str:
        row = next(row for row in content["rows"] if row["way"] == name)
        seconds = seconds_to(points_of(row), given)
        return f"not within {last_s:.0f} s" if seconds is None else f"in {seconds:.0f} s"

    return (
        f"Measured on {content['date']} at {content['rate'].removesuffix('mbit')} Mbit/s with "
        f"{1e3 * content['compute_s']:.0f} ms of compute a step, four ranks train a small "
        f"transformer to a held-out loss of {given:.1f} {said(EXACT)} with exact sums, "
        f"{said(EIGHT_BITS)} with 8 bits and {said(DILOCO)} with an exchange every {ROUND} steps; "
        f"DDP {said('DDP')}, {said(SIXTEEN_BITS)} with its 16-bit hook and {said(POWER_SGD)} with "
        f"PowerSGD ([curves](docs/research/time-to-loss.md))."
    )


def rendered(content: dict[str, Any], root: Path) -> dict[Path, str]:
    """Return the texts of the page, its picture and the README, by path."""
    page, readme = root / FOLDER / "time-to-loss.md", root / "README.md"
    curves = {row["way"]: points_of(row) for row in content["rows"]}
    series = {
        name: [(point.steps, point.seconds, point.loss) for point in points]
        for name, points in curves.items()
    }
    return {
        page: between(page.read_text(encoding="utf-8"), MARKS, f"\n\n{table(content)}\n\n"),
        readme: between(readme.read_text(encoding="utf-8"), README_MARKS, sentence(content)),
        root / FOLDER / "time-to-loss.svg": draw_curves(series),
    }


def main() -> None:
    """Measure or read rows, print them, and write the pages where that is wanted."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="100mbit", help="of every port, both directions")
    parser.add_argument("--compute-ms", type=float, default=250.0, help="a step, stretched to")
    parser.add_argument("--minutes", type=float, default=15.0, help="for all ways, start included")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true")
    parser.add_argument("--render", action="store_true")
    given = parser.parse_args()
    root = Path(__file__).parents[1]
    kept = root / FOLDER / "time-to-loss.json"
    if given.render:
        content = json.loads(kept.read_text(encoding="utf-8"))
    else:
        content = measure(given)
        for path in [given.json] * (given.json is not None) + [kept] * given.docs:
            atomic_write_text(path, json.dumps(content, indent=1) + "\n")
    if given.docs or given.render:
        for path, text in rendered(content, root).items():
            atomic_write_text(path, text)
    print(table(content))
    print(sentence(content))


if __name__ == "__main__":
    main()
