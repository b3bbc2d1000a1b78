"""What does not go with local updates is refused by name, with the line to write instead."""

from __future__ import annotations

import re
import threading
import uuid
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.training.core import load_core
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.init import open_session
from tests.training.local_updates.test_training import adam, build, loss
from tests.training.model.models import SmallCnn, seeded
from tests.training.model.ranks import run_ranks

CORE: Any = load_core()
LOCAL = gradlane.Local(steps=2)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"steps": 0}, "local_steps is 0; it must be 1 or more"),
        ({"outer": "adam"}, "unknown outer 'adam'; known are average, sgd, nesterov"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1.0; it must be 0 or more, below 1"),
        ({"mix": 0.0}, "mix is 0.0; it must be above 0, at most 1"),
        ({"steps": 4, "fragments": 5}, "give as many steps as fragments, or more"),
        ({"steps": 9, "fragments": 2, "overlap_steps": 5}, "give 4 or fewer"),
        ({"outer": "average", "outer_lr": 0.5}, "leave outer_lr and outer_momentum out"),
        ({"outer": "average", "outer_momentum": 0.5}, "leave outer_lr and outer_momentum out"),
    ],
)
def test_options_that_make_no_sense(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        gradlane.Local(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"strategy": "asgd"}, 'without update="server"'),
        ({"scheme": "sfb"}, 'scheme="sfb": a difference of several steps'),
        ({"codec": "dgc"}, "codec 'dgc': it applies the optimizer's momentum itself"),
        ({"codec": {"*.bias": None, "*": "dgc"}}, "use topk"),
        ({"stragglers": "drop"}, 'use stragglers="wait"'),
        ({"workers": 2}, "give servers="),
        ({"check_every": 10}, "a sample of the common values is compared"),
        ({"local_sums": "collective"}, 'use where="host"'),
        ({"trace": "trace.json"}, "see session.metrics()"),
    ],
)
def test_options_that_do_not_go_with_it(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        Options.of(**keywords_of(update=LOCAL, **given)).check_world(4)


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"save the model, the optimizer and session\.state_dict"):
        Options.of(**keywords_of(update=LOCAL, checkpoint_folder=str(tmp_path)))


def test_another_kind_of_update() -> None:
    with pytest.raises(ValueError, match="unknown update 'local'; known are worker, server"):
        Options.of(update="local")
    with pytest.raises(TypeError, match=r"update is 3; give a text or a gradlane\.Local"):
        Options.of(update=3)


def opened(session: Any, build_model: Any = build, **given: Any) -> tuple[nn.Module, Any]:
    model = seeded(build_model)
    optimizer = adam(model)
    session.prepare(model, optimizer, **given)
    return model, optimizer


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (lambda it: it.clip_grad_norm_(1.0), "torch.nn.utils.clip_grad_norm_(model.parameters(),"),
        (lambda it: it.join(), "DataLoader(drop_last=True)"),
        (
            lambda it: it.arrays.register("a", (3,), "float32"),
            "open a session without it for arrays",
        ),
        (lambda it: it.planning.query("layers"), "sent in each step"),
        (lambda it: it.planning.best_scheme(0, batch_size=3), "sent in each step"),
        (lambda it: opened(it), "such as nn.ModuleDict"),
        (lambda it: it.prepare(it.models[0], adam(it.models[0])), "prepare the model in a new one"),
        (lambda it: it.restore(), "give gradlane.init(checkpoints=...)"),
    ],
)
def test_calls_that_do_not_go_with_it(calls: Any, words: str) -> None:
    def body(session: Any) -> None:
        opened(session)
        calls(session)

    with pytest.raises(gradlane.UsageError, match=re.escape(words)):
        run_ranks(1, body, core=CORE, update=LOCAL)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"plan": "auto"}, "leave plan out"),
        ({"defer": True}, "leave defer out"),
        ({"buffers": "average"}, "stay each rank's own"),
    ],
)
def test_arguments_of_prepare(given: dict[str, Any], words: str) -> None:
    with pytest.raises(gradlane.UsageError, match=re.escape(words)):
        run_ranks(1, lambda it: opened(it, **given), core=CORE, update=LOCAL)


