"""What a rank saves of its local updates, and how ranks go on from it.

A state is one rank's own: between two exchanges each rank has other parameters. Where every rank
loads its own in a world of the same size, training goes on as if it had not stopped, in mid-round,
too. At a point that all ranks have in common any rank's state is all of it, in a world of any size.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from gradlane.errors import RefusedError, UsageError
from gradlane.training.local_updates.outer_optimizer import OuterOptimizer
from gradlane.training.local_updates.rounds import Rounds
from gradlane.training.model.barrier import Barrier
from gradlane.training.model.residual_state import ResidualState
from gradlane.training.options.local_updates import Local
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry

LOCAL = "local_updates"
"""The part of a model's state in `session.state_dict()` that only local updates have."""
_FIXED = ("steps", "fragments", "overlap_steps")
"""Options that a round under way has to be finished with."""

_WHOLE = [0, 1]
"""The shard of a rank that has all of its model, and of states that say none."""


@dataclass
class UnderWay:
    """An exchange whose result is not in use yet.

    Attributes:
        fragments: those that are exchanged.
        due_step: training step after which its result is used.
        means: of all ranks' differences, by tensor number, once they are here.
        known: numbers of the newest memberships that the ranks in the means knew.
    """

    fragments: Sequence[int]
    due_step: int
    means: dict[int, Tensor] | None = None
    known: Sequence[int] = ()


