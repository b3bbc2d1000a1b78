"""A rank that runs a Python program of a page: `block_program NUMBER FOLDER`.

The names that a block takes from its reader's program (`model`, `loader`, …) are small real
objects; `SUBSTITUTES` are all other changes to what the page prints.
"""

from __future__ import annotations

import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradlane
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.documents.blocks import PROGRAMS, Program
from tests.waiting import eventually

SUBSTITUTES = {
    "/shared/": "{folder}/",
    "dashboard=7070": "dashboard=0",
    "prometheus=9400": "prometheus=0",
    'interface="eth1"': 'interface="lo"',
    '"nccl"': '"gloo"',
    "device_ids=[device]": "device_ids=None",
    'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))': "",
    "model.cuda()": "model",
    # Ranks of a sharded model have a group.
    "dcp.save(": "torch.distributed.init_process_group('gloo')\ndcp.save(",
}
"""Texts of pages, and what a machine without accelerators and with any free port runs instead."""


class Model(nn.Sequential):
    """A classifier of a few hundred parameters."""

    def __init__(self) -> None:
        """Make it, the same on every rank."""
        torch.manual_seed(0)
        layers = {"hidden": nn.Linear(8, 16), "relu": nn.ReLU(), "fc": nn.Linear(16, 3)}
        super().__init__(OrderedDict(layers))


class SummaryWriter:
    """In place of TensorBoard's, which is not installed with gradlane."""

    def __init__(self, folder: str) -> None:
        """Take the folder of a run."""
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Keep a scalar."""
        self.scalars.append((tag, value, step))


class FixedMembers:
    """A session whose members never change, as `ElasticSampler` sees it."""

    step = 0

    def __init__(self, session: gradlane.Session) -> None:
        """Take a session."""
        self.rank, self.world_size = session.rank, session.world_size
        self.gather_integers = session.exchange

    def on_membership(self, callback: Callable[[Any], object]) -> None:
        """Have nothing to tell."""


def _data() -> TensorDataset:
    points = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(points, points[:, :3].argmax(1))


def _backward(points: Any, labels: Any) -> list[tuple[str, Any]]:
    return [("second", np.ones(5, np.float32)), ("first", np.ones((3, 4), np.float32))]


def _accelerator(_: Names) -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _lightning_module(names: Names) -> Any:
    from lightning.pytorch import LightningModule

    class Classifier(LightningModule):  # type: ignore[misc]
        """The model and its loss."""

        def __init__(self) -> None:
            """Make the model."""
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any, number: int) -> Any:
            """Return a batch's loss."""
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            """Return the optimizer."""
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Classifier()


def _trainer(_: Names) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    settings = TrainingArguments(
        "trainer", max_steps=2, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True
    )
    data = [{"input_ids": row, "labels": row} for row in torch.randint(16, (32, 8))]
    return Trainer(GPT2LMHeadModel(GPT2Config(**sizes)), settings, train_dataset=data)


STAND_INS: dict[str, Callable[[Names], Any]] = {
    "AdamW": lambda _: torch.optim.AdamW,
    "DataLoader": lambda _: DataLoader,
    "DDP": lambda _: DistributedDataParallel,
    "DistributedSampler": lambda _: DistributedSampler,
    "Model": lambda _: Model,
    "SummaryWriter": lambda _: SummaryWriter,
    "accelerator": _accelerator,
    "backward": lambda _: _backward,
    "batch": lambda _: next(iter(DataLoader(_data(), 4))),
    "batches": lambda names: names["loader"],
    "clip_grad_norm_": lambda _: nn.utils.clip_grad_norm_,
    "data": lambda _: _data(),
    "device": lambda _: "cpu",
    "dist": lambda _: dist,
    "epochs": lambda _: 2,
    "example": lambda names: names["batch"][0],
    "f": lambda _: "model.pt",
    "gradlane": lambda _: gradlane,
    "loader": lambda _: DataLoader(_data(), batch_size=8),
    "loss": lambda names: names["loss_fn"](names["model"](names["example"]), names["batch"][1]),
    "loss_fn": lambda _: nn.functional.cross_entropy,
    "model": lambda _: Model(),
    "module": _lightning_module,
    "nn": lambda _: nn,
    "optimizer": lambda names: torch.optim.SGD(names["model"].parameters(), lr=0.1),
    "os": lambda _: os,
    "parameters": lambda _: {
        "first": np.ones((3, 4), np.float32),
        "second": np.ones(5, np.float32),
    },
    "rate": lambda _: 0.1,
    "sampler": lambda names: gradlane.ElasticSampler(_data(), 8, FixedMembers(names["session"])),
    "scheduler": lambda names: torch.optim.lr_scheduler.StepLR(names["optimizer"], 1),
    "session": lambda names: names.open_session(),
    "steps": lambda _: 3,
    "torch": lambda _: torch,
    "trainer": _trainer,
    "wandb": lambda _: types.SimpleNamespace(log=lambda values, step: None),
}


