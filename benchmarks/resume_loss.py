"""The loss of a training whose ranks are all killed, and that goes on from its last checkpoint.

Four ranks train the digits network of the lab, with momentum kept on the servers and a checkpoint
every few steps. Once they do so to the end. Once more, all of them are killed with SIGKILL at a
step that is drawn, and the training goes on in worlds of four, three and two ranks, each from its
own copy of what the killed ones left. The global batch of a step is the same in every world. The
losses are laid over each other: with as many ranks as before they must have the same bits.

    python benchmarks/resume_loss.py --seed 7 --json resume.json --html resume.html
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first step of an optimizer loads it, in each rank that is forked
from rich.console import Console
from torch._C._distributed_c10d import TCPStore
from torch.nn import functional

from gradlane.lab.workloads.contract import WorkloadSpec
from gradlane.lab.workloads.digits_cnn import DigitsCnn
from gradlane.training.checkpoints.folder import newest

RANKS = 4
RESUMED = "4,3,2"
GLOBAL_BATCH = 48
_START_S = 60.0


class Digits(DigitsCnn):
    """The whole global batch of each step, of which every rank takes its part."""

    batch_size = GLOBAL_BATCH


@dataclass(frozen=True)
class Run:
    """One training, or what went on of one.

    Attributes:
        name: what it is called in tables and plots.
        ranks: number of ranks.
        begun: steps that were behind it.
        losses: mean over the global batch, of each step after these.
        losses_by_rank: each rank's own, of which that is the mean.
        digest: SHA-256 of all parameters at the end.
        wall_s: real seconds.
    """

    name: str
    ranks: int
    begun: int
    losses: list[float]
    losses_by_rank: list[list[float]]
    digest: str
    wall_s: float


def train_rank(
    folder: Path, port: int, rank: int, ranks: int, steps: int, checkpoint: Path, every: int
) -> None:
    """Train on one rank, leaving a line a step in its file, and at the end a digest."""
    import gradlane

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    data = Digits(WorkloadSpec("digits-cnn", paced=False), rank=0, world_size=1)
    torch.manual_seed(0)
    model = data.make_model()
    session = gradlane.init(
        update="server",
        rendezvous=gradlane.Rendezvous(store=store, rank=rank, world_size=ranks, job="resume"),
        network=gradlane.Network(advertise="127.0.0.1"),
        checkpoints=gradlane.Checkpoints(folder=checkpoint, every=every, keep=2),
        monitoring=gradlane.Monitoring(summary=False),
    )
    with session, (folder / f"losses-{rank}").open("w", encoding="utf-8") as lines:
        model, optimizer = session.prepare(model, data.make_optimizer(model))
        for step in range(session.restore(), steps):
            inputs, classes = data.batch(step)
            mine = slice(GLOBAL_BATCH * rank // ranks, GLOBAL_BATCH * (rank + 1) // ranks)
            loss = functional.cross_entropy(model(inputs[mine]), classes[mine])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lines.write(json.dumps([step, loss.item()]) + "\n")
            lines.flush()
        session.synchronize()
        state = hashlib.sha256()
        for parameter in model.parameters():
            state.update(parameter.detach().numpy().tobytes())
    (folder / f"digest-{rank}").write_text(state.hexdigest())


def run_ranks(
    name: str,
    ranks: int,
    steps: int,
    checkpoint: Path,
    every: int,
    kill_at: int | None = None,
) -> Run:
    """Fork the ranks of one training and gather what they left.

    Args:
        name: what it is called.
        ranks: number of ranks.
        steps: steps in all, with those that are behind it.
        checkpoint: folder of its checkpoints.
        every: steps from one checkpoint to the next.
        kill_at: kill all ranks once every one of them has done so many steps, and there is a
            checkpoint.

    Raises:
        RuntimeError: a rank failed, or did not come so far.
    """
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gradlane-") as text:
        folder = Path(text)
        # Held here, where nobody is killed.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes = [
            _fork(partial(train_rank, folder, store.port, rank, ranks, steps, checkpoint, every))
            for rank in range(ranks)
        ]
        ends: list[int] = []
        try:
            if kill_at is not None:
                _wait_for_step(folder, ranks, kill_at, checkpoint)
            else:
                for process in tuple(processes):
                    ends.append(os.waitpid(process, 0)[1])
                    processes.remove(process)
        finally:
            # Also where this program is interrupted: no rank stays behind.
            for process in processes:
                os.kill(process, signal.SIGKILL)
            for process in processes:
                os.waitpid(process, 0)
        if kill_at is None and any(ends):
            raise RuntimeError(f"{name}: ranks ended with {ends}; what they said is above")
        rows = [_rows(folder / f"losses-{rank}") for rank in range(ranks)]
        digests = {path.read_text() for path in folder.glob("digest-*")}
    if len(digests) > 1:
        raise RuntimeError(f"{name}: the ranks' parameters differ at the end")
    count = min(map(len, rows))
    by_rank = [[loss for _, loss in row[:count]] for row in rows]
    return Run(
        name,
        ranks,
        begun=rows[0][0][0] if count else 0,
        losses=[math.fsum(parts) / ranks for parts in zip(*by_rank, strict=True)],
        losses_by_rank=by_rank,
        digest=next(iter(digests), ""),
        wall_s=time.monotonic() - begin_s,
    )


def _fork(program: Callable[[], None]) -> int:
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        program()
        status = 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", flush=True)
    finally:
        os._exit(status)


def _rows(path: Path) -> list[tuple[int, float]]:
    """Return the whole lines of a rank's file: a killed rank may have left a part of one."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [(step, loss) for step, loss in (json.loads(one) for one in lines if one[-1] == "\n")]


