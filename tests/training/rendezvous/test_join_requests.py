"""The first member's look for requests to join, in a store that has earlier ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from gradlane.errors import RendezvousError
from gradlane.training.rendezvous import join_requests
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.join_requests import (
    JOINED,
    JoinRequest,
    JoinRequests,
    join_keys,
)
from gradlane.training.rendezvous.membership import Membership
from tests.training.rendezvous.stores import bounded
from tests.waiting import eventually

PATIENT_S = 60.0


def test_requests_that_are_settled_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay in the store, which the restart of a job finds them in."""
    # An answer to a call of them would be waited for until this test has failed.
    monkeypatch.setattr(join_requests, "_ANSWER_S", 2 * PATIENT_S)
    monkeypatch.setattr(join_requests, "_LOOK_EVERY_S", 0.01)
    store = join_keys(bounded(), "job")
    for outcome in (JOINED, "a member could not connect", JOINED):
        store.set(f"outcome/{JoinRequest(store).number}", outcome)
    membership = Membership(RankInfo(0, 2, "job", restart=0))
    requests = JoinRequests(store, membership)
    requests.start()
    request = JoinRequest(store)
    ends: list[str] = []

    def fail(plan: bytes) -> Callable[[], bool]:
        raise AssertionError(plan)

    def wait() -> None:
        try:
            request.wait_for_invitation(SuspendAwareDeadline(PATIENT_S), fail)
        except RendezvousError as error:
            ends.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        assert eventually(lambda: membership.request == 2 * request.number + 1, PATIENT_S)
        assert [store.read(f"call/{number}", None) for number in (1, 2, 3)] == [None] * 3
    finally:
        requests.close()
        requests.settle(request.number, "the test is over")
        waiting.join()
    assert ends == ["the members did not let this rank in: the test is over"]


def test_a_rank_waits_while_one_that_asked_before_it_joins() -> None:
    store = join_keys(bounded(), "job")
    for outcome in (JOINED, ""):
        number = JoinRequest(store).number
        if outcome:
            store.set(f"outcome/{number}", outcome)
    request = JoinRequest(store)
    ends: list[str] = []

    def wait() -> None:
        try:
            request.wait_for_invitation(SuspendAwareDeadline(1.0), lambda _: pytest.fail("a plan"))
        except RendezvousError as error:
            ends.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    end_s = time.monotonic() + 3.0
    calls = 0
    while time.monotonic() < end_s:
        calls += 1
        store.set(f"call/{number}", f"call {calls}")
        assert not ends, "it did not wait for the request before its own"
        time.sleep(0.02)
    # Nobody calls any more.
    waiting.join(PATIENT_S)
    assert "no rank found it" in ends[0]
