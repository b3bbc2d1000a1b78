"""Ranks find each other by the launcher's environment, and differences are named everywhere."""

from __future__ import annotations

import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

import gradlane
from gradlane.errors import (
    PeerLostError,
    ProgressTimeoutError,
    RendezvousError,
    SessionFailedError,
)
from gradlane.training.core import load_core
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.options import Options
from gradlane.training.rendezvous import addresses, rendezvous
from gradlane.training.rendezvous.environment import (
    RankInfo,
    find_rank_info,
    find_store_address,
    first_slurm_node,
    warn_of_unknown_variables,
)
from gradlane.training.rendezvous.incarnation import agree_on_incarnation
from gradlane.training.rendezvous.rendezvous import RendezvousScope, first_difference
from gradlane.training.rendezvous.tensor_table import build_table
from gradlane.training.session.init import open_session
from tests.training.model.held_core import HeldCore
from tests.training.model.models import Awkward
from tests.training.model.ranks import run_ranks
from tests.training.rendezvous.stores import bounded


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, RankInfo(0, 1, "default", 0)),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "TORCHELASTIC_RUN_ID": "run",
                "TORCHELASTIC_RESTART_COUNT": "2",
            },
            RankInfo(3, 4, "run", 2),
        ),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "77"},
            RankInfo(1, 8, "77", 0),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, RankInfo(1, 2, "default", 0)),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, RankInfo(0, 2, "default", 0)),
        (
            {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "5", "SLURM_NTASKS": "9"},
            RankInfo(0, 2, "default", 0),
        ),
    ],
)
def test_place_from_the_environment(environment: dict[str, str], expected: RankInfo) -> None:
    assert find_rank_info(environment) == expected


def test_arguments_come_before_the_environment() -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "run"}
    assert find_rank_info(environment, rank=4, world_size=5, job="own") == RankInfo(4, 5, "own", 0)


def test_misspelt_variables_are_named_with_the_one_that_was_meant() -> None:
    known = {"GRADLANE_SUMMARY": "0", "GRADLANE_SIMD": "scalar", "HOME": "/"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_unknown_variables(known)
    with pytest.warns(
        UserWarning, match="GRADLANE_SUMARY changes nothing.*GRADLANE_SUMMARY"
    ) as told:
        warn_of_unknown_variables({**known, "GRADLANE_SUMARY": "0"})
    assert len(told) == 1
    with pytest.warns(UserWarning, match="GRADLANE_WEATHER changes nothing.*known are"):
        warn_of_unknown_variables({"GRADLANE_WEATHER": "fine"})


@pytest.mark.parametrize("text", ["flase", "2", "none"])
def test_neither_yes_nor_no_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"GRADLANE_PACING is '{text}'; it must be 1 or 0"):
        with_environment(gradlane.Network(), {"GRADLANE_PACING": text})


def test_a_scope_leaves_no_keys_in_the_store() -> None:
    """A store lives as long as a job; sessions come and go in it."""
    store = HashStore()
    scopes = [
        RendezvousScope(bounded(store, rank), RankInfo(rank, 3, "job", 0), 0, 5.0)
        for rank in range(3)
    ]
    for rank, scope in enumerate(scopes):
        scope.put(f"address/{rank}", "here")
        scope.put(f"ending/{rank}", "well")
        scope.put(f"metrics/{rank}", "{}")
    scopes[1].delete_keys()
    scopes[2].delete_keys()
    assert [scopes[0].peek(f"ending/{rank}", rank) for rank in range(3)] == [b"well"] * 3
    scopes[0].delete_keys()
    assert store.num_keys() == 0 and all(scope.has_deleted_keys for scope in scopes)


def test_a_connected_rank_has_the_progress_timeout() -> None:
    scope = RendezvousScope(bounded(), RankInfo(0, 2, "job", 0), 0, 0.05)
    with pytest.raises(RendezvousError, match=r"rank 1.*is it running"):
        scope.get("word", 1)
    scope.mark_connected(0.2, lambda: None)
    with pytest.raises(ProgressTimeoutError, match=r"rank 1.*connected.*progress_timeout_s"):
        scope.get("word", 1)

    def lost() -> None:
        raise PeerLostError("rank 1 was lost", 1)

    scope.mark_connected(60.0, lost)
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        scope.get("word", 1)