def _wait_for_step(folder: Path, ranks: int, count: int, checkpoint: Path) -> None:
    """Wait until all ranks have done so many steps, and any checkpoint is complete."""
    deadline_s = time.monotonic() + _START_S + count

    def waits() -> bool:
        behind = any(len(_rows(folder / f"losses-{rank}")) < count for rank in range(ranks))
        return behind or newest(checkpoint) is None

    while waits():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the ranks did not do {count} steps")
        time.sleep(0.005)


def measure(
    seed: int,
    ranks: int,
    steps: int,
    every: int,
    resumed: Sequence[int],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Train without and with interruption.

    Args:
        seed: draws the step at which all ranks are killed.
        ranks: how many train, and are killed.
        steps: steps of a whole training.
        every: steps from one checkpoint to the next.
        resumed: numbers of ranks to go on with.
        say: told what is being done.

    Returns:
        `killed_at`, `restored_at`, `runs`, and `comparisons`: of each resumed training the largest
        difference of losses from those without interruption, and whether all bits are the same.
    """
    kill_at = random.Random(seed).randrange(every + 1, steps - every)
    with tempfile.TemporaryDirectory(prefix="gradlane-") as text:
        place = Path(text)
        say(f"{ranks} ranks without interruption, {steps} steps")
        whole = run_ranks("uninterrupted", ranks, steps, place / "whole", every)
        say(f"{ranks} ranks, killed after step {kill_at} (seed {seed})")
        left = place / "killed"
        killed = run_ranks("killed", ranks, steps, left, every, kill_at)
        found = newest(left)
        assert found is not None, "the ranks are killed when there is a checkpoint"
        runs = [whole, killed]
        for left_over in resumed:
            say(f"going on from step {found.step} with {left_over} ranks")
            folder = place / f"resumed-{left_over}"
            shutil.copytree(left, folder)
            runs.append(run_ranks(f"resumed with {left_over}", left_over, steps, folder, every))
    return {
        "workload": "digits-cnn",
        "seed": seed,
        "ranks": ranks,
        "steps": steps,
        "global_batch": GLOBAL_BATCH,
        "checkpoint_every": every,
        "killed_at": kill_at,
        "restored_at": found.step,
        "runs": [asdict(run) for run in runs],
        "comparisons": [compared(whole, run) for run in runs[1:]],
    }


def compared(whole: Run, other: Run) -> dict[str, Any]:
    """Compare a training with the one that was not interrupted, step by step."""
    span = slice(other.begun, other.begun + len(other.losses))
    pairs = list(zip(whole.losses[span], other.losses, strict=True))
    differences = [abs(one - two) for one, two in pairs]
    return {
        "name": other.name,
        "ranks": other.ranks,
        "first_step": other.begun,
        "steps": len(pairs),
        "largest_difference": max(differences, default=0.0),
        "at_step": other.begun + differences.index(max(differences)) if differences else None,
        "last_loss": other.losses[-1] if other.losses else None,
        "same_bits": [part[span] for part in whole.losses_by_rank] == other.losses_by_rank
        and other.digest in ("", whole.digest),
    }


def write_page(result: dict[str, Any], path: Path) -> None:
    """Write the curves over each other, their differences, and a table."""
    from gradlane.report.page import Block, Paragraph, Section, Table, measured_here, write_report
    from gradlane.report.plots import line_plot

    runs = {run["name"]: run for run in result["runs"]}
    whole = runs["uninterrupted"]
    curves = {
        name: (list(range(run["begun"], run["begun"] + len(run["losses"]))), run["losses"])
        for name, run in runs.items()
    }
    # Drawn last, in dashes: what lies below it shows through.
    curves["uninterrupted"] = curves.pop("uninterrupted")
    off = {
        name: (xs, [abs(one - whole["losses"][at]) for at, one in zip(xs, ys, strict=True)])
        for name, (xs, ys) in curves.items()
        if name != "uninterrupted"
    }
    rows = [
        [
            row["name"],
            row["first_step"],
            row["steps"],
            row["last_loss"],
            row["largest_difference"],
            "all" if row["same_bits"] else "no: another order of additions",
        ]
        for row in result["comparisons"]
    ]
    columns = ["run", "from step", "steps", "last loss", "largest difference", "same bits"]
    facts = (
        f"All {result['ranks']} ranks were killed after step {result['killed_at']}, drawn by seed "
        f"{result['seed']}; their last complete checkpoint was of step {result['restored_at']}. "
        f"The global batch is {result['global_batch']} images in every world."
    )
    blocks: list[Block] = [
        Paragraph(facts),
        line_plot(
            "Loss",
            curves,
            x_label="step",
            y_label="loss of the global batch",
            dashed=("uninterrupted",),
        ),
        line_plot(
            "Difference from the uninterrupted training",
            off,
            x_label="step",
            y_label="difference of the loss",
        ),
        Table(columns, rows),
        measured_here(),
    ]
    write_report(path, "Killed and resumed: the same loss curve", [Section("", blocks)])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print a table, and write the files that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=7, help="draws the step of the kill")
    parser.add_argument("--ranks", type=int, default=RANKS, help="how many train, and are killed")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    parser.add_argument("--resume", default=RESUMED, help="numbers of ranks to go on with")
    parser.add_argument("--json", type=Path, help="write what was measured there")
    parser.add_argument("--html", type=Path, help="write a page with the curves there")
    given = parser.parse_args(arguments)
    if given.every < 1 or given.steps < 2 * given.every + 2:
        parser.error("--steps must be more than two checkpoints: at least 2 * --every + 2")
    try:
        resumed = [int(part) for part in given.resume.split(",")]
    except ValueError:
        resumed = [0]
    if any(ranks < 1 or GLOBAL_BATCH % ranks for ranks in (given.ranks, *resumed)):
        parser.error(
            f"--ranks is {given.ranks} and --resume {given.resume}: write divisors of "
            f"{GLOBAL_BATCH}, such as 4 and 4,3,2"
        )
    console = Console()
    begin_s = time.monotonic()

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - begin_s:5.1f} s  {text}", highlight=False)

    result = measure(given.seed, given.ranks, given.steps, given.every, resumed, say)
    for row in result["comparisons"]:
        bits = "the same bits" if row["same_bits"] else "other roundings"
        console.print(
            f"{row['name']}: from step {row['first_step']}, {row['steps']} steps, largest "
            f"difference of the loss {row['largest_difference']:.3g}, {bits}",
            highlight=False,
            soft_wrap=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
    if given.html is not None:
        write_page(result, given.html)


if __name__ == "__main__":
    main()
