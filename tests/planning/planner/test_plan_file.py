"""Plan files: what is written comes back, and what makes no sense is named with its place."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.training.plans.plan import Plan, PlanError, parse_plan, read_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.planning.simulation.small_profile import SMALL

FACTS = ClusterFacts(workers=4, rate_bps=2e8, latency_s=0.001)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return Coordinator(SMALL, FACTS).plan()


def test_what_is_saved_is_read_again(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    again = read_plan(path)
    assert again.to_json() == plan.to_json()
    assert again.digest == plan.digest
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_clipping_is_a_fact_of_the_cluster(tmp_path: Path) -> None:
    plain, clipped = (
        Coordinator(SMALL, replace(FACTS, clips=clips)).plan() for clips in (False, True)
    )
    assert "clips" not in plain.to_json()["cluster"]
    assert clipped.to_json()["cluster"]["clips"] is True
    clipped.save(tmp_path / "plan.json")
    assert read_plan(tmp_path / "plan.json").facts == replace(FACTS, clips=True)
    # The bound and each candidate know it.
    assert clipped.prediction["bound_step_s"] >= plain.prediction["bound_step_s"]
    assert clipped.facts.where.endswith("with clipping")
    with pytest.raises(ValueError, match="nothing can be clipped here"):
        replace(FACTS, clips=True, update="server")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"serving": 1, "servers": 2}, "the ranks that only serve own all"),
        ({"serving": 1, "stragglers": "drop"}, "do not learn which ranks a step leaves out"),
        ({"stragglers": "drop", "update": "server"}, "late itself"),
    ],
)
def test_a_cluster_is_one_that_a_session_can_have(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(FACTS, **facts)


def test_a_plan_for_ranks_that_only_serve_and_update() -> None:
    facts = replace(FACTS, serving=1, update="server")
    plan = Coordinator(SMALL, facts).plan()
    assert (plan.facts.serving, plan.facts.update) == (1, "server")
    assert {tensor.scheme for tensor in plan.tensors} <= {"ps", ""}


def test_the_digest_is_of_what_counts_for_a_training(plan: Plan) -> None:
    content = plan.to_json()
    del content["digest"]
    changed = copy.deepcopy(content)
    changed["summary"] = "another"
    changed["prediction"]["step_s"] = 1.0
    assert parse_plan(json.dumps(changed), "plan").digest == plan.digest
    changed["settings"]["frame_bytes"] += 1
    assert parse_plan(json.dumps(changed), "plan").digest != plan.digest


def refusal_of(content: Any) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(json.dumps(content), "plan p.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format",), "gradlane-profile", "format: is 'gradlane-profile'"),
        (("format",), None, "format: expected a text"),
        (("version",), 2, "version: is 2; this gradlane reads version 1"),
        (("version",), True, "version: expected an integer"),
        (("model",), "", "model: expected a text"),
        (("cluster", "workers"), 0, "cluster.workers: expected an integer of 1"),
        (("cluster", "clips"), 1, "cluster.clips: is 1, expected true or false"),
        (("cluster", "rate_bps"), float("nan"), "cluster.rate_bps: must be finite"),
        (("cluster", "rate_bps"), -5, "cluster: rate_bps is -5"),
        (("cluster", "latency_s"), "1", "cluster.latency_s: expected a number"),
        (("settings", "strategy"), "p4", "settings: unknown strategy 'p4'"),
        (("settings", "slice_elems"), 0, "settings.slice_elems: expected an integer"),
        (("settings", "slice_elems"), 1.5, "settings.slice_elems: expected an integer"),
        (("settings", "frame_bytes"), 10**12, "settings: frame_bytes is 1000000000000"),
        (("settings",), [], "settings: expected an object"),
        (("tensors",), {}, "tensors: expected a list"),
        (("tensors", 1), 5, "tensors[1]: expected an object"),
        (("tensors", 2, "numel"), -1, "tensors[2].numel: expected an integer"),
        (("tensors", 2, "scheme"), "tree", "tensors[2].scheme: unknown 'tree'; known are "),
        (("tensors", 0, "codec"), "zip", "tensors[0].codec: unknown 'zip'"),
        (("tensors", 1, "name"), "layer0.weight", "tensors: 'layer0.weight' occurs twice"),
    ],
)
def test_fields_that_make_no_sense_are_named(
    plan: Plan, path: tuple[str | int, ...], value: Any, message: str
) -> None:
    content: Any = plan.to_json()
    place = content
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    text = refusal_of(content)
    assert text.startswith("plan p.json: ")
    assert message in text


@pytest.mark.parametrize("field", ["format", "settings", "cluster", "tensors", "prediction"])
def test_missing_fields_are_named(plan: Plan, field: str) -> None:
    content = plan.to_json()
    del content[field]
    assert f"{field}: missing" in refusal_of(content)


def test_a_file_that_was_changed_by_hand_is_refused(plan: Plan) -> None:
    content = plan.to_json()
    content["settings"]["frame_bytes"] = 4096
    assert "digest: is" in refusal_of(content)
    del content["digest"]
    assert parse_plan(json.dumps(content), "plan").settings.frame_bytes == 4096


def test_what_is_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"cannot read plan .*nowhere\.json: No such file"):
        read_plan(tmp_path / "nowhere.json")
    for text in ("", "{", "[]", "[" * 100_000, "5"):
        with pytest.raises(PlanError, match="plan"):
            parse_plan(text, "plan")
    binary = tmp_path / "binary.json"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="it is no text"):
        read_plan(binary)


def test_a_plan_of_another_model_is_refused(plan: Plan) -> None:
    sizes = {tensor.name: tensor.numel for tensor in plan.tensors}
    plan.check_fits(sizes, "plan p.json")
    with pytest.raises(ValueError, match=r"plan p\.json is for another model \(small\)"):
        plan.check_fits({**sizes, "layer2.weight": 5}, "plan p.json")
    with pytest.raises(ValueError, match=r"'layer4\.weight'.* no such trained parameter"):
        plan.check_fits({k: v for k, v in sizes.items() if k != "layer4.weight"}, "plan p.json")
    with pytest.raises(ValueError, match=r"it has no tensor 'head\.weight'"):
        plan.check_fits({**sizes, "head.weight": 5}, "plan p.json")
    Plan("any", FACTS, "given", Settings()).check_fits({"a": 1}, "plan")