@pytest.mark.parametrize("lost", [(0,), (0, 3)])
@pytest.mark.parametrize("key", ["checkpoint/run", "checkpoint/restore/1"])
def test_ranks_that_wait_for_a_lost_one_leave_once_all_know_of_it(
    lost: tuple[int, ...], key: str
) -> None:
    """Else the last one hears that the others have given up, and names them."""
    store = HashStore()
    has_left = threading.Event()

    def one(rank: int) -> str:
        knows = time.monotonic() + 0.3 * rank

        def on_poll() -> None:
            if has_left.is_set():
                raise SessionFailedError("no majority is left", None)

        scope = RendezvousScope(bounded(store, rank), RankInfo(rank, 4, "job", 0), 0, 20.0)
        scope.mark_connected(20.0, on_poll)
        scope.loss_of = lambda other: (
            "rank 0 was lost" if other in lost and time.monotonic() > knows else None
        )
        try:
            with scope.failing_alike():
                scope.get(key, 0)
        except SessionFailedError as error:
            has_left.set()
            return str(error)
        return ""

    others = [rank for rank in range(4) if rank not in lost]
    with ThreadPoolExecutor(4) as pool:
        for text in pool.map(one, others):
            assert text.startswith("rank 0 was lost, while")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"WORLD_SIZE": "4"}, "set both"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK='one' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "rank 2 is not in a world of 2"),
    ],
)
def test_bad_environments(environment: dict[str, str], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        find_rank_info(environment)


def test_store_address() -> None:
    assert find_store_address({"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == ("a", 5)
    assert find_store_address({"MASTER_ADDR": "a"}) == ("a", 29500)
    slurm = {"SLURM_JOB_NODELIST": "gpu[03-05],x", "SLURM_JOB_ID": "41"}
    assert find_store_address(slurm) == ("gpu03", 29541)
    with pytest.raises(ValueError, match="no rendezvous store"):
        find_store_address({})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("gpu[3,9-12]", "gpu3"),
        ("gpu[003-005]-ib,x", "gpu003-ib"),
    ],
)
def test_first_slurm_node(nodes: str, first: str) -> None:
    assert first_slurm_node(nodes) == first


@pytest.mark.parametrize(
    ("files", "rate"),
    [
        ({"device": "", "speed": "25000"}, 25e9),
        ({"bonding": "", "speed": "200000"}, 200e9),
        # A container's port names a rate that it does not have; a virtual machine's names none.
        ({"speed": "10000"}, None),
        ({"device": "", "speed": "-1"}, None),
        ({"device": ""}, None),
    ],
)
def test_the_rate_of_a_port(files: dict[str, str], rate: float | None, tmp_path: Path) -> None:
    (tmp_path / "lo").mkdir()
    for name, text in files.items():
        (tmp_path / "lo" / name).write_text(f"{text}\n")
    assert addresses.port_rate_bps("127.0.0.1", tmp_path) == rate
    assert addresses.port_rate_bps("192.0.2.1", tmp_path) is None


def test_addresses() -> None:
    assert addresses.interface_address("lo") == "127.0.0.1"
    assert addresses.address_towards("127.0.0.1", 80) == "127.0.0.1"
    assert addresses.endpoint("::1", 5) == "[::1]:5"
    assert addresses.endpoint("10.0.0.1", 5) == "10.0.0.1:5"
    assert addresses.resolve("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(ValueError, match="no network interface 'none0'; this machine has"):
        addresses.interface_address("none0")


def starts_of(store: Any, rank_infos: list[RankInfo], timeout_s: float = 10.0) -> list[Any]:
    """Return the incarnation or the error of each rank, run in threads."""

    def one(rank_info: RankInfo) -> Any:
        try:
            return agree_on_incarnation(bounded(store, rank_info.rank), rank_info, timeout_s)
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(rank_infos)) as threads:
        return list(threads.map(one, rank_infos))


def test_ranks_whose_launchers_count_differently_find_each_other() -> None:
    """As with torchrun on two nodes: the agent whose rank failed counts, the other one may not."""
    store = HashStore()
    seen = set()
    for counts in ([0, 0, 0], [1, 0, 0], [1, 0, 0], [2, 2, 1]):
        found = starts_of(
            store, [RankInfo(rank, 3, "job", count) for rank, count in enumerate(counts)]
        )
        assert found[0] == found[1] == found[2]
        assert found[0].generation == counts[0]
        seen.add(found[0].name)
    assert len(seen) == 4, "what an earlier start has left is not read"


def test_a_rank_missing_at_the_start_is_named() -> None:
    rank_infos = [RankInfo(rank, 3, "job", 0) for rank in range(3)]
    first, second = starts_of(HashStore(), rank_infos[:2], timeout_s=0.3)
    assert "rank 0 waited 0.3 s for rank 2 of job 'job'" in str(first)
    assert str(second) == str(first)
    (alone,) = starts_of(HashStore(), rank_infos[2:], timeout_s=0.1)
    assert "rank 2 waited 0.1 s for rank 0" in str(alone)


def scopes(count: int, timeout_s: float = 5.0) -> list[RendezvousScope]:
    store = HashStore()
    return [
        RendezvousScope(bounded(store, rank), RankInfo(rank, count, "job", 0), 0, timeout_s)
        for rank in range(count)
    ]


def test_a_missing_rank_is_named() -> None:
    first, _ = scopes(2, timeout_s=0.2)
    with pytest.raises(gradlane.RendezvousError, match=r"waited 0\.2 s for rank 1"):
        first.exchange_addresses("127.0.0.1", 1)


def test_an_unreachable_loopback_address_is_named() -> None:
    first, second = scopes(2)
    second.put("address/1", '{"host": "127.0.0.1", "port": 5, "node": "elsewhere"}')
    with pytest.raises(gradlane.RendezvousError, match="rank 1 on elsewhere advertises 127"):
        first.exchange_addresses("10.0.0.1", 5)


@pytest.mark.parametrize(("offered", "agreed"), [((3, 2), 2), ((1, 16), 1), ((4, 4), 4)])
def test_the_rank_with_the_fewest_lanes_decides(offered: tuple[int, int], agreed: int) -> None:
    both = scopes(2)

    def one(scope: RendezvousScope, lanes: int) -> int:
        return scope.exchange_addresses("127.0.0.1", 5, lanes=lanes).lanes

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(one, both, offered)) == [agreed, agreed]


