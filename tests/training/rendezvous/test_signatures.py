"""Values of the store: signed with the job's secret, and refused by name where they are not."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._C._distributed_c10d import HashStore, Store

from gradlane.errors import GradlaneError, RendezvousError, SessionFailedError, UsageError
from gradlane.formats.authentication import derived_key, mac
from gradlane.training.rendezvous import rendezvous
from gradlane.training.rendezvous.deadlock import DeadlockDetector
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import (
    Incarnation,
    agree_on_incarnation,
    incarnation_of,
)
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.signatures import StoreSigner, StoreValueRefusedError
from tests.built import needs_core
from tests.training.model.ranks import run_ranks
from tests.training.rendezvous.stores import bounded

SECRET, OTHER = "5ec2e7" * 8, "07he2 secret of 128 bits"
ADDRESS = '{"host": "127.0.0.1", "port": 5, "node": "here"}'
FAR_S = 300.0
"""Far beyond what a test may take: what is refused is not waited for."""


def signer(rank: int = 1, secret: str | None = SECRET, job: str = "job") -> StoreSigner:
    return StoreSigner.of(rank, secret, job, "in memory")


def scope(store: Store, rank: int, secret: str | None, start: str = "0-aa") -> RendezvousScope:
    values = bounded(store, rank, secret=secret)
    return RendezvousScope(values, RankInfo(rank, 2, "job", 0), 0, FAR_S, Incarnation(start, 0))


def test_keys_and_codes_are_those_of_the_standards() -> None:
    """RFC 5869 and RFC 2104, computed by the steps of their texts."""
    import hashlib
    import hmac

    def framed(*parts: bytes) -> bytes:
        return b"".join(len(part).to_bytes(8, "little") + part for part in parts)

    extracted = hmac.new(b"gradlane", b"secret", hashlib.sha256).digest()
    expected = hmac.new(extracted, framed(b"use", b"job") + b"\x01", hashlib.sha256).digest()
    assert derived_key(b"secret", "use", "job") == expected
    assert mac(b"key", b"a", b"bc") == hmac.new(b"key", framed(b"a", b"bc"), "sha256").digest()
    assert mac(b"key", b"ab", b"c") != mac(b"key", b"a", b"bc")


@given(st.text(st.characters()), st.binary(), st.integers(0, 10**6))
def test_a_signed_value_comes_back(path: str, value: bytes, rank: int) -> None:
    stored = signer(rank).sign(path, value)
    assert value == b"" or stored != value
    assert signer(0).check(path, stored, rank) == value
    assert signer(0).check(path, stored, None) == value


@given(st.binary(max_size=40), st.data())
def test_no_single_bit_can_be_flipped(value: bytes, data: st.DataObject) -> None:
    stored = bytearray(signer().sign("path", value))
    bit = data.draw(st.integers(0, 8 * len(stored) - 1))
    stored[bit // 8] ^= 1 << bit % 8
    with pytest.raises(StoreValueRefusedError):
        signer(0).check("path", bytes(stored), 1)


@given(st.binary(max_size=40), st.integers(0, 120))
def test_no_part_of_a_value_is_taken(value: bytes, kept: int) -> None:
    stored = signer().sign("path", value)
    with pytest.raises(StoreValueRefusedError):
        signer(0).check("path", stored[: min(kept, len(stored) - 1)], 1)


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (b"value", "is not signed"),
        (signer().sign("other path", b"value"), "moved it here from another key"),
        (signer(2).sign("path", b"value"), "its signature is wrong"),
        (signer(secret=OTHER).sign("path", b"value"), "its rank has another secret"),
        (signer(job="other").sign("path", b"value"), "its signature is wrong"),
        (b"gradlane-signed 1 1", "its signature is wrong"),
    ],
)
def test_each_wrong_value_is_refused_by_name(stored: bytes, reason: str) -> None:
    with pytest.raises(StoreValueRefusedError, match=reason) as told:
        signer(0).check("path", stored, 1)
    text = str(told.value)
    assert "rank 0 refuses the value of 'path', which rank 1 writes" in text
    assert "GRADLANE_SECRET_FILE" in text


def test_a_rank_without_a_secret_takes_no_signed_value() -> None:
    with pytest.raises(StoreValueRefusedError, match="signed with a secret, and rank 0 has none"):
        signer(0, None).check("path", signer().sign("path", b"value"), 1)


@pytest.mark.parametrize(
    "stored",
    [
        *(b"", b"\0", b"null", b"{}", b"gradlane-value 1 1"),
        signer(1, None).sign("other path", b"value"),
        signer(2, None).sign("path", b"value"),
        signer(1, None).sign("path", b"value")[:-1],
    ],
)
def test_without_a_secret_what_others_leave_is_refused_by_name(stored: bytes) -> None:
    with pytest.raises(StoreValueRefusedError, match="another process has written") as told:
        signer(0, None).check("path", stored, 1)
    assert "the value of 'path', which rank 1 writes" in str(told.value)
    assert signer(0, None).check("path", signer(1, None).sign("path", b""), 1) == b""


def altered(store: Store, key: str) -> None:
    store.set(key, store.get(key).decode().replace("5", "6"))


def unsigned(store: Store, key: str) -> None:
    store.set(key, ADDRESS)


def moved(store: Store, key: str) -> None:
    store.set(key, store.get(key.replace("address/1", "address/0")).decode())


@pytest.mark.parametrize("tamper", [altered, unsigned, moved])
def test_a_tampered_address_is_refused_and_told_to_all(
    tamper: Callable[[Store, str], None],
) -> None:
    store = HashStore()
    first, second = (scope(store, rank, SECRET) for rank in range(2))
    for one in (first, second):
        one.put(f"address/{one.rank_info.rank}", ADDRESS)
    tamper(store, "gradlane/job/0-aa/0/address/1")
    begun_s = time.monotonic()
    with pytest.raises(StoreValueRefusedError, match=r"address/1', which rank 1 writes") as told:
        first.exchange_addresses("127.0.0.1", 1)
    with pytest.raises(RendezvousError) as also_told:
        second.get("verdict", 0)
    assert str(also_told.value) == str(told.value)
    assert time.monotonic() - begun_s < FAR_S / 2


def test_a_value_of_an_earlier_start_is_refused_in_a_later_one() -> None:
    store = HashStore()
    scope(store, 1, SECRET, "0-aa").put("address/1", ADDRESS)
    replayed = store.get("gradlane/job/0-aa/0/address/1")
    store.set("gradlane/job/0-bb/0/address/1", replayed.decode())
    with pytest.raises(StoreValueRefusedError, match="0-bb/0/address/1"):
        scope(store, 0, SECRET, "0-bb").get("address/1", 1)


def test_the_reason_of_a_stranger_is_not_repeated() -> None:
    store = HashStore()
    store.set("gradlane/job/0-aa/0/reason", '{"reason": "all is lost", "missing": []}')
    with pytest.raises(StoreValueRefusedError, match="which any rank may write") as told:
        scope(store, 1, SECRET).get("table", 0)
    assert "all is lost" not in str(told.value)
    assert str(scope(store, 1, SECRET).abort("own reason")) == "own reason"


def agree(store: Store, secrets: list[str | None], timeout_s: float = FAR_S) -> list[object]:
    """Return the incarnation or the error of each rank, one rank a secret."""

    def one(rank: int) -> object:
        try:
            return agree_on_incarnation(
                bounded(store, rank, secret=secrets[rank]),
                RankInfo(rank, len(secrets), "job", 0),
                timeout_s,
            )
        except RendezvousError as error:
            return error

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(one, range(len(secrets))))


@pytest.mark.parametrize("other", [None, OTHER])
def test_a_rank_with_another_secret_or_none_is_named_at_once(other: str | None) -> None:
    errors = agree(HashStore(), [SECRET, SECRET, other], timeout_s=5.0)
    assert all(isinstance(error, RendezvousError) for error in errors)
    assert "rank 0 refuses the value of 'gradlane/job/start/asked/2'" in str(errors[0])
    assert "rank 2 refuses the value of 'gradlane/job/start/told/2'" in str(errors[2])
    # Rank 1 may not have asked yet when rank 0 gives up.
    assert str(errors[1]) == str(errors[0]) or "waited" in str(errors[1])


def test_rank_0_without_the_secret_is_named_at_once() -> None:
    errors = agree(HashStore(), [None, SECRET, SECRET])
    assert "signed with a secret, and rank 0 has none" in str(errors[0])
    assert all("told/" in str(error) and "is not signed" in str(error) for error in errors[1:])


class Replaying(HashStore):
    """A store that answers a key with an earlier value."""

    def __init__(self, key: str, value: bytes) -> None:
        super().__init__()
        self._replayed = (key, value)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Return the earlier value of the one key, which is there from the first moment on."""
        if key == self._replayed[0]:
            return self._replayed[1]
        return bytes(super().compare_set(key, expected, wanted))


