"""Programs find their place however they are launched, and say what is missing when they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import nn

from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Rendezvous
from gradlane.training.rendezvous.environment import (
    RankInfo,
    ending_survivors,
    find_rank_info,
    find_store_address,
)
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.ports import reserve_port
from tests.torch_versions import NO_DIST
from tests.training.model.ranks import run_ranks

CHECKPOINTS: Any = torch.distributed.checkpoint
PROGRAM = "tests.training.model.launched_rank"

BATCH_SCRIPT = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_JOB_NODELIST": "gpu[03-04]",
    "SLURM_SUBMIT_DIR": "/home/somebody",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        # srun, also with fewer tasks than the job has.
        ({**BATCH_SCRIPT, "SLURM_PROCID": "3", "SLURM_STEP_ID": "0"}, RankInfo(3, 4, "77.0", 0)),
        (
            {
                **BATCH_SCRIPT,
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_PROCID": "1",
                "SLURM_STEP_ID": "5",
            },
            RankInfo(1, 2, "77.5", 0),
        ),
        # mpirun inside a Slurm allocation: Slurm's variables are those of the script.
        (
            {**BATCH_SCRIPT, "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"},
            RankInfo(2, 4, "77", 0),
        ),
        ({**BATCH_SCRIPT, "PMI_RANK": "3", "PMI_SIZE": "4"}, RankInfo(3, 4, "77", 0)),
        (
            {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "one"},
            RankInfo(1, 2, "one", 0),
        ),
        # torchrun in each task of a Slurm job.
        (
            {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "RANK": "5", "WORLD_SIZE": "8"},
            RankInfo(5, 8, "77.0", 0),
        ),
    ],
)
def test_places(environment: dict[str, str], expected: RankInfo) -> None:
    assert find_rank_info(environment) == expected


def test_a_batch_script_without_srun_is_no_rank() -> None:
    with pytest.raises(ValueError, match=r"only process of Slurm job 77, which asks for 4 tasks"):
        find_rank_info(BATCH_SCRIPT)
    assert find_rank_info(BATCH_SCRIPT, rank=0, world_size=1).world_size == 1
    assert find_rank_info({**BATCH_SCRIPT, "SLURM_NTASKS": "1"}).world_size == 1


@pytest.mark.parametrize(
    "given", [{"RANK": "0"}, {"RANK": "1"}, {"WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": ""}]
)
def test_half_of_a_launcher_is_refused(given: dict[str, str]) -> None:
    """Rank 0 would train alone, and nobody would notice."""
    with pytest.raises(ValueError, match="set both, or start the program with torchrun"):
        find_rank_info(given)


@pytest.mark.parametrize(
    ("environment", "by_node", "words"),
    [
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "4"}, True, "--nproc-per-node 1"),
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2"}, False, "--nproc-per-node 1"),
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "2"}, True, ""),
        ({"TORCHELASTIC_RUN_ID": "a", "LOCAL_WORLD_SIZE": "1"}, False, ""),
        ({"SLURM_PROCID": "0", "SLURM_KILL_BAD_EXIT": "1"}, False, "--kill-on-bad-exit=0"),
        ({"SLURM_PROCID": "0", "SLURM_KILL_BAD_EXIT": "0"}, False, ""),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False, "--enable-recovery"),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_MCA_orte_enable_recovery": "1"}, False, ""),
        ({"PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, False, "start each rank by itself"),
        ({}, False, ""),
    ],
)
def test_launchers_that_end_survivors(
    environment: dict[str, str], by_node: bool, words: str
) -> None:
    found = ending_survivors(environment, 4, by_node=by_node)
    assert words in found and bool(words) == bool(found)


def test_going_on_says_that_the_launcher_ends_survivors(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for going_on, told in ((True, 1), (False, 0)):
        caplog.clear()
        run_ranks(2, lambda session: None, going_on=going_on, summary=False)
        found = [one for one in caplog.records if "going_on will not help" in one.getMessage()]
        assert len(found) == told


@pytest.mark.parametrize("port", ["0", "65536", "99999", "-1"])
def test_a_port_that_is_none_is_refused_by_its_variable(port: str) -> None:
    with pytest.raises(ValueError, match=f"MASTER_PORT={port} is no port, which is 1 to 65535"):
        find_store_address({"MASTER_ADDR": "host", "MASTER_PORT": port})


def test_stores() -> None:
    step = {**BATCH_SCRIPT, "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu04"}
    assert find_store_address(step) == ("gpu04", 29577)
    assert find_store_address({**step, "SLURM_STEP_ID": "1"})[1] != 29577
    on_one_node = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert find_store_address(on_one_node) == ("127.0.0.1", 29500)
    assert find_store_address({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"})[0] == "127.0.0.1"
    with pytest.raises(ValueError, match=r"mpirun -x MASTER_ADDR=HOST.*-genv MASTER_ADDR HOST"):
        find_store_address({**on_one_node, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


def test_the_address_of_a_store_is_read_from_the_environment() -> None:
    def given(text: str) -> Rendezvous:
        return with_environment(Rendezvous(), {"GRADLANE_STORE": text})

    assert given("gpu03:29600").store_address == ("gpu03", 29600)
    assert given("[::1]:5").store_address == ("::1", 5)
    assert given("29600").store_address == ("127.0.0.1", 29600)
    assert given("").store_address is None and Rendezvous().store_address is None
    for text in ("gpu03", "gpu03:0", "gpu03:65536"):
        with pytest.raises(ValueError, match=f"^GRADLANE_STORE is {text}; it must be HOST:PORT"):
            given(text)
    chosen = with_environment(Rendezvous(store="a:5"), {"GRADLANE_STORE": "b:6"})
    assert chosen.store_address == ("a", 5)


def check(lines: list[str], world_size: int = 2) -> None:
    """Check that the ranks divided the data among them and learned the same."""
    assert [line.split(" saw")[0] for line in lines] == [
        f"rank {rank} of {world_size}" for rank in range(world_size)
    ]
    assert len({line.split()[-1] for line in lines}) == 1
    seen = [json.loads(line.split("saw ")[1].split(" has")[0]) for line in lines]
    for epoch in (slice(0, 4), slice(4, 8)):
        assert sorted(value for one in seen for value in one[epoch]) == list(range(8))


@pytest.mark.slow
@needs_core
def test_torchrun_on_two_nodes_and_a_checkpoint(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Two agents on loopback, as two machines would have one each."""
    folder = str(tmp_path / "checkpoint")
    arguments = [
        *("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1"),
        *("--master-port", str(reserve_port()), "-m", PROGRAM, folder),
    ]
    # What torchrun reads where there is no --node-rank.
    nodes = [{"PET_NODE_RANK": str(node)} for node in range(2)]
    printed = programs.run_all(tmp_path, "torch.distributed.run", arguments, nodes)
    lines = "".join(printed).splitlines()
    check(sorted(line for line in lines if line.startswith("rank")))
    model: Any = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1))
    state: dict[str, Any] = {"model": model.state_dict()}
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        CHECKPOINTS.load(state, checkpoint_id=folder, **NO_DIST)
    model.load_state_dict(state["model"])
    assert not torch.equal(before, model[0].weight)


@needs_core
def test_mpirun_on_one_node(programs: ForkedPrograms, tmp_path: Path) -> None:
    """The variables of Open MPI by hand: it need not be installed."""
    environments = [
        {
            "OMPI_COMM_WORLD_RANK": str(rank),
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "MASTER_PORT": port,
        }
        for port in [str(reserve_port())]
        for rank in range(2)
    ]
    printed = programs.run_all(tmp_path, PROGRAM, [], environments)
    check(sorted(line for output in printed for line in output.splitlines()))


@needs_core
@pytest.mark.parametrize(
    ("name", "is_known"), [("avx9", False), ("AVX2 ", False), ("scalar", True)]
)
def test_an_instruction_set_that_is_none_is_refused_by_its_variable(
    name: str, is_known: bool
) -> None:
    program = "from gradlane.training.core import load_core; load_core()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "GRADLANE_SIMD": name},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) is is_known, done.stderr
    words = (
        f'ValueError: no kernels for instruction set "{name}" on this machine: set GRADLANE_SIMD'
    )
    assert is_known or words in done.stderr, done.stderr
