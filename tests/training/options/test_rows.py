"""Rows of the table that options alone do not break: each is held against what happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.planning.simulation.scenarios import Cluster
from gradlane.training.model.validation import parameter_features
from gradlane.training.options.cluster_shape import ClusterShape
from gradlane.training.options.compatibility import ROWS, Feature, Features, refusal
from gradlane.training.options.strategy import plan_features
from gradlane.training.plans.settings import ClusterFacts
from tests.built import needs_core
from tests.paths import ROOT
from tests.training.model.ranks import run_ranks
from tests.training.options.test_compatibility import (
    ASKED_ROWS,
    CALLED,
    OPTIONS,
    opened,
    prepared,
    sgd,
    trained_by,
)
from tests.training.sharded.fsdp2 import needs_fsdp2
from tests.training.sharded.test_rules import adam, backward, sharded
from tests.training.sharded.test_rules import session as alone

F = Feature
Pair = tuple[Feature, Feature]


def lbfgs(session: Any, **given: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    session.prepare(model, torch.optim.LBFGS(model.parameters()), **given)
    return model


def in_session(body: Callable[[Any], object], **options: Any) -> Callable[[], None]:
    """Return a program of two ranks in one process."""

    def run() -> None:
        errors = run_ranks(2, body, expect_errors=True, local="off", **options)
        raise next(
            one for one in errors if isinstance(one, (gradlane.UsageError, ValueError))
        ) from None

    return run


def with_momentum(session: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session.prepare(model, optimizer)
    return model, optimizer


def clipped(session: Any) -> None:
    model, _ = with_momentum(session)
    model(torch.ones(1, 2)).sum().backward()
    session.clip_grad_norm_(1.0)


def scaled(session: Any) -> None:
    model, optimizer = with_momentum(session)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)


def weighed_factors(session: Any) -> None:
    model = nn.Linear(64, 64)
    session.prepare(model, sgd([*model.parameters()]))
    session.weight(3)


def sparse(session: Any) -> None:
    model = nn.Embedding(8, 4, sparse=True)
    session.prepare(model, torch.optim.SparseAdam(model.parameters()))


def asked(given: Features, **options: Any) -> Callable[[], None]:
    """Return what `prepare` asks of the table, where more than a thread is needed to come there."""

    def run() -> None:
        if why := refusal(given, opened(options).features):
            raise ValueError(why)

    return run


def plan_with(scheme: str) -> Features:
    return plan_features("", {"first.weight": scheme})


def on_meta() -> Features:
    return parameter_features(nn.Linear(2, 2, device="meta"))


def raises(why: str) -> None:
    if why:
        raise ValueError(why)


def weighed_halves(session: Any) -> None:
    trained_by(session, sgd, torch.float16)
    session.weight(3)


def twice(session: Any) -> None:
    prepared(session)
    prepared(session)
    next(iter(session.keep_pace(range(1))))


def several(session: Any) -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.LBFGS([model.weight]), sgd([model.bias])]
    session.prepare(model, optimizers)


def after_closure(call: Callable[[Any], object]) -> Callable[[], None]:
    return in_session(lambda session: (lbfgs(session), call(session)))


DGC = "dgc:ratio=0.5,momentum=0.9"
PROBES: dict[Pair, Callable[[], object]] = {
    (F.SERVING, F.RANKS_PER_NODE): lambda: ClusterShape(
        4, ranks_per_node=2, serving=1
    ).check_shape(),
    (F.SERVERS, F.PLANNED_NODES): lambda: ClusterFacts(
        workers=4, rate_bps=1e9, ranks_per_node=2, servers=1
    ),
    (F.GOING_ON, F.RESIDUAL_ON_RING): lambda: opened(
        {"strategy": "ring", "codec": "topk", "going_on": True}
    ),
    (F.CLOSURE, F.PLAN_RULE): in_session(lambda session: lbfgs(session, plan="auto")),
    (F.CLOSURE, F.DEFER_TRUE): in_session(lambda session: lbfgs(session, defer=True)),
    (F.CLOSURE, F.SEVERAL): in_session(several),
    (F.JOIN, F.CLOSURE): after_closure(lambda session: session.join().__enter__()),
    (F.QUERY, F.CLOSURE): after_closure(CALLED[F.QUERY]),
    (F.BEST_SCHEME, F.CLOSURE): after_closure(CALLED[F.BEST_SCHEME]),
    (F.KEEP_PACE, F.SECOND): in_session(twice, stragglers="backup=1"),
    (F.RESTORE, F.CHECKPOINTS): in_session(lambda session: session.restore()),
    (F.GATHER_INTEGERS, F.GOING_ON): in_session(lambda session: session.gather_integers([1])),
    (F.CLIP, F.ADDS_UP): in_session(clipped, codec=DGC),
    (F.SCALER, F.ADDS_UP): in_session(scaled, codec=DGC),
    (F.WEIGHT, F.HALF): in_session(weighed_halves),
    (F.WEIGHT, F.FACTOR_LAYER): in_session(weighed_factors, scheme="sfb"),
    (F.FACTOR_LAYER, F.CLIPPING_CODEC): in_session(
        prepared, scheme="sfb", codec="dgc:momentum=0,clip=1.0"
    ),
    (F.OWN_MOMENTUM, F.MOMENTUM_CODEC): in_session(
        lambda session: trained_by(session, torch.optim.Adam), codec=DGC
    ),
    (F.SERVING, F.PLANNED_NODES): lambda: raises(
        Cluster(4, 1e9, ranks_per_node=2, serving=1).servers_refusal
    ),
    (F.STRAGGLERS, F.PLAN_FACTORS): in_session(
        lambda session: prepared(session, plan="poseidon"), stragglers="drop"
    ),
    (F.STRAGGLERS, F.PLAN_RING): asked(plan_with("ring"), stragglers="drop"),
    (F.GOING_ON, F.PLAN_FACTORS): asked(plan_with("sfb"), going_on=True),
    (F.PLAN, F.JOINS): asked({F.PLAN: "plan"}, going_on=True, join=True),
    (F.PLAN_RULE, F.SERVING): asked({F.PLAN_RULE: 'plan="auto"'}, workers=2),
    (F.ON_DEVICE, F.SERVER): asked(on_meta(), update="server"),
    (F.FSDP, F.ON_DEVICE): asked({F.FSDP: "a sharded model", **on_meta()}),
    (F.FSDP, F.SERVING): asked({F.FSDP: "a sharded model"}, workers=2),
    (F.ROWS, F.GOING_ON): in_session(sparse, going_on=True),
    (F.ROWS, F.STRAGGLERS): in_session(sparse, stragglers="drop"),
    (F.ROWS, F.PULLS): in_session(sparse, strategy="kvstore"),
    (F.ROWS, F.SERVER): asked({F.ROWS: "rows"}, update="server"),
    (F.ROWS, F.LOCAL): in_session(sparse, update=gradlane.Local(steps=2)),
}
"""What breaks a row and raises its refusal."""

FSDP_OPTIONS: dict[Feature, dict[str, Any]] = {
    F.GOING_ON: {"going_on": True},
    F.STRAGGLERS: {"stragglers": "drop"},
    F.SERVER: {"update": "server"},
    F.FACTORS: {"strategy": gradlane.Strategy("p3", scheme="sfb")},
    F.PULLS: {"strategy": "kvstore"},
    F.SERVERS: {"servers": 1},
    F.NODES: {"local": "leader"},
    F.CHECKPOINTS: {"checkpoints": gradlane.Checkpoints("/tmp/of-a-test")},
    F.PATTERNS: {"codec": {"*": gradlane.codecs.Bf16()}},
    F.RESIDUAL: {"codec": gradlane.codecs.TopK(ratio=0.1)},
}
FSDP_PREPARED: dict[Feature, dict[str, Any]] = {
    F.DEFER_TRUE: {"defer": True},
    F.BUFFERS: {"buffers": "average"},
    F.PLAN: {"plan": "auto"},
}
FSDP_CALLS = (F.WEIGHT, F.JOIN, F.CLIP, F.QUERY, F.BEST_SCHEME, F.NO_SYNC)


@contextlib.contextmanager
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def break_sharded(other: Feature) -> None:
    """Ask for a sharded model and something that it does not go with."""
    with group(), alone(**FSDP_OPTIONS.get(other, {})) as session:
        model = sharded()
        if other is F.CLOSURE:
            session.prepare(model, torch.optim.LBFGS(model.parameters()))
        session.prepare(model, adam(model), **FSDP_PREPARED.get(other, {}))
        if other in FSDP_CALLS:
            CALLED[other](session)
        if other is F.GRADIENT_HOOK:
            model[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        if other is F.END_BY_HAND:
            model.set_manual_backward_finalization(True)
        backward(model)
        if other is F.END_BY_HAND:
            model.finalize_backward()


FSDP_ROWS = {
    (row.feature, row.other): (
        row.reason,
        row.other if row.feature in (F.FSDP, F.FSDP_EXACT) else row.feature,
    )
    for row in ROWS
    if {row.feature, row.other} & {F.FSDP, F.FSDP_EXACT} and (row.feature, row.other) not in PROBES
}

_NODES = "tests/training/node/test_node_channel.py::test_what_does_not_go_together"
_WRAPPERS = "tests/training/model/test_wrappers.py"
ELSEWHERE: dict[Pair, str] = {
    (F.GOING_ON, F.ONE_NODE): _NODES,
    (F.MOMENTUM_CODEC, F.ONE_NODE): _NODES,
    (F.LIGHTNING, F.GOING_ON): _WRAPPERS,
    (F.LIGHTNING, F.SEVERAL): _WRAPPERS,
    (F.LIGHTNING, F.MANUAL): _WRAPPERS,
    (F.ACCELERATOR, F.GOING_ON): _WRAPPERS,
    (F.ATTACHED, F.WRAPPER_SHARDS): _WRAPPERS,
}
"""Tests that break the rest: these need packages that are not installed, or nodes."""


@needs_core
@pytest.mark.parametrize("pair", PROBES, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_a_row_is_what_happens(pair: Pair) -> None:
    (row,) = [one for one in ROWS if (one.feature, one.other) == pair]
    with pytest.raises((gradlane.UsageError, ValueError)) as caught:
        PROBES[pair]()
    assert row.reason in str(caught.value)


@needs_core
@needs_fsdp2
@pytest.mark.parametrize("pair", FSDP_ROWS, ids=lambda pair: f"{pair[0].name}-{pair[1].name}")
def test_a_row_of_sharded_models_is_what_happens(pair: Pair) -> None:
    reason, other = FSDP_ROWS[pair]
    with pytest.raises((gradlane.UsageError, ValueError)) as caught:
        break_sharded(other)
    assert reason in str(caught.value)


def test_every_row_is_held_against_what_happens() -> None:
    walked = {one for one in OPTIONS}
    asked_for = {frozenset(pair) for pair in ASKED_ROWS}
    held = {*PROBES, *FSDP_ROWS, *ELSEWHERE}
    missing = [
        f"{row.feature.name}-{row.other.name}"
        for row in ROWS
        if not {row.feature, row.other} <= walked
        and frozenset((row.feature, row.other)) not in asked_for
        and (row.feature, row.other) not in held
    ]
    assert not missing
    rows = {(row.feature, row.other): row for row in ROWS}
    for pair, place in ELSEWHERE.items():
        path, _, name = place.partition("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        assert name in text
        # It looks for words of the refusal.
        assert any(words in text for words in _runs_of(rows[pair].reason)), (pair, path)


def _runs_of(reason: str) -> list[str]:
    """Return all runs of four words."""
    words = reason.split()
    return [" ".join(words[at : at + 4]) for at in range(max(1, len(words) - 3))]