def test_secrets() -> None:
    first, second = scopes(2)
    drawn = first.secret(None)
    assert second.secret(None) == drawn
    assert len(drawn) == 64
    # A secret of the user is not told to the store.
    assert first.secret("own") == second.secret("own") == b"own"
    assert second.secret(None) == drawn


def table(model: nn.Module, **options: Any) -> dict[str, Any]:
    return {"options": options, "tensors": [entry.row() for entry in build_table(model)]}


def test_differences_are_named() -> None:
    base = table(nn.Linear(3, 4), strategy="p3")
    assert first_difference(base, table(nn.Linear(3, 4), strategy="p3"), 1) == ""
    assert "strategy='p3', rank 1 has 'wfbp'" in first_difference(
        base, table(nn.Linear(3, 4), strategy="wfbp"), 1
    )
    alike = {"local": "off", "servers": 1}
    assert "has servers=None, rank 1 has 1" in first_difference(
        table(nn.Linear(3, 4), local="auto", servers=None), table(nn.Linear(3, 4), **alike), 1
    )
    assert "has local='auto', rank 1 has 'off'" in first_difference(
        table(nn.Linear(3, 4), local="auto", servers=1), table(nn.Linear(3, 4), **alike), 1
    )
    assert "('weight') has shape [4, 3] on rank 0" in first_difference(
        base, table(nn.Linear(3, 5), strategy="p3"), 1
    )
    assert "1 on rank 1; the first that only one of them has is 'bias'" in first_difference(
        base, table(nn.Linear(3, 4, bias=False), strategy="p3"), 1
    )
    transposed = nn.Linear(3, 4)
    transposed.weight = nn.Parameter(torch.zeros(3, 4).t())
    assert "has stride [3, 1] on rank 0" in first_difference(
        base, table(transposed, strategy="p3"), 1
    )


def test_the_table_of_an_awkward_model() -> None:
    entries = build_table(Awkward())
    names = [entry.name for entry in entries]
    trained = [entry.name for entry in entries if entry.trained]
    assert names[: len(trained)] == trained
    assert "decoder.weight" not in names, "tied to encoder.weight"
    assert "empty" not in names
    assert [entry.name for entry in entries if not entry.trained] == [
        "frozen.weight",
        "frozen.bias",
        "mask",
        "odd",
    ]
    odd = entries[-1]
    assert odd.plan_row() == {"name": "odd", "numel": 48, "dtype": "u8", "role": "initial"}


