"""Ranks that only serve, between real processes: the same bits as without them, and every end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import gradlane
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.rendezvous.environment import RankInfo
from tests.built import needs_core
from tests.forked_programs import PATIENCE_S, ForkedPrograms
from tests.ports import reserve_port
from tests.training.model.pool import RankPool
from tests.training.serving.roles import digests_of

pytestmark = needs_core
MODULE = "tests.training.serving.rank_programs"
RUNS: list[dict[str, Any]] = [
    {},
    {"strategy": "slicing", "slice_elems": 100_000},
    {"strategy": "wfbp"},
    {"strategy": "kvstore", "seed": 3},
    {"strategy": "deferred-pull"},
    # Sealed.
    {"secret": "5ec2e7" * 8},
]
OTHER_BITS: list[dict[str, Any]] = [{"codec": "qsgd:bits=8", "seed": 4}, {"scheme": "sfb"}]


def trained(pool: RankPool, workers: int, servers: int, runs: list[dict[str, Any]]) -> list[Any]:
    return digests_of(pool, MODULE, workers, servers, runs, model_name="wide", steps=4)


@pytest.mark.parametrize("workers", [2, 3])
def test_separate_servers_change_no_bit(pool: RankPool, workers: int) -> None:
    alone = trained(pool, workers, 0, [{}, *OTHER_BITS])
    assert all(result == alone[0] for result in alone) and len(set(alone[0])) == 3
    for servers in (1, 3) if workers == 2 else (2,):
        results = trained(pool, workers, servers, [*RUNS, *OTHER_BITS])
        for result in results[:workers]:
            assert result == [alone[0][0]] * len(RUNS) + alone[0][1:]
        served = [one for result in results[workers:] for one in result[0]]
        assert len(served) == servers
        total = served[0][0]["total_bytes"]
        for (channel,) in served:
            assert channel["steps"] == 4
        # A gradient of each worker and step, rank 0's first values, and all results.
        owned, rx, tx = (
            [channel[f"{name}_bytes"] for (channel,) in served] for name in ("owned", "rx", "tx")
        )
        # Small tensors travel together in steps, so step 0 has them twice; no gradient is absent,
        # so what would tell of it travels in step 0 alone.
        small, absences = 4 * (1024 + 3 * 1024 + 3), 4 * 3
        assert sum(owned) == total
        assert sum(rx) == (4 * workers + 1) * total + small - 4 * workers * absences
        assert sum(tx) == workers * (5 * total + small - 4 * absences)


def test_a_session_with_all_that_happens_in_one(pool: RankPool) -> None:
    without, with_them = (
        pool.run(f"{MODULE}:whole_life", ranks=2 + servers, servers=servers) for servers in (0, 2)
    )
    assert without[0] == without[1] == with_them[0] == with_them[1]
    for served in with_them[2:]:
        # Two models, the second anew, and the channels that hand over what differed at the end.
        assert len(served[0]) >= 3
        assert all(channel["owned_bytes"] > 0 for channel in served[0][:3])


def test_checkpoints_are_of_the_ranks_that_train(pool: RankPool, tmp_path: Path) -> None:
    for servers in (0, 1):
        folder = tmp_path / str(servers)
        folder.mkdir()
        trained(pool, 2, servers, [{"checkpoint_folder": str(folder), "checkpoint_every": 2}])
    files = [
        sorted(path.name[:19] for path in (tmp_path / name).rglob("rank-*")) for name in ("0", "1")
    ]
    assert files[0] == files[1] != []


def test_who_disagrees_is_named_everywhere(pool: RankPool) -> None:
    results = pool.run(f"{MODULE}:disagree", ranks=3)
    assert all(result.startswith("RanksDifferError") for result in results), results
    assert all("rank 0 has workers=2, rank 2 has 1" in result for result in results), results


class Program:
    """Two ranks that train and one that serves, as programs."""

    def __init__(
        self,
        programs: ForkedPrograms,
        folder: Path,
        steps: int,
        command: bool,
        update: str = "worker",
        strategy: str = "p3",
    ) -> None:
        self._programs = programs
        self._folder = folder
        port = reserve_port()
        self.pids: list[int] = []
        for rank in range(3):
            serves = command and rank == 2
            report = ["serve", "--advertise", "127.0.0.1", "--json", str(folder / "served.json")]
            report += ["--connect-timeout-s", "8"]
            self.pids.append(
                programs.start(
                    self._name(rank),
                    program="gradlane" if serves else "tests.training.serving.program",
                    arguments=report if serves else [str(steps), update, strategy],
                    output=str(folder / f"output-{rank}"),
                    errors=str(folder / f"errors-{rank}"),
                    environment={
                        "RANK": str(rank),
                        "WORLD_SIZE": "3",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                )
            )

    def _name(self, rank: int) -> str:
        return f"{self._folder}-{rank}"

    def output(self, rank: int) -> str:
        return (self._folder / f"output-{rank}").read_text()

    def errors(self, rank: int) -> str:
        return (self._folder / f"errors-{rank}").read_text()

    def wait(self, rank: int, timeout_s: float = PATIENCE_S) -> int:
        return self._programs.wait(self._name(rank), timeout_s)

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output(0):
            assert time.monotonic() < deadline, [self.errors(rank) for rank in range(3)]
            time.sleep(0.05)

    def kill_all(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("victim", "update"), [(1, "worker"), (2, "worker"), (2, "server")])
def test_a_killed_rank_is_named_by_all_others(
    programs: ForkedPrograms, tmp_path: Path, victim: int, update: str
) -> None:
    program = Program(programs, tmp_path, 1_000_000, command=False, update=update)
    try:
        program.wait_for("step 6")
        os.kill(program.pids[victim], signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            assert program.wait(rank) == 1, program.errors(rank)
            lines = program.errors(rank).splitlines()
            line = [one for one in lines if "gradlane.errors.PeerLostError" in one][-1]
            assert f"rank {victim} was lost" in line, line
    finally:
        program.kill_all()


@pytest.mark.parametrize("update", ["worker", "server"])
def test_the_command_serves_a_program_that_it_does_not_have(
    programs: ForkedPrograms, tmp_path: Path, update: str
) -> None:
    program = Program(programs, tmp_path, 6, command=True, update=update)
    try:
        assert [program.wait(rank) for rank in range(3)] == [0, 0, 0], program.errors(2)
    finally:
        program.kill_all()
    assert "served 0.0 of 0.0 MB of parameters, 6 steps" in program.output(2)
    told = json.loads((tmp_path / "served.json").read_text())
    assert told["rank"] == 2
    (channel,) = told["channels"]
    assert (channel["steps"], channel["owned_bytes"]) == (6, channel["total_bytes"])


def test_a_command_whose_program_is_refused_ends(programs: ForkedPrograms, tmp_path: Path) -> None:
    """Ranks that train say so at once; the command, which hears nothing of it, ends in time."""
    program = Program(programs, tmp_path, 6, command=True, update="server", strategy="asgd")
    try:
        for rank in range(2):
            assert program.wait(rank) == 1
            assert 'with strategy="asgd"' in program.errors(rank)
            assert "servers= among the ranks that train" in program.errors(rank)
        assert program.wait(2) != 0, program.output(2)
    finally:
        program.kill_all()


def test_places_split_into_ranks_that_train_and_ranks_that_serve() -> None:
    place = RankInfo(4, 6, "job", 0).with_workers(4)
    assert (place.world_size, place.serving, place.ranks, place.serves) == (4, 2, 6, True)
    assert not RankInfo(3, 6, "job", 0).with_workers(4).serves
    assert RankInfo(3, 6, "job", 0).with_workers(None) == RankInfo(3, 6, "job", 0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "ring"}, "has no servers"),
        ({"strategy": "asgd", "update": "server"}, "asgd"),
        ({"stragglers": "drop"}, 'with stragglers="drop"'),
        ({"servers": 2}, "with servers=2"),
        ({"workers": 7}, "there are 6 ranks"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Options.of(**keywords_of(**{"workers": 4, **options})).check_world(6)
    Options.of(workers=4, update="server").check_world(6)


def test_a_rank_that_serves_trains_nothing_and_the_others_serve_nothing() -> None:
    from torch import nn
    from torch._C._distributed_c10d import HashStore
    from torch.optim import SGD

    store = HashStore()
    model = nn.Linear(2, 2)
    with pytest.raises(gradlane.UsageError, match=r"rank 1 only serves.*session.serve\(\)"):
        gradlane.init(
            workers=1, rendezvous=gradlane.Rendezvous(store=store, rank=1, world_size=2)
        ).prepare(model, SGD(model.parameters(), lr=0.1))
    with pytest.raises(gradlane.UsageError, match="rank 0 trains"):
        gradlane.init(rendezvous=gradlane.Rendezvous(store=store, rank=0, world_size=1)).serve()
