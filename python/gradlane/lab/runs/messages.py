"""Requests to ranks and their answers: JSON objects on the pipe, typed on both ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gradlane.lab.runs.strategy import parse_strategy
from gradlane.lab.runs.traffic import OwnerCounters
from gradlane.lab.workloads import WorkloadSpec
from gradlane.planning.models.timings import TensorTiming

_LAB_SECRET = "c0ffee00" * 4
"""It protects nothing: the nodes of a lab are one user's, on one machine."""


@dataclass(frozen=True)
class TrialRequest:
    """A request to run a trial; every rank of a run gets the same.

    Attributes:
        job: a name that no other run has.
        workload: what is trained.
        strategy: as on the command line.
        addresses: every rank's IPv4 address, rank 0 first.
        store_port: TCP port of the rendezvous store on rank 0.
        steps: measured steps.
        warmup: steps before them.
        slice_elems: elements a slice at most; None: the strategy's own.
        trace_path: where ranks record their timelines, or None.
        codec: how gradlane's gradients travel; `raw` is none.
        servers: the first so many ranks own slices, of gradlane's; None: all.
        serving: so many ranks beside these only serve, of gradlane's.
        server_addresses: of those.
        straggles: whether a rank is stopped now and then; it does not make up for that.
        rate_bps: nominal rate of every port, for plans to say.
        clip_norm: gradients are clipped to this norm before each update, or None.
    """

    job: str
    workload: WorkloadSpec
    strategy: str
    addresses: list[str]
    store_port: int
    steps: int
    warmup: int
    slice_elems: int | None
    trace_path: str | None = None
    codec: str = "raw"
    servers: int | None = None
    serving: int = 0
    server_addresses: list[str] = field(default_factory=list)
    straggles: bool = False
    rate_bps: float = 1e9
    clip_norm: float | None = None

    @staticmethod
    def from_json(content: dict[str, Any]) -> TrialRequest:
        """Return the request that was sent to a rank."""
        return TrialRequest(**{**content, "workload": WorkloadSpec(**content["workload"])})

    @property
    def counted_steps(self) -> int:
        """Steps whose bytes are counted: all but those in which a plan is found."""
        return self.warmup + self.steps - parse_strategy(self.strategy).learning_steps

    @property
    def secret(self) -> str | None:
        """The secret of the session's ranks, with which their connections are sealed; or None."""
        return _LAB_SECRET if parse_strategy(self.strategy).sealed else None

    @property
    def lanes(self) -> int | None:
        """Connections of a pair of the session's ranks; None: as many as it takes by itself."""
        return parse_strategy(self.strategy).lanes

    @property
    def world_size(self) -> int:
        """Ranks that train."""
        return len(self.addresses)

    def address(self, rank: int) -> str:
        """Return the address of a rank, of those that only serve, too."""
        return [*self.addresses, *self.server_addresses][rank]


@dataclass(frozen=True)
class TrialResult:
    """The measurements of one rank in a run.

    Attributes:
        boundaries_s: W + S + 1 times of `time.monotonic()`.
        cpu_s: processor time of the measured steps.
        losses: one a step, warm-up included; None: the rank passed it.
        norms: those of all gradients that were clipped, one a step, warm-up included; None: the
            strategy did not compute it.
        param_digest: SHA-256 of the parameters.
        metrics: the strategy's own counters.
        verified_tensors: averaged gradients that were compared with their expectation.
        codec: what encoded gradients; `raw`: nothing did.
        schemes: of each tensor; empty: all are of one kind.
        wire_bytes: encoded bytes of each tensor; empty: none is encoded.
        owner: what the rank did as an owner in the counted steps; None: nobody owns anything.
        counted_steps: steps between the two counts of the ports.
        evaluation: quality on held-out samples, of rank 0.
        batch_size: samples a rank and step.
        compute_s: nominal time of forward and backward.
        wall_lag_s: real time by which the pace fell behind.
        timings: of each tensor, of rank 0.
    """

    boundaries_s: list[float]
    cpu_s: float
    losses: list[float | None]
    norms: list[float | None]
    param_digest: str
    metrics: dict[str, Any]
    verified_tensors: int
    codec: str
    schemes: list[str]
    wire_bytes: list[int]
    owner: OwnerCounters | None
    counted_steps: int
    evaluation: dict[str, Any] | None
    batch_size: int
    compute_s: float
    wall_lag_s: float
    timings: list[TensorTiming]

    @staticmethod
    def from_json(content: dict[str, Any]) -> TrialResult:
        """Return the result that a rank has sent."""
        timings = [TensorTiming(**timing) for timing in content.pop("timings")]
        owner = OwnerCounters.from_json(content.pop("owner"))
        return TrialResult(**content, timings=timings, owner=owner)
