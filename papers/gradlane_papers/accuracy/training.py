"""Trains one task once under one scheme, with workers emulated one after another or real ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch import nn

from gradlane_papers.accuracy.asynchronous import train_on_ranks
from gradlane_papers.accuracy.curve import TrainingCurve, evaluation_steps
from gradlane_papers.accuracy.exchange import EmulatedExchange
from gradlane_papers.accuracy.local_training import train_locally
from gradlane_papers.accuracy.power_sgd import PowerSgdExchange
from gradlane_papers.accuracy.run import REAL, Run
from gradlane_papers.accuracy.tasks import task_of


def train(run: Run, advance: Callable[[int], None] = lambda steps: None) -> TrainingCurve:
    """Train and return the curve.

    Args:
        run: each of its steps takes one batch of every worker.
        advance: told of each step.

    Raises:
        ValueError: the task or the scheme is unknown, or they do not go together.
    """
    threads = torch.get_num_threads()
    # Gradients must not depend on how many processors there are.
    torch.set_num_threads(1)
    try:
        scheme = run.parsed()[1]
        if scheme.order == REAL:
            return train_on_ranks(run, advance)
        if scheme.local is not None:
            return train_locally(run, advance)
        return (_train_alone if scheme.is_asynchronous else _train_together)(run, advance)
    finally:
        torch.set_num_threads(threads)


def _train_together(run: Run, advance: Callable[[int], None]) -> TrainingCurve:
    task, scheme = run.parsed()
    model = task.build(run.seed)
    optimizer = task.make_optimizer(model, momentum=not scheme.takes_momentum)
    codec = scheme.codec_for(task.optimizer, run.steps, task.momentum)
    exchange: EmulatedExchange | PowerSgdExchange
    if scheme.power_sgd_rank:
        exchange = PowerSgdExchange(
            model, scheme.power_sgd_rank, workers=run.workers, seed=run.seed
        )
    else:
        exchange = EmulatedExchange(
            model, codec, workers=run.workers, seed=run.seed, layers=run.layers
        )
    parameters = list(model.parameters())
    curve = TrainingCurve()
    stops = set(evaluation_steps(run.steps))
    curve.note(0, task, model)
    for step in range(run.steps):
        gradients = [_gradient(run, model, worker, step) for worker in range(run.workers)]
        for parameter, mean in zip(parameters, exchange.average(gradients, step), strict=True):
            parameter.grad = mean
        task.clip_gradients(model)
        optimizer.step()
        curve.wire_bytes.append(round(exchange.push_bytes + exchange.broadcast_bytes))
        if step + 1 in stops:
            curve.note(step + 1, task, model)
        advance(1)
    return curve


def _train_alone(run: Run, advance: Callable[[int], None]) -> TrainingCurve:
    """Apply each worker's gradient alone; workers compute with the parameters that they last got.

    In round-robin order every gradient is `workers` - 1 updates old. In random order, drawn from
    the seed, some are older and some younger, as they are where workers are not equally fast.
    """
    (task, scheme), workers, updates = run.parsed(), run.workers, run.steps * run.workers
    model = task.build(run.seed)
    optimizer = task.make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= scheme.lr_share
    parameters = list(model.parameters())
    plain_bytes = 2 * 4 * sum(parameter.numel() for parameter in parameters)
    newest = [parameter.detach().clone() for parameter in parameters]
    pulled = [newest for _ in range(workers)]
    taken = [0] * workers
    version_of = [0] * workers
    draws = random.Random(run.seed)
    curve = TrainingCurve()
    stale = 0.0
    stops = set(evaluation_steps(run.steps))
    curve.note(0, task, model)
    for update in range(updates):
        worker = update % workers if scheme.order == "round" else draws.randrange(workers)
        _copy(pulled[worker], parameters)
        gradient = _gradient(run, model, worker, taken[worker])
        taken[worker] += 1
        _copy(newest, parameters)
        for parameter, own in zip(parameters, gradient, strict=True):
            parameter.grad = own
        task.clip_gradients(model)
        optimizer.step()
        newest = [parameter.detach().clone() for parameter in parameters]
        pulled[worker] = newest
        stale += (update - version_of[worker]) / updates
        version_of[worker] = update + 1
        step, rest = divmod(update + 1, workers)
        if rest == 0:
            curve.wire_bytes.append(plain_bytes)
            if step in stops:
                curve.note(step, task, model)
            advance(1)
    curve.stale = stale
    return curve


def _gradient(run: Run, model: nn.Module, worker: int, step: int) -> list[torch.Tensor]:
    task = task_of(run.task)
    loss = task.loss(model, task.batch(run.seed, worker, run.workers, step))
    return [one.contiguous() for one in torch.autograd.grad(loss, list(model.parameters()))]


def _copy(values: Sequence[torch.Tensor], parameters: Sequence[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
