"""Ways of averaging gradients beside each other: step time, bytes, processor time and loss.

`python -m benchmarks.compared_with --json docs/compared-with.json --markdown docs/compared-with.md`
(root: network namespaces and `tc`) trains the lab's character transformer on four ranks with
AdamW, from the same values and with the same batches, once for each way and seed, ways in turn.
Computing is real and stretched to a fixed time, as an accelerator would take; ports are shaped.
All steps run at the first rate and are followed by the loss on held-out text; the first round of
them is counted in the loss alone. Some more run at the second rate, for its step time.

`--torchft DIR` names a folder that has torchft and what it needs (`pip install --target DIR
torchft`); without it its row says so. `--render` writes the page anew from the rows of `--json`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rank_environment import rank_environment

from gradlane.formats.rates import parse_rate
from gradlane.lab.cluster.counters import read_port_bytes
from gradlane.lab.cluster.namespaces import INTERFACE, EmulatedCluster
from gradlane.lab.workloads import WorkloadSpec, build

RANKS = 4
WORKLOAD = "char-transformer"
BUCKET_MB = 1.0
"""As many buckets for these 4 MB as DDP's default of 25 MB makes of 100 MB."""
ROUND = 32
"""Local steps between two exchanges."""
SPARSE_LOCO = "topk:ratio=0.02,broadcast_ratio=0.08,bits=2,bucket=4096,decay=0.95"
ABSENT = (
    "| Horovod 0.28.1, the newest | does not build with torch 2.15: it asks for C++14, torch's "
    "headers for C++20 | | | | | |"
)
MARKS = ("<!-- measured: begin -->", "<!-- measured: end -->")
NO_EXCHANGE = "none"


@dataclass(frozen=True)
class Way:
    """A way of averaging.

    Attributes:
        name: in the table.
        engine: `none`, `ddp`, `torchft` or `gradlane`.
        hook: DDP's communication hook, as `gradlane.lab.runs.ddp_hooks` names it.
        options: of `gradlane.init`, as text; `update` is parsed.
        is_local: ranks exchange every `ROUND` steps.
    """

    name: str
    engine: str
    hook: str = ""
    options: dict[str, str] = field(default_factory=dict)
    is_local: bool = False


LOCAL = f"local:steps={ROUND}"
WAYS = (
    Way("no exchange: compute alone", NO_EXCHANGE),
    Way("DDP", "ddp"),
    Way("DDP, `fp16_compress_hook`", "ddp", "fp16"),
    Way("DDP, `bf16_compress_hook`", "ddp", "bfloat16"),
    Way("DDP, PowerSGD of rank 4", "ddp", "powersgd:4"),
    Way("DDP, gradlane's hook `qsgd:bits=8`", "ddp", "qsgd:bits=8"),
    Way("gradlane", "gradlane"),
    Way("gradlane, `f16`", "gradlane", options={"codec": "f16"}),
    Way("gradlane, `qsgd:bits=8`", "gradlane", options={"codec": "qsgd:bits=8"}),
    Way("gradlane, `qsgd:bits=4`", "gradlane", options={"codec": "qsgd:bits=4"}),
    Way(f"torchft, `DiLoCo(sync_every={ROUND})`", "torchft", is_local=True),
    Way(f"gradlane, `Local(steps={ROUND})`", "gradlane", options={"update": LOCAL}, is_local=True),
    Way(
        f"gradlane, `Local(steps={ROUND})`, `qsgd:bits=8`",
        "gradlane",
        options={"update": LOCAL, "codec": "qsgd:bits=8"},
        is_local=True,
    ),
    Way(
        f'gradlane, `Local(steps={ROUND}, outer="average")`, SparseLoCo\'s `topk`',
        "gradlane",
        options={"update": f"{LOCAL},outer=average", "codec": SPARSE_LOCO},
        is_local=True,
    ),
)


