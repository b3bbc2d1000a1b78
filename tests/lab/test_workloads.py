"""Tests of the lab's workloads: real shapes, honest pacing, gradients that NumPy can repeat."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import Store

from gradlane.formats.profile import Profile, ProfileTensor
from gradlane.lab.workloads import NAMES, REAL_NAMES, REPLAY_NAMES, Workload, WorkloadSpec, build
from gradlane.lab.workloads.gradients import PATTERN_ELEMENTS, GradientPattern
from gradlane.lab.workloads.pacing import PacingClock
from gradlane.lab.workloads.real import RealWorkload
from gradlane.lab.workloads.replay import ReplayWorkload
from gradlane.lab.workloads.replay_model import SleepingLayer
from gradlane.planning.models import (
    ARCHITECTURES,
    inception_v3,
    resnet50,
    sockeye,
    vgg19,
)
from gradlane.planning.models.schedule import (
    MINIMUM_SLEEP_S,
    layers_from_architecture,
    layers_from_profile,
    merge_short_layers,
)
from gradlane.planning.models.timings import Stage, compute_s_of, timings_of
from tests.training.model.pool import RankPool


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class FakeTime:
    """A clock that moves only when someone sleeps, and oversleeps by a fixed time."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.overshoot_s = overshoot_s

    def now(self) -> float:
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s + self.overshoot_s

    def clock(self, dilation: float = 1.0) -> PacingClock:
        return PacingClock(dilation, now=self.now, sleep=self.sleep)


def on_fake_time(workload: Workload, overshoot_s: float = 0.0) -> FakeTime:
    """Let a workload sleep on a fake clock from now on."""
    fake = FakeTime(overshoot_s)
    workload.clock.now, workload.clock.sleep = fake.now, fake.sleep
    return fake


def small_profile(tmp_path: Path, **fields: Any) -> Path:
    """A profile of three layers, in backward order, as a recorder writes it."""
    parameters = [("head.bias", [3], 0.1), ("head.weight", [3, 4], 0.2)]
    parameters += [("body.0.weight", [300_000, 2], 0.5), ("embed.weight", [7, 2], 0.6)]
    profile = {
        "batch_time_s": 1.0,
        "backward_time_s": 0.6,
        "params": [
            {"name": name, "shape": shape, "numel": math.prod(shape), "grad_ready_s": ready_s}
            for name, shape, ready_s in parameters
        ],
        **fields,
    }
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile), encoding="utf-8")
    return path


def small_replay(
    tmp_path: Path, *, rank: int = 0, world_size: int = 1, seed: int = 0, dilation: float = 1.0
) -> ReplayWorkload:
    path = str(small_profile(tmp_path))
    spec = WorkloadSpec("resnet50", seed=seed, dilation=dilation, profile_path=path)
    workload = build(spec, rank, world_size)
    assert isinstance(workload, ReplayWorkload)
    return workload


def train_step(workload: Workload, model: nn.Module, step: int) -> torch.Tensor:
    workload.begin_step(step)
    loss = workload.loss(model, workload.batch(step))
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


# Architectures


def test_parameter_totals() -> None:
    assert resnet50().numel == 25_557_032
    assert len(resnet50().parameters) == 161
    assert vgg19().numel == 143_667_240
    assert len(vgg19().parameters) == 38
    assert inception_v3().numel == 23_834_568
    assert len(inception_v3().parameters) == 284


def test_operation_counts_match_the_literature() -> None:
    # Multiply-accumulates a sample as torchvision states them: 4.09, 19.63 and 5.71 G. Batch
    # normalization and biases, which it does not count, add less than 1%.
    assert resnet50().operations / 2 == pytest.approx(4.09e9, rel=0.01)
    assert vgg19().operations / 2 == pytest.approx(19.63e9, rel=0.01)
    assert inception_v3().operations / 2 == pytest.approx(5.71e9, rel=0.01)


