"""Timelines of real runs: ranks over loopback, clocks of several machines, and one command."""

from __future__ import annotations

import copy
import pickle
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradlane
from gradlane.formats.timeline.checks import check_events
from gradlane.formats.timeline.chrome import read_chrome, to_chrome, write_chrome
from gradlane.formats.timeline.merge import merge
from gradlane.formats.timeline.spans import Span, Timeline
from gradlane.training.monitoring.recorded import Mark, ModelRecord, rank_path, recorded_timeline
from tests.command_line import run
from tests.formats.timeline.names import named
from tests.formats.timeline.test_simulated import check_codec_spans
from tests.training.model.ranks import run_ranks

STEPS = 4
JOBS = ("encode", "decode", "reduce")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(40, 300)
        self.last = nn.Linear(300, 10)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"logits": [self.last(torch.relu(self.first(x)))]}


def train(session: gradlane.Session) -> int:
    model = Model()
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(STEPS):
        loss = model(torch.randn(8, 40))["logits"][0].square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model(torch.randn(8, 40))
    # Hooks of the recording neither stop copies nor come along.
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        again.train()
        again(torch.randn(8, 40))
    session.synchronize()
    return int(session.metrics()["tx_bytes"])


def recorded(folder: Path, world_size: int = 2, **options: Any) -> list[Timeline]:
    path = folder / f"{uuid.uuid4().hex}.json"
    sent = run_ranks(world_size, train, trace=path, slice_elems=1000, **options)
    timelines = [read_chrome(rank_path(path, rank)) for rank in range(world_size)]
    for timeline, tx_bytes in zip(timelines, sent, strict=True):
        left = sum(
            span.arguments["bytes"]
            for span in timeline.spans
            if span.lane in ("push", "broadcast", "control")
        )
        # Goodbyes and heartbeats come on top of, or stay out of, what was counted.
        assert abs(left - tx_bytes) < 2000
    return timelines


@pytest.fixture(scope="module")
def timelines(tmp_path_factory: pytest.TempPathFactory) -> list[Timeline]:
    return recorded(tmp_path_factory.mktemp("timelines"))


def test_a_real_run_is_in_the_same_format(timelines: list[Timeline]) -> None:
    whole = merge(timelines)
    content = to_chrome(whole)
    check_events(content)
    assert {span.rank for span in whole.spans} == {0, 1}
    lanes = {span.lane for span in whole.spans}
    assert {"forward", "backward", "push", "broadcast", "receive", "reduce", "update"} <= lanes
    assert "one clock" in " ".join(whole.notes)
    assert whole.dropped == 0
    assert whole.facts["strategy"] == "p3"


def test_what_goes_round_a_ring_is_in_the_lanes_of_gradients_and_results(tmp_path: Path) -> None:
    whole = merge(recorded(tmp_path, 3, strategy="ring"))
    check_events(to_chrome(whole))
    sent = {"push": "ring-reduce", "broadcast": "ring-gather"}
    for lane, kind in sent.items():
        spans = [span for span in whole.spans if span.lane == lane]
        assert {span.arguments["kind"] for span in spans} == {kind}
        assert all(span.arguments["peer"] == (span.rank + 1) % 3 for span in spans)
        assert {"first.weight", "last.weight"} <= {span.name for span in spans}


