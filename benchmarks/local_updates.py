"""Loss and bytes of local updates beside exact training, on a small language model.

`.venv/bin/python -m benchmarks.local_updates` trains the accuracy study's transformer over
characters of the standard library on four ranks of this machine, over loopback, with AdamW: exactly
and with local updates, at equal samples, from the same values and with three seeds each. It prints
the held-out loss and each rank's bytes a step, with gradlane's headers. `--json PATH` writes the
rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from torch.nn import functional

import gradlane
from gradlane.lab.workloads.char_transformer import SYMBOLS, standard_library_text
from gradlane.training.core import load_core
from gradlane_papers.accuracy.networks import CONTEXT, SmallTransformer

RANKS, BATCH = 4, 8
HELD_OUT_WINDOWS = 512
WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "Local SGD, H = 8": {"update": gradlane.Local(steps=8, outer="average")},
    "DiLoCo, H = 8": {"update": gradlane.Local(steps=8)},
    "DiLoCo, H = 32": {"update": gradlane.Local(steps=32)},
    "DiLoCo, H = 32, int8": {"update": gradlane.Local(steps=32), "codec": "int8"},
    "Streaming DiLoCo, H = 32": {
        "update": gradlane.Local(steps=32, fragments=4, overlap_steps=2, mix=0.5)
    },
}


def windows(text: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """Return random windows of a text, (count, `CONTEXT` + 1)."""
    starts = torch.randint(len(text) - CONTEXT - 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(CONTEXT + 1)]


def loss_of(model: torch.nn.Module, symbols: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of predicting each next symbol."""
    scores = model(symbols[:, :-1])
    return functional.cross_entropy(scores.reshape(-1, SYMBOLS), symbols[:, 1:].reshape(-1))


def train(session: gradlane.Session, seed: int, steps: int, rate: float) -> tuple[float, float]:
    """Train on one rank; return the held-out loss and bytes sent a step."""
    text = torch.from_numpy(standard_library_text()).long()
    training = len(text) * 9 // 10
    share = training // RANKS
    own = text[session.rank * share : (session.rank + 1) * share]
    model = seeded(SmallTransformer, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    session.prepare(model, optimizer)
    session.exchange("all have rank 0's values")
    before = session.metrics()["tx_bytes"]
    generator = torch.Generator().manual_seed(1000 * seed + session.rank)
    for _ in range(steps):
        loss_of(model, windows(own, BATCH, generator)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    session.synchronize()
    session.exchange("all have what this rank has sent")
    sent = session.metrics()["tx_bytes"] - before
    session.close()
    held_out = windows(text[training:], HELD_OUT_WINDOWS, torch.Generator().manual_seed(1))
    with torch.no_grad():
        return float(loss_of(model, held_out)), sent / steps


def main() -> None:
    """Train all ways with all seeds, and print a line for each way."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    core: Any = load_core()
    rows = []
    for name, options in WAYS.items():
        found = []
        for seed in range(given.seeds):
            ranks = run_ranks(
                RANKS,
                lambda session, seed=seed: train(session, seed, given.steps, given.rate),
                core=core,
                local="off",
                summary=False,
                timeout_s=3600,
                **options,
            )
            found.append((ranks[0][0], statistics.mean(sent for _, sent in ranks)))
        losses = [loss for loss, _ in found]
        row = {"way": name, "losses": losses, "bytes_a_step": found[0][1]}
        rows.append(row)
        shown = " ".join(f"{loss:.4f}" for loss in losses)
        mean = statistics.mean(losses)
        print(f"{name}: {shown}, mean {mean:.4f}; {found[0][1]:.0f} bytes a step", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