def test_names_are_torchvisions() -> None:
    names = [parameter.name for parameter in resnet50().parameters]
    assert names[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert names[-2:] == ["fc.weight", "fc.bias"]
    block = [name.removeprefix("layer1.0.") for name in names if name.startswith("layer1.0.")]
    assert block[-3:] == ["downsample.0.weight", "downsample.1.weight", "downsample.1.bias"]
    shapes = {parameter.name: parameter.shape for parameter in vgg19().parameters}
    assert shapes["features.34.weight"] == (512, 512, 3, 3)
    assert shapes["classifier.0.weight"] == (4096, 25_088)
    shapes = {parameter.name: parameter.shape for parameter in inception_v3().parameters}
    assert shapes["Mixed_7c.branch3x3dbl_3b.conv.weight"] == (384, 384, 3, 1)
    assert shapes["fc.weight"] == (1000, 2048)


def test_sockeye_is_heavy_at_the_front() -> None:
    sizes = [parameter.numel for parameter in sockeye().parameters]
    assert sizes[0] == max(sizes)
    assert sizes[0] > 0.4 * sum(sizes)


@pytest.mark.parametrize("describe", [ARCHITECTURES[name] for name in ("resnet50", "sockeye")])
def test_shapes_agree_with_torchs_own_layers(describe: Callable[[], Any]) -> None:
    """Rebuild some layers with torch and compare names and shapes of their parameters."""
    layers = {layer.name: layer for layer in describe().layers}
    expected: dict[str, nn.Module]
    if "fc" in layers:
        expected = {
            "conv1": nn.Conv2d(3, 64, 7, bias=False),
            "layer2.0.bn2": nn.BatchNorm2d(128),
            "fc": nn.Linear(2048, 1000),
        }
    else:
        expected = {
            "encoder.lstm0": nn.LSTM(512, 256, bidirectional=True),
            "decoder.lstm0": nn.LSTM(1024, 512),
        }
    for name, module in expected.items():
        found = [(parameter.name, parameter.shape) for parameter in layers[name].parameters]
        assert found == [
            (f"{name}.{key}", tuple(value.shape)) for key, value in module.named_parameters()
        ]


# Time lines


def test_timings_of_a_chain() -> None:
    stages = [
        Stage("a", 1.0, 2.0, (("a.w", 10, 4),)),
        Stage("pool", 0.5, 1.0),
        Stage("b", 3.0, 6.0, (("b.w", 20, 4), ("a.w", 10, 4))),
    ]
    first, second = timings_of(stages)
    assert compute_s_of(stages) == 13.5
    # Forward ends at 4.5; b's backward at 10.5, the pool's at 11.5, a's at 13.5.
    assert (second.name, second.need_s, second.ready_s) == ("b.w", 1.5, 10.5)
    # Used twice: needed by the first use, ready with the backward of the first use.
    assert (first.name, first.need_s, first.ready_s, first.size_bytes) == ("a.w", 0.0, 13.5, 40)


@pytest.mark.parametrize("name", REPLAY_NAMES)
@pytest.mark.parametrize("dilation", [0.1, 1.0, 10.0])
def test_merging_keeps_sums_and_leaves_no_short_sleep(name: str, dilation: float) -> None:
    layers = layers_from_architecture(ARCHITECTURES[name]())
    merged = merge_short_layers(layers, dilation)
    assert [layer.name for layer in merged] == [layer.name for layer in layers]
    for key in ("forward_s", "backward_s"):
        total = sum(getattr(layer, key) for layer in layers)
        assert sum(getattr(layer, key) for layer in merged) == pytest.approx(total)
    sleeps = [s for layer in merged for s in (layer.forward_s, layer.backward_s) if s > 0.0]
    # The forward of a whole model may be shorter than a sleep can be.
    least_s = min(MINIMUM_SLEEP_S, dilation * sum(layer.forward_s for layer in layers))
    assert min(sleeps) * dilation >= least_s * (1.0 - 1e-9)


@pytest.mark.parametrize("name", REPLAY_NAMES)
def test_batch_time_is_distributed_by_operations(name: str) -> None:
    architecture = ARCHITECTURES[name]()
    layers = layers_from_architecture(architecture, batch_time_s=3.0)
    forward_s = 1.5 if name == "llama_1b_lora" else 1.0
    assert sum(layer.forward_s for layer in layers) == pytest.approx(forward_s)
    assert sum(layer.backward_s for layer in layers) == pytest.approx(3.0 - forward_s)
    assert min(layer.forward_s for layer in layers) > 0.0
    heaviest = max(architecture.layers, key=lambda layer: layer.operations)
    assert max(layers, key=lambda layer: layer.forward_s).name == heaviest.name


def test_profile_gives_times_and_tensors(tmp_path: Path) -> None:
    embed, body, head = layers_from_profile(small_profile(tmp_path))
    assert (embed.name, body.name, head.name) == ("embed", "body.0", "head")
    assert [parameter.name for parameter in head.parameters] == ["head.weight", "head.bias"]
    assert [layer.backward_s for layer in (head, body, embed)] == pytest.approx([0.2, 0.3, 0.1])
    assert sum(layer.forward_s for layer in (head, body, embed)) == pytest.approx(0.4)
    scaled = layers_from_profile(small_profile(tmp_path), batch_time_s=2.0)
    assert scaled[1].backward_s == pytest.approx(0.6)


def test_a_profile_of_gradlanes_own_becomes_layers(tmp_path: Path) -> None:
    recorded = Profile(
        "three",
        8,
        forward_s=0.4,
        compute_s=1.0,
        tensors=(
            ProfileTensor("head.weight", (3, 2), "f32", 0.3, 0.6),
            ProfileTensor("embed", (5,), "f32", 0.1, 0.9),
            ProfileTensor("body.0.weight", (2, 2), "f32", 0.15, 0.8),
            ProfileTensor("body.0.bias", (2,), "f32", 0.16, 0.7),
        ),
    )
    path = tmp_path / "own.json"
    recorded.save(path)
    embed, body, head = layers_from_profile(path)
    assert (embed.name, body.name, head.name) == ("embed", "body.0", "head")
    assert [one.name for one in body.parameters] == ["body.0.weight", "body.0.bias"]
    assert [one.name for one in embed.parameters] == ["embed.weight"]
    assert [one.forward_s for one in (embed, body, head)] == pytest.approx([0.15, 0.15, 0.1])
    # What follows the last gradient goes by before the next forward.
    assert [one.backward_s for one in (head, body, embed)] == pytest.approx([0.2, 0.2, 0.2])
    assert layers_from_profile(path, batch_time_s=2.0)[1].backward_s == pytest.approx(0.4)


def test_a_broken_profile_of_gradlanes_own_names_the_field(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text('{"format": "gradlane-profile", "version": 1, "model": "m", "batch_size": 0}')
    with pytest.raises(ValueError, match=r"own\.json: forward_s: missing"):
        layers_from_profile(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"batch_time_s": "fast"}, "batch_time_s"),
        ({"backward_time_s": 2.0}, "backward_time_s"),
        ({"params": []}, "params"),
        ({"params": [{"name": "a.w", "shape": [2], "numel": 3, "grad_ready_s": 0}]}, "numel 3"),
        ({"params": [{"name": "a.w", "shape": "x", "grad_ready_s": 0}]}, "shape of 'a.w'"),
        ({"params": [{"name": "a.w", "shape": [2]}]}, "grad_ready_s"),
        ({"params": [{"name": "a.w", "shape": [2], "grad_ready_s": 0.1}] * 2}, "repeated"),
        ({"params": ["a.w"]}, "object"),
    ],
)
def test_malformed_profiles_name_the_field(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        layers_from_profile(small_profile(tmp_path, **fields))


# The pacing clock


def test_overshoot_is_forgiven() -> None:
    fake = FakeTime(overshoot_s=0.1)
    clock = fake.clock()
    for _ in range(50):
        clock.begin(1.0)
        clock.finish()
    assert fake.now_s == pytest.approx(150.1)
    assert clock.wall_lag_s == pytest.approx(0.1)
    assert clock.overruns == 0


def test_gaps_count_in_full() -> None:
    fake = FakeTime(overshoot_s=0.1)
    clock = fake.clock()
    for _ in range(10):
        clock.begin(1.0)
        clock.finish()
        fake.now_s += 0.5
    assert fake.now_s == pytest.approx(115.1)


def test_work_inside_an_operation_is_hidden_and_overruns_are_seen() -> None:
    fake = FakeTime()
    clock = fake.clock(dilation=2.0)
    clock.begin(1.0)
    fake.now_s += 1.5
    assert clock.remaining_s() == pytest.approx(0.5)
    clock.finish()
    assert fake.now_s == pytest.approx(102.0)
    clock.begin(1.0)
    fake.now_s += 2.5
    clock.finish()
    assert clock.overruns == 1
    assert clock.wall_lag_s == pytest.approx(0.5)
    clock.begin(1.0)
    clock.finish()
    assert fake.now_s == pytest.approx(106.0)


def test_disabled_clock_never_sleeps() -> None:
    clock = PacingClock(enabled=False, sleep=lambda _: pytest.fail("slept"))
    clock.begin(1000.0)
    clock.finish()
    assert clock.remaining_s() == 0.0


@pytest.mark.parametrize("dilation", [0.0, -1.0, math.nan])
def test_dilation_must_be_positive(dilation: float) -> None:
    with pytest.raises(ValueError, match="dilation"):
        PacingClock(dilation)


# Gradients


@given(st.integers(0, 2**40), st.integers(0, 5), st.integers(0, 7), st.integers(0, 10**6))
def test_scale_is_in_range_and_exact(seed: int, tensor: int, rank: int, step: int) -> None:
    pattern = GradientPattern.__new__(GradientPattern)
    pattern.seed = seed
    shift, scale = pattern.shift_and_scale(tensor, rank, step)
    assert 0 <= shift < PATTERN_ELEMENTS
    assert 0.5 <= scale < 1.5
    assert float(scale) * 2**24 == int(float(scale) * 2**24)


def test_gradients_differ_by_rank_step_tensor_and_seed() -> None:
    def first(seed: int, tensor: int, rank: int, step: int) -> bytes:
        return GradientPattern(seed).gradient(tensor, rank, step, 8).tobytes()

    base = first(1, 2, 3, 4)
    assert base == first(1, 2, 3, 4)
    others = {first(0, 2, 3, 4), first(1, 0, 3, 4), first(1, 2, 0, 4), first(1, 2, 3, 0)}
    assert len(others | {base}) == 5


def test_mean_is_the_rank_order_sum_divided() -> None:
    pattern = GradientPattern(3)
    parts = [pattern.gradient(1, rank, 9, 1000) for rank in range(4)]
    expected = (((parts[0] + parts[1]) + parts[2]) + parts[3]) / np.float32(4)
    found = pattern.mean_gradient(1, 9, 4, 1000)
    assert found.dtype == np.float32
    assert found.tobytes() == expected.astype(np.float32).tobytes()
    backwards = (((parts[3] + parts[2]) + parts[1]) + parts[0]) / np.float32(4)
    assert found.tobytes() != backwards.astype(np.float32).tobytes()


# Replay workloads


def test_backward_yields_the_expected_gradients_to_the_bit(tmp_path: Path) -> None:
    workload = small_replay(tmp_path, rank=2, world_size=4, seed=5)
    on_fake_time(workload)
    for step in (0, 7):
        train_step(workload, workload.model, step)
        for index, parameter in enumerate(workload.model.parameters()):
            assert parameter.grad is not None
            expected = workload.own_gradient(index, step)
            assert parameter.grad.numpy().tobytes() == expected.tobytes()
            parameter.grad = None


def test_expected_gradient_is_the_mean_of_what_ranks_produce(tmp_path: Path) -> None:
    ranks = [small_replay(tmp_path, rank=rank, world_size=3) for rank in range(3)]
    for workload in ranks:
        on_fake_time(workload)
        train_step(workload, workload.model, 1)
    for index, parameters in enumerate(
        zip(*(workload.model.parameters() for workload in ranks), strict=True)
    ):
        total = parameters[0].grad.numpy().copy()
        for parameter in parameters[1:]:
            total += parameter.grad.numpy()
        mean = (total / np.float32(3)).reshape(-1)
        assert mean.tobytes() == ranks[0].expected_gradient(index, 1).tobytes()


def test_initial_parameters_depend_on_the_seed_only(tmp_path: Path) -> None:
    def parameters(rank: int, seed: int) -> bytes:
        workload = small_replay(tmp_path, rank=rank, world_size=2, seed=seed)
        return b"".join(p.detach().numpy().tobytes() for p in workload.model.parameters())

    assert parameters(0, 1) == parameters(1, 1)
    assert parameters(0, 1) != parameters(0, 2)


def test_model_has_the_architectures_names_and_order() -> None:
    workload = build(WorkloadSpec("resnet50"), 0, 1)
    expected = [(parameter.name, parameter.shape) for parameter in resnet50().parameters]
    found = [(name, tuple(p.shape)) for name, p in workload.model.named_parameters()]
    assert found == expected
    assert [timing.name for timing in workload.timings] == [name for name, _ in expected]
    assert workload.compute_s == pytest.approx(0.30)
    assert workload.batch_size == 32


@pytest.mark.parametrize("overshoot_s", [0.0, 0.0001])
def test_step_takes_its_nominal_time_and_gradients_come_when_stated(
    tmp_path: Path, overshoot_s: float
) -> None:
    workload = small_replay(tmp_path, dilation=3.0)
    fake = on_fake_time(workload, overshoot_s)
    start_s = fake.now_s
    seen: dict[str, float] = {}
    needed: dict[str, float] = {}
    for name, parameter in workload.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, name=name: seen.update({name: fake.now_s - start_s})
        )
    for name, module in workload.model.named_modules():
        module.register_forward_pre_hook(
            lambda *_, name=name: needed.update({name: fake.now_s - start_s})
        )
    train_step(workload, workload.model, 0)
    assert fake.now_s - start_s == pytest.approx(3.0, abs=0.001)
    for timing in workload.timings:
        assert seen[timing.name] == pytest.approx(3.0 * timing.ready_s, abs=0.001)
        layer = timing.name.rpartition(".")[0]
        assert needed[layer] == pytest.approx(3.0 * timing.need_s, abs=0.001)


