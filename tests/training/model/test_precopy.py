"""What a rank repeats of the members' updates before it joins them."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.model.optimizers import is_known, mixes_first_steps, step_of_class
from gradlane.training.model.precopy import RepeatedUpdates, donors_of, shares_of
from gradlane.training.model.update_log import UpdateLog
from gradlane.training.rendezvous.tensor_table import build_table
from tests.training.model import optimizer_cases
from tests.training.model.optimizer_cases import Case

PLENTY_BYTES = 1 << 30


def known_cases() -> dict[str, Case]:
    """Return the cases of optimizers whose updates can be repeated."""
    parameters = [nn.Parameter(torch.ones(2, 2))]
    return {
        name: case
        for name, case in optimizer_cases.cases().items()
        if is_known(case.make(parameters))
    }


def bits_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    """Return the bits of all parameters and of the optimizer's state."""
    state = [
        value
        for parameter in model.parameters()
        for _, value in sorted(optimizer.state.get(parameter, {}).items())
        if isinstance(value, Tensor)
    ]
    return [one.detach().numpy().tobytes() for one in (*model.parameters(), *state)]


@pytest.mark.parametrize("name", known_cases())
def test_repeated_updates_have_the_same_bits(name: str) -> None:
    """Steps that were done whole or in parts, with another rate each, logged by two donors."""
    draw = random.Random(name)
    torch.manual_seed(draw.randint(0, 1 << 30))
    model = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 3, bias=False))
    optimizer = known_cases()[name].make(model.parameters())
    trained = build_table(model)
    update = updates_of(optimizer, model)
    logs: list[UpdateLog] = []
    before = draw.randint(0, 2)
    for step in range(before + 4):
        if step == before:
            logs = [UpdateLog([index], PLENTY_BYTES) for index in range(2)]
            follow(update, logs)
            other = copy.deepcopy(model)
            # Both have the settings of now; the others come with the steps.
            other_optimizer = known_cases()[name].make(other.parameters())
            other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        set_rate(optimizer, 0.01 / (1 + step))
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        update.record()
        if draw.random() < 0.5 or mixes_first_steps(optimizer):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            update.step_whole()
        else:
            update.leave_none()
            for index in draw.sample(range(2), 2):
                update.apply([(index, gradients[index])])
            update.end_parts()
    repeated = RepeatedUpdates(other_optimizer, build_table(other))
    parts = [log.wait_for_steps(lambda: None)[0] for log in logs]
    assert [len(steps) for steps in parts] == [4, 4]
    for step_parts in zip(*parts, strict=True):
        repeated.repeat(step_parts)
    assert bits_of(other, other_optimizer) == bits_of(model, optimizer)
    assert [list(one) for one in shares_of(trained, [], 2)] == [[trained[0]], [trained[1]]]


def updates_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> DeferredUpdate:
    """Return the updates of a member."""
    step, parameters = optimizer.step, list(model.parameters())
    return DeferredUpdate(optimizer, step, step_of_class(optimizer), parameters, is_known=True)


def follow(update: DeferredUpdate, logs: list[UpdateLog]) -> None:
    """Have an update noted in several logs, as of several donors."""

    class Both:
        def __getattr__(self, name: str) -> Any:
            def call(*arguments: Any) -> None:
                for log in logs:
                    getattr(log, name)(*arguments)

            return call

    both: Any = Both()
    update.keep_log(both)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set a learning rate, as schedulers do."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def log_step(log: UpdateLog, gradient: Tensor) -> None:
    """Note a step of one gradient."""
    log.begin([{"lr": 1.0}])
    log.note_gradient(0, gradient)
    log.end()


@pytest.mark.parametrize("layers", [1, 2, 9])
def test_each_member_that_gives_has_a_trained_tensor(layers: int) -> None:
    """A donor of nothing would have no channel, and rounds without end."""
    trained = build_table(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(layers))))
    shares = shares_of(trained, [], donors_of(8, len(trained)))
    assert len(shares) == min(layers, 4) and all(shares)


def test_a_log_keeps_copies_until_they_are_taken() -> None:
    """What the program does to a gradient afterwards changes nothing."""
    log = UpdateLog([0], PLENTY_BYTES)
    gradient = torch.ones(3)
    log_step(log, gradient)
    gradient.zero_()
    (step,), is_last = log.wait_for_steps(lambda: None)
    assert step.gradients[0].tolist() == [1.0, 1.0, 1.0] and not is_last
    log.close()
    log_step(log, gradient)
    assert log.wait_for_steps(lambda: None) == ([], True)


def test_a_log_of_too_many_bytes_ends() -> None:
    """The rank that joins is told; what was taken makes room."""
    log = UpdateLog([0], 24)
    log_step(log, torch.ones(3))
    assert len(log.wait_for_steps(lambda: None)[0]) == 1
    log_step(log, torch.ones(3))
    log_step(log, torch.ones(3))
    assert not log.is_full
    log_step(log, torch.ones(3))
    log_step(log, torch.ones(3))
    steps, is_last = log.wait_for_steps(lambda: None)
    assert len(steps) == 3 and is_last and log.is_full


def test_a_log_that_nobody_takes_any_more_keeps_nothing() -> None:
    """The rank that it was kept for is lost: neither what was noted nor what comes later stays."""
    log = UpdateLog([0], PLENTY_BYTES)
    log_step(log, torch.ones(3))
    log.drop()
    log_step(log, torch.ones(3))
    assert log.wait_for_steps(lambda: None) == ([], True)


def test_an_update_goes_on_where_no_memory_is_left_for_its_log() -> None:
    """The log ends, as one of too many bytes does."""
    log = UpdateLog([0], PLENTY_BYTES)
    log_step(log, torch.ones(3))
    # No copy can be made of it.
    log_step(log, torch.ones(3, device="meta"))
    steps, is_last = log.wait_for_steps(lambda: None)
    assert len(steps) == 1 and is_last and log.is_full


def test_a_step_that_is_under_way_is_not_taken() -> None:
    """Who waits for one gets it whole, and may give up."""
    log = UpdateLog([0, 1], PLENTY_BYTES)
    log.begin([])
    log.note_gradient(0, torch.ones(1))

    class EndedError(Exception):
        pass

    def give_up() -> None:
        raise EndedError

    with pytest.raises(EndedError):
        log.wait_for_steps(give_up)
    taken: list[Any] = []
    waiting = threading.Thread(target=lambda: taken.extend(log.wait_for_steps(lambda: None)[0]))
    waiting.start()
    log.note_gradient(1, torch.ones(1))
    log.end()
    waiting.join()
    assert sorted(taken[0].gradients) == [0, 1]
