"""The backend of torch.distributed beside Gloo: the same bits, named errors, nothing that hangs."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradlane.distributed import GroupOptions, registration
from gradlane.distributed.backend import check_tensor
from gradlane.distributed.group_connector import JOB
from gradlane.distributed.reconfiguration import Handle
from gradlane.training.rendezvous.signatures import StoreSigner
from tests.built import needs_core
from tests.paths import ROOT
from tests.torch_versions import torch_release
from tests.training.model.pool import RankPool

pytestmark = [
    needs_core,
    pytest.mark.skipif(torch_release() < (2, 14), reason="backends in Python need torch 2.14"),
]

PROGRAMS = "tests.distributed.programs"
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_gives_the_bits_of_gloo(pool: RankPool, ranks: int) -> None:
    for different in pool.run(f"{PROGRAMS}:compare_with_gloo", ranks=ranks, dtypes=DTYPES):
        assert different == []


def test_complex_and_sparse_tensors_give_the_bits_of_gloo(pool: RankPool) -> None:
    for different in pool.run(f"{PROGRAMS}:compare_rare_calls", ranks=2):
        assert different == []


def test_works_are_numbered_listed_coalesced_and_cut_by_rows(pool: RankPool) -> None:
    for numbers, listed, coalesced, *refused in pool.run(f"{PROGRAMS}:torch_asks", ranks=2):
        assert numbers == [1, 2, 3]
        assert listed == (1, 0)
        assert coalesced == [2.0, 2.0]
        assert len(refused) == 2 and all("Tensors must be contiguous" in it for it in refused)


def test_means_bools_strides_objects_futures_and_coalescing(pool: RankPool) -> None:
    for found in pool.run(f"{PROGRAMS}:calls_of_gradlane_alone", ranks=3):
        assert found == [
            [1.0, 1.0, 1.0],
            [True, True, False],
            [[0.0, 9.0], [3.0, 12.0], [6.0, 15.0]],
            [[1.0, 1.0], [1.0, 1.0]],
            [1.0, 1.0, 1.0],
            [0, 1, 2],
            300_000.0,
            (True, None, [3.0, 3.0]),
            False,
            True,
            [1, 2],
            [[3.0] * 4, [3.0] * 5],
        ]


def test_groups_outlive_their_python_objects_and_gather_lists(pool: RankPool) -> None:
    assert pool.run(f"{PROGRAMS}:lost_references", ranks=2) == [[4.0, 4.0, 16.0]] * 2


def test_works_that_nobody_keeps_end_in_their_memory(pool: RankPool) -> None:
    doubled = [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]
    results = pool.run(f"{PROGRAMS}:dropped_works", ranks=2)
    assert results == [[0, doubled, doubled, [2.0] * 3, True]] * 2


def test_a_group_is_reconfigured_for_fewer_more_and_other_ranks(pool: RankPool) -> None:
    results = pool.run(f"{PROGRAMS}:reconfigured", ranks=3)
    for rank, said in enumerate(results):
        supports, empty, whole, few, used, doubled, none, missing, junk, forged, *rest = said
        running, again, other, failed, last = rest
        assert supports is True and "has no members" in empty
        assert whole == (111.0, rank, 3)
        assert few == (11.0, 1 - rank, 2) if rank < 2 else "has left the group" in few
        assert "the number 1 was already used" in used
        assert "a handle twice" in doubled and "at least one" in none
        assert "its own handle is not among the 2 given" in missing
        assert "is no handle for this group" in junk and "is no handle for this group" in forged
        assert "closed here" in running or "has left the group" in running
        # A set is in the order of the ranks before.
        assert again == (111.0, [1, 0, 2][rank], 3)
        assert "DistBackendError" not in other and "has no members" in failed
        assert last == (111.0, 2 - rank, 3)


def test_groups_of_some_ranks_do_not_meet_each_other(pool: RankPool) -> None:
    results = pool.run(f"{PROGRAMS}:subgroups", ranks=4)
    assert results == [[4.0, 2.0], [4.0, 4.0], [4.0, 2.0], [4.0, 4.0]]


@pytest.mark.parametrize("way", ["ddp", "fsdp2", "powersgd"])
def test_training_over_two_ranks_gives_the_bits_of_gloo(pool: RankPool, way: str) -> None:
    results = pool.run(f"{PROGRAMS}:train", ranks=2, way=way)
    for found in results:
        assert found["gradlane"] == found["gloo"]
        assert found["gradlane"][0] == results[0]["gradlane"][0]


def test_mistakes_of_one_rank_are_named_and_the_group_goes_on(pool: RankPool) -> None:
    for said in pool.run(f"{PROGRAMS}:mistakes", ranks=2):
        words = [
            "its sum or mean",
            "no mean of torch.int64",
            "uint16",
            "no mean of i32",
            "no and of f32",
            "split_sizes",
        ]
        for text, word in zip(said, words, strict=False):
            assert word in text, said
        assert said[-1] == "2.0"


def test_another_call_on_another_rank_is_named_on_every_rank(pool: RankPool) -> None:
    for said in pool.run(f"{PROGRAMS}:other_calls", ranks=3):
        assert said.startswith("DistBackendError: rank "), said
        assert "all_reduce of 4 f32 (sum) on rank" in said or "and all_reduce of 4 f32" in said
        assert "broadcast of 4 f32 with root 0" in said


# In as many pieces, in one piece more, and in none.
@pytest.mark.parametrize("rows", [[200_000, 199_000], [400_000, 420_000], [300_000, 0]])
def test_other_splits_on_another_rank_are_named_with_their_bytes(
    pool: RankPool, rows: list[int]
) -> None:
    for said in pool.run(f"{PROGRAMS}:other_splits", ranks=2, rows=rows):
        assert "all_to_all of f32" in said and "timeout" not in said, said
        assert all(f"{4 * it} " in said for it in rows), said


def test_a_rank_that_does_not_come_is_named(pool: RankPool) -> None:
    said = pool.run(f"{PROGRAMS}:missing_rank", ranks=3)
    assert "Rank 1 failed to pass monitoredBarrier" in said[0], said
    assert "rank 1 did not begin it" in said[0] and "monitored_barrier" in said[2], said
    assert "Rank 2 successfully reached monitoredBarrier" in said[2], said


KILLED = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    import gradlane.distributed

    gradlane.distributed.register()
    # One process has imported torch for both.
    child = os.fork()
    os.environ["RANK"] = "0" if child else "1"
    dist.init_process_group("gradlane")
    tensor = torch.ones(1_000_000)
    dist.all_reduce(tensor)
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        while True:
            dist.all_reduce(tensor)
    except dist.DistBackendError as error:
        print("told:", error)
        print("killed by", os.WTERMSIG(os.waitpid(child, 0)[1]), flush=True)
        os._exit(7)
"""


