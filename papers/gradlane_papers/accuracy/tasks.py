"""Tasks of the study: data, networks, optimizers and the time that a batch stands for.

Batches are a function of (seed, worker, step) alone, so that all strategies see the same ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradlane.lab.workloads.char_transformer import standard_library_text
from gradlane.lab.workloads.gradients import hash_of
from gradlane_papers.accuracy import cifar, mixture, networks

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs, and the classes to predict (int64)."""
Batches = Callable[[int, int, int, int], Batch]
"""From seed, worker, number of workers and step to that worker's batch."""
HELD_OUT_IMAGES = 360
IMAGE_BATCH = 16
TEXT_BATCH = 8
HELD_OUT_WINDOWS = 128
CIFAR10 = "cifar10"
LANGUAGE = "language"
MIXTURE = "mixture"


@dataclass(frozen=True)
class Task:
    """One network with its data.

    Attributes:
        name: of the task.
        what: a few words for reports.
        network: builds the network from torch's global generator.
        batch: a worker's samples.
        held_out: samples that nobody trains on.
        optimizer: `"sgd"` with momentum, or `"adamw"`.
        lr: learning rate.
        momentum: of `sgd`.
        clip: largest 2-norm of the averaged gradient, or None.
        steps: that a full run takes.
        quick_steps: that a quick run takes.
        compute_s: nominal time of a worker's forward and backward.
    """

    name: str
    what: str
    network: Callable[[], nn.Module]
    batch: Batches
    held_out: Callable[[], Batch]
    lr: float
    steps: int
    quick_steps: int
    optimizer: str = "sgd"
    compute_s: float = 0.002
    momentum: float = 0.9
    clip: float | None = None

    def build(self, seed: int) -> nn.Module:
        """Build the network of a seed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.network()

    def make_optimizer(self, model: nn.Module, *, momentum: bool = True) -> torch.optim.Optimizer:
        """Return the task's optimizer, without momentum where something else takes care of it."""
        if self.optimizer == "adamw":
            return torch.optim.AdamW(model.parameters(), lr=self.lr)
        return torch.optim.SGD(
            model.parameters(), lr=self.lr, momentum=self.momentum if momentum else 0.0
        )

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        """Return the mean cross entropy, in nats."""
        inputs, targets = batch
        scores = model(inputs)
        return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())

    def clip_gradients(self, model: nn.Module) -> None:
        """Clip a model's gradients, where the task does."""
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self.clip)

    def evaluate(self, model: nn.Module) -> tuple[float, float]:
        """Return loss and accuracy on the held-out samples."""
        inputs, targets = self.held_out()
        with torch.no_grad():
            scores = model(inputs).flatten(0, -2)
        targets = targets.flatten()
        right = float((scores.argmax(dim=-1) == targets).float().mean())
        return float(functional.cross_entropy(scores, targets)), right


@lru_cache(maxsize=1)
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return scikit-learn's digits in one order for all seeds: the last are held out."""
    from sklearn.datasets import load_digits

    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(classes))
    pixels = torch.from_numpy((images[order] / 16.0).astype(np.float32))
    return pixels.reshape(-1, 1, 8, 8), torch.from_numpy(classes[order].astype(np.int64))


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, count: int) -> torch.Tensor:
    generator = np.random.default_rng((seed, epoch))
    return torch.from_numpy(generator.permutation(count))


