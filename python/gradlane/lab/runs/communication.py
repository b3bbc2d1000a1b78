"""How a rank's model is connected to the other ranks: one class for each family of strategies.

Each is used for one run: `attach` before the first step, `settle` after the last, `close` always.
After `settle` all parameters hold the last step's update.
"""

# Annotations are evaluated here: DDP compares those of a communication hook with its own types.
import datetime
import gc
import math
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from gradlane.lab.cluster.namespaces import INTERFACE
from gradlane.lab.runs.messages import TrialRequest
from gradlane.lab.runs.strategy import parse_strategy
from gradlane.lab.runs.traffic import OwnerCounters
from gradlane.training.plans.plan import Plan

if TYPE_CHECKING:
    from gradlane.training.torch_internals import Store

_GLOO_TIMEOUT = datetime.timedelta(seconds=180)


class Communication(ABC):
    """A rank's connection to the others during one run; gradlane alone counts and encodes."""

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and the optimizer for the training loop."""
        return model, optimizer

    def clip(self, model: nn.Module, max_norm: float, *, is_free: bool) -> torch.Tensor | None:
        """Clip the averaged gradients by the norm of all of them, before the update.

        Args:
            model: the workload's own.
            max_norm: the largest norm that gradients keep; infinite: the norm alone is wanted.
            is_free: an accelerator that is not here would do it in no time of the host's.

        Returns:
            The norm before clipping, of no dimensions; None where nothing was computed.
        """
        # By torch: all gradients are there. A replay's norm is taken in f64, since torch's own in
        # f32 is off by 2e-5 over millions of elements.
        if is_free:
            return None
        if max_norm == math.inf:
            gradients = [one.grad for one in model.parameters() if one.grad is not None]
            norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in gradients]
            whole: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
            return whole
        norm: torch.Tensor = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        return norm

    def keep_pace(self, steps: Iterable[int], on_pass: Callable[[], None]) -> Iterator[int]:
        """Iterate over the steps that this rank takes part in; call `on_pass` for others."""
        return iter(steps)

    def settle(self) -> None:  # noqa: B027  (DDP, too, finishes inside backward)
        """Wait until every parameter holds the last step's update; ends a round of local ones."""

    def rest(self) -> None:
        """Wait until nothing of this rank's steps is under way."""
        self.settle()

    def metrics(self) -> dict[str, Any]:
        """Return the implementation's own counters, JSON-serializable."""
        return {}

    def owner_counters(self) -> OwnerCounters | None:
        """Return this rank's counters as an owner of gradients, or None without owners."""
        return None

    def codecs(self) -> list[tuple[str, int | None]]:
        """Return codec and encoded bytes (None: its own) of each parameter; empty: all are raw."""
        return []

    def schemes(self) -> list[str]:
        """Return the scheme of each parameter; empty: there is none, or it is not known."""
        return []

    @abstractmethod
    def close(self) -> None:
        """Disconnect; a later run may connect anew."""


def prefixed(request: TrialRequest, store: "Store") -> "Store":
    """Return the store with the run's own keys."""
    prefixed: Store = dist.PrefixStore(request.job, store)  # type: ignore[attr-defined]
    return prefixed


class Silence(Communication):
    """No communication: every rank trains alone, which shows the ceiling that compute sets."""

    def close(self) -> None:
        """Do nothing: there is no connection."""


