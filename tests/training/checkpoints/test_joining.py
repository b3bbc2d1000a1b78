"""Checkpoints of a training that ranks join are written by all that are there, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gradlane
from gradlane import Checkpoints
from gradlane.training.checkpoints.folder import (
    Manifest,
    complete_folders,
    newest,
    read_manifest,
)
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.model.going_rank import Model
from tests.training.model.joining_rank import digest_of, optimizer_of
from tests.training.model.test_joining_processes import Run, check_reference

pytestmark = needs_core

MANAGER = "gradlane.training.checkpoints.manager"
SLOW_S = 0.2
"""Longer than it takes a rank to join, so that a checkpoint is under way meanwhile."""


def options_of(folder: Path, every: int) -> dict[str, Any]:
    """Return options of sessions that keep all checkpoints."""
    return {
        "checkpoint_folder": str(folder),
        "checkpoint_every": every,
        "checkpoint_keep": 1000,
    }


def manifests_of(folder: Path) -> dict[int, Manifest]:
    """Return complete checkpoints by step, after checking that they are of one run."""
    found = [read_manifest(path) for path in complete_folders(folder)]
    assert len({one.run for one in found}) == 1
    assert len({one.step for one in found}) == len(found)
    return {one.step: one for one in found}


def digest_of_newest(folder: Path) -> tuple[int, str]:
    """Return the step of the newest checkpoint, and the digest of what one rank restores of it."""
    place: dict[str, Any] = {"rendezvous": gradlane.Rendezvous(rank=0, world_size=1)}
    with gradlane.init(checkpoints=gradlane.Checkpoints(folder), **place) as session:
        model = Model()
        session.prepare(model, optimizer_of(model))
        step = session.restore()
        return step, digest_of(model)


def test_each_is_of_the_ranks_of_its_step(tmp_path: Path, programs: ForkedPrograms) -> None:
    """Also the one that is being written while a rank joins."""
    folder = tmp_path / "checkpoints"
    run = Run(programs, tmp_path, slow=SLOW_S, **options_of(folder, 1))
    run.check_alike()
    run.check_reference()
    files = {step: len(one.files) for step, one in manifests_of(folder).items()}
    assert files == {step: count for step, count, _ in run.results["0"]["rows"]}
    assert set(files.values()) == {3, 4}
    assert "is not complete" not in "".join(run.errors.values())
    # The counts are those of the members, and of the rank that has joined.
    step, _, digest = run.results["joiner-0"]["rows"][-1]
    assert digest_of_newest(folder) == (step, digest)


def test_all_are_killed_and_start_again(tmp_path: Path, programs: ForkedPrograms) -> None:
    """With as many ranks, and then with fewer, of which one joins, with the bits of one process."""
    folder = tmp_path / "checkpoints"

    def has_one_of_four() -> bool:
        return any(len(list(path.glob("rank-*"))) == 4 for path in complete_folders(folder))

    places = [tmp_path / name for name in ("first", "as many", "fewer")]
    for place in places:
        place.mkdir()
    options = options_of(folder, 2)
    first = Run(programs, places[0], kill_all_when=has_one_of_four, **options)
    found = newest(folder)
    assert found is not None and len(found.files) == 4
    rows = [row for row in first.rows_of("0") if row[0] <= found.step]
    for world_size, joiners, place in ((4, 0, places[1]), (2, 1, places[2])):
        begun = len(rows)
        run = Run(programs, place, world_size=world_size, joiners=joiners, **options)
        run.check_alike()
        assert {result["begun"] for result in run.results.values()} == {begun}
        rows += run.results["0"]["rows"]
        check_reference(rows)
        last = manifests_of(folder)[len(rows) - len(rows) % 2]
        assert len(last.files) == world_size + joiners
        # The next ones go on from it.
        rows = rows[: last.step]
    assert digest_of_newest(folder) == (rows[-1][0], rows[-1][2])


def test_a_rank_joins_in_the_place_of_one_that_was_lost(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    """Ranks are numbered anew while those that they were write on."""
    folder = tmp_path / "checkpoints"
    fatal = {"1": "gradlane.training.model.kernel.step_end:StepEnd.end_step"}
    run = Run(programs, tmp_path, fatal=fatal, slow=SLOW_S, **options_of(folder, 1))
    run.check_alike()
    joined = next(one["step"] for one in run.results["0"]["changes"] if one["joined"])
    expected = {step: count for step, count, _ in run.results["0"]["rows"] if step >= joined - 1}
    assert (expected[joined - 1], expected[joined]) == (2, 3)
    files = {step: len(one.files) for step, one in manifests_of(folder).items()}
    assert {step: files.get(step) for step in expected} == expected
    step, _, digest = run.results["joiner-0"]["rows"][-1]
    assert digest_of_newest(folder) == (step, digest)


def test_a_rank_that_takes_none_ends_alone_by_name(
    tmp_path: Path, programs: ForkedPrograms
) -> None:
    """The others train on, and write the next ones by themselves."""
    folder = tmp_path / "checkpoints"
    refused = {
        "checkpoint_folder": None,
        "checkpoint_every": Checkpoints.every,
        "checkpoint_keep": Checkpoints.keep,
    }
    run = Run(
        programs, tmp_path, kill_all_when=lambda: True, refused=refused, **options_of(folder, 2)
    )
    assert "RanksDifferError: rank 0 has checkpoint_every=2, rank 3 has 0" in run.errors["joiner-0"]
    assert "training goes on without it" in run.errors["0"]
    assert {len(one.files) for one in manifests_of(folder).values()} == {3}


@pytest.mark.parametrize(
    "place", ["CheckpointManager.load_state_dict", "CheckpointManager.take", "write_shard"]
)
def test_a_rank_that_joins_is_killed_around_a_checkpoint(
    tmp_path: Path, programs: ForkedPrograms, place: str
) -> None:
    """At most the one is withdrawn that it did not live to write its part of."""
    folder = tmp_path / "checkpoints"
    fatal = {"joiner-0": f"{MANAGER}:{place}"}
    run = Run(programs, tmp_path, joiners=2, fatal=fatal, slow=SLOW_S, **options_of(folder, 1))
    check_lost(run, folder, "joiner-0")


@pytest.mark.parametrize("victim", ["0", "2"])
@pytest.mark.parametrize("place", ["CheckpointManager.take", "write_shard"])
def test_a_member_is_killed_around_a_checkpoint(
    tmp_path: Path, programs: ForkedPrograms, place: str, victim: str
) -> None:
    """In the first step with a rank that has joined: the others, and that one, write the next."""
    folder = tmp_path / "checkpoints"
    fatal = {victim: ("joined", f"{MANAGER}:{place}")}
    run = Run(programs, tmp_path, fatal_after=fatal, slow=SLOW_S, **options_of(folder, 1))
    check_lost(run, folder, victim)


def check_lost(run: Run, folder: Path, label: str) -> None:
    """Check that no checkpoint is missing but those that a lost rank had a part in at its end."""
    run.check_alike()
    survivor = run.results[run.survivors[0]]
    (lost,) = survivor["metrics"]["lost"]
    assert lost["rank"] == (3 if label == "joiner-0" else int(label))
    manifests = manifests_of(folder)
    joined = next(one["step"] for one in survivor["changes"] if one["joined"])
    # Its part of the last step that it ended may not have been on the disk yet.
    end = max((step for step, _, _ in run.rows_of(label)), default=joined)
    counts = {step: count for step, count, _ in survivor["rows"]}
    first_without = next(step for step in sorted(counts) if step > end and counts[step] == 3)
    missing = set(counts) - set(manifests)
    assert missing <= set(range(end, first_without)), (missing, end, first_without)
    last = run.results[run.survivors[-1]]["rows"][-1]
    assert digest_of_newest(folder) == (last[0], last[2])


def test_the_rank_that_joined_is_left_alone(tmp_path: Path, programs: ForkedPrograms) -> None:
    """It writes the later ones of the same run, and in its own folders."""
    folder = tmp_path / "checkpoints"
    end = f"{MANAGER}:CheckpointManager.take"
    fatal = {"0": ("joined", end), "1": ("lost", end)}
    run = Run(programs, tmp_path, world_size=2, fatal_after=fatal, **options_of(folder, 1))
    manifests = manifests_of(folder)
    step, count, digest = run.results["joiner-0"]["rows"][-1]
    assert count == 1 and len(manifests[step].files) == 1
    assert digest_of_newest(folder) == (step, digest)
    starts = [int(manifests[step].folder.name.rpartition("-")[2]) for step in sorted(manifests)]
    assert starts == sorted(starts) and starts[0] == 1 and starts[-1] > 1
