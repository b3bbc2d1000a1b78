"""The cost of recording a training step: the same steps with and without a recorder, in turns.

A residual network of 62 tensors and a transformer of 51, small enough for one core; on CUDA with
`--device cuda`. With and without take turns of a few steps in one process, so that whatever else
the machine does meets both. The cost is that of hooks, so it grows with the number of modules and
not with their size: the smaller the step, the larger its share.

    python benchmarks/profiler_overhead.py --json overhead.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.planning.profiler.recorder import Recorder


class Block(nn.Module):
    """Two convolutions with batch norm, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Create a block that divides width and height by `stride`."""
        super().__init__()
        self.convolution1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.convolution2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU()
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, images: Tensor) -> Tensor:
        """Map images (N, inputs, H, W) to (N, outputs, H / stride, W / stride)."""
        hidden = self.relu(self.norm1(self.convolution1(images)))
        mixed: Tensor = self.relu(self.norm2(self.convolution2(hidden)) + self.around(images))
        return mixed


def residual_network() -> nn.Module:
    """Return ResNet-18 on images of 32 x 32, with a quarter of its channels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    inputs = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2), (128, 2)):
        layers += [Block(inputs, outputs, stride), Block(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Transformer(nn.Module):
    """Four layers of torch's own encoder over 256 bytes, of width 128."""

    def __init__(self) -> None:
        """Create the model."""
        super().__init__()
        self.token = nn.Embedding(256, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens (N, T) to scores (N, T, 256)."""
        scores: Tensor = self.head(self.body(self.token(tokens)))
        return scores


def main() -> None:
    """Run, print a table, and write JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps a turn")
    parser.add_argument("--turns", type=int, default=20, help="turns with, and as many without")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", metavar="PATH", help="write the rows there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        measure(name, model, batch, arguments.device, arguments.steps, arguments.turns)
        for name, model, batch in (
            ("residual network", residual_network(), torch.randn(32, 3, 32, 32)),
            ("transformer", Transformer(), torch.randint(0, 256, (8, 64))),
        )
    ]
    print(f"{'model':<18} {'tensors':>8} {'plain, ms':>10} {'recorded, ms':>13} {'cost':>8}")
    for row in rows:
        print(
            f"{row['model']:<18} {row['tensors']:>8} {row['plain_step_s'] * 1e3:>10.2f} "
            f"{row['recorded_step_s'] * 1e3:>13.2f} {row['overhead'] * 100:>7.2f}%"
        )
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=2)


def measure(
    name: str, model: nn.Module, batch: Tensor, device: str, steps: int, turns: int
) -> dict[str, Any]:
    """Train in turns with and without a recorder; returns medians of steps and their ratio.

    The cost is the median over turns of the recorded turn's time over that of the plain turn
    beside it, minus one.
    """
    model, batch = model.to(device), batch.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    recorder = Recorder(model)

    def step() -> None:
        scores = model(batch)
        scores.logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def recorded() -> None:
        recorder.begin_step()
        step()
        recorder.end_step()

    def turn(run: Callable[[], None]) -> float:
        if device != "cpu":
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(steps):
            run()
        if device != "cpu":
            torch.cuda.synchronize()
        return (time.perf_counter() - start_s) / steps

    turn(step)
    plain_s: list[float] = []
    recorded_s: list[float] = []
    for number in range(turns):
        # Neither is always the first of a pair.
        for with_recorder in (number % 2 == 0, number % 2 == 1):
            if with_recorder:
                recorder.attach()
                recorded_s.append(turn(recorded))
                recorder.detach()
            else:
                plain_s.append(turn(step))
    ratios = [one / other for one, other in zip(recorded_s, plain_s, strict=True)]
    profile = recorder.profile(name)
    return {
        "model": name,
        "device": profile.device,
        "tensors": len(profile.tensors),
        "modules": len(profile.modules),
        "turns": turns,
        "steps": steps,
        "plain_step_s": statistics.median(plain_s),
        "recorded_step_s": statistics.median(recorded_s),
        "overhead": statistics.median(ratios) - 1,
    }


if __name__ == "__main__":
    main()