def test_gradients_are_handed_over_without_a_copy_and_accumulate(tmp_path: Path) -> None:
    workload = small_replay(tmp_path)
    on_fake_time(workload)
    train_step(workload, workload.model, 0)
    parameters = list(workload.model.parameters())
    layers = [m for m in workload.model.modules() if isinstance(m, SleepingLayer)]
    own = {memory.ctypes.data for layer in layers for memory in layer.memory}
    assert {p.grad.data_ptr() for p in parameters if p.grad is not None} == own
    # A second backward with the first gradients still held adds to them.
    train_step(workload, workload.model, 1)
    for index, parameter in enumerate(parameters):
        assert parameter.grad is not None
        expected = workload.own_gradient(index, 0) + workload.own_gradient(index, 1)
        assert parameter.grad.numpy().tobytes() == expected.tobytes()


def test_frozen_parameters_and_forwards_without_backward(tmp_path: Path) -> None:
    workload = small_replay(tmp_path)
    on_fake_time(workload)
    frozen = workload.model.get_parameter("head.bias").requires_grad_(False)
    workload.begin_step(0)
    workload.loss(workload.model, workload.batch(0))
    with torch.no_grad():
        workload.loss(workload.model, workload.batch(0))
    train_step(workload, workload.model, 3)
    assert frozen.grad is None
    weight = workload.model.get_parameter("body.0.weight").grad
    index = [timing.name for timing in workload.timings].index("body.0.weight")
    assert weight is not None
    assert weight.numpy().tobytes() == workload.own_gradient(index, 3).tobytes()


