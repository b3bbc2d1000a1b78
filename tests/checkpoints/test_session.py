"""Sessions that are stopped and go on: with the same bits in a world of the same size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import gradlane
from gradlane.checkpoints.folder import newest
from gradlane.core import load_core
from gradlane.errors import CheckpointError, UsageError
from tests.adapter.ranks import run_ranks
from tests.built import needs_core
from tests.checkpoints.kills import check_kills
from tests.checkpoints.training import Model, train

pytestmark = needs_core

LAST = 12


def run(
    folder: Path, world_size: int, last: int, options: dict[str, Any], **settings: Any
) -> list[tuple[int, list[float]]]:
    core: Any = load_core()
    return run_ranks(
        world_size,
        lambda session: train(session, last, **settings),
        core=core,
        summary=False,
        slice_elems=700,
        checkpoint=folder,
        **{"checkpoint_every": 3, **options},
    )


OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("adamw", {"update": "server"}),
    ("sgd", {"update": "server"}),
    ("adamw", {"update": "worker"}),
    ("sgd", {"update": "worker", "codec": "onebit"}),
]


@pytest.mark.parametrize(("optimizer_name", "options"), OPTIONS)
def test_a_world_of_the_same_size_goes_on_with_the_same_bits(
    tmp_path: Path, optimizer_name: str, options: dict[str, Any]
) -> None:
    whole = run(tmp_path / "whole", 2, LAST, options, optimizer_name=optimizer_name)
    run(tmp_path / "cut", 2, 7, options, optimizer_name=optimizer_name)
    rest = run(tmp_path / "cut", 2, LAST, options, optimizer_name=optimizer_name)
    for (_, expected), (begun, found) in zip(whole, rest, strict=True):
        assert begun == 6
        assert found == expected[6:]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("update", ["server", "worker"])
def test_a_world_of_another_size_goes_on_with_the_same_curve(
    tmp_path: Path, world_size: int, update: str
) -> None:
    """All ranks see the same batches, so that a mean over more or fewer is the same."""
    options = {"update": update}
    whole = run(tmp_path / "whole", 2, LAST, options, same_batches=True)
    run(tmp_path / "cut", 2, 6, options, same_batches=True)
    rest = run(tmp_path / "cut", world_size, LAST, options, same_batches=True)
    for begun, found in rest:
        assert begun == 6
        assert found == pytest.approx(whole[0][1][6:], rel=1e-4)


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    run(tmp_path, 2, LAST, {"checkpoint_keep": 2})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000000009", "step-000000012"]
    found = newest(tmp_path)
    assert found is not None and len(found.files) == 2


def test_training_goes_on_where_a_checkpoint_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "step-000000003").write_text("in the way")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(tmp_path, 2, 7, {})
    assert [len(losses) for _, losses in results] == [7, 7]
    assert any("step 3 is not complete" in str(one.message) for one in caught)
    found = newest(tmp_path)
    assert found is not None and found.step == 6


def test_damage_is_named_on_every_rank(tmp_path: Path) -> None:
    run(tmp_path, 2, 3, {})
    found = newest(tmp_path)
    assert found is not None
    path = found.folder / found.files[1][0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    core: Any = load_core()
    errors = run_ranks(
        2,
        lambda session: train(session, LAST),
        core=core,
        checkpoint=tmp_path,
        expect_errors=True,
    )
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert path.name in str(error) and "checksum" in str(error)


def test_restore_needs_a_folder_a_model_and_the_right_moment(tmp_path: Path) -> None:
    def without(session: gradlane.Session) -> None:
        with pytest.raises(UsageError, match="checkpoint="):
            session.restore()

    def early(session: gradlane.Session) -> None:
        with pytest.raises(UsageError, match="after prepare"):
            session.restore()
        train(session, 1)
        with pytest.raises(UsageError, match="before the first step"):
            session.restore()
        other = Model()
        import torch

        with pytest.raises(UsageError, match="one model"):
            session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))

    core: Any = load_core()
    run_ranks(1, without, core=core, summary=False)
    run_ranks(1, early, core=core, summary=False, checkpoint=tmp_path)


def test_ranks_killed_at_random_moments_leave_the_last_checkpoint(tmp_path: Path) -> None:
    check_kills(tmp_path, 3, {"update": "server"})