class LocalState:
    """Saves and loads one model's local updates; both are collective calls between two steps."""

    def __init__(
        self,
        *,
        scope: RendezvousScope,
        local: Local,
        trained: Sequence[TensorEntry],
        shards: int,
        barrier: Barrier,
        residuals: ResidualState,
        outer: OuterOptimizer,
        rounds: Rounds,
    ) -> None:
        """Save these parts of a model.

        Args:
            scope: where the ranks agree.
            local: options of its rounds.
            trained: table entries of its trained parameters.
            shards: consecutive ranks that hold the model together.
            barrier: where all ranks tell what they load.
            residuals: of its codecs.
            outer: common values and momentum.
            rounds: where this rank stands.
        """
        self._rank_info = scope.rank_info
        self._local = local
        self._trained = trained
        self._shard = [scope.rank_info.rank % shards, shards]
        self._barrier = barrier
        self._residuals = residuals
        self._outer = outer
        self._rounds = rounds
        self._index_of = {entry.name: index for index, entry in enumerate(trained)}

    def state_dict(self, step: int, under_way: UnderWay | None) -> dict[str, Any]:
        """Return this rank's state.

        Args:
            step: of this rank's optimizer.
            under_way: an exchange whose means are here, or None.
        """
        state = self._residuals.state_dict()
        waiting = None
        if under_way is not None:
            waiting = {
                "fragments": list(under_way.fragments),
                "due_step": under_way.due_step,
                "means": self._named(under_way.means or {}),
            }
        state[LOCAL] = {
            "options": asdict(self._local),
            "shard": self._shard,
            "step": step,
            "rounds": self._rounds.state_dict(),
            "common": self._named(dict(enumerate(self._outer.common))),
            "momentum": self._named(self._outer.momentum),
            "under_way": waiting,
            "parameters": _digest(entry.tensor for entry in self._trained),
        }
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> tuple[int, UnderWay | None]:
        """Load a result of `state_dict`; the model's parameters are loaded already.

        Returns:
            The step of this rank's optimizer, and the exchange whose result is still to be used.

        Raises:
            ValueError: it is no such state, or another model's or other options'.
            UsageError: the ranks cannot go on from what they have loaded; on all alike.
        """
        own = state.get(LOCAL)
        if not isinstance(own, Mapping):
            raise RefusedError(
                "this is no state of a session with update=gradlane.Local(...): to go on from "
                "exact training, load the model and the optimizer alone"
            )
        waiting = own["under_way"]
        is_common = waiting is None and not any(one["differs"] for one in own["rounds"]["progress"])
        self._check_options(own["options"], is_common)
        if own.get("shard", _WHOLE) == self._shard:
            self._check_values(own)
        self._agree(state, own, is_common)
        common, momentum = self._numbered(own["common"]), self._numbered(own["momentum"])
        with torch.no_grad():
            for index, value in common.items():
                self._outer.common[index].copy_(value)
            self._outer.momentum = {i: self._like(i, value) for i, value in momentum.items()}
        if is_common:
            self._rounds.begin()
        else:
            self._rounds.load_state_dict(own["rounds"])
        self._residuals.load_state_dict(state)
        step = int(own["step"])
        if waiting is None:
            return step, None
        means = {i: self._like(i, one) for i, one in self._numbered(waiting["means"]).items()}
        return step, UnderWay(list(waiting["fragments"]), int(waiting["due_step"]), means)

    def _check_values(self, own: Mapping[str, Any]) -> None:
        """Check that the values of a state are of this model's tensors, of each of them."""
        self._numbered(own["momentum"])
        common = self._numbered(own["common"])
        missing = [entry.name for i, entry in enumerate(self._trained) if i not in common]
        if missing:
            raise RefusedError(
                f"the state has no common value of {missing[0]!r}: is it another model's?"
            )

    def _check_options(self, saved: Mapping[str, Any], is_common: bool) -> None:
        """Check that a round that is under way can be finished with these options."""
        for name in () if is_common else _FIXED:
            now = getattr(self._local, name)
            if saved[name] != now:
                raise RefusedError(
                    f"the state was taken in mid-round with {name}={saved[name]}, and the session "
                    f"has {name}={now}: open it with the same, or save after session.synchronize()"
                )

    def _agree(self, state: Mapping[str, Any], own: Mapping[str, Any], is_common: bool) -> None:
        """Check with all ranks that what they load is one training.

        Raises:
            UsageError: it is not; on all ranks alike.
        """
        rank_info = self._rank_info
        place = int(state["rank"]), int(state["world_size"])
        word = {
            "is_own": place == (rank_info.rank, rank_info.world_size),
            "is_common": is_common,
            "fits": _digest(entry.tensor for entry in self._trained) == own["parameters"],
            "digest": _digest([*own["common"].values(), *own["momentum"].values()]),
            "step": int(own["step"]),
            "shard": own.get("shard", _WHOLE),
        }
        call = "session.load_state_dict()"
        told = [json.loads(one) for one in self._barrier.all_here(call, json.dumps(word))]
        shards = self._shard[1]
        for rank, one in enumerate(told):
            if one["shard"] != [rank % shards, shards]:
                held, among = one["shard"]
                raise UsageError(
                    f"{call} on rank {rank}, which holds shard {rank % shards} of {shards}, was "
                    f"given shard {held} of {among}: load what a rank with the same shard has "
                    "saved, or, in nodes of another size, the model and the optimizer alone"
                )
        unfit = [rank for rank, one in enumerate(told) if not one["fits"]]
        if unfit:
            raise UsageError(
                f"{call} on rank {unfit[0]}: the model's parameters are not those of the state; "
                "call model.load_state_dict() on every rank after prepare(), which gives all ranks "
                "rank 0's, and before this"
            )
        for rank, one in enumerate(told):
            # Of another shard nothing but the step is alike.
            first = told[rank % shards]
            if one["digest"] != first["digest"] or one["step"] != told[0]["step"]:
                other = rank % shards if one["step"] == told[0]["step"] else 0
                raise UsageError(
                    f"{call}: the states of ranks {other} and {rank} have other common values "
                    f"(steps {told[other]['step']} and {one['step']}); load what was saved at the "
                    "same step"
                )
        if not all(one["is_own"] for one in told) and not all(one["is_common"] for one in told):
            raise UsageError(
                f"{call} of a state in mid-round (step {own['step']}), when each rank has "
                "parameters of its own: load on every rank what that rank has saved, in a world of "
                f"{place[1]} ranks; or save after session.synchronize(), when one rank's state is "
                "enough for any world"
            )

    def _named(self, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        return {self._trained[index].name: value.clone() for index, value in values.items()}

    def _numbered(self, values: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Return values by tensor number.

        Raises:
            ValueError: one is of no tensor of this model.
        """
        found = {}
        for name, value in values.items():
            index = self._index_of.get(name)
            if index is None or value.shape != self._trained[index].shape:
                raise RefusedError(
                    f"the state has {name!r} of shape {tuple(value.shape)}, which this model does "
                    "not train: is it another model's?"
                )
            found[index] = value
        return found

    def _like(self, index: int, value: Tensor) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self._trained[index].device_memory().copy_(value)


def _digest(values: Iterable[Tensor]) -> int:
    """Return a checksum of the bits of some tensors."""
    found = 0
    with torch.no_grad():
        for value in values:
            flat = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
            found = zlib.crc32(flat.numpy().data, found)
    return found
