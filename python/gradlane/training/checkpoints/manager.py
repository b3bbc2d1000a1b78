"""Checkpoints of a session's model, taken every few steps and restored in a world of any size.

All ranks take one after the same training step, between two steps. The state is copied then,
each rank its share; a thread writes it while training goes on. The first rank's thread makes the
checkpoint complete when all ranks have said that theirs is on the disk.

Where training goes on when ranks are lost, a checkpoint is of the members of its step. Without the
file of each it does not become complete; the next one is written by those that are left. A rank
that joins takes over which run it is of, and where its steps stand; a checkpoint under way then is
finished by those that have begun it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradlane.errors import CheckpointError, GradlaneError, RefusedError, UsageError
from gradlane.formats.longer_waits import CONNECT, PROGRESS
from gradlane.formats.serialization.container import Piece
from gradlane.formats.serialization.pieces import assemble, find_structure, structure_piece
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import (
    Leaf,
    UnstorableError,
    flatten,
    leaves,
    tensor_name,
    unflatten,
)
from gradlane.training.checkpoints import folder as folders
from gradlane.training.checkpoints.folder import Manifest, check_files, newest
from gradlane.training.checkpoints.partition import pieces_of
from gradlane.training.checkpoints.shard import damaged, read_shard, write_shard
from gradlane.training.checkpoints.signing import checkpoint_key
from gradlane.training.model.residual_state import MEAN_OF
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.membership import Membership
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.torch_internals import set_versions_of_state, versions_of_state

if TYPE_CHECKING:
    from gradlane.training.model.prepared import PreparedModel

_POLL_S = 0.02
_AFTER_FAILURE_S = 30.0
"""How long to wait for other ranks' files at most when the session has failed."""
_WORDS_KEPT = 16
"""Words of a rank that stay in the store: two a checkpoint, and no rank is eight behind another."""


