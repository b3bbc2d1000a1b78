"""Whether anything grows while a session trains for very many steps.

A few processes on this machine train a model of two thousand parameters for so many steps that a
leak of one small object a step is plain to see. Each of them says now and then how much memory it
has (resident, and, exactly, what the C library and the interpreter have handed out), how many
descriptors and threads, and how many keys there are in the rendezvous store. What is there after a
quarter of the steps must be all that is there at the end.

    python -m benchmarks.endurance --steps 20000 --json endurance.json
    python -m benchmarks.endurance --cases reopen --steps 200
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # the first step of an optimizer loads it, in each rank that is forked
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import TCPStore

import gradlane
from gradlane.training.options.options import keywords_of

SAMPLES = 40
MEETING_TIMEOUT_S = 120.0
"""Longest wait for the other ranks between two sessions."""
MEASURES = (
    "rss_bytes",
    "heap_bytes",
    "python_blocks",
    "descriptors",
    "threads",
    "store_keys",
    "scratch_bytes",
)
"""The quantities that are sampled, in the order of `sample`."""
LIMITS_A_STEP = {
    "heap_bytes": 4.0,
    "python_blocks": 0.01,
    "descriptors": 0.0,
    "threads": 0.0,
    "store_keys": 0.0,
    "scratch_bytes": 1.0,
}
"""How much of each may come with a step. Four bytes a step are 24 MB after six million steps. The
resident memory is reported and not judged: it goes by pages, and by what the allocator keeps."""
LIMITS_A_SESSION = {**LIMITS_A_STEP, "heap_bytes": 2_000.0, "python_blocks": 4.0}
"""The same for sessions that are opened and closed: the interpreter and torch keep some of each."""


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        options: for `gradlane.init`.
        optimizer: of `torch.optim`.
        clips: whether averaged gradients are read between backward and step.
        together_every: steps from one `session.synchronize()` to the next; 0: none.
        slow_every: the last rank sleeps a few milliseconds every so many steps; 0: never.
        checkpoint_every: steps from one checkpoint to the next; 0: none.
        reopens: whether each step is a session of its own.
    """

    options: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "SGD"
    clips: bool = False
    together_every: int = 0
    slow_every: int = 0
    checkpoint_every: int = 0
    reopens: bool = False


CASES = {
    "p3": Case({"check_every": 20}),
    "clipping": Case(optimizer="AdamW", clips=True),
    "codec": Case({"codec": "onebit"}),
    "sparse": Case({"codec": "dgc:ratio=0.05"}),
    "server": Case({"update": "server"}, optimizer="AdamW"),
    "stragglers": Case({"stragglers": "drop", "late": "carry"}, slow_every=7),
    "asgd": Case({"strategy": "asgd", "update": "server"}, together_every=50),
    "ring": Case({"scheme": "ring", "codec": "qsgd:bits=8"}),
    "factors": Case({"scheme": "sfb"}),
    "adam": Case({"scheme": "adam"}),
    "checkpoints": Case({"codec": "onebit"}, checkpoint_every=50),
    "reopen": Case(reopens=True),
}


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _mallinfo() -> Any:
    # Looked up once: ctypes makes new types for a library each time that it is opened.
    found: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if found is not None:
        found.restype = _Mallinfo
    return found


_MALLINFO = _mallinfo()


def _forget_names() -> None:
    """Empty the interpreter's cache of attribute names.

    It keeps up to 4,096 names, also such as `"do_" + method` that are made anew with each lookup,
    and fills up slowly: for thousands of steps that looks like a leak of some hundredths of an
    object.
    """
    # Since Python 3.13 it has another name.
    getattr(sys, "_clear_internal_caches", getattr(sys, "_clear_type_cache", int))()


def heap_bytes() -> int:
    """Return what the C library has handed out to all that runs here; 0 where it cannot tell."""
    if _MALLINFO is None:
        return 0
    found = _MALLINFO()
    return int(found.uordblks) + int(found.hblkhd)


def sample(store: Any, session: gradlane.Session | None) -> dict[str, int]:
    """Say what this process has now."""
    gc.collect()
    _forget_names()
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    found = {
        "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "heap_bytes": heap_bytes(),
        "python_blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "store_keys": store.num_keys(),
        "scratch_bytes": 0,
    }
    if session is not None:
        found["scratch_bytes"] = session.metrics()["scratch_bytes"]
        with urllib.request.urlopen(
            f"http://127.0.0.1:{session.monitoring.prometheus_port}/metrics", timeout=20
        ) as answer:
            assert b"gradlane_steps_total" in answer.read()
    return found


