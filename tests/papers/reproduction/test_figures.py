"""Figures of the papers: their numbers have sources, ours stand beside them and are the papers' own
where nothing stands between."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.simulation.lists import read_additions
from gradlane.planning.simulation.profiles import (
    Profile,
    ProfileTensor,
    find_profile,
    synthetic_profile,
    write_profile,
)
from gradlane.planning.simulation.scenarios import run_scenario
from gradlane_papers.accuracy.study import SETTINGS, paper_runs
from gradlane_papers.reproduction import whatif_paper
from gradlane_papers.reproduction.comparison import (
    Curve,
    compared,
    ours,
    published_content,
    published_of,
)
from gradlane_papers.reproduction.figures import FIGURES, chosen, reproduce
from gradlane_papers.reproduction.kvstore_model import (
    GOODPUT_SHARE,
    TO_DEVICE,
    TO_HOST,
    Machine,
    Part,
    gains,
    parts_of,
    step_s,
)
from gradlane_papers.reproduction.lowprec_model import encoded, one_bit_bytes, qsgd_bytes
from gradlane_papers.reproduction.poseidon import simulated_job, simulated_speedups
from gradlane_papers.reproduction.poseidon_bytes import fitted_share, speedup, step
from gradlane_papers.reproduction.simulations import Simulations
from gradlane_papers.reproduction.trained import (
    Trained,
    points_from_p3,
    studied_content,
    trained_content,
)
from gradlane_papers.reproduction.whatif_paper import profile_of, scaling
from tests.command_line import run
from tests.paths import ROOT, SHARED

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
    *("p3:fig11", "p3:fig15", "p3:secB2", "poseidon:fig9b", "poseidon:fig11"),
    *(f"lowprec:fig{number}" for number in (3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16)),
)


def ours_of(name: str) -> dict[str, float]:
    """Ours by key; of several variants the last one."""
    (made,) = reproduce(chosen([name]), Simulations())
    return {row.published.key: row.value for row in made.rows if row.value is not None}


def test_accuracies_are_those_of_the_runs() -> None:
    """Every seed is compared with its own, and what is called real was trained by processes."""
    (made,) = reproduce(chosen(["p3:fig15"]), Simulations())
    ours = {row.ours.variant: row.ours for row in made.rows if row.ours}
    assert {row.published.value for row in made.rows} == {-5.0} and len(ours) == 4
    points = points_from_p3("asgd:order=real")
    real = ours["real processes, P3's learning rate"]
    assert not real.main and real.value == pytest.approx(sum(points) / len(points))
    # Most seeds diverge with P3's learning rate, which says nothing of another's.
    assert ours["real processes, a worker's share of the learning rate"].main
    rows = {(row["task"], row["scheme"]): row for row in trained_content()["rows"][::-1]}
    full, own = rows["resnet", "p3"]["accuracy"], rows["resnet", "asgd:order=real"]["accuracy"]
    assert points[0] == pytest.approx(100 * (own[0][-1] - full[0][-1]))
    # In turn each gradient is three updates old; processes are not told whose turn it is.
    assert rows["resnet", "asgd"]["stale"] == pytest.approx(3, abs=0.05)
    assert rows["resnet", "asgd:order=real"]["stale"] != rows["resnet", "asgd"]["stale"]


def test_the_longer_study_is_that_of_its_page() -> None:
    """What the figures take from docs/accuracy.md stands there."""
    lines = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8").splitlines()
    page = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    for task, schemes in studied_content()["tasks"].items():
        for scheme, (percent, points, spread) in schemes.items():
            assert any(
                row[0].startswith(scheme)
                and any(cell.startswith(f"{percent} ± ") for cell in row[2:])
                and any(cell.startswith(f"{points:+.1f} ± {spread}") for cell in row[2:])
                for row in page
            ), (task, scheme)


def test_a_curve_is_straight_between_two_evaluations() -> None:
    curves = ((10.0, 30.0, 90.0), (10.0, 50.0, 90.0))
    one = Trained(curves, (0, 10, 20), None)
    assert one.final == 90.0 and one.finals == (90.0, 90.0)
    assert one.steps_to(10.0) == 0.0 and one.steps_to(40.0) == 10.0
    assert one.steps_to(65.0) == pytest.approx(15.0) and one.steps_to(91.0) is None


def test_slices_hide_the_copies_that_kvstore_waits_for() -> None:
    """One tensor on two machines: whole it goes through one stage after another."""
    tensor = ProfileTensor("weight", (4_000_000,), "f32", 0.0, 1.0)
    profile = Profile("one", 1, 0.0, 1.0, (tensor,))
    size = 4 * tensor.numel
    machine = Machine(copy_byte_s=1 / size, reply_byte_s=0.0, message_s=0.0, sum_byte_s=1 / size)
    # Half of the tensor takes a port a second.
    rate_bps = 8 * size / 2 / GOODPUT_SHARE
    whole = step_s(profile, "kvstore", rate_bps, machine, workers=2)
    # Compute, copy, push, the other's half of the sum, reply, copy.
    assert whole == pytest.approx(1 + 1 + 1 + 0.5 + 1 + 1)
    # Compute, and the port: pushes and replies.
    assert 3.0 < step_s(profile, "slicing", rate_bps, machine, workers=2) < 3.3
    assert parts_of(profile, "kvstore", 2, 0) == [[Part(0, size // 2, 0), Part(0, size // 2, 1)]]
    assert len(parts_of(profile, "p3", 2, 0)[0]) == 80


def test_vgg_19_gains_by_slicing_what_copies_take() -> None:
    """Published: 49 % at 30 Gbit/s; the constants are fitted to another paper's ResNet-152."""
    profile = synthetic_profile("vgg19")
    machine = Machine.fitted()
    assert gains(profile, 30e9, machine)["slicing"] == pytest.approx(49, rel=0.1)
    assert gains(profile, 30e9, replace(machine, copy_byte_s=0.0))["slicing"] < 10
    assert gains(synthetic_profile("resnet50"), 4e9, machine)["slicing"] < 5


