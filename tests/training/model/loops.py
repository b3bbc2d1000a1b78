"""Training loops that run with gradlane in real processes and with the reference in threads.

Each takes a session and returns a digest of everything that training has changed.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tests.training.model.models import Attention, SmallCnn, seeded
from tests.training.model.reference import ReferenceSession, average

STEPS = 6


def loss_of(model: nn.Module, rank: int, step: int) -> Any:
    """The loss of a rank's own batch."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    if isinstance(model, SmallCnn):
        images = torch.randn(4, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        return nn.functional.cross_entropy(model(images), labels)
    return model(torch.randn(3, 5, 8, generator=generator)).pow(3).mean()


def digest(tensors: Iterable[Tensor]) -> str:
    """Hash of all bits of some tensors."""
    state = hashlib.sha256()
    for tensor in tensors:
        state.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def accumulation(session: Any) -> str:
    """Batches in `no_sync`, clipping, and a last step that is accumulated in there whole."""
    model = seeded(SmallCnn)
    optimizer = adam(model)
    session.prepare(model, optimizer, buffers="broadcast")
    for step in range(STEPS):
        with session.no_sync():
            loss_of(model, session.rank, 10 * step).backward()
        loss_of(model, session.rank, 10 * step + 1).backward()
        if step % 2:
            average(session, model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    with session.no_sync():
        for part in range(1 + session.rank):
            loss_of(model, session.rank, 100 + part).backward()
    optimizer.step()
    return digest(model.parameters())


def scaler(session: Any) -> str:
    """Loss scaling; an infinite loss on one rank skips the step on all."""
    model = seeded(SmallCnn)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    scale = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        factor = float("inf") if step == 2 and session.rank == 1 else 1.0
        scale.scale(loss_of(model, session.rank, step) * factor).backward()
        if isinstance(session, ReferenceSession):
            session.average(model)
        scale.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        if isinstance(session, ReferenceSession):
            session.forget()
    return digest([*model.parameters(), torch.tensor(scale.get_scale())])


def gan(session: Any) -> str:
    """Two models and optimizers; one's loss leaves gradients in the other."""
    with torch.random.fork_rng(devices=[]):
        g, d = seeded(Attention), seeded(Attention, seed=9)
    optimizers = [adam(g), adam(d)]
    session.prepare(g, optimizers[0])
    session.prepare(d, optimizers[1])
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(1000 * step + session.rank)
        real, noise = torch.randn(2, 3, 5, 8, generator=generator)
        fake = g(noise)
        optimizers[1].zero_grad()
        d(real).square().mean().backward()
        d(fake.detach()).pow(3).mean().backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        d(fake).mean().backward()
        optimizers[0].step()
    return digest([*g.parameters(), *d.parameters()])


def join(session: Any) -> str:
    """Two epochs of uneven data for two models, with momentum and clipping."""
    models = [seeded(Attention), seeded(SmallCnn)]
    optimizers = [adam(models[0]), torch.optim.SGD(models[1].parameters(), lr=0.1, momentum=0.9)]
    for model, optimizer in zip(models, optimizers, strict=True):
        session.prepare(model, optimizer)
    batches = (3, 2, 5)
    is_reference = isinstance(session, ReferenceSession)
    for epoch in range(2):
        with contextlib.nullcontext() if is_reference else session.join():
            own = batches[(session.rank + epoch) % 3]
            for step in range(max(batches) if is_reference else own):
                for model, optimizer in zip(models, optimizers, strict=True):
                    if step < own:
                        loss_of(model, session.rank, 10 * epoch + step).backward()
                    if model is models[0]:
                        average(session, model)
                        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                    optimizer.step()
                    optimizer.zero_grad()
    states = [
        value
        for model, optimizer in zip(models, optimizers, strict=True)
        for parameter in model.parameters()
        for _, value in sorted(optimizer.state[parameter].items())
        if isinstance(value, Tensor)
    ]
    return digest([*models[0].parameters(), *models[1].parameters(), *states])


def averaged_buffers(session: Any) -> str:
    """Statistics of batch norm are averaged in each step."""
    model = seeded(SmallCnn)
    optimizer = adam(model)
    session.prepare(model, optimizer, buffers="average")
    for step in range(STEPS):
        loss_of(model, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(session, ReferenceSession):
            session.average_buffers(model)
    return digest([*model.parameters(), *model.buffers()])


def shared_buffers(session: Any) -> str:
    """Statistics of batch norm are rank 0's in each step."""
    model = seeded(SmallCnn)
    optimizer = adam(model)
    session.prepare(model, optimizer)
    for step in range(STEPS):
        loss_of(model, session.rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(session, ReferenceSession):
            session.share_buffers(model)
    return digest([*model.parameters(), *model.buffers()])


LOOPS: dict[str, Callable[[Any], str]] = {
    "accumulation": accumulation,
    "scaler": scaler,
    "gan": gan,
    "join": join,
    "averaged-buffers": averaged_buffers,
    "shared-buffers": shared_buffers,
}
