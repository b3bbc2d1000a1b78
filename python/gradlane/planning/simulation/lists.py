"""Lists of values on a command line, `2,4,8`, `1..100gbit`, `2..16`, and the grid of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gradlane.formats.rates import parse_rate
from gradlane.planning.simulation.scenarios import STRATEGIES
from gradlane.training.options.codec_choice import check_codecs, codec_rules
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.local_updates import Local, parse_local
from gradlane.training.options.option_fields import option
from gradlane.training.options.stragglers import WAIT, parse_stragglers

USUAL_GBIT = (1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 25, 40, 50, 100, 200, 400, 800)
"""Rates that a range expands to."""


def parse_workers(text: str) -> list[int]:
    """Return numbers of ranks; a range `A..B` stands for the powers of two in it and its ends.

    Raises:
        ValueError: a part is no positive integer, or a range is empty.
    """
    counts: list[int] = []
    for part in _parts(text, "workers"):
        first, is_range, last = part.partition("..")
        try:
            low = int(first)
            high = int(last) if is_range else low
        except ValueError:
            raise ValueError(f"{part!r} is no number of workers: write 2,4,8 or 2..16") from None
        if not 1 <= low <= high <= 100_000:
            raise ValueError(f"workers {part!r}: use 1 to 100,000, ranges from low to high")
        powers = (2**power for power in range(18))
        counts += sorted({low, high} | {count for count in powers if low < count < high})
    return list(dict.fromkeys(counts))


def parse_node_sizes(text: str) -> list[int]:
    """Return numbers of ranks on a node.

    Raises:
        ValueError: a part is no positive integer.
    """
    sizes = []
    for part in _parts(text, "ranks per node"):
        if not part.isdigit() or not 1 <= int(part) <= 1024:
            raise ValueError(f"{part!r} is no number of ranks per node: write 2,4,8")
        sizes.append(int(part))
    return list(dict.fromkeys(sizes))


def parse_rates(text: str) -> list[int]:
    """Return rates in bits a second; a range `A..B` stands for the usual rates in it and its ends.

    The unit of the last rate counts for all that have none: `1,4,10gbit`, `1..100gbit`.

    Raises:
        ValueError: a part is no rate, or a range is empty.
    """
    rates: list[int] = []
    parts = _parts(text, "rate")
    unit = parts[-1].rpartition("..")[2].strip().lstrip("0123456789.").strip()
    for part in parts:
        first, is_range, last = part.partition("..")
        low = parse_rate(_with_unit(first, unit))
        if not is_range:
            rates.append(low)
            continue
        high = parse_rate(_with_unit(last, unit))
        if low > high:
            raise ValueError(f"rates {part!r}: write ranges from low to high")
        usual = (gbit * 10**9 for gbit in USUAL_GBIT)
        rates += sorted({low, high} | {rate for rate in usual if low < rate < high})
    return list(dict.fromkeys(rates))


def parse_rules(text: str) -> list[str]:
    """Return straggler rules, as for `gradlane.init(stragglers=...)`.

    Raises:
        ValueError: a part is no rule.
    """
    rules = _parts(text, "stragglers")
    for rule in rules:
        parse_stragglers(rule)
    return list(dict.fromkeys(rules))


def _with_unit(rate: str, unit: str) -> str:
    return rate + unit if rate.strip().replace(".", "", 1).isdigit() else rate


def parse_compressions(text: str) -> list[float]:
    """Return compression ratios.

    Raises:
        ValueError: a part is no ratio of at least 1.
    """
    ratios: list[float] = []
    for part in _parts(text, "compression"):
        try:
            ratio = float(part)
        except ValueError:
            ratio = math.nan
        if not 1.0 <= ratio <= 1e6:
            raise ValueError(f"{part!r} is no compression ratio: use 1 (none) to 1,000,000")
        ratios.append(ratio)
    return list(dict.fromkeys(ratios))


def parse_names(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """Return names, all of which are known.

    Raises:
        ValueError: one is not.
    """
    names = _parts(text, what)
    for name in names:
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; choose from {', '.join(known)}")
    return list(dict.fromkeys(names))


def read_additions(path: Path) -> list[tuple[float, float]]:
    """Read measured additions of two vectors: a CSV file with columns elements, seconds.

    Raises:
        ValueError: the file cannot be read or a line is not two numbers; it names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    points: list[tuple[float, float]] = []
    for number, line in enumerate(lines, start=1):
        cells = line.split(",")
        if number == 1 and not cells[0].strip().replace(".", "").isdigit():
            continue
        if not line.strip():
            continue
        try:
            elements, seconds = (float(cell) for cell in cells)
        except ValueError:
            raise ValueError(f"{path}, line {number}: expected elements,seconds") from None
        points.append((elements, seconds))
    if not points:
        raise ValueError(f"{path} has no measurements: expected lines of elements,seconds")
    return sorted(points)


def _parts(text: str, what: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"no {what} given")
    return parts


def _codec(text: str) -> str:
    """Return the text of a codec or of patterns; `ValueError` where it is neither."""
    check_codecs(codec_rules(text))
    return text


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Values of which each combination is a cluster."""

    workers: Sequence[int] = option(
        doc="Such as 2,4,8 or 2..16.", read=parse_workers, text="2,4,8,16"
    )
    rates_bps: Sequence[float] = option(
        doc="Rate of every port; such as 4gbit,10gbit or 1..100gbit.",
        name="rate",
        read=parse_rates,
        text="1gbit,4gbit,10gbit,25gbit,100gbit",
    )
    strategies: Sequence[str] = option(
        (),
        "Comma-separated: ddp (PyTorch's, with the best bucket size), p3, slicing, wfbp, kvstore, "
        "deferred-pull, asgd, ring (p3 round a ring), poseidon and sfb (p3 with factors where they "
        "are fewer numbers, or wherever there are any; on nodes ranks add up first and a leader "
        "sends their factors), adam (factors to one rank, the whole back), hierarchical and "
        "hierarchical-shared (p3 between nodes whose ranks add up first; --ranks-per-node), "
        "ring-fused (a model of fused buffers and rings); if absent ddp, p3, and hierarchical "
        "where nodes have several workers.",
        name="strategy",
        read=partial(parse_names, known=STRATEGIES, what="strategy"),
    )
    codecs: Sequence[str] = option(
        (RAW,),
        "How gradients travel, such as qsgd:bits=4; several, each after --codec. raw if absent.",
        name="codec",
        read=_codec,
        repeated=True,
    )
    updates: Sequence[Local | None] = option(
        (None,),
        "Local updates beside exact ones, such as local:steps=32,fragments=8,overlap_steps=4; "
        "several, each after --update.",
        name="update",
        read=parse_local,
        repeated=True,
    )
    compressions: Sequence[float] = option(
        doc="Bytes of gradients over bytes that travel; such as 1,2,5,10.",
        name="compression",
        read=parse_compressions,
        text="1",
    )
    topologies: Sequence[str] = option(
        doc="Of ring-fused: flat, hierarchical, or both.",
        name="topology",
        read=partial(parse_names, known=("flat", "hierarchical"), what="topology"),
        text="flat",
    )
    ranks_per_node: Sequence[int] = option(
        doc="Workers on each node, which share its port; such as 2,4,8. Numbers that do not fill "
        "two nodes are left out.",
        read=parse_node_sizes,
        text="1",
    )
    rules: Sequence[str] = option(
        doc="Comma-separated: wait, drop, drop=1.5, backup=1: who a step goes on without.",
        name="stragglers",
        read=parse_rules,
        text=WAIT,
    )
