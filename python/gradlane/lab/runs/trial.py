"""One run on one rank: a workload, a strategy, W warm-up steps and S measured ones.

Step boundaries are the times at the start of each forward, so a deferred update is paid for in the
step that waits for it. Everything a run made is gone when it returns, whatever happened. A
dedicated server has no workload: it serves the run until the workers have closed their sessions.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import math
import random
import resource
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from gradlane.lab.cluster.rank_program import meet, open_store
from gradlane.lab.runs.communication import Communication, connect, prefixed
from gradlane.lab.runs.messages import TrialRequest, TrialResult
from gradlane.lab.runs.strategy import LabStrategy, parse_strategy
from gradlane.lab.runs.traffic import OwnerCounters
from gradlane.lab.workloads import Workload, build
from gradlane.lab.workloads.real import RealWorkload
from gradlane.lab.workloads.replay import ReplayWorkload
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.training.options.strategy import FACTOR_SCHEMES, ring_ranks
from gradlane.training.plans.plan import Plan
from gradlane.training.plans.settings import ClusterFacts, Settings

if TYPE_CHECKING:
    from gradlane.training.torch_internals import Store

_FORGIVEN_S = 0.005
"""Real time by which an operation of a rank that is stopped may end late and be made up for."""
_NO_TIME_S = 1e-6
_REPLAY_LR = 1e-6
"""Small enough that the parameters of a replay with invented gradients stay finite."""


def digest_parameters(model: nn.Module) -> str:
    """Return the SHA-256 of all parameters: names, dtypes, shapes and bytes, in their order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def run_trial(
    request: TrialRequest,
    rank: int,
    report_step: Callable[[int], None],
    count_ports: Callable[[], None],
) -> TrialResult:
    """Run a trial together with all other ranks and return what this rank saw.

    Args:
        request: the same on every rank.
        rank: this rank.
        report_step: called with the number of finished steps.
        count_ports: counts what the ports have carried so far; called on rank 0 before and after
            the counted steps, while no rank has anything to send.

    Raises:
        ArithmeticError: a parameter is not what the mean of the gradients makes of it.
    """
    strategy = parse_strategy(request.strategy)
    random.seed(request.workload.seed)
    np.random.seed(request.workload.seed % 2**32)
    torch.manual_seed(request.workload.seed)
    store = open_store(request.addresses, request.store_port, rank)
    try:
        return _run_connected(request, strategy, rank, store, report_step, count_ports)
    finally:
        gc.collect()
        _return_free_memory()


def run_serving(request: TrialRequest, rank: int) -> OwnerCounters:
    """Serve a run of gradlane's until its workers have closed their sessions.

    Args:
        request: the workers' request.
        rank: this rank, after all workers.

    Returns:
        The counters as an owner. The bytes are those of all steps, with the spread of the first
        values, scaled to those that workers count.
    """
    import gradlane

    store = open_store(request.addresses, request.store_port, rank)
    session = gradlane.init(
        workers=request.world_size,
        rendezvous=gradlane.Rendezvous(
            prefixed(request, store), rank, request.world_size + request.serving, request.job
        ),
        network=gradlane.Network(
            advertise=request.address(rank), secret=request.secret, lanes=request.lanes
        ),
        monitoring=gradlane.Monitoring(summary=False),
    )
    served = session.serve()
    del store
    gc.collect()
    share = request.counted_steps / (request.warmup + request.steps)
    return OwnerCounters(
        sum(one.owned_bytes for one in served),
        round(share * sum(one.rx_bytes for one in served)),
        round(share * sum(one.tx_bytes for one in served)),
    )


