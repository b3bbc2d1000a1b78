"""Files and folders of checkpoints, without a session."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from gradlane.errors import CheckpointError
from gradlane.formats.serialization import container
from gradlane.formats.serialization.container import Piece
from gradlane.training.checkpoints import shard
from gradlane.training.checkpoints.folder import (
    check_claim,
    claim,
    commit,
    folder_of,
    newest,
    prune,
    withdraw,
)
from gradlane.training.checkpoints.shard import read_shard, write_shard


def complete(root: Path, step: int, incarnation: int = 1, run: str = "a", ranks: int = 2) -> Path:
    folder = folder_of(root, step, incarnation)
    folder.mkdir(exist_ok=True)
    files = []
    for rank in range(ranks):
        name = f"rank-{rank}"
        files.append((name, write_shard(folder / name, [], {"step": step})))
    commit(root, step, incarnation, run, files)
    return folder


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


# ---- one file


def test_missing_cut_and_other_versions_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    with pytest.raises(CheckpointError, match=r"one\.safetensors cannot be read"):
        read_shard(path)
    monkeypatch.setattr(container, "VERSION", 1)
    monkeypatch.setattr(shard, "check_container", lambda *_: None)
    write_shard(path, [], {"step": 1})
    monkeypatch.undo()
    with pytest.raises(
        CheckpointError, match=r"one.*version 1.*reads versions 2 and 3.*resume with"
    ):
        read_shard(path)
    write_shard(path, [Piece("a", 0, torch.ones(9))], {"step": 1})
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"one\.safetensors is damaged: it is cut off"):
        read_shard(path)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_shard(tmp_path / "one.safetensors", [Piece("a", 0, torch.ones(9))], {"step": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_returns_other_bytes_is_noticed_when_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.safetensors"
    write_shard(path, [Piece("a", 0, torch.zeros(9))], {"step": 1})
    before = path.read_bytes()
    sync = os.fsync

    def spoil(descriptor: int) -> None:
        sync(descriptor)
        if os.fstat(descriptor).st_size > 8:
            os.pwrite(descriptor, b"\x7f", os.fstat(descriptor).st_size - 3)

    monkeypatch.setattr(os, "fsync", spoil)
    with pytest.raises(OSError, match="reads back differently: the checksum of 'a' is wrong"):
        write_shard(path, [Piece("a", 0, torch.ones(9))], {"step": 2})
    assert path.read_bytes() == before and names(tmp_path) == [path.name]


def test_links_and_pipes_are_no_files(tmp_path: Path) -> None:
    real = tmp_path / "real"
    write_shard(real, [], {"step": 1})
    (tmp_path / "link").symlink_to(real)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
            read_shard(tmp_path / name)


def test_nothing_is_written_through_a_link_in_the_place_of_a_folder(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "folder"
    outside.mkdir()
    folder.symlink_to(outside)
    with pytest.raises(OSError, match="is a link to another place"):
        write_shard(folder / "one.safetensors", [Piece("a", 0, torch.ones(9))], {"step": 1})
    assert names(outside) == []
    (outside / "file").touch()
    with pytest.raises(OSError, match="Not a directory"):
        write_shard(tmp_path / "outside" / "file" / "one", [], {"step": 1})


@pytest.mark.parametrize("name", ["one.safetensors", "manifest.json"])
def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("the user's")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).symlink_to(elsewhere)
    write_shard(folder / name, [Piece("a", 0, torch.ones(9))], {"step": 1})
    assert elsewhere.read_text() == "the user's"
    assert not (folder / name).is_symlink() and read_shard(folder / name)


def test_a_link_in_the_place_of_a_folder_keeps_its_manifest(tmp_path: Path) -> None:
    """Also where it takes that place between a look and the removal."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    complete(root, 1).rename(outside)
    planted = folder_of(root, 1, 1)
    planted.symlink_to(outside)
    withdraw(planted)
    for step in (2, 3):
        complete(root, step)
    prune(root, 1, "a", 1)
    assert len(names(outside)) == 3


# ---- which are there