@dataclass(frozen=True)
class Row:
    """One training of one way.

    Attributes:
        way: its name.
        seed: of values and batches.
        step_s: mean step at the first rate, after the first round.
        slow_step_s: mean step at the second.
        bytes: of the busiest port, in its busier direction, a step at the first rate.
        cpu_s: processor seconds a step and rank at the first rate, computing included.
        loss: on held-out text, after the steps at the first rate.
        load: of the machine, in the minute before the end of these.
    """

    way: str
    seed: int
    step_s: float
    slow_step_s: float
    bytes: float
    cpu_s: float
    loss: float
    load: float


class Training:
    """One rank of a training: takes steps and judges its values."""

    def __init__(self, way: Way, seed: int, batch_time_s: float | None = None) -> None:
        """Build the model and connect it to the other ranks."""
        import torch

        torch.set_num_threads(1)
        rank = int(os.environ["RANK"])
        spec = WorkloadSpec(WORKLOAD, seed=seed, batch_time_s=batch_time_s)
        self._workload = build(spec, rank, RANKS)
        self._model: Any = self._workload.model
        self._optimizer = self._workload.make_optimizer(self._model)
        self._settle: Callable[[], None] = lambda: None
        self._kept: Any = None
        self._step = 0
        if way.engine == "gradlane":
            self._connect_gradlane(way)
        elif way.engine == "ddp":
            self._connect_ddp(way)
        elif way.engine == "torchft":
            self._connect_torchft()

    def _connect_gradlane(self, way: Way) -> None:
        import gradlane
        from gradlane.training.options.local_updates import parse_local

        options: dict[str, Any] = dict(way.options)
        if "update" in options:
            options["update"] = parse_local(options["update"])
        quiet = gradlane.Monitoring(summary=False)
        session = gradlane.init(local="off", monitoring=quiet, **options)
        self._model, self._optimizer = session.prepare(self._model, self._optimizer)
        if not way.is_local:
            self._settle = session.synchronize
        self._kept = session

    def _connect_ddp(self, way: Way) -> None:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        from gradlane.lab.runs.ddp_hooks import register_hook

        dist.init_process_group("gloo")
        self._model = DistributedDataParallel(
            self._model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True
        )
        if way.hook:
            register_hook(self._model, way.hook)

    def _connect_torchft(self) -> None:
        from benchmarks.torchft_beside import torchft_context

        context, self._kept = torchft_context(
            self._model, self._optimizer, LOCAL, os.environ["NODE_ADDRESS"]
        )
        context.__enter__()

    def take(self, steps: int) -> dict[str, float]:
        """Take steps; return `step_s` and `cpu_s`, each of a step."""
        begin_s, cpu_s = time.monotonic(), _cpu_s()
        for _ in range(steps):
            self._workload.begin_step(self._step)
            loss: Any = self._workload.loss(self._model, self._workload.batch(self._step))
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            self._step += 1
        self._settle()
        wall_s = time.monotonic() - begin_s
        return {"step_s": wall_s / steps, "cpu_s": (_cpu_s() - cpu_s) / steps}

    def loss(self) -> float:
        """Return the loss on held-out text."""
        from gradlane.lab.workloads.real import RealWorkload

        assert isinstance(self._workload, RealWorkload)
        return self._workload.evaluate(self._workload.model).loss


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def train(way: Way, seed: int, batch_time_s: float | None = None) -> None:
    """Train on one rank: each line of the input is a number of steps to take, each answer a line.

    An answer to no steps is the loss. The end of the input ends the process: libraries under test
    end in different ways, which nobody waits for.
    """
    with contextlib.suppress(OSError):
        # Before other work on this machine, where the kernel has groups and this is root.
        Path("/proc/self/autogroup").write_text("-15", encoding="utf-8")
    training = Training(way, seed, batch_time_s)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        steps = int(line)
        found = training.take(steps) if steps else {"loss": training.loss()}
        print(json.dumps(found), flush=True)
    os._exit(0)


