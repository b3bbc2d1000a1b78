"""The live page of real sessions: ranks over loopback, and readers of their state."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import threading
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import gradlane
from gradlane.formats.live_state import LiveState, read_state
from gradlane.training.monitoring import endpoint
from gradlane.training.monitoring.metrics import Metrics
from gradlane.training.monitoring.observer import Observer
from gradlane.training.monitoring.residual_norms import ResidualNorms
from gradlane.training.options.option_fields import with_environment
from gradlane.training.options.option_groups import Monitoring
from tests.built import needs_core
from tests.training.model.models import seeded
from tests.training.monitoring.test_session import Model, run, train
from tests.waiting import eventually

pytestmark = needs_core


def read(session: gradlane.Session, query: str = "") -> LiveState:
    url = session.monitoring.dashboard_url
    assert url is not None
    with urllib.request.urlopen(f"{url}state.json{query}", timeout=30) as answer:
        assert answer.headers["Content-Type"] == "application/json"
        return read_state(answer.read())


@pytest.fixture
def patient_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions that wait for their readers for as long as a busy machine takes."""
    monkeypatch.setattr(endpoint, "FAREWELL_S", 60.0)


class Reader:
    """Polls a state in a thread, to the end of the session."""

    def __init__(self, url: str) -> None:
        self.states: list[LiveState] = []
        self._url = url
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            while not self.states or not self.states[-1]["ending"]:
                url = f"{self._url}state.json{'?next' if self.states else ''}"
                with urllib.request.urlopen(url, timeout=30) as answer:
                    self.states.append(read_state(answer.read()))

    def join(self) -> list[LiveState]:
        self._thread.join(60.0)
        assert not self._thread.is_alive()
        return self.states


@pytest.mark.usefixtures("patient_end")
def test_a_page_is_polled_while_two_ranks_train_and_hears_the_end() -> None:
    readers: list[Reader] = []

    def body(session: gradlane.Session) -> int:
        if session.rank == 0:
            assert session.monitoring.dashboard_url is not None
            readers.append(Reader(session.monitoring.dashboard_url))
        else:
            assert session.monitoring.dashboard_url is None
        model = seeded(Model)
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        steps, deadline_s = 0, time.monotonic() + 60.0
        while not any(session.exchange(is_seen(readers) or time.monotonic() > deadline_s)):
            for _ in range(5):
                steps += 1
                loss = model(torch.ones(2, 40)).square().mean()
                time.sleep(0.02 * session.rank)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        return steps

    def is_seen(readers: list[Reader]) -> bool:
        return bool(readers) and len({state["step"] for state in readers[0].states}) >= 4

    steps = run(2, body, dashboard="127.0.0.1:0")
    states = readers[0].join()
    last = states[-1]
    assert last["ending"] == "closed" and last["events"][-1]["text"] == "session closed"
    assert [last["step"]] * 2 == steps
    assert [state["step"] for state in states] == sorted(state["step"] for state in states)
    names = {row["name"] for state in states for row in state["layers"]}
    assert names and names <= {"first", "last", "gradlane's rank statuses"}
    this, other = last["ranks"]
    assert (this["role"], this["tx_bytes"], other["role"]) == ("self", 0, "trains")
    assert min(other["tx_bytes"], other["rx_bytes"], other["owned_bytes"]) > 0
    assert last["codecs"] == [{"codec": "raw", "tensors": 4, "residual_norm": None}]
    assert sum(row["steps"] for row in last["history"]) == last["steps"]["count"]
    assert any("model 1 is connected: 4 tensors" in event["text"] for event in last["events"])


def test_a_rank_that_is_waited_for_is_seen_while_it_is_late() -> None:
    def body(session: gradlane.Session) -> None:
        def hold_back() -> None:
            """Rank 1 is late in its second step, until rank 0's wait was seen."""
            if session.rank == 1 and session.metrics()["step"] == 1:
                assert eventually(lambda: bool(late), within_s=60.0)

        def look() -> None:
            while not late:
                state = read(session)
                if state["wait"] is not None and state["wait"]["tensors"]:
                    late.append(state)

        looking = threading.Thread(target=look if session.rank == 0 else lambda: None)
        looking.start()
        train(session, seeded(Model), before_backward=hold_back)
        looking.join()

    late: list[LiveState] = []
    run(2, body, dashboard=0)
    wait = late[0]["wait"]
    assert wait is not None and wait["step"] == 2
    assert set(wait["tensors"]) <= {
        "first.weight",
        "first.bias and 2 more",
        "gradlane's rank statuses",
    }


@pytest.mark.usefixtures("patient_end")
def test_a_session_that_is_given_up_says_why() -> None:
    readers: list[Reader] = []

    def body(session: gradlane.Session) -> None:
        train(session, seeded(Model))
        if session.rank == 0:
            assert session.monitoring.dashboard_url is not None
            readers.append(Reader(session.monitoring.dashboard_url))
            assert eventually(lambda: len(readers[0].states) > 1, within_s=60.0)
            raise ValueError("the data are gone")

    run(2, body, dashboard=0, expect_errors=True)
    last = readers[0].join()[-1]
    assert last["ending"] == "given up: ValueError: the data are gone"
    assert last["events"][-1]["level"] == "error"


def test_norms_of_residuals_are_those_that_a_checkpoint_has() -> None:
    def body(session: gradlane.Session) -> None:
        train(session, seeded(Model))
        state = read(session)
        own = session.state_dict()["models"][0]["worker_residual"]
        expected = {name: float(values.double().norm()) for name, values in own.items()}
        assert expected and min(expected.values()) > 0.0
        found = {row["name"]: row["norm"] for row in state["residuals"]}
        assert found == pytest.approx(expected, rel=1e-6)
        coded, raw = state["codecs"]
        assert coded["codec"].startswith("topk") and coded["tensors"] == len(expected)
        assert coded["residual_norm"] == pytest.approx(
            sum(norm**2 for norm in expected.values()) ** 0.5
        )
        assert raw["residual_norm"] is None

    codec = {"*.bias": "raw", "*": "topk:ratio=0.1"}
    run(2, body, dashboard_everywhere=True, dashboard=0, codec=codec)


