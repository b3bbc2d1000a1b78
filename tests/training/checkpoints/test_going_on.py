"""Checkpoints of a training that goes on without a lost rank are written by its members."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradlane
from gradlane.training.checkpoints.folder import complete_folders, newest, read_manifest
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model, optimizer_of
from tests.training.model.test_going_on_processes import STEPS, Run

pytestmark = needs_core

EVERY = 3
FATAL_STEP = 5


@pytest.mark.parametrize("victim", [0, 2])
def test_those_that_are_left_write_the_next_ones(
    programs: ForkedPrograms, tmp_path: Path, victim: int
) -> None:
    folder = tmp_path / "checkpoints"
    options: dict[str, Any] = {
        "checkpoint_folder": str(folder),
        "checkpoint_every": EVERY,
        "checkpoint_keep": 9,
    }
    run = Run(programs, tmp_path, 4, {victim: ("sigkill", FATAL_STEP, "backward")}, **options)
    run.check_alike()
    manifests = {one.step: one for one in map(read_manifest, complete_folders(folder))}
    (change,) = run.results[run.survivors[0]]["changes"]
    expected = {step: 4 if step < change["at"] else 3 for step in range(EVERY, STEPS + 1, EVERY)}
    found = {step: len(one.files) for step, one in manifests.items()}
    assert found == {step: expected[step] for step in found}
    # One that was being written when the rank was lost may be withdrawn.
    assert set(found) >= {step for step in expected if step >= change["at"]}
    # A new first rank has claimed the folder: what the lost one still wrote would not count.
    # It may have been lost before it claimed the folder at all.
    starts: dict[bool, set[str]] = {True: set(), False: set()}
    for step, one in manifests.items():
        starts[step >= change["at"]].add(one.folder.name.rpartition("-")[2])
    assert len(starts[True]) == 1
    assert starts[False] <= (starts[True] if victim else {"1"} - starts[True])
    assert len({one.run for one in manifests.values()}) == 1
    last = newest(folder)
    assert last is not None and last.step == STEPS
    # Another world goes on from it.
    place: dict[str, Any] = {"rendezvous": gradlane.Rendezvous(rank=0, world_size=1)}
    with gradlane.init(checkpoints=gradlane.Checkpoints(folder), **place) as session:
        model = Model()
        session.prepare(model, optimizer_of(model))
        assert session.restore() == STEPS
        for found, expected in zip(
            model.state_dict().values(), run.results[run.survivors[0]]["final"], strict=True
        ):
            assert torch.equal(found, expected)