def test_a_folder_without_a_manifest_is_nothing(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    complete(tmp_path, 5)
    later = folder_of(tmp_path, 8, 1)
    later.mkdir()
    write_shard(later / "rank-0", [], {"step": 8})
    found = newest(tmp_path)
    assert found is not None and found.step == 5


def test_what_is_complete_but_old_and_what_never_was_goes(tmp_path: Path) -> None:
    for step in (1, 2, 4):
        complete(tmp_path, step)
    for step in (3, 6):
        folder_of(tmp_path, step, 1).mkdir()
    prune(tmp_path, 2, "a", 1)
    assert names(tmp_path) == [folder_of(tmp_path, step, 1).name for step in (2, 4, 6)]


def test_files_of_another_size_or_place_are_named(tmp_path: Path) -> None:
    path = complete(tmp_path, 1) / "rank-1"
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(CheckpointError, match="rank-1 has"):
        newest(tmp_path)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank-1 is not there.*share"):
        newest(tmp_path)
    path.symlink_to("rank-0")
    with pytest.raises(CheckpointError, match="rank-1 is no regular file"):
        newest(tmp_path)


# ---- runs and incarnations


def test_another_runs_checkpoints_are_never_pruned(tmp_path: Path) -> None:
    for incarnation, run in ((1, "a"), (2, "b")):
        for step in (1, 2):
            complete(tmp_path, step * 10 ** (incarnation - 1), incarnation, run)
    prune(tmp_path, 1, "b", 2)
    assert names(tmp_path) == [
        "step-000000001-incarnation-1",
        "step-000000002-incarnation-1",
        "step-000000020-incarnation-2",
    ]


def test_checkpoints_of_two_runs_are_not_chosen_from(tmp_path: Path) -> None:
    complete(tmp_path, 1, run="a")
    complete(tmp_path, 7, incarnation=2, run="b")
    with pytest.raises(
        CheckpointError, match=r"several runs: step-000000001-\S+ is of run a, .* of run b; move"
    ):
        newest(tmp_path)


def test_what_the_user_has_put_there_stays_and_is_not_read(tmp_path: Path) -> None:
    folder = complete(tmp_path, 3)
    kept = ["step-000000003-incarnation-1.bak", "step-000000009-best", "step-3", "notes.txt"]
    for name in kept[:3]:
        shutil.copytree(folder, tmp_path / name)
    (tmp_path / kept[3]).write_text("mine")
    complete(tmp_path, 6)
    prune(tmp_path, 1, "a", 1)
    assert set(names(tmp_path)) == {*kept, "step-000000006-incarnation-1"}
    found = newest(tmp_path)
    assert found is not None and found.step == 6


def test_a_late_start_neither_spoils_nor_removes_what_a_later_one_wrote(tmp_path: Path) -> None:
    first = claim(tmp_path)
    complete(tmp_path, 500, first)
    late = folder_of(tmp_path, 1000, first)
    late.mkdir()
    late_file = ("rank-0", write_shard(late / "rank-0", [], {"step": 1000}))

    second = claim(tmp_path)
    assert second > first
    complete(tmp_path, 600, second)
    complete(tmp_path, 1000, second)
    before = names(folder_of(tmp_path, 1000, second))
    # Rank 0 of the first start wakes up.
    with pytest.raises(
        CheckpointError, match=r"a later start of a training, incarnation 2, .* incarnation 1,"
    ):
        commit(tmp_path, 1000, first, "a", [late_file])
    prune(tmp_path, 1, "a", first)
    assert names(folder_of(tmp_path, 1000, second)) == before
    assert folder_of(tmp_path, 600, second).exists()
    found = newest(tmp_path)
    assert found is not None and found.folder == folder_of(tmp_path, 1000, second)


def test_a_late_start_that_had_looked_already_does_not_outrank_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = claim(tmp_path), claim(tmp_path)
    complete(tmp_path, 600, second)
    monkeypatch.setattr("gradlane.training.checkpoints.folder.check_claim", lambda *_: None)
    complete(tmp_path, 1000, first)
    found = newest(tmp_path)
    assert found is not None and found.step == 600
    prune(tmp_path, 1, "a", second)
    assert names(tmp_path) == ["incarnation-2", "step-000000600-incarnation-2"]


def test_no_two_starts_claim_the_same_number(tmp_path: Path) -> None:
    claimed: list[int] = []
    threads = [
        threading.Thread(target=lambda: claimed.append(claim(tmp_path)), daemon=True)
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(set(claimed)) == 8
    with pytest.raises(CheckpointError, match="later start"):
        check_claim(tmp_path, min(claimed))
    check_claim(tmp_path, max(claimed))
    assert f"incarnation-{max(claimed)}" in names(tmp_path)


def test_a_copy_without_the_claim_goes_on_counting(tmp_path: Path) -> None:
    complete(tmp_path, 5, incarnation=41)
    assert claim(tmp_path) == 42
    assert claim(tmp_path) == 43
    assert names(tmp_path) == ["incarnation-43", "step-000000005-incarnation-41"]


# ---- manifests of strangers

HOSTILE_NAMES = [
    "../outside",
    "/etc/passwd",
    "sub/rank-0",
    "..",
    ".",
    "",
    ".hidden",
    "a\0b",
    "rank-0\n",
    "rank\\0",
]


def rewrite(folder: Path, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_names_in_manifests_stay_inside_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"1234")
    folder = complete(tmp_path, 1)
    rewrite(folder, files=[[name, 4]])
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged.*not in its folder"):
        newest(tmp_path)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"files": []}, "names no file"),
        ({"files": [["rank-0", 1], ["rank-0", 1]]}, "a file twice"),
        ({"files": {"rank-0": 1}}, "list of files"),
        ({"files": [["rank-0", True]]}, "list of files"),
        ({"files": [["rank-0", 1.5]]}, "list of files"),
        ({"files": [["rank-0"]]}, "list of files"),
        ({"files": ["ab"]}, "list of files"),
        ({"step": 2}, "it is of step 2, its folder of step 1"),
        ({"step": True}, "it is of step True"),
        ({"run": 5}, "it has no run"),
        ({"version": 1}, "has version 1, and this gradlane reads versions 2 and 3: resume with"),
        ({"version": None}, "has version None"),
    ],
)
def test_manifests_that_lie_are_named(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    rewrite(complete(tmp_path, 1), **changes)
    with pytest.raises(CheckpointError, match=text):
        newest(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"step": NaN}', b"[" * 100_000, b'{"step":1,"step":2}'],
)
def test_manifests_that_are_none_are_named(tmp_path: Path, content: bytes) -> None:
    (complete(tmp_path, 1) / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="step-000000001"):
        newest(tmp_path)


