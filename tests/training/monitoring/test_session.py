"""Metrics of real sessions: ranks over loopback, one of them slow."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.errors import SessionClosedError
from gradlane.formats.timeline.chrome import read_chrome
from gradlane.training.monitoring.metrics import Metrics, waited_s
from gradlane.training.monitoring.recorded import rank_path
from tests.built import needs_core
from tests.training.model.models import seeded
from tests.training.model.ranks import run_ranks
from tests.training.monitoring.test_prometheus import parsed
from tests.training.monitoring.test_reports import Writer

pytestmark = needs_core

STEPS = 6


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(40, 300)
        self.last = nn.Linear(300, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(values)))  # type: ignore[no-any-return]


def train(
    session: gradlane.Session,
    model: nn.Module,
    steps: int = STEPS,
    before_backward: Callable[[], None] = lambda: None,
    **settings: Any,
) -> None:
    model, optimizer = session.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.01), **settings
    )
    for _ in range(steps):
        loss = model(torch.ones(2, 40)).square().mean()
        before_backward()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    session.synchronize()


def run(world_size: int, body: Callable[[gradlane.Session], Any], **options: Any) -> list[Any]:
    return run_ranks(world_size, body, slice_elems=1000, summary=False, **options)


def test_a_slow_rank_is_the_last_one_at_the_owners() -> None:
    """Rank 1 waits until the others' pushes are here: at its own slices nobody else is last."""
    whole_bytes = 4 * sum(parameter.numel() for parameter in Model().parameters())

    def body(session: gradlane.Session) -> Metrics:
        model = seeded(Model)
        steps_begun = 0

        def hold_back() -> None:
            nonlocal steps_begun
            steps_begun += 1
            # Each step before, 0 included, has brought the model once; of this one pushes come,
            # about half of it, and no results as long as this rank gives nothing.
            expected_bytes = (steps_begun + 0.4) * whole_bytes
            deadline = time.monotonic() + 30.0
            while session.metrics()["rx_payload_bytes"] < expected_bytes:
                assert time.monotonic() < deadline
                time.sleep(0.002)

        train(session, model, before_backward=hold_back if session.rank == 1 else lambda: None)
        return session.metrics()

    first, second = run(2, body)
    own = second["stragglers"][1]
    assert own["last_share"] > 0.5, second["stragglers"]
    assert 1 <= own["max_step"] <= STEPS and own["late_s_max"] > 0.0
    assert sum(row["last_count"] for row in first["stragglers"]) <= first["gathered_slices"]


def test_numbers_are_whole_json_and_stay_after_the_end() -> None:
    sessions: list[gradlane.Session] = []

    def body(session: gradlane.Session) -> Metrics:
        sessions.append(session)
        train(session, seeded(Model))
        return session.metrics()

    for rank, metrics in enumerate(run(2, body)):
        json.dumps(metrics)
        assert metrics["rank"] == rank and metrics["step"] == STEPS
        assert metrics["steps"]["count"] == STEPS - 1
        assert 0.0 <= metrics["steps"]["wait_share"] <= 1.0
        assert metrics["codec_ratio"] == 1.0 and metrics["raw_bytes"] > 0
        assert metrics["tx_bytes"] == sum(peer["tx_bytes"] for peer in metrics["peers"])
        assert metrics["tx_payload_bytes"] < metrics["tx_bytes"]
        assert metrics["peers"][rank]["tx_bytes"] == 0
        assert sum(map(waited_s, metrics["tensor_waits"])) == pytest.approx(
            metrics["wait_s"], abs=1e-3
        )
        names = {wait["name"] for wait in metrics["layer_waits"]}
        assert names <= {"first", "last", "gradlane's rank statuses"}
    for session in sessions:
        after = session.metrics()
        assert after["step"] == STEPS and after["queued_bytes"] == 0


