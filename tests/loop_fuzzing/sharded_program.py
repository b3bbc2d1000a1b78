"""What a loop over sharded models does on one rank, with torch alone and with gradlane.

Both are run by the same processes, action by action: first the reference, then what gradlane
averages. `sharded_ranks.py` runs these processes.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import gradlane
from gradlane.training.options.local_updates import parse_local
from tests.loop_fuzzing.description import Action, Loop, Sharding
from tests.loop_fuzzing.program import Program
from tests.loop_fuzzing.sharded_loops import KEEP_SHARDS, KEEP_WHOLE, SEND
from tests.training.sharded.local_reference import ShardedReference, reference_of, reshard
from tests.training.sharded.programs import DIVISIONS, NETWORK, in_rank_order

CHECKPOINTS: Any = torch.distributed.checkpoint
_DIVISIONS = {one.__name__: one for one in DIVISIONS}


class ShardedProgram(Program):
    """The program on sharded models."""

    def __init__(self, loop: Loop, rank: int, mesh: Any, column: Any, hook: Any = None) -> None:
        """Build the models, shard them, and build the optimizers.

        Args:
            loop: what to run.
            rank: of the world.
            mesh: that torch shards over, and averages over where it has two dimensions.
            column: group of the ranks with the same shard.
            hook: for each unit's reduced gradients, or None.
        """
        self._mesh, self._column, self._hook = mesh, column, hook
        assert loop.sharding is not None
        self.sharding: Sharding = loop.sharding
        super().__init__(loop, rank, values_of=0)

    def build(self, number: int, seed: int) -> Any:
        """Return a sharded model."""
        model = super().build(number, seed)
        told = self.sharding
        given: dict[str, Any] = {"mesh": self._mesh, "reshard_after_forward": not told.keeps}
        dtypes = {
            name: getattr(torch, dtype)
            for name in ("param_dtype", "reduce_dtype")
            if (dtype := getattr(told, name)) is not None
        }
        model.computes_in = dtypes.get("param_dtype")
        if dtypes:
            given["mp_policy"] = MixedPrecisionPolicy(**dtypes)
        if told.columns:
            given["shard_placement_fn"] = self._placement
        for members in told.units:
            modules = [model.blocks[one] for one in members if one < len(model.blocks)]
            held = [one for one in modules if not isinstance(one, nn.Identity)]
            if held:
                fully_shard(held if len(held) > 1 else held[0], **given)
        fully_shard(model, **{**given, "reshard_after_forward": None})
        for module in model.modules():
            if isinstance(module, FSDPModule) and self._hook is not None:
                module.set_all_reduce_hook(self._hook)
        if told.zeros:
            model.set_reduce_scatter_unused_params(True)
        if told.division:
            _DIVISIONS[told.division](model)
        return model

    def _placement(self, parameter: nn.Parameter) -> Any:
        by_columns = parameter.ndim == 2 and parameter.shape[1] % self.sharding.local == 0
        return Shard(1) if by_columns else None

    def note(self, label: str, values: Iterator[Tensor] | list[Tensor]) -> None:
        super().note(label, [getattr(one, "_local_tensor", one) for one in values])

    def backward(
        self,
        model: int,
        *,
        sends: str = SEND,
        is_last: bool | None = None,
        forwards: int = 1,
        **given: Any,
    ) -> float:
        """Run forward and backward.

        Args:
            model: whose step it is.
            sends: where gradients go.
            is_last: whether torch is told that no other backward follows in this step.
            forwards: number of forwards whose losses have one backward.
            given: for `Program.backward`.
        """
        for number in given["through"]:
            own = self.models[number]
            own.set_requires_gradient_sync(sends != KEEP_WHOLE)
            own.set_requires_all_reduce(sends != KEEP_SHARDS)
            own.set_is_last_backward(is_last is not False)
        self._forwards = forwards
        return super().backward(model, **given)

    def forward(self, through: list[int], data: int, **how: Any) -> Tensor:
        total = super().forward(through, data, **how)
        for number in range(1, self._forwards):
            total = total + super().forward(through, data, batch=1000 + number, **how)
        return total

    def write(self, model: int, *, factor: float) -> None:
        reshard(self.models[model])
        super().write(model, factor=factor)

    def read(self, model: int, *, what: str) -> None:
        # A forward without a backward leaves whole parameters.
        if what in ("parameters", "named"):
            reshard(self.models[model])
        super().read(model, what=what)

    def resume(self, model: int) -> None:
        """Go on in another session, which spreads the first node's buffers, and drops whole
        parameters: torch goes on with those, where a forward has left them before a step."""
        for own in self.models:
            reshard(own)
            for buffer in own.buffers():
                first = buffer.contiguous()
                dist.broadcast(first, group=self._column, group_src=0)
                buffer.copy_(first)

    def swap(self, model: int) -> None:
        """Go on from another program's checkpoint."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        model, optimizer = get_state_dict(self.models[0], self.optimizers[0])
        return {"model": model, "optimizer": optimizer}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from what `state` has returned."""
        set_state_dict(
            self.models[0],
            self.optimizers[0],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def sums(self) -> list[int]:
        """Return checksums of this rank's shards, a model each."""
        found = []
        for model in self.models:
            reshard(model)
            total = 0
            for one in model.parameters():
                shard = one._local_tensor.detach().contiguous()
                total = zlib.crc32(bytes(shard.view(-1).view(torch.uint8).numpy()), total)
            found.append(total)
        return found