def test_verify_accepts_the_mean_and_names_a_wrong_tensor(tmp_path: Path) -> None:
    workload = small_replay(tmp_path, rank=1, world_size=2)
    on_fake_time(workload)
    optimizer = workload.make_optimizer(workload.model)
    for step in range(3):
        train_step(workload, workload.model, step)
        for index, parameter in enumerate(workload.model.parameters()):
            mean = workload.expected_gradient(index, step).reshape(parameter.shape)
            parameter.grad = torch.from_numpy(mean.copy())
        optimizer.step()
        optimizer.zero_grad()
    assert workload.verify(workload.model, 3) == []
    assert len(workload.verify(workload.model, 2)) == len(workload.timings)
    weight = workload.model.get_parameter("body.0.weight")
    with torch.no_grad():
        weight.view(-1)[-1] += 1e-6
    assert workload.verify(workload.model, 3, exact=False) == []
    (line,) = workload.verify(workload.model, 3)
    assert "'body.0.weight': element 599999" in line


def test_replay_optimizer_updates_a_sample_and_skips_absent_gradients() -> None:
    present, absent = nn.Parameter(torch.zeros(1000)), nn.Parameter(torch.zeros(10))
    from gradlane.lab.workloads.replay import ReplayOptimizer
    from gradlane.lab.workloads.replay_model import updated_elements

    optimizer = ReplayOptimizer([present, absent], lr=0.5)
    present.grad = torch.ones(1000)
    optimizer.step()
    changed = np.flatnonzero(present.detach().numpy())
    assert changed.tolist() == updated_elements(1000).tolist()
    assert 64 <= len(changed) <= 128
    assert changed[-1] == 999
    assert present.detach()[-1] == -0.5
    assert not absent.detach().any()
    with pytest.raises(ValueError, match="learning rate"):
        ReplayOptimizer([present], lr=-1.0)


