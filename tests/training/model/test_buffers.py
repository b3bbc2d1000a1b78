"""Buffers stay local, follow rank 0 or are averaged, as `prepare(buffers=...)` says."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gradlane
from gradlane.training.core import load_core
from gradlane.training.model.buffers import BufferPack
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.membership import Membership
from tests.built import needs_core
from tests.training.model import test_training
from tests.training.model.models import SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import ReferenceSession, run_reference, same_bits
from tests.training.model.test_training import batch, sgd

cnn_loss: Any = test_training.cnn_loss
STEPS = 5


class Counting(nn.Module):
    """Buffers of many kinds, some of which change; inputs (N, 3)."""

    seen: Tensor
    exact: Tensor
    short: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.register_buffer("seen", torch.zeros(2, 3).t())
        self.register_buffer("exact", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("short", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool), persistent=False)
        self.register_buffer("empty", torch.empty(0))

    def forward(self, values: Tensor) -> Tensor:
        self.seen += values.sum(0)[:, None]
        self.exact = self.exact * 0.5 + values.double().sum(0)  # replaced, not written
        self.short += values.sum(0).bfloat16()
        return self.norm(self.layer(values))  # type: ignore[no-any-return]


@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize("mode", ["broadcast", "average", "local"])
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("build", [Counting, SmallCnn])
def test_buffers_equal_the_reference(
    mode: str, world_size: int, build: type[nn.Module], update: str
) -> None:
    serves = update == "server"

    def body(session: Any) -> list[list[Tensor]]:
        model = seeded(build)
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers=mode)
        seen = []
        for step in range(1, STEPS + 1):
            if build is SmallCnn:
                cnn_loss(model, session.rank, step).backward()
            else:
                loss: Any = model(batch((4, 3), session.rank, step)).square().sum()
                loss.backward()
            if step == 3 and not serves:
                nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            if step == 4 and not serves:
                optimizer.zero_grad()  # a step that is not taken counts, too
            else:
                optimizer.step()
                optimizer.zero_grad()
            if isinstance(session, ReferenceSession):
                session.forget()
                if mode == "average":
                    session.average_buffers(model)
                elif mode == "broadcast":
                    session.share_buffers(model)
            seen.append([buffer.clone() for buffer in model.state_dict().values()])
        return seen

    expected = run_reference(world_size, body)
    for rank, states in enumerate(run_ranks(world_size, body, update=update)):
        for state, right in zip(states, expected[rank], strict=True):
            if serves:
                # The servers round each operation, and torch's kernels fuse them.
                torch.testing.assert_close(state, right, rtol=1e-4, atol=1e-6)
            else:
                assert same_bits(state, right)


@needs_core
@pytest.mark.parametrize("mode", ["broadcast", "average"])
@pytest.mark.parametrize(
    "options",
    [
        {"update": "server", "codec": "onebit"},
        {"stragglers": "backup=1"},
        {"stragglers": "drop", "late": "carry"},
    ],
    ids=["server", "backup", "drop"],
)
def test_all_ranks_end_with_the_same_buffers(mode: str, options: dict[str, Any]) -> None:
    """Also around steps that are none of training, which carry state of optimizers and codecs."""

    def body(session: Any) -> list[Tensor]:
        model = seeded(Counting)
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers=mode)
        for step in range(STEPS):
            model(batch((4, 3), session.rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2 and "stragglers" not in options:
                optimizer.load_state_dict(optimizer.state_dict())
                session.load_state_dict(session.state_dict())
        session.synchronize()
        return [buffer.clone() for buffer in model.buffers()]

    found = run_ranks(3, body, summary=False, **options)
    for other in found[1:] if options.get("stragglers") is None else found[2:]:
        # With stragglers rank 0 may be the one that the last step went on without.
        assert same_bits(found[-1], other)
    assert found[0][0].abs().sum() > 0


@needs_core
@pytest.mark.parametrize("mode", ["broadcast", "average"])
@pytest.mark.parametrize(
    ("added", "is_alike"),
    [((1, 1), True), ((0, 0), True), ((1, 0), False), ((0, 1), False), ((1, 2), False)],
)
@pytest.mark.parametrize("step", [0, 2])
def test_changes_between_steps_are_compared_where_no_status_travels(
    mode: str, added: tuple[int, int], is_alike: bool, step: int
) -> None:
    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Counting)
        model.register_buffer("scale", torch.ones(3, dtype=torch.int64))
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers=mode)
        for number in range(4):
            if number == step:
                model.scale += added[session.rank]
            model(batch((4, 3), session.rank, number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()
        return [model.scale.clone()]

    if is_alike:
        for found in run_ranks(2, body, update="server"):
            assert same_bits(found, [torch.full((3,), 1 + added[0])])
        return
    with pytest.raises(gradlane.SessionFailedError, match=r"not alike on all ranks: this rank"):
        run_ranks(2, body, update="server")


@needs_core
@pytest.mark.parametrize("update", ["worker", "server"])
@pytest.mark.parametrize(
    ("added", "is_alike"), [((1, 1), True), ((1, 0), False), ((0, 1), False), ((1, 2), False)]
)
def test_writes_that_torch_does_not_count_are_compared(
    update: str, added: tuple[int, int], is_alike: bool
) -> None:
    def body(session: Any) -> None:
        model: Any = seeded(Counting)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for number in range(4):
            model.exact.numpy()[:] += added[session.rank]
            model(batch((4, 3), session.rank, number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    if is_alike:
        run_ranks(2, body, update=update)
        return
    with pytest.raises(gradlane.SessionFailedError, match=r"not alike on all ranks"):
        run_ranks(2, body, update=update)


@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_the_same_writes_are_alike_where_ranks_may_lack_the_first_ones_values(mode: str) -> None:
    def pack_of(rank: int, held: int) -> tuple[Counting, BufferPack]:
        model = Counting()
        # A step went on without the first rank: the other has not got its mask.
        model.mask[0] = bool(held)
        membership = Membership(RankInfo(rank, 2, "job", 0))
        pack = BufferPack(model, mode, membership, compares=True, may_lack=True)
        pack.start()
        return model, pack

    def change(written: torch.Tensor, held: int, *, alone: bool = False) -> int:
        model, pack = pack_of(int(alone), held)
        if not alone:
            model.mask.copy_(written)
        for module in model.modules():
            pack.examine(module)
        return pack.changes()

    ones = torch.ones_like(Counting().mask)
    assert change(ones, 0) == change(ones, 1), "new bytes for one rank alone"
    assert change(~ones, 0) == change(ones, 0), "other values"
    assert change(ones, 0) != change(ones, 0, alone=True)


def test_values_that_a_step_went_on_without_are_sent_again() -> None:
    model = Counting()
    membership = Membership(RankInfo(0, 2, "job", 0))
    pack = BufferPack(model, "broadcast", membership)
    pack.start()
    assert pack.pack(1, silent=False) is None, "nothing has changed"
    pack.land(None)
    model.mask[0] = False
    for mean in (None, torch.zeros_like(pack.tensor)):
        sent = pack.pack(1, silent=False)
        assert sent is not None
        pack.land(mean)
    sent = pack.pack(1, silent=False)
    assert sent is not None
    pack.land(sent / 2)
    assert pack.pack(1, silent=False) is None, "the others have it"


@needs_core
def test_asynchronous_ranks_say_that_buffers_stay_their_own() -> None:
    def body(session: Any) -> None:
        model = seeded(Counting)
        session.prepare(model, sgd(model))

    def average(session: Any) -> None:
        model = seeded(Counting)
        with pytest.raises(gradlane.UsageError, match='"average"\\) with strategy="asgd"'):
            session.prepare(model, sgd(model), buffers="average")

    def local(session: Any) -> None:
        model = seeded(Counting)
        session.prepare(model, sgd(model), buffers="local")

    options: Any = {"core": load_core(), "summary": False, "strategy": "asgd", "update": "server"}
    # Counting has a buffer of f64 values, which no server has to have a kernel for.
    with pytest.warns(UserWarning, match=r"'seen' and all other buffers stay"):
        run_ranks(2, body, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_ranks(2, local, **options)
        run_ranks(2, average, **options)


def test_direct_reads_of_buffers_wait() -> None:
    def body(session: Any) -> tuple[Tensor, Tensor, Tensor]:
        model: Any = seeded(Counting)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        model(batch((4, 3), session.rank, 1)).square().sum().backward()
        optimizer.step()
        mean = model.norm.running_mean.clone()
        count = dict(model.norm.named_buffers())["num_batches_tracked"].clone()
        return mean, count, next(iter(model.buffers())).clone()

    first, second = run_ranks(2, body)
    assert same_bits(first, second)


def test_a_rank_without_data_does_not_count_in_the_average() -> None:
    def body(session: Any) -> list[Tensor]:
        model: Any = seeded(Counting)
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers="average")
        with session.join():
            for step in range(1 + session.rank):
                model(batch((4, 3), session.rank, step)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [buffer.clone() for buffer in model.buffers()]

    results = run_ranks(3, body)
    assert same_bits(results[0], results[1])
    assert same_bits(results[0], results[2])
    one = sum((batch((4, 3), rank, 0) for rank in range(3)), torch.zeros(4, 3)).sum(0) / 3
    two = (batch((4, 3), 1, 1) + batch((4, 3), 2, 1)).sum(0) / 2
    three = batch((4, 3), 2, 2).sum(0)
    torch.testing.assert_close(results[0][0][:, 0], one + two + three)


def test_a_buffer_that_changes_its_form() -> None:
    def body(session: Any) -> None:
        model: Any = seeded(Counting)
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        loss = model(batch((4, 3), session.rank, 1)).square().sum()
        model.mask = torch.ones(7, dtype=torch.bool)
        loss.backward()
        optimizer.step()

    errors = run_ranks(2, body, expect_errors=True)
    # Where one rank is faster, the other hears of it before its own step().
    assert any(isinstance(error, gradlane.UsageError) for error in errors)
    for error in errors:
        assert "buffer 'mask' was prepared as (5,) torch.bool" in str(error)
        assert 'buffers="local"' in str(error)


class Normed(nn.Module):
    """Statistics that forwards write, by several ways of calling, and vectors of spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(3)
        self.last = nn.BatchNorm1d(3)
        self.old: Any = nn.utils.spectral_norm(nn.Linear(3, 3))
        self.new = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = self.last(self.new(self.old(self.first(values))))
        return result