@pytest.mark.parametrize(
    ("build_model", "options", "words"),
    [
        (lambda: build().bfloat16(), {}, "by torch.autocast"),
        (build, {"fragments": 5}, "has 4 layers with trained parameters"),
        (lambda: nn.Embedding(4, 3, max_norm=1.0), {}, "build it without max_norm"),
    ],
)
def test_models_that_do_not_go_with_it(build_model: Any, options: Any, words: str) -> None:
    errors = run_ranks(
        2,
        lambda it: opened(it, build_model),
        core=CORE,
        update=gradlane.Local(steps=8, **options),
        expect_errors=True,
    )
    assert all(words in str(one) for one in errors)


def run_two(body: Any, *options: dict[str, Any]) -> list[str]:
    """Run two ranks with options of their own; return what each raises."""
    store, job, found = HashStore(), uuid.uuid4().hex, ["", ""]

    def one(rank: int) -> None:
        place = {"store": store, "rank": rank, "world_size": 2, "job": job}
        given = {"connect_timeout_s": 20.0, "advertise": "127.0.0.1", **place, **options[rank]}
        try:
            with open_session(CORE, Options.of(**keywords_of(**given))) as session:
                body(session)
        except gradlane.GradlaneError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_ranks_with_other_options_are_named() -> None:
    first, second = run_two(
        lambda it: opened(it), {"update": LOCAL}, {"update": gradlane.Local(steps=3)}
    )
    assert "rank 0 has local_steps=2, rank 1 has 3" in first == second
    first, second = run_two(lambda it: opened(it), {"update": LOCAL}, {})
    assert "rank 0 has update='Local', rank 1 has 'worker'" in first == second


# ---- ranks that do different things


def trained(session: Any, count: int, **given: Any) -> nn.Module:
    model, optimizer = opened(session, **given)
    for step in range(1, count + 1):
        optimizer.zero_grad()
        loss(model, session.rank, step).backward()
        optimizer.step()
    return model


def errors_of(body: Any, **options: Any) -> list[str]:
    found = run_ranks(2, body, core=CORE, local="off", expect_errors=True, **options)
    return [str(one) for one in found]


@pytest.mark.parametrize("update", [LOCAL, gradlane.Local(steps=4, fragments=2, overlap_steps=2)])
def test_a_rank_with_fewer_steps_is_named_as_it_closes(update: gradlane.Local) -> None:
    first, second = errors_of(lambda it: trained(it, 8 - 3 * it.rank), update=update)
    words = r"rank 0 exchanges a fragment.* step \d, and rank 1 closes the session after its step 5"
    assert re.search(words, first) and re.search(words, second)


@pytest.mark.parametrize(
    ("count", "ends"),
    [
        # Both ranks have steps that no exchange holds: their means would be used without a word.
        (7, "closes the session"),
        # One has none, and would keep other common values than the other one.
        (9, "closes the session"),
        (7, "calls session.synchronize()"),
        (5, "calls session.synchronize()"),
    ],
)
@pytest.mark.parametrize("fragments", [1, 2])
def test_a_rank_that_skips_a_step_is_named_where_all_meet(
    count: int, ends: str, fragments: int
) -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, count + 1):
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            if step != 2 or session.rank != 1:
                optimizer.step()
        if "synchronize" in ends:
            session.synchronize()

    update = gradlane.Local(steps=4, fragments=fragments)
    words = f"rank 0 {ends} after its step {count}, and rank 1 {ends} after its step {count - 1}: "
    for error in errors_of(body, update=update):
        assert words in error


def test_a_synchronize_on_one_rank_is_named() -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 7):
            if step == 4 and session.rank == 1:
                session.synchronize()
            optimizer.zero_grad()
            loss(model, session.rank, step).backward()
            optimizer.step()

    for error in errors_of(body, update=LOCAL):
        assert "rank 1 calls session.synchronize() after its step 3" in error