def test_a_replayed_reply_of_an_earlier_start_is_never_taken() -> None:
    """A rank takes the reply to its own request alone."""
    earlier = HashStore()
    first, _ = agree(earlier, [SECRET, SECRET])
    assert isinstance(first, Incarnation)
    key = "gradlane/job/start/told/1"
    errors = agree(Replaying(key, earlier.get(key)), [SECRET, SECRET], timeout_s=0.3)
    assert "waited 0.3 s for rank 1" in str(errors[0])
    assert "its last reply answers a request of an earlier start" in str(errors[1])


def test_a_replayed_acknowledgement_of_an_earlier_start_is_never_taken() -> None:
    """The name that a rank acknowledges is drawn anew for each start."""
    earlier = HashStore()
    agree(earlier, [SECRET, SECRET])
    key = "gradlane/job/start/heard/1"
    errors = agree(Replaying(key, earlier.get(key)), [SECRET, SECRET], timeout_s=0.3)
    assert all("waited 0.3 s for rank 1" in str(error) for error in errors)


def test_sessions_of_a_process_have_a_secret_or_have_none() -> None:
    """A name that strangers may have chosen is not taken over by a session with a secret."""
    store = HashStore()
    for first, second in ((None, SECRET), (SECRET, None)):
        place = RankInfo(0, 1, f"mixed {first}", 0)
        found = incarnation_of(bounded(store, secret=first), place, FAR_S)
        assert incarnation_of(bounded(store, secret=first), place, FAR_S) == found
        with pytest.raises(UsageError, match="give all sessions of a process the same secret"):
            incarnation_of(bounded(store, secret=second), place, FAR_S)


