"""Choices for small profiles through the compiled core's simulator."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gradlane.cli import main as cli
from gradlane.planning.planner import candidates
from gradlane.planning.planner.candidates import TIE
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.frame_count import frame_count
from gradlane.planning.planner.reasons import reason_of
from gradlane.planning.planner.search import SLICES, Choice, SimulatedValue, search
from gradlane.planning.planner.simulations import frames_to_simulate, predict_step_s
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, write_profile
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.planning.simulation.small_profile import SMALL

SLOW = ClusterFacts(workers=4, rate_bps=2e8)


def test_where_order_matters_the_urgent_first_is_chosen() -> None:
    found = search(SMALL, SLOW, Settings(strategy="wfbp"))
    assert found is not None
    assert found.settings.strategy == "p3"
    assert found.step_s == predict_step_s(SMALL, SLOW, found.settings)
    assert found.base_step_s == predict_step_s(SMALL, SLOW, Settings(strategy="wfbp"))
    assert found.step_s < found.base_step_s * (1 - TIE)
    strategy = found.choices[0]
    assert {one.value for one in strategy.tried} == {
        "p3",
        "slicing",
        "wfbp",
        "kvstore",
        "deferred-pull",
    }
    runner_up = strategy.runner_up
    assert runner_up is not None and runner_up.value != "p3"
    assert runner_up.step_s == min(one.step_s for one in strategy.tried if one.value != "p3")


def test_slices_that_are_tried_fill_whole_frames() -> None:
    """Sizes between them were measured or simulated slower (docs/experiments.md)."""
    usual = Settings()
    usual_elems = usual.slice_elems_in_force
    assert usual_elems is not None
    small = [elems for elems in (*SLICES, usual_elems) if elems <= usual_elems]
    assert len(small) == 3
    for elems in small:
        frames = frame_count(4 * elems, usual.frame_bytes)
        assert 0 <= 4 * elems - frames * usual.frame_bytes <= usual.frame_bytes // 8


def test_on_a_slow_link_slices_of_one_frame_are_chosen() -> None:
    """A result takes a slice's time each way, so smaller slices return sooner."""
    found = search(SMALL, SLOW, Settings())
    assert found is not None
    assert found.settings.slice_elems_in_force == min(SLICES)


def test_where_late_ranks_are_left_out_only_what_goes_on_without_them_is_tried() -> None:
    base = Settings(strategy="wfbp")
    late = replace(SLOW, stragglers="backup=1")
    found = search(SMALL, late, base, any_rounding=True)
    assert found is not None
    strategy, *others = found.choices
    assert strategy.value == "p3"
    assert {one.value for one in strategy.tried} == {"p3", "slicing", "wfbp"}
    assert not found.schemes and "schemes" not in {one.setting for one in others}
    # A result waits for the decision, which comes when the backward of the last one in ends.
    assert found.step_s == predict_step_s(SMALL, late, found.settings)
    assert found.step_s != predict_step_s(SMALL, SLOW, found.settings)
    with pytest.raises(ValueError, match="backup=1"):
        replace(SLOW, stragglers="often")


@pytest.mark.parametrize("strategy", ["p3", "wfbp", "slicing"])
def test_where_the_compute_is_the_bound_everything_stays(strategy: str) -> None:
    fast = ClusterFacts(workers=4, rate_bps=1e11)
    base = Settings(strategy=strategy, frame_bytes=50_000)
    plan = Coordinator(SMALL, fast, base=base).plan()
    assert plan.settings == base
    assert "Nothing helps here: the compute is the bound" in plan.summary


def test_nothing_is_chosen_that_is_predicted_to_be_slower() -> None:
    for rate_bps in (1e8, 5e8, 2e9):
        for latency_s in (0.0, 0.01):
            facts = ClusterFacts(4, rate_bps, latency_s)
            found = search(SMALL, facts, Settings())
            assert found is not None
            assert found.step_s <= found.base_step_s
            if found.settings != Settings():
                assert found.step_s < found.base_step_s * (1 - TIE)
            for choice in found.choices:
                assert choice.step_s <= choice.base_step_s
                best = min(one.step_s for one in choice.tried)
                assert choice.step_s <= best * (1 + 2 * TIE)


