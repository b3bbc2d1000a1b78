"""The command `gradlane watch`, at pages of made-up sessions."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from gradlane.cli import watch as module
from gradlane.cli.watch import line, picture, sparkline
from gradlane.formats.live_state import LiveState
from gradlane.formats.serialization.strict_json import dumps
from gradlane.report.console import wide_console
from gradlane.training.monitoring import endpoint as endpoints
from gradlane.training.monitoring.endpoint import Endpoint, Page
from tests.command_line import run
from tests.training.monitoring.live_source import FakeSource
from tests.waiting import eventually


@pytest.fixture
def source() -> Iterator[FakeSource]:
    one = FakeSource(steps=20)
    yield one
    one.view.forget()


@pytest.fixture
def endpoint(source: FakeSource) -> Iterator[Endpoint]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoints, "PAGE_AGE_S", 0.05)
        one = Endpoint("127.0.0.1", 0, {"/state.json": state_page(source)})
        yield one
        one.close()


def state_page(source: FakeSource) -> Page:
    return Page("application/json", lambda: dumps(source.view.state()))


Watch = Callable[..., tuple[int, str, str]]


@pytest.fixture
def watch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setattr(module, "RETRY_S", 0.3)
    return lambda *arguments: run(monkeypatch, capsys, "watch", *arguments)


def test_once_shows_steps_waits_ranks_codecs_and_events(
    source: FakeSource, endpoint: Endpoint, watch: Watch
) -> None:
    source.view.add_event("the plan has changed")
    for address in (
        f"127.0.0.1:{endpoint.port}",
        f"{endpoint.port}",
        f"http://127.0.0.1:{endpoint.port}/",
    ):
        status, shown, errors = watch(address, "--once")
        assert (status, errors) == (0, "")
    assert "step 20" in shown and "25% waiting" in shown and "1.000 s a step" in shown
    assert "fc" in shown and "80%" in shown and "0 (this one)" in shown
    assert "topk:ratio=0.01: 1 tensors" in shown and "the plan has changed" in shown


def test_a_hostile_name_moves_no_cursor_and_styles_nothing(
    source: FakeSource, endpoint: Endpoint, watch: Watch
) -> None:
    source.view.add_event("[bold red]\x1b[2J[/]")
    _, shown, _ = watch(str(endpoint.port), "--once")
    assert "<script>" in shown and r"[bold red]\x1b[2J[/]" in shown
    assert all(one.isprintable() or one == "\n" for one in shown)


def test_json_is_one_state_a_line_until_the_session_closes(
    source: FakeSource, endpoint: Endpoint, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "FAREWELL_S", 60.0)
    status, shown, _ = watch(str(endpoint.port), "--once", "--json")
    assert status == 0 and json.loads(shown)["step"] == 20
    state = source.view.state
    made: list[LiveState] = []

    def noted() -> LiveState:
        made.append(state())
        return made[-1]

    monkeypatch.setattr(source.view, "state", noted)

    def end() -> None:
        # A follower was answered, and comes back.
        assert eventually(lambda: len(made) >= 2, within_s=60.0)
        source.view.end("closed")
        endpoint.close()

    ending = threading.Thread(target=end)
    ending.start()
    status, shown, errors = watch(str(endpoint.port), "--json")
    ending.join()
    states = [json.loads(one) for one in shown.splitlines()]
    assert (status, errors) == (0, "")
    assert states[-1]["ending"] == "closed" and states[0]["format"] == "gradlane-live"


@pytest.mark.parametrize(
    ("ending", "status", "message"),
    [
        ("closed", 0, "The session closed in order after 20 steps and 20 s."),
        ("given up: ValueError: \x1bno", 1, r"20 steps and 20 s: given up: ValueError: \x1bno"),
        (
            "failed: rank 1 is lost",
            1,
            "the session has ended after 20 steps and 20 s: failed: rank 1",
        ),
    ],
)
def test_it_ends_with_the_session_and_says_how(
    source: FakeSource, endpoint: Endpoint, watch: Watch, ending: str, status: int, message: str
) -> None:
    source.view.end(ending)
    found, shown, errors = watch(str(endpoint.port))
    assert found == status and message in (errors if status else shown)


def test_a_process_that_is_gone_is_said_to_be(source: FakeSource, watch: Watch) -> None:
    """It was killed: there is no last state, and the second answer breaks off."""
    server = socket.create_server(("127.0.0.1", 0))
    content = dumps(source.view.state())
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content)

    def serve() -> None:
        for answer in (head + content, head + content[:100]):
            client, _ = server.accept()
            with client:
                client.recv(65_536)
                client.sendall(answer)
        server.close()

    serving = threading.Thread(target=serve)
    serving.start()
    status, _, errors = watch(str(server.getsockname()[1]))
    serving.join()
    assert status == 1
    assert "rank 0 answers no more, after step 20, and has not said that its session ends" in errors


def test_nobody_there_and_other_servers_are_said_to_be(watch: Watch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    status, _, errors = watch(f"127.0.0.1:{port}")
    assert status == 1 and f"nobody answers at 127.0.0.1:{port}: Connection refused" in errors
    assert "Monitoring(dashboard=...)" in errors and "ssh -L" in errors
    metrics = Endpoint("127.0.0.1", 0, {"/metrics": Page("text/plain", lambda: b"a 1\n")})
    unable = Endpoint("127.0.0.1", 0, {"/state.json": Page("a/b", lambda: bytes(1 // 0))})
    other = Endpoint("127.0.0.1", 0, {"/state.json": Page("text/plain", lambda: b'{"format": 1}')})
    try:
        status, _, errors = watch(str(metrics.port))
        assert status == 1 and "answers /state.json with 404" in errors
        status, _, errors = watch(str(unable.port))
        assert status == 1 and "has no state at present" in errors
        status, _, errors = watch(str(other.port))
        assert status == 1 and "no state of a session" in errors
    finally:
        metrics.close()
        unable.close()
        other.close()
    status, _, errors = watch("host:port")
    assert status == 2 and "must be PORT" in errors


def test_an_answer_without_an_end_is_cut(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STATE_BYTES_MAX", 1 << 20)
    endless = Endpoint("127.0.0.1", 0, {"/state.json": Page("a/b", lambda: bytes(4 << 20))})
    try:
        status, _, errors = watch(str(endless.port))
        assert status == 1 and "over 1 MiB" in errors
    finally:
        endless.close()


def test_ctrl_c_on_a_terminal_is_quiet(source: FakeSource, endpoint: Endpoint) -> None:
    controller, terminal = pty.openpty()
    code = "import sys; from gradlane.cli.main import main; sys.argv[0] = 'gradlane'; main()"
    program = subprocess.Popen(
        [sys.executable, "-c", code, "watch", str(endpoint.port)],
        stdout=terminal,
        stderr=terminal,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "110", "LINES": "40"},
    )
    os.close(terminal)
    shown = b""
    while b"step 20" not in shown:
        shown += os.read(controller, 65_536)
    program.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(controller, 65_536):
            shown += chunk
    except OSError:
        # The program has closed its end.
        pass
    os.close(controller)
    assert program.wait(60) == 0
    assert b"Traceback" not in shown and b"interrupted" not in shown


def state_of(source: FakeSource) -> LiveState:
    return source.view.state()


def test_lines_name_a_stall_and_its_layer(source: FakeSource) -> None:
    assert line(state_of(source)).endswith("; training")
    source.pass_time(100.0)
    source.wait = {"step": 21, "tensors": ["fc.weight", "fc.bias"], "tensor_count": 3}
    assert line(state_of(source)).endswith(
        "; no news since 1 min 41 s: no step has begun; the program waits for fc.weight and 2 more "
        "of step 21"
    )


def test_a_thousand_ranks_and_layers_fit_on_a_screen(source: FakeSource) -> None:
    state = state_of(source)
    row, rank = state["layers"][0], state["ranks"][1]
    state["layers"] = [{**row, "name": f"layer{number}"} for number in range(1000)]
    state["ranks"] = [
        {**rank, "rank": number, "recent_last_share": number / 1000} for number in range(1000)
    ]
    console = wide_console()
    with console.capture() as captured:
        console.print(picture(state, 40))
    shown = captured.get()
    assert shown.count("\n") < 40
    assert "999" in shown and "layer0" in shown


def test_a_sparkline_has_a_bar_a_step_and_survives_outliers() -> None:
    def row(mean_s: float) -> dict[str, float]:
        return {"mean_s": mean_s}

    rows = [row(1.0)] * 10 + [row(1000.0), row(0.0)]
    bars = sparkline(rows)  # type: ignore[arg-type]
    assert len(bars) == 12 and bars[-2:] == "█▁" and len(set(bars)) == 3
    assert sparkline([]) == "" and sparkline([row(0.0)]) == "▁"  # type: ignore[list-item]