class Ranks:
    """The processes of one training."""

    def __init__(
        self,
        cluster: EmulatedCluster,
        way: Way,
        seed: int,
        torchft: str = "",
        batch_time_s: float | None = None,
    ) -> None:
        """Start them, and wait until all are connected.

        Args:
            cluster: with a node for each rank.
            way: that they train.
            seed: of values and batches.
            torchft: folder of torchft, where the way needs it.
            batch_time_s: of computing, stretched to; None: the workload's own.
        """
        self._way = way
        port = cluster.next_port()
        self._helpers = []
        if way.engine == "torchft":
            from benchmarks.torchft_beside import LIGHTHOUSE_PORT

            lighthouse = [sys.executable, "-m", "benchmarks.torchft_beside", "--lighthouse"]
            beside = {"PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{torchft}"}
            self._helpers.append(
                cluster.spawn(
                    0,
                    lighthouse,
                    environment=beside,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
            beside["RUST_LOG"] = "error"
            beside["TORCHFT_LIGHTHOUSE"] = f"http://{cluster.addresses[0]}:{LIGHTHOUSE_PORT}"
            time.sleep(8.0)
        else:
            beside = {}
        program = [sys.executable, "-m", "benchmarks.compared_with"]
        program += ["--train", json.dumps(asdict(way)), str(seed)]
        if batch_time_s is not None:
            program.append(str(batch_time_s))
        self._ranks = [
            cluster.spawn(
                rank,
                program,
                environment={
                    **rank_environment(cluster, rank, RANKS, port),
                    "NODE_ADDRESS": cluster.addresses[rank],
                    "GLOO_SOCKET_IFNAME": INTERFACE,
                    **beside,
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        self._answers()

    def ask(self, steps: int) -> list[dict[str, float]]:
        """Have all ranks take steps, or judge their values where there are none."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{steps}\n".encode())
            rank.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, float]]:
        found = []
        for number, rank in enumerate(self._ranks):
            assert rank.stdout is not None
            # Libraries print to the standard output, too.
            line = next((line for line in rank.stdout if line.startswith(b"{")), None)
            if line is None:
                raise SystemExit(f"{self._way.name}: rank {number} has failed; its output is above")
            found.append(json.loads(line))
        return found

    def close(self) -> None:
        """End all processes."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()
        for helper in self._helpers:
            helper.kill()
            helper.wait()


def run_way(cluster: EmulatedCluster, way: Way, seed: int, given: argparse.Namespace) -> Row:
    """Train one way at both rates."""
    cluster.set_rate(round(parse_rate(given.rate)))
    ranks = Ranks(cluster, way, seed, given.torchft)
    try:
        ranks.ask(ROUND)
        before = [read_port_bytes(one) for one in cluster.counter_descriptors()]
        fast = ranks.ask(given.steps - ROUND)
        after = [read_port_bytes(one) for one in cluster.counter_descriptors()]
        load = os.getloadavg()[0]
        loss = ranks.ask(0)[0]["loss"]
        cluster.set_rate(round(parse_rate(given.slow_rate)))
        slow = ranks.ask(2 * ROUND if way.is_local else given.slow_steps)
    finally:
        ranks.close()
    busiest = max(
        late - early
        for ports in zip(before, after, strict=True)
        for early, late in zip(*ports, strict=True)
    )
    return Row(
        way=way.name,
        seed=seed,
        step_s=statistics.mean(one["step_s"] for one in fast),
        slow_step_s=statistics.mean(one["step_s"] for one in slow),
        bytes=busiest / (given.steps - ROUND),
        cpu_s=statistics.mean(one["cpu_s"] for one in fast),
        loss=loss,
        load=load,
    )


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train all ways with all seeds, and return the content of the JSON file."""
    rows: list[dict[str, Any]] = []
    versions = {name: importlib.metadata.version(name) for name in ("torch", "numpy")}
    found = importlib.metadata.distributions(path=given.torchft.split(":")) if given.torchft else ()
    versions |= {one.name: one.version for one in found if one.name.startswith("torchft")}
    ways = [way for way in WAYS if way.engine != "torchft" or given.torchft]
    content = {
        "date": time.strftime("%-d %b %Y", time.gmtime()),
        "rate": given.rate,
        "slow_rate": given.slow_rate,
        "steps": given.steps,
        "slow_steps": given.slow_steps,
        "processors": os.cpu_count(),
        "versions": versions,
        "rows": rows,
    }
    with EmulatedCluster(RANKS, round(parse_rate(given.rate))) as cluster:
        for seed in range(given.seeds):
            for way in ways:
                row = run_way(cluster, way, seed, given)
                rows.append(asdict(row))
                print(
                    f"seed {seed}, {way.name}: {1e3 * row.step_s:.0f} ms, "
                    f"{1e3 * row.slow_step_s:.0f} ms, {row.bytes:.0f} bytes, "
                    f"loss {row.loss:.4f}, {1e3 * row.cpu_s:.0f} ms of a processor, "
                    f"load {row.load:.1f}",
                    flush=True,
                )
                if given.json is not None:
                    # A run of an hour may be ended; what it has measured stays.
                    given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return content


def table(content: dict[str, Any]) -> str:
    """Return the Markdown table of measured rows, and the line that says how they were measured."""
    rows = [Row(**row) for row in content["rows"]]
    seeds = sorted({row.seed for row in rows})
    names = [way.name for way in WAYS]
    lines = [
        f"| | ms a step at {content['rate']} | at {content['slow_rate']} | kB a step and port "
        "| processor ms a step | held-out loss | load |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: |",
    ]
    for name in names:
        own = [row for row in rows if row.way == name]
        if not own:
            lines.append(f"| {name} | not installed | | | | | |")
            continue
        fast, slow, sent, cpu, load = (
            statistics.mean(values)
            for values in zip(
                *((row.step_s, row.slow_step_s, row.bytes, row.cpu_s, row.load) for row in own),
                strict=True,
            )
        )
        losses = " ".join(f"{row.loss:.3f}" for row in own)
        lines.append(
            f"| {name} | {1e3 * fast:.0f} | {1e3 * slow:.0f} | {sent / 1e3:,.0f} "
            f"| {1e3 * cpu:.0f} | {losses} | {load:.1f} |"
        )
    lines.append(ABSENT)
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    said = (
        f"{content['date']}; {content['steps']} steps, seeds {', '.join(map(str, seeds))}, "
        f"{content['slow_steps']} further steps at {content['slow_rate']} "
        f"({2 * ROUND} of local updates); {versions}; {content['processors']} processors, "
        "shared with other work."
    )
    return "\n".join([*lines, "", said])


def between(text: str, marks: tuple[str, str], inner: str) -> str:
    """Return a text with something else between its marks.

    Raises:
        ValueError: it does not have both marks.
    """
    begin, end = marks
    if begin not in text or end not in text:
        raise ValueError(f"the page needs the lines {begin} and {end}")
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}{inner}{end}{tail}"


def with_table(page: str, measured: str) -> str:
    """Return a page with another table between its marks.

    Raises:
        ValueError: it does not have both marks.
    """
    return between(page, MARKS, f"\n\n{measured}\n\n")


def main() -> None:
    """Measure or read rows, and write the page."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rate", default="150mbit", help="of every port, both directions")
    parser.add_argument("--slow-rate", default="30mbit")
    parser.add_argument("--steps", type=int, default=4 * ROUND, help=f"a multiple of {ROUND}")
    parser.add_argument("--slow-steps", type=int, default=16)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--torchft", default="", metavar="DIR")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--train", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.train is not None:
        way, seed, *batch_time_s = given.train
        train(Way(**json.loads(way)), int(seed), float(batch_time_s[0]) if batch_time_s else None)
    if given.steps < 2 * ROUND or given.steps % ROUND:
        parser.error(f"--steps: whole rounds of {ROUND}, two or more")
    read = given.json.read_text(encoding="utf-8") if given.render else None
    content = measure(given) if read is None else json.loads(read)
    if given.markdown is not None:
        page = given.markdown.read_text(encoding="utf-8")
        given.markdown.write_text(with_table(page, table(content)), encoding="utf-8")
    print(table(content))


if __name__ == "__main__":
    main()
