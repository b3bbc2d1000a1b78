"""The table of what goes together says what happens: for all pairs, drawn triples, and calls."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.training.node.rules import with_local
from gradlane.training.options.compatibility import (
    CALLS,
    ROWS,
    Feature,
    Kind,
    When,
    page,
    refusal,
)
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.array_calls import ArrayCalls
from gradlane.training.session.planning_calls import PlanningCalls
from tests.built import needs_core
from tests.paths import ROOT
from tests.training.model.ranks import run_ranks

F = Feature
OPTIONS: dict[Feature, list[dict[str, Any]]] = {
    F.RING: [{"strategy": "ring"}, {"scheme": "ring"}],
    F.PULLS: [{"strategy": "kvstore"}, {"strategy": "deferred-pull"}],
    F.ASGD: [{"strategy": "asgd"}],
    F.FACTORS: [{"scheme": "sfb"}],
    F.ONE_OWNER: [{"scheme": "adam"}],
    F.SERVER: [{"update": "server"}],
    F.LOCAL: [{"update": gradlane.Local(steps=2)}],
    F.STRAGGLERS: [{"stragglers": "drop"}, {"stragglers": "backup=1"}],
    F.GOING_ON: [{"going_on": True}],
    F.JOINS: [{"join": True}],
    F.SERVERS: [{"servers": 2}],
    F.SERVING: [{"workers": 2}],
    F.CHECK_EVERY: [{"check_every": 10}],
    F.CODEC: [{"codec": "qsgd:bits=8"}, {"codec": "bf16"}],
    F.DGC: [{"codec": "dgc:momentum=0"}],
    F.RESIDUAL: [{"codec": "onebit"}, {"codec": "int8:residual=on"}],
    F.DECAY: [{"codec": "topk:decay=0.5"}],
    F.PS_SCHEME: [{"scheme": "ps"}],
    F.INTEGER_RING: [{"strategy": "ring", "codec": "qsgd:bits=8,ring=integer"}],
    F.PATTERNS: [{"codec": {"*weight": "bf16"}}],
    F.NODES: [{"local": "leader"}],
    F.SHARED: [{"local": "shared"}],
    F.NO_NODES: [{"local": "off"}],
    F.COLLECTIVE: [{"local_sums": "collective"}],
    F.CHECKPOINTS: [{"checkpoint_folder": "/tmp/of-a-test"}],
    F.TRACE: [{"trace": "/tmp/trace.json"}],
}
"""How each option is asked for."""
IMPLIED: list[tuple[set[Feature], Feature]] = [
    ({F.ONE_OWNER}, F.FACTORS),
    ({F.DGC}, F.RESIDUAL),
    ({F.DECAY}, F.RESIDUAL),
    ({F.INTEGER_RING}, F.RING),
    ({F.RESIDUAL}, F.CODEC),
    ({F.INTEGER_RING}, F.CODEC),
    ({F.PATTERNS}, F.CODEC),
    ({F.SHARED}, F.NODES),
    ({F.COLLECTIVE}, F.NODES),
    ({F.RESIDUAL, F.RING}, F.RESIDUAL_ON_RING),
]
"""What is asked for by asking for something else."""
_APART = (F.SERVING, F.JOINS, F.NODES, F.SHARED, F.COLLECTIVE, F.NO_NODES)
_UNSEEN = {F.NODES, F.NO_NODES, F.PS_SCHEME}
"""Features that options of a session do not name: a mode that was put aside, and a default."""
TOGETHER = [one for one in OPTIONS if one not in _APART]
"""Options but those whose ranks serve, join or share nodes, which other tests train."""
WORLD_SIZE = 4


def with_implied(features: Iterable[Feature]) -> dict[Feature, str]:
    found = set(features)
    for causes, effect in IMPLIED:
        if causes <= found:
            found.add(effect)
    return {one: one.label for one in found}


def merged(given: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """Return all keywords, or None where two give one another value."""
    found: dict[str, Any] = {}
    for one in given:
        if any(found.get(name, value) != value for name, value in one.items()):
            return None
        found |= one
    names = {"strategy", "scheme"} if found.get("scheme") == "ring" else set()
    return None if names <= found.keys() and names else found


def placed(keywords: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the keywords with files in a folder of the test's."""
    places = {"checkpoint_folder": str(folder / "saved"), "trace": str(folder / "trace.json")}
    return {**keywords, **{name: one for name, one in places.items() if name in keywords}}


def opened(keywords: dict[str, Any]) -> Options:
    """Check options as `gradlane.init` does."""
    options = with_local(Options.of(**keywords_of(**keywords)))
    options.check_world(WORLD_SIZE)
    return options


