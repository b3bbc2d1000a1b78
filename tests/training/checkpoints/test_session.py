"""Sessions that are stopped and go on: with the same bits in a world of the same size."""

from __future__ import annotations

import collections
import contextlib
import decimal
import enum
import errno
import os
import re
import shutil
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gradlane
from gradlane.errors import CheckpointError, UsageError
from gradlane.training.carrier import DirectCarrier
from gradlane.training.checkpoints import manager
from gradlane.training.checkpoints.folder import newest
from gradlane.training.checkpoints.shard import write_shard
from gradlane.training.core import load_core
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.training.checkpoints.kills import check_kills
from tests.training.checkpoints.training import Model, batch_loss, train
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.waiting import eventually

pytestmark = needs_core

LAST = 12


def run(
    folder: Path, world_size: int, last: int, options: dict[str, Any], **settings: Any
) -> list[tuple[int, list[float]]]:
    return run_ranks(
        world_size,
        lambda session: train(session, last, **settings),
        summary=False,
        slice_elems=700,
        checkpoint_folder=folder,
        **{"checkpoint_every": 3, **options},
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


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
    assert names(tmp_path) == [
        "incarnation-1",
        "step-000000009-incarnation-1",
        "step-000000012-incarnation-1",
    ]
    found = newest(tmp_path)
    assert found is not None and len(found.files) == 2


def test_a_checkpoint_is_finished_when_the_session_has_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_shard
    closed = threading.Semaphore(0)

    def late(*arguments: Any) -> int:
        assert closed.acquire(timeout=60)
        return write(*arguments)

    def slow(call: Any) -> Any:
        def called(self: BoundedStore, *arguments: Any, on_poll: Any = None, **options: Any) -> Any:
            if on_poll is not None and threading.current_thread().name == "gradlane-checkpoint":
                on_poll()
            return call(self, *arguments, on_poll=on_poll, **options)

        return called

    monkeypatch.setattr(manager, "write_shard", late)
    for name in ("set", "read_first", "increment"):
        monkeypatch.setattr(BoundedStore, name, slow(getattr(BoundedStore, name)))
    # The channel has ended, and the scope would still look at it.
    monkeypatch.setattr(RendezvousScope, "mark_closed", lambda self: closed.release())
    run(tmp_path, 2, 3, {})
    found = newest(tmp_path)
    assert found is not None and found.step == 3


def test_training_goes_on_where_a_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = write_shard

    def sometimes(path: Path, pieces: Any, facts: dict[str, Any], *more: Any) -> int:
        if facts["step"] == 3 and facts["rank"] == 1:
            raise OSError(errno.EIO, "Input/output error")
        return write(path, pieces, facts, *more)

    monkeypatch.setattr(manager, "write_shard", sometimes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = run(tmp_path, 2, 7, {})
    assert [len(losses) for _, losses in results] == [7, 7]
    assert any("step 3 is not complete" in str(one.message) for one in caught)
    found = newest(tmp_path)
    assert found is not None and found.step == 6


@pytest.mark.parametrize("lost", ["checkpoint/2/2", "checkpoint/2/folder"])
def test_words_that_are_gone_from_the_store_end_a_checkpoint_and_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Somebody deletes them; whoever waits is waited for in the next step."""
    put = RendezvousScope.put

    def deleted(self: RendezvousScope, key: str, value: bytes | str) -> None:
        if key != lost:
            put(self, key, value)

    monkeypatch.setattr(RendezvousScope, "put", deleted)
    options = {"progress_timeout_s": 5.0, "connect_timeout_s": 30.0, "checkpoint_every": 2}
    with pytest.warns(RuntimeWarning, match=r"step 2 is not complete.*progress_timeout_s"):
        results = run(tmp_path, 3, 5, options)
    assert [len(losses) for _, losses in results] == [5, 5, 5]
    found = newest(tmp_path)
    assert found is not None and found.step == 4


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[None]:
    """Mount a file system in memory of a few bytes."""
    options = ["-o", f"size={size},nr_inodes=60"]
    subprocess.run(["mount", "-t", "tmpfs", *options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
@pytest.mark.parametrize("ranks", [1, 3])
def test_checkpoints_that_fail_on_a_full_disk_leave_nothing_and_later_ones_are_complete(
    tmp_path: Path, ranks: int
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with small_disk(disk, 1 << 20):
        root, ballast = disk / "run", disk / "ballast"
        seen: list[str] = []
        one_rank_at_a_time = threading.Lock()

        def make_room(step: int) -> None:
            # Several ranks of this process come here.
            with one_rank_at_a_time:
                if step == 6 and ballast.exists():
                    seen.extend(names(root))
                    ballast.unlink()

        root.mkdir()
        with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(root, ranks, 9, {"checkpoint_every": 2}, after_step=make_room)
        assert any("No space left" in str(one.message) for one in caught)
        folders = [name for name in names(root) if name.startswith("step-")]
        assert all((root / name / "manifest.json").exists() for name in folders), folders
        assert any("step-000000008" in name for name in folders)
        # One may be under way.
        assert len([name for name in seen if name.startswith("step-")]) <= 1


@pytest.mark.parametrize("kind", ["link", "link to nothing", "file"])
def test_what_was_planted_in_the_place_of_a_checkpoint_is_not_written_through(
    tmp_path: Path, kind: str
) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    planted = root / "step-000000006-incarnation-1"

    def plant(step: int) -> None:
        # The number of the start is known from its first checkpoint.
        # Several ranks of this process come here.
        with contextlib.suppress(FileExistsError):
            if step == 5 and kind == "file":
                with planted.open("x") as file:
                    file.write("the user's")
            elif step == 5:
                planted.symlink_to(outside)

    if kind == "link":
        outside.mkdir()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(root, 2, 10, {}, after_step=plant)
    assert any("step 6 is not complete" in str(one.message) for one in caught)
    assert names(outside) == [] if kind == "link" else not outside.exists()
    found = newest(root)
    assert found is not None and found.step == 9
    assert kind != "file" or planted.read_text() == "the user's"


@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_damage_is_named_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late_s: float
) -> None:
    """Also on one that is still in `prepare()` when the first one has found it."""
    run(tmp_path, 2, 3, {})
    found = newest(tmp_path)
    assert found is not None
    path = found.folder / found.files[1][0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    broadcast = DirectCarrier.broadcast_initial

    def late(self: DirectCarrier, entries: Any, first: bool, **more: Any) -> None:
        if not first:
            time.sleep(late_s)
        broadcast(self, entries, first, **more)

    monkeypatch.setattr(DirectCarrier, "broadcast_initial", late)
    errors = run_ranks(
        2,
        lambda session: train(session, LAST),
        checkpoint_folder=tmp_path,
        expect_errors=True,
    )
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert path.name in str(error) and "checksum" in str(error)


def test_restore_needs_a_folder_a_model_and_the_right_moment(tmp_path: Path) -> None:
    def without(session: gradlane.Session) -> None:
        with pytest.raises(UsageError, match="checkpoints="):
            session.restore()

    def early(session: gradlane.Session) -> None:
        with pytest.raises(UsageError, match="after prepare"):
            session.restore()
        train(session, 1)
        with pytest.raises(UsageError, match="before the first step"):
            session.restore()
        other = Model()
        with pytest.raises(UsageError, match="one model"):
            session.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1))

    run_ranks(1, without, summary=False)
    run_ranks(1, early, summary=False, checkpoint_folder=tmp_path)


# ---- values that come back, and values that are refused


class Extra(Model):
    """A model with a state that is no tensor, and versions of its own."""

    _version = 7
    extra: Any = None
    loaded_version: int | None = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.loaded_version = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def go_on(
    folder: Path,
    last: int,
    change: Callable[[Extra, torch.optim.Optimizer], None] = lambda model, optimizer: None,
    *,
    restores: bool = True,
    look: Callable[[Extra, Any], Any] = lambda model, optimizer: None,
    expect_errors: bool = False,
    **options: Any,
) -> list[Any]:
    """Train on two ranks to a step; what `look` found after restoring, and where they began."""

    def body(session: gradlane.Session) -> Any:
        model: Any = seeded(Extra)
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        change(model, plain)
        model, optimizer = session.prepare(model, plain)
        begun = session.restore() if restores else 0
        seen = look(model, optimizer)
        for step in range(begun + 1, last + 1):
            batch_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return begun, seen

    settings = {"checkpoint_folder": folder, "checkpoint_every": 3, "summary": False, **options}
    return run_ranks(2, body, expect_errors=expect_errors, **settings)


class Color(enum.IntEnum):
    RED = 1


Pair = collections.namedtuple("Pair", "first second")
COMES_BACK: dict[str, tuple[Any, Any]] = {
    "float64": (np.float64(0.1), 0.1),
    "float32": (np.float32(0.1), float(np.float32(0.1))),
    "int64": (np.int64(7), 7),
    "bool_": (np.bool_(True), True),
    "str_": (np.str_("text"), "text"),
    "keys": ({1: "int", "1": "text", (2, "a"): None}, {1: "int", "1": "text", (2, "a"): None}),
    "numpy_key": ({np.int64(3): 1}, {3: 1}),
    "marker": ({"__tensor__": 1, "tensor": ["a"]}, {"__tensor__": 1, "tensor": ["a"]}),
    "infinite": ((float("inf"), -0.0), (float("inf"), -0.0)),
    "large": (10**400, 10**400),
    "set": ({1, 2}, {1, 2}),
    "dtype": (torch.bfloat16, torch.bfloat16),
}


@pytest.mark.parametrize("name", COMES_BACK)
@pytest.mark.parametrize("where", ["settings", "extra"])
def test_values_come_back_as_they_were_or_as_pythons_own(
    tmp_path: Path, name: str, where: str
) -> None:
    value, expected = COMES_BACK[name]

    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["note"] = value if where == "settings" else None
        model.extra = value if where == "extra" else None

    def look(model: Extra, optimizer: Any) -> Any:
        return optimizer.param_groups[0]["note"], model.extra, model.loaded_version

    go_on(tmp_path, 3, change)
    for begun, (note, extra, version) in go_on(tmp_path, 4, look=look):
        found = note if where == "settings" else extra
        assert begun == 3 and version == 7
        assert (found, type(found), repr(found)) == (expected, type(expected), repr(expected))


def test_a_learning_rate_of_numpys_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = np.float64(0.05)

    def look(model: Extra, optimizer: Any) -> Any:
        return type(optimizer.param_groups[0]["lr"]), optimizer.param_groups[0]["lr"]

    go_on(tmp_path, 3, change)
    assert [seen for _, seen in go_on(tmp_path, 4, look=look)] == [(float, 0.05)] * 2


def test_groups_that_share_a_learning_rate_share_it_after_restoring(tmp_path: Path) -> None:
    """As after `torch.save`, `torch.load` and `load_state_dict`: one `mul_` is of all groups."""

    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        rate = torch.tensor(0.05)
        (group,) = optimizer.param_groups
        optimizer.add_param_group({"params": [group["params"].pop()], "lr": rate, "foreach": False})
        group.update(lr=rate, foreach=False)

    def look(model: Extra, optimizer: Any) -> Any:
        optimizer.param_groups[0]["lr"].mul_(0.5)
        return [float(group["lr"]) for group in optimizer.param_groups]

    go_on(tmp_path, 3, change)
    half = float(torch.tensor(0.05) * 0.5)
    assert go_on(tmp_path, 4, change, look=look) == [(3, [half, half])] * 2


REFUSED: dict[str, tuple[Any, str]] = {
    "Decimal": (decimal.Decimal("0.1"), r" is a decimal\.Decimal,"),
    "IntEnum": (Color.RED, r" is a tests\.training\.checkpoints\.test_session\.Color,"),
    "function": (len, " is a builtin_function_or_method,"),
    "array": (np.ones(3), r" is a numpy\.ndarray,"),
    "longdouble": (np.longdouble(1), r" is a numpy\.longdouble,"),
    "datetime64": (np.datetime64(1, "ns"), r" is a numpy\.datetime64,"),
    "object": (object(), " is a object,"),
    "namedtuple": (Pair(1, 2), r" is a tests\.training\.checkpoints\.test_session\.Pair,"),
    "defaultdict": (collections.defaultdict(int), r" is a collections\.defaultdict,"),
    "sparse": (torch.eye(2).to_sparse(), r" is a tensor of the layout torch\.sparse_coo"),
    "deep": ({1: [2, (3, decimal.Decimal(1))]}, r"\[1\]\[1\]\[1\] is a decimal\.Decimal,"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("where", ["settings", "extra"])
def test_values_that_could_not_come_back_are_refused_when_preparing(
    tmp_path: Path, name: str, where: str
) -> None:
    value, text = REFUSED[name]

    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        if where == "settings":
            optimizer.param_groups[0]["note"] = value
        else:
            model.extra = {"note": value}

    path = (
        r"optimizer\['param_groups'\]\[0\]" if where == "settings" else (r"model\['_extra_state'\]")
    )
    for error in go_on(tmp_path, 3, change, expect_errors=True):
        assert isinstance(error, CheckpointError)
        assert re.search(rf"{path}\['note'\]{text}", str(error)), str(error)
    assert names(tmp_path) == []


def test_a_value_that_appears_later_is_refused_with_its_path_on_every_rank(tmp_path: Path) -> None:
    """The checkpoint before stays."""

    def body(session: gradlane.Session) -> None:
        model = seeded(Model)
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = session.prepare(model, plain)
        session.restore()
        for step in range(1, 10):
            batch_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                session.synchronize()
                optimizer.state[next(iter(model.parameters()))]["note"] = decimal.Decimal(1)

    errors = run_ranks(2, body, checkpoint_folder=tmp_path, checkpoint_every=3, expect_errors=True)
    for error in errors:
        assert isinstance(error, CheckpointError)
        assert (
            "no checkpoint of step 6 can be written: optimizer['state'][0]['note'] is a decimal"
            in str(error)
        ), error
    found = newest(tmp_path)
    assert found is not None and found.step == 3


def test_names_that_look_like_paths_or_numbers_are_kept_apart(tmp_path: Path) -> None:
    value = {
        "a/b": {"c": torch.tensor([1.0])},
        "a": {"b/c": torch.tensor([2.0])},
        1: torch.tensor([3.0]),
        "1": torch.tensor([4.0]),
        "~1": torch.tensor([5.0]),
        "/": torch.tensor([6.0]),
    }

    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        model.extra = value

    go_on(tmp_path, 3, change)
    for _, found in go_on(tmp_path, 4, look=lambda model, optimizer: model.extra):
        assert repr(found) == repr(value)


ODD_TENSORS = [
    torch.tensor([1, 65535], dtype=torch.uint16),
    torch.tensor([1, 2**63], dtype=torch.uint64),
    torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j, 3j]).conj(),
    torch.ones(3).expand(2, 3),
    torch.ones(0, 4),
    torch.tensor(True),
]


def test_tensors_of_every_dtype_and_layout_come_back(tmp_path: Path) -> None:
    def change(model: Extra, optimizer: torch.optim.Optimizer) -> None:
        model.extra = list(ODD_TENSORS)

    go_on(tmp_path, 3, change)
    for _, found in go_on(tmp_path, 4, look=lambda model, optimizer: model.extra):
        for one, expected in zip(found, ODD_TENSORS, strict=True):
            assert one.dtype is expected.dtype and one.shape == expected.shape
            same = one.view(torch.uint8) if one.dtype is torch.float8_e4m3fn else one
            wanted = expected.view(torch.uint8) if same is not one else expected
            assert torch.equal(same, wanted)


# ---- runs


def test_a_second_run_in_an_old_folder_is_refused_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    go_on(tmp_path, 9)
    before = names(tmp_path)
    errors = go_on(tmp_path, 9, restores=False, expect_errors=True)
    assert any(isinstance(error, CheckpointError) for error in errors)
    for error in errors:
        text = str(error)
        assert "has 3 checkpoints of another run, the last one step-000000009-" in text
        assert "call session.restore() after prepare()" in text
    assert names(tmp_path) == before
    assert [begun for begun, _ in go_on(tmp_path, 10)] == [9, 9]


def test_a_run_that_catches_a_damaged_checkpoint_and_starts_anew_is_refused(tmp_path: Path) -> None:
    go_on(tmp_path, 6)
    found = newest(tmp_path)
    assert found is not None
    (found.folder / "manifest.json").write_text("{")
    before = names(tmp_path)

    def body(session: gradlane.Session) -> None:
        model = seeded(Model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, prepared = session.prepare(model, optimizer)
        with pytest.raises(CheckpointError, match="damaged"):
            session.restore()
        batch_loss(model, session.rank, 1).backward()  # type: ignore[no-untyped-call]
        prepared.step()

    errors = run_ranks(2, body, checkpoint_folder=tmp_path, expect_errors=True)
    assert all("2 checkpoints of another run" in str(error) for error in errors), errors
    assert names(tmp_path) == before


def test_a_run_keeps_its_id_over_restarts_and_two_runs_have_two(tmp_path: Path) -> None:
    runs = []
    for folder, last in (("one", 3), ("one", 6), ("two", 3)):
        go_on(tmp_path / folder, last)
        found = newest(tmp_path / folder)
        assert found is not None
        runs.append(found.run)
    assert runs[0] == runs[1] != runs[2]
    assert names(tmp_path / "one") == [
        "incarnation-2",
        "step-000000003-incarnation-1",
        "step-000000006-incarnation-2",
    ]


def test_files_of_another_run_are_not_taken_for_this_ones(tmp_path: Path) -> None:
    for name in ("one", "two"):
        go_on(tmp_path / name, 3)
    found, other = newest(tmp_path / "one"), newest(tmp_path / "two")
    assert found is not None and other is not None and found.files == other.files
    shutil.copy(other.folder / other.files[1][0], found.folder)
    for error in go_on(tmp_path / "one", 4, expect_errors=True):
        assert isinstance(error, CheckpointError)
        assert f"{found.files[1][0]} is damaged: it is of another checkpoint" in str(error)


def test_a_start_that_was_replaced_says_so_and_its_checkpoints_do_not_count(tmp_path: Path) -> None:
    """Another job resumes in the folder while this one is still alive."""

    def between(step: int) -> None:
        # On rank 0, whose checkpoint of step 3 is being written or complete; the last is at 6.
        if step == 4:
            assert eventually(lambda: newest(tmp_path) is not None, 30.0)
            go_on(tmp_path, 6, checkpoint_every=2)

    def body(session: gradlane.Session) -> Any:
        after = between if session.rank == 0 else lambda step: None
        model = seeded(Extra)
        plain = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer = session.prepare(model, plain)
        session.restore()
        for step in range(1, 7):
            batch_loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            after(step)
        session.synchronize()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        core: Any = load_core()
        run_ranks(2, body, core=core, checkpoint_folder=tmp_path, checkpoint_every=3, summary=False)
    texts = [str(one.message) for one in caught]
    assert any(
        "step 6 is not complete" in text and "a later start of a training, incarnation 2" in text
        for text in texts
    ), texts
    found = newest(tmp_path)
    assert found is not None and found.folder.name == "step-000000006-incarnation-2"


def test_ranks_killed_at_random_moments_leave_the_last_checkpoint(
    programs: ForkedPrograms, tmp_path: Path
) -> None:
    check_kills(programs, tmp_path / "checkpoints", 3, {"update": "server"})