class CheckpointManager:
    """Takes checkpoints of one model, and restores them."""

    def __init__(
        self,
        root: Path,
        every: int,
        keep: int,
        membership: Membership,
        connect_timeout_s: float,
        progress_timeout_s: float,
        secret: str | None,
        on_event: Callable[[str, str], None],
    ) -> None:
        """Write into a folder, which all ranks share.

        Args:
            root: the folder; it is made if it is not there.
            every: training steps from one checkpoint to the next.
            keep: how many complete ones are kept.
            membership: the ranks that train.
            connect_timeout_s: how long a rank waits for the other ranks' words and files, in
                seconds; half of the progress timeout at most, since training may wait for it.
            progress_timeout_s: how long ranks wait for one that takes no part in a step.
            secret: of the user, which signs checkpoints; None: they are not signed.
            on_event: called, also in another thread, with what has happened and `info` or
                `warning`.

        Raises:
            ValueError: the folder cannot be made or written.
        """
        with contextlib.suppress(OSError):
            root = root.resolve()
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RefusedError(f"checkpoint is {root}, which cannot be made: {error}") from error
        if not os.access(root, os.W_OK | os.X_OK):
            raise RefusedError(f"checkpoint is {root}, which this account may not write")
        self._root = root
        self._every = every
        self._keep = keep
        self._membership = membership
        self._timeout_s = min(connect_timeout_s, progress_timeout_s / 2)
        self._limited_by = CONNECT if self._timeout_s == connect_timeout_s else PROGRESS
        self._key = None if secret is None else checkpoint_key(secret)
        self._on_event = on_event
        self._prepared: PreparedModel | None = None
        self._scope: RendezvousScope | None = None
        self._run = secrets.token_hex(8)
        """Id of the training: rank 0's once the ranks are connected, or of what is restored."""
        self._incarnation = 0
        """Claimed by a first rank with its first checkpoint; 0: not yet."""
        self._others: list[str] = []
        """Complete checkpoints that were in the folder, unless the training goes on from them."""
        self._before = 0
        """Training steps of checkpoints that the model's own count does not have."""
        self._last = 0
        """Step of the last checkpoint that was due."""
        self._joined_after = 0
        """Step of the model after which this rank has just joined; 0: it was there before."""
        self._restores = 0
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._failures: deque[str] = deque()
        self._told: deque[tuple[RendezvousScope, str]] = deque()
        self._lasting: list[tuple[RendezvousScope, str]] = []
        """Keys that rank 0 removes when all ranks have said goodbye."""

    def follow(self, prepared: PreparedModel, scope: RendezvousScope) -> None:
        """Take checkpoints of a model from now on, also of one that was connected anew.

        Raises:
            CheckpointError: it has a value that cannot be stored.
        """
        before = self._prepared
        self._prepared, self._scope = prepared, scope
        if before is None:
            _check_storable(prepared)
            self._joined_after = prepared.steps.step
            if not self._joined_after:
                self._agree_on_run(scope)
        else:
            # It counts its steps anew, but where a rank has joined.
            self._before += before.steps.step - prepared.steps.step
            self._joined_after = 0
        prepared.listeners.subscribe(self.after_step)

    def _agree_on_run(self, scope: RendezvousScope) -> None:
        """Take over which run this is, and whether the folder has others, from rank 0."""
        key = "checkpoint/run"
        if scope.rank_info.rank == 0:
            found = [path.name for path in folders.complete_folders(self._root)]
            scope.put(key, json.dumps([self._run, found]))
            self._lasting.append((scope, key))
        self._run, self._others = json.loads(scope.get(key, 0))

    def state_dict(self) -> dict[str, Any]:
        """Return what a rank that joins the training takes over."""
        return {"run": self._run, "before": self._before, "last": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over where the checkpoints of a training stand that this rank has joined."""
        self._run = str(state_dict["run"])
        self._before, self._last = int(state_dict["before"]), int(state_dict["last"])

    def after_step(self) -> None:
        """Take a checkpoint if it is time to; a collective call after `optimizer.step()`.

        Raises:
            CheckpointError: the folder has another run's checkpoints, or the state has a value that
                cannot be stored; on every rank.
            GradlaneError: the session has failed.
        """
        self._warn()
        assert self._prepared is not None and self._scope is not None
        with self._scope.failing_alike():
            self._take_if_due(self._prepared)

    def _take_if_due(self, prepared: PreparedModel) -> None:
        if self._others:
            raise CheckpointError(
                f"the folder {self._root} has {len(self._others)} checkpoints of another run, the "
                f"last one {self._others[-1]}, and this training does not go on from them: call "
                "session.restore() after prepare() to go on, or give checkpoints= another folder, "
                "or move them away"
            )
        step = self._before + prepared.steps.step
        if step // self._every == self._last // self._every or prepared.steps.in_join:
            return
        self._last = step
        self.take(step)

    def take(self, step: int) -> None:
        """Copy this rank's part of a step's state, and have it written.

        Raises:
            CheckpointError: the state has a value that cannot be stored; the message has its path.
            GradlaneError: the session has failed.
        """
        assert self._prepared is not None and self._scope is not None
        # Of this step, on all ranks alike.
        members, rank = self._membership.members, self._membership.rank
        state = self._prepared.whole_state()
        own = {kind: state["session"].pop(kind) for kind in MEAN_OF}
        for key in ("rank", "world_size"):
            del state["session"][key]
        # Versions of modules, which go with the dictionary and are no part of it.
        state["versions"] = versions_of_state(state["model"])
        state["model"] = dict(state["model"])
        # As torch makes them when it loads them.
        states = state["optimizer"]["state"].items()
        state["optimizer"]["state"] = {
            key: dict(one) if isinstance(one, Mapping) else one for key, one in states
        }
        try:
            # On every rank, so that all end alike where it cannot be stored.
            tree, tensors = flatten(state)
            structure = [structure_piece(tree)] if rank == 0 else []
        except (UnstorableError, FormatError) as error:
            # The one before is complete then.
            self._join()
            raise CheckpointError(
                f"no checkpoint of step {step} can be written: {error}"
            ) from error
        per_rank = {tensor_name(("model", name)) for name in self._prepared.per_rank_buffers}
        pieces = pieces_of(tensors, rank, len(members), per_rank)
        for kind, values in own.items():
            for name, value in values.items():
                pieces.append(Piece(f"{kind}/{rank}/{name}", 0, value.reshape(-1).clone()))
        pieces += structure
        # With two under way the memory of both would be held, and the later might be first.
        self._join()
        # A session that closes meanwhile waits for it.
        scope = self._scope.outlasting_session()
        self._thread = threading.Thread(
            target=self._write,
            args=(step, pieces, scope, members),
            name="gradlane-checkpoint",
        )
        self._thread.daemon = True
        self._thread.start()

    def restore(self) -> int:
        """Give the model, its optimizer and the session the state of the last complete checkpoint.

        A rank that has just joined has the others' state, and reads nothing.

        Returns:
            The training steps that the state holds, 0 if there is no checkpoint.

        Raises:
            UsageError: no model is prepared, or it has trained already.
            CheckpointError: the checkpoint is damaged, of another version, or another model's.
        """
        if (
            self._prepared is None
            or self._scope is None
            or self._prepared.steps.step > self._joined_after
        ):
            raise UsageError("call session.restore() after prepare() and before the first step")
        if self._joined_after:
            return self._before + self._joined_after
        with self._scope.failing_alike():
            return self._restore(self._scope, self._prepared)

    def close(self) -> None:
        """Wait until the last checkpoint is complete, or has failed."""
        self._join()
        self._warn()
        # A rank that has said goodbye has read them.
        for scope, key in self._lasting:
            scope.delete(key)

    def stop(self) -> None:
        """Wait for nobody any more."""
        self._stopping.set()

    def _restore(self, scope: RendezvousScope, prepared: PreparedModel) -> int:
        manifest = self._agreed_manifest(scope)
        if manifest is None:
            self._others = []
            return 0
        shards = list(folders.read_piece_files(manifest, lambda path: read_shard(path, self._key)))
        pieces = [piece for _, own in shards for piece in own]
        try:
            tree = find_structure(pieces)
            tensors = assemble(leaves(tree), pieces)
            state = unflatten(tree, lambda leaf: tensors[leaf.name])
            rank = scope.rank_info.rank
            own = {kind: self._own(kind, rank, state["session"], pieces) for kind in MEAN_OF}
            state["session"].update(rank=rank, world_size=len(shards), **own)
            versions = state["versions"]
        except (FormatError, KeyError, TypeError) as error:
            raise damaged(manifest.folder / manifest.files[0][0], str(error)) from error
        if versions is not None:
            state["model"] = OrderedDict(state["model"])
            set_versions_of_state(state["model"], versions)
        try:
            prepared.load_whole_state(state)
        except (ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, GradlaneError) and not isinstance(error, RefusedError):
                raise
            raise CheckpointError(
                f"the checkpoint {manifest.folder} does not fit this model and optimizer: {error}"
            ) from error
        self._run = manifest.run
        self._others = []
        self._before = self._last = manifest.step
        return manifest.step

    def _agreed_manifest(self, scope: RendezvousScope) -> Manifest | None:
        """Return the checkpoint that rank 0 has found; the same on all ranks."""
        self._restores += 1
        key = f"checkpoint/restore/{self._restores}"
        if scope.rank_info.rank == 0:
            self._lasting.append((scope, key))
            try:
                found = newest(self._root, self._key)
            except CheckpointError as error:
                scope.put(key, json.dumps({"error": str(error)}))
                raise
            word: dict[str, Any] = {}
            if found is not None:
                word = {
                    "folder": found.folder.name,
                    "step": found.step,
                    "run": found.run,
                    "files": found.files,
                }
            scope.put(key, json.dumps(word))
            return found
        word = json.loads(scope.get(key, 0))
        if "error" in word:
            raise CheckpointError(f"rank 0: {word['error']}")
        if not word:
            return None
        folder = folders.named_folder(self._root, word["folder"])
        files = folders.listed_files(word["files"], folder)
        manifest = Manifest(folder, int(word["step"]), str(word["run"]), files)
        check_files(manifest)
        return manifest

    def _own(
        self, kind: str, rank: int, session: Mapping[str, Any], pieces: list[Piece]
    ) -> dict[str, torch.Tensor]:
        """Return what a rank of a number had of its own, where one wrote.

        Args:
            kind: what it is, a key of `MEAN_OF`.
            rank: the number.
            session: the session's part of the state.
            pieces: all that is in its files.
        """
        prefix = f"{kind}/{rank}/"
        means: Mapping[str, torch.Tensor] = session.get(MEAN_OF[kind], {})
        found = {}
        for piece in pieces:
            if piece.name.startswith(prefix):
                name = piece.name.removeprefix(prefix)
                leaf = Leaf(piece.name, tuple(means[name].shape), piece.values.dtype)
                found[name] = assemble([leaf], [piece])[piece.name]
        return found

    # ---- in the thread

    def _write(
        self, step: int, pieces: list[Piece], scope: RendezvousScope, members: tuple[int, ...]
    ) -> None:
        """Write this rank's file; on the first of the members, make the checkpoint complete."""
        own = scope.rank_info.rank
        rank = members.index(own)
        folder: Path | None = None
        try:
            folder = self._agreed_folder(step, scope, members[0])
            name = folders.file_name(rank, len(members))
            facts = {"run": self._run, "step": step, "rank": rank, "world_size": len(members)}
            word: dict[str, Any] = {
                "file": name,
                "bytes": write_shard(folder / name, pieces, facts, self._key),
            }
        except Exception as error:
            word = {"error": f"rank {own} cannot write: {type(error).__name__}: {error}"}
            self._failures.append(f"the checkpoint of step {step} is not complete: {word['error']}")
        try:
            self._tell(scope, f"checkpoint/{step}/{own}", word)
            if rank == 0:
                self._complete(step, scope, members)
        except Exception as error:
            if "error" not in word:
                self._failures.append(f"the checkpoint of step {step} is not complete: {error}")
            if rank == 0 and folder is not None:
                folders.withdraw(folder)

    def _agreed_folder(self, step: int, scope: RendezvousScope, first: int) -> Path:
        """Return the folder that all ranks write a step into.

        Args:
            step: of the checkpoint.
            scope: where the ranks agree.
            first: the rank that says it.

        Raises:
            CheckpointError: that rank cannot write there, must not any more, or does not say.
        """
        key = f"checkpoint/{step}/folder"
        if scope.rank_info.rank != first:
            # It may wait for the files of the checkpoint before until then.
            deadline = SuspendAwareDeadline(1.5 * self._timeout_s)
            word = self._hear(scope, key, first, "said where to write", deadline)
            return folders.named_folder(self._root, word["folder"])
        try:
            if self._incarnation:
                folders.check_claim(self._root, self._incarnation)
            else:
                # Somebody may have removed it.
                self._root.mkdir(parents=True, exist_ok=True)
                self._incarnation = folders.claim(self._root)
            folder = folders.make_folder(self._root, step, self._incarnation)
        except (CheckpointError, OSError) as error:
            self._tell(scope, key, {"error": f"rank {first}: {error}"})
            raise
        self._tell(scope, key, {"folder": folder.name})
        return folder

    def _complete(self, step: int, scope: RendezvousScope, members: tuple[int, ...]) -> None:
        keys = [f"checkpoint/{step}/{number}" for number in members]
        words: list[dict[str, Any]] = []
        failed: CheckpointError | None = None
        deadline = SuspendAwareDeadline(self._timeout_s)
        for number, key in zip(members, keys, strict=True):
            try:
                words.append(self._hear(scope, key, number, "written its file", deadline))
            except CheckpointError as error:
                # The others still write: what they leave is removed with the rest.
                failed = failed or error
        for key in (*keys, f"checkpoint/{step}/folder"):
            scope.delete(key)
        if failed is not None:
            raise failed
        files = [(word["file"], word["bytes"]) for word in words]
        folders.commit(self._root, step, self._incarnation, self._run, files, self._key)
        folders.prune(self._root, self._keep, self._run, self._incarnation, self._key)
        self._on_event(f"the checkpoint of step {step} is complete", "info")

    def _tell(self, scope: RendezvousScope, key: str, word: Mapping[str, Any]) -> None:
        scope.put(key, json.dumps(word))
        self._told.append((scope, key))
        while len(self._told) > _WORDS_KEPT:
            # Of a checkpoint that failed rank 0 may have left it there.
            old, its_key = self._told.popleft()
            old.delete(its_key)

    def _hear(
        self,
        scope: RendezvousScope,
        key: str,
        rank: int,
        missing: str,
        deadline: SuspendAwareDeadline,
    ) -> dict[str, Any]:
        """Return what a rank says, waiting for it.

        Raises:
            CheckpointError: it has failed, is lost, or does not say anything in time.
        """
        after_failure: SuspendAwareDeadline | None = None
        while True:
            # Before the look: it may have been lost after it had said so.
            is_lost = self._membership.has_lost(rank, scope.rank_info.job)
            if (said := scope.peek(key, rank)) is not None:
                break
            if is_lost:
                raise CheckpointError(f"rank {rank} was lost before it had {missing}")
            if self._prepared is None or self._prepared.steps.phases.failure.error is None:
                # Or no longer: one world was closed, and the next one is in force.
                after_failure = None
            elif after_failure is None:
                # The rank may be the one that is lost; or it writes, and will say so soon.
                after_failure = SuspendAwareDeadline(_AFTER_FAILURE_S)
            is_late = deadline.is_over(_POLL_S)
            if after_failure is not None:
                is_late |= after_failure.is_over(_POLL_S)
            if self._stopping.is_set() or is_late:
                limit = "" if self._stopping.is_set() else f" (longer waits: {self._limited_by})"
                raise CheckpointError(f"rank {rank} has not {missing}{limit}")
            time.sleep(_POLL_S)
        word: dict[str, Any] = json.loads(said)
        if "error" in word:
            raise CheckpointError(word["error"])
        return word

    def _join(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _warn(self) -> None:
        while self._failures:
            text = self._failures.popleft()
            self._on_event(text, "warning")
            warnings.warn(
                f"{text}; the training goes on, and the checkpoint before it stays",
                RuntimeWarning,
                stacklevel=2,
            )


def _check_storable(prepared: PreparedModel) -> None:
    """Find settings and extra states that no checkpoint could hold, before anything is trained.

    Raises:
        CheckpointError: there is one; the message has its path.
    """
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in prepared.optimizer.param_groups
    ]
    extras: dict[str, Any] = {}
    for name, module in prepared.model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            # It may be ready only later.
            with contextlib.suppress(Exception):
                extras[f"{name}._extra_state".lstrip(".")] = module.get_extra_state()
    try:
        flatten({"optimizer": {"param_groups": groups}, "model": extras})
    except UnstorableError as error:
        raise CheckpointError(f"no checkpoint of this model can be written: {error}") from error
