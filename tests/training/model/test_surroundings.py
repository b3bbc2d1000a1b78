"""What is around a step changes none of it: threads, debuggers, compilations, raised backwards."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers

from gradlane.training.log import log
from gradlane.training.model.deferred_update import undisturbed
from gradlane.training.model.kernel import update_lock
from gradlane.training.modules import gradient_intake
from gradlane.training.rendezvous.tensor_table import build_table
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks

HINT = "each step waits for all gradients"
LATE = "gradients wait for optimizer.step()"


def two_layers(width: int = 2) -> Any:
    return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width))


def prepare(session: Any, width: int = 2) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = two_layers(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer)
    return model, optimizer


def messages(
    caplog: pytest.LogCaptureFixture, body: Callable[[Any], object], words: str, **options: Any
) -> list[str]:
    """Run one rank and return the log's lines that begin with these words, without the step."""
    with caplog.at_level("INFO", logger="gradlane"):
        run_ranks(1, body, **options)
    return [one for one in caplog.messages if words in one]


# ---- a debugger that looks at variables


@contextmanager
def debugged() -> Iterator[None]:
    """Trace this thread as debuggers do, which look at the variables of each frame."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        assert frame.f_locals is not None
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("width", [4, 200])
@pytest.mark.parametrize("backwards", [1, 2])
def test_a_debugger_keeps_no_gradients(
    width: int, backwards: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither those that travel together nor those that travel alone, as a part or whole."""

    def body(session: Any) -> None:
        model, optimizer = prepare(session, width)
        for _ in range(5):
            losses = [model(torch.ones(1, width)).sum() for _ in range(backwards)]
            with debugged():
                for loss in losses:
                    loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    assert not messages(caplog, body, HINT)


@pytest.mark.parametrize("takes", ["look", "take", "batch"])
def test_kept_gradients_are_found_where_gradlane_was_loaded_by_a_debugger(takes: str) -> None:
    spec = importlib.util.spec_from_file_location("loaded_again", gradient_intake.__file__)
    assert spec is not None and spec.loader is not None
    again: Any = importlib.util.module_from_spec(spec)
    with debugged():
        spec.loader.exec_module(again)
    model = nn.Linear(2, 2)
    entries = build_table(model)
    model(torch.ones(1, 2)).sum().backward()
    kept = model.weight.grad
    assert kept is not None
    intake = again.GradientIntake(entries)
    if takes == "look":
        intake.look(0)
    elif takes == "take":
        taken = intake.take(0, model.weight)
        assert taken.data_ptr() != kept.data_ptr()
    else:
        intake.take_batch(again.GradientBatch(range(2), entries))
    assert intake.is_watched


# ---- a backward that raised


