"""Values as JSON and back: equal and of the same type, or refused with their path."""

from __future__ import annotations

import contextlib
import decimal
import json
import math
import struct
from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.formats.serialization import strict_json
from gradlane.formats.serialization.pieces import pack, unpack
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import (
    DEPTH_MAX,
    UnstorableError,
    flatten,
    leaves,
    tensor_name,
    to_json,
    unflatten,
)

CPU = torch.device("cpu")

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**200, max_value=2**2000),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=True),
    st.text(),
    st.characters(categories=["Cs"]),
    st.binary(),
    st.sampled_from([torch.float32, torch.bfloat16, CPU, torch.Size([2, 3]), "dict", "tensor"]),
)
hashables = st.recursive(scalars, lambda parts: st.tuples(parts, parts), max_leaves=3)
tensors = st.sampled_from(
    [
        torch.arange(6.0).view(2, 3),
        torch.tensor(3, dtype=torch.int16),
        torch.ones(2, 0),
        torch.eye(2).t(),
    ]
)
values = st.recursive(
    scalars | tensors,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4),
        st.lists(parts, max_size=4).map(tuple),
        st.dictionaries(hashables, parts, max_size=4),
        st.dictionaries(st.sampled_from(["a", "a/b", "1", "~1"]) | st.just(1), parts, max_size=4),
        st.dictionaries(st.text(), parts, max_size=3).map(OrderedDict),
        st.frozensets(hashables, max_size=3),
        st.binary().map(bytearray),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal in type, order and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same((one.real, one.imag), (other.real, other.imag))
    if isinstance(one, dict):
        pairs = list(zip(one.items(), other.items(), strict=True))
        return len(one) == len(other) and all(same(mine, theirs) for mine, theirs in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        # A NaN is equal to nothing.
        return sorted(map(repr, one)) == sorted(map(repr, other))
    return bool(one == other)


@settings(max_examples=400, deadline=None)
@given(value=values)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert same(unpack(pack({"state": value}), CPU), {"state": value})


def test_a_tensor_in_several_places_comes_back_as_one() -> None:
    rate = torch.tensor(0.1)
    state = {"groups": [{"lr": rate}, {"lr": rate}, {"lr": rate.clone()}], "again": (rate,)}
    tree, stored = flatten(state)
    assert list(stored) == ["/groups/0/lr", "/groups/2/lr"]
    assert len(leaves(tree)) == 2
    found = unpack(pack(state), CPU)
    first, second, other = (group["lr"] for group in found["groups"])
    assert first is second and first is found["again"][0] and first is not other
    assert same(first, rate) and same(other, rate)


@settings(max_examples=300, deadline=None)
@given(paths=st.lists(st.lists(hashables, min_size=1, max_size=3).map(tuple), max_size=5))
def test_no_two_paths_have_the_same_name(paths: list[tuple[Any, ...]]) -> None:
    for one in paths:
        for other in paths:
            if tensor_name(one) == tensor_name(other):
                assert repr(one) == repr(other)


def test_names_are_those_that_people_expect() -> None:
    assert tensor_name(("optimizer", "state", 0, "exp_avg")) == "/optimizer/state/0/exp_avg"
    assert tensor_name(("a/b", "0", "~")) == "/a~1b/~20/~0"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, {"a": (decimal.Decimal(1),)}], r"^part\[1\]\['a'\]\[0\] is a decimal\.Decimal,"),
        ({decimal.Decimal(1): 2}, r"^part\['a key'\] is a decimal\.Decimal"),
        ({torch.ones(1): 2}, r"^part\['a key'\] is a torch\.Tensor"),
        ({5, decimal.Decimal(1)}, r"^part\['a member'\] is a decimal\.Decimal"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.quint8, r"is a torch\.dtype"),
        (lambda: 1, "is a function"),
        (range(3), "is a range"),
    ],
)
def test_others_are_refused_with_their_path(value: Any, text: str) -> None:
    with pytest.raises(UnstorableError, match=text):
        flatten({"part": value})