@pytest.mark.parametrize("strategy", ["p3", "ring"])
def test_encoding_and_decoding_are_in_lanes_of_their_own(tmp_path: Path, strategy: str) -> None:
    """Encoded by the core's own threads while its sockets send: slices of a megabyte."""
    path = tmp_path / "trace.json"

    def train_wide(session: gradlane.Session) -> None:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(1000, 2000), nn.Linear(2000, 1000))
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            model(torch.randn(2, 1000)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        session.synchronize()

    options: dict[str, Any] = {"codec": "qsgd:bits=8", "slice_elems": 250_000}
    options |= {"strategy": strategy, "work_threads": 1}
    run_ranks(2, train_wide, trace=path, **options)
    for rank in range(2):
        timeline = read_chrome(rank_path(path, rank))
        lanes = {span.lane for span in timeline.spans}
        assert {"encode", "push", "broadcast", "decode", "reduce"} <= lanes
        kinds = {(it.lane, it.arguments["kind"]) for it in timeline.spans if it.lane in JOBS}
        assert kinds <= {("encode", "encode"), ("decode", "decode"), ("reduce", "recode")} | {
            # Biases are too small to be worth encoding, and step 0 is never.
            ("reduce", kind)
            for kind in ("reduce", "copy")
        }
        if strategy == "p3":
            weights = ("0.weight", "1.weight")
            check_codec_spans([it for it in timeline.spans if it.name in weights])


def test_each_step_computes_once_and_in_order(timelines: list[Timeline]) -> None:
    for rank, timeline in enumerate(timelines):
        for step in range(1, STEPS + 1):
            own = [span for span in timeline.spans if span.arguments["step"] == step]
            forward = [span for span in own if span.lane == "forward"]
            backward = [span for span in own if span.lane == "backward"]
            assert forward and backward
            assert max(it.end_ns for it in forward) <= min(it.begin_ns for it in backward)
            pushed = named(span for span in own if span.lane == "push")
            received = named(span for span in own if span.lane == "receive")
            # Biases and the last weight are small, and travel together.
            layers = {f"{one}.{kind}" for one in ("first", "last") for kind in ("weight", "bias")}
            assert layers <= pushed & received
            first_push = min(span.begin_ns for span in own if span.lane == "push")
            assert first_push >= min(it.begin_ns for it in backward), (rank, step)
        # Evaluation and copies are no training.
        steps = {span.arguments["step"] for span in timeline.spans if span.lane == "forward"}
        assert steps == set(range(1, STEPS + 1))


def test_nothing_computes_while_it_waits(timelines: list[Timeline]) -> None:
    for timeline in timelines:
        own = [
            span
            for span in timeline.spans
            if span.lane in ("forward", "backward", "wait", "update")
            and span.arguments["step"] >= 1
        ]
        for busy in (it for it in own if it.lane in ("forward", "backward")):
            for other in (it for it in own if it.lane in ("wait", "update")):
                assert busy.end_ns <= other.begin_ns or other.end_ns <= busy.begin_ns


def test_what_one_rank_sends_another_receives(timelines: list[Timeline]) -> None:
    def keys(lanes: tuple[str, ...], rank: int) -> set[tuple[Any, ...]]:
        names = ("step", "kind", "slice", "offset")
        return {
            tuple(span.arguments[name] for name in names)
            for span in timelines[rank].spans
            if span.lane in lanes and span.arguments["kind"] in ("push", "broadcast")
        }

    assert keys(("push", "broadcast"), 0) == keys(("receive",), 1)
    assert keys(("push", "broadcast"), 1) == keys(("receive",), 0)


def test_the_environment_asks_for_a_timeline(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("GRADLANE_TRACE", str(tmp_path / "trace.json.gz"))
    run_ranks(2, train, update="server")
    timeline = read_chrome(tmp_path / "trace.rank1.json.gz")
    kinds = {span.arguments["kind"] for span in timeline.spans if span.lane == "reduce"}
    assert "update" in kinds


def test_a_failed_run_leaves_its_timeline(tmp_path: Path) -> None:
    def breaks(session: gradlane.Session) -> None:
        train(session)
        if session.rank == 1:
            raise ArithmeticError("on purpose")
        model = Model()
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))

    path = tmp_path / "trace.json"
    options: dict[str, Any] = {"trace": path, "expect_errors": True, "connect_timeout_s": 2.0}
    results = run_ranks(2, breaks, **options)
    assert isinstance(results[1], ArithmeticError)
    for rank in range(2):
        assert read_chrome(rank_path(path, rank)).spans


def test_a_path_without_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="folder does not exist"):
        gradlane.init(
            rendezvous=gradlane.Rendezvous(rank=0, world_size=1),
            monitoring=gradlane.Monitoring(trace=tmp_path / "none" / "trace.json"),
        )


# ---- joining


def elsewhere(timeline: Timeline, rank: int, ahead_ns: int) -> Timeline:
    spans = [
        replace(span, begin_ns=span.begin_ns + ahead_ns, end_ns=span.end_ns + ahead_ns)
        for span in timeline.spans
    ]
    return replace(timeline, spans=spans, machines={rank: f"machine {rank}"})


@pytest.mark.parametrize("ahead_ns", [5_000_000_000, -70_000_000_000])
def test_clocks_of_machines_are_aligned_by_their_frames(
    timelines: list[Timeline], ahead_ns: int
) -> None:
    here, there = timelines[0], elsewhere(timelines[1], 1, ahead_ns)
    joined = merge([here, there])
    (note,) = (note for note in joined.notes if "clock of ranks 1" in note)
    within_ms = float(note.split("within ")[1].split(" ms")[0])
    first = min(span.begin_ns for span in timelines[1].spans)
    found = min(span.begin_ns for span in joined.spans if span.rank == 1)
    # The note is rounded to a microsecond.
    assert abs(found - first) / 1e6 <= within_ms + 0.001
    check_events(to_chrome(joined))