def test_a_checkpoint_of_the_format_before_is_refused_by_name(tmp_path: Path) -> None:
    folder = complete(tmp_path, 1).rename(tmp_path / "step-000000001")
    rewrite(folder, version=1)
    with pytest.raises(
        CheckpointError, match=r"step-000000001 has version 1.*reads versions 2 and 3"
    ):
        newest(tmp_path)
    prune(tmp_path, 1, "a", 5)
    assert folder.exists()


def test_a_folder_that_leads_elsewhere_is_neither_read_nor_emptied(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    complete(root, 1).rename(outside)
    (root / "step-000000001-incarnation-1").symlink_to(outside)
    with pytest.raises(CheckpointError, match="its folder is a link to another place"):
        newest(root)
    for step in (2, 3):
        complete(root, step)
    prune(root, 1, "a", 1)
    assert len(names(outside)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "incarnation-999999999999999999",
        "incarnation-1000000000",
        "step-000000001-incarnation-999999999999999999",
        "incarnation-" + "9" * 200,
    ],
)
def test_numbers_that_no_start_can_have_stop_no_start(tmp_path: Path, name: str) -> None:
    planted = tmp_path / name
    if name.startswith("step"):
        planted.mkdir()
    else:
        planted.touch()
    assert [claim(tmp_path), claim(tmp_path)] == [1, 2]
    check_claim(tmp_path, 2)
    assert newest(tmp_path) is None and name in names(tmp_path)


@pytest.mark.parametrize("kind", ["file", "link", "dangling", "pipe", "kept open"])
def test_what_cannot_be_removed_stops_no_removal_of_others(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise all later checkpoints would stay, until the disk is full."""
    root = tmp_path / "root"
    root.mkdir()
    planted = folder_of(root, 1, 1)
    if kind == "file":
        planted.touch()
    elif kind == "link":
        complete(root, 1).rename(tmp_path / "outside")
        planted.symlink_to(tmp_path / "outside")
    elif kind == "dangling":
        planted.symlink_to(tmp_path / "nothing")
    elif kind == "pipe":
        os.mkfifo(planted)
    else:
        complete(root, 1)
        unlink = os.unlink

        def busy(name: Any, *, dir_fd: int | None = None) -> None:
            if dir_fd is not None and os.path.samestat(os.fstat(dir_fd), planted.stat()):
                raise OSError(errno.EBUSY, "Device or resource busy")
            unlink(name, dir_fd=dir_fd)

        monkeypatch.setattr(os, "unlink", busy)
    for step in (2, 3, 4):
        complete(root, step)
        prune(root, 1, "a", 1)
    assert names(root) == [folder_of(root, step, 1).name for step in (1, 4)]


@pytest.mark.parametrize(
    "name",
    [
        "incarnation-\u0663",
        "incarnation-\u00b2",
        "incarnation--5",
        "incarnation-+5",
        "incarnation-5 ",
        "incarnation-5\n",
        "incarnation-1_0",
        "INCARNATION-5",
        "step-000000001-incarnation-\u0663",
        "step-000000001-incarnation-5\n",
        "step--00000001-incarnation-5",
    ],
)
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_names_that_only_look_like_ours_are_left_alone(
    tmp_path: Path, name: str, kind: str
) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    if kind == "file":
        (root / name).touch()
    elif kind == "folder":
        (root / name).mkdir()
    else:
        (root / name).symlink_to(outside)
    assert [claim(root), claim(root)] == [1, 2]
    complete(root, 1, 2)
    complete(root, 2, 2)
    prune(root, 1, "a", 2)
    found = newest(root)
    assert found is not None and found.step == 2
    assert names(root) == sorted([name, "incarnation-2", folder_of(root, 2, 2).name])


def test_the_last_number_of_all_is_named(tmp_path: Path) -> None:
    (tmp_path / "incarnation-999999999").touch()
    with pytest.raises(OSError, match=r"incarnation 999999999, which no start can be: remove it"):
        claim(tmp_path)