def call(model: Any, values: Tensor) -> Tensor:
    result: Tensor = model(values)
    return result


def call_forward(model: Any, values: Tensor) -> Tensor:
    result: Tensor = model.last(model.new(model.old(model.first.forward(values))))
    return result


def call_frozen(model: Any, values: Tensor) -> Tensor:
    model.first.eval()
    return call(model, values)


def call_again(model: Any, values: Tensor) -> Tensor:
    return checkpoint(model, values, use_reentrant=False) + model(values + 1.0)  # type: ignore[no-any-return]


def nothing(model: Any) -> None:
    """Change nothing."""


def load(model: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def evaluate(model: Any) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.ones(2, 3))
    model.train()


def anneal(model: Any) -> None:
    model.last.running_var.mul_(0.9)
    model.last.running_mean = torch.zeros(3)


@pytest.mark.parametrize("forward", [call, call_forward, call_frozen, call_again])
@pytest.mark.parametrize("change", [nothing, load, evaluate, anneal, nn.Module.float])
def test_changes_that_are_alike_pass(forward: Any, change: Any) -> None:
    def body(session: Any) -> list[Tensor]:
        model = models[session.rank]
        optimizer = sgd(model)
        session.prepare(model, optimizer)
        for step in range(4):
            with session.no_sync():
                forward(model, batch((4, 3), session.rank, 2 * step)).square().mean().backward()
            # Rank 1 leaves modules out now and then.
            use = model.old if step % 2 and session.rank else functools.partial(forward, model)
            use(batch((4, 3), session.rank, 2 * step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            change(model)
        session.synchronize()
        return [buffer.clone() for buffer in model.buffers()]

    models = [seeded(Normed) for _ in range(2)]
    first, second = run_ranks(2, body)
    assert same_bits(first, second)


def test_expanded_tensors_do_not_go_into_checkpoints(tmp_path: Path) -> None:
    def body(session: Any) -> str:
        model = nn.Linear(2, 2)
        model.register_buffer("places", torch.arange(2.0).expand(3, 2))
        with pytest.raises(ValueError, match="torch loads no expanded tensor") as caught:
            session.prepare(model, sgd(model))
        return str(caught.value)

    (said,) = run_ranks(1, body, checkpoint_folder=tmp_path)
    assert "'places' would be in checkpoints" in said


def test_an_unknown_mode() -> None:
    def body(session: Any) -> None:
        model = seeded(SmallCnn)
        with pytest.raises(ValueError, match="unknown buffers 'mean'; known are broadcast"):
            session.prepare(model, sgd(model), buffers="mean")

    run_ranks(1, body)


class Drifting(nn.Module):
    """A buffer that autograd knows, as of a running mean of weights; inputs (N, 3)."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.register_buffer("mean", torch.zeros(1, 3))

    def forward(self, values: Tensor) -> Tensor:
        self.mean = self.mean.detach() * 0.5 + self.layer.weight  # requires a gradient
        return self.layer(values)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mode", ["broadcast", "average"])
def test_a_buffer_with_a_gradient_is_kept_alike_when_a_step_is_discarded(mode: str) -> None:
    def body(session: Any) -> Tensor:
        model = seeded(Drifting)
        optimizer = sgd(model)
        session.prepare(model, optimizer, buffers=mode)
        for step in range(3):
            model(torch.ones(2, 3) * (session.rank + 1)).sum().backward()
            if step == 1:
                optimizer.zero_grad()
            else:
                optimizer.step()
        session.synchronize()
        return dict(model.named_buffers())["mean"].detach().clone()

    first, second = run_ranks(2, body)
    assert torch.equal(first, second)