class Raises(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("mine")


def raised_in_a_function(model: Any) -> Tensor:
    return model[1](Raises.apply(model[0](torch.ones(1, 2)))).sum()  # type: ignore[no-any-return]


def raised_in_a_hook(model: Any) -> Tensor:
    inner = model[0](torch.ones(1, 2))
    inner.register_hook(lambda _: 1 // 0)
    return model[1](inner).sum()  # type: ignore[no-any-return]


def raised_in_a_checkpoint(model: Any) -> Tensor:
    inner = model[0](torch.ones(1, 2, requires_grad=True))
    return torch.utils.checkpoint.checkpoint(  # type: ignore[no-any-return]
        lambda value: model[1](Raises.apply(value)), inner, use_reentrant=True
    ).sum()


@pytest.mark.parametrize("loss", [raised_in_a_function, raised_in_a_hook, raised_in_a_checkpoint])
def test_gradients_are_read_after_a_backward_that_raised(loss: Callable[[Any], Tensor]) -> None:
    """No thread is in it any more; what came of it is averaged, and can be reset."""

    def body(session: Any) -> list[Any]:
        model, optimizer = prepare(session)
        with pytest.raises(ArithmeticError):
            loss(model).backward()  # type: ignore[no-untyped-call]
        found = [model[0].weight.grad, model[1].bias.grad.tolist()]
        optimizer.zero_grad()
        for _ in range(3):
            model(torch.ones(1, 2) * (1 + session.rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [*found, model[0].weight.tolist()]

    first, second = run_ranks(2, body)
    assert first == second
    assert first[0] is None and first[1] == [1.0, 1.0]


def test_gradients_are_refused_while_another_thread_runs_backward() -> None:
    def body(session: Any) -> str:
        model, _ = prepare(session)
        inside, go_on = threading.Event(), threading.Event()

        def wait(_: Tensor) -> None:
            inside.set()
            go_on.wait(20)

        inner = model[0](torch.ones(1, 2))
        inner.register_hook(wait)
        loss = model[1](inner).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        inside.wait(20)
        with pytest.raises(Exception, match="while another thread runs") as caught:
            _ = model[1].weight.grad
        go_on.set()
        thread.join(20)
        assert model[0].weight.grad is not None
        return str(caught.value)

    (refusal,) = run_ranks(1, body)
    assert "'1.weight'" in refusal


def test_a_look_leaves_the_gradient_where_another_thread_adds_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch runs hooks outside of the lock under which it adds to `.grad`."""
    layer = nn.Linear(2, 1, bias=False)
    trained = [entry for entry in build_table(layer) if entry.trained]
    intake = gradient_intake.GradientIntake(trained)
    layer.weight.grad = torch.ones(1, 2)

    def add_meanwhile(_: object) -> int:
        thread = threading.Thread(target=lambda: layer(torch.ones(1, 2)).sum().backward())
        thread.start()
        thread.join()
        return 0  # Nobody holds it.

    monkeypatch.setattr(gradient_intake, "getrefcount", add_meanwhile)
    intake.look(0)
    monkeypatch.undo()
    assert layer.weight.grad is not None
    assert layer.weight.grad.tolist() == [[2.0, 2.0]]
    assert not intake.is_watched()
    kept = layer.weight.grad
    intake.look(0)
    assert intake.is_watched() and kept is layer.weight.grad


# ---- steps with several backwards


@pytest.mark.parametrize("width", [4, 200])
def test_a_count_that_is_missed_in_each_step_is_told_once(
    width: int, caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session, width)
        for step in range(12):
            for _ in range(2 if step in (0, 6) else 1):
                model(torch.ones(1, width)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    (line,) = messages(caplog, body, LATE)
    assert line.startswith("step 4: ") and "had 2 of them in a step, and has 1 now" in line
    assert "session.no_sync()" in line


@pytest.mark.parametrize("counts", [(3, 3, 1, 3, 3, 2, 2), (1, 1, 1, 1, 1), (2, 2, 2, 2, 2)])
def test_a_last_batch_of_an_epoch_is_not_told(
    counts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def body(session: Any) -> None:
        model, optimizer = prepare(session)
        for count in counts:
            for _ in range(count):
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert not messages(caplog, body, LATE)


# ---- compilations of other threads


def compiling() -> bool:
    return bool(torch.compiler.is_compiling())


needs_flag = pytest.mark.skipif(
    not hasattr(torch.compiler, "_compile_session_context"), reason="only new versions set the flag"
)


@needs_flag
def test_an_update_takes_another_threads_compilation_for_none() -> None:
    """That compilation sees what it would see, and what it leaves is what it found."""
    seen: list[bool] = []

    def update(rest: Callable[[], object]) -> None:
        with undisturbed():
            seen.append(compiling())
            rest()

    def both() -> None:
        meet.wait(20)
        meet.wait(20)

    meet = threading.Barrier(3)
    with torch.compiler._compile_session_context():
        threads = [threading.Thread(target=update, args=(both,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        meet.wait(20)
        assert compiling()
        update(lambda: None)
        assert compiling()
    assert not compiling()
    meet.wait(20)
    for thread in threads:
        thread.join(20)
    assert seen == [False, False, False]
    assert not compiling()


# ---- threads of an optimizer


class Threaded(torch.optim.Optimizer):
    """Steps each parameter in a thread of a pool."""

    steps_per_parameter = True

    def __init__(self, model: nn.Module, touch: Callable[[], object]) -> None:
        super().__init__(model.parameters(), {"lr": 1.0})
        self.touch = touch

    def one(self, parameter: Tensor) -> None:
        with torch.no_grad():
            self.touch()
            self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1
            parameter.sub_(parameter.grad)  # type: ignore[arg-type]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with ThreadPoolExecutor(2) as pool:
            for group in self.param_groups:
                having = [one for one in group["params"] if one.grad is not None]
                for done in [pool.submit(self.one, one) for one in having]:
                    done.result()


TOUCHES: dict[str, Callable[[Any, list[Tensor]], object]] = {
    "nothing": lambda model, kept: None,
    "the model": lambda model, kept: list(model.parameters()),
    "kept parameters": lambda model, kept: kept[0].sum() + kept[2].sum(),
}


def steps_of_threads(session: Any, touch: str, touching: threading.Event, **options: Any) -> None:
    model = two_layers(200)  # Each weight travels alone.
    kept = list(model.parameters())
    optimizer = Threaded(model, lambda: touching.is_set() and TOUCHES[touch](model, kept))
    session.prepare(model, optimizer, **options)
    for _ in range(3):
        model(torch.ones(1, 200)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.state_dict()["state"][0]["steps"] == 3


@pytest.mark.parametrize("touch", TOUCHES)
@pytest.mark.parametrize("defer", [None, False])
def test_threads_of_an_optimizer_step_its_parameters(touch: str, defer: bool | None) -> None:
    touching = threading.Event()
    if defer is False or touch == "nothing":
        touching.set()
    run_ranks(
        1,
        lambda session: steps_of_threads(session, touch, touching, defer=defer),
        core=LateCore(),
    )


@pytest.mark.parametrize("touch", ["the model", "kept parameters"])
def test_threads_of_an_optimizer_that_wait_for_its_update_are_told(
    touch: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_lock, "UPDATE_NOTICE_S", 0.05)
    touching = threading.Event()
    touching.set()
    warn = log.warning

    def note(text: str, *arguments: Any) -> None:
        warn(text, *arguments)
        raise TimeoutError("told")

    monkeypatch.setattr(log, "warning", note)
    with caplog.at_level("INFO", logger="gradlane"):
        (error,) = run_ranks(
            1,
            lambda session: steps_of_threads(session, touch, touching),
            core=LateCore(),
            expect_errors=True,
        )
    assert "TimeoutError: told" in str(error)
    assert any("pass defer=False to prepare()" in one for one in caplog.messages)


# ---- hooks of the process


def hooks_of_the_process() -> list[int]:
    return [
        len(hooks)
        for hooks in (
            torch_optimizers._global_optimizer_pre_hooks,
            torch_optimizers._global_optimizer_post_hooks,
            torch_modules._global_parameter_registration_hooks,
            torch_modules._global_module_registration_hooks,
            torch_modules._global_forward_hooks,
            torch_modules._global_forward_pre_hooks,
        )
    ]


@pytest.mark.filterwarnings("ignore:another SGD than the prepared optimizer steps a model")
def test_hooks_of_the_process_are_as_many_after_many_sessions_and_do_nothing() -> None:
    """They stay: torch goes through them in any thread, so that taking one out would break that."""
    models: list[Any] = []

    def body(session: Any) -> None:
        model, optimizer = prepare(session)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        models.append(model)

    run_ranks(1, body)
    before = hooks_of_the_process()
    run_ranks(2, body)
    run_ranks(1, body)
    assert hooks_of_the_process() == before
    for model in models:
        other = torch.optim.SGD(model.parameters(), lr=1.0)
        model.extra = nn.Linear(2, 2)
        model(torch.ones(1, 2)).sum().backward()
        other.step()
        wrapper = nn.parallel.DataParallel(model)
        assert wrapper.module is model