class _Nowhere:
    """A TensorBoard writer that keeps nothing."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Forget it."""


def follow(
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    *,
    case: str,
    steps: int,
    samples: int = SAMPLES,
    folder: str = "",
    on_sample: Callable[[int], None] = lambda step: None,
) -> list[dict[str, int]]:
    """Train on one rank, and return what it had, at so many moments.

    Args:
        store: a `TCPStore`.
        rank: this rank.
        world_size: number of ranks.
        job: name of the job.
        case: one of `CASES`.
        steps: to be trained; of `reopen`: sessions.
        samples: how often to look.
        folder: for checkpoints.
        on_sample: called with the number of steps that are done.
    """
    how = CASES[case]
    torch.manual_seed(rank)
    every = max(1, steps // samples)
    # Room for all of it at once: what is kept here must not look like a leak.
    room = np.zeros((steps // every, 1 + len(MEASURES)), dtype=np.int64)

    def look(step: int, session: gradlane.Session | None) -> None:
        if step % every == 0:
            room[step // every - 1] = (step, *sample(store, session).values())
            on_sample(step)

    # What is there by now is there for good: looking for garbage need not go through all of torch.
    gc.freeze()
    try:
        _train(how, store, rank, world_size, job, folder, steps, look, every)
    finally:
        gc.unfreeze()
    # Where the last steps were passed nobody has looked.
    rows = [row for row in room.tolist() if row[0] > 0]
    return [dict(zip(("step", *MEASURES), row, strict=True)) for row in rows]


def _meet(store: Any, key: str, arrivals: int) -> None:
    """Wait until so many ranks have come here, over all steps."""
    deadline_s = time.monotonic() + MEETING_TIMEOUT_S
    found = store.add(key, 1)
    while found < arrivals:
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{found} of {arrivals} arrivals at {key}")
        time.sleep(0.001)
        found = store.add(key, 0)


def _train(
    how: Case,
    store: Any,
    rank: int,
    world_size: int,
    job: str,
    folder: str,
    steps: int,
    look: Callable[[int, gradlane.Session | None], None],
    every: int,
) -> None:
    inputs = torch.randn(8, 24)
    if how.reopens:
        for step in range(1, steps + 1):
            with _opened(how, store, rank, world_size, job, folder) as (session, model, optimizer):
                for _ in range(2):
                    _step(how, session, model, optimizer, inputs)
            # The store is all ranks': none may open the next session while another one looks.
            _meet(store, f"{job}/closed", step * world_size)
            look(step, None)
            _meet(store, f"{job}/looked", step * world_size)
        return
    with _opened(how, store, rank, world_size, job, folder) as (session, model, optimizer):
        session.log_to(_Nowhere(), every=10)
        batches: Iterable[int] = range(1, steps + 1)
        if "stragglers" in how.options:
            batches = session.keep_pace(batches)
        looked = 0
        for step in batches:
            if how.slow_every and rank == world_size - 1 and step % how.slow_every == 0:
                time.sleep(0.003)
            _step(how, session, model, optimizer, inputs)
            if how.together_every and step % how.together_every == 0:
                session.synchronize()
            # Steps that were passed have no turn here.
            if step // every > looked:
                looked = step // every
                look(looked * every, session)


@contextlib.contextmanager
def _opened(
    how: Case, store: Any, rank: int, world_size: int, job: str, folder: str
) -> Iterator[tuple[gradlane.Session, nn.Module, torch.optim.Optimizer]]:
    model = nn.Sequential(nn.Linear(24, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 12))
    optimizer = getattr(torch.optim, how.optimizer)(model.parameters(), lr=1e-4)
    options = dict(how.options)
    if how.checkpoint_every:
        options.update(
            checkpoint_folder=Path(folder) / job,
            checkpoint_every=how.checkpoint_every,
            checkpoint_keep=2,
        )
    with gradlane.init(
        **keywords_of(
            store=store,
            rank=rank,
            world_size=world_size,
            job=job,
            advertise="127.0.0.1",
            slice_elems=500,
            prometheus=0,
            summary=False,
            **options,
        )
    ) as session:
        session.prepare(model, optimizer)
        yield session, model, optimizer


def _step(
    how: Case,
    session: gradlane.Session,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
) -> None:
    model(inputs).square().mean().backward()
    if how.clips:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def growth(found: Sequence[dict[str, int]], name: str) -> float:
    """Return how much of something came with each step after the first quarter of them.

    The last quarter's samples are compared with the second quarter's, by the least and by the
    middle of them; the smaller difference counts. While a checkpoint is written there is more, now
    and then; what leaks is in all of them.
    """
    quarter = len(found) // 4
    early, late = found[quarter : 2 * quarter], found[-quarter:]

    def more(key: str, of: Callable[[Iterable[int]], float]) -> float:
        return of(row[key] for row in late) - of(row[key] for row in early)

    differences = (more(name, min), more(name, statistics.median))
    return min(differences) / more("step", statistics.median)


def verdict(case: str, by_rank: Sequence[Sequence[dict[str, int]]]) -> dict[str, Any]:
    """Compare what each rank had with the limits.

    Returns:
        A row: what there was at the end, what came with each step (the worst rank's), and `grown`:
        what grew by more than it may.
    """
    limits = LIMITS_A_SESSION if CASES[case].reopens else LIMITS_A_STEP
    row: dict[str, Any] = {"case": case, "steps": by_rank[0][-1]["step"], "ranks": len(by_rank)}
    row["last"] = {
        name: max(found[-1][name] for found in by_rank) for name in ("rss_bytes", *limits)
    }
    row["a_step"] = {
        name: max(growth(found, name) for found in by_rank) for name in ("rss_bytes", *limits)
    }
    row["grown"] = [name for name, most in limits.items() if row["a_step"][name] > most]
    return row


def _serve(
    pipe: Any, port: int, rank: int, world_size: int, case: str, steps: int, folder: str
) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    try:
        found = follow(
            store,
            rank,
            world_size,
            f"endurance-{case}",
            case=case,
            steps=steps,
            folder=folder,
            on_sample=lambda step: pipe.send(step),
        )
        pipe.send(found)
    except BaseException:
        pipe.send(f"rank {rank}: {traceback.format_exc()}")


def run(case: str, ranks: int, steps: int, console: Console) -> list[list[dict[str, int]]]:
    """Train in processes of their own; returns each rank's samples.

    Raises:
        RuntimeError: a rank failed.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, console.status(f"{case}: beginning") as status:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes, processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_serve, args=(theirs, store.port, rank, ranks, case, steps, folder)
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        by_rank: list[list[dict[str, int]]] = []
        try:
            for pipe in pipes:
                while isinstance(said := pipe.recv(), int):
                    status.update(f"{case}: {said} of {steps} steps")
                if isinstance(said, str):
                    raise RuntimeError(said)
                by_rank.append(said)
        except EOFError:
            raise RuntimeError(f"a rank of {case} ended without a word") from None
        finally:
            for process in processes:
                process.join(20)
                process.kill()
    return by_rank


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title="what there was at the end, and what came with each step")
    table.add_column("case")
    for name in ("steps", "rss", "heap", "Python's blocks", "descriptors", "threads", "keys", ""):
        table.add_column(name, justify="right")
    for row in rows:
        last, more = row["last"], row["a_step"]
        table.add_row(
            row["case"],
            f"{row['steps']:,}",
            f"{last['rss_bytes'] / 1e6:.1f} MB {more['rss_bytes']:+.1f} B",
            f"{last['heap_bytes'] / 1e6:.2f} MB {more['heap_bytes']:+.2f} B",
            f"{last['python_blocks']:,} {more['python_blocks']:+.4f}",
            *(
                f"{last[name]} {more[name]:+.4f}"
                for name in ("descriptors", "threads", "store_keys")
            ),
            "grows: " + ", ".join(row["grown"]) if row["grown"] else "flat",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what was asked for; returns 0 if nothing has grown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20_000, help="of each case")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, help="file for the rows and all samples")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    rows = []
    for case in given.cases.split(","):
        if case not in CASES:
            parser.error(f"unknown case {case!r}; known are {', '.join(CASES)}")
        steps = min(given.steps, 500) if CASES[case].reopens else given.steps
        if steps < SAMPLES:
            parser.error(f"steps is {steps}; it must be {SAMPLES} or more")
        begun_s = time.monotonic()
        by_rank = run(case, given.ranks, steps, console)
        row = {**verdict(case, by_rank), "wall_s": time.monotonic() - begun_s, "samples": by_rank}
        rows.append(row)
        console.print(f"{case}: {'grows: ' + str(row['grown']) if row['grown'] else 'flat'}")
        if given.json:
            given.json.write_text(json.dumps(rows, indent=1))
    Console(width=170).print(_table(rows))
    return 1 if any(row["grown"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
