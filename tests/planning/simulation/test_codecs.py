"""Codecs in simulations: encoded sizes, the host's costs, rows that name them, and plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.lab.workloads import codec_error
from gradlane.lab.workloads.codec_error import largest_error, mean_error
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.simulation.codec_costs import (
    USUAL_COSTS,
    CodecCost,
    codecs_in,
    cost_of,
    measure_cost,
    wire_bytes,
)
from gradlane.planning.simulation.costs import CostsError, MachineCosts, read_costs
from gradlane.planning.simulation.grid import clusters_of, evaluate
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, scenario_of
from gradlane.training.options.codec_choice import codec_rules
from gradlane.training.options.codec_options import CodecOptions
from gradlane.training.options.options import Options
from gradlane.training.plans.plan import PlanError, parse_plan, read_plan
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.command_line import run

SMALL = Profile(
    "small",
    16,
    0.1,
    0.3,
    (
        *(
            ProfileTensor(f"layer{i}.weight", (250, 1000), "f32", 0.02 * i, 0.3 - 0.03 * i)
            for i in range(5)
        ),
        ProfileTensor("layer4.bias", (250,), "f32", 0.08, 0.18),
    ),
)
SLOW = ClusterFacts(workers=4, rate_bps=1e8)
FAST = ClusterFacts(workers=4, rate_bps=1e11)


@pytest.mark.parametrize(
    ("codec", "compression", "sent"), [("onebit", 1.0, 1.0), ("f16", 2.0, 0.5)]
)
@pytest.mark.parametrize("strategy", ["sfb", "adam"])
def test_factors_are_only_rounded(
    strategy: str, codec: str, compression: float, sent: float
) -> None:
    """A codec that leaves factors alone compresses nothing of a network that has only these."""
    weight = ProfileTensor("fc.weight", (2000, 1000), "f32", 0.0, 0.01, "Linear")
    cluster = Cluster(workers=4, rate_bps=1e8, strategy=strategy)
    profile = Profile("one layer", 32, 0.005, 0.015, (weight,))
    raw, coded = evaluate(profile, [cluster, replace(cluster, codec=codec)])
    assert (raw.compression, coded.compression) == (1.0, compression)
    if strategy == "sfb":
        assert raw.tx_bytes_per_step and coded.tx_bytes_per_step
        assert coded.tx_bytes_per_step / raw.tx_bytes_per_step == pytest.approx(sent, rel=0.01)
        assert coded.step_s < raw.step_s if sent < 1.0 else coded.step_s == raw.step_s


def test_rows_name_their_codec_and_take_fewer_bytes() -> None:
    clusters = clusters_of(
        Grid(
            workers=[4],
            rates_bps=[1e7],
            strategies=["p3"],
            codecs=["raw", "qsgd:bits=8", "*.bias=raw;*=qsgd:bits=4"],
        ),
        Cluster(workers=1, rate_bps=0.0),
    )
    raw, eight, four = evaluate(SMALL, clusters)
    assert [row.codec for row in (raw, eight, four)] == [
        "raw",
        "qsgd:bits=8",
        "*.bias=raw;*=qsgd:bits=4",
    ]
    # A scale of four bytes for 512 values.
    assert (raw.compression, eight.compression, four.compression) == (1.0, 3.97, 7.87)
    assert raw.bound_step_s / eight.bound_step_s == pytest.approx(3.97, rel=0.06)
    assert raw.step_s / eight.step_s > 3.0
    assert four.step_s < eight.step_s


def sent_mib(model: str, codec: Any) -> float:
    """Return the encoded gradient of a model in MiB."""
    profile = synthetic_profile(model)
    return sum(wire_bytes(profile, codecs_in(profile, codec_rules(codec)))) / 2**20


def test_dgc_sends_a_600th_of_resnet_50() -> None:
    """Every layer is sparse: what is left in full precision would be most of the bytes."""
    dense = synthetic_profile("resnet50").size_bytes / 2**20
    assert 600 < dense / sent_mib("resnet50", "dgc") < 690
    # Of a quantizer, less than 1 % of all parameters stay as they are: that alone is 1 / 108.
    assert dense / sent_mib("resnet50", "onebit:bucket=64") < 32


VECTORS = {"*.bias": "raw", "*bn*": "raw", "*downsample.1.*": "raw"}
"""Biases and norms by torchvision's names."""


