"""Profile files of recordings: optional fields are checked like the others, old files are read."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.formats.profile import (
    ENTRIES_MAX,
    BatchTime,
    FieldReader,
    Profile,
    ProfileError,
    ProfileModule,
    ProfileTensor,
    profile_from,
)
from gradlane.planning.simulation.profiles import find_profile, read_profile

FULL: dict[str, Any] = {
    "format": "gradlane-profile",
    "version": 1,
    "model": "Net",
    "batch_size": 8,
    "forward_s": 0.1,
    "compute_s": 0.3,
    "device": "cpu",
    "batch": {"steps": 20, "median_s": 0.3, "lower_quartile_s": 0.29, "upper_quartile_s": 0.31},
    "flops": 1000,
    "tensors": [
        {
            "name": "a.weight",
            "shape": [3, 4],
            "dtype": "f32",
            "need_s": 0.0,
            "ready_s": 0.3,
            "layer": "Linear",
            "gradients": 2,
        }
    ],
    "modules": [
        {"name": "", "layer": "Net", "forwards_s": [[0.0, 0.1]], "flops": 1000},
        {"name": "a", "layer": "Linear", "forwards_s": [[0.0, 0.02], [0.05, 0.1]]},
    ],
}


def test_a_whole_profile_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(FULL), encoding="utf-8")
    profile = Profile.load(path)
    assert profile == Profile(
        "Net",
        8,
        0.1,
        0.3,
        (ProfileTensor("a.weight", (3, 4), "f32", 0.0, 0.3, "Linear", 2),),
        "cpu",
        BatchTime(20, 0.3, 0.29, 0.31),
        1000,
        (
            ProfileModule("", "Net", ((0.0, 0.1),), 1000),
            ProfileModule("a", "Linear", ((0.0, 0.02), (0.05, 0.1))),
        ),
    )
    assert profile.to_json() == FULL
    copied = tmp_path / "copy.json"
    profile.save(copied)
    assert Profile.load(copied) == read_profile(copied) == profile
    scaled = find_profile(str(copied), 0.6)
    assert scaled.modules[1].forwards_s[1] == pytest.approx((0.1, 0.2))
    assert scaled.batch is not None and scaled.batch.upper_quartile_s == pytest.approx(0.62)
    assert scaled.flops == 1000


@pytest.mark.parametrize("field", ["device", "batch", "flops", "modules"])
def test_what_a_recording_knows_is_optional(field: str) -> None:
    content = copy.deepcopy(FULL)
    del content[field]
    del content["tensors"][0]["layer"], content["tensors"][0]["gradients"]
    assert profile_from(content, FieldReader("x")).to_json() == content


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it.pop("format"), "format: missing"),
        (lambda it: it.update(device=3), "device: expected a text"),
        (lambda it: it.update(batch=[]), "batch: expected an object"),
        (lambda it: it["batch"].pop("median_s"), "batch.median_s: missing"),
        (lambda it: it["batch"].update(median_s=0.5), "batch.median_s: 0.5 is not between"),
        (lambda it: it["batch"].update(lower_quartile_s=float("nan")), "batch.lower_quartile_s"),
        (lambda it: it["batch"].update(steps=0), "batch.steps: expected a positive integer"),
        (lambda it: it.update(flops=-1), "flops: expected an integer from 0"),
        (lambda it: it["tensors"][0].update(layer=""), "tensors[0].layer"),
        (lambda it: it["tensors"][0].update(gradients=-1), "tensors[0].gradients"),
        (lambda it: it.update(modules=[]), "modules: expected a list"),
        (lambda it: it["modules"].append(3), "modules[2]: expected an object"),
        (lambda it: it["modules"][1].pop("name"), "modules[1].name: missing"),
        (lambda it: it["modules"][1].update(name=""), "modules[1].name: '' occurs twice"),
        (lambda it: it["modules"][0].update(layer=None), "modules[0].layer"),
        (lambda it: it["modules"][0].update(forwards_s=[]), "modules[0].forwards_s"),
        (lambda it: it["modules"][1].update(forwards_s=[[1, 2], [3]]), "modules[1].forwards_s[1]"),
        (lambda it: it["modules"][1].update(forwards_s=[[0, "x"]]), "modules[1].forwards_s[0]"),
        (lambda it: it["modules"][1].update(forwards_s=[[0, -1]]), "modules[1].forwards_s[0]"),
        (lambda it: it["modules"][1].update(forwards_s=[[2, 1]]), "before its start"),
        (lambda it: it["modules"][1].update(flops=0.5), "modules[1].flops"),
        (
            lambda it: it.update(modules=[None] * (ENTRIES_MAX + 1)),
            "modules: has 1000001 entries; at most 1000000",
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_place(change: Any, named: str) -> None:
    content = copy.deepcopy(FULL)
    change(content)
    with pytest.raises(ProfileError) as caught:
        profile_from(content, FieldReader("some.json"))
    assert named in str(caught.value)
    assert "profile some.json: " in str(caught.value)


def test_one_wrong_tensor_of_many_is_found() -> None:
    """The work grows with the number of tensors, not faster: the last place is reached."""
    count = 20_000
    tensor = {"shape": [2], "dtype": "f16", "need_s": 0.0, "ready_s": 0.3}
    content = {**FULL, "tensors": [{**tensor, "name": f"t{index}"} for index in range(count)]}
    assert len(profile_from(content, FieldReader("x")).tensors) == count
    content["tensors"][-1]["ready_s"] = float("-inf")
    with pytest.raises(ProfileError, match=r"tensors\[19999\]\.ready_s: must be a finite"):
        profile_from(content, FieldReader("x"))


@given(
    st.sampled_from(["device", "batch", "flops", "modules"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "layer", "forwards_s", "steps", "median_s"]), inner
            )
        ),
        max_leaves=6,
    ),
)
def test_any_value_is_read_or_refused(field: str, value: Any) -> None:
    try:
        profile = profile_from({**FULL, field: value}, FieldReader("x"))
    except ProfileError as error:
        assert field in str(error)
    else:
        assert profile.compute_s > 0.0
