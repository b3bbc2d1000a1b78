"""Facts that stand on several pages, each held against the one place that decides it.

A row of `FACTS` names the fact, its source, and where it stands; a page that says something else
than the source, or no longer says it, is named. A fact that a second page takes gets a row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from gradlane.formats.serialization.container import SIGNED_VERSION, VERSION
from gradlane.planning.simulation.ddp import TUNED_MB
from gradlane.planning.simulation.hosts import USUAL_PROCESSORS
from gradlane.planning.simulation.scenarios import NCCL_RATE_BPS
from gradlane.training.options.option_groups import Network
from gradlane.training.options.strategy import RING_ENCODED_SLICE_ELEMS, SLICE_ELEMS
from tests.documents.blocks import PAGES
from tests.paths import ROOT

NUMBERS = {2: "two", 3: "three", 4: "four", 5: "five", 10: "ten"}


def read(path: str) -> str:
    """Return a file's text, its lines joined by single spaces."""
    return " ".join((ROOT / path).read_text(encoding="utf-8").split())


def found_in(path: str, pattern: str) -> str:
    """Return what the only group of a pattern has found in a file."""
    found = set(re.findall(pattern, read(path)))
    assert len(found) == 1, f"{path} has {found} for {pattern}"
    return str(found.pop())


@dataclass(frozen=True)
class Fact:
    """A fact on several pages.

    Attributes:
        name: what it says, in words.
        source: returns it as pages write it.
        pages: patterns by page, each with one group, the fact.
    """

    name: str
    source: Callable[[], str]
    pages: dict[str, str]


