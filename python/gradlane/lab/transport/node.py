"""The rank program of the transport measurements: exchanges of gradients without any compute.

It speaks the lab's line protocol: JSON requests on standard input, JSON answers on what was
standard output. gradlane's channel is the one that a session makes for a model, with a session's
own options; times are `time.monotonic`, which all ranks of the emulated cluster share.
"""

from __future__ import annotations

import datetime
import faulthandler
import json
import os
import resource
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gradlane.lab.cluster.awake import awake_processes
from gradlane.lab.cluster.counters import read_port_bytes, spinning_s
from gradlane.lab.cluster.machine import IDLE, SOFTIRQ, STOLEN, WAITING, machine_ticks
from gradlane.lab.cluster.namespaces import INTERFACE
from gradlane.planning.probe.stream import run_stream
from gradlane.training import core as core_module
from gradlane.training.core import (
    Channel,
    CoreModule,
    ListenerType,
    PlanBuilder,
    PulseType,
    SquareSumType,
)
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.start import open_session

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BUCKET_BYTES = 25 << 20
"""Size of the flat buckets that Gloo gets: the default of DDP's `bucket_cap_mb`."""

_STORE_TIMEOUT = datetime.timedelta(seconds=120)
_FLOAT_BYTES = 4
_VALUE = 2.0**-60
"""Unit of the gradients' values: small, since sums of sums grow with every step of Gloo."""


class _KeepingCore:
    """The compiled core, which also remembers the channel that a session makes, and its tensors."""

    def __init__(self, core: CoreModule) -> None:
        self._core = core
        self.channel: Channel | None = None
        self.rows: list[dict[str, Any]] = []

    @property
    def Listener(self) -> ListenerType:  # noqa: N802
        return self._core.Listener

    @property
    def Pulse(self) -> PulseType:  # noqa: N802
        return self._core.Pulse

    @property
    def ChannelError(self) -> type[Exception]:  # noqa: N802
        return self._core.ChannelError

    @property
    def ChannelTimeout(self) -> type[Exception]:  # noqa: N802
        return self._core.ChannelTimeout

    @property
    def SquareSum(self) -> SquareSumType:  # noqa: N802
        return self._core.SquareSum

    @property
    def plan_json(self) -> PlanBuilder:
        return self._core.plan_json

    def Channel(  # noqa: N802
        self,
        listener: core_module.Listener,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
    ) -> Channel:
        self.rows = json.loads(plan_json)["tensors"]
        self.channel = self._core.Channel(listener, options_json, plan_json, peers, secret)
        return self.channel


def _model(tensor_elems: Sequence[int]) -> nn.Module:
    """Return a module with one f32 parameter of each size, in this forward order."""
    model = nn.Module()
    for index, elems in enumerate(tensor_elems):
        model.register_parameter(
            f"tensor{index}", nn.Parameter(torch.zeros(elems, dtype=torch.float32, device="cpu"))
        )
    return model


def _total(world_size: int) -> float:
    """Return the sum over all ranks of what they begin with."""
    return _VALUE * world_size * (world_size + 1) / 2


