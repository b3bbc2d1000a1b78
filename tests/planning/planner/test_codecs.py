"""Plans of sessions with a codec: never slower than without it, and with sizes of their own."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from gradlane.cli.plan import print_plan
from gradlane.planning.planner.candidates import TIE
from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.planner.reasons import reason_of
from gradlane.planning.planner.search import search
from gradlane.planning.planner.simulations import predict_step_s
from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.training.options.codec_options import RAW
from gradlane.training.plans.settings import ClusterFacts, Settings
from tests.built import needs_core

pytestmark = needs_core
EIGHT = "qsgd:bits=8"


def wide(compute_s: float) -> Profile:
    """Return four layers of a million elements each."""
    third_s = compute_s / 3
    tensors = tuple(
        ProfileTensor(
            f"layer{i}.weight", (1000, 1000), "f32", third_s * i / 4, 2 * third_s - i / 1e3
        )
        for i in range(4)
    )
    return Profile("wide", 16, third_s, 2 * third_s, tensors)


WIDE = wide(0.012)


@pytest.mark.parametrize("strategy", ["p3", "ring"])
@pytest.mark.parametrize("codec", [EIGHT, "onebit:bucket=64", "topk:ratio=0.01"])
def test_a_codec_is_never_slower_than_full_precision(strategy: str, codec: str) -> None:
    """From a link that is everything to one that does not matter."""
    chosen = set()
    for rate_bps, profile in ((1e8, WIDE), (1e10, WIDE), (1e11, wide(1.2))):
        facts = ClusterFacts(4, rate_bps)
        plain = search(profile, facts, Settings(strategy=strategy))
        found = search(profile, facts, Settings(strategy=strategy, codec=codec))
        assert plain is not None and found is not None
        assert found.step_s <= plain.step_s
        encoded = found.settings.codec != RAW
        chosen.add(encoded)
        if encoded:
            assert found.step_s < plain.step_s * (1.0 - TIE)
        else:
            assert found.step_s == plain.step_s
        assert found.step_s == predict_step_s(profile, facts, found.settings)
        row = found.choices[-1]
        assert row.setting == "codec" and (row.value == RAW) is not encoded
        assert row.base_step_s == plain.step_s
        assert reason_of(row).startswith("declined") is not encoded
    assert chosen == {True, False}


def test_a_declined_codec_is_named_for_every_tensor() -> None:
    fast = Coordinator(wide(1.2), ClusterFacts(4, 1e11), base=Settings(codec=EIGHT))
    plan = fast.plan(budget_s=60.0)
    assert plan.settings.codec == RAW
    assert all(f"codec: {EIGHT} is declined" in tensor.reason for tensor in plan.tensors)


def test_raw_and_encoded_steps_stand_in_columns_of_their_own() -> None:
    coordinator = Coordinator(WIDE, ClusterFacts(4, 1e8), base=Settings(codec=EIGHT))
    plan = coordinator.plan(budget_s=60.0)
    assert plan.settings.codec == EIGHT
    steps_s = {choice["setting"]: choice["step_s"] for choice in plan.choices}
    codecs = {choice["setting"]: choice["codec"] for choice in plan.choices}
    assert codecs["strategy"] == RAW and codecs["frame_bytes"] == EIGHT == codecs["codec"]
    console = Console(file=StringIO(), width=200)
    print_plan(console, plan)
    out = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [[cell.strip() for cell in re.split("[│┃]", row)[1:]] for row in out.splitlines()]
    heading, *rows = (line for line in lines if line and line[0])
    raw, encoded = heading.index("step ms"), heading.index(f"in {EIGHT}")
    assert {row[0] for row in rows} == {*steps_s, "scheme"}
    for row in rows:
        if row[0] == "codec":
            assert row[raw] and row[encoded]
        elif row[0] in steps_s:
            filled, empty = (encoded, raw) if codecs[row[0]] == EIGHT else (raw, encoded)
            assert (row[filled], row[empty]) == (f"{1e3 * steps_s[row[0]]:.1f}", "")


def test_a_ring_gets_the_slices_that_its_codec_wants() -> None:
    """A hop costs a host as much for few bytes as for many: slices that are best in full precision
    would make the codec the slower of the two here."""
    facts = ClusterFacts(4, 1e10)
    found = search(WIDE, facts, Settings(strategy="ring", codec=EIGHT))
    assert found is not None and found.settings.codec == EIGHT
    in_force = found.settings.slice_elems_in_force
    assert in_force is not None and in_force > 16_384
    small = Settings(strategy="ring", codec=EIGHT, slice_elems=16_384)
    assert small.slice_elems == 16_384
    assert found.step_s < 0.75 * predict_step_s(WIDE, facts, small)
    slices = next(one for one in found.choices if one.setting == "slice_elems")
    assert {16_384, 32_768, 65_536} <= {one.value for one in slices.tried}


def test_a_strategy_s_own_slices_depend_on_the_codec() -> None:
    assert Settings("ring", slice_elems=65_536, codec=EIGHT) == Settings("ring", codec=EIGHT)
    assert Settings("ring", slice_elems=16_384) == Settings("ring")
    assert Settings("ring", codec=EIGHT).slice_elems_in_force == 65_536
    assert Settings("ring", codec=RAW).slice_elems_in_force == 16_384
    assert Settings("p3", codec=EIGHT).slice_elems_in_force == 50_000