@pytest.mark.parametrize(("model", "mib"), [("resnet50", 0.35), ("alexnet", 0.39)])
def test_the_papers_sizes_are_those_of_matrices_alone(model: str, mib: float) -> None:
    """Table 3 of Lin et al. 2018, 277 and 597 times fewer bytes: vectors stay as they are."""
    assert sent_mib(model, {**VECTORS, "*": "dgc"}) == pytest.approx(mib, rel=0.03)


def test_gradients_wait_for_their_norm_where_dgc_clips() -> None:
    scenario = scenario_of(SMALL, Cluster(4, 1e7, codec="dgc:clip=1"))
    ready = {tensor["ready_s"] for tensor in scenario["profile"]["tensors"]}
    assert ready == {max(tensor.ready_s for tensor in SMALL.tensors)}


def test_a_ring_encodes_at_each_hop_or_adds_codes() -> None:
    clusters = clusters_of(
        Grid(
            workers=[4],
            rates_bps=[1e7],
            strategies=["ring"],
            codecs=["raw", "qsgd:bits=8", "qsgd:bits=8,ring=integer"],
        ),
        Cluster(workers=1, rate_bps=0.0),
    )
    raw, hops, codes = evaluate(SMALL, clusters)
    # Sums of four codes of eight bits take ten, and scales go round once more.
    assert (raw.compression, hops.compression, codes.compression) == (1.0, 3.97, 3.17)
    assert raw.step_s > 3.0 * hops.step_s > 3.0 * hops.bound_step_s
    assert hops.step_s < codes.step_s < raw.step_s / 2.5
    with pytest.raises(ValueError, match="momentum"):
        scenario_of(SMALL, Cluster(4, 1e7, "ring", codec="dgc"))


def test_a_ring_declines_to_encode_where_the_network_is_not_the_limit() -> None:
    settings = Settings(strategy="ring", codec="qsgd:bits=8,ring=integer")
    slow = Coordinator(SMALL, SLOW, base=settings).plan()
    assert slow.settings.codec == settings.codec
    assert {tensor.scheme for tensor in slow.tensors} == {"ring"}
    fast = Coordinator(SMALL, FAST, base=settings).plan()
    assert fast.settings.codec == "raw"


def test_costs_of_codecs_are_charged() -> None:
    cluster = Cluster(workers=4, rate_bps=1e8, codec="qsgd:bits=8")
    costs = scenario_of(SMALL, cluster)["costs"]
    assert costs["encode_byte_s"] == pytest.approx(USUAL_COSTS["qsgd"].encode_byte_s)
    text = "qsgd:bits=8,bucket=512,norm=max,levels=sign"
    measured = MachineCosts(codecs={text: (3e-9, 4e-9)})
    costs = scenario_of(SMALL, Cluster(4, 1e8, codec="qsgd:bits=8", costs=measured))["costs"]
    assert costs["encode_byte_s"] == pytest.approx(3e-9)
    assert costs["decode_byte_s"] == pytest.approx(4e-9)
    free = scenario_of(SMALL, Cluster(4, 1e8, codec="qsgd:bits=8", free_host=True))["costs"]
    assert free["encode_byte_s"] == 0.0
    assert "codecs" not in scenario_of(SMALL, Cluster(4, 1e8))
    with pytest.raises(ValueError, match="--compression"):
        scenario_of(SMALL, Cluster(4, 1e8, "ring-fused", codec="f16"))
    other = {"qsgd:bits=2,bucket=128,norm=max,levels=sign": CodecCost(1.0, 2.0)}
    assert cost_of(text, other) == CodecCost(1.0, 2.0), "the nearest that is known"


def test_a_codec_can_be_measured() -> None:
    for codec in ("f16", "qsgd:bits=4", "topk:ratio=0.01"):
        cost = measure_cost(codec)
        assert 0.0 < cost.encode_byte_s < 1e-6
        assert 0.0 < cost.decode_byte_s < 1e-6