class Exchange(ABC):
    """What one rank exchanges with all others: gradients, step after step, and what that costs."""

    def __init__(
        self,
        rank: int,
        *,
        job: str,
        addresses: list[str],
        store_port: int,
        tensor_elems: list[int],
    ) -> None:
        """Meet all ranks at a store; every rank calls it together.

        Args:
            rank: this rank.
            job: a name that no other exchange has.
            addresses: every rank's address, rank 0 first.
            store_port: TCP port of the rendezvous store on rank 0.
            tensor_elems: f32 elements of each tensor, the most urgent first.
        """
        self.rank = rank
        self.world_size = len(addresses)
        self._job = job
        self._meetings = 0
        self._store: Store = dist.TCPStore(  # type: ignore[attr-defined]
            addresses[0],
            store_port,
            self.world_size,
            is_master=rank == 0,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
        )
        self._storage = torch.zeros(sum(tensor_elems), dtype=torch.float32, device="cpu")

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._meetings += 1
        place = f"meet/{self._meetings}"
        if self._store.add(f"{place}/arrived", 1) == self.world_size:
            self._store.set(f"{place}/complete", "1")
        self._store.wait([f"{place}/complete"], _STORE_TIMEOUT)

    def close(self) -> None:
        """Part from all ranks."""
        self.meet()
        self._disconnect()

    def run(self, steps: int, warmup: int) -> dict[str, Any]:
        """Exchange the whole model step after step, and count what it costs this rank.

        Returns:
            `boundaries_s` (steps + 1 times), `user_s` and `system_s` of this process,
            `sent_bytes` and `received_bytes` of this node's port, `machine_…` (growth of the whole
            machine's processor seconds), and growth of counters of the exchange's own.

        Raises:
            ArithmeticError: a result is not the sum or the mean over the ranks.
        """
        self._storage.fill_(_VALUE * (self.rank + 1))
        self.meet()
        for _ in range(warmup):
            self._exchange_once()
        self.meet()
        before = self._counters()
        boundaries_s = [time.monotonic()]
        for _ in range(steps):
            self._exchange_once()
            boundaries_s.append(time.monotonic())
        # What this rank owes others it sends after its own step is complete.
        self.meet()
        after = self._counters()
        self._verify(warmup + steps)
        grown = {name: after[name] - before[name] for name in after}
        return {"boundaries_s": boundaries_s, **grown}

    @abstractmethod
    def _exchange_once(self) -> None:
        """Exchange the whole model."""

    @abstractmethod
    def _wanted(self, steps: int) -> float:
        """Return what every element is after so many steps."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Close what was connected."""

    def _own_counters(self) -> dict[str, float]:
        return {}

    def _verify(self, steps: int) -> None:
        """Compare every element with what exact arithmetic gives."""
        wanted = self._wanted(steps)
        tolerance = 1e-5 * wanted
        low, high = (float(end) for end in self._storage.aminmax())
        if not wanted - tolerance <= low <= high <= wanted + tolerance:
            raise ArithmeticError(
                f"{type(self).__name__} left {low:g} to {high:g} in the gradients of rank "
                f"{self.rank} after {steps} steps, where all must be {wanted:g}"
            )

    def _counters(self) -> dict[str, float]:
        """Return everything that grows, one number a name."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        descriptor = os.open("/proc/self/net/dev", os.O_RDONLY)
        try:
            received_bytes, sent_bytes = read_port_bytes(descriptor)
        finally:
            os.close(descriptor)
        return {
            "user_s": usage.ru_utime,
            "system_s": usage.ru_stime,
            "sent_bytes": sent_bytes,
            "received_bytes": received_bytes,
            **self._own_counters(),
            **machine_seconds(),
        }


class GlooExchange(Exchange):
    """Gloo's sums of the buckets that DDP would hand it."""

    def __init__(self, rank: int, **named: Any) -> None:
        """Connect to all ranks with Gloo; arguments as for `Exchange`."""
        super().__init__(rank, **named)
        self._buckets = list(torch.split(self._storage, BUCKET_BYTES // _FLOAT_BYTES))
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", self._store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=self.world_size,
            timeout=_STORE_TIMEOUT,
        )
        self.meet()

    def _exchange_once(self) -> None:
        works = [dist.all_reduce(bucket, async_op=True) for bucket in reversed(self._buckets)]
        for work in works:
            work.wait()

    def _wanted(self, steps: int) -> float:
        # Sums of sums.
        return _total(self.world_size) * float(self.world_size) ** (steps - 1)

    def _disconnect(self) -> None:
        dist.destroy_process_group()


class GradlaneExchange(Exchange):
    """The means of a session's channel."""

    def __init__(
        self,
        rank: int,
        *,
        addresses: list[str],
        tensor_elems: list[int],
        settings: dict[str, Any],
        **named: Any,
    ) -> None:
        """Connect to all ranks with gradlane; other arguments as for `Exchange`.

        Args:
            settings: further options by name.
        """
        super().__init__(rank, addresses=addresses, tensor_elems=tensor_elems, **named)
        self.gradients = list(torch.split(self._storage, tensor_elems))
        core = _KeepingCore(core_module.load_core())
        given = keywords_of(
            store=self._store,
            rank=rank,
            world_size=self.world_size,
            job=self._job,
            advertise=addresses[rank],
            **settings,
        )
        self.session = open_session(core, Options.of(**given, environment=os.environ))
        model = _model(tensor_elems)
        self.session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
        assert core.channel is not None
        self.channel: Channel = core.channel
        # What a session exchanges beside gradients takes part in its steps, and is left out here.
        self._beside = {
            tensor: torch.zeros(int(row["numel"]), dtype=torch.float64, device="cpu")
            for tensor, row in enumerate(core.rows)
            if tensor >= len(tensor_elems)
        }
        self._step = 0
        self.meet()

    def next_step(self) -> int:
        """Begin the channel's next step and return its number."""
        self._step += 1
        self.channel.step_begin(self._step)
        for tensor, landing in self._beside.items():
            self.channel.tensor_absent(tensor, self._step, landing.data_ptr(), landing.nbytes)
        return self._step

    def give(self, tensor: int, step: int) -> None:
        """Hand a tensor's gradient over to gradlane."""
        gradient = self.gradients[tensor]
        nbytes = gradient.numel() * _FLOAT_BYTES
        self.channel.gradient_ready(tensor, step, gradient.data_ptr(), nbytes)

    def _exchange_once(self) -> None:
        step = self.next_step()
        # Backward makes the last layers' gradients first.
        for tensor in reversed(range(len(self.gradients))):
            self.give(tensor, step)
        self.channel.step_end(step)
        self.channel.wait_step(step)

    def _wanted(self, steps: int) -> float:
        # From the second step on all ranks hand over the mean itself.
        return _total(self.world_size) / self.world_size

    def _disconnect(self) -> None:
        self.session.close()

    def _own_counters(self) -> dict[str, float]:
        metrics: Mapping[str, Any] = self.session.metrics()
        names = ("tx_bytes", "rx_bytes", "tx_frames", "io_cpu_s", "work_cpu_s", "turns")
        return {f"gradlane_{name}": metrics[name] for name in names}

    def run_urgency(
        self, steps: int, busy_s: float, ready_shares: list[float], stagger_s: float
    ) -> dict[str, Any]:
        """Saturate the ports with the last tensor; hand over the others meanwhile, last first.

        Args:
            steps: how often.
            busy_s: how long the last tensor keeps the ports busy.
            ready_shares: when each urgent tensor is handed over, as a share of `busy_s`; the
                first entry belongs to the first tensor.
            stagger_s: how much later than the rank before it each rank hands a tensor over.

        Returns:
            `ready_ns` (rows of step, tensor, time before the call, time after it) and `trace`.
        """
        ready_ns: list[tuple[int, int, int, int]] = []
        self.channel.take_trace()
        trace: list[tuple[int, str, int, int, int, int, int, int]] = []
        for _ in range(steps):
            self.meet()
            step = self.next_step()
            start_s = time.monotonic()
            self.give(len(self.gradients) - 1, step)
            for tensor in sorted(range(len(ready_shares)), key=ready_shares.__getitem__):
                at_s = start_s + ready_shares[tensor] * busy_s + self.rank * stagger_s
                time.sleep(max(0.0, at_s - time.monotonic()))
                before_ns = time.monotonic_ns()
                self.give(tensor, step)
                ready_ns.append((step, tensor, before_ns, time.monotonic_ns()))
            self.channel.step_end(step)
            self.channel.wait_step(step)
            trace += self.channel.take_trace()
        self.meet()
        return {"ready_ns": ready_ns, "trace": [*trace, *self.channel.take_trace()]}


def machine_seconds() -> dict[str, float]:
    """Return the whole machine's processor seconds since it started.

    Those that were busy (but not with keeping processors awake), those of them in network
    interrupts and those that other virtual machines of the host took, and all.
    """
    ticks = machine_ticks()
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    busy = sum(ticks) - ticks[IDLE] - ticks[WAITING]
    return {
        "machine_busy_s": busy * tick_s - spinning_s(awake_processes()),
        "machine_softirq_s": ticks[SOFTIRQ] * tick_s,
        "machine_stolen_s": ticks[STOLEN] * tick_s,
        "machine_total_s": sum(ticks) * tick_s,
    }


E = TypeVar("E", bound=Exchange)


class ExchangeNode(Generic[E]):
    """Answers to the requests that ranks of all exchanges get.

    Attributes:
        kinds: the answer to each kind of request; a rank program adds its own.
    """

    def __init__(self, open_exchange: Callable[..., E]) -> None:
        """Open no exchange yet; `open_exchange` does when it is asked for."""
        self._open_exchange = open_exchange
        self._exchange: E | None = None
        self.kinds: dict[str, Callable[..., dict[str, Any]]] = {
            "open": self._open,
            "stream": lambda **named: asdict(run_stream(**named)),
            "run": lambda **named: self.exchange.run(**named),
            "close": self._close,
        }

    @property
    def exchange(self) -> E:
        """The exchange that is open."""
        if self._exchange is None:
            raise ValueError("no exchange is open")
        return self._exchange

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what a request asks for."""
        return self.kinds[request.pop("kind")](**request)

    def _open(self, **named: Any) -> dict[str, Any]:
        self._exchange = self._open_exchange(**named)
        return {}

    def _close(self) -> dict[str, Any]:
        self.exchange.close()
        self._exchange = None
        return {}


def answer_requests(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer requests until the input ends, each with a result or an error.

    Args:
        answer: does what one request asks for.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)

    def send(line: dict[str, Any]) -> None:
        answers.write(json.dumps(line) + "\n")
        answers.flush()

    send({"kind": "ready"})
    for line in sys.stdin:
        try:
            send({"kind": "result", "result": answer(json.loads(line))})
        except Exception as failure:
            message = f"{type(failure).__name__}: {failure}"
            send({"kind": "error", "message": message, "traceback": traceback.format_exc()})


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    implementations: dict[str, Callable[..., Exchange]] = {
        "gradlane": GradlaneExchange,
        "gloo": GlooExchange,
    }
    node = ExchangeNode(
        lambda implementation, **named: implementations[implementation](rank, **named)
    )

    def urgency(**named: Any) -> dict[str, Any]:
        exchange = node.exchange
        if not isinstance(exchange, GradlaneExchange):
            raise ValueError("nothing is urgent to Gloo")
        return exchange.run_urgency(**named)

    node.kinds["urgency"] = urgency
    answer_requests(node.answer)


if __name__ == "__main__":
    main()