def jax_stand_ins() -> dict[str, Callable[[Names], Any]]:
    """Return the stand-ins of programs that use JAX."""
    import jax

    class Sgd:
        """In place of an optimizer of optax."""

        def update(self, gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
            """Return what to add to the parameters, and the state."""
            return jax.tree.map(lambda one: -0.1 * one, gradients), state

    def loss(params: Any, points: Any, labels: Any) -> Any:
        return ((points @ params["weight"] + params["bias"] - labels) ** 2).mean()

    points, labels = np.ones((4, 3), np.float32), np.ones(4, np.float32)
    optax = types.SimpleNamespace(
        apply_updates=lambda params, updates: jax.tree.map(np.add, params, updates)
    )
    return {
        "batches": lambda _: [(points, labels)] * 3,
        "jax": lambda _: jax,
        "labels": lambda _: labels,
        "loss": lambda _: loss,
        "optax": lambda _: optax,
        "optimizer": lambda _: Sgd(),
        "params": lambda _: {"weight": np.zeros(3, np.float32), "bias": np.float32(0.0)},
        "points": lambda _: points,
        "state": lambda _: None,
    }


class Names(dict[str, Any]):
    """The global names of a block; those of its reader's program are made when first read."""

    def __init__(self, stand_ins: Mapping[str, Callable[[Names], Any]], *, prepares: bool) -> None:
        """Start empty.

        Args:
            stand_ins: makers of values, by name.
            prepares: whether the block prepares its model itself.
        """
        super().__init__(__name__="__main__")
        self._stand_ins = stand_ins
        self._prepares = prepares

    def __missing__(self, name: str) -> Any:
        """Make a stand-in."""
        self[name] = self._stand_ins[name](self)
        return self[name]

    def open_session(self) -> gradlane.Session:
        """Return a session, in which the model is prepared unless the block does that."""
        session = gradlane.init()
        if not self._prepares:
            session.prepare(self["model"], self["optimizer"])
        return session


def run(program: Program, folder: Path) -> None:
    """Run a program of a page, and close the sessions that it leaves open.

    Raises:
        RuntimeError: it failed; the message says where.
    """
    text = program.text
    for printed, runs in SUBSTITUTES.items():
        text = text.replace(printed, runs.format(folder=folder))
    stand_ins = STAND_INS | (jax_stand_ins() if "jax" in program.packages else {})
    names = Names(stand_ins, prepares="session.prepare(" in text)
    try:
        exec(compile(text, program.place, "exec"), names)
    except Exception as error:
        raise RuntimeError(f"{program.place}: {type(error).__name__}: {error}") from error
    for value in list(names.values()):
        if isinstance(value, gradlane.Session):
            value.close()


def main() -> None:
    """Run a program by its number, in a folder with the files that pages name."""
    program, folder = PROGRAMS[int(sys.argv[1])], Path(sys.argv[2])
    os.chdir(folder)
    Plan("a test", ClusterFacts(2, 1e9), "-", Settings("slicing")).save("plan.json")
    run(program, folder)
    print(f"\nran {program.place}", flush=True)
    # Rank 0 keeps the store: a rank that starts late, and trains nothing, may still look for it.
    (folder / f"ran-{os.environ['RANK']}").touch()
    assert eventually(
        lambda: len(list(folder.glob("ran-*"))) == int(os.environ["WORLD_SIZE"]), 60.0
    )
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    if program.packages or "DDP(" in program.text or "DataParallel(" in program.text:
        # Gloo's threads may outlive the interpreter, see `leave` in `examples/common.py`.
        os._exit(0)


if __name__ == "__main__":
    main()
