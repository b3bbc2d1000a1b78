"""Ranks that are stopped for moments, and rules for those that are late, in what-ifs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradlane.formats.profile import Profile, ProfileTensor
from gradlane.planning.simulation.grid import SimulatedRow, clusters_of, evaluate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.scenarios import Cluster, scenario_of
from gradlane.planning.simulation.straggler import StragglerSpec
from gradlane.training.options.codec_options import RAW
from tests.command_line import run

SPEC = StragglerSpec(rank=3, share=0.1, burst_s=0.04)


def profile() -> Profile:
    layers = 6
    tensors = tuple(
        ProfileTensor(
            f"layer{number}",
            (300_000,),
            "f32",
            need_s=0.1 * number / layers,
            ready_s=0.3 - 0.2 * number / layers,
        )
        for number in range(layers)
    )
    return Profile("six", 32, 0.1, 0.3, tensors)


def row(
    stragglers: str,
    straggler: StragglerSpec | None = SPEC,
    codec: str = RAW,
    rate_bps: float = 1e9,
) -> SimulatedRow:
    cluster = Cluster(
        workers=4,
        rate_bps=rate_bps,
        codec=codec,
        servers=3,
        steps=30,
        compute_jitter=0.01,
        stragglers=stragglers,
        straggler=straggler,
    )
    return evaluate(profile(), [cluster])[0]


def test_rules_keep_the_others_going_and_rows_name_the_ranks_left_out() -> None:
    undisturbed = row("wait", None)
    assert undisturbed.left_out_share is None and undisturbed.straggler is None
    waiting = row("wait")
    assert waiting.left_out_share == [0.0] * 4
    assert waiting.step_s > 1.07 * undisturbed.step_s
    for rule in ("drop", "backup=1"):
        found = row(rule)
        assert found.step_s < 1.05 * undisturbed.step_s, found
        assert found.left_out_share is not None and found.passed_share is not None
        assert found.left_out_share[3] > 0.4 > found.left_out_share[0], found
        assert found.passed_share[3] > 0.0
        # A gradient that was left out is no sample that anything was learned from.
        counted = 4 - sum(found.left_out_share)
        assert found.samples_per_s == pytest.approx(counted * 32 / found.step_s)


def test_rules_and_codecs_go_together() -> None:
    """On a network that is too slow for the values, and fast enough for a byte a value."""
    encoded = {
        rule: row(rule, codec="qsgd:bits=8", rate_bps=0.4e9) for rule in ("wait", "backup=1")
    }
    plain = row("backup=1", rate_bps=0.4e9)
    assert encoded["backup=1"].step_s < 0.95 * encoded["wait"].step_s
    assert encoded["backup=1"].step_s < 0.95 * plain.step_s
    assert encoded["backup=1"].left_out_share is not None
    assert encoded["backup=1"].left_out_share[3] > 0.4


def test_rules_are_for_strategies_that_can_go_on_without_a_rank() -> None:
    base = Cluster(workers=1, rate_bps=0.0, straggler=SPEC)
    clusters = clusters_of(
        Grid(workers=[4], rates_bps=[1e9], strategies=["kvstore", "p3"], rules=["wait", "drop"]),
        base,
    )
    named = [(one.strategy, one.stragglers) for one in clusters]
    assert named == [("kvstore", "wait"), ("p3", "wait"), ("p3", "drop")]
    with pytest.raises(ValueError, match="every rank's part"):
        scenario_of(profile(), Cluster(workers=4, rate_bps=1e9, stragglers="drop", strategy="ring"))
    with pytest.raises(ValueError, match="9 of 4 ranks"):
        row("wait", StragglerSpec(9, 0.1, 0.04))


def test_the_command_compares_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, saved = tmp_path / "rows.json", tmp_path / "six.json"
    profile().save(saved)
    command = ["whatif", str(saved), "--workers", "4", "--servers", "3", "--rate", "1gbit"]
    late = ["--stragglers", "wait,backup=1", "--straggler", "rank=3,share=0.1,burst=40ms"]
    given = (*command, "--strategy", "p3", *late, "--json", str(path))
    status, printed, _ = run(monkeypatch, capsys, *given)
    words = " ".join(printed.split())
    assert status == 0 and "p3/backup=1: rank 3 is stopped 10% of the time" in words
    content = json.loads(path.read_text())
    assert [one["stragglers"] for one in content["rows"]] == ["wait", "backup=1"]
    assert content["rows"][1]["step_s"] < content["rows"][0]["step_s"]
    assert content["answers"] == [], "what is said about networks is about nobody late"
    status, _, errors = run(monkeypatch, capsys, *given, "--html", str(tmp_path / "page.html"))
    assert status != 0 and "--html" in errors
