"""Codecs as Python sees them: every kernel through the binding, on tensors and arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gradlane.codecs import BROADCAST, Codec
from tests.built import needs_core

pytestmark = needs_core

SPECS = (
    "f32",
    "bf16",
    "f16",
    "fp8",
    "qsgd:bits=8",
    "qsgd:bits=2,norm=l2,levels=uniform",
    "qsgd:bits=1",
    "qsgd:bits=4,levels=optimal",
    "topk:ratio=0.1",
    "topk:ratio=0.1,bits=2",
    "topk:ratio=0.02,bits=4,bucket=4096,decay=0.9",
)


def gradient(elements: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("elements", [1, 63, 64, 65, 5_000])
def test_tensors_and_arrays_give_the_same_bytes(spec: str, elements: int) -> None:
    codec = Codec(spec)
    values = gradient(elements)
    wire = codec.encode(values, seed=3, step=4, tensor=5, leg=1)
    array = codec.encode(values.numpy(), seed=3, step=4, tensor=5, leg=1)
    assert isinstance(wire, torch.Tensor) and isinstance(array, np.ndarray)
    assert wire.dtype == torch.uint8 and np.array_equal(wire.numpy(), array)
    assert len(wire) <= codec.wire_bytes_max(elements)
    if codec.is_fixed_size:
        assert len(wire) == codec.wire_bytes_max(elements)
    decoded = codec.decode(wire, elements)
    assert isinstance(decoded, torch.Tensor) and decoded.shape == (elements,)
    twice = decoded.clone()
    codec.decode_add(wire, twice)
    assert torch.equal(twice, decoded + decoded)


def test_f32_is_the_values_and_their_bytes() -> None:
    values = gradient(100).reshape(10, 10)
    wire = Codec("f32").encode(values)
    assert np.array_equal(np.asarray(wire), values.numpy().view(np.uint8).ravel())


@pytest.mark.parametrize(
    "spec",
    [
        "qsgd:bits=2,residual=on",
        "topk:ratio=0.01",
        "topk:ratio=0.01,bits=2",
        "topk:ratio=0.01,bits=8,bucket=1024",
    ],
)
def test_what_was_sent_and_what_is_kept_are_what_there_was(spec: str) -> None:
    codec = Codec(spec)
    assert codec.residual_width == 1
    residual, sent, given = torch.zeros(3_000), torch.zeros(3_000), torch.zeros(3_000)
    for step in range(20):
        values = gradient(3_000, step)
        codec.decode_add(codec.encode(values, residual=residual, step=step), sent)
        given += values
    torch.testing.assert_close(sent + residual, given, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "dtype", "largest"),
    [
        ("fp8:bucket=32", torch.float8_e4m3fn, 448.0),
        ("fp8:format=e5m2,bucket=64", torch.float8_e5m2, 57344.0),
    ],
)
def test_fp8_is_torchs_type_times_a_power_of_two(
    text: str, dtype: torch.dtype, largest: float
) -> None:
    codec = Codec(text)
    size = codec.granule
    # Magnitudes over the range of a bucket, zeros of both signs, values between two numbers.
    values = gradient(200 * size) * torch.exp2(torch.randint(-24, 1, (200 * size,)).float())
    values[::7], values[3::11] = 0.0, -0.0
    values[5::13] = torch.round(values[5::13] * 2**12) / 2**12 + 2**-5
    decoded = codec.decode(codec.encode(values), len(values))
    found_buckets = torch.as_tensor(decoded).reshape(-1, size)
    for bucket, found in zip(values.reshape(-1, size), found_buckets, strict=True):
        scale = torch.exp2(torch.ceil(torch.log2(bucket.abs().max().double() / largest))).float()
        expected = (bucket / scale).to(dtype).float() * scale
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_draws_depend_on_the_place_alone() -> None:
    codec = Codec("qsgd:bits=2")
    values = gradient(512)
    same = [codec.encode(values, seed=1, step=2, tensor=3, leg=4) for _ in range(2)]
    assert torch.equal(torch.as_tensor(same[0]), torch.as_tensor(same[1]))
    for place in ((9, 2, 3, 4), (1, 9, 3, 4), (1, 2, 9, 4), (1, 2, 3, 9), (1, 2, 3, BROADCAST)):
        seed, step, tensor, leg = place
        other = codec.encode(values, seed=seed, step=step, tensor=tensor, leg=leg)
        assert not torch.equal(torch.as_tensor(same[0]), torch.as_tensor(other)), place


def test_a_tensor_may_be_encoded_in_parts() -> None:
    codec = Codec("qsgd:bits=4")
    values = gradient(5 * codec.granule + 7)
    whole = torch.as_tensor(codec.encode(values, step=1))
    cut = 2 * codec.granule
    parts = [
        torch.as_tensor(codec.encode(values[:cut], step=1)),
        torch.as_tensor(codec.encode(values[cut:], step=1, first_element=cut)),
    ]
    assert torch.equal(whole, torch.cat(parts))


def test_dgc_keeps_two_numbers_a_value_and_sends_more_at_first() -> None:
    codec = Codec("dgc:ratio=0.001,warmup=4")
    assert codec.residual_width == 2
    residual = torch.zeros(2 * 10_000)
    sizes = [
        len(codec.encode(gradient(10_000, step), residual=residual, step=step)) for step in range(5)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > 50 * sizes[-1]
    assert codec.wire_bytes_max(10_000, step=4) < codec.wire_bytes_max(10_000, step=0)


def test_what_is_wrong_is_said() -> None:
    codec = Codec("qsgd:bits=4")
    with pytest.raises(ValueError, match="no codec is named"):
        Codec("gzip")
    with pytest.raises(ValueError, match="2, 4, 8 or 16"):
        Codec("qsgd:bits=5")
    with pytest.raises(ValueError, match="float32"):
        codec.encode(torch.zeros(8, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        codec.encode(torch.zeros(8, 8).t())
    with pytest.raises(ValueError, match="granule"):
        codec.encode(torch.zeros(8), first_element=1)
    with pytest.raises(ValueError, match="residual of 7"):
        codec.encode(torch.zeros(8), residual=torch.zeros(7))
    with pytest.raises(ValueError, match="bytes are needed"):
        codec.encode_into(torch.zeros(8), torch.zeros(1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="bytes"):
        codec.decode(np.zeros(3, dtype=np.uint8), 8)
    with pytest.raises(ValueError, match="neither a rank"):
        codec.encode(torch.zeros(8), leg=-2)


def cntk_column(values: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.uint32], list[float]]:
    """Quantize a column as CNTK does (`ColumnQuantizer.h`, one bit, zero as its threshold).

    Returns:
        The words, and what bits 0 and 1 stand for.
    """
    plus = values >= 0.0
    mean0 = float(values[~plus].sum()) / max(int((~plus).sum()), 1)
    mean1 = float(values[plus].sum()) / max(int(plus.sum()), 1)
    middle = 0.5 * (mean0 + mean1)
    radius = 2.0 * (mean1 - middle)
    lower, upper = middle - radius, middle + radius
    # A bit b stands for the middle of the b-th half of the range.
    levels = [lower + (b + 0.5) * (upper - lower) / 2.0 for b in (0, 1)]
    words = np.zeros(-(-len(values) // 32), np.uint32)
    for index, bit in enumerate(plus):
        words[index % len(words)] |= np.uint32(bit) << np.uint32(index // len(words))
    return words, levels


@pytest.mark.parametrize("rows", [1, 3, 31, 32, 33, 64, 65, 1_100, 4_096])
@pytest.mark.parametrize("packing", ["bytes", "cntk"])
def test_onebit_by_columns_is_cntks(rows: int, packing: str) -> None:
    """Values are CNTK's in either packing; its own has its words, too, of 32 bits a column."""
    codec = Codec(f"onebit:packing={packing}", (5, rows))
    column_bytes = 8 + (-(-rows // 8) if packing == "bytes" else 4 * -(-rows // 32))
    assert codec.wire_bytes_max(5 * rows) == 5 * column_bytes
    residual = np.zeros((5, rows), np.float32)
    for step in range(3):
        values = gradient(5 * rows, step).numpy().reshape(5, rows) + np.float32(0.2)
        wanted = values + residual
        wire = codec.encode(values, residual=residual)
        assert isinstance(wire, np.ndarray)
        decoded = codec.decode(wire, 5 * rows)
        assert isinstance(decoded, np.ndarray)
        for column, own in enumerate(wire.reshape(5, column_bytes)):
            words, levels = cntk_column(wanted[column])
            expected = np.where(wanted[column] >= 0.0, levels[1], levels[0])
            np.testing.assert_allclose(decoded.reshape(5, rows)[column], expected, rtol=1e-5)
            np.testing.assert_allclose(
                residual[column], wanted[column] - expected, rtol=1e-4, atol=1e-5
            )
            if packing == "cntk":
                assert np.array_equal(own[8:].view("<u4"), words)


def test_a_codec_by_itself_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="of which it sees a part"):
        Codec("dgc:clip=1")
