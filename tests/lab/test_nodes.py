"""Several ranks on each node of an emulated cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.run import run_lab
from gradlane.lab.runs.strategy import parse_strategies
from gradlane.planning.simulation.bound import port_bytes
from gradlane.planning.simulation.grid import evaluate
from gradlane.planning.simulation.profiles import read_profile
from gradlane.planning.simulation.scenarios import Cluster
from tests.lab.test_run import small_profile
from tests.namespaces import needs_namespaces


def two_nodes(strategies: str, folder: Path) -> LabOptions:
    """A small network on two nodes of two ranks."""
    return LabOptions(
        workload="resnet50",
        strategies=parse_strategies(strategies),
        workers=4,
        ranks_per_node=2,
        rates_bps=[200_000_000],
        dilation=1.0,
        steps=20,
        warmup=3,
        profile_path=small_profile(folder),
    )


def test_port_bytes_where_ranks_share_a_port() -> None:
    size = 1000.0
    assert port_bytes(size, workers=4, local_ranks=2) == pytest.approx(2000)
    assert port_bytes(size, workers=4, scheme="hierarchical", local_ranks=2) == pytest.approx(1000)
    assert port_bytes(size, workers=4, scheme="ring", local_ranks=2) == pytest.approx(1500)
    assert port_bytes(size, workers=4, scheme="sfb", local_ranks=2) == pytest.approx(4000)
    assert port_bytes(size, workers=8, scheme="hierarchical", local_ranks=2) == pytest.approx(1500)


@pytest.mark.parametrize(
    ("workers", "each", "strategies", "words"),
    [
        (4, 3, "p3", "4 workers do not fill nodes of 3"),
        (2, 2, "p3", "2 workers are one node of 2, which needs no network"),
        (4, 1, "hierarchical", "each has one rank"),
    ],
)
def test_nodes_that_cannot_be(workers: int, each: int, strategies: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        LabOptions(
            workload="resnet50",
            strategies=parse_strategies(strategies),
            workers=workers,
            ranks_per_node=each,
        )


def test_ranks_that_share_their_sums_take_no_codec() -> None:
    with pytest.raises(ValueError, match='local="shared" with codec'):
        LabOptions(
            workload="resnet50",
            strategies=parse_strategies("hierarchical,hierarchical-shared"),
            workers=4,
            ranks_per_node=2,
            codec="qsgd:bits=8",
        )


@pytest.mark.slow
@needs_namespaces
def test_nodes_that_add_up_by_collectives_send_as_little(tmp_path: Path) -> None:
    options = two_nodes("hierarchical:collective,hierarchical-shared:collective", tmp_path)
    led, shared = run_lab(options)
    for row in (led, shared):
        assert row.params_equal and row.verified_tensors > 0
        assert row.expected_tx_bytes is not None
        assert row.tx_bytes_per_step == pytest.approx(row.expected_tx_bytes, rel=0.2)
    assert led.param_digest == shared.param_digest


@pytest.mark.slow
@needs_namespaces
def test_a_node_whose_ranks_add_up_sends_half_of_the_bytes(tmp_path: Path) -> None:
    options = two_nodes("p3,hierarchical,hierarchical-shared", tmp_path)
    flat, led, shared = run_lab(options)
    assert flat.params_equal and led.params_equal
    assert led.verified_tensors > 0
    assert flat.expected_tx_bytes is not None and led.expected_tx_bytes is not None
    assert led.expected_tx_bytes == pytest.approx(flat.expected_tx_bytes / 2)
    assert led.tx_bytes_per_step == pytest.approx(flat.tx_bytes_per_step / 2, rel=0.2)
    assert led.ranks_per_node == 2
    assert options.profile_path is not None
    profile = read_profile(Path(options.profile_path))
    for row in (flat, led, shared):
        cluster = Cluster(4, 2e8, row.strategy, ranks_per_node=2, slice_elems=row.slice_elems)
        (simulated,) = evaluate(profile, [cluster])
        # What ports really carried, beside what the same engines send in virtual time. On a busy
        # machine what is cut off at either end is a part of a step: many steps make it small.
        assert simulated.tx_bytes_per_step is not None
        assert row.tx_bytes_per_step == pytest.approx(simulated.tx_bytes_per_step, rel=0.05)
