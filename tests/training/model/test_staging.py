"""Gradients that are copied through the host's memory, on a device that is simulated.

The same with CUDA devices is in `test_cuda.py`, and skipped where there is none.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.model import staging
from gradlane.training.model.staging import StagedCarrier
from gradlane.training.rendezvous.tensor_table import build_table
from tests.training.model import scenarios
from tests.training.model.models import Attention, SmallCnn, seeded
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits, snapshot, train_reference
from tests.training.model.simulated_device import SimulatedDevice
from tests.training.model.test_training import (
    attention_loss,
    cnn_loss,
    grouped_adamw,
    sgd,
    train,
)
from tests.waiting import eventually, threads_named

HERE = "tests.training.model.test_staging"
STEPS = 8


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Copies on a simulated device; they were made, and no thread of them is left."""
    SimulatedDevice.made.clear()
    monkeypatch.setattr(staging, "CudaCopies", SimulatedDevice)
    yield
    assert SimulatedDevice.made
    for one in SimulatedDevice.made:
        one.end()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("defer", "clip_norm"), [(None, None), (False, None), (None, 0.1), (False, 0.1)]
)
def test_training_equals_the_reference(defer: bool | None, clip_norm: float | None) -> None:
    def body(session: Any) -> list[Tensor]:
        return train(
            session,
            lambda: seeded(SmallCnn),
            sgd,
            cnn_loss,
            steps=STEPS,
            defer=defer,
            clip_norm=clip_norm,
        )

    def clip(model: nn.Module) -> None:
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_norm)

    expected = train_reference(2, STEPS, lambda: seeded(SmallCnn), sgd, cnn_loss, before_step=clip)
    for parameters in run_ranks(2, body):
        assert same_bits(parameters, snapshot(expected[0]))
    # All gradients of a step go to the host as one, and back.
    gradients = len(list(seeded(SmallCnn).parameters())) * STEPS
    assert all(2 * STEPS <= one.copies < gradients for one in SimulatedDevice.made)


@pytest.mark.usefixtures("device")
def test_groups_of_a_decoupled_optimizer_equal_the_reference() -> None:
    def body(session: Any) -> list[Tensor]:
        return train(session, lambda: seeded(Attention), grouped_adamw, attention_loss, steps=STEPS)

    expected = train_reference(3, STEPS, lambda: seeded(Attention), grouped_adamw, attention_loss)
    for parameters in run_ranks(3, body):
        assert same_bits(parameters, snapshot(expected[0]))


def staged(store: Any, rank: int, world_size: int, job: str, **training: Any) -> tuple[Any, int]:
    """A scenario: train on a simulated device; digests, and how many copies were made."""
    with pytest.MonkeyPatch.context() as patch:
        SimulatedDevice.made.clear()
        patch.setattr(staging, "CudaCopies", SimulatedDevice)
        result = scenarios.train(store, rank, world_size, job, **training)
        for one in SimulatedDevice.made:
            one.end()
    return result["digests"], sum(one.copies for one in SimulatedDevice.made)


@pytest.mark.parametrize(
    "training",
    [
        # Parameters that some ranks and some steps leave out.
        {"model_name": "awkward"},
        {"model_name": "bf16", "strategy": "kvstore"},
        {"model_name": "transformer", "strategy": "ring", "optimizer_name": "adamw"},
        {"model_name": "cnn", "frame_bytes": 4096, "clip_norm": 0.1},
        {"model_name": "cnn", "codec": "qsgd:bits=8", "defer": False},
    ],
)
def test_real_ranks_have_the_bits_of_gradients_that_are_lent(
    pool: RankPool, training: dict[str, Any]
) -> None:
    arguments = {"steps": STEPS, "digest_every": 1, **training}
    lent = pool.run("train", ranks=3, **arguments)
    for (digests, copies), expected in zip(
        pool.run(f"{HERE}:staged", ranks=3, **arguments), lent, strict=True
    ):
        assert digests == expected["digests"]
        assert copies > 0


class FailingDevice(SimulatedDevice):
    """Loses the device after some copies."""

    def to_host(self, host: Tensor, gradient: Tensor, after: Any) -> Any:
        if self.copies < 20:
            return super().to_host(host, gradient, after)

        def lost() -> None:
            raise RuntimeError("device-side assert triggered")

        return self._later(self._out, 0.0, lost)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_device_that_is_lost_ends_the_session_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    def copies() -> SimulatedDevice:
        on_it = threading.current_thread().name == f"rank {failing}"
        return FailingDevice() if on_it else SimulatedDevice()

    SimulatedDevice.made.clear()
    monkeypatch.setattr(staging, "CudaCopies", copies)

    def body(session: Any) -> list[Tensor]:
        threading.current_thread().name = f"rank {session.rank}"
        return train(session, lambda: seeded(SmallCnn), sgd, cnn_loss, steps=40)

    for error in run_ranks(2, body, expect_errors=True):
        assert isinstance(error, gradlane.GradlaneError)
        assert "device-side assert" in str(error)
    for one in SimulatedDevice.made:
        with contextlib.suppress(RuntimeError):
            one.end()


class Calls:
    """A channel that only notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.heard = threading.Event()

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        self.told.append((tensor, step))
        self.heard.set()


class HangingDevice(SimulatedDevice):
    """Never ends a copy until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.waits = threading.Event()

    def to_host(self, host: Tensor, gradient: Tensor, after: Any) -> Any:
        def hang() -> None:
            self.waits.set()
            self.released.wait(20)

        return self._later(self._out, 0.0, hang)


def test_what_is_under_way_when_a_session_ends_is_never_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(staging, "CLOSE_TIMEOUT_S", 0.1)
    model = nn.Linear(3, 2)
    carried = dict(enumerate(build_table(model)))
    channel: Any = Calls()
    errors: list[Exception] = []
    device = HangingDevice()
    others = threads_named("gradlane-staging")
    carrier = StagedCarrier(channel, carried, errors.append, device)
    for index, entry in carried.items():
        carrier.submit(index, 1, torch.zeros(entry.shape))
    assert device.waits.wait(20)
    carrier.close()
    device.released.set()
    device.end()
    assert eventually(lambda: threads_named("gradlane-staging") <= others, within_s=20.0)
    assert (channel.told, errors) == ([], [])
