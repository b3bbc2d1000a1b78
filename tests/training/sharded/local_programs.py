"""Local updates of sharded models, each beside the same rounds written out with torch alone.

`python -m tests.training.sharded.local_programs SCENARIO ...`, started as torchrun starts ranks.
Every rank prints a line for each: `same` where its shards have the bits of the reference, else what
differs, and a checksum of its shards.
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import gradlane
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from tests.training.sharded.local_reference import Shards, reference_of
from tests.training.sharded.programs import (
    CHECKPOINTS,
    NETWORK,
    build,
    freeze,
    loss_of,
    make_optimizer,
)

SPARSE = "topk:ratio=0.1,broadcast_ratio=0.2,bits=2,bucket=64,decay=0.95"
STREAMING = {"steps": 6, "fragments": 2, "overlap_steps": 2, "mix": 0.5}


MESH: Any = None
"""Nodes and shards."""


class Run:
    """A session with local updates, its model, and its reference."""

    def __init__(
        self,
        local: Mapping[str, Any],
        init: Mapping[str, Any] | None = None,
        change: Callable[[Any], object] = lambda model: None,
        **how: Any,
    ) -> None:
        """Build both models, and prepare one.

        Args:
            local: options of `gradlane.Local`.
            init: arguments of `gradlane.init`.
            change: called with each sharded model.
            how: arguments of `build`.
        """
        self.rank = dist.get_rank()
        mesh = MESH["shard"]
        models = [build(mesh, **how) for _ in range(2)]
        for one in models:
            change(one)
        self.expected: Any = models[0]
        self.model: Any = models[1]
        self.optimizer, other = (make_optimizer(one, "AdamW") for one in reversed(models))
        if self.rank >= mesh.size():
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.add_(1.0)
        update = gradlane.Local(**local)
        self.session = gradlane.init(network=NETWORK, update=update, **(init or {}))
        self.session.prepare(self.model, self.optimizer)
        self.reference = reference_of(models[0], other, update, MESH["node"].get_group())
        self.step = 0

    def train(self, steps: int) -> None:
        """Train both on."""
        # The reference counts from the last common point.
        earlier = self.step - self.reference.step
        self.train_alone(steps)
        self.reference.train(
            steps, lambda model, rank, step: self.loss(model.model, step + earlier)
        )

    def train_alone(self, steps: int) -> None:
        """Train the prepared model on."""
        for _ in range(steps):
            self.step += 1
            self.optimizer.zero_grad()
            self.loss(self.model, self.step).backward()
            self.optimizer.step()

    def loss(self, model: Any, step: int) -> Any:
        """Return the loss of this rank's batch."""
        draws = torch.Generator().manual_seed(1000 * step + self.rank)
        return loss_of(model, torch.randint(0, 11, (4, 3), generator=draws))

    def meet(self) -> None:
        """End the round of both; whole parameters of a forward before are out of date."""
        with torch.no_grad():
            for model in (self.model, self.expected):
                self.loss(model, 0)
                assert any(not hasattr(one, "placements") for one in model.parameters())
        self.session.synchronize()
        self.reference.synchronize()

    def difference(self) -> str:
        """Return `same` or what differs, and a checksum of this rank's shards."""
        theirs = dict(self.reference.models[0].named_parameters())
        found, result = 0, "same"
        for name, own in Shards(self.model).named_parameters():
            if not torch.equal(own, theirs[name]):
                result = f"{name} differs"
            found = zlib.crc32(own.numpy().tobytes(), found)
        return f"{result} {found}"


def rounds(local: Mapping[str, Any], **given: Any) -> list[str]:
    """Train, meet, train on and close; return what was found in mid-round, where all met, and
    after the end."""
    run = Run(local, **given)
    run.train(7)
    found = [run.difference()]
    run.meet()
    found.append(run.difference())
    run.train(6)
    found.append(run.difference())
    run.session.close()
    run.reference.synchronize()
    return [*found, run.difference()]


def coded() -> list[str]:
    """Train with SparseLoCo's codec; return checksums where all have met, and the bytes saved."""
    run = Run({"steps": 4, "outer": "average"}, {"codec": SPARSE})
    run.train_alone(10)
    run.session.synchronize()
    found = [run.difference().split()[-1]]
    ratio = float(run.session.metrics()["codec_ratio"])
    run.session.close()
    return [*found, "fewer" if ratio > 1.8 else f"ratio {ratio}"]


def save(run: Run, point: str, *, by_node: bool) -> None:
    """Save a training as the docs say.

    Args:
        run: whose nodes have other parameters, unless they have just met.
        point: name of the checkpoint.
        by_node: whether each node saves its own.
    """
    folder = f"{os.environ['CHECKPOINTS']}/{point}"
    CHECKPOINTS.save(state_of(run), **checkpoint_of(folder, by_node))
    torch.save(run.session.state_dict(), f"{folder}/session-{run.rank}.pt")
    # What a rank loads another one may have saved.
    dist.barrier()