# Workloads that compute for real


@pytest.mark.parametrize("name", REAL_NAMES)
def test_pacing_changes_no_bit(name: str) -> None:
    plain = build(WorkloadSpec(name, paced=False), 0, 2)
    paced = build(WorkloadSpec(name), 0, 2)
    fake = on_fake_time(paced)
    optimizers = [w.make_optimizer(w.model) for w in (plain, paced)]
    for step in range(3):
        losses = [train_step(w, w.model, step) for w in (plain, paced)]
        assert torch.equal(losses[0], losses[1])
        for first, second in zip(plain.model.parameters(), paced.model.parameters(), strict=True):
            assert first.grad is not None and second.grad is not None
            assert torch.equal(first.grad, second.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert fake.now_s - 100.0 == pytest.approx(3 * paced.compute_s)


@pytest.mark.parametrize("name", REAL_NAMES)
def test_paced_gradients_come_when_stated(name: str) -> None:
    workload = build(WorkloadSpec(name, dilation=2.0, batch_time_s=0.5), 0, 1)
    assert workload.compute_s == pytest.approx(0.5)
    fake = on_fake_time(workload)
    seen: dict[str, float] = {}
    for key, parameter in workload.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, key=key: seen.update({key: fake.now_s - 100.0})
        )
    train_step(workload, workload.model, 0)
    assert seen == pytest.approx({t.name: 2.0 * t.ready_s for t in workload.timings})