def test_what_has_no_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(UnstorableError, match=f"nested deeper than {DEPTH_MAX} levels"):
        flatten({"part": endless})


def test_as_deep_as_is_written_is_read() -> None:
    value: Any = 1
    for _ in range(DEPTH_MAX - 1):
        value = {"a": value}
    assert unpack(pack({"state": value}), CPU) == {"state": value}


HOSTILE = [
    "{}",
    '{"dict": [], "list": []}',
    '{"eval": "1"}',
    '{"__class__": "os.system"}',
    '{"dict": 5}',
    '{"dict": "ab"}',
    '{"dict": {"ab": 1}}',
    '{"dict": [[1]]}',
    '{"dict": [["a", 1], ["a", 2]]}',
    '{"dict": [[[1], 2]]}',
    '{"dict": [[{"tensor": ["/a", [1], "torch.float32", true]}, 2]]}',
    '{"OrderedDict": 5}',
    '{"tuple": 5}',
    '{"tuple": {"a": 1}}',
    '{"set": [[1]]}',
    '{"set": [1, 1]}',
    '{"Size": ["a"]}',
    '{"int": 5}',
    '{"int": "zz"}',
    '{"float": "00"}',
    '{"float": 1}',
    '{"complex": [1]}',
    '{"complex": ["a", "b"]}',
    '{"bytes": "*"}',
    '{"bytes": 7}',
    '{"dtype": "torch.load"}',
    '{"dtype": "__class__"}',
    '{"device": "nowhere"}',
    '{"tensor": []}',
    '{"tensor": "abcd"}',
    '{"tensor": ["/a", [-1], "torch.float32", true]}',
    '{"tensor": ["/a", [true], "torch.float32", true]}',
    '{"tensor": ["/a", 3, "torch.float32", true]}',
    '{"tensor": [5, [3], "torch.float32", true]}',
    '{"tensor": ["/a", [3], "torch.load", true]}',
    '{"tensor": ["/a", [3], ["torch.float32"], true]}',
    '{"tensor": ["/a", [3], "torch.float32", 1]}',
    '[{"tensor": ["/a", [], "torch.int8", true]}, {"tensor": ["/a", [1], "torch.int8", true]}]',
    "[" * 80 + "]" * 80,
]


@pytest.mark.parametrize("text", HOSTILE)
def test_structures_of_strangers_give_a_typed_error(text: str) -> None:
    with pytest.raises(FormatError, match=r"its (structure|tensor)"):
        leaves(strict_json.loads(text.encode()))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[NaN]",
        b"[-Infinity]",
        b"[1e999]",
        b"[" + b"9" * 5000 + b"]",
        b'{"a": 1, "a": 2}',
        b'{"a": 1} 2',
        "[1]".encode("utf-16"),
    ],
)
def test_json_that_is_none_gives_a_typed_error(content: bytes) -> None:
    with pytest.raises(FormatError, match="JSON"):
        strict_json.loads(content)


@settings(max_examples=300, deadline=None)
@given(
    value=values,
    place=st.integers(0, 10_000),
    text=st.text(alphabet='[]{}":,0-truenals\\', max_size=4),
)
def test_changed_structures_are_read_or_refused(value: Any, place: int, text: str) -> None:
    content = to_json(flatten({"state": value})[0]).decode()
    place %= len(content) + 1
    changed = content[:place] + text + content[place + len(text) :]
    with contextlib.suppress(FormatError):
        unflatten(strict_json.loads(changed.encode()), lambda leaf: leaf)


def test_numbers_that_python_writes_are_json() -> None:
    content = to_json(flatten({"state": [math.nan, math.inf, 2**64]})[0])

    def none(text: str) -> None:
        raise AssertionError(text)

    json.loads(content, parse_constant=none)