def test_costs_files_hold_codecs(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    content = {
        "format": "gradlane-costs",
        "version": 1,
        "constants": {"wake_s": {"value": 1e-5}},
        "codecs": {"f16": {"encode_byte_s": 1e-10, "decode_byte_s": 2e-10}},
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    assert read_costs(path).codecs == {"f16": (1e-10, 2e-10)}
    content["codecs"] = {"f16": {"encode_byte_s": -1}}
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CostsError, match=r"codecs\.f16\.encode_byte_s"):
        read_costs(path)


def test_a_plan_encodes_where_the_network_is_the_limit(tmp_path: Path) -> None:
    plan = Coordinator(SMALL, SLOW, base=Settings(codec="qsgd:bits=8")).plan()
    assert plan.settings.codec == "qsgd:bits=8"
    choice = next(one for one in plan.choices if one["setting"] == "codec")
    assert "faster than full precision" in choice["reason"]
    codecs = {tensor.name: (tensor.codec, tensor.reason) for tensor in plan.tensors}
    assert codecs["layer0.weight"][0].startswith("qsgd:bits=8")
    assert codecs["layer4.bias"][0] == "raw"
    assert "99 %" in codecs["layer4.bias"][1]
    path = tmp_path / "plan.json"
    plan.save(path)
    again = read_plan(path)
    assert again.digest == plan.digest
    assert again.settings.applied_to(Options()).codec == "qsgd:bits=8"
    text = path.read_text(encoding="utf-8").replace("qsgd:bits=8,bucket", "qsgd:bits=7,bucket")
    with pytest.raises(PlanError, match="bits"):
        parse_plan(text, "a plan")


def test_a_plan_declines_to_encode_where_the_network_is_not_the_limit() -> None:
    asked = Settings(codec="qsgd:bits=8")
    plan = Coordinator(SMALL, FAST, base=asked).plan()
    assert plan.settings.codec == "raw"
    assert plan.settings.applied_to(Options.of(codec="qsgd:bits=8")).codec == "raw"
    choice = next(one for one in plan.choices if one["setting"] == "codec")
    assert choice["reason"].startswith("declined: communication is not the limit")
    assert {tensor.codec for tensor in plan.tensors} == {"raw"}


def test_without_a_codec_plans_are_what_they_were() -> None:
    plan = Coordinator(SMALL, FAST).plan()
    assert plan.settings.codec is None and "codec" not in plan.settings.to_json()
    assert plan.settings.applied_to(Options.of(codec="f16")).codec == "f16"
    assert Settings.of(Options(codec=(("a*", "f16"), ("*", "raw")))).codec == "a*=f16;*=raw"


def test_the_commands_take_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    options = "--workers 2 --rate 1gbit --strategy p3 --codec raw --codec qsgd:bits=4 --json"
    arguments = ["whatif", "resnet50", *options.split(), str(path)]
    status, _, errors = run(monkeypatch, capsys, *arguments)
    assert status == 0, errors
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert [row["codec"] for row in rows] == ["raw", "qsgd:bits=4"]
    assert rows[1]["step_s"] < rows[0]["step_s"]
    status, output, errors = run(monkeypatch, capsys, "whatif", "resnet50", "--codec", "zip")
    assert status != 0 and "no codec is named" in output + errors


def test_errors_of_codecs_are_bounded_where_they_can_be(monkeypatch: Any) -> None:
    assert largest_error("raw") == 0.0
    four = largest_error("qsgd:bits=4,bucket=512,norm=max,levels=sign")
    assert four == pytest.approx(1 / 7)
    assert mean_error("bf16", 3.0) == pytest.approx(2 * 3 * 2**-8, rel=0.01)
    assert largest_error("onebit:bucket=64") is None
    # Of two ranks one sends a gradient, and the other the mean.
    assert mean_error("bf16", 3.0, 2) == pytest.approx(1.5 * 3 * 2**-8, rel=0.01)
    assert mean_error("qsgd:bits=4,bucket=512,norm=max,levels=sign,ring=integer", 3.0, 5) == (
        pytest.approx(3 / 7)
    )
    with pytest.raises(ValueError, match='named "zip"'):
        largest_error("zip")
    # A codec that is new, and not in this file yet.
    monkeypatch.setattr(codec_error, "parse_codec", lambda _: CodecOptions())
    with pytest.raises(ValueError, match=r"codec_error\.py"):
        largest_error("new")