@pytest.mark.parametrize("name", REAL_NAMES)
def test_models_are_equal_on_all_ranks_and_data_are_not(name: str) -> None:
    other = build(WorkloadSpec(name, paced=False), 1, 2)
    mine = build(WorkloadSpec(name, paced=False), 0, 2)
    for first, second in zip(mine.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(first, second)
    again = build(WorkloadSpec(name, paced=False), 0, 2)
    for step in (0, 50):
        assert torch.equal(mine.batch(step)[0], again.batch(step)[0])
        assert not torch.equal(mine.batch(step)[0], other.batch(step)[0])
    assert not torch.equal(mine.batch(0)[0], mine.batch(1)[0])
    assert torch.equal(mine.held_out()[0][0], other.held_out()[0][0])  # type: ignore[attr-defined]


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    build(WorkloadSpec("digits-cnn"), 0, 1)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "steps"), [("digits-cnn", 100), ("char-transformer", 60)])
def test_real_workloads_learn(name: str, steps: int) -> None:
    workload = build(WorkloadSpec(name, paced=False), 0, 1)
    assert isinstance(workload, RealWorkload)
    optimizer = workload.make_optimizer(workload.model)
    before = workload.evaluate(workload.model)
    for step in range(steps):
        train_step(workload, workload.model, step)
        optimizer.step()
        optimizer.zero_grad()
    after = workload.evaluate(workload.model)
    assert after.loss < before.loss * 0.75
    assert after.accuracy > before.accuracy + 0.1


