"""Training programs of sharded models, each beside torch's own HSDP in the same processes.

`python -m tests.training.sharded.programs SCENARIO`, started as torchrun starts ranks. Every rank
prints one line: `same` where all parameters and optimizer states are bit-equal, else what is not.
"""

from __future__ import annotations

import os
import sys
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import gradlane

NETWORK = gradlane.Network(silence_timeout_s=20.0, connect_timeout_s=60.0)
STEPS = 4
CHECKPOINTS: Any = torch.distributed.checkpoint


class Block(nn.Module):
    """A layer with a residual, and a bias whose first dimension no two ranks divide."""

    def __init__(self, width: int, *, recomputes: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.recomputes, self.reentrant = recomputes, reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        if self.recomputes:
            return x + checkpoint(self._inner, x, use_reentrant=self.reentrant)
        return x + self._inner(x)

    def _inner(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(self.down(torch.tanh(self.up(x))))
        return found


class Model(nn.Module):
    """A language model in small: root parameters, a tied head, blocks, and one of them unused."""

    def __init__(
        self, *, tied: bool = False, skips: bool = False, scales: int = 3, **block: Any
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(Block(6, **block) for _ in range(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.scale = nn.Parameter(torch.ones(scales))
        self.skips = skips
        self.twice = self.adds_zeros = False
        self.is_reference = False
        """Whether gradlane does not average this one."""
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        """Return logits."""
        x = self.embed(words)
        for number, block in enumerate(self.blocks):
            if self.skips and number == 1:
                # Torch's HSDP needs all ranks in the same order of units.
                x = x + 0.0 * block(x) if self.is_reference and self.adds_zeros else x
                continue
            x = block(x) * self.scale[number % len(self.scale)]
            if self.twice and number == 0:
                x = block(x)
        logits: Tensor = self.head(x)
        return logits


def build(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None, **how: Any) -> Model:
    """Return a sharded model, with the same values on all ranks."""
    torch.manual_seed(5)
    model = Model(**how)
    options: dict[str, Any] = {"mesh": mesh} | ({} if policy is None else {"mp_policy": policy})
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def in_rank_order(mesh: DeviceMesh) -> Callable[[Tensor], None]:
    """Return a hook that averages over nodes in the order of ranks, 16-bit floats in f32."""
    group, nodes = mesh["node"].get_group(), mesh["node"].size()

    def hook(buffer: Tensor) -> None:
        parts = [torch.empty_like(buffer) for _ in range(nodes)]
        dist.all_gather(parts, buffer, group=group)
        wide = torch.promote_types(buffer.dtype, torch.float32)
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part
        buffer.copy_(total / nodes)

    return hook


class Two:
    """Two optimizers of a part of a model each, in one."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        """Step the first three parameters by SGD, the others by AdamW."""
        self.both = [
            torch.optim.SGD(parameters[:3], lr=0.05, momentum=0.9),
            torch.optim.AdamW(parameters[3:], lr=0.05),
        ]

    @property
    def state(self) -> dict[Any, Any]:
        """The states of both."""
        return {**self.both[0].state, **self.both[1].state}

    def step(self) -> None:
        """Step both."""
        for one in self.both:
            one.step()

    def zero_grad(self) -> None:
        """Forget the gradients of both."""
        for one in self.both:
            one.zero_grad()


class MuonAndAdam(Two):
    """Muon, which works on whole matrices, and AdamW for all else."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        """Step matrices by Muon."""
        matrices = [one for one in parameters if one.ndim == 2]
        others = [one for one in parameters if one.ndim != 2]
        self.both = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.02)]


def make_optimizer(model: nn.Module, name: str) -> Any:
    """Return an optimizer of the trained parameters: of `torch.optim`, `two` or `muon`."""
    trained = [one for one in model.parameters() if one.requires_grad]
    if name == "muon":
        return MuonAndAdam(trained)
    return Two(trained) if name == "two" else getattr(torch.optim, name)(trained, lr=0.05)


class Pair:
    """The reference and the model that gradlane averages, in the same processes."""

    def __init__(
        self,
        optimizer: str = "AdamW",
        init: dict[str, Any] | None = None,
        change: Callable[[Any], object] = lambda model: None,
        **how: Any,
    ) -> None:
        """Build both, and prepare the second.

        Args:
            optimizer: as `make_optimizer` takes it.
            init: arguments of `gradlane.init`.
            change: called with each sharded model, before its optimizer is made.
            how: arguments of `build`.
        """
        local = int(os.environ["LOCAL_WORLD_SIZE"])
        self.rank = int(os.environ["RANK"])
        self.session = gradlane.init(network=NETWORK, **(init or {}))
        self.models = []
        if dist.get_world_size() == local:
            # The node is a group by itself, without others to compare with.
            mesh = init_device_mesh("cpu", (local,))
        else:
            nodes = dist.get_world_size() // local
            both = init_device_mesh("cpu", (nodes, local), mesh_dim_names=("node", "shard"))
            mesh = both["shard"]
            self.models.append(build(both if nodes == 2 else mesh, **how))
            if nodes > 2:
                for module in self.models[0].modules():
                    if isinstance(module, FSDPModule):
                        module.set_all_reduce_hook(in_rank_order(both))
        self.models.append(build(mesh, **how))
        for model in self.models:
            change(model)
        self.optimizers = [make_optimizer(model, optimizer) for model in self.models]
        if self.rank >= local:
            # Only the first node has the right values: prepare spreads them.
            with torch.no_grad():
                for parameter in self.models[-1].parameters():
                    parameter.add_(1.0)
        self.models[0].is_reference = len(self.models) > 1
        last = self.optimizers[-1]
        self.session.prepare(self.models[-1], last.both if isinstance(last, Two) else last)

    def train(self, step: Callable[[Model, Any, list[Tensor]], None], steps: int = STEPS) -> None:
        """Train both on the same data, another for each rank."""
        draws = torch.Generator().manual_seed(100 + self.rank)
        for _ in range(steps):
            data = [torch.randint(0, 11, (4, 3), generator=draws) for _ in range(3)]
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                step(model, optimizer, data)

    def difference(self) -> str:
        """Return `same` or what differs, and a checksum of this rank's shards."""
        states = [
            {
                **dict(model.named_parameters()),
                **{
                    f"{index}.{name}": value
                    for index, held in enumerate(optimizer.state.values())
                    for name, value in held.items()
                },
            }
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
        found, result = 0, "same"
        assert states[0].keys() == states[-1].keys()
        for name, value in states[-1].items():
            ours, theirs = (getattr(one, "_local_tensor", one) for one in (value, states[0][name]))
            if not torch.equal(ours, theirs):
                result = f"{name} differs by {(ours - theirs).abs().max()}"
            found = zlib.crc32(ours.detach().numpy().tobytes(), found)
        return f"{result} {found}"


def loss_of(model: Model, words: Tensor) -> Any:
    """Return the loss of predicting the next word."""
    logits = model(words)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), words[:, 1:].flatten())


def plain(model: Model, optimizer: Any, data: list[Tensor]) -> None:
    """One batch a step."""
    loss_of(model, data[0]).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: Model, optimizer: Any, data: list[Tensor]) -> None:
    """Clip by the global norm, as torch does."""
    loss_of(model, data[0]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


def accumulated(model: Any, optimizer: Any, data: list[Tensor]) -> None:
    """Accumulate whole gradients; only the last backward sends."""
    for number, words in enumerate(data):
        model.set_requires_gradient_sync(number == len(data) - 1)
        model.set_is_last_backward(number == len(data) - 1)
        (loss_of(model, words) / len(data)).backward()
    optimizer.step()
    optimizer.zero_grad()


def accumulated_in_node(model: Any, optimizer: Any, data: list[Tensor]) -> None:
    """Accumulate shards in the node; only the last backward leaves it, and skips a block."""
    for number, words in enumerate(data):
        model.set_requires_all_reduce(number == len(data) - 1)
        model.skips = number == len(data) - 1
        (loss_of(model, words) / len(data)).backward()
    model.skips = False
    optimizer.step()
    optimizer.zero_grad()


def several(model: Any, optimizer: Any, data: list[Tensor]) -> None:
    """Send in every backward of a step, and use a block twice in one of them."""
    for number, words in enumerate(data):
        model.twice = number == 1
        loss_of(model, words).backward()
    optimizer.step()
    optimizer.zero_grad()


def seldom(model: Any, optimizer: Any, data: list[Tensor]) -> None:
    """Leave a block and a root parameter without a gradient in some steps."""
    model.skips = bool(len(optimizer.state) and int(data[0][0, 0]) >= 0)
    plain(model, optimizer, data)


def with_less(model: Any, optimizer: Any, data: list[Tensor]) -> None:
    """Leave a block out on the second node alone, whose gradients count as zeros there."""
    second = dist.get_rank() >= int(os.environ["LOCAL_WORLD_SIZE"])
    model.adds_zeros, model.skips = True, bool(optimizer.state) and second
    plain(model, optimizer, data)


def freeze(model: Any) -> None:
    """Train neither a whole unit, nor some parameters of others."""
    model.blocks[0].requires_grad_(False)
    model.blocks[1].norm.requires_grad_(False)
    model.embed.requires_grad_(False)


def sum_alone(model: Any) -> None:
    """Have the program divide: torch adds up, in the node and between nodes."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)


def divide_in_node(model: Any) -> None:
    """Have torch divide by the ranks of a node alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(float(os.environ["LOCAL_WORLD_SIZE"]))


def divide_later(model: Any) -> None:
    """Have torch add up first, and divide after that."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


DIVISIONS = (sum_alone, divide_in_node, divide_later)


def compile_blocks(model: Any) -> None:
    """Compile each block, as programs do with FSDP2."""
    for block in model.blocks:
        block.compile(backend="aot_eager")


def bf16(reduce_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return options with 16-bit parameters in forward and backward."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    return {"policy": policy}


SCENARIOS: dict[str, tuple[dict[str, Any], Callable[[Any, Any, list[Tensor]], None]]] = {
    "adamw": ({}, plain),
    "sgd": ({"optimizer": "SGD"}, plain),
    "two_optimizers": ({"optimizer": "two"}, clipped),
    "checked": ({"init": {"check_every": 1}}, plain),
    "clipped": ({}, clipped),
    "accumulated": ({}, accumulated),
    "accumulated_in_node": ({}, accumulated_in_node),
    "several": ({}, several),
    "seldom": ({}, seldom),
    "tied": ({"tied": True}, plain),
    "checkpointing": ({"recomputes": True}, plain),
    "reentrant": ({"recomputes": True, "reentrant": True}, plain),
    "bf16": (bf16(torch.bfloat16), clipped),
    "bf16_f32": (bf16(torch.float32), clipped),
    "bf16_default": (bf16(None), accumulated_in_node),
    "f64_reduced": ({"policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}, several),
    "frozen": ({"change": freeze}, plain),
    "unused": ({"change": lambda model: model.set_reduce_scatter_unused_params(True)}, with_less),
    "several_unused": (
        {"change": lambda model: model.set_reduce_scatter_unused_params(True)},
        several,
    ),
    "sums": ({"change": sum_alone}, several),
    "divides_in_node": ({"change": divide_in_node}, accumulated_in_node),
    "divides_later": ({"change": divide_later}, several),
    "divides_later_bf16": ({"change": divide_later, **bf16(torch.bfloat16)}, accumulated_in_node),
    "compiled": ({"change": compile_blocks}, plain),
    "checkpoints": ({}, plain),
    "codec_bf16": ({"init": {"codec": "bf16"}}, plain),
    "codec_qsgd": ({"init": {"codec": gradlane.codecs.Qsgd(bits=8)}}, plain),
    "ring": ({"init": {"strategy": "ring"}}, plain),
    "muon": ({"optimizer": "muon"}, plain),
}


def state_of(pair: Pair, number: int) -> dict[str, Any]:
    """Return what a checkpoint of one of both models holds."""
    model, optimizer = get_state_dict(pair.models[number], pair.optimizers[number])
    return {"model": model, "optimizer": optimizer}


def through_checkpoints(pair: Pair, folder: str) -> None:
    """Exchange the two models by torch's checkpoints: each goes on from what the other has saved.

    Args:
        pair: trained.
        folder: shared by all ranks.
    """
    for saving, loading in ((1, 0), (0, 1)):
        path = f"{folder}/{saving}"
        CHECKPOINTS.save(state_of(pair, saving), checkpoint_id=path)
        with torch.no_grad():
            for parameter in pair.models[loading].parameters():
                parameter.mul_(2.0)
        state = state_of(pair, loading)
        CHECKPOINTS.load(state, checkpoint_id=path)
        set_state_dict(
            pair.models[loading],
            pair.optimizers[loading],
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        pair.train(clipped)


def beside_whole_matrices(pair: Pair) -> float:
    """Train a whole model on all ranks' batches, and return how far the sharded one is off: the
    square of its distance over that of the way that the whole one has gone."""
    torch.manual_seed(5)
    whole = Model()
    start = [one.detach().clone() for one in whole.parameters()]
    optimizer = make_optimizer(whole, "muon")
    ranks = dist.get_world_size()
    draws = [torch.Generator().manual_seed(100 + rank) for rank in range(ranks)]
    for _ in range(STEPS):
        for own in draws:
            words = [torch.randint(0, 11, (4, 3), generator=own) for _ in range(3)]
            (loss_of(whole, words[0]) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    off = way = 0.0
    sharded: Any = pair.models[-1].parameters()
    with torch.no_grad():
        for one, other, before in zip(whole.parameters(), sharded, start, strict=True):
            off += float((one - other.full_tensor()).square().sum())
            way += float((one - before).square().sum())
    return off / way


def main(names: list[str]) -> None:
    """Run scenarios, and print a line of each; `node_groups` first: each node is a group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if names[0] == "node_groups":
        rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        port = os.environ["NODE_PORTS"].split(",")[rank // local]
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank % local, world_size=local
        )
    else:
        dist.init_process_group("gloo")
    for name in [name for name in names if name != "node_groups"]:
        options, step = SCENARIOS[name]
        pair = Pair(**options)
        if name == "muon":
            # DTensors take long over it, and HSDP has other last bits.
            pair.models, pair.optimizers = pair.models[-1:], pair.optimizers[-1:]
        pair.train(step)
        if name == "checkpoints":
            through_checkpoints(pair, os.environ["CHECKPOINTS"])
        line = f"{name}: {pair.difference()}\n"
        if name == "muon":
            line += f"muon off: {beside_whole_matrices(pair)}\n"
        if name.startswith("codec"):
            line += f"{name} ratio: {pair.session.metrics()['codec_ratio']:.2f}\n"
        if name == "adamw":
            metrics: Any = pair.session.metrics()
            heard = [row["rank"] for row in metrics["peers"] if row["tx_bytes"]]
            line += f"peers: {heard} of {len(metrics['peers'])} in step {metrics['step']}\n"
        pair.session.close()
        os.write(1, line.encode())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
