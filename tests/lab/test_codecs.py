"""Codecs in the lab: what runs, what its rows say, and what a replay under a codec still proves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategies
from gradlane.lab.workloads import WorkloadSpec, build
from gradlane.lab.workloads.replay import ReplayWorkload
from tests.lab.test_run import profile
from tests.namespaces import needs_namespaces

__all__ = ["profile"]

EIGHT = "qsgd:bits=8,bucket=512,norm=max,levels=sign"


@needs_namespaces
@pytest.mark.timeout(180)
def test_gradlanes_strategies_encode_and_ddp_does_not(profile: Path) -> None:
    """Every rank holds the same parameters, as near to the exact ones as the codec may be."""
    options = LabOptions(
        workload="resnet50",
        strategies=parse_strategies("ddp-gloo,p3,kvstore,ring"),
        workers=2,
        rates_bps=[200_000_000],
        dilation=1.0,
        steps=10,
        warmup=1,
        codec="qsgd:bits=4",
        profile_path=profile,
    )
    ddp, p3, kvstore, ring = run_lab(options)
    assert [one.codec for one in (ddp, p3, kvstore, ring)] == ["raw", *["qsgd:bits=4"] * 3]
    for one in (p3, kvstore, ring):
        assert one.params_equal
        assert one.verified_tensors == 2 * 3
        # An eighth, headers and votes.
        assert one.tx_bytes_per_step < 0.3 * ddp.tx_bytes_per_step
        assert one.bound_step_s is not None and ddp.bound_step_s is not None
        assert one.bound_step_s <= ddp.bound_step_s
    # Owners, slices and order are others: the bits are the same.
    assert p3.param_digest == kvstore.param_digest != ddp.param_digest


def replay(profile: Path) -> ReplayWorkload:
    spec = WorkloadSpec("resnet50", seed=3, profile_path=str(profile), paced=False)
    workload = build(spec, 0, 2)
    assert isinstance(workload, ReplayWorkload)
    return workload


def shifted(workload: ReplayWorkload, steps: int, off: float) -> None:
    """Make the parameters what some steps make of them, but for an error in all gradients."""
    with torch.no_grad():
        for index, parameter in enumerate(workload.model.parameters()):
            for step in range(steps):
                gradient = torch.from_numpy(workload.expected_gradient(index, step))
                parameter.sub_((gradient.view_as(parameter) + off) * 0.01)


def test_a_replay_under_a_codec_is_held_to_what_the_codec_may_be_off(
    profile: Path,
) -> None:
    codecs = [EIGHT] * 3
    for off, is_wrong in [(0.0, False), (0.05, False), (0.5, True), (float("nan"), True)]:
        workload = replay(profile)
        shifted(workload, 3, off)
        wrong = workload.verify(workload.model, 3, codecs=codecs)
        assert bool(wrong) == is_wrong, (off, wrong)
    assert "qsgd:bits=8" in wrong[0]


def test_hints_of_gradients_are_held_to_the_updates_as_a_whole(
    profile: Path,
) -> None:
    for codec in ("onebit:bucket=64", "topk:ratio=0.01"):
        right = replay(profile)
        shifted(right, 3, 0.3)
        assert right.verify(right.model, 3, codecs=[codec] * 3) == []
        turned = replay(profile)
        with torch.no_grad():
            for index, parameter in enumerate(turned.model.parameters()):
                gradient = torch.from_numpy(turned.expected_gradient(index, 0))
                parameter.add_(gradient.view_as(parameter) * 0.01)
        assert len(turned.verify(turned.model, 1, codecs=[codec] * 3)) == 3
    momentum = replay(profile)
    assert momentum.verify(momentum.model, 3, codecs=["dgc:ratio=0.01"] * 3) == []
