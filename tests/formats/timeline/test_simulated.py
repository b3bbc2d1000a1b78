"""Timelines of simulated runs, and the picture of one step that pages show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradlane.formats.timeline.checks import check_events
from gradlane.formats.timeline.chrome import read_chrome, to_chrome
from gradlane.formats.timeline.spans import SENT, Span, Timeline
from gradlane.formats.timeline.step import view_of_step
from gradlane.planning.advice.pictures import PICTURES_MAX, clusters_with_pictures
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of
from gradlane.planning.simulation.timeline import simulated_timeline
from tests.command_line import run
from tests.planning.simulation.small_profile import SMALL


def check_codec_spans(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Assert that each pushed slice was encoded before, and that each decoded one has arrived.

    Args:
        spans: of one rank.

    Returns:
        Step and slice of each frame that left while another slice was encoded.
    """

    def by_slice(lane: str) -> dict[tuple[int, int], list[Span]]:
        found: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            if span.lane == lane and span.arguments["step"] > 0:
                key = (span.arguments["step"], span.arguments["slice"])
                found.setdefault(key, []).append(span)
        return found

    encoded, pushed, decoded = by_slice("encode"), by_slice("push"), by_slice("decode")
    arrived = by_slice("receive")
    assert pushed and decoded and set(pushed) <= set(encoded)
    for key, frames in pushed.items():
        (encoding,) = encoded[key]
        assert encoding.end_ns <= min(frame.begin_ns for frame in frames)
    for key, (decoding,) in decoded.items():
        # This rank's own results do not arrive.
        results = [frame for frame in arrived.get(key, []) if frame.arguments["kind"] != "push"]
        assert all(frame.end_ns <= decoding.end_ns for frame in results)
    return [
        key
        for key, frames in pushed.items()
        for frame in frames
        for other, (encoding,) in encoded.items()
        if other != key and encoding.begin_ns < frame.end_ns and frame.begin_ns < encoding.end_ns
    ]


NUMBERS = {tensor.name: number for number, tensor in enumerate(SMALL.tensors)}


def simulated(cluster: Cluster, trace_ranks: int = 0) -> tuple[Timeline, dict[str, Any]]:
    answer = run_scenario(scenario_of(SMALL, cluster, trace=True, trace_ranks=trace_ranks))
    timeline = simulated_timeline(
        answer["trace"], rate_bps=cluster.rate_bps, compression=cluster.compression
    )
    return timeline, answer["report"]