def test_a_rank_that_does_not_weigh_is_named() -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 4):
            if session.rank == 0:
                session.weight(3)
            loss(model, session.rank, step).backward()
            optimizer.step()

    for error in errors_of(body, update=LOCAL):
        assert "rank 0 called session.weight() before its steps, and rank 1 did not" in error


def test_weights_of_some_steps_are_refused() -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        session.weight(3)
        for step in range(1, 3):
            loss(model, session.rank, step).backward()
            optimizer.step()

    with pytest.raises(gradlane.UsageError, match="called in 1 of 2 steps since"):
        run_ranks(1, body, core=CORE, update=LOCAL)


def test_no_samples_at_all_are_refused() -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 3):
            session.weight(0)
            loss(model, session.rank, step).backward()
            optimizer.step()

    for error in errors_of(body, update=LOCAL):
        assert "session.weight(0) on all ranks" in error


@pytest.mark.parametrize("change", ["freeze", "replace", "unfreeze"])
def test_a_model_that_was_changed_is_refused(change: str) -> None:
    def body(session: Any) -> None:
        model = seeded(build)
        model.get_parameter("2.weight").requires_grad_(False)
        optimizer = torch.optim.SGD(
            [one for one in model.parameters() if one.requires_grad], lr=0.1
        )
        session.prepare(model, optimizer)
        if change == "replace":
            model.register_module("4", nn.Linear(32, 32))
        else:
            name = "0.weight" if change == "freeze" else "2.weight"
            model.get_parameter(name).requires_grad_(change == "unfreeze")
        for step in range(1, 3):
            loss(model, session.rank, step).backward()
            optimizer.step()

    with pytest.raises(gradlane.UsageError, match=r"the model was changed after prepare\(\)"):
        run_ranks(1, body, core=CORE, update=LOCAL)


def test_a_lost_rank_ends_the_session_at_the_next_step() -> None:
    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 4):
            if session.rank == 1 and step == 2:
                raise RuntimeError("the disk is full")
            loss(model, session.rank, step).backward()
            optimizer.step()

    first, second = errors_of(body, update=LOCAL)
    assert "the disk is full" in first and second == "the disk is full"


def test_a_state_is_a_copy() -> None:
    """What is done to it reaches no session, whose ranks would part."""

    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 8):
            if session.rank == 1 and step == 3:
                state = session.state_dict()
                state["models"][0]["local_updates"]["common"]["0.bias"] += 1
            loss(model, session.rank, step).backward()
            optimizer.step()

    run_ranks(2, body, core=CORE, local="off", update=LOCAL)


# ---- buffers


def test_buffers_stay_each_ranks_own() -> None:
    def body(session: Any, **given: Any) -> float:
        model = seeded(SmallCnn)
        optimizer = adam(model)
        session.prepare(model, optimizer, **given)
        for step in range(1, 5):
            images = torch.randn(
                3, 1, 8, 8, generator=torch.Generator().manual_seed(10 * step + session.rank)
            )
            model(images).square().mean().backward()
            optimizer.step()
        session.synchronize()
        return float(dict(model.named_buffers())["body.1.running_mean"].sum())

    given: dict[str, Any] = {"core": CORE, "local": "off", "update": LOCAL}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second = run_ranks(2, lambda it: body(it, buffers="local"), **given)
    assert first != second
    with pytest.warns(UserWarning, match=r"'body\.1\.running_mean' and all other buffers stay"):
        run_ranks(2, body, **given)


def test_a_wait_at_a_turn_has_an_end() -> None:
    over = threading.Event()

    def body(session: Any) -> None:
        model, optimizer = opened(session)
        for step in range(1, 3):
            if step == 2 and session.rank == 1:
                assert over.wait(60)
            loss(model, session.rank, step).backward()
            try:
                optimizer.step()
            finally:
                if step == 2:
                    over.set()

    first, _ = errors_of(body, update=gradlane.Local(steps=2), progress_timeout_s=2.0)
    assert "no progress for 2 s: waiting for rank 1, connected but not taking part" in first
    assert "noticed while waiting for the exchange after step 2" in first