def _image_batch(seed: int, worker: int, workers: int, step: int) -> Batch:
    images, classes = _digits()
    training = len(classes) - HELD_OUT_IMAGES
    epoch, position = divmod(step, training // (IMAGE_BATCH * workers))
    start = (position * workers + worker) * IMAGE_BATCH
    chosen = _epoch(seed, epoch, training)[start : start + IMAGE_BATCH]
    return images[chosen], classes[chosen]


def _held_out_images() -> Batch:
    images, classes = _digits()
    return images[-HELD_OUT_IMAGES:], classes[-HELD_OUT_IMAGES:]


@lru_cache(maxsize=1)
def _text() -> torch.Tensor:
    return torch.from_numpy(standard_library_text())


def _windows(starts: list[int], context: int) -> Batch:
    text = _text()
    windows = torch.stack([text[at : at + context + 1] for at in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def _text_batch(
    seed: int, worker: int, workers: int, step: int, context: int = networks.CONTEXT
) -> Batch:
    training = len(_text()) * 9 // 10 - context - 1
    share = training // workers
    starts = [
        worker * share + hash_of(seed, worker, step, sample) % share for sample in range(TEXT_BATCH)
    ]
    return _windows(starts, context)


@lru_cache(maxsize=2)
def _held_out_text(context: int = networks.CONTEXT) -> Batch:
    first = len(_text()) * 9 // 10
    stride = (len(_text()) - first - context - 1) // HELD_OUT_WINDOWS
    return _windows([first + stride * window for window in range(HELD_OUT_WINDOWS)], context)


_IMAGES: dict[str, Any] = {"batch": _image_batch, "held_out": _held_out_images, "steps": 440}
_TEXT: dict[str, Any] = {"batch": _text_batch, "held_out": _held_out_text, "steps": 1200}
_LIBRARY = "predicts characters of Python's own library"
_ALL = (
    Task(
        "mlp",
        "a perceptron on handwritten digits",
        networks.Mlp,
        lr=0.05,
        quick_steps=132,
        **_IMAGES,
    ),
    Task(
        "resnet",
        "a small ResNet on handwritten digits",
        networks.SmallResNet,
        lr=0.05,
        quick_steps=110,
        **_IMAGES,
    ),
    Task(
        "lstm",
        f"an LSTM that {_LIBRARY}",
        networks.CharLstm,
        lr=0.5,
        clip=1.0,
        quick_steps=150,
        **_TEXT,
    ),
    Task(
        "transformer",
        f"a transformer that {_LIBRARY}",
        networks.SmallTransformer,
        optimizer="adamw",
        lr=2e-3,
        quick_steps=120,
        **_TEXT,
    ),
    Task(
        LANGUAGE,
        f"a larger transformer that {_LIBRARY}",
        networks.LanguageModel,
        partial(_text_batch, context=networks.LONG_CONTEXT),
        partial(_held_out_text, networks.LONG_CONTEXT),
        optimizer="adamw",
        lr=1e-3,
        steps=768,
        quick_steps=64,
        compute_s=0.01,
    ),
    Task(
        MIXTURE,
        "a perceptron on images of a known mixture",
        networks.Mlp,
        partial(mixture.batch, IMAGE_BATCH),
        mixture.held_out,
        lr=0.05,
        steps=1500,
        quick_steps=300,
    ),
    Task(
        CIFAR10,
        "ResNet-110 on CIFAR-10",
        cifar.ResNet110,
        cifar.batch,
        cifar.held_out,
        lr=0.05,
        steps=1560,
        quick_steps=100,
        compute_s=0.04,
    ),
)
TASKS = {task.name: task for task in _ALL}
"""The tasks by name; that of CIFAR-10 needs its images, see `cifar.use_folder`."""
HYPERPARAMETERS = ("lr", "momentum")


@lru_cache
def task_of(text: str) -> Task:
    """Return a task by its name, with other hyperparameters where the text says so.

    Args:
        text: such as `resnet` or `resnet/lr=0.1/momentum=0.8`.

    Raises:
        ValueError: there is no such task or hyperparameter, or its value is no positive number.
    """
    name, *settings = text.split("/")
    if name not in TASKS:
        raise ValueError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
    changes: dict[str, float] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            changes[key] = float(value)
        except ValueError:
            changes[key] = 0.0
        if key not in HYPERPARAMETERS or not 0.0 < changes[key] < 100.0:
            raise ValueError(
                f"task {text!r}: {setting!r} is no setting; use "
                f"{' or '.join(f'{one}=NUMBER' for one in HYPERPARAMETERS)}"
            )
    if "momentum" in changes and TASKS[name].optimizer != "sgd":
        raise ValueError(f"task {text!r}: {TASKS[name].optimizer} has no momentum")
    return replace(TASKS[name], name=text, **changes)  # type: ignore[arg-type]