def test_copies_of_whole_tensors_bring_p3_below_what_is_published() -> None:
    """Published: 66 % at 15 Gbit/s. Neither way whole is enough, nor is hiding all copies."""
    profile, machine = synthetic_profile("vgg19"), Machine.fitted()
    slices = gains(profile, 15e9, machine)
    assert slices["p3"] > 100
    for way in (TO_HOST, TO_DEVICE):
        whole = gains(profile, 15e9, replace(machine, copies_whole=frozenset({way})))
        assert whole["slicing"] == slices["slicing"]
        assert whole["p3"] < min(slices["slicing"], 66)


def test_what_was_trained_is_of_one_command_and_as_many_seeds_as_it_says() -> None:
    """The page has the command; figure 11's five settings are all there."""
    content = trained_content()
    seeds = int(content["command"].split("--seeds ")[1].split()[0])
    assert "--papers" in content["command"] and {len(r["accuracy"]) for r in content["rows"]} == {
        seeds
    }
    made = {
        (r["task"], r["scheme"], r["layers"], r["workers"], r["steps"]) for r in content["rows"]
    }
    assert made == {(r.task, r.scheme, r.layers, r.workers, r.steps) for r in paper_runs(seeds)}
    assert len(SETTINGS) == 5
    for name in ("p3:fig11", "p3:fig15", "p3:secB2", "poseidon:fig9b", "poseidon:fig11"):
        assert content["command"] in FIGURES[name].setting
        assert f"{seeds} seeds" in FIGURES[name].setting


# What is published


def test_every_published_number_has_a_source_and_a_figure() -> None:
    content = published_content()
    for name, entries in content["figures"].items():
        assert FIGURES[name].setting
        assert name.partition(":")[0] in content["papers"]
        for entry in entries.values():
            assert entry["what"]
            assert entry["source"]
            # A number, or what the paper says in its place.
            assert ("value" in entry) != bool(entry.get("says"))
    for entry in content["settings"].values():
        assert entry["value"] > 0
        assert entry["source"]


def test_figures_are_chosen_by_their_names_and_those_of_papers() -> None:
    assert all(figure.title and figure.setting for figure in FIGURES.values())
    with pytest.raises(ValueError, match="no figure 'p3:fig99'"):
        chosen(["p3:fig99"])
    assert {one.name for one in chosen(["poseidon", "p3:fig4"])} >= {"poseidon:fig5", "p3:fig4"}


@pytest.mark.parametrize("name", QUICK)
def test_a_figure_has_a_row_for_every_published_number(name: str) -> None:
    (made,) = reproduce(chosen([name]), Simulations())
    assert {row.published.key for row in made.rows} == set(published_of(name))
    for row in made.rows:
        ours, published = row.value, row.published.value
        assert row.why
        if row.published.cannot:
            assert row.ours is None and row.why == row.published.cannot
            continue
        assert ours is not None and ours == ours  # No not-a-number.
        if published is not None:
            assert row.difference == ours - published


def test_ours_without_a_published_number_is_an_error() -> None:
    figure = FIGURES["p3:fig4"]
    with pytest.raises(KeyError):
        compared(figure, [ours("something", 1.0)])
    assert compared(figure, [Curve("line", "x", "y", ((1.0, 2.0),))]) == []


def test_words_are_those_of_a_number_or_of_its_tag_and_hold_its_facts() -> None:
    figure = FIGURES["poseidon:fig5"]
    own = figure.worded(ours("vgg19_22k_wfbp", 21.5, "share", share=34.8))
    assert own.main and own.role == "fitted" and own.variant == "simulated, 35 % of the port"
    assert not figure.worded(ours("vgg19_wfbp", 21.5, "bytes, full")).main
    assert FIGURES["p3:secB2"].worded(ours("final_p3", 93.0)).role == "smaller"
    with pytest.raises(KeyError, match="share"):
        figure.worded(ours("vgg19_22k_wfbp", 21.5, "share"))
    with pytest.raises(KeyError):
        figure.worded(ours("vgg19_22k_wfbp", 21.5))


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
    labels = {name: FIGURES[name].setting_of(simulations) for name in FIGURES}
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


def test_a_folder_that_lacks_an_input_is_labelled_by_what_it_lacks(tmp_path: Path) -> None:
    stem = whatif_paper.LOGS["resnet50"]
    folder = tmp_path / "profiles"
    folder.mkdir()
    write_profile(synthetic_profile("resnet50"), folder / f"{stem}.json")
    label = FIGURES["whatif:fig6"].setting_of(Simulations(profile_dir=folder))
    assert "logs of resnet50; no log of vgg16 in the folder" in label
    assert "additions cost nothing: no vec_add_v100.csv beside the folder" in label
    assert "operation counts" not in label and whatif_paper.PAPERS_MODEL not in label


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
    assert "Not yet" not in text
    assert "58.7" in html.read_text()


def test_the_list_has_every_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "list.json"
    status, out, _ = run(monkeypatch, capsys, "reproduce", "--list", "--json", str(target))
    assert status == 0
    listed = {one["figure"]: one for one in json.loads(target.read_text())["figures"]}
    assert list(listed) == list(FIGURES)
    assert all(one["title"] and one["setting"] for one in listed.values())
    assert listed["poseidon:fig5"]["title"] in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name a figure"),
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
