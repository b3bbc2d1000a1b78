"""CIFAR-10 in the files of its Python version (Krizhevsky 2009), and ResNet-110 (He et al. 2016).

The files are pickles, which can run anything that they name: these are read with NumPy's arrays
and nothing else.
"""

from __future__ import annotations

import pickle
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gradlane_papers.accuracy.networks import Residual

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images (samples, 3, 32, 32), f32 about 0 with deviation 1, and classes (samples,), int64."""
TRAINING_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
HELD_OUT_FILE = "test_batch"
HELD_OUT_IMAGES = 1000
"""Of the test images, the first; all of them would take longer than the training between."""
IMAGE_BATCH = 32
BLOCKS_PER_STAGE = 18
_INNER_FOLDER = "cifar-10-batches-py"
_PIXELS = 3 * 32 * 32
_CLASSES = 10
_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("_codecs", "encode"),
}

_chosen: list[Path] = []


class _Arrays(pickle.Unpickler):
    """Reads arrays, and refuses all else that a pickle can name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")
        return super().find_class(module_name, global_name)


def use_folder(path: Path) -> None:
    """Take the images from this folder from now on.

    Args:
        path: the folder of the files, or the one that holds `cifar-10-batches-py`.

    Raises:
        ValueError: files are missing; the message names them.
    """
    inner = path / _INNER_FOLDER
    folder = inner if inner.is_dir() else path
    missing = [name for name in (*TRAINING_FILES, HELD_OUT_FILE) if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{path} is no folder of CIFAR-10's Python version: it lacks {', '.join(missing)}; "
            "unpack cifar-10-python.tar.gz and name the folder cifar-10-batches-py"
        )
    _chosen[:] = [folder]


def read_file(path: Path) -> Batch:
    """Return the images and classes of one file.

    Raises:
        ValueError: it is none of CIFAR-10's.
    """
    try:
        with path.open("rb") as file:
            pixels, classes = _content(file)
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no file of CIFAR-10's Python version: {error}") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 2 or pixels.shape != (len(classes), _PIXELS):
        raise ValueError(
            f"{path} has pixels of shape {pixels.shape} and type {pixels.dtype} for {len(classes)} "
            f"classes; CIFAR-10 has {_PIXELS} bytes an image"
        )
    if len(classes) == 0 or not 0 <= classes.min() <= classes.max() < _CLASSES:
        raise ValueError(f"{path} has other classes than 0 to {_CLASSES - 1}")
    images = torch.from_numpy(pixels.astype(np.float32)).view(-1, 3, 32, 32) / 255.0
    mean, deviation = (
        torch.tensor(values, dtype=torch.float32, device="cpu").view(3, 1, 1)
        for values in (_MEAN, _DEVIATION)
    )
    return (images - mean) / deviation, torch.from_numpy(classes)


def _content(file: IO[bytes]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    content = _Arrays(file, encoding="bytes").load()
    return np.asarray(content[b"data"]), np.asarray(content[b"labels"], dtype=np.int64)


@lru_cache(maxsize=1)
def _training_images(folder: Path) -> Batch:
    parts = [read_file(folder / name) for name in TRAINING_FILES]
    return torch.cat([images for images, _ in parts]), torch.cat([kinds for _, kinds in parts])


@lru_cache(maxsize=1)
def _held_out_images(folder: Path) -> Batch:
    images, classes = read_file(folder / HELD_OUT_FILE)
    return images[:HELD_OUT_IMAGES], classes[:HELD_OUT_IMAGES]


@lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(count))


def _folder() -> Path:
    if not _chosen:
        raise ValueError("task cifar10 needs CIFAR-10's Python version: name its folder by --data")
    return _chosen[0]


def batch(seed: int, worker: int, workers: int, step: int) -> Batch:
    """Return a worker's images of a step, without augmentation.

    Raises:
        ValueError: no folder was named, or it holds too few images for so many workers.
    """
    images, classes = _training_images(_folder())
    per_epoch = len(classes) // (IMAGE_BATCH * workers)
    if per_epoch == 0:
        raise ValueError(
            f"{len(classes)} images are too few for {workers} workers with {IMAGE_BATCH} each"
        )
    epoch, position = divmod(step, per_epoch)
    start = (position * workers + worker) * IMAGE_BATCH
    chosen = _epoch(seed, epoch, len(classes))[start : start + IMAGE_BATCH]
    return images[chosen], classes[chosen]


def held_out() -> Batch:
    """Return the images that nobody trains on."""
    return _held_out_images(_folder())


class ResNet110(nn.Module):
    """54 residual blocks in three stages on 32x32 images: 1,730,522 parameters.

    With normalization over groups instead of batches, whose statistics workers do not share, and
    with a convolution in the two shortcuts that change the shape.
    """

    def __init__(self) -> None:
        """Create the layers."""
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 16)
        blocks = []
        for inputs, outputs in ((16, 16), (16, 32), (32, 64)):
            stride = outputs // inputs
            blocks.append(Residual(inputs, outputs, stride))
            blocks += [Residual(outputs, outputs, 1) for _ in range(BLOCKS_PER_STAGE - 1)]
        self.blocks = nn.Sequential(*blocks)
        self.output = nn.Linear(64, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (samples, 3, 32, 32) to scores (samples, 10)."""
        values = self.blocks(functional.relu(self.norm(self.stem(images))))
        scores: torch.Tensor = self.output(values.mean(dim=(2, 3)))
        return scores