def test_the_names_of_two_starts_differ() -> None:
    first, second = (agree(HashStore(), [SECRET, SECRET])[1] for _ in range(2))
    assert isinstance(first, Incarnation) and isinstance(second, Incarnation)
    assert first != second and len(first.name) >= 16


def test_a_forged_report_of_the_deadlock_detector_ends_the_session() -> None:
    class Model:
        step = 1

        def unsubmitted_tensors(self) -> list[int]:
            return [0]

    store = HashStore()
    watch = DeadlockDetector(bounded(store, 0, secret=SECRET), RankInfo(0, 2, "job", 0))
    store.set("gradlane/job/0/deadlock/1", "{}")
    told: list[str] = []
    for name in ("a", "b"):
        watch.watch(name, Model(), told.append)
    with watch.waiting("a", 1, None):
        deadline_s = time.monotonic() + 20.0
        while len(told) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.05)
    watch.close()
    assert all("deadlock/1', which rank 1 writes" in text for text in told) and len(told) == 2


def addresses_of(first: RendezvousScope, second: RendezvousScope) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: one.exchange_addresses("127.0.0.1", 1), (first, second)))


@pytest.mark.parametrize(
    ("secret", "apart", "warnings"), [(None, True, 1), (SECRET, True, 0), (None, False, 0)]
)
def test_rank_0_warns_once_of_a_rank_elsewhere_where_there_is_no_secret(
    secret: str | None,
    apart: bool,
    warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = iter(range(1000))
    if apart:
        monkeypatch.setattr(rendezvous, "machine_name", lambda: f"machine {next(names)}")
    monkeypatch.setattr(rendezvous, "warned", set())
    for _ in range(2):
        store = HashStore()
        addresses_of(scope(store, 0, secret), scope(store, 1, secret))
    told = [one.getMessage() for one in caplog.records if one.name == "gradlane"]
    assert len(told) == warnings
    assert all("rank 1 is on another machine, and the job has no secret" in one for one in told)


def test_what_is_refused_at_the_end_is_raised() -> None:
    """Not taken for a store that has ended with its job."""
    from gradlane.training.model.consistency_check import compare_endings
    from gradlane.training.rendezvous.parameter_check import ParameterCheck

    store = HashStore()
    first = scope(store, 0, SECRET)
    first.put("ending/0", "[1, 0, 0, []]")
    store.set("gradlane/job/0-aa/0/ending/1", "[1, 0, 0, []]")
    with pytest.raises((RendezvousError, SessionFailedError), match="ending/1"):
        compare_endings(first, ParameterCheck(first, [], [], None, 0))


@needs_core
def test_a_forged_value_ends_a_training_by_name_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sign = StoreSigner.sign

    def unsigned(self: StoreSigner, path: str, value: str | bytes) -> bytes:
        stored = sign(self, path, value)
        return stored.split(b" ", 4)[4] if "checksums/2/1" in path else stored

    monkeypatch.setattr(StoreSigner, "sign", unsigned)

    def body(session: Any) -> None:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(4):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    errors = run_ranks(3, body, expect_errors=True, secret=SECRET, check_every=1)
    for error in errors:
        assert isinstance(error, GradlaneError)
        assert "checksums/2/1', which rank 1 writes" in str(error), errors
        assert "it is not signed" in str(error)