def table_of(page: str, heading: str) -> list[list[str]]:
    """Return the cells of the rows of a page's table, by a word of its heading."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("|") and heading in line)
    rows = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def modern_gains(rate: str, beyond: float) -> list[float]:
    """Return the gains of `p3`, in %, where gradients take over so many times the compute.

    A port carries 2 (N - 1) / N of the gradients each way.
    """
    over = {
        row[0]: float(row[5].split()[0].replace(",", ""))
        for row in table_of("docs/modern-networks.md", "gradients over compute")
    }
    gains = []
    for network, workers, row_rate, *_, gain, _8, _1, _needs in table_of(
        "docs/modern-networks.md", "p3 gains"
    ):
        n = int(workers)
        times = over[network] / float(rate.split()[0]) * 2 * (n - 1) / n
        if row_rate == rate and times > beyond:
            gains.append(float(gain.strip(" %+")))
    return gains


def exact_within() -> str:
    """Return the largest difference up to 10 Gbit/s, beyond three times the compute, in %."""
    gains = [*modern_gains("1 Gbit/s", 3.0), *modern_gains("10 Gbit/s", 3.0)]
    return f"{max(map(abs, gains)):.0f}"


def exact_at_25() -> str:
    """Return the least and the largest gain at 25 Gbit/s beyond three times the compute, in %."""
    gains = modern_gains("25 Gbit/s", 3.0)
    return f"{int(min(gains))} to {-int(-max(gains) // 1)}"


def largest_measured_gain() -> str:
    """Return how many times as fast as the best DDP exact training was at most, by the lab."""
    gains = re.findall(r"(\d\.\d\d)x \|", read("docs/research/bandwidth.md"))
    return f"{max(map(float, gains)):.1f}"


def slow_ms(way: str) -> float:
    """Return milliseconds of a step at the slow rate, by the page of comparisons."""
    (row,) = [row for row in table_of("docs/compared-with.md", "held-out loss") if row[0] == way]
    return float(row[2])


def times_as_fast(codec: str) -> str:
    """Return how many times as fast as DDP with its 16-bit hook gradlane is with a codec."""
    return f"{slow_ms('DDP, `fp16_compress_hook`') / slow_ms(f'gradlane, `{codec}`'):.1f}"


def between(scheme: str, column: int) -> float:
    """Return a figure of a scheme at the page of fewer bits and fewer exchanges."""
    rows = table_of("docs/between-nodes.md", "over exact")
    (row,) = [row for row in rows if row[0] == f"`{scheme}`"]
    return float(row[column].strip("% +"))


def required(package: str) -> str:
    """Return the oldest version of a package that the distribution takes."""
    return found_in("pyproject.toml", rf'"{package}>=([\d.]+)"')


README = "README.md"
FACTS = [
    Fact(
        "Rust that builds it",
        lambda: found_in("Cargo.toml", r'rust-version = "([\d.]+)"'),
        {README: r"Rust (\d+\.\d+)\+", "docs/install.md": r"Rust (\d+\.\d+)\+"},
    ),
    Fact(
        "the oldest Python",
        lambda: found_in("pyproject.toml", r'requires-python = ">=([\d.]+)"'),
        {
            README: r"Python (\d+\.\d+)\+",
            "docs/install.md": r"Python (\d+\.\d+) and newer",
            "docs/support.md": r"\| Python \| (\d+\.\d+) and newer",
        },
    ),
    Fact(
        "the oldest torch",
        lambda: required("torch"),
        {
            "docs/install.md": r"torch (\d+\.\d+) and newer",
            "docs/support.md": r"\| torch \| (\d+\.\d+) and newer",
        },
    ),
    Fact(
        "the oldest torch for the backend",
        lambda: found_in("python/gradlane/distributed/registration.py", r'_NEEDED = "([\d.]+)"'),
        {"docs/backend.md": r"torch (\d+\.\d+) or newer"},
    ),
    Fact(
        "the wire's version",
        lambda: found_in("crates/gradlane-wire/src/lib.rs", r"WIRE_VERSION: u8 = (\d+)"),
        {"docs/stability.md": r"\(version (\d+) at present\)"},
    ),
    Fact(
        "the version of checkpoints",
        lambda: str(VERSION),
        {
            "docs/stability.md": r"checkpoints \(format (\d+) at present",
            "docs/checkpoints.md": r'manifest\.json \{"version": (\d+),',
        },
    ),
    Fact(
        "the version of signed checkpoints",
        lambda: str(SIGNED_VERSION),
        {
            "docs/stability.md": r"(\d+) where they are signed",
            "docs/checkpoints.md": r"with a secret, which is version (\d+)",
        },
    ),
    Fact(
        "Accelerate, Transformers and Lightning that were tried",
        lambda: " ".join(
            found_in("docs/coming-from-ddp.md", rf"{name} (\d+\.\d+)")
            for name in ("Accelerate", "Transformers", "Lightning")
        ),
        {
            "docs/going-on.md": r"\| Accelerate (\d+\.\d+) \|.*\| Transformers (\d+\.\d+),"
            r".*\| Lightning (\d+\.\d+) \|"
        },
    ),
    Fact(
        "torchft that was measured",
        lambda: json.loads(read("docs/compared-with.json"))["versions"]["torchft"],
        {
            "docs/compared-with.md": r"torchft (\d+\.\d+\.\d+)",
            "docs/backend.md": r"torchft (\d+\.\d+\.\d+)",
            "docs/research/lost-rank.md": r"torchft (\d+\.\d+\.\d+),",
        },
    ),
    Fact(
        "torch and NCCL of what ran on CUDA",
        lambda: found_in("docs/research/cuda.md", r"torch ([\d.]+) with CUDA"),
        {
            "docs/support.md": r"with torch ([\d.]+) and NCCL",
            "docs/several-accelerators.md": r"\(torch ([\d.]+), NCCL",
        },
    ),
    Fact(
        "NCCL of what ran on CUDA",
        lambda: found_in("docs/research/cuda.md", r"NCCL (\d+\.\d+\.\d+)"),
        {
            "docs/support.md": r"NCCL (\d+\.\d+\.\d+)",
            "docs/several-accelerators.md": r"NCCL (\d+\.\d+\.\d+)",
        },
    ),
    Fact(
        "the wheel's size",
        lambda: found_in("docs/research/environments.md", r"x86-64 (\d+\.\d+) MB, aarch64"),
        {
            "docs/install.md": r"wheel \((\d+\.\d+) MB\)",
            "docs/support.md": r"glibc 2\.17 and newer, (\d+\.\d+) MB",
        },
    ),
    Fact(
        "elements in a slice",
        lambda: f"{SLICE_ELEMS['p3']:,}",
        {
            "docs/how-it-works.md": r"slices of ([\d,]+) elements",
            "docs/strategies.md": r"\| `p3` \| slices of ([\d,]+) elements",
            "docs/ring.md": r"\| slices \| ([\d,]+) elements by default",
        },
    ),
    Fact(
        "elements in a slice of a ring",
        lambda: f"{SLICE_ELEMS['ring']:,}",
        {
            "docs/strategies.md": r"\| `ring` \| slices of ([\d,]+) elements",
            "docs/ring.md": r"([\d,]+) by default, [\d,]+ if encoded",
        },
    ),
    Fact(
        "elements in an encoded slice of a ring",
        lambda: f"{RING_ENCODED_SLICE_ELEMS:,}",
        {"docs/ring.md": r"by default, ([\d,]+) if encoded"},
    ),
    Fact(
        "how long a silent rank is waited for",
        lambda: f"{Network().silence_timeout_s:.0f}",
        {
            "docs/long-runs.md": r"\| `silence_timeout_s` \| (\d+) \|",
            "docs/simulator.md": r"\| `--detection-time` \| (\d+) s \|",
        },
    ),
    Fact(
        "how long a busy rank is waited for",
        lambda: f"{Network().progress_timeout_s / 60:.0f}",
        {"docs/coming-from-ddp.md": r"up to `progress_timeout_s` \((\d+) min\)"},
    ),
    Fact(
        "how long a busy rank is waited for, in seconds",
        lambda: f"{Network().progress_timeout_s:,.0f}",
        {"docs/long-runs.md": r"\| `progress_timeout_s` \| ([\d,]+) \|"},
    ),
    Fact(
        "how long a rank that starts is waited for",
        lambda: f"{Network().connect_timeout_s:.0f}",
        {"docs/long-runs.md": r"\| `connect_timeout_s` \| (\d+) \|"},
    ),
    Fact(
        "processors of a simulated rank",
        lambda: str(USUAL_PROCESSORS),
        {
            "docs/simulator.md": r"If absent (\d+) processors",
            "docs/planning.md": r"takes on (\d+) processors",
            "docs/modern-networks.md": r"takes with (\d+) processors",
            "docs/cli.md": r"(\d+) processors if absent",
        },
    ),
    Fact(
        "rate of NCCL's sums on a simulated node",
        lambda: f"{NCCL_RATE_BPS / 1e9:.0f}gbit",
        {
            "docs/simulator.md": r"sums on a node: (\w+) if absent",
            "docs/several-accelerators.md": r"rate of sums on a node\. If absent, (\w+),",
            "docs/cli.md": r"If absent (\w+), NCCL's over PCIe",
        },
    ),
    Fact(
        "bucket sizes of a tuned DDP",
        lambda: NUMBERS[len(TUNED_MB)],
        {
            "docs/simulator.md": r"the fastest of (\w+) bucket sizes",
            "docs/modern-networks.md": r"the fastest of (\w+) bucket sizes",
        },
    ),
    Fact(
        "how far predictions are off",
        lambda: found_in("docs/predictions.md", r"runs of four emulated nodes: median error (\S+)"),
        {README: r"its predictions are off by (\S+) % in the median"},
    ),
    Fact(
        "predictions beside measured runs",
        lambda: found_in("docs/predictions.md", r"(\d+) runs of four emulated nodes"),
        {README: r"Beside (\d+) measured runs"},
    ),
    Fact(
        "public reports that are answered",
        lambda: NUMBERS[len(table_of("docs/is-it-the-network.md", "measured there"))],
        {
            README: r"\[(\w+) public reports\]",
            "docs/README.md": r"(\w+) public reports of slow training",
            "docs/simulator.md": r"\[(\w+) reports\]",
        },
    ),
    Fact(
        "how much faster exact training was than the best DDP, at most",
        largest_measured_gain,
        {
            README: r"steps up to (\d\.\d) times as fast as with DDP",
            "docs/README.md": r"steps up to (\d\.\d) times as fast as with DDP",
            "docs/how-it-works.md": r"is worth up to (\d\.\d) times DDP in 32 bits",
        },
    ),
    Fact(
        "simulated clusters of today",
        lambda: found_in("docs/modern-networks.md", r"In \d+ of (\d+) clusters"),
        {README: r"On \[(\d+) simulated clusters of today\]"},
    ),
    Fact(
        "clusters of today that rare exchanges take to 95 %",
        lambda: found_in("docs/modern-networks.md", r"(\d+) with fewer exchanges"),
        {README: r"in 8 bits and overlapped, does so on (\d+)"},
    ),
    Fact(
        "exact training up to 10 Gbit/s where gradients take far longer than the compute",
        exact_within,
        {README: r"scheduling alone is \[within (\d+) % of DDP\]"},
    ),
    Fact(
        "exact training at 25 Gbit/s where gradients take far longer than the compute",
        exact_at_25,
        {README: r"and (\d+ to \d+) % faster at 25"},
    ),
    Fact(
        "8 bits beside DDP in 16",
        lambda: times_as_fast("qsgd:bits=8"),
        {README: r"\[8 or 4 bits\]\(\S+\) are (\d\.\d) or"},
    ),
    Fact(
        "4 bits beside DDP in 16",
        lambda: times_as_fast("qsgd:bits=4"),
        {README: r"\[8 or 4 bits\]\(\S+\) are \d\.\d or (\d\.\d) times"},
    ),
    Fact(
        "seconds to nearly exact training's loss, between nodes",
        lambda: " ".join(
            f"{between(one, 5):.0f}" for one in ("p3", "qsgd:bits=8", "local:steps=32")
        ),
        {README: r"last loss in (\d+) s with exact sums, in (\d+) s with 8 bits, and in (\d+) s"},
    ),
    Fact(
        "the loss of rare exchanges over exact training's",
        lambda: f"{between('local:steps=32', 4):.0f}",
        {README: r"ends with a loss (\d+) % higher"},
    ),
    Fact(
        "what a lost rank does to a session by default",
        lambda: found_in("docs/going-on.md", r"By default a lost rank (\w+ the session)"),
        {
            README: r"Without `going_on=True` a lost rank (\w+ the session)",
            "docs/support.md": r"Without it a lost rank (\w+ the session)",
        },
    ),
]


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: fact.name)
def test_a_fact_is_the_same_on_every_page(fact: Fact) -> None:
    source = fact.source()
    for page, pattern in fact.pages.items():
        found = {
            " ".join(one) if isinstance(one, tuple) else one
            for one in re.findall(pattern, read(page))
        }
        assert found == {source}, f"{page} says {found or 'nothing'}, its source {source!r}"


USERS_PAGES = [page for page in PAGES if page.parent in (ROOT, ROOT / "docs")]


@pytest.mark.parametrize("page", USERS_PAGES, ids=lambda page: page.name)
def test_no_page_counts_what_changes_with_each_option(page: Path) -> None:
    """Numbers of keywords, commands and options are in the pages that are made from them."""
    counted = r"\b(?:\d+|twelve|thirteen|fourteen|fifteen) (?:keywords|commands|options)\b"
    assert not re.findall(counted, page.read_text(encoding="utf-8"))
