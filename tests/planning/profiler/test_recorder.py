"""Recordings of models on a clock that the tests advance, so that times are exact."""

from __future__ import annotations

import copy
import io
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradlane.formats.profile import FieldReader, Profile, ProfileError, profile_from
from gradlane.planning.profiler.recorder import Recorder
from gradlane.planning.profiler.tape import EVALUATION, STEP_BEGIN, STEP_END, WAIT_BEGIN, WAIT_END
from gradlane.planning.profiler.timeline import StepMedians, read_step
from tests.planning.profiler.counting_clock import CountingClock
from tests.training.model.held_core import HeldChannel, HeldCore
from tests.training.model.models import Attention, Awkward, CharTransformer, SmallCnn, seeded
from tests.training.model.ranks import run_ranks


def record(
    model: nn.Module, step: Callable[[], object], steps: int = 1, **options: Any
) -> tuple[Profile, dict[str, Any]]:
    """Record steps on a counting clock; returns the profile and its tensors by name."""
    recorder = Recorder(model, clock=CountingClock(), **options)
    recorder.attach()
    for _ in range(steps):
        recorder.begin_step()
        step()
        recorder.end_step()
    recorder.detach()
    profile = recorder.profile("test")
    # Whatever was recorded can be written and read.
    assert profile_from(profile.to_json(), FieldReader("test")) == profile
    return profile, {tensor.name: tensor for tensor in profile.tensors}


def backward(output: Tensor) -> None:
    output.sum().backward()  # type: ignore[no-untyped-call]


def test_a_chain_is_needed_forwards_and_ready_backwards() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    profile, tensors = record(model, lambda: backward(model(torch.ones(5, 4))), steps=3)
    # Looks at the clock: begin, model, 0, 0, 1, 1, 2, 2, model, gradients, end.
    calls = {module.name: module.forwards_s for module in profile.modules}
    assert calls == {"": ((0, 7),), "0": ((1, 2),), "1": ((3, 4),), "2": ((5, 6),)}
    assert profile.forward_s == 7
    assert {name: tensor.need_s for name, tensor in tensors.items()} == {
        "0.weight": 1,
        "0.bias": 1,
        "2.weight": 5,
    }
    assert tensors["2.weight"].ready_s == 8
    assert {tensors["0.weight"].ready_s, tensors["0.bias"].ready_s} == {9, 10}
    # Begin to end, the moment before the first forward included.
    assert profile.compute_s == 12
    assert profile.batch is not None and profile.batch.steps == 3
    assert profile.batch_size == 5
    assert [tensor.layer for tensor in profile.tensors] == ["Linear"] * 3
    assert tensors["0.weight"].shape == (4, 4)


def test_tied_reused_frozen_unused_and_empty_parameters() -> None:
    model = seeded(Awkward)
    profile, tensors = record(model, lambda: backward(model(torch.ones(2, 6))))
    assert "frozen.weight" not in tensors and "empty" not in tensors
    assert "decoder.weight" not in tensors
    calls = {module.name: module.forwards_s for module in profile.modules}
    # The tied weight is needed by the first of its layers, and ready after the last.
    assert tensors["encoder.weight"].need_s == calls["encoder"][0][0]
    assert tensors["decoder.bias"].need_s == calls["decoder"][0][0]
    assert tensors["encoder.weight"].ready_s > tensors["decoder.bias"].ready_s
    assert len(calls["reused"]) == 2
    assert tensors["reused.weight"].need_s == calls["reused"][0][0]
    assert tensors["reused.weight"].gradients == 1
    # A parameter of the model itself is needed when the model is called.
    assert tensors["scale"].need_s == 0
    for name in ("unused.weight", "sometimes.weight"):
        assert tensors[name].gradients == 0
        assert tensors[name].need_s == profile.forward_s
        assert tensors[name].ready_s == profile.compute_s


def test_parameters_that_only_some_steps_use_have_the_times_of_those() -> None:
    model = Awkward()

    def step() -> None:
        model.uses_sometimes = not model.uses_sometimes
        backward(model(torch.ones(2, 6)))

    profile, tensors = record(model, step, steps=4)
    assert tensors["sometimes.weight"].gradients == 1
    assert tensors["sometimes.weight"].ready_s < profile.compute_s