def test_digits_of_one_epoch_are_disjoint_between_ranks() -> None:
    ranks = [build(WorkloadSpec("digits-cnn", paced=False), rank, 4) for rank in range(4)]
    held_out = ranks[0].held_out()[0][0]  # type: ignore[attr-defined]
    images = torch.cat([w.batch(step)[0] for w in ranks for step in range(11)])
    assert len(images) == 1408
    # The data set holds very few equal images, so distinct rows mean disjoint samples.
    assert len(torch.unique(images.flatten(1), dim=0)) > 1400
    assert len(held_out) == 360


# Under DistributedDataParallel


def train_with_ddp(
    store: Store, rank: int, world_size: int, job: str, *, folder: str, profile: str
) -> None:
    """Train both kinds of workload on one of two ranks; save what the test compares."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=world_size)
    result: dict[str, Any] = {}
    for name, profile_path in (("resnet50", profile), ("digits-cnn", None)):
        spec = WorkloadSpec(name, dilation=0.05, profile_path=profile_path)
        workload = build(spec, rank, world_size)
        model = DistributedDataParallel(workload.model, gradient_as_bucket_view=True)
        optimizer = workload.make_optimizer(model)
        for step in range(4):
            train_step(workload, model, step)
            optimizer.step()
            optimizer.zero_grad()
        result[name] = [parameter.detach().clone() for parameter in model.parameters()]
        if isinstance(workload, ReplayWorkload):
            result["wrong"] = workload.verify(model, 4)
    torch.save(result, f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def test_both_kinds_train_under_ddp(pool: RankPool, tmp_path: Path) -> None:
    pool.run(
        "tests.lab.test_workloads:train_with_ddp",
        ranks=2,
        folder=str(tmp_path),
        profile=str(small_profile(tmp_path)),
    )
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    assert first["wrong"] == second["wrong"] == []
    for name in ("resnet50", "digits-cnn"):
        assert all(torch.equal(a, b) for a, b in zip(first[name], second[name], strict=True))


# The registry


def test_every_name_builds_with_timings_of_every_parameter() -> None:
    for name in NAMES:
        if name in REPLAY_NAMES and ARCHITECTURES[name]().numel > 70_000_000:
            continue  # Memory of the size of the model is written; the smaller ones show the same.
        workload = build(WorkloadSpec(name), 0, 2)
        named = {key: p.numel() for key, p in workload.model.named_parameters()}
        assert {timing.name: timing.numel for timing in workload.timings} == named
        end_s = workload.compute_s + 1e-9  # Sums in another order differ in the last digits.
        assert all(0.0 <= t.need_s < t.ready_s <= end_s for t in workload.timings)
        assert workload.replays == (name in REPLAY_NAMES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "alexnet2"}, "unknown workload 'alexnet2'"),
        ({"name": "llama_1b"}, "'llama_1b' is too large to be replayed"),
        ({"rank": 2}, "rank 2"),
        ({"dilation": 0.0}, "dilation"),
        ({"batch_time_s": -1.0}, "batch time"),
        ({"name": "digits-cnn", "batch_time_s": 0.0}, "batch time"),
        ({"name": "digits-cnn", "profile_path": "x.json"}, "takes no profile"),
        ({"name": "digits-cnn", "world_size": 64}, "64 ranks"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    spec: dict[str, Any] = {"name": "sockeye", **arguments}
    rank, world_size = spec.pop("rank", 0), spec.pop("world_size", 2)
    with pytest.raises(ValueError, match=message):
        build(WorkloadSpec(**spec), rank, world_size)