class LocalProgram(ShardedProgram):
    """The program whose nodes exchange differences, by torch alone."""

    rounds: ShardedReference

    def start(self) -> None:
        """Begin the first round."""
        super().start()
        local = parse_local(self.loop.options["update"])
        self.rounds = reference_of(self.models[0], self.optimizers[0], local, self._column)

    def step(self, model: int, *, closure: dict[str, Any] | None = None) -> None:
        super().step(model, closure=closure)
        self.rounds.end_step()

    def synchronize(self, model: int) -> None:
        self.rounds.synchronize()


class GradlaneProgram(ShardedProgram):
    """The program whose shards gradlane averages between nodes."""

    def connect_all(self) -> None:
        """Open a session, and prepare all models."""
        options = dict(self.loop.options)
        if "update" in options:
            options["update"] = parse_local(options["update"])
        slice_elems = options.pop("slice_elems", None)
        if slice_elems is not None:
            name = options.get("strategy", gradlane.Strategy.name)
            options["strategy"] = gradlane.Strategy(name, slice_elems=slice_elems)
        self.session: Any = gradlane.init(network=NETWORK, **options)
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            self.session.prepare(model, optimizer)

    def change_values(self) -> None:
        """Have other values than the first node, which `prepare` has to spread."""
        with torch.no_grad():
            for model in self.models:
                for one in (*model.parameters(), *model.buffers()):
                    if one.is_floating_point():
                        one.add_(1.0)

    def synchronize(self, model: int) -> None:
        self.session.synchronize()

    def resume(self, model: int) -> None:
        """Close the session, and go on in another one from what was saved before."""
        if "update" not in self.loop.options:
            self.session.close()
            self.connect_all()
            return
        state = self.session.state_dict()
        kept = [one._local_tensor.clone() for one in self._shards()]
        held = [
            (state, name, value.clone())
            for optimizer in self.optimizers
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor)
        ]
        # The end of a session is the end of its round.
        self.session.close()
        self.connect_all()
        with torch.no_grad():
            for one, value in zip(self._shards(), kept, strict=True):
                one._local_tensor.copy_(value)
        for state_of, name, value in held:
            state_of[name] = value
        self.session.load_state_dict(state)

    def _shards(self) -> list[Any]:
        for model in self.models:
            reshard(model)
        return [one for model in self.models for one in model.parameters()]


@dataclass
class Both:
    """The two programs of one loop on this rank."""

    reference: ShardedProgram
    ours: GradlaneProgram

    def perform(self, number: int, action: Action, folder: Path) -> None:
        """Have both do one action, torch alone first."""
        for one in (self.reference, self.ours):
            _told(one is self.reference, one.perform, number, action)
        if action.do == "swap":
            self._swap(folder)

    def _swap(self, folder: Path) -> None:
        """Have each go on from what the other has saved, if torch alone can do so."""
        # It may drop the state of frozen parameters, of both.
        _told(True, _move, self.reference, self.reference, folder / "own")
        _move(self.ours, self.ours, folder / "own too")
        _move(self.reference, self.ours, folder / "reference")
        _move(self.ours, self.reference, folder / "ours")


def _move(saves: ShardedProgram, loads: ShardedProgram, folder: Path) -> None:
    """Have a program go on from what one saves."""
    CHECKPOINTS.save(saves.state(), checkpoint_id=str(folder))
    with torch.no_grad():
        for parameter in loads.models[0].parameters():
            parameter.mul_(2.0)
    state = loads.state()
    CHECKPOINTS.load(state, checkpoint_id=str(folder))
    loads.take(state)


class TorchError(Exception):
    """What torch alone has raised: it cannot do what the loop does."""


def _told(is_reference: bool, call: Callable[..., Any], *given: Any) -> Any:
    try:
        return call(*given)
    except BaseException as error:
        # Torch's checkpoints raise what is no `Exception`.
        if is_reference and not isinstance(error, KeyboardInterrupt):
            raise TorchError(f"{type(error).__name__}: {error}") from error
        raise


def build_both(loop: Loop, mesh: Any) -> Both:
    """Build and connect the two programs of this rank.

    Args:
        loop: what to run.
        mesh: of nodes and shards.
    """
    rank = int(os.environ["RANK"])
    nodes, shards = mesh["node"], mesh["shard"]
    column = nodes.get_group()
    if "update" in loop.options:
        reference: ShardedProgram = _told(True, LocalProgram, loop, rank, shards, column)
    elif nodes.size() == 2:
        reference = _told(True, ShardedProgram, loop, rank, mesh, column)
    else:
        hook = in_rank_order(mesh)
        reference = _told(True, ShardedProgram, loop, rank, shards, column, hook)
    ours = GradlaneProgram(loop, rank, shards, column)
    if rank >= shards.size():
        ours.change_values()
    ours.connect_all()
    for one in (reference, ours):
        one.start()
    return Both(reference, ours)
