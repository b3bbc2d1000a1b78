"""`gradlane.profile`, operation counts, and profiles that are made from them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradlane
from gradlane.formats.profile import ProfileError
from gradlane.planning.profiler.nested import samples_in, with_tensors
from gradlane.planning.profiler.operations import UNCOUNTED_SHARE, synthetic_profile
from tests.training.model.models import Attention, CharTransformer, SmallCnn, seeded


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, classes = batch
    return nn.functional.cross_entropy(model(images), classes)


BATCH = (torch.ones(4, 1, 8, 8), torch.arange(4))


def test_a_loss_function_is_profiled_without_traces() -> None:
    model = seeded(SmallCnn)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    random = torch.get_rng_state()
    done: list[int] = []
    profile = gradlane.profile(model, loss_of, BATCH, steps=4, warmup=2, on_step=done.append)
    assert done == [2, 3, 4, 5, 6]
    assert (profile.model, profile.batch_size, profile.device) == ("SmallCnn", 4, "cpu")
    assert profile.batch is not None and profile.batch.steps == 4
    assert all(0 <= one.need_s <= profile.forward_s <= one.ready_s for one in profile.tensors)
    assert profile.compute_s == profile.batch.median_s > profile.forward_s > 0
    assert torch.equal(random, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(bool((one.grad == 7.0).all()) for one in model.parameters())  # type: ignore[union-attr]


def test_operations_are_counted_by_module() -> None:
    profile = gradlane.profile(seeded(SmallCnn), loss_of, BATCH, steps=1, warmup=1)
    # Multiplications and additions of both convolutions and of the head.
    expected = {
        "body.0": 2 * 4 * 8 * 8 * 8 * 9,
        "body.1": 0,
        "body.3": 2 * 4 * 16 * 3 * 3 * 8 * 9,
        "head": 2 * 4 * 144 * 10,
    }
    counted = {module.name: module.flops for module in profile.modules}
    assert {name: counted[name] for name in expected} == expected
    assert profile.flops == counted[""] == sum(expected.values())
    layers = {module.name: module.layer for module in profile.modules}
    assert layers["body.1"] == "BatchNorm2d"
    plain = gradlane.profile(
        seeded(SmallCnn), loss_of, BATCH, steps=1, warmup=1, operations=False, name="mine"
    )
    assert plain.flops is None and plain.model == "mine"


def test_a_step_function_runs_as_it_is() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = 0

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        for part in batch.chunk(2):
            loss = model(part).sum()
            loss.backward()
        optimizer.step()
        # A loss that leads back to parameters, with its backward done.
        return loss  # type: ignore[no-any-return]

    profile = gradlane.profile(model, step, torch.ones(6, 3), steps=2, warmup=2)
    assert calls == 2 + 2 + 1
    assert profile.batch_size == 6
    assert [one.gradients for one in profile.tensors] == [2, 2]
    assert profile.flops == 2 * 6 * 3


@pytest.mark.parametrize("function", [lambda *_: None, lambda model, batch: model(batch).detach()])
def test_a_function_that_does_neither_is_refused(function: Any) -> None:
    with pytest.raises(ProfileError, match="ran no backward"):
        gradlane.profile(nn.Linear(2, 2), function, torch.ones(1, 2))


def test_arguments_are_checked() -> None:
    model, batch = nn.Linear(2, 1), torch.ones(1, 2)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()  # type: ignore[no-any-return]

    with pytest.raises(ValueError, match="steps is 0"):
        gradlane.profile(model, loss, batch, steps=0)
    with pytest.raises(ValueError, match="warmup is 0"):
        gradlane.profile(model, loss, batch, warmup=0)
    with pytest.raises(ValueError, match="batch_size is 0"):
        gradlane.profile(model, loss, batch, batch_size=0)
    with pytest.raises(ProfileError, match="batch time"):
        synthetic_profile(model, batch, 0.0)
    with pytest.raises(ProfileError, match="leads back"), torch.no_grad():
        synthetic_profile(model, batch, 1.0)


def test_synthetic_times_follow_operations() -> None:
    """The second layer has nine times the operations of the first."""
    model = nn.Sequential(nn.Linear(10, 90, bias=False), nn.Linear(90, 90, bias=False))
    profile = synthetic_profile(model, torch.ones(8, 10), 3.0)
    assert profile.forward_s == pytest.approx(1.0)
    assert profile.compute_s == 3.0
    first, second = profile.tensors
    slack = UNCOUNTED_SHARE * 3
    assert first.need_s == pytest.approx(0.0, abs=slack)
    assert second.need_s == pytest.approx(0.1, abs=slack)
    # Backward: both products of the second layer, and one of the first, whose input is nobody's.
    assert second.ready_s == pytest.approx(1 + 2 * 9 / 19, abs=slack) or (
        second.ready_s == pytest.approx(1 + 2 * 18 / 19, abs=slack)
    )
    assert first.ready_s == pytest.approx(3.0, abs=slack)
    assert profile.flops == 2 * 8 * (900 + 8100)
    assert profile.batch_size == 8


@pytest.mark.parametrize(
    ("kind", "example"),
    [
        (CharTransformer, torch.ones(2, 8, dtype=torch.int64)),
        (Attention, (torch.ones(3, 5, 8),)),
        (SmallCnn, {"images": torch.ones(2, 1, 8, 8)}),
    ],
)
def test_any_module_has_a_synthetic_profile(kind: type[nn.Module], example: Any) -> None:
    profile = synthetic_profile(seeded(kind), example, 0.3, name="made")
    names = [name for name, _ in seeded(kind).named_parameters()]
    assert [tensor.name for tensor in profile.tensors] == names
    assert profile.model == "made" and profile.device == "synthetic"
    for tensor in profile.tensors:
        assert 0.0 <= tensor.need_s <= profile.forward_s <= tensor.ready_s <= 0.3
        assert tensor.gradients == 1
    again = synthetic_profile(seeded(kind), example, 0.6, name="made")
    assert again.tensors[0].ready_s == pytest.approx(2 * profile.tensors[0].ready_s)


def test_models_larger_than_memory_are_counted_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(50_000, 50_000, bias=False) for _ in range(8)))
        example = torch.empty(512, 50_000)
    profile = synthetic_profile(model, example, 1.0)
    assert profile.flops == 8 * 2 * 512 * 50_000**2
    assert profile.size_bytes == 8 * 4 * 50_000**2
    ready_s = [tensor.ready_s for tensor in profile.tensors]
    assert ready_s == sorted(ready_s, reverse=True)


def test_a_model_without_counted_operations_shares_time_evenly() -> None:
    model = nn.Sequential(*(nn.LayerNorm(4) for _ in range(4)))
    profile = synthetic_profile(model, torch.ones(2, 4), 1.0)
    needs_s = [tensor.need_s for tensor in profile.tensors if tensor.name.endswith("weight")]
    gaps_s = [after - before for before, after in itertools.pairwise(needs_s)]
    assert gaps_s == pytest.approx([gaps_s[0]] * 3)
    assert gaps_s[0] > 0


def test_tensors_are_found_in_what_people_pass() -> None:
    nested = [{"mask": None, "ids": torch.ones(3, 2)}, (torch.ones(5),)]
    assert samples_in(nested) == 3
    assert samples_in({"scale": torch.tensor(2.0), "x": torch.ones(4, 1)}) == 4
    assert samples_in(["text"]) is None
    doubled = with_tensors(nested, lambda tensor: tensor * 2)
    assert doubled[0]["mask"] is None and float(doubled[1][0][0]) == 2.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_steps_are_recorded_by_events() -> None:
    model = seeded(SmallCnn).cuda()
    batch = tuple(tensor.cuda() for tensor in BATCH)
    profile = gradlane.profile(model, loss_of, batch, steps=5)
    assert profile.device == torch.cuda.get_device_name()
    assert all(0 <= one.need_s <= profile.forward_s <= one.ready_s for one in profile.tensors)
    assert profile.flops is not None and profile.flops > 0