def test_checkpoints_are_events(tmp_path: Path) -> None:
    def body(session: gradlane.Session) -> None:
        train(session, seeded(Model), steps=4)
        if session.rank == 0:
            texts = [f"the checkpoint of step {step} is complete" for step in (2, 4)]
            assert eventually(
                lambda: {event["text"] for event in read(session)["events"]} >= {*texts},
                within_s=60.0,
            )

    run(2, body, dashboard=0, checkpoint_folder=tmp_path, checkpoint_every=2)


class SlowResiduals:
    """A channel with six slices of two tensors, of which a call reads two."""

    has_ended = False

    def residual_squares(
        self, first: int, elements_max: int
    ) -> tuple[list[tuple[int, int, float]], int]:
        if self.has_ended:
            raise RuntimeError("the channel is closed")
        rows = [(one // 3, one, float(one)) for one in range(first, first + 2)]
        return rows, (first + 2) % 6


def test_norms_are_read_in_parts_and_stay_after_the_end() -> None:
    channel: Any = SlowResiduals()
    norms = ResidualNorms(channel, ["a", "b"])
    assert norms.read() == norms.read() == {}
    whole = {"a": 3.0**0.5, "b": 12.0**0.5}
    assert norms.read() == norms.read() == whole
    channel.has_ended = True
    assert norms.read() == whole


def test_a_port_that_is_taken_is_named_with_the_next_step() -> None:
    def body(session: gradlane.Session) -> str:
        url = session.monitoring.dashboard_url
        assert url is not None
        port = int(url.rstrip("/").rpartition(":")[2])
        with pytest.raises(ValueError, match=rf"rank 0 .*port {port}.*dashboard=.*, or 0 for any"):
            run(1, lambda session: None, dashboard=port)
        # The session before is not touched.
        assert read(session)["ending"] == ""
        return url

    (url,) = run(1, body, dashboard=0)
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_every_rank_has_a_page_if_all_are_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: gradlane.Session) -> int:
        train(session, seeded(Model))
        return read(session)["rank"]

    assert run(2, body, dashboard=0, dashboard_everywhere=True) == [0, 1]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # Ranks of a node take ports by their local rank: the second one has this.
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ValueError, match=f"port {port} "):
            run(1, lambda session: None, dashboard=port - 1, dashboard_everywhere=True)
        monkeypatch.setenv("LOCAL_RANK", "0")
        with pytest.raises(
            ValueError, match="dashboard_everywhere is on and there is no dashboard"
        ):
            run(1, lambda session: None, dashboard_everywhere=True)


def test_a_page_for_others_is_asked_for_by_name_and_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def urls(session: gradlane.Session) -> str | None:
        return session.monitoring.dashboard_url

    (own,) = run(1, urls, dashboard=0)
    assert own is not None and own.startswith("http://127.0.0.1:")
    shown = f"rank 0 shows the training at {own} and to `gradlane watch {own[7:-1]}`"
    assert caplog.messages == [shown]
    caplog.clear()
    run(1, urls, dashboard="0.0.0.0:0")
    _, warning = caplog.records
    assert warning.levelname == "WARNING" and "no password" in warning.getMessage()
    caplog.clear()
    assert run(1, urls) == [None] and caplog.messages == []
    with pytest.raises(ValueError, match="dashboard is :7070; it must be PORT"):
        Monitoring(dashboard=":7070")
    with pytest.raises(ValueError, match="dashboard is 70000; it must be 0 to 65535"):
        Monitoring(dashboard=70_000)
    given = {"GRADLANE_DASHBOARD": "10.0.0.1:7070", "GRADLANE_DASHBOARD_EVERYWHERE": "1"}
    wanted = with_environment(Monitoring(), given)
    assert (wanted.dashboard, wanted.dashboard_everywhere) == ("10.0.0.1:7070", True)


def test_the_page_lets_a_browser_run_and_load_nothing_else() -> None:
    def body(session: gradlane.Session) -> None:
        url = session.monitoring.dashboard_url
        assert url is not None
        with urllib.request.urlopen(url, timeout=10) as answer:
            policy = answer.headers["Content-Security-Policy"]
            page = answer.read().decode()
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in page and " src=" not in page
        with pytest.raises(urllib.error.HTTPError, match="405"):
            urllib.request.urlopen(url, data=b"x", timeout=10)
        request = urllib.request.Request(f"{url}state.json", headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(request, timeout=10)

    run(1, body, dashboard=0)


def test_a_forked_child_serves_nothing() -> None:
    def body(session: gradlane.Session) -> int:
        train(session, seeded(Model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            os._exit(0 if session.monitoring.dashboard_url is None else 4)
        _, status = os.waitpid(child, 0)
        assert read(session)["step"] == 6
        return os.waitstatus_to_exitcode(status)

    assert run(1, body, dashboard=0) == [0]


def test_nothing_is_computed_while_no_one_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(session: gradlane.Session) -> None:
        made: list[Any] = []
        metrics = Observer.metrics

        def counted(self: Observer) -> Metrics:
            made.append(1)
            return metrics(self)

        monkeypatch.setattr(Observer, "metrics", counted)
        train(session, seeded(Model))
        assert made == []
        read(session)
        assert made == [1]

    run(1, body, dashboard=0)