@pytest.mark.parametrize("strategy", ["p3", "deferred-pull", "ring"])
def test_a_simulated_run_is_what_viewers_open(strategy: str) -> None:
    timeline, report = simulated(Cluster(3, 1e9, strategy))
    content = to_chrome(timeline)
    check_events(content)
    lanes = {event["cat"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert {"forward", "backward", "wait", "push", "broadcast", "reduce", "receive"} <= lanes
    sent = sum(span.arguments["bytes"] for span in timeline.spans if span.lane in SENT)
    assert sent == report["bytes"]
    # What the port carries is never over its rate.
    shares = [
        event["args"]["out"] for event in content["traceEvents"] if event["name"] == "port, %"
    ]
    assert max(shares) <= 100.0
    assert max(shares) > 80.0


def test_encoding_one_slice_overlaps_sending_another() -> None:
    """Double buffering: the next slice is encoded while the port carries the one before."""
    codec = "qsgd:bits=8"
    costs = MachineCosts(codecs={codec: (4e-9, 2e-9)})
    cluster = Cluster(3, 1e9, codec=codec, slice_elems=25_000, costs=costs)
    timeline, _ = simulated(cluster)
    check_events(to_chrome(timeline))
    for rank in range(3):
        assert check_codec_spans([span for span in timeline.spans if span.rank == rank])
    raw, _ = simulated(replace(cluster, codec="raw"))
    assert not {span.lane for span in raw.spans} & {"encode", "decode"}


def test_gradients_made_of_factors_are_in_a_lane_of_their_own() -> None:
    layers = tuple(replace(tensor, layer="Linear", rows=4) for tensor in SMALL.tensors)
    profile = replace(SMALL, tensors=layers, flops=10**9)
    scenario = scenario_of(profile, Cluster(3, 1e9, "sfb"), trace=True)
    timeline = simulated_timeline(run_scenario(scenario)["trace"], rate_bps=1e9)
    check_events(to_chrome(timeline))
    assert {span.name for span in timeline.spans if span.lane == "rebuild"} == set(NUMBERS)


def test_compression_lessens_the_bytes_that_travel() -> None:
    whole, _ = simulated(Cluster(3, 1e9))
    fourth, _ = simulated(Cluster(3, 1e9, compression=4.0))
    sums = [
        sum(span.arguments["bytes"] for span in timeline.spans if span.lane == "push")
        for timeline in (whole, fourth)
    ]
    assert sums[1] == pytest.approx(sums[0] / 4, rel=1e-3)


@pytest.mark.parametrize("strategy", ["p3", "wfbp"])
def test_a_picture_shows_the_whole_step(strategy: str) -> None:
    timeline, report = simulated(Cluster(3, 0.3e9, strategy), trace_ranks=1)
    view = view_of_step(timeline, 0, NUMBERS)
    assert view is not None
    assert view.length_s == pytest.approx(report["step_s"], rel=0.05)
    compute = sum(
        bar.length_s * bar.covered for lane in ("forward", "backward") for bar in view.lanes[lane]
    )
    waits = sum(bar.length_s * bar.covered for bar in view.lanes["wait"])
    assert compute == pytest.approx(SMALL.compute_s, rel=0.01)
    assert compute + waits == pytest.approx(view.length_s, rel=0.01)
    assert view.shares["wait"] == pytest.approx(waits / view.length_s, abs=1e-3)
    for bars in view.lanes.values():
        assert all(bar.begin_s >= 0.0 and bar.length_s > 0.0 for bar in bars)
        assert all(0.0 < bar.covered <= 1.0 for bar in bars)
        ends = [bar.begin_s + bar.length_s for bar in bars]
        assert all(end <= bar.begin_s + 1e-9 for end, bar in zip(ends, bars[1:], strict=False))
        assert ends[-1] <= view.length_s + 1e-9
    # In p3 each tensor has slices on all servers, else it has one server, perhaps this one.
    pushed = {bar.tensor for bar in view.lanes["push"]}
    assert pushed == set(range(5)) if strategy == "p3" else pushed <= set(range(5))
    spans = sum(bar.spans for bar in view.lanes["push"])
    assert len(view.lanes["push"]) < spans


def test_a_picture_needs_a_whole_step() -> None:
    timeline, _ = simulated(Cluster(3, 1e9), trace_ranks=1)
    early = [span for span in timeline.spans if span.end_ns < 150_000_000]
    assert view_of_step(Timeline(early, "simulated"), 0, NUMBERS) is None


def test_pictures_are_limited_and_spread_over_the_grid() -> None:
    few = [Cluster(4, 1e9, strategy) for strategy in ("wfbp", "ring-fused", "p3")]
    assert clusters_with_pictures(few) == [0, 2]
    many = [
        Cluster(workers, rate * 1e9, strategy, compression)
        for workers in (2, 4, 8, 16)
        for rate in range(1, 21)
        for compression in (1.0, 2.0)
        for strategy in ("wfbp", "p3", "ring-fused")
    ]
    numbers = clusters_with_pictures(many)
    assert PICTURES_MAX - 2 <= len(numbers) <= PICTURES_MAX
    chosen = [many[number] for number in numbers]
    assert {it.compression for it in chosen} == {1.0}
    assert {it.workers for it in chosen} == {2, 4, 8, 16}
    assert {it.rate_bps for it in chosen} >= {1e9, 20e9}
    for place in {(it.workers, it.rate_bps) for it in chosen}:
        strategies = [it.strategy for it in chosen if (it.workers, it.rate_bps) == place]
        assert strategies == ["wfbp", "p3"]


def test_the_command_writes_the_timeline_of_one_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    one = ("--workers", "2", "--rate", "4gbit", "--strategy", "p3")
    status, _, _ = run(monkeypatch, capsys, "whatif", "resnet50", *one, "--trace", str(path))
    assert status == 0
    timeline = read_chrome(path)
    assert timeline.source == "simulated"
    assert timeline.facts["strategy"] == "p3"
    assert {span.rank for span in timeline.spans} == {0, 1}
    status, _, errors = run(monkeypatch, capsys, "whatif", "resnet50", "--trace", str(path))
    assert status == 2
    assert "--workers" in errors
    ring = (*one[:4], "--strategy", "ring-fused", "--trace", str(path))
    status, _, errors = run(monkeypatch, capsys, "whatif", "resnet50", *ring)
    assert status == 2
    assert "no timeline" in errors
