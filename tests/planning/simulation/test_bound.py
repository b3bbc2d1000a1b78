"""Tests of the perfect-overlap bound against a brute force and against examples worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradlane.planning.models.timings import Stage, TensorTiming, timings_of
from gradlane.planning.simulation.bound import (
    bound_step_s,
    describe_binding,
    port_bytes,
    port_loads,
)
from gradlane.planning.simulation.grid import evaluate
from gradlane.planning.simulation.profiles import find_profile
from gradlane.planning.simulation.scenarios import Cluster

seconds = st.floats(0.0, 10.0, allow_nan=False)
tensors = st.lists(
    st.builds(
        TensorTiming,
        name=st.text("abc", min_size=1, max_size=3),
        numel=st.integers(1, 1_000_000),
        dtype_bytes=st.sampled_from([2, 4]),
        ready_s=seconds,
        need_s=seconds,
    ),
    min_size=1,
    max_size=12,
)


def chain(*sizes: int) -> list[TensorTiming]:
    """Layers with forward = backward = 1 s and gradients that take `sizes` seconds to travel.

    Two workers send each byte of a tensor once, so at 32 bit/s one element takes one second.
    """
    stages = [
        Stage(f"layer{index}", 1.0, 1.0, ((f"layer{index}.weight", size, 4),))
        for index, size in enumerate(sizes)
    ]
    return timings_of(stages)


def brute_force_pair_s(timings: list[TensorTiming], workers: int, goodput_bps: float) -> float:
    """The pair term as it is defined, pair by pair."""
    best = 0.0
    for first in timings:
        for last in timings:
            between = [
                timing
                for timing in timings
                if timing.ready_s >= first.ready_s and timing.need_s <= last.need_s
            ]
            if between:
                size = sum(t.size_bytes for t in between)
                travel_s = 2.0 * (workers - 1) / workers * size * 8.0 / goodput_bps
                best = max(best, first.ready_s + travel_s - last.need_s)
    return best


@given(tensors, st.integers(2, 64), st.floats(1e3, 1e11))
def test_bound_equals_brute_force(
    timings: list[TensorTiming], workers: int, goodput_bps: float
) -> None:
    bound = bound_step_s(timings, workers=workers, goodput_bps=goodput_bps, compute_s=1.0)
    assert bound.pair_s == pytest.approx(brute_force_pair_s(timings, workers, goodput_bps))
    assert bound.step_s == max(1.0, bound.port_s, bound.pair_s)


@given(tensors, st.integers(2, 64), st.floats(1e3, 1e11), st.booleans())
def test_with_clipping_the_first_legs_of_all_others_come_first(
    timings: list[TensorTiming], workers: int, goodput_bps: float, serves_apart: bool
) -> None:
    serving = workers if serves_apart else 0
    first_leg = 1.0 if serves_apart else 0.5
    load = 1.0 if serves_apart else 2.0 * (workers - 1) / workers
    bound = bound_step_s(
        timings,
        workers=workers,
        goodput_bps=goodput_bps,
        compute_s=0.0,
        serving=serving,
        clips=True,
    )
    best = 0.0
    for first in timings:
        later = [timing for timing in timings if timing.ready_s >= first.ready_s]
        for last in timings:
            used = sum(one.size_bytes for one in later if one.need_s <= last.need_s)
            size = first_leg * sum(one.size_bytes for one in later) + (1 - first_leg) * used
            travel_s = load * size * 8.0 / goodput_bps
            best = max(best, first.ready_s + travel_s - last.need_s)
    assert bound.pair_s == pytest.approx(best)
    plain = bound_step_s(
        timings, workers=workers, goodput_bps=goodput_bps, compute_s=0.0, serving=serving
    )
    # Sums are taken in another order, and differences of times up to 10 s are rounded to 2e-15 s.
    assert bound.step_s >= plain.step_s * (1 - 1e-12) - 1e-14


@pytest.mark.parametrize("strategy", ["p3", "wfbp", "ring", "poseidon", "sfb"])
def test_no_simulated_clipping_beats_its_bound(strategy: str) -> None:
    profile = find_profile("vgg19" if strategy == "poseidon" else "resnet50", None)
    for rate_bps in (1e9, 4e9):
        cluster = Cluster(4, rate_bps, strategy, clip=True, free_host=True, steps=4)
        (row,) = evaluate(profile, [cluster])
        assert row.clip and row.step_s >= row.bound_step_s
        (whole,) = evaluate(profile, [replace(cluster, strategy="hierarchical", ranks_per_node=2)])
        assert whole.step_s >= whole.bound_step_s
        for servers in () if strategy == "ring" else (1, 2, 3):
            (served,) = evaluate(profile, [replace(cluster, servers=servers)])
            assert served.step_s >= served.bound_step_s


@given(tensors, st.integers(2, 64), st.floats(1e3, 1e11))
def test_more_goodput_or_compression_never_raises_the_bound(
    timings: list[TensorTiming], workers: int, goodput_bps: float
) -> None:
    plain = bound_step_s(timings, workers=workers, goodput_bps=goodput_bps, compute_s=0.0)
    faster = bound_step_s(timings, workers=workers, goodput_bps=2 * goodput_bps, compute_s=0.0)
    packed = bound_step_s(
        timings, workers=workers, goodput_bps=goodput_bps, compute_s=0.0, codec_ratio=2.0
    )
    assert faster.step_s <= plain.step_s
    assert packed.step_s == pytest.approx(faster.step_s)


def test_light_layers_hide_behind_compute() -> None:
    # Forward runs 0..3, backward 3..6. Each gradient takes 1 s and all 3 s of port time fit in
    # 6 s; the last one, ready at 6, is needed at 0 of the next step: 6 + 1 - 0 = 7.
    bound = bound_step_s(chain(1, 1, 1), workers=2, goodput_bps=32.0, compute_s=6.0)
    assert bound.port_s == pytest.approx(3.0)
    assert bound.step_s == pytest.approx(7.0)
    assert bound.binding == "pair layer0.weight -> layer0.weight"
    assert describe_binding(bound.binding) == (
        "the way of layer0.weight, from its gradient in backward to its use in the next forward"
    )
    assert describe_binding("pair a.weight -> b.weight") == (
        "the way of all tensors between two: their gradients are ready in backward with that of "
        "a.weight or later, and the next forward uses them with b.weight or earlier"
    )
    assert describe_binding("port") == "the bytes of a step through a port"


def test_heavy_last_layer_is_limited_by_compute_or_port() -> None:
    # The last layer is ready at 4 and needed at 2: 4 + 4 - 2 = 6. With the middle one, ready at
    # 5 and needed at 1, the set from 4 on up to 2 is everything: 4 + 4.5 - 2 = 6.5 at best.
    timings = [
        TensorTiming("first", 0, 4, 6.0, 0.0),
        TensorTiming("middle", 0, 4, 5.0, 1.0),
        TensorTiming("last", 4, 4, 4.0, 2.0),
    ]
    bound = bound_step_s(timings, workers=2, goodput_bps=32.0, compute_s=6.0)
    assert bound.pair_s == pytest.approx(6.0)
    assert bound.binding == "compute"
    slower = bound_step_s(timings, workers=2, goodput_bps=8.0, compute_s=6.0)
    # The first tensor carries no bytes here, so only the last one's 16 s count: 4 + 16 - 2.
    assert slower.pair_s == pytest.approx(18.0)
    assert slower.port_s == pytest.approx(16.0)


def test_heavy_first_layer_binds_as_in_sockeye() -> None:
    # Layer 0 takes 5 s, is ready at 6 and needed at 0: 11 s, though the port is busy for 7 only.
    bound = bound_step_s(chain(5, 1, 1), workers=2, goodput_bps=32.0, compute_s=6.0)
    assert bound.step_s == pytest.approx(11.0)
    assert bound.port_s == pytest.approx(7.0)
    assert bound.binding == "pair layer0.weight -> layer0.weight"


def test_port_binds_when_everything_is_slow() -> None:
    # Every tensor could travel all the time (ready at 0, needed at the end), but there are too
    # many bytes for the port.
    timings = [TensorTiming(name, 10, 4, 0.0, 5.0) for name in ("a", "b")]
    bound = bound_step_s(timings, workers=2, goodput_bps=32.0, compute_s=6.0)
    assert bound.step_s == pytest.approx(20.0)
    assert bound.binding == "port"


def test_one_worker_communicates_nothing() -> None:
    bound = bound_step_s(chain(5, 1, 1), workers=1, goodput_bps=32.0, compute_s=6.0)
    assert (bound.step_s, bound.port_s, bound.pair_s) == (6.0, 0.0, 0.0)


def test_port_bytes_of_the_schemes() -> None:
    assert port_bytes(400.0, workers=4) == pytest.approx(600.0)
    assert port_bytes(400.0, workers=4, scheme="ring") == pytest.approx(600.0)


@pytest.mark.parametrize(
    ("servers", "expected"), [(1, 1200.0), (2, 800.0), (3, 2000 / 3), (4, 600.0)]
)
def test_fewer_servers_carry_more_each(servers: int, expected: float) -> None:
    # One server takes in three pushes; of two, each takes in three halves and sends one half.
    assert port_bytes(400.0, workers=4, servers=servers) == pytest.approx(expected)
    assert port_bytes(400.0, workers=4, scheme="ring", servers=servers) == pytest.approx(600.0)


@pytest.mark.parametrize(("serving", "expected"), [(1, 1600.0), (2, 800.0), (4, 400.0), (8, 400.0)])
def test_servers_apart_carry_what_every_worker_sends(serving: int, expected: float) -> None:
    # 4 / S of the model through a server's port, one model through a worker's.
    assert port_bytes(400.0, workers=4, serving=serving) == pytest.approx(expected)
    timings = [TensorTiming(name, 100, 4, ready_s=1.0, need_s=0.0) for name in ("one", "two")]
    loads = port_loads(timings, [400.0, 100.0], ["ps", "sfb"], workers=4, serving=serving)
    assert loads.tolist() == [[400.0, 300.0], [1600.0 / serving, 0.0]]


def test_servers_are_ranks() -> None:
    with pytest.raises(ValueError, match="servers must be 1 to 4"):
        port_bytes(400.0, workers=4, servers=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheme": "tree"}, "tree"),
        ({"workers": 0}, "workers"),
        ({"goodput_bps": 0.0}, "goodput"),
        ({"codec_ratio": 0.0}, "codec ratio"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"workers": 2, "goodput_bps": 1.0, "compute_s": 1.0}
    arguments.update(change)
    with pytest.raises(ValueError, match=message):
        bound_step_s(chain(1), **arguments)  # type: ignore[arg-type]