def test_a_clock_that_was_read_late_moves_no_other_clock() -> None:
    def frame(rank: int, lane: str, number: int, begin_us: int, end_us: int) -> Span:
        arguments = {"step": 1, "slice": number, "kind": "push", "peer": 1 - rank, "offset": 0}
        return Span(rank, lane, "weight", begin_us * 1000, end_us * 1000, arguments)

    # Rank 0 looks at its clock 4 ms after the kernel took its frames; rank 1 is 10 ms ahead.
    here = [
        frame(0, "push", 0, 100, 4200),
        frame(0, "push", 1, 4200, 4210),
        frame(0, "receive", 0, 5100, 5250),
    ]
    there = [
        frame(1, "receive", 0, 10150, 10250),
        frame(1, "receive", 1, 10250, 10350),
        frame(1, "push", 0, 15050, 15060),
    ]
    timelines = [
        Timeline(spans, "recorded", machines={rank: f"machine {rank}"})
        for rank, spans in enumerate([here, there])
    ]
    joined = merge(timelines)
    assert joined.notes == (
        "clock of ranks 1 moved by -9.975 ms, right within 0.175 ms, by the least delays of frames",
    )
    # Of two frames that are alike nobody can tell which one arrived when.
    again = replace(timelines[0], spans=[*here, frame(0, "push", 0, 9000, 9010)])
    with pytest.raises(ValueError, match="ranks 0 and 1 cannot be compared"):
        merge([again, timelines[1]])
    # Without its beginning, what was sent before the frames that are left is not known.
    with pytest.raises(ValueError, match="ranks 0 and 1 cannot be compared"):
        merge([replace(timelines[0], dropped=1), timelines[1]])


def test_what_cannot_be_joined_is_refused(timelines: list[Timeline]) -> None:
    with pytest.raises(ValueError, match="rank 0 is in two"):
        merge([timelines[0], timelines[0]])
    with pytest.raises(ValueError, match="simulated"):
        merge([timelines[0], Timeline([], "simulated")])
    with pytest.raises(ValueError, match="no timelines"):
        merge([])
    silent = replace(elsewhere(timelines[1], 1, 0), spans=[])
    with pytest.raises(ValueError, match="ranks 0 and 1 cannot be compared"):
        merge([timelines[0], silent])


def test_the_command_joins_files(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    timelines: list[Timeline],
) -> None:
    paths = [tmp_path / f"trace.rank{rank}.json" for rank in range(2)]
    for path, timeline in zip(paths, timelines, strict=True):
        write_chrome(timeline, path)
    target = tmp_path / "all.json"
    arguments = [*map(str, paths), "--output", str(target)]
    status, out, _ = run(monkeypatch, capsys, "trace", "merge", *arguments)
    assert status == 0 and str(target) in out
    assert {span.rank for span in read_chrome(target).spans} == {0, 1}
    paths[1].write_text("{}")
    status, _, errors = run(monkeypatch, capsys, "trace", "merge", *arguments)
    assert status == 2 and str(paths[1]) in errors


# ---- from records to spans


def record(marks: list[Mark], rows: list[Any], dropped: int = 0) -> ModelRecord:
    return ModelRecord(["a", "b", "c and 1 more"], {2: ["c", "d"]}, marks, rows, dropped)


def test_waits_and_updates_interrupt_forward() -> None:
    marks = [
        Mark("wait", 20, 30, 1, (1,)),
        Mark("update", 30, 35, 1),
        Mark("forward", 0, 100, 2),
        Mark("wait", 90, 120, 1, (0, 1)),
        Mark("wait", 200, 220, 1),
        Mark("wait", 230, 240, 1, (0, 2)),
    ]
    timeline = recorded_timeline(3, [record(marks, [], dropped=4)], {})
    forward = [(span.begin_ns, span.end_ns) for span in timeline.spans if span.lane == "forward"]
    assert forward == [(0, 20), (35, 90)]
    waits = [span for span in timeline.spans if span.lane == "wait"]
    assert [span.name for span in waits] == ["b", "a", "step 1", "a"]
    assert waits[1].arguments["tensors"] == ["a", "b"]
    assert waits[3].arguments["tensors"] == ["a", "c", "d"]
    assert timeline.dropped == 4 and any("4 spans" in note for note in timeline.notes)


def test_frames_are_in_the_lane_of_their_kind() -> None:
    rows = [
        ((1, 2), "tx", kind, 1, 5, (1, 7, 0), 100, -3)
        for kind in ("push", "broadcast", "notify", "goodbye", "heartbeat")
    ]
    rows.append(((3, 4), "rx", "push", 1, 5, (0, 2, 64), 50, 0))
    rows.append(((5, 6), "work", "reduce", 0, 5, (1, 7, 0), 900, 0))
    rows.append(((7, 8), "tx", "push", 1, 5, (2, 8, 0), 8, 0))
    spans: list[Span] = list(recorded_timeline(0, [record([], rows)], {}).spans)
    found = [(span.lane, span.name) for span in spans]
    assert found == [
        ("push", "b"),
        ("broadcast", "b"),
        ("control", "b"),
        ("control", "goodbye"),
        ("receive", "a"),
        ("reduce", "b"),
        ("push", "c and 1 more"),
    ]
    assert spans[6].arguments["tensors"] == ["c", "d"] and "tensors" not in spans[0].arguments
    assert spans[0].arguments["priority"] == -3 and spans[4].arguments["offset"] == 64
