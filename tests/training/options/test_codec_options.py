"""Codecs as objects: their texts are those of the core, which refuses the same values."""

from __future__ import annotations

import re
from typing import Any

import pytest

import gradlane
from gradlane.codecs import F16, Bf16, Codec, CodecOptions, Dgc, Fp8, Int8, OneBit, Qsgd, TopK
from gradlane.training.options.codec_choice import codec_rules
from gradlane.training.options.codec_options import CODECS, parse_codec
from gradlane.training.options.option_fields import option_rules
from gradlane.training.options.options import Options
from tests.built import needs_core

pytestmark = needs_core

EVERY_OPTION: dict[type[CodecOptions], dict[str, Any]] = {
    Bf16: {"residual": True},
    F16: {"residual": True},
    Qsgd: {"bits": 8, "bucket": 64, "norm": "l2", "levels": "uniform", "residual": True},
    OneBit: {"bucket": "tensor", "packing": "cntk", "residual": False},
    Fp8: {"format": "e5m2", "bucket": "tensor", "residual": True},
    Int8: {"bucket": "column", "residual": True},
    TopK: {"ratio": 1e-05, "broadcast_ratio": 0.5, "bits": 2, "bucket": 4096, "residual": False},
    Dgc: {"ratio": 0.25, "broadcast_ratio": 1.0, "momentum": 0.5, "clip": 2.5, "warmup": 40},
}
"""Values that are no defaults."""
APART = {Qsgd: {"ring"}, TopK: {"decay"}}
"""Options that do not go with all of these."""


def test_there_is_an_object_for_each_codec_of_the_core() -> None:
    with pytest.raises(ValueError, match="zip") as refusal:
        Codec("zip")
    names = re.search(r"write one of ([a-z0-9, ]+), with", str(refusal.value))
    assert names is not None
    assert set(names[1].split(", ")) == {"f32", *CODECS}
    assert set(EVERY_OPTION) == set(CODECS.values())


@pytest.mark.parametrize("kind", CODECS.values(), ids=CODECS)
def test_defaults_and_options_are_those_of_the_core(kind: type[CodecOptions]) -> None:
    assert kind().text == kind.name and parse_codec(kind.name) == kind()
    with pytest.raises(ValueError, match="no option") as refusal:
        Codec(f"{kind.name}:none=1")
    options = str(refusal.value).partition("its options are ")[2].split(", ")
    # `residual=off` would switch the momentum of `dgc` off.
    assert set(options) - set(option_rules(kind)) == ({"residual"} if kind is Dgc else set())


@pytest.mark.parametrize("kind", EVERY_OPTION, ids=lambda kind: kind.name)
def test_an_object_its_text_and_the_cores_text_are_the_same_codec(kind: type[CodecOptions]) -> None:
    given = EVERY_OPTION[kind]
    every = kind(**given)
    assert set(given) | APART.get(kind, set()) == set(option_rules(kind))
    some = [kind(**{name: value}) for name, value in given.items()]
    for codec in (every, *some):
        assert parse_codec(codec.text) == codec
        # `clip` is refused by a codec by itself.
        if not (isinstance(codec, Dgc) and codec.clip):
            assert Codec(codec).spec == Codec(codec.text).spec
            assert parse_codec(Codec(codec).spec) == codec


def test_values_that_an_option_has_anyway_change_nothing() -> None:
    assert Qsgd(bits=16, bucket=8192) == Qsgd(bits=16) and Qsgd(bits=16).bucket_values == 8192
    assert TopK(ratio=0.1, broadcast_ratio=0.1) == TopK(ratio=0.1)
    assert parse_codec("qsgd:bits=1") == Qsgd(bits=1) == Qsgd(bits=1, levels="uniform")
    assert Qsgd(bits=1).levels_in_force == "uniform" and Qsgd().levels_in_force == "sign"
    assert Qsgd(bits=2, levels="optimal").text == "qsgd:bits=2,levels=optimal"
    assert parse_codec("qsgd:ring=integer") == Qsgd(ring="integer")
    assert parse_codec(" raw ") is None and parse_codec("f32") is None


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Qsgd, {"bits": 3}, "unknown Qsgd.bits 3; known are 1, 2, 4, 8, 16"),
        (Qsgd, {"bucket": 33}, "Qsgd.bucket is 33; it must be a multiple of 32 from 32 to 1048576"),
        (Qsgd, {"bucket": 1 << 21}, "Qsgd.bucket is 2097152"),
        (Qsgd, {"norm": "l1"}, "unknown Qsgd.norm 'l1'; known are max, l2"),
        (Qsgd, {"ring": "integer", "levels": "uniform"}, "use levels='sign'"),
        (Qsgd, {"ring": "integer", "levels": "optimal"}, "use levels='sign'"),
        (Qsgd, {"bits": 1, "ring": "integer", "levels": "uniform"}, "use levels='sign'"),
        (Qsgd, {"bits": 1, "levels": "sign"}, "leaves no bit for a magnitude"),
        (Qsgd, {"bits": 8, "levels": "optimal"}, "use bits=2 or bits=4"),
        (OneBit, {"bucket": "row"}, "OneBit.bucket is 'row'; it must be 'column', 'tensor' or"),
        (OneBit, {"packing": "bits"}, "known are bytes, cntk"),
        (Int8, {"bucket": 0}, "Int8.bucket is 0"),
        (Fp8, {"format": "e3m4"}, "unknown Fp8.format 'e3m4'"),
        (TopK, {"ratio": 0}, "TopK.ratio is 0; it must be above 0, at most 1"),
        (TopK, {"ratio": float("nan")}, "TopK.ratio is nan"),
        (TopK, {"broadcast_ratio": 1.5}, "TopK.broadcast_ratio is 1.5"),
        (Dgc, {"momentum": 1}, "Dgc.momentum is 1; it must be 0 or more, below 1"),
        (Dgc, {"clip": -1}, "Dgc.clip is -1; it must be 0 or more"),
        (Dgc, {"warmup": -1}, "Dgc.warmup is -1; it must be 0 or more"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name_as_the_core_refuses_it(
    kind: type[CodecOptions], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        kind(**given)
    text = f"{kind.name}:" + ",".join(f"{name}={value}" for name, value in given.items())
    with pytest.raises(ValueError, match=f"cannot have {next(reversed(given))}="):
        parse_codec(text)


def test_sessions_take_objects_where_they_take_texts() -> None:
    assert Options.of(codec=Qsgd(bits=8)) == Options.of(codec="qsgd:bits=8")
    by_pattern = {"*.bias": None, "conv*": TopK(ratio=0.01), "*": "bf16"}
    assert codec_rules(by_pattern) == codec_rules("*.bias=raw;conv*=topk:ratio=0.01;*=bf16")
    with pytest.raises(ValueError, match=r"broadcast_ratio is theirs"):
        Options.of(codec=TopK(broadcast_ratio=0.5), update="server")


def test_what_is_no_codec_is_refused_where_it_is_given() -> None:
    with pytest.raises(ValueError, match=r"no codec is named \"zip\"; write one of f32, bf16"):
        gradlane.init(codec="zip")
    with pytest.raises(ValueError, match=r"codec is 8; give a text .* gradlane\.codecs\.Qsgd"):
        gradlane.init(codec=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="codecs texts or objects"):
        gradlane.init(codec={"*": 8})  # type: ignore[dict-item]