def test_a_fixed_send_buffer_below_the_path_is_replaced() -> None:
    """32 kB in flight over a path of 40 ms there and back limit every connection."""
    facts = ClusterFacts(4, 1e9, 0.02)
    found = search(SMALL, facts, Settings(send_buffer_bytes=32_768))
    assert found is not None
    assert found.settings.send_buffer_bytes == 0
    assert found.step_s < 0.9 * found.base_step_s


def test_without_time_the_settings_stay() -> None:
    assert search(SMALL, SLOW, Settings(), budget_s=1e-9) is None
    plan = Coordinator(SMALL, SLOW).plan(budget_s=1e-9)
    assert plan.settings == Settings()
    assert "takes more than" in plan.summary


def test_what_there_was_no_time_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tensors in one frame are a few events; slices in frames of 65 kB are many."""
    cheap = Settings(strategy="kvstore", frame_bytes=1 << 20)
    monkeypatch.setattr(
        candidates,
        "frames_to_simulate",
        lambda profile, facts, settings, schemes: 0 if settings == cheap else 10**12,
    )
    found = search(SMALL, SLOW, cheap)
    assert found is not None and found.settings == cheap
    strategy = found.choices[0]
    assert set(strategy.skipped) == {"p3", "slicing", "wfbp", "deferred-pull"}
    assert "no time to simulate p3" in reason_of(strategy)


def test_the_same_question_has_the_same_answer() -> None:
    one, other = (Coordinator(SMALL, SLOW).plan() for _ in range(2))
    assert one.to_json() == other.to_json()


def test_updates_on_servers_are_simulated_as_such() -> None:
    facts = replace(SLOW, update="server")
    assert Coordinator(SMALL, facts).plan().facts.update == "server"
    assert predict_step_s(SMALL, facts, Settings()) > 0.0


def test_frames_of_a_simulation_are_counted() -> None:
    # 250,000 elements in slices of 50,000: 5 of 200 kB, 3 frames each; 3 steps, there and back.
    expected = 5 * 5 * 3 * 3 * 2 * 3
    assert frames_to_simulate(SMALL, SLOW, Settings()) == expected
    whole = frames_to_simulate(SMALL, SLOW, Settings(strategy="kvstore"))
    assert whole == 5 * 4 * 4 * 3 * 2 * 3


def test_reasons_say_what_decided() -> None:
    def choice(value: int, base: int, times: dict[int, float]) -> Choice:
        tried = tuple(SimulatedValue(size, step_s) for size, step_s in times.items())
        return Choice("frame_bytes", value, base, times[value], times[base], tried)

    gained = reason_of(choice(2, 1, {1: 0.12, 2: 0.10, 3: 0.11}))
    assert "20.0 % faster than 1 (120.0 ms); next best 3, 110.0 ms" in gained
    kept = reason_of(choice(1, 1, {1: 0.100, 2: 0.0995}))
    assert kept.startswith("kept: 2 would give 99.5 ms, 0.5 % less, and below 1 %")
    slower = reason_of(choice(1, 1, {1: 0.10, 2: 0.11}))
    assert slower == "kept: next best is 2, 110.0 ms, 10.0 % slower"
    assert reason_of(choice(1, 1, {1: 0.1, 2: 0.1, 3: 0.1})) == "kept: makes no difference here"
    assert reason_of(choice(1, 1, {1: 0.1, 2: 0.1, 3: 0.2})) == "kept: 2 is as fast"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers is 0"),
        ({"rate_bps": float("nan")}, "rate_bps is nan"),
        ({"rate_bps": 0.0}, "rate_bps is 0"),
        ({"latency_s": -1.0}, "latency_s is -1"),
        ({"latency_s": float("nan")}, "latency_s is nan"),
        ({"update": "nowhere"}, "unknown update 'nowhere'"),
    ],
)
def test_facts_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SLOW, **change)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "p4"}, "unknown strategy 'p4'"),
        ({"slice_elems": 0}, "slice_elems is 0"),
        ({"frame_bytes": 63}, "frame_bytes is 63"),
        ({"frame_bytes": 1 << 23}, "frame_bytes is 8388608"),
        ({"send_buffer_bytes": -1}, "send_buffer_bytes is -1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Settings(**change)  # type: ignore[arg-type]


def test_settings_are_those_of_a_session() -> None:
    options = Options.of(**keywords_of(strategy="wfbp", slice_elems=1000, frame_bytes=4096, seed=7))
    settings = Settings.of(options)
    assert settings.applied_to(Options.of(**keywords_of(seed=7))) == options
    # One's own slice size is the same setting whether it is written or not.
    assert Settings(slice_elems=50_000) == Settings()
    # Of kvstore it is the size from which on tensors are split, and has no other way in.
    assert Settings(strategy="kvstore", slice_elems=9).slice_elems_in_force == 9


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gradlane", "plan", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    captured = capsys.readouterr()
    return int(caught.value.code or 0), " ".join(captured.out.split()), captured.err


def test_the_command_prints_each_choice_and_writes_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    profile, made = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(SMALL, profile)
    arguments = (str(profile), "--workers", "4", "--rate", "200mbit", "--json", str(made))
    status, out, _ = run_command(monkeypatch, capsys, *arguments)
    assert status == 0
    content = json.loads(made.read_text())
    assert (content["format"], content["version"]) == ("gradlane-plan", 1)
    settings = [choice["setting"] for choice in content["choices"]]
    assert settings == ["strategy", "schemes", "slice_elems", "frame_bytes", "send_buffer_bytes"]
    for setting in settings:
        assert setting in out
    assert content["summary"] in out
    assert [row["name"] for row in content["tensors"]] == [one.name for one in SMALL.tensors]
    assert {(row["scheme"], row["codec"]) for row in content["tensors"]} == {("ps", "raw")}


def test_constants_of_a_machine_reach_the_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A file as `gradlane lab calibrate` writes it, of a host that needs 0.2 s between steps."""
    profile, costs = tmp_path / "profile.json", tmp_path / "costs.json"
    write_profile(SMALL, profile)
    costs.write_text(
        json.dumps(
            {
                "format": "gradlane-costs",
                "version": 1,
                "constants": {"between_steps_s": {"value": 0.2}},
            }
        )
    )
    steps_s = []
    for more in ((), ("--costs", str(costs))):
        made = tmp_path / "plan.json"
        arguments = (str(profile), "--workers", "4", "--rate", "1gbit", "--json", str(made), *more)
        assert run_command(monkeypatch, capsys, *arguments)[0] == 0
        steps_s.append(json.loads(made.read_text())["prediction"]["step_s"])
    assert steps_s[1] > steps_s[0] + 0.1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("resnet50", "--workers", "0", "--rate", "1gbit"), "workers is 0"),
        (("resnet50", "--workers", "4", "--rate", "nan"), "'nan' is not a rate"),
        (("resnet50", "--workers", "4", "--rate", "1gbit", "--latency-s", "nan"), "latency_s"),
        (("resnet50", "--workers", "4", "--rate", "1gbit", "--budget-s", "nan"), "budget-s"),
        (("resnet50", "--workers", "4", "--rate", "1gbit", "--update", "x"), "unknown update"),
        (("alexnet2", "--workers", "4", "--rate", "1gbit"), "alexnet2"),
        (("resnet50", "--workers", "4", "--rate", "1gbit", "--plan", "x"), "unknown rule 'x'"),
        (("resnet50", "--workers", "4", "--rate", "1gbit", "--costs", "no"), "cannot read costs"),
    ],
)
def test_mistakes_on_the_command_line_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    status, _, errors = run_command(monkeypatch, capsys, *arguments)
    assert status == 2
    assert message in errors


def test_a_plan_for_a_fast_port_has_the_lanes_of_a_session() -> None:
    """As `whatif` assumes: else the two commands answered 552 and 326 ms for one cluster."""
    tensors = [
        ProfileTensor(f"layer{at}", (8_000_000,), "f32", 0.003 * at, 0.1 - 0.007 * at)
        for at in range(8)
    ]
    large = Profile("large", 1, 0.03, 0.1, tuple(tensors))
    usual, one, three = (ClusterFacts(4, 25e9, lanes=lanes) for lanes in (None, 1, 3))
    step_s = {facts: predict_step_s(large, facts, Settings()) for facts in (usual, one, three)}
    assert step_s[usual] == step_s[three] < 0.9 * step_s[one]
    slow, slow_one = (ClusterFacts(4, 5e9, lanes=lanes) for lanes in (None, 1))
    assert predict_step_s(large, slow, Settings()) == predict_step_s(large, slow_one, Settings())