def test_a_killed_rank_is_named_at_once() -> None:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'python'}:{os.environ.get('PYTHONPATH', '')}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(20_000 + os.getpid() % 20_000),
        "WORLD_SIZE": "2",
    }
    begun = time.monotonic()
    rank = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=100,
    )
    output = rank.stdout
    assert rank.returncode == 7
    assert f"killed by {signal.SIGKILL.value}" in output
    assert "told: rank 0, group" in output and "rank 1 is lost" in output, output
    assert time.monotonic() - begun < 90


def test_a_torch_without_backends_in_python_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration, "NEEDED_METHODS", ("no_such_method",))
    with pytest.raises(RuntimeError, match=f"2.14 or newer, and this is {torch.__version__[:4]}"):
        registration.register()


def test_a_tensor_of_another_device_is_refused_by_name() -> None:
    device = torch.device("cuda", 1)
    tensor: Any = SimpleNamespace(is_cpu=False, device=device, layout=torch.strided)
    with pytest.raises(ValueError, match=r"all_reduce of a tensor on cuda:1.*cuda:nccl"):
        check_tensor("all_reduce", tensor)


def test_a_missing_torchft_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchft", None)
    monkeypatch.setitem(sys.modules, "torchft.process_group", None)
    monkeypatch.delitem(sys.modules, "gradlane.distributed.torchft", raising=False)
    with pytest.raises(ImportError, match=r"needs torchft .*: pip install torchft"):
        importlib.import_module("gradlane.distributed.torchft")


def test_a_handle_of_another_secret_is_refused_by_name() -> None:
    signers = [StoreSigner.of(0, secret, JOB, "of handles") for secret in ("one", "other", None)]
    text = Handle(3, "127.0.0.1:9", "token").write(signers[0])
    assert Handle.read(text, signers[0]) == Handle(3, "127.0.0.1:9", "token")
    for signer in signers[1:]:
        with pytest.raises(torch.distributed.DistBackendError, match="no handle for this group"):
            Handle.read(text, signer)


def test_the_package_names_the_registration_as_torch_looks_it_up() -> None:
    entry = re.search(
        r'^\[project.entry-points."torch.distributed.backends"\]\ngradlane = "(.*):(.*)"$',
        (ROOT / "pyproject.toml").read_text(),
        re.MULTILINE,
    )
    assert entry is not None
    assert getattr(importlib.import_module(entry[1]), entry[2]) is registration.register


def test_a_spin_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="spin_us is -1"):
        GroupOptions(spin_us=-1)