def test_waits_of_forward_are_those_of_its_layers() -> None:
    """With clipping everything is waited for at once; without it, layer by layer."""

    def body(session: gradlane.Session) -> Metrics:
        model = seeded(Model)
        train(
            session,
            model,
            before_backward=lambda: time.sleep(0.1 * session.rank),
            defer=session.rank == 1,
        )
        return session.metrics()

    whole, sum_by_layer = run(2, body)
    assert sum(wait["whole_step_s"] for wait in whole["layer_waits"]) > 0.05
    longest = max(whole["layer_waits"], key=lambda wait: wait["wait_s_max"])
    assert longest["wait_s_max"] > 0.0 and 1 <= longest["max_step"] <= STEPS
    waits = {wait["name"]: wait for wait in sum_by_layer["layer_waits"]}
    assert all(wait["last_step"] <= STEPS for wait in waits.values())
    assert sum(map(waited_s, waits.values())) == pytest.approx(sum_by_layer["wait_s"])


def test_other_threads_may_look_on() -> None:
    def body(session: gradlane.Session) -> int:
        over = threading.Event()
        seen = []

        def on_poll() -> None:
            while not over.is_set():
                seen.append(session.metrics()["tx_bytes"])

        thread = threading.Thread(target=on_poll)
        thread.start()
        train(session, seeded(Model), steps=20)
        session.close()
        over.set()
        thread.join()
        assert seen == sorted(seen)
        return len(seen)

    assert all(count > 0 for count in run(2, body))


def test_preparing_again_loses_no_counts() -> None:
    def body(session: gradlane.Session) -> tuple[Metrics, Metrics]:
        model = seeded(Model)
        train(session, model)
        before = session.metrics()
        train(session, model)
        return before, session.metrics()

    for before, after in run(2, body):
        assert after["step"] == 2 * STEPS
        assert after["tx_bytes"] >= 2 * before["tx_bytes"] * 0.9
        assert after["steps"]["count"] == 2 * (STEPS - 1)
        assert after["gathered_slices"] == 2 * before["gathered_slices"]


def test_the_line_comes_once_from_rank_0(caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda session: train(session, seeded(Model)))
    (line,) = caplog.messages
    caplog.clear()
    assert (line.startswith(f"{STEPS} steps, ") and "slices" in line) or "stands out" in line
    run_ranks(2, lambda session: train(session, seeded(Model), steps=0))
    run_ranks(2, lambda session: train(session, seeded(Model)), summary=False)
    assert caplog.messages == []