def load(run: Run, point: str, *, by_node: bool, session: Any = None) -> None:
    """Go on from what was saved; `session` in place of this rank's own state of the session."""
    folder = f"{os.environ['CHECKPOINTS']}/{point}"
    state = state_of(run)
    CHECKPOINTS.load(state, **checkpoint_of(folder, by_node))
    set_state_dict(
        run.model,
        run.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    rank = run.rank if by_node else run.rank % MESH["shard"].size()
    run.session.load_state_dict(session or torch.load(f"{folder}/session-{rank}.pt"))
    run.step = run.session.step


def state_of(run: Run) -> dict[str, Any]:
    """Return what torch's checkpoints hold."""
    model, optimizer = get_state_dict(run.model, run.optimizer)
    return {"model": model, "optimizer": optimizer}


def checkpoint_of(folder: str, by_node: bool) -> dict[str, Any]:
    """Return where this rank's node saves, and with which ranks."""
    if not by_node:
        return {"checkpoint_id": folder}
    node = MESH.get_coordinate()[0]
    return {"checkpoint_id": f"{folder}/{node}", "process_group": MESH["shard"].get_group()}


def states(local: Mapping[str, Any], **init: Any) -> list[str]:
    """Save in mid-round and at a common point, and go on in other sessions."""
    run = Run(local, init)
    run.train_alone(7)
    save(run, "mid", by_node=True)
    run.train_alone(2)
    run.session.synchronize()
    save(run, "common", by_node=False)
    met = run.difference().split()[-1]
    run.train_alone(5)
    end = run.difference().split()[-1]
    run.session.close()
    again = Run(local, init)
    load(again, "mid", by_node=True)
    again.train_alone(2)
    again.session.synchronize()
    again.train_alone(5)
    found = ["same" if again.difference().split()[-1] == end else "differs"]
    again.session.close()
    # The optimizer's state is one node's.
    again = Run(local, init)
    load(again, "common", by_node=False)
    found.append("same" if again.difference().split()[-1] == met else "differs")
    again.train_alone(5)
    again.session.close()
    found.append(again.difference().split()[-1])
    return found


def refused_states() -> list[str]:
    """Load a neighbour's state on all ranks, and the first node's in mid-round on all nodes."""
    found = []
    rank = dist.get_rank()
    for other in (rank ^ 1, rank % MESH["shard"].size()):
        again = Run(STREAMING)
        state = torch.load(f"{os.environ['CHECKPOINTS']}/mid/session-{other}.pt")
        try:
            load(again, "mid", by_node=True, session=state)
            found.append(f"the state of {other} was taken")
        except gradlane.UsageError as error:
            found.append(str(error))
        # No rank is to hear of another's end first.
        dist.barrier()
        again.session.abort("the test has ended")
    return found


def other_nodes() -> list[str]:
    """Go on, with any number of nodes, from what `states` has saved at a common point."""
    run = Run(STREAMING)
    load(run, "common", by_node=False)
    first = run.step
    run.train_alone(7)
    run.session.close()
    return [f"steps {first} to {run.step}"]


def ended(first: Sequence[int], second: Sequence[int]) -> list[str]:
    """Return what a session fails with while the nodes train so many steps; 0: synchronize."""
    run = Run({"steps": 4})
    try:
        for steps in second if run.rank >= MESH["shard"].size() else first:
            if steps:
                run.train_alone(steps)
            else:
                run.session.synchronize()
        return ["nothing was found"]
    except gradlane.SessionFailedError as error:
        return [str(error).split(":")[0]]
    finally:
        # No rank is to hear of another's end first.
        dist.barrier()
        run.session.abort("the test has ended")


def freeze_and_keep(model: Any) -> None:
    """Freeze a unit whose parameters a forward leaves whole, and some of others."""
    freeze(model)
    model.blocks[0].set_reshard_after_forward(False)


def columns_part() -> list[str]:
    """Close the session in one column before the other one has read what all ranks said."""
    run = Run({"steps": 4})
    store = dist.distributed_c10d._get_default_store()
    peek = RendezvousScope.peek

    def peek_late(scope: RendezvousScope, key: str, rank: int | None) -> bytes | None:
        if key.startswith("gather/"):
            store.wait(["closed 0", "closed 2"])
        return peek(scope, key, rank)

    state = run.session.state_dict()
    is_late = run.rank % MESH["shard"].size() == 1
    with mock.patch.object(RendezvousScope, "peek", peek_late if is_late else peek):
        run.session.load_state_dict(state)
    run.session.close()
    store.set(f"closed {run.rank}", "")
    dist.barrier()
    return [str(sum(b"/gather/" in key.encode() for key in store.list_keys()))]


SCENARIOS: dict[str, Callable[[], list[str]]] = {
    "diloco": lambda: rounds({"steps": 4}),
    "streaming": lambda: rounds(STREAMING),
    "frozen": lambda: rounds({"steps": 3, "outer": "average"}, change=freeze_and_keep),
    "empty_shards": lambda: rounds({"steps": 4, "fragments": 3}, scales=1),
    "coded": coded,
    "columns_part": columns_part,
    # The second node ends a round where the first one's fragment has its turn.
    "differ": lambda: ended([4], [3, 0, 1]),
    # It skips a step, where it has none after its last exchange.
    "fewer": lambda: ended([5, 0], [4, 0]),
    "other_nodes": other_nodes,
    "coded_states": lambda: states({"steps": 4, "outer": "average"}, codec=SPARSE),
    "states": lambda: [*states(STREAMING), *refused_states()],
}


def main(names: list[str]) -> None:
    """Run scenarios, and print what each has found."""
    global MESH
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    MESH = init_device_mesh(
        "cpu", (dist.get_world_size() // local, local), mesh_dim_names=("node", "shard")
    )
    for name in names:
        found = SCENARIOS[name]()
        os.write(1, f"{name}: {' | '.join(found)}\n".encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
