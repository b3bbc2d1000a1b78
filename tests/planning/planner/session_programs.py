"""Programs of rank processes for the tests of plans in sessions."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._C._distributed_c10d import Store

from gradlane.errors import GradlaneError
from gradlane.planning.planner import plan_while_training
from gradlane.planning.probe import stream_endpoint
from gradlane.training.model.prepared import PreparedModel
from gradlane.training.plans.plan import Plan, PlannedTensor
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.training.model.prepared_models import seen_prepared
from tests.training.model.scenarios import MODELS, digest, loss_of, open_session, optimizer_of

OTHER = Settings("slicing", slice_elems=700, frame_bytes=4096, send_buffer_bytes=100_000)
"""Settings that no search would choose: in force, they show that a switch took place."""


class Decided:
    """In place of the coordinator: the decision is known, everything around it is real."""

    def __init__(
        self,
        profile: Any,
        facts: ClusterFacts,
        *,
        base: Settings,
        source: str,
        rule: str,
        any_rounding: bool,
    ) -> None:
        assert rule == "auto"
        self.any_rounding = any_rounding
        assert profile.compute_s > 0.0 and len(profile.tensors) > 0
        assert facts.rate_bps > 1e6 and facts.latency_s > 0.0
        self._plan = Plan("decided", facts, source, OTHER)

    def plan(self, *, budget_s: float) -> Plan:
        return self._plan


class Mixed(Decided):
    """The decision: factors for linear layers, and of the rest every other tensor round a ring."""

    def __init__(self, profile: Any, facts: ClusterFacts, **arguments: Any) -> None:
        super().__init__(profile, facts, **arguments)
        assert self.any_rounding
        assert all(one.rows for one in profile.tensors if _has_factors(one))
        tensors = tuple(
            PlannedTensor(one.name, one.numel, _scheme_of(index, one), "raw", 1, "decided")
            for index, one in enumerate(profile.tensors)
        )
        self._plan = replace(self._plan, settings=Settings(), tensors=tensors)


def _has_factors(tensor: Any) -> bool:
    return tensor.layer == "Linear" and len(tensor.shape) == 2


def _scheme_of(index: int, tensor: Any) -> str:
    if _has_factors(tensor):
        return "sfb"
    return ("ring", "ps")[index % 2]


def train(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    runs: list[dict[str, Any]],
    model_name: str,
    steps: int,
    optimizer_name: str = "sgd",
    **options: Any,
) -> list[dict[str, Any]]:
    """Train once for each set of arguments of `_train`; returns what each came to."""
    results = []
    for number, run in enumerate(runs):
        one = f"{job}-{number}"
        arguments = {**options, **run}
        results.append(
            _train(store, rank, world_size, one, model_name, steps, optimizer_name, **arguments)
        )
    return results


def _train(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model_name: str,
    steps: int,
    optimizer_name: str,
    plan: Any = None,
    decided: bool = False,
    mixed: bool = False,
    unrecorded: bool = False,
    buffers: str = "broadcast",
    micro_batches: int = 1,
    joins: bool = False,
    cosine: bool = False,
    **options: Any,
) -> dict[str, Any]:
    stub: Any = contextlib.nullcontext()
    if decided or mixed:
        stub = mock.patch.object(plan_while_training, "Coordinator", Mixed if mixed else Decided)
    elif unrecorded:
        refusal = ValueError("the model's parameters are on cuda:0, cuda:1")
        stub = mock.patch.object(plan_while_training, "Recorder", side_effect=refusal)
    with (
        stub,
        seen_prepared() as prepared_of,
        open_session(store, rank, world_size, job, **options) as session,
    ):
        model = MODELS[model_name]()
        optimizer = optimizer_of(optimizer_name, model)
        session.prepare(model, optimizer, plan=plan, buffers=buffers)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50) if cosine else None
        digests, settings = [], []
        # With join() rank 0 has two batches more than the others.
        count = steps + 2 if joins and rank == 0 else steps
        with session.join() if joins else contextlib.nullcontext():
            for step in range(1, count + 1):
                for part in range(micro_batches - 1):
                    with session.no_sync():
                        loss_of(model_name, model, rank, 1000 * part + step).backward()  # type: ignore[no-untyped-call]
                loss_of(model_name, model, rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                if schedule is not None:
                    schedule.step()
                settings.append(_settings_in_force(prepared_of(model)))
                if not joins:
                    digests.append(digest(model))
        for step in range(2 if joins else 0):
            loss_of(model_name, model, rank, 50 + step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            settings.append(_settings_in_force(prepared_of(model)))
        session.synchronize()
        digests.append(digest(model))
        own_buffers = [buffer.sum().item() for buffer in model.buffers()]
        state = optimizer.state_dict()["state"]
        found = session.planning.plan
        schemes = prepared_of(model).schemes
        values = [parameter.detach().flatten().tolist() for parameter in model.parameters()]
    return {
        "schemes": schemes,
        "values": values,
        "digests": digests,
        "settings": settings,
        "buffers": own_buffers,
        "state": {key: sorted(value) for key, value in state.items()},
        "plan": found.to_json() if found else None,
    }


def _settings_in_force(prepared: PreparedModel) -> dict[str, Any]:
    """What the connection was opened with."""
    return replace(Settings.of(prepared.options), local=None).to_json()


def given(
    store: Store, rank: int, world_size: int, job: str, plans: list[Any], sizes: list[int]
) -> str:
    """Prepare with another plan on each rank; returns the settings in force, or the error."""
    session = open_session(store, rank, world_size, job)
    model = nn.Linear(sizes[rank], 2)
    try:
        with seen_prepared() as prepared_of:
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), plan=plans[rank])
        settings = str(_settings_in_force(prepared_of(model)))
        session.close()
        return settings
    except ValueError as error:
        session.abort("the test is over")
        return f"{type(error).__name__}: {error}"


def prepare_again(store: Store, rank: int, world_size: int, job: str, path: str) -> dict[str, Any]:
    """Prepare under `auto`, again while it learns, and with a plan of its own."""
    with (
        mock.patch.object(plan_while_training, "Coordinator", Decided),
        seen_prepared() as prepared_of,
        open_session(store, rank, world_size, job) as session,
    ):
        model = MODELS["cnn"]()
        optimizer = optimizer_of("sgd", model)
        seen = []
        for plan in ("auto", "auto", Path(path)):
            session.prepare(model, optimizer, plan=plan)
            for step in range(1, 4):
                loss_of("cnn", model, rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
            seen.append(_settings_in_force(prepared_of(model)))
        hooks = len(model._forward_pre_hooks)
    return {"seen": seen, "hooks": hooks, "left": len(model._forward_pre_hooks)}


def logged(store: Store, rank: int, world_size: int, job: str) -> list[str]:
    """Train under `auto`; returns what the logger was told."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log = logging.getLogger("gradlane")
    handler, level = Keep(), log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        _train(store, rank, world_size, job, "cnn", 10, "sgd", plan="auto")
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return lines


def probe(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    directions: bool = True,
    blocked: bool = False,
) -> Any:
    """Measure the links; `blocked`: the last rank connects to a port where nobody listens."""
    with open_session(store, rank, world_size, job) as session:
        if not blocked:
            return session.planning.probe(window_s=0.1, directions=directions).to_json()
        connect = stream_endpoint.StreamEndpoint.connect

        def connect_to_nobody(self: Any, peers: Any, *sides: Any) -> None:
            connect(self, ["127.0.0.1:9"] * len(peers), *sides)

        last = rank == world_size - 1
        with (
            mock.patch.object(
                stream_endpoint.StreamEndpoint, "connect", connect_to_nobody if last else connect
            ),
            mock.patch.object(stream_endpoint, "CONNECT_TIMEOUT_S", 1.0),
        ):
            try:
                session.planning.probe(window_s=0.1)
            except GradlaneError as error:
                return f"{type(error).__name__}: {error}"
        return "no error"