def test_the_endpoint_answers_while_training_and_ends_with_the_session() -> None:
    ports: list[int] = []

    def body(session: gradlane.Session) -> str:
        train(session, seeded(Model))
        port = session.monitoring.prometheus_port
        assert port is not None
        ports.append(port)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    for rank, page in enumerate(run(2, body, prometheus=0)):
        _, values = parsed(page)
        own = ("rank", str(rank))
        assert values[("gradlane_steps_total", frozenset({own}))] == STEPS
        peer = ("peer", str(1 - rank))
        assert values[("gradlane_sent_bytes_total", frozenset({own, peer}))] > 0
    for port in ports:
        with pytest.raises(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


@pytest.mark.parametrize("codec", ["onebit", "qsgd:bits=8"])
def test_the_endpoint_has_the_norm_of_residuals(codec: str) -> None:
    def body(session: gradlane.Session) -> float:
        train(session, seeded(Model))
        address = f"http://127.0.0.1:{session.monitoring.prometheus_port}/metrics"
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            with urllib.request.urlopen(address, timeout=10) as answer:
                _, values = parsed(answer.read().decode())
            rank = frozenset({("rank", str(session.rank))})
            found = values.get(("gradlane_residual_norm", rank))
            if found is not None or codec != "onebit":
                return found or 0.0
            time.sleep(0.2)
        raise AssertionError("no norm")

    found = run(2, body, prometheus=0, codec=codec)
    assert all((norm > 0.0) == (codec == "onebit") for norm in found)


def test_scalars_are_written_every_so_many_steps() -> None:
    def body(session: gradlane.Session) -> list[tuple[str, float, int]]:
        writer = Writer()
        called: list[tuple[dict[str, float], int]] = []
        session.log_to(writer, every=2)
        session.log_to(lambda values, step: called.append((values, step)), every=2)
        train(session, seeded(Model), steps=7)
        assert [step for _, step in called] == [2, 4, 6]
        assert [(tag, step) for tag, _, step in writer.rows] == [
            (tag, step) for values, step in called for tag in values
        ]
        return writer.rows

    for rows in run(2, body):
        assert sorted({step for _, _, step in rows}) == [2, 4, 6]
        tags = {tag for tag, _, _ in rows}
        assert {"gradlane/step_s", "gradlane/wait_share", "gradlane/tx_bytes"} <= tags


class BrokenWriter:
    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        raise OSError("no space left")


def test_the_factor_of_clipping_is_told_everywhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps are clipped, one not enough to matter, and the last one not at all."""
    caplog.set_level("INFO", "gradlane")
    limits = [0.5, 1e9, 0.25, None]

    def body(session: Any) -> Any:
        model = nn.Linear(2, 1)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        session.prepare(model, optimizer)
        written: list[tuple[dict[str, float], int]] = []
        session.log_to(lambda values, step: written.append((values, step)), every=1)
        factors = []
        for limit in limits:
            # Three gradients of 1: their norm is the root of 3.
            model(torch.ones(1, 2)).sum().backward()
            if limit is not None:
                session.clip_grad_norm_(limit)
            optimizer.step()
            optimizer.zero_grad()
            session.synchronize()
            factors.append(session.metrics()["clip_factor"])
        model(torch.ones(1, 2)).sum().backward()
        factors[-1] = session.metrics()["clip_factor"]
        optimizer.step()
        address = f"http://127.0.0.1:{session.monitoring.prometheus_port}/metrics"
        with urllib.request.urlopen(address, timeout=10) as answer:
            page = answer.read().decode()
        return factors, written, page, session.metrics()

    trace = tmp_path / "trace.json"
    factors, written, page, found = run_ranks(
        2, body, trace=str(trace), prometheus=0, summary=True
    )[0]
    root = 3.0**0.5
    expected = [0.5 / root, 1.0, 0.25 / root, 1.0]
    assert factors == pytest.approx(expected, rel=1e-5)
    assert (found["clip_steps"], found["clipped_steps"]) == (3, 2)
    mean = sum(expected[:3]) / 3
    assert found["clip_factor_mean"] == pytest.approx(mean, rel=1e-5)
    _, values = parsed(page)
    rank = frozenset({("rank", "0")})
    assert values["gradlane_clip_factor", rank] == 1.0
    assert values["gradlane_clip_steps_total", rank] == 3.0
    assert values["gradlane_clipped_steps_total", rank] == 2.0
    told = {step: values for values, step in written if "gradlane/clip_factor" in values}
    assert set(told) <= {1, 2, 3} and all("gradlane/clipped_share" in one for one in told.values())
    assert "gradients clipped in 67% of the steps, by 0.478 on average" in caplog.text
    spans = read_chrome(rank_path(trace, 0)).spans
    noted = {
        span.arguments["step"]: span.arguments["clip_factor"]
        for span in spans
        if span.lane == "update" and "clip_factor" in span.arguments
    }
    assert [noted[step] for step in (1, 2, 3)] == pytest.approx(expected[:3], rel=1e-5)


def test_a_writer_that_fails_does_not_end_the_training() -> None:
    def body(session: gradlane.Session) -> int:
        session.log_to(BrokenWriter(), every=1)
        train(session, seeded(Model))
        return session.metrics()["step"]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(1, body) == [STEPS]
    (warning,) = [one for one in caught if "left out" in str(one.message)]
    assert "no space left" in str(warning.message)


def test_forked_children_report_nothing() -> None:
    def body(session: gradlane.Session) -> int:
        train(session, seeded(Model))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            child = os.fork()
        if child == 0:
            code = 3
            try:
                session.metrics()
            except SessionClosedError:
                code = 0 if session.monitoring.prometheus_port is None else 4
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        train(session, seeded(Model))
        return os.waitstatus_to_exitcode(status)

    assert run(1, body, prometheus=0) == [0]


def test_a_session_in_which_nothing_was_prepared_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run_ranks(2, lambda session: None)
    assert sorted(caplog.messages) == [
        f"rank {rank} closes a session in which nothing was prepared: no gradient was averaged; "
        "call session.prepare(model, optimizer)"
        for rank in (0, 1)
    ]
    caplog.clear()
    run_ranks(2, lambda session: session.exchange(session.rank))
    run_ranks(1, lambda session: None)
    assert caplog.messages == []
