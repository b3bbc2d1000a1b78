"""The file format: pieces come back, and no byte is changed, missing or added unnoticed."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradlane.formats.serialization import container
from gradlane.formats.serialization.container import (
    Piece,
    VersionError,
    check_container,
    encode_container,
    read_container,
)
from gradlane.formats.serialization.pieces import assemble, pack, unpack
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.serialization.structure import DTYPES, Leaf, flatten, leaves, unflatten
from gradlane.training.checkpoints.partition import pieces_of
from tests.paths import PACKAGES

CPU = torch.device("cpu")


def written(pieces: list[Piece], **facts: Any) -> bytes:
    return b"".join(encode_container(pieces, facts))


def read(content: bytes) -> tuple[dict[str, Any], list[Piece]]:
    return read_container(io.BytesIO(content), len(content))


@pytest.mark.parametrize("name", DTYPES)
def test_pieces_of_every_dtype_come_back(name: str) -> None:
    dtype = DTYPES[name]
    data = torch.arange(8 * dtype.itemsize, dtype=torch.uint8) % 2
    values = data.view(dtype)
    content = written([Piece("a", 5, values), Piece("b", 0, values[:0])], step=4)
    facts, (first, second) = read(content)
    assert facts["step"] == 4 and (first.name, first.start) == ("a", 5)
    assert first.values.dtype is dtype and torch.equal(first.values.view(torch.uint8), data)
    assert second.values.numel() == 0 and second.values.dtype is dtype
    check_container(io.BytesIO(content), len(content))


def test_the_header_is_one_of_safetensors() -> None:
    content = written([Piece("a", 0, torch.ones(3)), Piece("b", 2, torch.ones(2))], step=1)
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header["a@0"] == {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    assert header["b@2"] == {"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}
    assert all(isinstance(value, str) for value in header["__metadata__"].values())
    assert len(content) == 8 + length + 20


CONTENT = written(
    [Piece("a", 0, torch.arange(50.0)), Piece("b", 7, torch.tensor([True, False]))], step=1
)
EXPECTED = read(CONTENT)


def is_as_expected(found: tuple[dict[str, Any], list[Piece]]) -> bool:
    facts, pieces = found
    return facts == EXPECTED[0] and all(
        (one.name, one.start) == (other.name, other.start) and torch.equal(one.values, other.values)
        for one, other in zip(pieces, EXPECTED[1], strict=True)
    )


@pytest.mark.parametrize("check", [False, True])
def test_no_changed_missing_or_added_byte_goes_unnoticed(check: bool) -> None:
    """At every place, one by one."""
    for place in range(len(CONTENT)):
        flipped = bytearray(CONTENT)
        flipped[place] ^= 1 + place % 255
        for content in (bytes(flipped), CONTENT[:place], CONTENT[:place] + b"0" + CONTENT[place:]):
            try:
                if check:
                    check_container(io.BytesIO(content), len(content))
                else:
                    found = read(content)
            except FormatError:
                continue
            # Spaces around JSON, or an escape of the same letter, say the same.
            assert check or is_as_expected(found), place


@settings(max_examples=500, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(CONTENT) - 1), st.binary(min_size=1, max_size=9)), max_size=4
    ),
    cut=st.none() | st.integers(0, len(CONTENT)),
)
def test_mutated_files_are_read_as_they_were_or_refused(
    changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    content = bytearray(CONTENT)
    for place, data in changes:
        content[place : place + len(data)] = data
    try:
        found = read(bytes(content[:cut]))
    except FormatError:
        return
    assert is_as_expected(found)


def rebuilt(change: Callable[[dict[str, Any], dict[str, Any]], None]) -> bytes:
    """A file whose header a stranger has changed, with checksums that are right again."""
    length = int.from_bytes(CONTENT[:8], "little")
    header = json.loads(CONTENT[8 : 8 + length])
    own = json.loads(header["__metadata__"]["gradlane"])
    change(header, own)
    text = json.dumps(own)
    if "__metadata__" in header:
        header["__metadata__"] = {"gradlane": text, "crc32": str(zlib.crc32(text.encode()))}
    head = json.dumps(header).encode()
    return len(head).to_bytes(8, "little") + head + CONTENT[8 + length :]


def in_row(**changes: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    return lambda header, own: own["pieces"][0].update(changes)


def in_header(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], own: dict[str, Any]) -> None:
        header[name] = value

    return change


def in_facts(name: str, value: Any) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def change(header: dict[str, Any], own: dict[str, Any]) -> None:
        own[name] = value

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any], dict[str, Any]], None], str]] = {
    "longer": (in_row(bytes=204), "different things"),
    "huge": (in_row(bytes=1 << 60), "different things"),
    "negative": (in_row(bytes=-200), "has -200 bytes"),
    "broken_element": (in_row(bytes=201), "has 201 bytes"),
    "negative_start": (in_row(start=-1), "from -1 on"),
    "text_for_size": (in_row(bytes="200"), "bad piece"),
    "true_for_start": (in_row(start=True), "bad piece"),
    "more_keys": (in_row(more=1), "bad piece"),
    "dtype": (in_row(dtype="torch.load"), "unknown dtype"),
    "checksum": (in_row(crc32=1), "the checksum of 'a' is wrong"),
    "no_rows": (in_facts("pieces", None), "no list of pieces"),
    "rows_of_numbers": (in_facts("pieces", [1]), "bad piece"),
    "fewer_rows": (in_facts("pieces", []), "different things"),
    "version": (in_facts("version", 3), "version 3"),
    "no_version": (in_facts("version", None), "version None"),
    "overlap": (
        in_header("b@7", {"dtype": "BOOL", "shape": [2], "data_offsets": [10, 12]}),
        "different things",
    ),
    "gap": (
        in_header("b@7", {"dtype": "BOOL", "shape": [2], "data_offsets": [204, 206]}),
        "different things",
    ),
    "extra_row": (
        in_header("c@0", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        "different things",
    ),
    "no_metadata": (lambda header, own: header.pop("__metadata__"), "no header of gradlane's"),
}


@pytest.mark.parametrize("name", LIES)
def test_headers_that_lie_are_refused(name: str) -> None:
    change, text = LIES[name]
    content = rebuilt(change)
    with pytest.raises(FormatError, match=text):
        read(content)
    with pytest.raises(FormatError, match=text):
        check_container(io.BytesIO(content), len(content))


def test_both_sets_of_rows_may_not_ask_for_more_than_there_is() -> None:
    def change(header: dict[str, Any], own: dict[str, Any]) -> None:
        own["pieces"][0]["bytes"] = 1 << 50
        header["a@0"] = {"dtype": "F32", "shape": [1 << 48], "data_offsets": [0, 1 << 50]}
        header["b@7"]["data_offsets"] = [1 << 50, (1 << 50) + 2]

    with pytest.raises(FormatError, match=r"cut off or too long: it has \d+ bytes, not 11258999"):
        read(rebuilt(change))


@pytest.mark.parametrize("length", [1 << 63, (1 << 64) - 1, 1 << 40, 200_000_000])
def test_a_length_that_lies_asks_for_no_memory(length: int) -> None:
    content = length.to_bytes(8, "little") + b"{}"
    with pytest.raises(FormatError, match="cut off"):
        read(content)


def test_a_header_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "HEADER_BYTES_MAX", 400)
    with pytest.raises(FormatError, match=r"its header has \d+ bytes for 1 pieces, over 400"):
        written([Piece("a" * 200, 0, torch.ones(1))])
    monkeypatch.setattr(container, "HEADER_BYTES_MAX", 300)
    with pytest.raises(FormatError, match=r"its header has \d+ bytes, over 300"):
        read(CONTENT)


def test_a_piece_twice_is_refused() -> None:
    with pytest.raises(FormatError, match="a piece twice"):
        written([Piece("a", 0, torch.ones(1)), Piece("a", 0, torch.ones(1))])


def test_booleans_are_0_or_1() -> None:
    content = bytearray(written([Piece("a", 0, torch.tensor([True]))]))
    content[-1] = 2
    changed = bytes(content).replace(
        str(zlib.crc32(b"\1")).encode(), str(zlib.crc32(b"\2")).encode()
    )
    length = int.from_bytes(changed[:8], "little")
    header = json.loads(changed[8 : 8 + length].decode())
    own = header["__metadata__"]["gradlane"]
    header["__metadata__"]["crc32"] = str(zlib.crc32(own.encode()))
    head = json.dumps(header).encode()
    with pytest.raises(FormatError, match="booleans that are neither 0 nor 1"):
        read(len(head).to_bytes(8, "little") + head + b"\2")


def test_the_version_before_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "VERSION", 1)
    content = written([])
    monkeypatch.undo()
    with pytest.raises(
        VersionError, match="it has version 1, and this gradlane reads versions 2 and 3"
    ):
        read(content)


# ---- tensors of pieces


@settings(deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 90), st.integers(1, 90)), max_size=5),
    ranks=st.integers(1, 5),
)
def test_any_world_reads_what_any_other_wrote(shapes: list[tuple[int, int]], ranks: int) -> None:
    state: dict[str, Any] = {
        "state": {number: torch.randn(shape) for number, shape in enumerate(shapes)},
        "groups": [{"betas": (0.9, 0.99), "lr": torch.tensor(0.1)}],
        "none": None,
    }
    tree, tensors = flatten(state)
    pieces = [one for rank in range(ranks) for one in pieces_of(tensors, rank, ranks)]
    found = assemble(leaves(tree), pieces)
    again = unflatten(tree, lambda leaf: found[leaf.name])
    assert again["groups"][0]["betas"] == (0.9, 0.99) and again["none"] is None
    assert torch.equal(again["groups"][0]["lr"], torch.tensor(0.1))
    for number, value in state["state"].items():
        assert torch.equal(again["state"][number], value)


def at(start: int, count: int, dtype: torch.dtype = torch.float32) -> Piece:
    return Piece("a", start, torch.ones(count, dtype=dtype))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([at(0, 5)], "lacks 5 elements of 'a'"),
        ([], "lacks 10 elements"),
        ([at(0, 5), at(0, 5)], r"does not fit: .* from element 0 on.* from 5 on is missing"),
        ([at(0, 6), at(5, 5)], "does not fit"),
        ([at(1, 10)], "does not fit"),
        ([at(0, 11)], "has 11 elements of 'a', which has 10"),
        ([at(0, 10, torch.int32)], "does not fit"),
    ],
)
def test_pieces_that_overlap_or_lack_or_do_not_fit_are_named(
    pieces: list[Piece], text: str
) -> None:
    with pytest.raises(FormatError, match=text):
        assemble([Leaf("a", (2, 5), torch.float32)], pieces)


def test_a_shape_that_lies_asks_for_no_memory() -> None:
    with pytest.raises(FormatError, match="lacks"):
        assemble([Leaf("a", (1 << 40, 1 << 40), torch.float32)], [at(0, 5)])
    with pytest.raises(FormatError, match="has the shape"):
        assemble([Leaf("a", (0, 1 << 64), torch.float32)], [])


@settings(max_examples=300, deadline=None)
@given(content=st.binary(max_size=200), start=st.booleans())
def test_bytes_of_strangers_give_a_typed_error(content: bytes, start: bool) -> None:
    packed = pack({"a": [1, torch.ones(3)]})
    with pytest.raises(FormatError):
        unpack(packed[: len(packed) // 2] + content if start else content, CPU)


def test_nothing_that_is_read_from_files_or_ranks_can_run_code() -> None:
    """The one file of pickles is a published data set, read by a class that makes arrays only."""
    runs_code = ("pickle.", "torch.load", "torch.save", "marshal.", "shelve.", "_object_list")
    found = {
        str(path.relative_to(package))
        for package in PACKAGES
        for path in package.rglob("*.py")
        if any(word in path.read_text() for word in runs_code)
    }
    # The second one tells users what to save it with.
    assert found == {"accuracy/cifar.py", "ddp/hook.py"}