def _run_connected(
    request: TrialRequest,
    strategy: LabStrategy,
    rank: int,
    store: Store,
    report_step: Callable[[int], None],
    count_ports: Callable[[], None],
) -> TrialResult:
    world_size = request.world_size
    workload = build(request.workload, rank, world_size)
    optimizer = workload.make_optimizer(workload.model)
    if strategy.is_asynchronous and isinstance(workload, ReplayWorkload):
        # The servers have no kernel for a replay's own optimizer.
        optimizer = torch.optim.SGD(workload.model.parameters(), lr=_REPLAY_LR)
    plan = _hybrid_plan(request, workload) if strategy.is_hybrid else None
    communication = connect(request, rank, store, plan)
    # A failure below closes nothing: the ranks are killed after it, and the first error that is
    # heard shall be the first that happened, not the echo of a connection that was closed.
    model, optimizer = communication.attach(workload.model, optimizer)
    meet(store, f"{request.job}/start", world_size)
    if request.straggles:
        workload.clock.forgiven_s_max = _FORGIVEN_S
    counts: list[OwnerCounters | None] = []

    def count() -> None:
        """Count while all ranks stand still: no sample of the ports shows what is under way."""
        communication.rest()
        place = f"{request.job}/count/{len(counts)}"
        meet(store, f"{place}/silent", world_size)
        if rank == 0:
            count_ports()
        counts.append(communication.owner_counters())
        meet(store, f"{place}/done", world_size)

    def before_step(step: int) -> None:
        # One step is still sending when the next begins: counted is between moments of silence.
        if not counts and step >= strategy.learning_steps:
            count()

    trained = _train(request, workload, model, optimizer, before_step, report_step, communication)
    count()
    communication.settle()
    param_digest = digest_parameters(workload.model)
    metrics = communication.metrics()
    codecs = communication.codecs()
    verified_tensors = _verify(request, strategy, workload, codecs)
    schemes = communication.schemes()
    factor_bytes = workload.factor_bytes() if isinstance(workload, ReplayWorkload) else {}
    wire_bytes = [
        factor_bytes[timing.name]
        if scheme in FACTOR_SCHEMES
        else timing.size_bytes
        if encoded_bytes is None
        else encoded_bytes
        for timing, (_, encoded_bytes), scheme in zip(
            workload.timings, codecs, schemes, strict=False
        )
    ]
    first, last = counts
    del model, optimizer
    communication.close()
    # The server side of the store is rank 0's: it stays until nobody needs it any more.
    meet(store, f"{request.job}/closed", world_size, waits=rank == 0)
    evaluation = None
    if isinstance(workload, RealWorkload) and rank == 0:
        evaluation = asdict(workload.evaluate(workload.model))
    return TrialResult(
        **trained,
        param_digest=param_digest,
        metrics=metrics,
        verified_tensors=verified_tensors,
        # A plan that a session finds may decline to encode.
        codec=request.codec if any(codec != "raw" for codec, _ in codecs) else "raw",
        schemes=schemes,
        wire_bytes=wire_bytes,
        owner=last.since(first) if last and first else None,
        counted_steps=request.counted_steps,
        evaluation=evaluation,
        batch_size=workload.batch_size,
        compute_s=workload.compute_s,
        wall_lag_s=workload.clock.wall_lag_s,
        timings=workload.timings if rank == 0 else [],
    )


def _hybrid_plan(request: TrialRequest, workload: Workload) -> Plan:
    """Return the plan by Poseidon's rule: a function of what all ranks were asked alone."""
    assert isinstance(workload, ReplayWorkload), "LabOptions refuses other workloads"
    facts = ClusterFacts(request.world_size, request.rate_bps, serving=request.serving)
    base = Settings(slice_elems=request.slice_elems)
    book = Coordinator(workload.profile(), facts, base=base, rule="poseidon")
    # The rule needs no simulation: ranks that share a machine do not wait for one each.
    return book.plan(budget_s=_NO_TIME_S)


def _train(
    request: TrialRequest,
    workload: Workload,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    before_step: Callable[[int], None],
    report_step: Callable[[int], None],
    communication: Communication,
) -> dict[str, Any]:
    """Train all steps; returns `boundaries_s`, `cpu_s`, `losses` and `norms` of the result."""
    boundaries_s: list[float] = []
    losses: list[torch.Tensor | None] = []
    norms: list[torch.Tensor | None] = []
    cpu_start_s = 0.0

    def passed() -> None:
        boundaries_s.append(time.monotonic())
        losses.append(None)

    for step in communication.keep_pace(range(request.warmup + request.steps), passed):
        before_step(step)
        if step <= request.warmup:
            cpu_start_s = _cpu_s()
        boundaries_s.append(time.monotonic())
        workload.begin_step(step)
        loss = workload.loss(model, workload.batch(step))
        loss.backward()  # type: ignore[no-untyped-call]
        if request.clip_norm is not None:
            # A replay's gradients keep their values, which are known in advance.
            max_norm = math.inf if workload.replays else request.clip_norm
            # The last step before the measured ones shows whether the norms are the same.
            is_free = workload.replays and step != request.warmup - 1
            norms.append(communication.clip(workload.model, max_norm, is_free=is_free))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        report_step(step + 1)
    boundaries_s.append(time.monotonic())
    return {
        "boundaries_s": boundaries_s,
        "cpu_s": _cpu_s() - cpu_start_s,
        "losses": [None if loss is None else float(loss) for loss in losses],
        "norms": [None if norm is None else float(norm) for norm in norms],
    }


def _verify(
    request: TrialRequest,
    strategy: LabStrategy,
    workload: Workload,
    codecs: list[tuple[str, int | None]],
) -> int:
    """Compare the final parameters of a replay with what the averaged gradients make of them.

    Returns:
        How many tensors were compared: 0 where nothing is known in advance.
    """
    known = strategy.communicates and not strategy.is_asynchronous and not strategy.hook
    # Who was left out of which step is not known in advance, and local updates average parameters.
    known = known and not strategy.stragglers.leaves_out and strategy.rounds is None
    if not isinstance(workload, ReplayWorkload) or not known:
        return 0
    wrong = workload.verify(
        workload.model,
        request.warmup + request.steps,
        exact=strategy.sums_in_rank_order,
        codecs=[codec for codec, _ in codecs],
        ring_ranks=ring_ranks(strategy.setting, request.world_size),
    )
    if wrong:
        raise ArithmeticError(
            f"{strategy.text}: {len(wrong)} tensors are not what the mean over ranks makes of "
            f"them, the first: {wrong[0]}"
        )
    return len(workload.timings)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _return_free_memory() -> None:
    """Give freed pages back, so that one run's model does not weigh on the next one."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
