"""What training must give: every rank's gradients, summed in rank order and divided, then stepped.

It uses torch alone, in one thread, so that whatever the adapter does can be held against it bit by
bit.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fractions
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Any], None]


def mean_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return ((g0 + g1) + g2 ...) / N in f32 (f64 for f64); a missing gradient counts as zeros."""
    gradients = [
        one.coalesce().to_dense() if one is not None and one.is_sparse else one for one in gradients
    ]
    known = next((one for one in gradients if one is not None), None)
    if known is None:
        return None
    if known.is_complex():
        pairs = [
            None if one is None else torch.view_as_real(one.resolve_conj()) for one in gradients
        ]
        mean = mean_in_rank_order(pairs)
        assert mean is not None
        return torch.view_as_complex(mean)
    wide = torch.float64 if known.dtype is torch.float64 else torch.float32
    total: Tensor | None = None
    for gradient in gradients:
        term = torch.zeros_like(known, dtype=wide) if gradient is None else gradient.to(wide)
        total = term if total is None else total + term
    assert total is not None
    return (total / len(gradients)).to(known.dtype)


def sparse_mean_in_rank_order(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """Return the same mean, sparse in the rows that some gradient has; dense if one is dense."""
    mean, given = mean_in_rank_order(gradients), [one for one in gradients if one is not None]
    if mean is None or not all(one.is_sparse for one in given):
        return mean
    return in_rows_of(mean, given)


def in_rows_of(mean: Tensor, gradients: Sequence[Tensor]) -> Tensor:
    """Return a dense mean as a sparse one, in the rows that some gradient has."""
    rows = sorted({row for one in gradients for row in one.coalesce().indices()[0].tolist()})
    numbers = torch.tensor(rows, dtype=torch.int64)
    return torch.sparse_coo_tensor(
        numbers.unsqueeze(0), mean[numbers], mean.shape, check_invariants=False, is_coalesced=True
    )


def steps_on_sparse(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether an optimizer gets sparse means: where torch takes them and keeps none."""
    kinds = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)
    if not isinstance(optimizer, kinds):
        bases = type(optimizer).__mro__[:-2]
        return not any(base.__module__.startswith("torch.optim") for base in bases)
    (group,) = (
        group
        for group in optimizer.param_groups
        if any(one is parameter for one in list.__iter__(group["params"]))
    )
    return not any(group.get(option) for option in ("momentum", "weight_decay", "fused"))


def exact_norm(gradients: Sequence[Tensor]) -> float:
    """Return the norm of all values, rounded once: fractions have no other rounding."""
    total = fractions.Fraction(0)
    for gradient in gradients:
        values = torch.view_as_real(gradient) if gradient.is_complex() else gradient
        for value in values.double().flatten().tolist():
            if not math.isfinite(value):
                return math.nan if math.isnan(value) else math.inf
            total += fractions.Fraction(value) ** 2
    return math.sqrt(float(total))


def train_reference(
    world_size: int,
    steps: int,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[nn.Module, int, int], Tensor | None],
    *,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    before_step: Callable[[nn.Module], None] | None = None,
) -> list[nn.Module]:
    """Train copies of a model, one a rank, and return them.

    Args:
        world_size: number of ranks.
        steps: number of steps, from 1 on.
        make_model: builds the same model each time.
        make_optimizer: builds its optimizer.
        loss: of (model, rank, step); None: this rank runs no backward.
        make_scheduler: builds a learning rate scheduler that is stepped after each step.
        before_step: called with the model when `.grad` is the mean, such as for clipping.
    """
    models = [make_model() for _ in range(world_size)]
    trained = [make_optimizer(model) for model in models]
    schedulers = [make_scheduler(one) for one in trained] if make_scheduler else []
    for step in range(1, steps + 1):
        for rank, model in enumerate(models):
            model.zero_grad()
            value = loss(model, rank, step)
            if value is not None:
                value.backward()  # type: ignore[no-untyped-call]
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = mean_in_rank_order([parameter.grad for parameter in parameters])
            for parameter in parameters:
                parameter.grad = None if mean is None else mean.clone()
        for model, optimizer in zip(models, trained, strict=True):
            if before_step is not None:
                before_step(model)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return models


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether two lists of tensors are equal in every bit."""
    return len(one) == len(other) and all(
        first.dtype is second.dtype
        and first.shape == second.shape
        and first.detach()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .equal(second.detach().contiguous().view(-1).view(torch.uint8))
        for first, second in zip(one, other, strict=True)
    )


def snapshot(model: nn.Module) -> list[Tensor]:
    """Copy all parameters, reading them the way a user would."""
    return [parameter.detach().clone() for parameter in model.parameters()]


class ReferenceSession:
    """Stands in for a session: ranks are threads, and `.grad` is averaged at `optimizer.step()`.

    The same loop runs with it and with gradlane. Nothing is deferred or overlapped, so that what it
    gives is right by inspection.
    """

    def __init__(self, rank: int, shared: Barrier) -> None:
        self.rank = rank
        self.world_size = shared.barrier.parties
        self._shared = shared
        self._averaged: set[int] = set()
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._samples: int | None = None

    def weight(self, samples: int) -> None:
        """Have the next average count so many samples of this rank."""
        self._samples = samples

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, **_: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Take rank 0's values; from now on average before each step of the optimizer.

        All ranks meet here, so nobody trains while another one builds its model: both use torch's
        generator of random numbers, which is one for all threads.
        """
        self._take_values(model)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return model, optimizer  # Several: the loop averages by itself.
        self._optimizers[id(model)] = optimizer
        step = optimizer.step

        def averaged_step(closure: Any = None) -> Any:
            if id(model) not in self._averaged:
                self.average(model)
            self._averaged.discard(id(model))
            return step()

        optimizer.__dict__["step"] = averaged_step
        return model, optimizer

    @torch.no_grad()
    def _take_values(self, model: nn.Module) -> None:
        own = [*model.parameters(), *model.buffers()]
        everyone = self._shared.exchange(self.rank, [tensor.detach().clone() for tensor in own])
        if self.rank != 0:
            for tensor, value in zip(own, everyone[0], strict=True):
                tensor.copy_(value)

    def average(self, model: nn.Module) -> None:
        """Average now, as reading a gradient does in gradlane."""
        self._averaged.add(id(model))
        samples, self._samples = self._samples, None
        if self.world_size == 1:
            samples = None
        own = [parameter.grad for parameter in model.parameters()]
        if samples is not None:
            summed = [one.coalesce() if one is not None and one.is_sparse else one for one in own]
            own = [None if one is None else one * samples for one in summed]
        everyone = self._shared.exchange(self.rank, (own, samples or 0))
        total = sum(samples for _, samples in everyone)
        optimizer = self._optimizers.get(id(model))
        for position, parameter in enumerate(model.parameters()):
            mean = sparse_mean_in_rank_order([gradients[position] for gradients, _ in everyone])
            if mean is not None and not (optimizer and steps_on_sparse(optimizer, parameter)):
                mean = mean.to_dense()
            parameter.grad = None if mean is None else mean.clone()
            if total and parameter.grad is not None:
                parameter.grad.mul_(self.world_size / total)

    def clip_grad_norm_(self, max_norm: float, *, model: nn.Module) -> Tensor:
        """Average, and clip by the exact norm as torch does."""
        if id(model) not in self._averaged:
            self.average(model)
        found = [one.grad for one in model.parameters() if one.grad is not None]
        gradients = [one.coalesce().values() if one.is_sparse else one for one in found]
        wide = any(one.dtype in (torch.float64, torch.complex128) for one in gradients)
        exact = exact_norm(gradients)
        norm = torch.tensor(exact, dtype=torch.float64 if wide else torch.float32)
        factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in found:
            gradient.mul_(factor)
        return norm

    def forget(self) -> None:
        """Forget that gradients were averaged: the step is not taken."""
        self._averaged.clear()

    @torch.no_grad()
    def share_buffers(self, model: nn.Module) -> None:
        """Take rank 0's buffers."""
        for buffer, values in self._buffers(model):
            buffer.copy_(values[0])

    @torch.no_grad()
    def average_buffers(self, model: nn.Module) -> None:
        """Average floating-point buffers in f64, in rank order; take rank 0's others."""
        for buffer, values in self._buffers(model):
            if buffer.is_floating_point():
                total = values[0].double()
                for value in values[1:]:
                    total = total + value.double()
                buffer.copy_(total / len(values))
            else:
                buffer.copy_(values[0])

    def _buffers(self, model: nn.Module) -> list[tuple[Tensor, list[Tensor]]]:
        own = list(model.buffers())
        everyone = self._shared.exchange(self.rank, [buffer.clone() for buffer in own])
        return [(buffer, [one[at] for one in everyone]) for at, buffer in enumerate(own)]

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Gradients are never sent before `step()` here."""
        return contextlib.nullcontext()


class Barrier:
    """Where all ranks of a reference meet."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size)
        self._values: list[Any] = [None] * world_size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks gave."""
        self._values[rank] = value
        self.barrier.wait(60)
        everyone = list(self._values)
        self.barrier.wait(60)
        return everyone


def run_reference(world_size: int, body: Callable[[Any], Any]) -> list[Any]:
    """Call `body(session)` on every rank of a reference and return what each returned."""
    shared = Barrier(world_size)

    def one(rank: int) -> Any:
        torch.set_num_threads(1)
        try:
            return body(ReferenceSession(rank, shared))
        except BaseException:
            shared.barrier.abort()
            raise

    with concurrent.futures.ThreadPoolExecutor(world_size) as pool:
        return [future.result() for future in [pool.submit(one, r) for r in range(world_size)]]


def average(session: Any, model: nn.Module) -> None:
    """Put averaged gradients into `.grad`, with gradlane or with the reference."""
    if isinstance(session, ReferenceSession):
        session.average(model)
    else:
        _ = [parameter.grad for parameter in model.parameters()]