def check(features: tuple[Feature, ...], given: Iterable[dict[str, Any]]) -> bool:
    """Hold what the table says of features against what happens; return whether they go."""
    keywords = merged(given)
    if keywords is None:
        return False
    said = with_implied(features)
    if not refusal(said):
        options = opened(dict(keywords))
        assert set(options.features) >= set(said) - _UNSEEN, keywords
        return True
    with pytest.raises(ValueError, match=" with") as caught:
        opened(dict(keywords))
    reasons = [
        row.reason for row in ROWS if row.feature in said and (row.other in said) != row.needs
    ]
    assert any(reason in str(caught.value) for reason in reasons), (keywords, str(caught.value))
    return False


def ways(features: tuple[Feature, ...]) -> Iterable[tuple[dict[str, Any], ...]]:
    return itertools.product(*(OPTIONS[one] for one in features))


def test_each_option_alone() -> None:
    for feature in OPTIONS:
        for given in ways((feature,)):
            check((feature,), given)


def test_all_pairs_of_options() -> None:
    went = sum(
        check(pair, given) for pair in itertools.combinations(OPTIONS, 2) for given in ways(pair)
    )
    assert went > 150


@pytest.mark.parametrize("seed", range(4))
def test_drawn_sets_of_options(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(150):
        features = tuple(draw.sample(list(OPTIONS), draw.choice((3, 3, 4))))
        check(features, draw.choice(list(ways(features))))


@needs_core
@pytest.mark.parametrize("seed", range(2))
def test_options_that_go_together_train(seed: int, tmp_path: Path) -> None:
    """Two ranks over real connections; those that only serve, join or share nodes have others."""
    draw = random.Random(seed)
    trained = 0
    while trained < 8:
        features = tuple(draw.sample(TOGETHER, 3))
        if not check(features, given := draw.choice(list(ways(features)))):
            continue
        keywords = placed(merged(given) or {}, tmp_path)
        first, second = run_ranks(2, trains, local="off", **keywords)
        assert first == second, features
        trained += 1


def trains(session: Any) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.Linear(40, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    session.prepare(model, optimizer)
    for step in session.keep_pace(range(4)):
        model(torch.full((2, 3), 1.0 + session.rank + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    session.synchronize()
    return [one.sum().item() for one in model.parameters()]


# ---- prepare() and calls


def prepared(session: Any, **given: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, **given)
    return model, optimizer


def evaluating(session: Any) -> None:
    model = nn.Linear(2, 2)
    session.prepare(model, torch.optim.LBFGS(model.parameters()))


def trained_by(
    session: Any,
    make: Callable[[list[nn.Parameter]], Any],
    dtype: torch.dtype = torch.float32,
) -> None:
    model = nn.Linear(2, 2).to(dtype)
    session.prepare(model, make([*model.parameters()]))


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def watched(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


def called(session: Any, call: Callable[[Any], object]) -> None:
    model, _ = prepared(session)
    loss = model(torch.ones(1, 2)).sum()
    if call is CALLED[F.CLIP]:
        loss.backward()
    call(session)


def strided(session: Any) -> None:
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(torch.ones(4, 2)[::2])
    session.prepare(model, sgd([*model.parameters()]))


def tied(session: Any) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.rows = nn.Parameter(model.weight.detach()[0])
    session.prepare(model, sgd([*model.parameters()]))


def pushed(session: Any) -> None:
    session.arrays.register("array", (2,), "float32")
    session.arrays.push("array", torch.ones(2).numpy())
    session.arrays.wait("array")


CALLED: dict[Feature, Callable[[Any], object]] = {
    F.WEIGHT: lambda session: session.weight(3),
    F.CLIP: lambda session: session.clip_grad_norm_(1.0),
    F.JOIN: lambda session: session.join().__enter__(),
    F.NO_SYNC: lambda session: session.no_sync().__enter__(),
    F.REGISTER: lambda session: session.arrays.register("array", (2,), "float32"),
    F.RESTORE: lambda session: session.restore(),
    F.GATHER_INTEGERS: lambda session: session.gather_integers([1]),
    F.QUERY: lambda session: session.planning.query("layers"),
    F.BEST_SCHEME: lambda session: session.planning.best_scheme(0, batch_size=2),
}
PREPARED: dict[Feature, Callable[[Any], object]] = {
    F.PLAN: lambda session: prepared(session, plan="auto"),
    F.PLAN_RULE: lambda session: prepared(session, plan="auto"),
    F.TIED: tied,
    F.STRIDED: strided,
    F.ARRAYS: pushed,
    F.CLOSURE: lambda session: evaluating(session),
    F.SEVERAL: lambda session: trained_by(session, lambda them: [sgd([one]) for one in them]),
    F.UNSERVED: lambda session: trained_by(session, torch.optim.RMSprop),
    F.AMSGRAD: lambda session: trained_by(
        session, lambda them: torch.optim.Adam(them, amsgrad=True)
    ),
    F.STEP_HOOKS: lambda session: trained_by(session, watched),
    F.WIDE: lambda session: trained_by(session, sgd, torch.float64),
    F.NARROW: lambda session: trained_by(session, sgd, torch.bfloat16),
    F.DEFER: lambda session: prepared(session, defer=False),
    F.BUFFERS: lambda session: prepared(session, buffers="average"),
    F.SECOND: lambda session: (prepared(session), prepared(session)),
    F.AGAIN: lambda session: session.prepare(*prepared(session)),
}
BY_LAYER = (F.WEIGHT, F.FACTORS)
"""Whether they go together is seen of each layer: those without factors have weights."""


def check_call(features: tuple[Feature, ...], keywords: dict[str, Any], asked: Feature) -> None:
    """Hold what the table says of a call, or a way to prepare, against what happens."""
    given = {asked: asked.label}
    if asked in (F.PLAN, F.PLAN_RULE):
        given |= {one: one.label for one in (F.PLAN, F.PLAN_RULE)}
    said = refusal(given, with_implied(features))
    call = CALLED.get(asked)

    def body(session: Any) -> None:
        if call is None:
            PREPARED[asked](session)
        else:
            called(session, call)

    errors = run_ranks(2, body, expect_errors=True, local="off", **keywords)
    if said:
        # Who is refused first tells the other.
        own = (gradlane.UsageError, ValueError)
        refused = [str(one) for one in errors if isinstance(one, own)]
        reasons = [row.reason for row in ROWS if {row.feature, row.other} & set(given)]
        assert refused and all(isinstance(one, (gradlane.GradlaneError, *own)) for one in errors)
        assert all(any(why in one for why in reasons) for one in refused), (said, refused)
    else:
        assert errors == [None, None], (features, asked)


ASKED_ROWS = [
    pair
    for row in ROWS
    for pair in ((row.feature, row.other), (row.other, row.feature))
    if pair[0] in {*CALLED, *PREPARED} and pair[1] in TOGETHER and not row.needs
]
"""What is asked for, and the option that excludes it."""


@needs_core
@pytest.mark.parametrize(
    ("asked", "option"), ASKED_ROWS, ids=[f"{one.name}-{other.name}" for one, other in ASKED_ROWS]
)
def test_calls_and_ways_to_prepare_that_are_in_a_row(
    asked: Feature, option: Feature, tmp_path: Path
) -> None:
    features = (option, F.SERVER) if option is F.ASGD else (option,)
    given = [OPTIONS[one][0] for one in features]
    check_call(features, placed(merged(given) or {}, tmp_path), asked)


@needs_core
@pytest.mark.parametrize("seed", range(2))
def test_calls_and_ways_to_prepare_under_drawn_options(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    called_so_far = 0
    while called_so_far < 15:
        features = tuple(draw.sample(TOGETHER, 2))
        asked = draw.choice([*CALLED, *PREPARED])
        given = draw.choice(list(ways(features)))
        if check(features, given) and not set(BY_LAYER) <= {asked, *features}:
            folder = tmp_path / str(called_so_far)
            folder.mkdir()
            check_call(features, placed(merged(given) or {}, folder), asked)
            called_so_far += 1


@needs_core
def test_pace_is_kept_of_one_model() -> None:
    def body(session: Any) -> None:
        for words in ("without a prepared model", "", "a batch is one step of one model"):
            if words:
                with pytest.raises(gradlane.UsageError, match=words):
                    next(iter(session.keep_pace(range(1))))
            prepared(session)

    run_ranks(2, body, local="off", stragglers="backup=1")


# ---- the table and its page


def test_the_page_is_up_to_date() -> None:
    written = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert written == page(), "run python -m gradlane.training.options.compatibility"


def test_rows_are_pairs_that_stand_once_and_say_what_to_do() -> None:
    pairs = [frozenset((row.feature, row.other)) for row in ROWS]
    assert len(pairs) == len(set(pairs)) and all(len(pair) == 2 for pair in pairs)
    assert {one for pair in pairs for one in pair} == set(Feature)
    for row in ROWS:
        assert row.reason and (row.instead or row.feature is F.ROWS), row
        assert not row.reason.endswith((".", ";")) and "|" not in row.reason + row.instead, row
        assert row.kind in Kind and not (row.needs and row.kind is Kind.NOT_BUILT)


GROUPS: dict[str, Any] = {"": gradlane.Session, "arrays": ArrayCalls, "planning": PlanningCalls}


def test_every_call_is_one_of_the_session() -> None:
    for text, feature in CALLS.items():
        assert feature.when is When.CALL
        group, _, name = text.removesuffix("()").rpartition(".")
        assert callable(getattr(GROUPS[group], name))
