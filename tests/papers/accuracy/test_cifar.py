"""CIFAR-10's Python version: a tiny folder in its format is read and trained on, others are not."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gradlane.cli.main import app
from gradlane_papers.accuracy import cifar
from gradlane_papers.accuracy.tasks import CIFAR10, TASKS


def write(path: Path, images: int, **change: Any) -> None:
    """Write a file as the published ones are: pickled by Python 2, with keys of bytes."""
    generator = np.random.default_rng(list(path.name.encode()))
    content = {
        b"batch_label": b"made up",
        b"data": generator.integers(0, 256, (images, 3072), dtype=np.uint8),
        b"labels": [int(one) for one in generator.integers(0, 10, images)],
        **{key.encode(): value for key, value in change.items()},
    }
    path.write_bytes(pickle.dumps(content, protocol=2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inner = tmp_path / "cifar-10-batches-py"
    inner.mkdir()
    for name in cifar.TRAINING_FILES:
        write(inner / name, 14)
    write(inner / cifar.HELD_OUT_FILE, 6)
    return tmp_path


def test_images_are_scaled_and_divided_among_workers(folder: Path) -> None:
    cifar.use_folder(folder)
    images, classes = TASKS[CIFAR10].held_out()
    assert images.shape == (6, 3, 32, 32) and classes.dtype == torch.int64
    path = folder / "cifar-10-batches-py" / cifar.HELD_OUT_FILE
    raw = pickle.loads(path.read_bytes(), encoding="bytes")[b"data"]
    # A channel after the other, each row by row.
    blue = raw[2, 2 * 1024 + 5 * 32 + 7] / 255.0
    assert float(images[2, 2, 5, 7]) == pytest.approx((blue - 0.4465) / 0.2616, abs=1e-5)
    (first, _), (second, _) = (TASKS[CIFAR10].batch(1, worker, 2, 0) for worker in range(2))
    both = torch.cat([first, second])
    assert len(torch.unique(both, dim=0)) == len(both) == 2 * cifar.IMAGE_BATCH
    with pytest.raises(ValueError, match="70 images are too few for 3 workers"):
        cifar.batch(1, 0, 3, 0)


def test_it_is_resnet_110() -> None:
    network = cifar.ResNet110()
    convolutions = [
        name
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Conv2d) and "shortcut" not in name
    ]
    assert len(convolutions) + 1 == 110
    assert 1.7e6 < sum(parameter.numel() for parameter in network.parameters()) < 1.8e6


def test_the_command_trains_on_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With fewer blocks and one step: what a step does is the same."""
    monkeypatch.setattr(cifar, "BLOCKS_PER_STAGE", 1)
    task = TASKS[CIFAR10]
    object.__setattr__(task, "quick_steps", 1)
    try:
        arguments = ["lab", "accuracy", "--quick", "--data", str(folder), "--scheme", "p3"]
        arguments += ["--seeds", "1", "--workers", "2", "--output", str(folder / "study")]
        result = CliRunner().invoke(app, arguments)
    finally:
        object.__setattr__(task, "quick_steps", 100)
    assert result.exit_code == 0, result.output
    assert "cifar10" in (folder / "study" / "results.json").read_text()
    assert "ResNet-110 on CIFAR-10" in (folder / "study" / "report.html").read_text()


def command_error(*arguments: str) -> str:
    return str(CliRunner().invoke(app, ["lab", "accuracy", *arguments]).exception)


def test_other_folders_are_refused_by_what_they_lack(folder: Path, tmp_path: Path) -> None:
    inner = folder / "cifar-10-batches-py"
    (inner / "data_batch_3").unlink()
    text = command_error("--data", str(folder))
    assert "lacks data_batch_3;" in text and "cifar-10-python.tar.gz" in text
    assert "test_batch" in command_error("--data", str(tmp_path / "nowhere"))
    assert "--data" in command_error("--task", "cifar10")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run by a pickle",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": np.zeros((14, 3000), dtype=np.uint8)}, "3072 bytes an image"),
        ({"data": np.zeros((14, 3072), dtype=np.float32)}, "float32"),
        ({"labels": [10] * 14}, "other classes"),
        ({"labels": Evil()}, "print"),
    ],
)
def test_wrong_files_are_named(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "data_batch_1"
    write(path, 14, **change)
    with pytest.raises(ValueError, match="data_batch_1") as caught:
        cifar.read_file(path)
    assert words in str(caught.value)
    assert capsys.readouterr().out == ""
    path.write_text("no pickle")
    with pytest.raises(ValueError, match="data_batch_1"):
        cifar.read_file(path)
