"""Arrays of NumPy's and through DLPack, averaged over real connections between real processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gradlane.errors import ArrayRefusedError, UsageError
from gradlane.training.arrays.dlpack import read_dlpack
from gradlane.training.arrays.memory import borrow, dtype_name, make_slot
from tests.built import needs_core
from tests.training.arrays.rank_programs import says_whether_writable
from tests.training.model.pool import FirstRanks, RankPool
from tests.training.model.ranks import run_ranks

HERE = "tests.training.arrays.rank_programs"


@pytest.fixture
def three(pool: RankPool) -> FirstRanks:
    return FirstRanks(pool, 3)


@needs_core
def test_means_equal_those_of_a_prepared_model(three: FirstRanks) -> None:
    of_torch = three.run(f"{HERE}:means_of_torch")
    of_arrays = three.run(f"{HERE}:means_of_arrays")
    sliced = three.run(f"{HERE}:means_of_arrays", slice_elems=1000, strategy="slicing")
    for ours in (*of_arrays, *sliced):
        assert ours["seen"] == of_torch[0]
        assert ours["in_place"]
        assert ours["steps"] == 2
    assert of_arrays[0]["m"]["tx_bytes"] > 0


@needs_core
def test_values_are_spread_and_absent_ones_count_as_zeros(three: FirstRanks) -> None:
    for rank, found in enumerate(three.run(f"{HERE}:spread_and_absent")):
        assert found["spread"] == [[10.0, 10.0], [0.0, 0.0, 0.0]]
        assert found["late"] == [2.0, 2.0, 2.0]
        assert found["soon"] is None
        assert found["fixed"] == [[rank, rank], [1.0, 1.0]]
        assert found["unwaited"] == [1.0, 1.0, 1.0]


@needs_core
def test_what_does_not_fit_is_refused_and_the_session_goes_on(three: FirstRanks) -> None:
    for said in three.run(f"{HERE}:refused", ranks=2):
        kinds = [line.partition(":")[0] for line in said[:8]]
        expected = ["shape", "dtype", "layout", "layout", "layout", "device", "type", "dtype"]
        assert kinds == expected
        assert "pushed twice in step 1, before 'b'" in said[8]
        assert "the step is 1 here" in said[9]
        assert "no array 'x'" in said[10]
        assert "never" in said[11]
        assert "after the first push()" in said[12] and "spread()" in said[13]
        assert said[14] == "[0.5, 0.5]"


@needs_core
def test_different_arrays_are_named_on_every_rank(three: FirstRanks) -> None:
    for error in three.run(f"{HERE}:differing", ranks=2):
        assert "'w') has shape [2, 2] on rank 0" in error


@needs_core
def test_a_lost_rank_is_named_again_and_again(three: FirstRanks) -> None:
    said = three.run(f"{HERE}:lost", ranks=2)[0].split(" | ")
    assert [line[:17] for line in said[:2]] == ["1 1 rank 1 gave u"] * 2
    assert said[2] == "close"


@needs_core
def test_arrays_beside_a_model(three: FirstRanks) -> None:
    means = three.run(f"{HERE}:beside_a_model")
    assert means[0] == means[1] == means[2]


@needs_core
def test_a_close_in_mid_step_counts_as_zeros(three: FirstRanks) -> None:
    means = three.run(f"{HERE}:ended_in_mid_step", ranks=2)
    assert means[0] == [[4.0], [2.0]]


def test_a_capsule_is_read_and_left_to_its_owner() -> None:
    owner = np.arange(12.0, dtype=np.float32).reshape(3, 4)
    view = read_dlpack(owner[1:])
    assert (view.pointer, view.shape, view.dtype) == (owner[1:].ctypes.data, (2, 4), "float32")
    # NumPy 1.26 cannot say it, and exports nothing that may not be written.
    says = says_whether_writable(owner)
    assert view.writable == says
    if says:
        owner.flags.writeable = False
        assert not read_dlpack(owner).writable
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    assert read_dlpack(half).dtype == "bfloat16"
    assert read_dlpack(half).pointer == half.data_ptr()


def test_an_array_that_cannot_say_whether_it_may_be_written_is_copied() -> None:
    class Old:
        """An exporter of before DLPack 1.0."""

        def __init__(self) -> None:
            self.array = np.arange(3.0)

        def __dlpack__(self) -> object:
            return self.array.__dlpack__()

        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

    old = Old()
    loan = borrow(make_slot("w", (3,), "float64", 0), old)
    assert loan.pointer != old.array.ctypes.data
    loan.result[0] = 9.0
    assert old.array.tolist() == [0.0, 1.0, 2.0] and loan.result.tolist() == [9.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "dtype", "what"),
    [((2, 0), "float32", "shape"), ((2,), np.int32, "dtype"), ((2,), "float8", "dtype")],
)
def test_what_cannot_be_averaged_is_not_registered(
    shape: tuple[int, ...], dtype: object, what: str
) -> None:
    with pytest.raises(ArrayRefusedError) as refusal:
        make_slot("w", shape, dtype, 0)
    assert refusal.value.what == what


def test_dtypes_of_all_frameworks_have_one_name() -> None:
    assert {dtype_name(one) for one in (np.float32, np.dtype("f4"), "float32", torch.float32)} == {
        "float32"
    }
    assert dtype_name(torch.bfloat16) == "bfloat16"


@needs_core
@pytest.mark.parametrize("codec", ["dgc", {"a": "onebit"}])
def test_codecs_that_keep_something_are_refused(codec: object) -> None:
    def body(session: Any) -> str:
        session.arrays.register("a", (64, 64), "float32")
        with pytest.raises(UsageError) as caught:
            session.arrays.push("a", np.ones((64, 64), np.float32))
        return str(caught.value)

    for said in run_ranks(2, body, codec=codec):
        assert "it keeps what it has lost" in said
