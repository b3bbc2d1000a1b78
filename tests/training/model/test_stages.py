"""The stages of a step: their list, their order, and what the session says of them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.model.stages.stage import StepStage
from gradlane.training.model.stages.stage_list import StageList
from tests.built import needs_core
from tests.training.model.ranks import run_ranks

pytestmark = needs_core

ALWAYS = ["local accumulation", "weighting", "unscaling", "clipping"]
"""Stages of every model, in their order."""
KINDS: dict[str, dict[str, Any]] = {
    "servers": {"update": "server"},
    "late gradients": {"stragglers": "backup=1", "late": "carry"},
    "momentum takeover": {"codec": "dgc:ratio=0.1"},
    "local clipping": {"codec": "dgc:ratio=0.1,clip=1"},
    "membership": {"going_on": True},
    "joining": {"going_on": True},
    "server state": {"update": "server"},
    "parameter check": {"check_every": 5},
}
"""Stages of some options, with options that they are in force for."""


def explained(ranks: int = 2, buffers: bool = False, **options: Any) -> list[Any]:
    """Return what each rank's session explains of one model."""

    def body(session: Any) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if buffers else nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        session.prepare(model, optimizer)
        return session.explain()

    return run_ranks(ranks, body, **options)


def names(explanation: Any) -> list[str]:
    (model,) = explanation.to_json()["models"]
    return [one["stage"] for one in model["stages"]]


def test_a_session_explains_what_each_step_passes() -> None:
    first, second = explained()
    found = names(first)
    assert [one for one in found if one in ALWAYS] == ALWAYS
    assert found.index("monitoring") < found.index("weighting") < found.index("rank statuses")
    assert set(found) - set(names(second)) == {"order of urgency"}
    told = first.to_json()
    assert json.loads(json.dumps(told)) == told and told["models"][0]["model"] == "Sequential"
    lines = str(first).splitlines()
    assert lines[0] == "Sequential:" and len(lines) == len(found) + 1
    for line, name in zip(lines[1:], found, strict=True):
        assert line.split(". ", 1)[1].startswith(name) and len(line.split("  ")[-1]) > 10


@pytest.mark.parametrize("name", KINDS)
def test_a_stage_is_in_force_for_its_options_alone(name: str) -> None:
    for explanation in explained(3 if "stragglers" in KINDS[name] else 2, **KINDS[name]):
        assert name in names(explanation)
    assert name not in names(explained()[0])


def test_buffers_are_explained_as_they_were_prepared() -> None:
    assert "buffers" in names(explained(buffers=True)[0])
    assert "buffers" not in names(explained()[0])


def test_every_class_of_stages_is_in_force_for_some_options() -> None:
    made: set[type] = {StepStage}
    for options in ({}, *KINDS.values()):
        seen: list[type] = []
        init = StageList.__init__

        def note(self: StageList, stages: Any, seen: Any = seen, init: Any = init) -> None:
            seen += map(type, stages)
            init(self, stages)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StageList, "__init__", note)
            explained(3 if "stragglers" in options else 2, **options)
        made |= {*seen}
    assert {*StepStage.__subclasses__()} <= made


def test_nothing_is_explained_before_a_model_is_prepared() -> None:
    (explanation,) = run_ranks(1, lambda session: session.explain())
    assert str(explanation) == "no model is prepared"
    assert explanation.to_json() == {"models": []}


def test_local_updates_are_explained_as_one_stage() -> None:
    explanation = explained(update=gradlane.Local(steps=2))[0]
    assert names(explanation) == ["local updates"]


def test_stages_are_called_in_order_at_the_moments_that_they_have_a_method_for() -> None:
    calls: list[str] = []

    class Counts(StepStage):
        def reset(self) -> None:
            calls.append(self.name)

    class Looks(Counts):
        def before_update(self, number: int, step: int) -> None:
            calls.append(f"{self.name} {number} {step}")

    stages = StageList([StepStage("idle", "none"), Looks("first", "both"), Counts("second", "one")])
    for stage in stages.on[StepStage.reset]:
        stage.reset()
    for stage in stages.on[StepStage.before_update]:
        stage.before_update(1, 7)
    assert calls == ["first", "second", "first 1 7"]
    assert stages.on[StepStage.ended] == ()
    acts = [one["acts"] for one in stages.describe()]
    assert acts == [[], ["before_update", "reset"], ["reset"]]
