"""Checkpoints of a session's model, taken every so many steps and restored in a world of any size.

All ranks take one after the same training step, between two steps. What is written is copied then,
each rank its share; a thread writes it while training goes on. Rank 0's thread makes the checkpoint
complete when all ranks have said that theirs is on the disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gradlane.adapter.residual_state import MEAN_OF
from gradlane.checkpoints.folder import (
    Manifest,
    check_files,
    commit,
    file_name,
    folder_of,
    newest,
    prune,
    withdraw,
)
from gradlane.checkpoints.shard import Piece, read_shard, write_shard
from gradlane.checkpoints.tree import Leaf, assemble, leaves, pieces_of, put_together, take_apart
from gradlane.errors import CheckpointError, GradlaneError, UsageError
from gradlane.ranks.environment import Place
from gradlane.ranks.patience import Patience
from gradlane.ranks.rendezvous import Meeting

if TYPE_CHECKING:
    from gradlane.adapter.prepared import Prepared

_STRUCTURE = "structure"
_POLL_S = 0.02
_WORDS_KEPT = 8
"""Words to rank 0 that stay in the store: it never is so many checkpoints behind another rank."""


class Checkpoints:
    """Takes checkpoints of one model, and restores them."""

    def __init__(self, root: Path, every: int, keep: int, place: Place, timeout_s: float) -> None:
        """Write into a folder, which all ranks share.

        Args:
            root: the folder; it is made if it is not there.
            every: training steps from one checkpoint to the next.
            keep: how many complete ones are kept.
            place: this rank's.
            timeout_s: how long rank 0 waits for the other ranks' files.

        Raises:
            ValueError: the folder cannot be made.
        """
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"checkpoint is {root}, which cannot be made: {error}") from error
        self._root = root
        self._every = every
        self._keep = keep
        self._place = place
        self._timeout_s = timeout_s
        self._prepared: Prepared | None = None
        self._meeting: Meeting | None = None
        self._run = ""
        self._before = 0
        self._last = 0
        self._restores = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failures: deque[str] = deque()
        self._told: deque[tuple[Meeting, str]] = deque()

    def follow(self, prepared: Prepared, meeting: Meeting) -> None:
        """Take checkpoints of a model from now on, also of one that was connected anew.

        Raises:
            UsageError: it is a second model.
        """
        if self._prepared is not None:
            if self._prepared.model is not prepared.model:
                raise UsageError(
                    "checkpoint= is for sessions with one model: prepare one module that holds "
                    "all, such as nn.ModuleDict, or save the models yourself"
                )
            self._before += self._prepared.steps.step
        self._prepared, self._meeting = prepared, meeting
        if meeting.place.rank == 0:
            meeting.put("checkpoint/run", secrets.token_hex(4))
        self._run = meeting.get("checkpoint/run", 0).decode()
        prepared.installation.keep_step = self.after_step

    def after_step(self) -> None:
        """Take a checkpoint if it is time to; a collective call after `optimizer.step()`."""
        self._warn()
        assert self._prepared is not None
        step = self._before + self._prepared.steps.step
        if step // self._every == self._last // self._every or self._prepared.steps.join:
            return
        self._last = step
        self.take(step)

    def take(self, step: int) -> None:
        """Copy what this rank writes of a step, and have it written.

        Raises:
            GradlaneError: the session has failed.
        """
        assert self._prepared is not None and self._meeting is not None
        place = self._place
        state = self._prepared.whole_state()
        own = {kind: state["session"].pop(kind) for kind in MEAN_OF}
        for key in ("rank", "world_size"):
            del state["session"][key]
        tree, tensors = take_apart(state)
        apart = {f"/model/{name}" for name in self._prepared.buffers_apart}
        pieces = pieces_of(tensors, place.rank, place.world_size, apart)
        for kind, values in own.items():
            for name, value in values.items():
                pieces.append(Piece(f"{kind}/{place.rank}/{name}", 0, value.reshape(-1).clone()))
        if place.rank == 0:
            room = io.BytesIO()
            torch.save(tree, room)
            content = torch.frombuffer(bytearray(room.getvalue()), dtype=torch.uint8)
            pieces.append(Piece(_STRUCTURE, 0, content))
        # With two under way the memory of both would be held, and the later might be first.
        self._join()
        self._thread = threading.Thread(
            target=self._write, args=(step, pieces, self._meeting), name="gradlane-checkpoint"
        )
        self._thread.daemon = True
        self._thread.start()

    def restore(self) -> int:
        """Give the model, its optimizer and the session the state of the last complete checkpoint.

        Returns:
            The training steps that it holds, 0 if there is none.

        Raises:
            UsageError: no model is prepared, or it has trained already.
            CheckpointError: the checkpoint is damaged, of another version, or another model's.
        """
        if self._prepared is None or self._meeting is None or self._prepared.steps.step > 0:
            raise UsageError("call session.restore() after prepare() and before the first step")
        manifest = self._agreed_manifest(self._meeting)
        if manifest is None:
            return 0
        shards = [read_shard(manifest.folder / name) for name, _ in manifest.files]
        pieces = [piece for _, own in shards for piece in own]
        steps = {facts["step"] for facts, _ in shards}
        if steps != {manifest.step}:
            raise CheckpointError(f"{manifest.folder} has files of steps {sorted(steps)}")
        structure = next((piece for piece in pieces if piece.name == _STRUCTURE), None)
        if structure is None:
            raise CheckpointError(f"{manifest.folder} has no structure: rank 0's file lacks it")
        room = io.BytesIO(structure.values.numpy().tobytes())
        tree = torch.load(room, weights_only=True)
        state = put_together(tree, assemble(leaves(tree), pieces))
        own = {kind: self._own(kind, tree, pieces) for kind in MEAN_OF}
        state["session"].update(rank=self._place.rank, world_size=len(shards), **own)
        try:
            self._prepared.load_whole_state(state)
        except (ValueError, RuntimeError, KeyError) as error:
            if isinstance(error, GradlaneError):
                raise
            raise CheckpointError(
                f"the checkpoint {manifest.folder} does not fit this model and optimizer: {error}"
            ) from error
        self._before = self._last = manifest.step
        return manifest.step

    def close(self) -> None:
        """Wait until the last checkpoint is complete, or has failed."""
        self._join()
        self._warn()
        if self._place.rank == 0 and self._meeting is not None:
            # Who has said goodbye has read them.
            restores = [f"checkpoint/restore/{number + 1}" for number in range(self._restores)]
            for key in ("checkpoint/run", *restores):
                self._meeting.drop(key)

    def stop(self) -> None:
        """Wait for nobody any more."""
        self._stopping.set()

    def _agreed_manifest(self, meeting: Meeting) -> Manifest | None:
        """Return the checkpoint that rank 0 has found; the same on all ranks."""
        self._restores += 1
        key = f"checkpoint/restore/{self._restores}"
        if meeting.place.rank == 0:
            try:
                found = newest(self._root)
            except CheckpointError as error:
                meeting.put(key, json.dumps({"error": str(error)}))
                raise
            word: dict[str, Any] = {}
            if found is not None:
                word = {"folder": found.folder.name, "step": found.step, "files": found.files}
            meeting.put(key, json.dumps(word))
            return found
        word = json.loads(meeting.get(key, 0))
        if "error" in word:
            raise CheckpointError(f"rank 0: {word['error']}")
        if not word:
            return None
        files = tuple((name, size) for name, size in word["files"])
        manifest = Manifest(self._root / word["folder"], word["step"], files)
        check_files(manifest)
        return manifest

    def _own(self, kind: str, tree: Any, pieces: list[Piece]) -> dict[str, torch.Tensor]:
        """Return what a rank of this number had of its own, where one wrote.

        Args:
            kind: what it is, a key of `MEAN_OF`.
            tree: the structure of the checkpoint.
            pieces: all that is in its files.
        """
        prefix = f"{kind}/{self._place.rank}/"
        means: Mapping[str, Any] = tree["session"].get(MEAN_OF[kind], {})
        shapes: dict[str, Leaf] = {
            name: leaf for name, part in means.items() for leaf in leaves(part)
        }
        return {
            name: piece.values.view(shapes[name].shape)
            for piece in pieces
            if piece.name.startswith(prefix)
            for name in (piece.name.removeprefix(prefix),)
        }

    # ---- in the thread

    def _write(self, step: int, pieces: list[Piece], meeting: Meeting) -> None:
        place = self._place
        name = file_name(place.rank, place.world_size, self._run)
        try:
            folder = folder_of(self._root, step)
            folder.mkdir(parents=True, exist_ok=True)
            facts = {"step": step, "rank": place.rank, "world_size": place.world_size}
            word: dict[str, Any] = {
                "file": name,
                "bytes": write_shard(folder / name, pieces, facts),
            }
        except Exception as error:
            word = {"error": f"rank {place.rank} cannot write: {type(error).__name__}: {error}"}
            self._failures.append(f"the checkpoint of step {step} is not complete: {word['error']}")
        try:
            key = f"checkpoint/{step}/{place.rank}"
            meeting.put(key, json.dumps(word))
            self._told.append((meeting, key))
            if len(self._told) > _WORDS_KEPT:
                # Of a checkpoint that failed rank 0 may have left it there.
                old, its_key = self._told.popleft()
                old.drop(its_key)
            if place.rank == 0:
                self._complete(step, meeting)
        except Exception as error:
            self._failures.append(f"the checkpoint of step {step} is not complete: {error}")
            if place.rank == 0:
                withdraw(self._root, step, self._run)

    def _complete(self, step: int, meeting: Meeting) -> None:
        patience = Patience(self._timeout_s)
        files = []
        for rank in range(self._place.world_size):
            key = f"checkpoint/{step}/{rank}"
            while (said := meeting.peek(key)) is None:
                if self._stopping.is_set() or patience.is_over(_POLL_S):
                    raise CheckpointError(f"rank {rank} has not written its file")
                time.sleep(_POLL_S)
            word = json.loads(said)
            if "error" in word:
                raise CheckpointError(word["error"])
            files.append((word["file"], word["bytes"]))
            meeting.drop(key)
        commit(self._root, step, files)
        prune(self._root, self._keep)

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _warn(self) -> None:
        while self._failures:
            text = self._failures.popleft()
            warnings.warn(
                f"{text}; the training goes on, and the checkpoint before it stays",
                RuntimeWarning,
                stacklevel=2,
            )


def make_checkpoints(
    root: Path | None, every: int, keep: int, place: Place, timeout_s: float
) -> Checkpoints | None:
    """Return what takes a session's checkpoints, or None where none are wanted."""
    if root is None:
        return None
    with contextlib.suppress(OSError):
        root = root.resolve()
    return Checkpoints(root, every, keep, place, timeout_s)
