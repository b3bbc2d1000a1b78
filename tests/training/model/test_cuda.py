"""Gradients of CUDA tensors go through pinned memory and give the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.model.models import Attention, SmallCnn, seeded
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import (
    ReferenceSession,
    average,
    run_reference,
    same_bits,
    train_reference,
)
from tests.training.model.test_training import attention_loss, batch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


def loss(model: Any, rank: int, step: int) -> Tensor:
    tokens = batch((3, 5, 8), rank, step).cuda()
    value: Tensor = model(tokens).square().mean()
    return value


@pytest.mark.parametrize("defer", [None, False])
def test_training_on_cuda_equals_the_reference(defer: bool | None) -> None:
    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.01)

    def body(session: Any) -> list[Tensor]:
        model = seeded(Attention).cuda()
        optimizer = make_optimizer(model)
        session.prepare(model, optimizer, defer=defer)
        for step in range(1, 11):
            loss(model, session.rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().cpu() for parameter in model.parameters()]

    torch.backends.cuda.matmul.allow_tf32 = False
    (expected, *_) = train_reference(2, 10, lambda: seeded(Attention).cuda(), make_optimizer, loss)
    for parameters in run_ranks(2, body):
        wanted = [parameter.detach().cpu() for parameter in expected.parameters()]
        assert same_bits(parameters, wanted)


def test_parameters_on_both_devices() -> None:
    def body(session: Any) -> Tensor:
        model: Any = torch.nn.ModuleList([seeded(Attention).cuda(), seeded(Attention)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(1, 4):
            total = loss(model[0], session.rank, step).cpu()
            total = total + attention_loss(model[1], session.rank, step)
            total.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        parts = [parameter.detach().cpu().flatten() for parameter in model.parameters()]
        return torch.cat(parts)

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)


@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
def test_accumulation_clipping_and_buffers_on_cuda(mode: str) -> None:
    def body(session: Any) -> list[Tensor]:
        model = seeded(SmallCnn).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        session.prepare(model, optimizer, buffers=mode)
        for step in range(6):
            with session.no_sync():
                images = batch((4, 1, 8, 8), session.rank, 50 + step).cuda()
                model(images).square().mean().backward()
            for part in range(1 + step % 2):
                images = batch((4, 1, 8, 8), session.rank, 10 * step + part).cuda()
                model(images).square().mean().backward()
                if step == 0:
                    # The largest number of backward calls is known from the first step on.
                    model(images).square().mean().backward()
            if step % 2:
                average(session, model)
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            if isinstance(session, ReferenceSession):
                if mode == "average":
                    session.average_buffers(model)
                elif mode == "broadcast":
                    session.share_buffers(model)
        return [tensor.detach().cpu() for tensor in model.state_dict().values()]

    torch.backends.cudnn.deterministic = True
    expected = run_reference(2, body)
    for rank, tensors in enumerate(run_ranks(2, body)):
        assert same_bits(tensors, expected[rank])


def test_synchronized_batch_norm_beside_gradlane() -> None:
    pool = RankPool(2, start_method="spawn")
    try:
        first, second = pool.run("synchronized_batch_norm_on_cuda")
    finally:
        pool.close()
    assert first == second
