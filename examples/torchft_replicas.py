"""Two replica groups under torchft's Manager over gradlane: one is killed, and comes back.

    pip install gradlane torchft
    python examples/torchft_replicas.py --way gradients

`--way` is `gradients` (a mean each step), `local-sgd` or `diloco` (a mean of parameters
every few steps). `--backend native` gives the manager a group of torch that it reconfigures itself
(torchft newer than 0.2), and `--backend gloo` runs the same over torchft's own process group. The
parent process runs the lighthouse and the two replicas, kills one of them, and starts it again.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
from torch import nn

TIMEOUT = timedelta(seconds=10)
SYNC_EVERY = 4


def process_group(backend: str) -> Any:
    """Return the group that the manager configures."""
    if backend == "gloo":
        from torchft import ProcessGroupGloo

        return ProcessGroupGloo(timeout=TIMEOUT)
    if backend == "native":
        return native_group()
    from gradlane.distributed.torchft import ProcessGroupGradlane

    return ProcessGroupGradlane(timeout=TIMEOUT)


def native_group() -> Any:
    """Return a group of torch without members: each quorum gives it some."""
    import torch.distributed as dist
    import torchft.process_group

    import gradlane.distributed

    if not hasattr(torchft.process_group, "ReconfigureOptions"):
        raise SystemExit("this torchft does not reconfigure groups of torch: leave out --backend")
    gradlane.distributed.register()
    dist.init_process_group(
        "gradlane",
        store=dist.HashStore(),
        rank=0,
        world_size=1,
        timeout=TIMEOUT,
        enable_reconfigure=True,
    )
    return dist.group.WORLD


def replica(number: int, way: str, backend: str, pause_s: float) -> None:
    """Train one replica group of one rank until it is told to end; prints a line for each try."""
    from torch.distributed import TCPStore
    from torchft import Manager, Optimizer
    from torchft.local_sgd import DiLoCo, LocalSGD

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=process_group(backend),
        load_state_dict=load,
        state_dict=save,
        min_replica_size=1,
        use_async_quorum=way != "diloco",
        replica_id=f"replica{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT * 3,
        connect_timeout=TIMEOUT,
    )
    optimizer: Any = inner
    averaging: Any = nullcontext()
    if way == "gradients":
        optimizer = Optimizer(manager, inner)
    elif way == "local-sgd":
        averaging = LocalSGD(manager, model, inner, sync_every=SYNC_EVERY)
    else:
        averaging = DiLoCo(manager, [model], inner, outer, sync_every=SYNC_EVERY)
    generator = torch.Generator().manual_seed(number + 1)
    ends: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: ends.append(number))
    with averaging:
        while not ends:
            inputs = torch.randn(32, 64, generator=generator)
            optimizer.zero_grad()
            loss = (model(inputs)[:, 0] - inputs.sum(1)).square().mean()
            loss.backward()
            if way == "gradients":
                # Not torchft's DDP: it ends when a replica is lost during a sum.
                for parameter in model.parameters():
                    manager.allreduce(parameter.grad).wait()
            optimizer.step()
            time.sleep(pause_s)
            total = sum(parameter.double().sum().item() for parameter in model.parameters())
            print(
                f"{time.monotonic():.3f} step {manager.current_step()} of "
                f"{manager.num_participants()} loss {loss.item():.3f} parameters {total!r}",
                flush=True,
            )
    os._exit(0)


@contextmanager
def lighthouse() -> Iterator[str]:
    """Run the server that replica groups find each other by; yields its address."""
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(
        "127.0.0.1:0", 1, join_timeout_ms=200, quorum_tick_ms=50, heartbeat_timeout_ms=1000
    )
    try:
        yield server.address().replace("0.0.0.0", "127.0.0.1")
    finally:
        server.shutdown()


class Replica:
    """A replica in a process of its own, and what it says.

    Attributes:
        lines: time, step and participants of each try of a step, and the sum of its parameters.
    """

    def __init__(self, number: int, options: argparse.Namespace, address: str) -> None:
        self.lines: list[tuple[float, int, int, str]] = []
        self.number = number
        command = [sys.executable, __file__, "--replica", str(number), "--way", options.way]
        command += ["--backend", options.backend, "--pause-s", str(options.pause_s)]
        self.process = subprocess.Popen(
            command,
            env={**os.environ, "TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=(options.quiet,))
        self._reader.start()

    def _read(self, quiet: bool) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if not quiet:
                print(f"replica {self.number}: {line}", end="", flush=True)
            words = line.split()
            if len(words) == 9 and words[1] == "step":
                self.lines.append((float(words[0]), int(words[2]), int(words[4]), words[8]))

    def wait_for(self, tries: int, participants: int, timeout_s: float = 120) -> None:
        """Wait until so many tries had so many participants.

        Raises:
            TimeoutError: they did not in time, or the process has ended.
        """
        until = time.monotonic() + timeout_s
        while sum(line[2] == participants for line in list(self.lines)) < tries:
            if self.process.poll() is not None or time.monotonic() > until:
                raise TimeoutError(
                    f"replica {self.number} did not make {tries} steps of {participants} replicas "
                    f"in {timeout_s:g} s: again with --verbose"
                )
            time.sleep(0.01)

    def end(self, how: signal.Signals) -> None:
        """End the process."""
        self.process.send_signal(how)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self._reader.join()

    def committed(self) -> dict[int, str]:
        """Return the sum of the parameters after each step of two replicas."""
        found: dict[int, str] = {}
        for _, step, participants, total in self.lines:
            if step not in found and participants == 2:
                found[step] = total
        return found


def main() -> None:
    """Run two replicas, kill one of them, start it again, and compare what both have learned."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=("gradients", "local-sgd", "diloco"), default="gradients")
    parser.add_argument("--backend", choices=("gradlane", "native", "gloo"), default="gradlane")
    parser.add_argument("--steps", type=int, default=20, help="tries before the kill, and after")
    parser.add_argument("--pause-s", type=float, default=0.05, help="seconds of work in each step")
    parser.add_argument("--verbose", action="store_true", help="show what torchft logs")
    parser.add_argument("--quiet", action="store_true", help="do not show each step")
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica is not None:
        replica(options.replica, options.way, options.backend, options.pause_s)
        return
    running: list[Replica] = []
    with lighthouse() as address:
        try:
            running += [Replica(number, options, address) for number in range(2)]
            survivor, victim = running
            victim.wait_for(options.steps, participants=2)
            victim.end(signal.SIGKILL)
            print("replica 1 is killed, and started again", flush=True)
            again = Replica(1, options, address)
            running.append(again)
            again.wait_for(options.steps, participants=2)
        finally:
            for one in running:
                one.end(signal.SIGTERM)
    sums = [one.committed() for one in (survivor, again)]
    both = sums[0].keys() & sums[1].keys()
    different = [step for step in sorted(both) if sums[0][step] != sums[1][step]]
    print(f"{len(both)} steps of both after the kill, {len(different)} with different parameters")
    if different or not both:
        raise SystemExit(f"different parameters after steps {different}")


if __name__ == "__main__":
    main()
