"""The table of all published numbers, and the model of exchanges behind most of it."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest

from gradlane_papers.reproduction import lowprec_model, published
from gradlane_papers.reproduction.comparison import (
    ROLES,
    Comparison,
    Ours,
    Published,
    published_of,
    published_tables,
    speeds,
)
from gradlane_papers.reproduction.figures import FIGURES, reproduce
from gradlane_papers.reproduction.lowprec import held_out
from gradlane_papers.reproduction.lowprec_model import (
    FITTED,
    PARTS,
    TABLES,
    alone_s,
    cells,
    constants,
    encoded,
    errors,
    parts_s,
    samples_per_s,
    share_s,
    step_s,
    units,
)
from gradlane_papers.reproduction.poseidon_bytes import fitted_share
from gradlane_papers.reproduction.published import Study, main_answer, rows_of
from gradlane_papers.reproduction.simulations import Simulations
from tests.command_line import run
from tests.paths import ROOT, SHARED

CHEAP = (
    *("p3:fig4", "p3:fig5", "p3:fig6", "p3:fig11", "p3:fig15", "p3:secB2"),
    *("whatif:sizes", "whatif:sec4", "poseidon:fig9b", "poseidon:fig11"),
    *("poseidon:sec2", "poseidon:table1", "poseidon:table3", "poseidon:sec3", "poseidon:fig9"),
    *("poseidon:one_node", "poseidon:multi", "poseidon:cntk", "poseidon:fig6", "poseidon:fig10"),
    *(f"lowprec:fig{number}" for number in (3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 16)),
)
PAGE = ROOT / "docs" / "published.md"


@pytest.fixture(scope="module")
def cheap_rows() -> list[Comparison]:
    """The table as figures that take no time fill it."""
    return rows_of(reproduce([FIGURES[name] for name in CHEAP], Simulations()))


# The table


def test_there_is_a_row_for_every_published_number(cheap_rows: list[Comparison]) -> None:
    wanted = [
        (name, one.value)
        for name in FIGURES
        for one in published_of(name).values()
        if one.value is not None
    ]
    assert [(row.published.figure, row.published.value) for row in cheap_rows] == wanted
    assert len(wanted) > 300
    assert sum(row.published.figure in TABLES.values() for row in cheap_rows) == 210


def test_ours_are_there(cheap_rows: list[Comparison]) -> None:
    for row in cheap_rows:
        if row.published.figure in CHEAP:
            assert row.why, row
            assert row.role in ROLES and (row.role == "none") == bool(row.published.cannot)
        theirs = row.published.value
        if theirs and row.value is not None and row.role != "smaller":
            assert row.deviation == pytest.approx(100 * (row.value / theirs - 1))
        elif row.role == "smaller":
            assert row.deviation is None


def comparison(ours: float, *, main: bool = False) -> Comparison:
    """One of several answers to a number."""
    theirs = Published("p3:fig4", "saved", "", 50.0, "%", "")
    return Comparison(theirs, Ours("saved", ours, "why", main=main))


def test_the_main_answer_is_the_flagged_one_or_the_first() -> None:
    first, second = comparison(1.0), comparison(2.0)
    none = main_answer(first.published, [])
    assert none.ours is None and none.role == "none" and none.why == ROLES["none"]
    assert main_answer(first.published, [first, second]) is first
    flagged = comparison(3.0, main=True)
    assert main_answer(first.published, [first, flagged, second]) is flagged


def test_only_predictions_are_counted_by_their_deviation() -> None:
    def row(ours: float | None, role: str = "", published: float = 100.0) -> Comparison:
        theirs = Published("p3:fig4", "", "", published, "", "")
        return Comparison(theirs, None if ours is None else Ours("", ours, "", role=role))

    undefined = row(1.0, published=0.0)
    rows = (
        row(100.0),
        row(95.0),
        row(109.9),
        row(125.1),
        undefined,
        row(100.0, "fitted"),
        row(None),
    )
    counts = Study(rows, {}, 0.0).counts()
    assert counts["published"] == 7 and counts["predicted"] == 5
    assert [counts[f"predicted within {one} %"] for one in (5, 10, 25)] == [2, 3, 3]
    assert counts["fitted"] == 1 and counts["not reproduced"] == 1


def split(line: str) -> list[str]:
    """The cells of a table's line."""
    return [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_the_page_is_what_the_command_writes_today(cheap_rows: list[Comparison]) -> None:
    """Every number stands there; lines of cheap figures are computed again."""
    text = PAGE.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    figure_rows: dict[str, list[Comparison]] = {}
    for row in cheap_rows:
        figure_rows.setdefault(row.published.figure, []).append(row)
    single = 0
    for name, rows in figure_rows.items():
        is_table = name in TABLES.values()
        single += 0 if is_table else len(rows)
        made = published.speed_lines(rows) if is_table else published.lines_of(rows)
        for line in made if name in CHEAP else ():
            assert f"| {' | '.join(line)} |" in lines, line
    bodies = [split(line) for line in lines]
    headings = ("published", "---:", "1 GPU")
    numbers = [body for body in bodies if len(body) == 6 and body[1] not in headings]
    numbers = [body for body in numbers if not any(" / " in cell for cell in body[1:])]
    numbers = [body for body in numbers if body[0] not in ("predictions", *published.KINDS)]
    assert len(numbers) == single
    causes, last = [], ""
    for body in numbers:
        is_near = body[3] != "-" and abs(float(body[3])) <= published.NEAR
        assert body[5] or is_near, body
        causes.append(last if body[5] == published.SAME else body[5])
        last = causes[-1] or last
    # The counts in words are those of the rows.
    predicted = [
        body[3]
        for body, cause in zip(numbers, causes, strict=True)
        if not cause.startswith("[") and body[2] != "-"
    ]
    cells = [cell for body in bodies for cell in body[1:] if " / " in cell]
    assert len(cells) == len(cheap_rows) - single
    predicted += [found[1] for cell in cells if (found := re.search(r"\(([+-]\d+)\)$", cell))]
    found = re.search(r"(\d+) published numbers: (\d+) predicted;", text)
    assert found is not None
    assert [int(one) for one in found.groups()] == [len(cheap_rows), len(predicted)]


def test_a_cause_that_repeats_stands_once_and_none_where_ours_is_near() -> None:
    rows = [comparison(one) for one in (1.0, 49.0, 2.0)]
    assert [line[-1] for line in published.lines_of(rows)] == ["why", "", published.SAME]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no reference data beside this checkout")
@pytest.mark.parametrize("primitive", ["mpi", "nccl"])
def test_the_tables_have_every_legible_cell(primitive: str) -> None:
    path = SHARED / "data" / f"lowprec_ec2_{primitive}.csv"
    wanted = sorted(
        float(row[gpus])
        for row in csv.DictReader(path.read_text().splitlines())
        for gpus in ("1", "2", "4", "8", "16")
        if row[gpus]
    )
    assert sorted(one.value for one in speeds(TABLES[primitive])) == wanted


# The model of an exchange


def test_units_are_counted_by_hand() -> None:
    """ResNet-110 in full precision: 329 tensors, six copies of 4 GPUs."""
    made = units("resnet110", "32bit", 4)
    size = 4 * 1_727_962
    assert made["link"] == 1.5 * size and made["memory"] == 6 * size
    assert made["messages"] == 6 * 329 and made["scales"] == 0
    # 64 values a bucket; all values are averaged; small tensors stay whole.
    coded = encoded("resnet110", "1bit_reshaped")
    assert coded.averaged == 64 * coded.scales > 0.99 * 1_727_962
    assert encoded("resnet110", "8bit").averaged == 0


def test_a_step_is_its_share_and_its_parts() -> None:
    parts = parts_s("mpi", "vgg19", "1bit", 8)
    assert set(parts) == set(PARTS["mpi"]) and all(seconds >= 0 for seconds in parts.values())
    whole = step_s("mpi", "vgg19", "1bit", 8)
    assert whole == pytest.approx(share_s("mpi", "vgg19", 8) + sum(parts.values()))
    bare = step_s("mpi", "vgg19", "1bit", 8, without=(*parts, "shares"))
    assert bare == alone_s("vgg19", 8) == pytest.approx(16 / 12.4)
    assert samples_per_s("nccl", "vgg19", "32bit", 1) == 12.4


def test_constants_come_from_one_network_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = {primitive: dict(constants(primitive)) for primitive in PARTS}

    def own(primitive: str) -> dict[tuple[str, str, int], object]:
        return {key: cell for key, cell in cells(primitive).items() if key[0] == FITTED}

    constants.cache_clear()
    monkeypatch.setattr(lowprec_model, "cells", own)
    try:
        assert {primitive: dict(constants(primitive)) for primitive in PARTS} == expected
    finally:
        constants.cache_clear()


def test_held_out_networks_are_near_and_the_bytes_alone_are_not() -> None:
    """What was beside the exchange: a message a tensor, and kernels."""
    others = held_out()
    assert FITTED not in others and len(others) == len(published_tables()["networks"]) - 1
    for primitive, mean, median in (("mpi", 13.0, 9.0), ("nccl", 6.0, 4.0)):
        made = errors(primitive, others)
        assert made.mean < mean and made.median < median
        assert errors(primitive, (FITTED,)).mean < 4.0
    whole = errors("mpi", others)
    assert whole.within[2] >= 0.89 * whole.cells
    assert errors("mpi", others, without=("messages",)).mean > 3 * whole.mean
    parts = ("messages", "scales", "averages", "shares")
    assert errors("mpi", others, without=parts).mean > 4 * whole.mean


def test_inception_with_hardly_any_bytes_is_held_back_by_messages() -> None:
    """The published +84 % of the bytes alone, 1-bit SGD reshaped on 16 GPUs, is 21 %."""
    key = ("bn_inception", "1bit_reshaped", 16)
    theirs = cells("mpi")[key].value
    assert 1.1 < samples_per_s("mpi", *key) / theirs < 1.25
    assert 256 / step_s("mpi", *key, without=("messages",)) / theirs > 1.75


def test_the_cheapest_machines_cost_what_the_paper_says(cheap_rows: list[Comparison]) -> None:
    rows = {row.what: row for row in cheap_rows if row.published.figure == "lowprec:fig16"}
    (deep,) = [row for what, row in rows.items() if "ResNet-152 dearer" in what]
    assert deep.value == pytest.approx(1500, rel=0.02)


def test_the_share_of_the_port_is_still_poseidons() -> None:
    assert fitted_share() == pytest.approx(0.348, abs=0.001)


# The command


def test_the_command_writes_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    few = {name: FIGURES[name] for name in ("p3:fig5", "lowprec:fig3", "lowprec:fig5")}
    monkeypatch.setattr(published, "FIGURES", few)
    target, page, html = tmp_path / "p.json", tmp_path / "p.md", tmp_path / "p.html"
    status, out, errors_text = run(
        monkeypatch,
        capsys,
        *("reproduce", "published", "--json", str(target)),
        *("--markdown", str(page), "--html", str(html)),
    )
    assert status == 0, errors_text
    content = json.loads(target.read_text())
    assert content["counts"]["published"] == len(content["rows"]) == 21
    assert content["counts"]["from a smaller network"] == 12
    heaviest = content["rows"][0]
    assert heaviest["published"] == 71.5 and heaviest["role"] == "predicted"
    assert heaviest["deviation"] == pytest.approx(0.04, abs=0.01)
    assert content["model"]["mpi"]["errors"][1]["cells"] == 98
    assert content["counts"]["not reproduced"] == 1
    assert "21 published numbers: 8 predicted" in out
    assert "### `lowprec:fig5`" in page.read_text()
    assert "71.5" in html.read_text()


# What the lab has measured


def test_measured_numbers_are_those_of_the_labs_tables() -> None:
    content = json.loads(published.MEASURED.read_text(encoding="utf-8"))
    for figure, numbers in content["measured"].items():
        for key, one in numbers.items():
            assert key in published_of(figure)
            text = (ROOT / "docs" / "research" / f"{one['page']}.md").read_text(encoding="utf-8")
            table = [
                [cell.strip().strip("`") for cell in line.strip("|\n").split("|")]
                for line in text.splitlines()
                if line.startswith("|")
            ]
            if "rows" not in one:
                assert any(f"{one['value']:,}" == cells[0] for cells in table)
                continue
            columns = table[0]
            over, by = columns.index(one["over"]), columns.index(one["by"])
            # The first table of a page is that of step times.
            found = {f"{cells[0]} | {cells[1]}": cells for cells in reversed(table)}
            gains = [float(found[row][over]) / float(found[row][by]) - 1 for row in one["rows"]]
            assert round(100 * max(gains), 1) == one["value"], (figure, key)


def test_kinds_are_counted_apart(cheap_rows: list[Comparison]) -> None:
    made = Study(tuple(cheap_rows), {}, 0.0)
    lines = {line[0]: line for line in made.kinds()}
    assert tuple(lines) == published.KINDS
    assert sum(int(line[1]) for line in lines.values()) == made.counts()["predicted"]
    right = [row for row in cheap_rows if published.kind_of(row) == "counted" and not row.role]
    assert lines["counted"][3] == str(sum(row.is_within(5) for row in right))