def test_mismatch_is_raised_on_every_rank() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 3 + session.rank // 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    errors = run_ranks(3, body, expect_errors=True)
    assert len({str(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, gradlane.RanksDifferError)
        assert "'weight'" in str(error)


def test_another_optimizer_is_named_with_both_classes() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(3, 3)
        kind = torch.optim.Adam if session.rank == 2 else torch.optim.SGD
        session.prepare(model, kind(model.parameters(), lr=0.1))

    errors = run_ranks(3, body, expect_errors=True)
    for error in errors:
        assert isinstance(error, gradlane.RanksDifferError)
        assert str(error).startswith("rank 0 has optimizer='SGD', rank 2 has 'Adam'")


def test_a_rank_that_cannot_take_part_is_named_on_every_rank() -> None:
    for culprit in (0, 1):

        def body(session: Any, culprit: int = culprit) -> None:
            model = nn.Linear(3, 3)
            if session.rank == culprit:
                model.weight = nn.Parameter(model.weight.to(torch.float8_e4m3fn))
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

        errors = run_ranks(2, body, expect_errors=True)
        assert all(isinstance(error, ValueError) for error in errors)
        assert all("float8_e4m3fn" in str(error) for error in errors)
        assert f"rank {culprit} cannot take part" in str(errors[1 - culprit])


def test_sessions_one_after_another_do_not_meet() -> None:
    store = HashStore()
    core = HeldCore()
    for _ in range(2):
        with open_session(
            core,
            Options.of(
                rendezvous=gradlane.Rendezvous(store=store, rank=0, world_size=1, job="same")
            ),
        ) as session:
            model = nn.Linear(2, 2)
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert len({one.settings["job"] for one in core.channels}) == 2


def test_a_closed_session_says_so() -> None:
    session = open_session(
        load_core(), Options.of(rendezvous=gradlane.Rendezvous(rank=0, world_size=1))
    )
    session.close()
    session.close()
    with pytest.raises(gradlane.SessionClosedError, match="was closed"):
        session.synchronize()
    session = open_session(
        load_core(), Options.of(rendezvous=gradlane.Rendezvous(rank=0, world_size=1))
    )
    session.abort("no reason")
    with pytest.raises(gradlane.SessionClosedError, match="given up: no reason"):
        session.prepare(nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))


def test_an_exception_in_one_rank_reaches_all_others() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for step in range(100):
            if session.rank == 1 and step == 3:
                raise KeyError("no such file")
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    errors = run_ranks(3, body, expect_errors=True)
    assert isinstance(errors[1], KeyError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, gradlane.PeerLostError)
        assert error.rank == 1
        assert "rank 1 gave up: KeyError: 'no such file'" in str(error)


def test_a_timeout_is_a_timeout_error() -> None:
    has_waited = threading.Event()

    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        if session.rank == 1:
            assert has_waited.wait(20)
            return
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        with pytest.raises(gradlane.ProgressTimeoutError, match="waiting for rank 1") as caught:
            session.synchronize()
        has_waited.set()
        assert isinstance(caught.value, TimeoutError)

    run_ranks(2, body, progress_timeout_s=1.0, expect_errors=True)
    assert has_waited.is_set()


def test_the_package_imports_without_torch() -> None:
    import subprocess
    import sys

    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gradlane; "
        "sys.exit(1 if 'torch' in sys.modules else 0)"
    )
    from pathlib import Path

    sources = str(Path(gradlane.__file__).parent.parent)
    assert subprocess.run([sys.executable, "-c", script, sources], timeout=60).returncode == 0


def test_a_port_range_and_a_busy_port() -> None:
    class Busy(HeldCore):
        def refuse(self, host: str, port_low: int, port_high: int) -> Any:
            raise OSError(98, "address already in use")

        Listener: Any = refuse

    session = open_session(
        Busy(),
        Options.of(
            rendezvous=gradlane.Rendezvous(rank=0, world_size=1),
            network=gradlane.Network(ports=(5000, 5001)),
        ),
    )
    model = nn.Linear(2, 2)
    with pytest.raises(gradlane.RendezvousError, match=r"ports 5000-5001.*already in use"):
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    session.close()
    assert socket.gethostname()


def prepared_with_versions(
    monkeypatch: pytest.MonkeyPatch, versions: list[dict[str, str]], body: Any = None
) -> list[Any]:
    """Prepare a model, or call a body, on ranks of these versions, by rank."""
    turn = threading.Lock()
    by_thread: dict[int, dict[str, str]] = {}

    def of_thread() -> dict[str, str]:
        with turn:
            return by_thread[threading.get_ident()]

    def prepare(session: Any) -> None:
        with turn:
            by_thread[threading.get_ident()] = versions[session.rank]
        if body is not None:
            body(session)
            return
        model = nn.Linear(2, 2)
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    monkeypatch.setattr(rendezvous, "software_versions", of_thread)
    return run_ranks(len(versions), prepare, expect_errors=True, summary=False)


def pushes(session: Any) -> None:
    """Average an array, without a model."""
    session.arrays.register("a", (2,), "float32")
    session.arrays.push("a", torch.zeros(2).numpy())
    session.arrays.wait("a")


@pytest.mark.parametrize("body", [None, pushes])
def test_another_version_of_gradlane_is_refused_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    versions = [{"gradlane": one, "torch": "2.5"} for one in ("0.1.0", "0.1.0", "0.2.0")]
    for error in prepared_with_versions(monkeypatch, versions, body):
        assert isinstance(error, gradlane.RanksDifferError)
        words = "rank 0 has gradlane 0.1.0, rank 2 has 0.2.0: install one version on all ranks"
        assert str(error).startswith(words)


def test_another_version_of_torch_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    versions = [{"gradlane": "0.1.0", "torch": one} for one in ("2.5.1", "2.5.1", "2.4.0")]
    assert prepared_with_versions(monkeypatch, versions) == [None] * 3
    told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert [one for one in told if one.startswith("rank 2 has torch 2.4.0 and rank 0 has 2.5.1")]
    assert len(told) == 1