def test_parameters_of_modules_that_are_not_called_are_needed_by_what_is_around() -> None:
    model = seeded(Attention)
    profile, tensors = record(model, lambda: backward(model(torch.ones(3, 5, 8))))
    calls = {module.name: module.forwards_s for module in profile.modules}
    assert "attention.out_proj" not in calls
    assert tensors["attention.out_proj.weight"].need_s == calls["attention"][0][0]
    assert tensors["attention.out_proj.weight"].gradients == 1
    assert tensors["norm.weight"].need_s == calls["norm"][0][0] > calls["attention"][0][1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_do_not_count(reentrant: bool) -> None:
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = inner, outer

        def forward(self, values: Tensor) -> Tensor:
            values = values.requires_grad_()
            hidden: Tensor = checkpoint(self.inner, values, use_reentrant=reentrant)
            return outer(hidden)  # type: ignore[no-any-return]

    model = Model()
    profile, tensors = record(model, lambda: backward(model(torch.ones(2, 4))))
    assert {module.name: len(module.forwards_s) for module in profile.modules} == {
        "": 1,
        "inner": 1,
        "outer": 1,
    }
    assert all(tensor.ready_s > profile.forward_s for tensor in tensors.values())
    assert tensors["inner.weight"].ready_s > tensors["outer.weight"].ready_s


def test_gradients_are_ready_with_their_last_part() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def step() -> None:
        for _ in range(3):
            backward(model(torch.ones(2, 4)))

    profile, tensors = record(model, step)
    assert [tensor.gradients for tensor in profile.tensors] == [3] * 4
    assert profile.batch_size == 6
    # Forward goes on until the last backward, and needs are those of the first forward.
    calls = {module.name: module.forwards_s for module in profile.modules}
    assert profile.forward_s == calls[""][2][1]
    assert tensors["1.weight"].need_s == calls["1"][0][0]
    assert min(tensor.ready_s for tensor in profile.tensors) > profile.forward_s


def test_a_step_with_a_closure_is_one_step() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(torch.ones(2, 4)) - 3).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    profile, tensors = record(model, lambda: optimizer.step(closure))  # type: ignore[no-untyped-call]
    parts = tensors["weight"].gradients
    assert parts is not None and parts > 1
    assert len(profile.modules[0].forwards_s) == parts


def test_an_exception_in_forward_leaves_the_others_right() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.fails = True

        def forward(self, values: Tensor) -> Tensor:
            hidden = self.layer(values)
            if self.fails:
                raise RuntimeError("out of memory, say")
            return hidden  # type: ignore[no-any-return]

    model = Moody()

    def step() -> None:
        model.fails = True
        with pytest.raises(RuntimeError, match="say"):
            model(torch.ones(2, 4))
        model.fails = False
        backward(model(torch.ones(2, 4)))

    profile, tensors = record(model, step)
    calls = {module.name: module.forwards_s for module in profile.modules}
    assert len(calls[""]) == 1 and len(calls["layer"]) == 2
    assert tensors["layer.weight"].ready_s > calls[""][0][1]


def test_steps_with_an_evaluation_count_only_if_there_are_no_others() -> None:
    model = seeded(SmallCnn)
    recorder = Recorder(model, clock=CountingClock())
    recorder.attach()
    for number in range(5):
        recorder.begin_step()
        backward(model(torch.ones(2, 1, 8, 8)))
        if number == 3:
            model.eval()
            with torch.no_grad():
                model(torch.ones(7, 1, 8, 8))
            model.train()
        recorder.end_step()
    profile = recorder.profile("test")
    assert profile.batch is not None and profile.batch.steps == 4
    assert profile.batch_size == 2
    assert all(len(module.forwards_s) == 1 for module in profile.modules)
    frozen_statistics = model.eval()
    profile, _ = record(
        frozen_statistics, lambda: backward(frozen_statistics(torch.ones(2, 1, 8, 8)))
    )
    assert profile.batch is not None and profile.batch.steps == 1