def mean_in_rank_order(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket over ranks as ((g0 + g1) + g2 ...) / N: a communication hook."""
    own = bucket.buffer()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    future = dist.all_gather(gathered, own, group=group, async_op=True).get_future()

    def mean(_: torch.futures.Future[Any]) -> torch.Tensor:
        total = gathered[0]
        for contribution in gathered[1:]:
            total += contribution
        return total.div_(len(gathered))

    result: torch.futures.Future[torch.Tensor] = future.then(mean)
    return result


class DistributedDataParallel(Communication):
    """PyTorch's DDP over Gloo, with stock all-reduce or with the gather-and-sum hook."""

    def __init__(self, request: TrialRequest, rank: int, store: "Store") -> None:
        """Join the process group through the store."""
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        self._strategy = parse_strategy(request.strategy)
        dist.init_process_group(
            "gloo",
            store=prefixed(request, store),
            rank=rank,
            world_size=request.world_size,
            timeout=_GLOO_TIMEOUT,
        )

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Wrap the model; the optimizer stays, since the wrapper shares the parameters."""
        wrapped = nn.parallel.DistributedDataParallel(
            model, bucket_cap_mb=self._strategy.bucket_mb, gradient_as_bucket_view=True
        )
        if self._strategy.family == "ddp-gather":
            group = dist.group.WORLD
            assert group is not None
            wrapped.register_comm_hook(group, mean_in_rank_order)
        elif self._strategy.hook:
            from gradlane.lab.runs.ddp_hooks import register_hook

            register_hook(wrapped, self._strategy.hook)
        return wrapped, optimizer

    def close(self) -> None:
        """Leave the process group."""
        # The wrapper's reducer must be gone before its group is.
        gc.collect()
        dist.destroy_process_group()


class Gradlane(Communication):
    """gradlane's own engine, through its public interface only."""

    def __init__(self, request: TrialRequest, rank: int, store: "Store", plan: Plan | None) -> None:
        """Open a session over the store."""
        import gradlane

        strategy = parse_strategy(request.strategy)
        self._plan = "auto" if strategy.is_planned else plan
        self._is_local = strategy.rounds is not None
        self._session: Any = gradlane.init(
            **strategy.session_keywords(request.slice_elems),
            codec=request.codec,
            servers=request.servers,
            workers=request.world_size if request.serving else None,
            rendezvous=gradlane.Rendezvous(
                prefixed(request, store), rank, request.world_size + request.serving, request.job
            ),
            network=gradlane.Network(
                advertise=request.address(rank), secret=request.secret, lanes=request.lanes
            ),
            monitoring=gradlane.Monitoring(trace=request.trace_path),
        )

    def attach(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Hook the model and the optimizer."""
        buffers = {"buffers": "local"} if self._is_local else {}
        prepared: tuple[nn.Module, torch.optim.Optimizer] = self._session.prepare(
            model, optimizer, plan=self._plan, **buffers
        )
        return prepared

    def clip(self, model: nn.Module, max_norm: float, *, is_free: bool) -> torch.Tensor | None:
        """Clip by the session, as means arrive; by torch where there are none."""
        if self._is_local:
            return super().clip(model, max_norm, is_free=is_free)
        norm: torch.Tensor = self._session.clip_grad_norm_(max_norm)
        return norm

    def keep_pace(self, steps: Iterable[int], on_pass: Callable[[], None]) -> Iterator[int]:
        """Go through those steps that this rank takes part in."""
        found: Iterator[int] = self._session.keep_pace(steps, on_pass)
        return found

    def settle(self) -> None:
        """Wait for the last step's updates."""
        self._session.synchronize()

    def rest(self) -> None:
        """Wait for the exchange that is under way, or for the last step's updates."""
        if self._is_local:
            # It has to be told to all ranks, and is used when it is due.
            self._session.state_dict()
        else:
            self.settle()

    def metrics(self) -> dict[str, Any]:
        """Return the session's counters."""
        counters = dict(self._session.metrics())
        counters["tensors_by_scheme"] = dict(Counter(self.schemes()))
        if staleness := self._session.monitoring.staleness():
            counters["staleness_by_rank"] = staleness
        if self._session.planning.plan is not None:
            plan = self._session.planning.plan.to_json()
            del plan["tensors"]
            counters["plan"] = plan
        return counters

    def owner_counters(self) -> OwnerCounters:
        """Return the session's own counters, of all its models."""
        counters = self._session.metrics()
        # Where another rank carries for this one there are no peers.
        own = [peer for peer in counters["peers"] if peer["rank"] == self._session.rank]
        return OwnerCounters(
            sum(peer.get("owned_bytes", 0) for peer in own),
            counters["served_rx_bytes"],
            counters["served_tx_bytes"],
        )

    def codecs(self) -> list[tuple[str, int | None]]:
        """Return what the session has chosen."""
        return [
            (choice.codec, None if choice.facts is None else choice.facts.wire_bytes_expected)
            for choice in self._session.monitoring.codecs
        ]

    def schemes(self) -> list[str]:
        """Return what is in force."""
        return list(self._session.monitoring.schemes.values())

    def close(self) -> None:
        """Close the session."""
        self._session.close()


def connect(
    request: TrialRequest, rank: int, store: "Store", plan: Plan | None = None
) -> Communication:
    """Connect this rank to the others.

    Args:
        request: the same on every rank.
        rank: this rank.
        store: where ranks meet.
        plan: for the model (gradlane only), or None.
    """
    family = parse_strategy(request.strategy).family
    if family == "none":
        return Silence()
    if family == "gradlane":
        return Gradlane(request, rank, store, plan)
    return DistributedDataParallel(request, rank, store)
