"""The information book and the schemes, held against the Poseidon paper's own figures."""

from __future__ import annotations

import pytest

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, synthetic_profile
from gradlane.training.plans.settings import ClusterFacts

MODEL = Profile(
    "two layers",
    32,
    0.1,
    0.3,
    (
        ProfileTensor("conv.weight", (64, 3, 7, 7), "f32", 0.0, 0.3),
        ProfileTensor("conv.bias", (64,), "f32", 0.0, 0.29),
        ProfileTensor("fc.weight", (4096, 4096), "f32", 0.05, 0.2, layer="Linear"),
        ProfileTensor("scale", (), "f32", 0.06, 0.15),
    ),
)
EIGHT = ClusterFacts(workers=8, rate_bps=1e10, latency_s=0.001)


def test_the_book_answers_for_cluster_model_and_layers() -> None:
    book = Coordinator(MODEL, EIGHT)
    assert book.query("workers", "servers", "batch_size") == (8, 8, 32)
    assert book.query("rate_bps", "latency_s", "update") == (1e10, 0.001, "worker")
    assert book.query("layers") == ("conv", "fc", "scale")
    conv = book.query("conv")
    assert conv.parameters == ("conv.weight", "conv.bias")
    assert conv.shapes == ((64, 3, 7, 7), (64,))
    assert (conv.elements, conv.size_bytes) == (9472, 4 * 9472)
    assert (conv.need_s, conv.ready_s) == (0.0, 0.3)
    assert book.query("scale").elements == 1
    assert [book.query(name).kind for name in book.query("layers")] == [None, "Linear", None]
    layers = [book.query(name) for name in book.query("layers")]
    assert sum(layer.size_bytes for layer in layers) == book.query("gradient_bytes")


def test_what_the_book_does_not_have_is_refused() -> None:
    book = Coordinator(MODEL, EIGHT)
    with pytest.raises(ValueError, match=r"query\(\) needs a name"):
        book.query()
    with pytest.raises(ValueError, match=r"no 'fc2'.*batch_size"):
        book.query("fc2")
    for layer in ("fc2", 3, -1, True):
        with pytest.raises(ValueError, match="no"):
            book.best_scheme(layer)


def test_a_parameter_server_costs_what_the_paper_says() -> None:
    """Section 3.2: 4096 x 4096 neurons, eight nodes that are workers and servers: 58.7 million."""
    choice = Coordinator(MODEL, EIGHT).best_scheme("fc")
    assert choice.scheme == "ps"
    assert [cost.scheme for cost in choice.costs] == ["ps"]
    assert choice.costs[0].node_floats == pytest.approx(58.7e6, rel=1e-3)
    assert "58.72 million numbers" in choice.reason
    assert Coordinator(MODEL, EIGHT).best_scheme(1) == choice


def test_every_layer_has_a_scheme_that_the_plan_repeats() -> None:
    coordinator = Coordinator(synthetic_profile("vgg19"), EIGHT)
    plan = coordinator.plan(budget_s=1e-9)
    schemes = {tensor.name: tensor.scheme for tensor in plan.tensors}
    for name in coordinator.query("layers"):
        choice = coordinator.best_scheme(name)
        for parameter in coordinator.query(name).parameters:
            assert schemes[parameter] == choice.scheme
    assert sum(tensor.slices for tensor in plan.tensors) > len(plan.tensors)


def test_one_worker_sends_nothing() -> None:
    plan = Coordinator(MODEL, ClusterFacts(1, 1e9)).plan()
    assert plan.summary.startswith("One worker")
    assert plan.prediction["step_s"] == MODEL.compute_s