def test_copies_and_pickles_of_the_model_are_not_recorded() -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def step() -> None:
        backward(model(torch.ones(2, 4)))
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        backward(torch.load(file, weights_only=False)(torch.ones(2, 4)))
        backward(copy.deepcopy(model)(torch.ones(2, 4)))

    profile, tensors = record(model, step)
    assert all(len(module.forwards_s) == 1 for module in profile.modules)
    assert tensors["0.weight"].gradients == 1


def test_detach_leaves_nothing_behind() -> None:
    model = seeded(SmallCnn)
    record(model, lambda: backward(model(torch.ones(2, 1, 8, 8))))
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
        assert not module._forward_pre_hooks_with_kwargs
    assert not any(one._post_accumulate_grad_hooks for one in model.parameters())


def test_a_compiled_model_is_seen_from_outside() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    compiled: Any = torch.compile(inner, backend="eager")
    model = nn.ModuleDict({"body": compiled, "head": nn.Linear(2, 2)})

    def step() -> None:
        backward(model["head"](model["body"](torch.ones(2, 4))))

    profile, tensors = record(model, step, steps=3)
    calls = {module.name: module.forwards_s for module in profile.modules}
    assert set(calls) == {"body", "head"}
    assert tensors["body._orig_mod.0.weight"].need_s == calls["body"][0][0]
    assert tensors["body._orig_mod.0.weight"].gradients == 1
    assert tensors["head.weight"].need_s == calls["head"][0][0]


def test_complex_and_half_parameters() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pairs = nn.Parameter(torch.ones(3, dtype=torch.complex64))
            self.short = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))

        def forward(self) -> Tensor:
            return self.pairs.real.sum() + self.short.float().sum()

    model = Mixed()
    profile, tensors = record(model, lambda: backward(model()))
    assert (tensors["pairs"].shape, tensors["pairs"].dtype) == ((3, 2), "f32")
    assert (tensors["short"].dtype, tensors["short"].size_bytes) == ("bf16", 4)
    # Nothing says how many samples these were.
    assert profile.batch_size == 1


