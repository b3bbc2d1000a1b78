"""The hook for DDP with real Gloo processes: same bits everywhere, nothing lost, resumable."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradlane.ddp
from gradlane.codecs import Codec
from gradlane.ddp.layout import BucketParameter, cut_into_shards
from gradlane.ddp.parameters import BucketParameters
from gradlane.ddp.residuals import Residuals
from gradlane.lab.runs.strategy import parse_strategies, parse_strategy
from gradlane.training.options.codec_choice import smallest_encoded
from tests.built import needs_core
from tests.ddp.rank_programs import emulate, make_model, train_by_oracle
from tests.dgc_oracle import DgcOracle
from tests.training.model.pool import FirstRanks, RankPool

pytestmark = needs_core

PROGRAMS = "tests.ddp.rank_programs"
SPECS = ("qsgd:bits=8", "qsgd:bits=4,residual=on", "topk:ratio=0.05", "dgc:ratio=0.05", "bf16")


@pytest.fixture
def pool(pool: RankPool) -> FirstRanks:
    return FirstRanks(pool, 3)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_are_bit_identical_and_f32_is_the_sum_in_rank_order(
    pool: FirstRanks, world_size: int
) -> None:
    hooks: list[dict[str, object] | None] = [None]
    hooks += [{"spec": "f32", "route": route} for route in ("gather", "shards")]
    hooks += [{"spec": spec, "route": route} for spec in SPECS for route in ("gather", "shards")]
    results = pool.run(f"{PROGRAMS}:train", ranks=world_size, hooks=hooks)
    for number, options in enumerate(hooks):
        digests = {result[number]["digest"] for result in results}
        assert len(digests) == 1, f"ranks differ with {options}"
        losses = torch.tensor([result[number]["losses"] for result in results]).mean(dim=0)
        # Sparse gradients of a tiny ratio need more steps than these.
        if options is None or "ratio" not in str(options["spec"]):
            assert losses[-1] < losses[0], options
    first = [result["digest"] for result in results[0]]
    assert first[0] == first[1] == first[2], "f32 through the hook is not the rank-order mean"
    assert len(set(first[3:])) == len(first[3:]), "two codecs gave the same parameters"


def test_routes_small_tensors_and_bytes_are_as_documented(pool: FirstRanks) -> None:
    hooks = [
        {"spec": "qsgd:bits=8"},
        {"spec": "qsgd:bits=8", "route": "gather"},
        {"spec": "topk:ratio=0.01"},
        {"spec": "qsgd:bits=4", "small_elems": 0, "codecs": {"*.bias": "f16", "7.*": "f32"}},
    ]
    (eight, gathered, topk, patterns), *_ = pool.run(f"{PROGRAMS}:train", ranks=3, hooks=hooks)
    assert eight["route"] == "shards" and topk["route"] == "gather"
    elements = sum(one.numel() for one in make_model().parameters())
    # Two legs of a third of the bytes to two others, six steps; scales and f32 biases come on top.
    assert 1.0 < eight["sent_bytes"] / (6 * 4 / 3 * elements) < 1.15
    assert 1.0 < gathered["sent_bytes"] / (6 * 2 * elements) < 1.05
    assert topk["sent_bytes"] < 0.1 * gathered["sent_bytes"]
    assert eight["codecs"]["3.weight"].startswith("qsgd:bits=8")
    assert eight["codecs"]["0.bias"] == "f32", "the 99 % rule leaves small tensors alone"
    assert patterns["codecs"]["3.bias"] == "f16" and patterns["codecs"]["7.weight"] == "f32"
    assert patterns["codecs"]["0.weight"].startswith("qsgd:bits=4")


@pytest.mark.parametrize(
    ("spec", "route"),
    [("qsgd:bits=2,residual=on", "shards"), ("topk:ratio=0.02", "gather"), ("topk", "shards")],
)
def test_what_was_sent_and_what_is_kept_are_all_gradients(
    pool: FirstRanks, spec: str, route: str
) -> None:
    """Also across the new buckets that DDP makes after the first step."""
    results = pool.run(f"{PROGRAMS}:conserve", spec=spec, route=route, steps=5)
    kept = sum(result["kept"] for result in results)
    truth = sum(result["truth"] for result in results)
    assert results[0]["means"].abs().sum() > 0
    torch.testing.assert_close(results[0]["means"] + kept, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize("spec", ["qsgd:bits=2,residual=on", "topk:ratio=0.05"])
def test_a_saved_state_goes_on_with_the_same_bits(pool: FirstRanks, spec: str) -> None:
    results = pool.run(f"{PROGRAMS}:resume", ranks=2, spec=spec)
    for result in results:
        assert result["resumed"] == result["at_once"]
        assert result["step"] == 8


def test_a_gradient_that_is_no_number_is_seen_everywhere_and_forgotten(pool: FirstRanks) -> None:
    for result in pool.run(f"{PROGRAMS}:spoil"):
        assert result["finite"] == [True, False, True]


def test_bf16_gradients_and_unused_parameters_are_averaged_too(pool: FirstRanks) -> None:
    results = pool.run(f"{PROGRAMS}:halve")
    for result in results[1:]:
        assert torch.equal(result["parameters"], results[0]["parameters"])
    assert results[0]["losses"][-1] < results[0]["losses"][0]


def test_a_failure_ends_backward_with_its_text(pool: FirstRanks) -> None:
    for text in pool.run(f"{PROGRAMS}:fail", ranks=2):
        assert "no room for the bytes" in text and "step 2" in text


def _parts(*sizes: int, spec: str = "qsgd:bits=4") -> list[BucketParameter]:
    return [BucketParameter(number, numel, Codec(spec)) for number, numel in enumerate(sizes)]


@pytest.mark.parametrize("sizes", [(1,), (5, 100_000, 3), (512,) * 9, (1, 2, 3), (50_000, 50_001)])
@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_shards_cover_a_bucket_and_begin_at_granules(sizes: tuple[int, ...], shards: int) -> None:
    parts = _parts(*sizes)
    made = cut_into_shards(parts, shards)
    assert len(made) == shards
    pieces = [piece for shard in made for piece in shard.pieces]
    position = 0
    for piece in pieces:
        assert piece.begin == position and piece.numel > 0
        assert piece.first % piece.part.codec.granule == 0
        position = piece.end
    assert position == sum(sizes)
    assert [shard.begin for shard in made[1:]] == [shard.end for shard in made[:-1]]
    largest = max(shard.numel for shard in made)
    assert largest <= sum(sizes) / shards + 2 * 512


def test_what_an_owner_kept_goes_back_when_the_piece_is_anothers() -> None:
    (part,) = _parts(2_048, spec="qsgd:bits=4,residual=on")
    residuals = Residuals(world_size=2)
    own, other = cut_into_shards([part], 2)
    kept = residuals.owner_residual(own.pieces[0])
    assert kept is not None
    kept += 0.25
    residuals.release_unowned([part], own.pieces)
    assert len(residuals.owner) == 1, "a piece that stays keeps what it has"
    residuals.release_unowned([part], other.pieces)
    whole = residuals.worker_residual(cut_into_shards([part], 1)[0].pieces[0])
    assert not residuals.owner and whole is not None
    assert torch.equal(whole, torch.cat([torch.full((1_024,), 0.5), torch.zeros(1_024)]))


def test_the_99_percent_rule_leaves_out_less_than_a_hundredth() -> None:
    assert smallest_encoded([10, 10, 980, 5_000]) == 980
    assert smallest_encoded([1_000]) == 1_000
    assert smallest_encoded([]) == 0
    sizes = [one.numel() for one in make_model().parameters()]
    left_out = sum(numel for numel in sizes if numel < smallest_encoded(sizes))
    assert 0 < left_out < 0.01 * sum(sizes)


def test_parameters_are_encoded_in_the_order_of_their_storage() -> None:
    weight = nn.Parameter(torch.zeros(4, 3, 5, 5).to(memory_format=torch.channels_last))
    parameters = BucketParameters("qsgd", names=[("w", weight)], overrides={}, small_elems=0)
    assert parameters.names == ["w"]
    from gradlane.ddp.parameters import storage_sizes

    assert storage_sizes(weight) == [4, 5, 5, 3]


def test_arguments_are_checked_before_anything_is_joined() -> None:
    with pytest.raises(ValueError, match="no route 'ring'"):
        gradlane.ddp.ddp_hook(route="ring")
    with pytest.raises(ValueError, match="no codec is named"):
        gradlane.ddp.ddp_hook("zip")
    with pytest.raises(ValueError, match="need the model"):
        gradlane.ddp.ddp_hook(codecs={"*": "f32"})
    with pytest.raises(ValueError, match="say it once"):
        gradlane.ddp.ddp_hook("qsgd:residual=off", error_feedback=True)
    with pytest.raises(RuntimeError, match="init_process_group"):
        gradlane.ddp.ddp_hook()


def test_momentum_is_applied_once(pool: FirstRanks) -> None:
    for said in pool.run(f"{PROGRAMS}:train_with_momentum", ranks=2):
        first, sgd, adamw, other, cycled, closed = said
        assert not first and not other and not closed
        assert "group 0 of the optimizer (SGD), which has momentum=0.9, with codec 'dgc:" in sgd
        assert (
            "group 0 of the optimizer (AdamW), which has betas=(0.9, 0.999), with codec 'dgc:"
            in adamw
        )
        assert "group 0 of the optimizer (SGD), which has momentum=0.95, with codec 'dgc:" in cycled


def test_dgc_is_the_papers(pool: FirstRanks) -> None:
    """All five techniques, over several buckets a step, whose norm is taken together."""
    steps = 24
    options: dict[str, Any] = {"ratio": 0.02, "momentum": 0.9, "clip": 0.4, "warmup": 8}
    spec = "dgc:" + ",".join(f"{name}={value}" for name, value in options.items())
    sizes = [one.numel() for one in make_model().parameters()]
    expected = train_by_oracle(3, DgcOracle(sizes, ranks=3, **options), steps)
    unclipped = train_by_oracle(3, DgcOracle(sizes, ranks=3, **{**options, "clip": 1e9}), steps)
    assert (expected[2] - unclipped[2]).abs().max() > 0.004, "the clip binds"
    for found in pool.run(f"{PROGRAMS}:train_by_dgc", ranks=3, spec=spec, steps=steps):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_options_of_codecs_that_mean_nothing_to_a_hook_are_refused(pool: FirstRanks) -> None:
    for spec in ("qsgd:ring=integer", "dgc:ratio=0.01,broadcast_ratio=0.02"):
        for said in pool.run(f"{PROGRAMS}:refusal_of", ranks=2, spec=spec):
            assert "leave it out" in said and spec in said


def test_the_lab_names_hooks_of_ddp() -> None:
    text = "ddp-gloo, ddp-gloo:4+qsgd:bits=4,bucket=128, ddp-gloo+powersgd:2,ddp-gloo+fp16,p3"
    plain, codec, power, half, p3 = parse_strategies(text)
    assert [one.hook for one in (plain, power, half, p3)] == ["", "powersgd:2", "fp16", ""]
    assert (codec.hook, codec.bucket_mb) == ("qsgd:bits=4,bucket=128", 4)
    assert plain.is_baseline and not codec.is_baseline and not power.is_baseline
    for wrong in ("p3+fp16", "none+fp16", "ddp-gloo+"):
        with pytest.raises(ValueError, match=r"ddp-gloo\+fp16"):
            parse_strategy(wrong)


@pytest.mark.parametrize("world_size", [2, 3])
def test_hooks_of_the_lab_train(pool: FirstRanks, world_size: int) -> None:
    results = pool.run(
        f"{PROGRAMS}:train_in_lab",
        ranks=world_size,
        hooks=["fp16", "bfloat16", "powersgd", "qsgd:bits=8", "f32"],
    )
    for number in range(5):
        assert len({result[number] for result in results}) == 1


def test_the_studys_data_flow_is_that_of_ranks(pool: FirstRanks) -> None:
    """Workers emulated in one process get the same bits as processes that exchange shards.

    Without residuals: those of owners move when DDP makes its buckets anew.
    """
    for spec in ("qsgd:bits=2", "onebit:bucket=64,residual=off", "int8"):
        results = pool.run(f"{PROGRAMS}:train", hooks=[{"spec": spec, "route": "shards"}], steps=4)
        assert results[0][0]["digest"] == emulate(spec, workers=3, steps=4), spec
