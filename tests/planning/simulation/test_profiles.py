"""Profile files: what is read comes back, what is wrong is named with its place."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.cli.options import profile_of
from gradlane.planning.simulation import profiles
from gradlane.planning.simulation.profiles import (
    ProfileError,
    find_profile,
    read_profile,
    synthetic_profile,
    write_profile,
)
from tests.paths import SHARED

OWN: dict[str, Any] = {
    "format": "gradlane-profile",
    "version": 1,
    "model": "two layers",
    "batch_size": 8,
    "forward_s": 0.1,
    "compute_s": 0.3,
    "tensors": [
        {"name": "a.weight", "shape": [3, 4], "dtype": "f32", "need_s": 0.0, "ready_s": 0.3},
        {"name": "b.weight", "shape": [], "dtype": "bf16", "need_s": 0.05, "ready_s": 0.2},
    ],
}
LOG: dict[str, Any] = {
    "model": "logged",
    "batch_size": 32,
    "batch_time_s": 0.3,
    "backward_time_s": 0.2,
    "params": [
        {"name": "b.bias", "shape": [4], "numel": 4, "grad_ready_s": 0.05},
        {"name": "b.weight", "shape": [4, 3], "numel": 12, "grad_ready_s": 0.05},
        {"name": "a.weight", "shape": [3], "numel": 3, "grad_ready_s": 0.2},
    ],
}
REFERENCE = SHARED / "data" / "profiles"


def write(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, OWN))
    assert profile.to_json() == OWN
    assert [tensor.numel for tensor in profile.tensors] == [12, 1]
    assert profile.size_bytes == 12 * 4 + 2
    copied = tmp_path / "copy.json"
    write_profile(profile, copied)
    assert read_profile(copied) == profile


def test_logs_are_imported(tmp_path: Path) -> None:
    profile = read_profile(write(tmp_path, LOG))
    assert [tensor.name for tensor in profile.tensors] == ["a.weight", "b.weight", "b.bias"]
    assert profile.forward_s == pytest.approx(0.1)
    ready = [tensor.ready_s for tensor in profile.tensors]
    assert ready == pytest.approx([0.3, 0.15, 0.15])
    # Layer `a` takes three quarters of backward, so of forward too.
    need = [tensor.need_s for tensor in profile.tensors]
    assert need == pytest.approx([0.0, 0.075, 0.075])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it.pop("version"), "version: missing"),
        (lambda it: it.update(version=2), "version: is 2"),
        (lambda it: it.update(format="other"), "format"),
        (lambda it: it.pop("compute_s"), "compute_s: missing"),
        (lambda it: it.update(forward_s=-0.1), "forward_s: must not be negative"),
        (lambda it: it.update(compute_s=float("nan")), "compute_s: must be a finite"),
        (lambda it: it.update(compute_s=10**400), "compute_s: must be a finite"),
        (lambda it: it.update(compute_s=True), "compute_s: expected seconds"),
        (lambda it: it.update(compute_s=0.05), "forward_s"),
        (lambda it: it.update(batch_size=0), "batch_size"),
        (lambda it: it.update(batch_size="8"), "batch_size"),
        (lambda it: it.update(model=""), "model"),
        (lambda it: it.update(tensors=[]), "tensors: expected a list"),
        (lambda it: it.update(tensors=[0] * 1_000_001), "tensors: has 1000001 entries"),
        (lambda it: it["tensors"].append(7), "tensors[2]: expected an object"),
        (lambda it: it["tensors"][1].pop("name"), "tensors[1].name: missing"),
        (lambda it: it["tensors"][1].update(name="a.weight"), "tensors[1].name: 'a.weight'"),
        (lambda it: it["tensors"][0].update(dtype="int8"), "tensors[0].dtype"),
        (lambda it: it["tensors"][0].update(shape=[3, -1]), "tensors[0].shape"),
        (lambda it: it["tensors"][0].update(shape=[2**40, 2**40]), "tensors[0].shape"),
        (lambda it: it["tensors"][0].update(shape=12), "tensors[0].shape"),
        (lambda it: it["tensors"][1].update(need_s=0.2), "tensors[1].need_s: 0.2 is after"),
        (lambda it: it["tensors"][1].update(ready_s=0.05), "tensors[1].ready_s: 0.05 is not"),
        (lambda it: it["tensors"][1].update(ready_s=float("inf")), "tensors[1].ready_s: must be"),
        (lambda it: it["tensors"][1].update(ready_s=None), "tensors[1].ready_s: expected"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, change: Any, named: str) -> None:
    content = copy.deepcopy(OWN)
    change(content)
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, content))
    assert named in str(caught.value)
    assert "profile.json" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda it: it.pop("batch_time_s"), "batch_time_s: missing"),
        (lambda it: it.update(backward_time_s=0.3), "backward_time_s"),
        (lambda it: it["params"][2].pop("grad_ready_s"), "params[2].grad_ready_s: missing"),
        (lambda it: it["params"][2].update(grad_ready_s=0.25), "params[2].grad_ready_s: 0.25"),
        (lambda it: it["params"][1].update(numel=13), "params[1].numel: is 13"),
        (lambda it: it["params"][1].update(name="b.bias"), "params[1].name"),
    ],
)
def test_logs_are_checked_too(tmp_path: Path, change: Any, named: str) -> None:
    content = copy.deepcopy(LOG)
    change(content)
    with pytest.raises(ProfileError) as caught:
        read_profile(write(tmp_path, content))
    assert named in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "7", '"x"', "{}", "{", "[" * 100_000, "NaN"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError):
        read_profile(path)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=6,
    ),
    st.sampled_from(["version", "forward_s", "compute_s", "tensors", "batch_size", "model"]),
)
def test_any_value_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, value: Any, field: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "profile.json"
    path.write_text(json.dumps({**OWN, field: value}), encoding="utf-8")
    try:
        profile = read_profile(path)
    except ProfileError as error:
        assert field in str(error) or "forward_s" in str(error) or "_s" in str(error)
    else:
        assert profile.compute_s > 0.0


def test_missing_files_and_models_are_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="cannot read"):
        read_profile(tmp_path)
    with pytest.raises(ProfileError, match="resnet50, vgg19"):
        find_profile("resnet51")
    with pytest.raises(ProfileError, match="batch time"):
        find_profile("resnet50", -1.0)


def test_a_file_is_read_once_where_its_batch_takes_another_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(OWN), encoding="utf-8")
    read: list[Path] = []

    def noted(one: Path) -> profiles.Profile:
        read.append(one)
        return read_profile(one)

    monkeypatch.setattr(profiles, "read_profile", noted)
    assert profile_of(str(path), 0.6).compute_s == pytest.approx(0.6)
    assert read == [path]
    with pytest.raises(ProfileError, match=r"batch time must be positive, got 0.0 s$"):
        profile_of(str(path), 0.0)


@pytest.mark.parametrize("model", ["resnet50", "vgg19", "inception_v3", "sockeye"])
def test_architectures_make_profiles(tmp_path: Path, model: str) -> None:
    profile = synthetic_profile(model, 0.6)
    assert profile.compute_s == pytest.approx(0.6)
    assert profile.forward_s == pytest.approx(0.2)
    path = tmp_path / "profile.json"
    write_profile(profile, path)
    assert find_profile(str(path)).to_scenario() == profile.to_scenario()
    assert find_profile(str(path), 1.2).compute_s == pytest.approx(1.2)


@pytest.mark.skipif(not REFERENCE.is_dir(), reason="no reference data beside this checkout")
@pytest.mark.parametrize(
    ("name", "tensors", "numel"),
    [("resnet50-v100-bs32", 161, 25_557_032), ("vgg16-v100-bs32", 58, 138_365_992)],
)
def test_the_reference_profiles_are_imported(name: str, tensors: int, numel: int) -> None:
    profile = read_profile(REFERENCE / f"{name}.json")
    assert len(profile.tensors) == tensors
    assert sum(tensor.numel for tensor in profile.tensors) == numel
    assert profile.batch_size == 32
    order = [tensor.need_s for tensor in profile.tensors]
    assert order == sorted(order)