def test_waits_for_other_ranks_are_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CountingClock()
    for name in ("wait", "wait_step"):
        original = getattr(HeldChannel, name)

        def slow(self: HeldChannel, *arguments: Any, original: Any = original) -> None:
            original(self, *arguments)
            clock.pass_time(1e6)

        monkeypatch.setattr(HeldChannel, name, slow)

    def body(session: Any) -> Profile:
        model = seeded(CharTransformer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = session.prepare(model, optimizer)
        recorder = Recorder(model, clock=clock)
        recorder.attach()
        for _ in range(4):
            recorder.begin_step()
            backward(model(torch.ones(2, 8, dtype=torch.int64)))
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
        session.synchronize()
        recorder.detach()
        return recorder.profile("prepared")

    (prepared,) = run_ranks(1, body, core=HeldCore())
    assert prepared.compute_s < 1e3
    names = [name for name, _ in seeded(CharTransformer).named_parameters()]
    assert [tensor.name for tensor in prepared.tensors] == names
    assert prepared.batch_size == 2
    needs_s = {tensor.name: tensor.need_s for tensor in prepared.tensors}
    assert needs_s["token.weight"] < needs_s["body.layers.1.linear1.weight"] <= prepared.forward_s


def test_misuse_is_named() -> None:
    recorder = Recorder(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"attach\(\) first"):
        recorder.begin_step()
    with pytest.raises(RuntimeError, match=r"begin_step\(\) first"):
        recorder.end_step()
    recorder.attach()
    with pytest.raises(RuntimeError, match="attached already"):
        recorder.attach()
    recorder.begin_step()
    with pytest.raises(RuntimeError, match="inside a step"):
        recorder.begin_step()
    recorder.end_step()
    with pytest.raises(ProfileError, match="nothing was recorded of 'idle'"):
        recorder.profile("idle")
    recorder.detach()
    with pytest.raises(ValueError, match="no trained parameter"):
        Recorder(nn.ReLU())
    with pytest.raises(ValueError, match=r"'a' has dtype torch\.float8"):
        Recorder(nn.ParameterDict({"a": torch.ones(2).to(torch.float8_e5m2)}))
    with pytest.raises(ValueError, match="cpu, meta"):
        Recorder(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def test_pauses_move_what_comes_after_them() -> None:
    marks = [
        (STEP_BEGIN, 0.0),
        (0, 1.0),
        (WAIT_BEGIN, 2.0),
        (WAIT_END, 12.0),
        (1, 13.0),
        (2, 14.0),
        (WAIT_BEGIN, 15.0),
        (WAIT_END, 16.0),
        (STEP_END, 17.0),
    ]
    step = read_step(marks, modules=1)
    assert step.compute_s == pytest.approx(17.0 - 10.0 - 1.0)
    assert step.calls == {0: [(0.0, 2.0)]}
    assert step.ready_s == {0: 3.0}


def test_what_another_thread_marks_within_a_pause_is_at_its_beginning() -> None:
    marks = [
        (STEP_BEGIN, 0.0),
        (0, 1.0),
        (WAIT_BEGIN, 2.0),
        (1, 9.0),
        (2, 10.0),
        (WAIT_END, 12.0),
        (STEP_END, 13.0),
    ]
    step = read_step(marks, modules=1)
    assert step.compute_s == pytest.approx(3.0)
    assert step.calls == {0: [(0.0, 1.0)]}
    assert step.ready_s == {0: 1.0}


_codes = st.lists(
    st.sampled_from([0, 1, 2, 3, 4, 5, 6, WAIT_BEGIN, WAIT_END, EVALUATION]), max_size=30
)


@given(_codes, st.lists(st.floats(0.0, 10.0), min_size=32, max_size=32))
def test_any_order_of_marks_gives_times_within_the_step(
    codes: list[int], gaps_s: list[float]
) -> None:
    moments_s = [sum(gaps_s[: index + 1]) for index in range(len(codes) + 2)]
    marks = list(zip([STEP_BEGIN, *codes, STEP_END], moments_s, strict=True))
    step = read_step(marks, modules=2)
    slack_s = 1e-6
    assert -slack_s <= step.forward_s <= step.compute_s + slack_s
    for calls in step.calls.values():
        assert calls == sorted(calls)
        for start_s, end_s in calls:
            assert -slack_s <= start_s <= end_s + slack_s <= step.compute_s + 2 * slack_s
    steps = StepMedians([step])
    assert len(steps) == (1 if {4, 5, 6} & set(codes) else 0)


@given(st.lists(st.floats(0.001, 10.0), min_size=1, max_size=20))
def test_the_spread_is_that_of_the_steps(times_s: list[float]) -> None:
    steps = StepMedians(
        read_step([(STEP_BEGIN, 0.0), (0, 0.0), (STEP_END, time_s)], 0) for time_s in times_s
    )
    batch = steps.batch()
    assert batch.steps == len(times_s)
    assert batch.median_s == pytest.approx(statistics.median(times_s))
    assert min(times_s) <= batch.lower_quartile_s <= batch.median_s
    assert batch.median_s <= batch.upper_quartile_s <= max(times_s)


def test_linear_layers_say_their_rows() -> None:
    """Words count for a layer that is applied to each; evaluations and recomputation do not."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(50, 8)
            self.inner = nn.Linear(8, 8)
            self.head = nn.Linear(8, 3)
            self.tied = nn.Linear(8, 50)
            self.tied.weight = self.words.weight

        def forward(self, tokens: Tensor) -> Tensor:
            hidden: Tensor = checkpoint(self.inner, self.words(tokens), use_reentrant=False)
            total: Tensor = self.head(hidden.mean(1)).sum() + self.tied(hidden).sum()
            return total

    model = Words()
    tokens = torch.arange(20).reshape(4, 5)

    def step() -> None:
        with torch.no_grad():
            model(tokens)
        backward(model(tokens))

    _, tensors = record(model, step, steps=2)
    rows = {name: tensor.rows for name, tensor in tensors.items()}
    assert rows["inner.weight"] == 20
    assert rows["head.weight"] == 4
    # As an output layer, that is; that it is looked up makes no rows.
    assert rows["words.weight"] == 20
    assert rows["head.bias"] is None
