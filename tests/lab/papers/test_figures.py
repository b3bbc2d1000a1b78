"""Figures of the papers: their numbers have sources, ours stand beside them and are the papers' own
where nothing stands between."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.papers import whatif_paper
from gradlane.lab.papers.comparison import Curve, Ours, compared, published_content, published_of
from gradlane.lab.papers.figures import FIGURES, chosen, reproduce
from gradlane.lab.papers.lowprec_model import encoded, one_bit_bytes, qsgd_bytes
from gradlane.lab.papers.poseidon import simulated_job, simulated_speedups
from gradlane.lab.papers.poseidon_bytes import fitted_share, speedup, step
from gradlane.lab.papers.simulations import Simulations
from gradlane.lab.papers.trained import points_from_p3, trained_content
from gradlane.lab.papers.whatif_paper import profile_of, scaling
from gradlane.planning.simulation.lists import read_additions
from gradlane.planning.simulation.profiles import find_profile
from gradlane.planning.simulation.scenarios import run_scenario
from tests.command_line import run
from tests.paths import SHARED

REFERENCE = SHARED / "data"
QUICK = (
    "p3:fig4",
    "p3:fig5",
    "p3:fig6",
    "whatif:fig3",
    "whatif:sec4",
    "poseidon:sec2",
    "poseidon:table1",
    "poseidon:table3",
    "poseidon:fig9",
    "poseidon:fig10",
    "poseidon:sec3",
    "poseidon:one_node",
    "poseidon:multi",
    "poseidon:cntk",
    "whatif:fig2",
    "whatif:sizes",
    *(f"lowprec:fig{number}" for number in (3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
)


def ours_of(name: str) -> dict[str, float]:
    """Ours by key; of several variants the last one."""
    (made,) = reproduce(chosen([name]), Simulations())
    return {row.key: row.ours for row in made.rows}


def test_accuracies_are_those_of_the_study() -> None:
    """Networks that P3 trains lose much of it under ASGD, all seeds compared with their own."""
    (made,) = reproduce(chosen(["p3:fig15"]), Simulations())
    ours = {row.variant: row for row in made.rows}
    assert {row.published for row in made.rows} == {-5.0}
    resnet = ours["resnet, P3's learning rate"]
    points = points_from_p3("resnet", "asgd")
    assert len(points) == 5 and resnet.ours == pytest.approx(sum(points) / 5)
    accuracy = trained_content()["tasks"]["resnet"]["accuracy"]
    assert points[0] == pytest.approx(100 * (accuracy["asgd"][0] - accuracy["p3"][0]))
    assert "5 seeds" in resnet.why and len(made.rows) == 8


# What is published


def test_every_published_number_has_a_source_and_a_figure() -> None:
    content = published_content()
    for name, entries in content["figures"].items():
        assert FIGURES[name].run is not None or FIGURES[name].needs
        assert name.partition(":")[0] in content["papers"]
        for entry in entries.values():
            assert entry["what"]
            assert entry["source"]
            # A number, or what the paper says in its place.
            assert ("value" in entry) != bool(entry.get("says"))
    for entry in content["settings"].values():
        assert entry["value"] > 0
        assert entry["source"]


def test_every_figure_is_reproduced_or_says_what_it_needs() -> None:
    for figure in FIGURES.values():
        assert (figure.run is None) == bool(figure.needs)
        assert figure.title
    for name in ("poseidon:fig11", "lowprec:fig5"):
        with pytest.raises(ValueError, match=r"needs .*training runs"):
            chosen([name])
    with pytest.raises(ValueError, match="no figure 'p3:fig99'"):
        chosen(["p3:fig99"])
    assert {one.name for one in chosen(["poseidon", "p3:fig4"])} >= {"poseidon:fig5", "p3:fig4"}


@pytest.mark.parametrize("name", QUICK)
def test_a_figure_has_a_row_for_every_published_number(name: str) -> None:
    (made,) = reproduce(chosen([name]), Simulations())
    assert {row.key for row in made.rows} == set(published_of(name))
    for row in made.rows:
        assert row.why
        assert row.ours == row.ours  # No not-a-number.
        if row.published is not None:
            assert row.difference == row.ours - row.published


def test_ours_without_a_published_number_is_an_error() -> None:
    with pytest.raises(KeyError):
        compared("p3:fig4", [Ours("something", 1.0, "")])
    assert compared("p3:fig4", [Curve("line", "x", "y", ((1.0, 2.0),))]) == []


# Numbers that have to come out


def test_the_three_layer_examples_of_p3() -> None:
    assert ours_of("p3:fig4")["delay_fifo"] == pytest.approx(4.0, abs=0.1)
    assert ours_of("p3:fig4")["saved"] == pytest.approx(50.0, abs=1.5)
    assert ours_of("p3:fig5")["vgg19_heaviest"] == pytest.approx(71.5, abs=0.05)
    figure_6 = ours_of("p3:fig6")
    assert figure_6["whole"] == pytest.approx(10.0, abs=0.1)
    assert figure_6["saved"] == pytest.approx(30.0, abs=1.0)


def test_poseidon_by_bytes_comes_near_what_it_measured() -> None:
    """Factors leave the port free, so full ports are enough to come within 4 %."""
    assert speedup("vgg19_22k", "caffe", 32, 40, "poseidon") == pytest.approx(29.5, rel=0.04)
    assert speedup("vgg19_22k", "caffe", 16, 10, "poseidon") == pytest.approx(15.5, rel=0.04)
    assert speedup("inception_v3", "tf", 32, 40, "poseidon") == pytest.approx(31.5, rel=0.04)
    assert speedup("resnet152", "tf", 32, 40, "poseidon") == pytest.approx(31.0, rel=0.04)
    # The fitted number, and the one that is predicted with it: 22x with TensorFlow.
    share = fitted_share()
    assert 0.2 < share < 0.6
    assert speedup("vgg19_22k", "caffe", 32, 40, "wfbp", share) == pytest.approx(21.5, rel=1e-3)
    assert speedup("vgg19_22k", "tf", 32, 40, "wfbp", share) == pytest.approx(22.0, rel=0.04)


def test_poseidon_simulated_comes_near_what_bytes_and_the_paper_say() -> None:
    """The engine with factors by the formula; servers on a third of the port, as was fitted."""
    made = simulated_speedups(
        Simulations(),
        [
            simulated_job("vgg19_22k", 16, 10, "poseidon", 1.0),
            simulated_job("vgg19", 16, 10, "wfbp", fitted_share()),
            simulated_job("googlenet", 32, 40, "wfbp", fitted_share()),
        ],
    )
    assert made[0] == pytest.approx(15.5, rel=0.04)
    assert made[0] == pytest.approx(speedup("vgg19_22k", "caffe", 16, 10, "poseidon"), rel=0.01)
    assert made[1] == pytest.approx(
        speedup("vgg19", "caffe", 16, 10, "wfbp", fitted_share()), rel=0.05
    )
    assert made[2] > 31.5


def test_poseidon_never_moves_more_bytes_than_servers() -> None:
    """Section 5.2: it is a parameter server wherever that is less."""
    for model in ("googlenet", "vgg19", "vgg19_22k", "inception_v3", "resnet152"):
        engine = "caffe" if model in ("googlenet",) else "tf"
        for nodes in (2, 8, 32):
            hybrid = step(model, engine, nodes, 10, "poseidon", 1.0)
            plain = step(model, engine, nodes, 10, "wfbp", 1.0)
            assert max(hybrid.node_bytes) <= max(plain.node_bytes)
    balance = ours_of("poseidon:fig10")
    assert balance["balance"] == 1.0  # The last variant is Poseidon.


def test_the_sizes_of_encodings() -> None:
    # 512 values at 4 bits and a scale; 64 signs and two averages; a column of three values.
    assert qsgd_bytes(512, 4, 512) == 256 + 4
    assert qsgd_bytes(513, 8, 512) == 513 + 8
    assert one_bit_bytes(64, 64) == 8 + 8
    assert one_bit_bytes(9, 3) == 3 * 12
    full = encoded("resnet152", "32bit").size_bytes
    # More than 99 % are quantized, so that 8 bits are nearly a quarter.
    assert 3.8 < full / encoded("resnet152", "8bit").size_bytes < 4.0
    # "Applied to a column of very small dimension (1-3), which leads to no reduction."
    assert encoded("resnet152", "1bit").size_bytes > full


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data beside this checkout")
def test_with_the_authors_logs_their_model_gives_their_numbers() -> None:
    simulations = Simulations(profile_dir=REFERENCE / "profiles")
    assert len(profile_of(simulations, "vgg16").tensors) == 58
    rows = csv.DictReader((REFERENCE / "whatif_reference.csv").read_text().splitlines())
    seen = 0
    for row in rows:
        if row["servers"] == "8" and row["bandwidth_gbps"] in ("10", "100"):
            ratio = float(row["compression"])
            made = scaling(
                simulations, row["model"], 8, float(row["bandwidth_gbps"]), compression=ratio
            )
            assert made == pytest.approx(100 * float(row["scaling_factor_reference"]), abs=0.05)
            seen += 1
    assert seen >= 4


LABELLED = [name for name, figure in FIGURES.items() if figure.run is not None]


@pytest.mark.parametrize("with_logs", [True, False])
def test_only_the_papers_inputs_are_called_the_papers_model(
    monkeypatch: pytest.MonkeyPatch, with_logs: bool
) -> None:
    """What reaches the simulator decides: the authors' logs and additions, or another label."""
    folder = REFERENCE / "profiles"
    if with_logs and not folder.is_dir():
        pytest.skip("no reference data beside this checkout")
    simulations = Simulations(profile_dir=folder if with_logs else None)
    seen: list[dict[str, Any]] = []

    def recorded(scenario: dict[str, Any]) -> dict[str, Any]:
        seen.append(scenario)
        return run_scenario(scenario)

    monkeypatch.setattr(whatif_paper, "run_scenario", recorded)
    labels = {name: FIGURES[name].setting_of(simulations) for name in LABELLED}
    called = {name for name, label in labels.items() if whatif_paper.PAPERS_MODEL in label}
    assert called == ({f"whatif:fig{one}" for one in (1, 3, 6, 7, 8)} if with_logs else set())
    for name in ("whatif:fig3", "whatif:fig6"):
        seen.clear()
        (made,) = reproduce(chosen([name]), simulations)
        assert made.setting == labels[name]
        fused = [one for one in seen if one["model"] == "ring-fused"]
        assert fused
        if not with_logs:
            assert whatif_paper.SUBSTITUTES in made.setting
            assert not any(one["additions"] for one in fused)
            continue
        logs = [
            find_profile(str(folder / f"{stem}.json")).to_scenario()
            for stem in whatif_paper.LOGS.values()
        ]
        additions = [list(point) for point in read_additions(REFERENCE / "vec_add_v100.csv")]
        assert all(one["additions"] == additions for one in fused)
        own = [one for one in fused if one["profile"] in logs]
        # Of ResNet-101 there is no log, which the label says.
        assert "ResNet-101 has no log" in made.setting
        assert len(fused) - len(own) == (0 if name == "whatif:fig3" else len(fused) // 3)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data beside this checkout")
def test_figure_6_with_the_authors_logs_is_the_papers() -> None:
    """ResNet-50 on 8 servers at 25 Gbit/s: 91.0 %, as the authors' program says."""
    (made,) = reproduce(chosen(["whatif:fig6"]), Simulations(profile_dir=REFERENCE / "profiles"))
    (curve,) = [one for one in made.curves if one.name.startswith("resnet50")]
    assert dict(curve.points)[25] == pytest.approx(91.0, abs=0.05)


# The command


def test_the_command_writes_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, page, html = tmp_path / "r.json", tmp_path / "r.md", tmp_path / "r.html"
    status, out, errors = run(
        monkeypatch,
        capsys,
        *("reproduce", "poseidon:table1", "p3:fig4"),
        *("--json", str(target), "--markdown", str(page), "--html", str(html)),
    )
    assert status == 0, errors
    content = json.loads(target.read_text())
    assert [one["figure"] for one in content["figures"]] == ["poseidon:table1", "p3:fig4"]
    row = next(one for one in content["figures"][0]["rows"] if one["key"] == "ps_both")
    assert row["published"] == 58.7
    assert row["difference"] == pytest.approx(row["ours"] - 58.7)
    assert "58.72" in out
    text = page.read_text()
    assert "### `poseidon:table1`" in text
    assert "## Not yet" in text
    assert "lowprec:fig5" in text
    assert "58.7" in html.read_text()


def test_the_list_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "list.json"
    status, out, _ = run(monkeypatch, capsys, "reproduce", "--list", "--json", str(target))
    assert status == 0
    listed = {one["figure"]: one for one in json.loads(target.read_text())["figures"]}
    assert listed["poseidon:fig5"]["can_be_reproduced"]
    assert not listed["poseidon:fig11"]["can_be_reproduced"]
    assert "onebit" in listed["poseidon:fig11"]["needs"]
    assert "not yet" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a figure"),
        (("lowprec:fig5",), "training runs"),
        (("p4:fig1",), "no figure 'p4:fig1'"),
        (("modern", "p3"), "a page of its own"),
        (("p3:fig4", "published"), "`published` has a page of its own"),
        (("whatif:sec4", "--profiles", "/no/such/folder"), "no folder"),
    ],
)
def test_mistakes_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    status, _, errors = run(monkeypatch, capsys, "reproduce", *arguments)
    assert status == 2
    assert message in errors
