"""The rank program of the transport measurements: exchanges of gradients without any compute.

The channel of gradlane is the one that a session makes for a model, with a session's
own options; times are `time.monotonic`, which all ranks of the emulated cluster share.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from gradlane.lab.cluster.counters import read_port_bytes, spinning_s
from gradlane.lab.cluster.keep_cpus_awake import awake_processes
from gradlane.lab.cluster.machine import IDLE, SOFTIRQ, STOLEN, WAITING, machine_ticks
from gradlane.lab.cluster.namespaces import INTERFACE
from gradlane.lab.cluster.rank_program import STORE_TIMEOUT, answer_requests, meet, open_store
from gradlane.training import core as core_module
from gradlane.training.core import Channel, CoreModule
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.init import open_session

BUCKET_BYTES = 25 << 20
"""Size of the flat buckets that Gloo gets: the default of DDP's `bucket_cap_mb`."""

_FLOAT_BYTES = 4
_VALUE = 2.0**-60
"""Unit of the gradients' values: small, since sums of sums grow with every step of Gloo."""


def _keeping(core: CoreModule, kept: list[tuple[Channel, list[dict[str, Any]]]]) -> CoreModule:
    """Return the compiled core; it also keeps each channel that a session makes, and its tensors.

    Args:
        core: the core as it is.
        kept: what is appended to.
    """

    def channel(
        listener: core_module.Listener,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
        watch: Callable[[], object] | None = None,
    ) -> Channel:
        made = core.Channel(listener, options_json, plan_json, peers, secret, watch)
        kept.append((made, json.loads(plan_json)["tensors"]))
        return made

    return cast(CoreModule, SimpleNamespace(**{**vars(core), "Channel": channel}))


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
    """Exchanges gradients with all other ranks, step after step, and measures the cost."""

    def __init__(
        self, rank: int, *, job: str, addresses: list[str], store_port: int, tensor_elems: list[int]
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
        self._store = open_store(addresses, store_port, rank)
        self._storage = torch.zeros(sum(tensor_elems), dtype=torch.float32, device="cpu")

    def meet(self) -> None:
        """Wait until all ranks are here."""
        self._meetings += 1
        meet(self._store, f"meet/{self._meetings}", self.world_size)

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
            timeout=STORE_TIMEOUT,
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
        kept: list[tuple[Channel, list[dict[str, Any]]]] = []
        core = _keeping(core_module.load_core(), kept)
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
        (self.channel, rows) = kept[-1]
        # What a session exchanges beside gradients takes part in its steps, and is left out here.
        self._beside = {
            tensor: torch.zeros(int(row["numel"]), dtype=torch.float64, device="cpu")
            for tensor, row in enumerate(rows)
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
    """Answers to the requests that ranks of all exchanges get."""

    def __init__(self, open_exchange: Callable[..., E]) -> None:
        """Open no exchange yet; `open_exchange` does when it is asked for."""
        self._open_exchange = open_exchange
        self._exchange: E | None = None
        self.kinds: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "run": lambda **named: self.exchange.run(**named),
            "close": self._close,
        }
        """The function for each kind of request, as `answer_requests` takes them."""

    @property
    def exchange(self) -> E:
        """The exchange that is open."""
        if self._exchange is None:
            raise ValueError("no exchange is open")
        return self._exchange

    def _open(self, **named: Any) -> None:
        self._exchange = self._open_exchange(**named)

    def _close(self) -> None:
        self.exchange.close()
        self._exchange = None


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

    answer_requests(lambda _: {**node.kinds, "urgency": urgency})


if __name__ == "__main__":
    main()
