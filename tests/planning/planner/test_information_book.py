"""The information book of a session, asked by real ranks: the same answers on every one."""

from __future__ import annotations

from typing import Any

from gradlane.planning.planner.coordinator import Coordinator
from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.training.plans.settings import ClusterFacts
from tests.built import needs_core
from tests.training.model.pool import FirstRanks

pytestmark = needs_core
MODULE = "tests.planning.planner.book_programs"


def asked(pool: FirstRanks, **options: Any) -> dict[str, Any]:
    """Return what all ranks were told."""
    by_rank = pool.run(f"{MODULE}:ask", **options)
    assert len(by_rank) == 3
    for found in by_rank:
        assert found == by_rank[0]
    one: dict[str, Any] = by_rank[0]
    return one


def test_all_ranks_are_told_the_same_facts(pool: FirstRanks) -> None:
    found = asked(pool)
    assert (found["ranks"], found["workers"], found["servers"]) == (3, 3, 3)
    assert found["roles"] == ("worker and server",) * 3
    assert (found["strategy"], found["update"], found["model"]) == ("p3", "worker", "Classifier")
    hosts = [address.rpartition(":")[0] for address in found["addresses"]]
    ports = {int(address.rpartition(":")[2]) for address in found["addresses"]}
    assert hosts == ["127.0.0.1"] * 3 and len(ports) == 3 and min(ports) > 1023
    assert len(set(found["nodes"])) == 1
    assert list(found["layers"]) == ["conv", "fc", "words"]
    assert [layer["kind"] for layer in found["layers"].values()] == [
        "Conv2d",
        "Linear",
        "Embedding",
    ]
    fc = found["layers"]["fc"]
    assert fc["parameters"] == ("fc.weight", "fc.bias") and fc["shapes"] == ((300, 400), (300,))
    assert fc["need_s"] is None and fc["ready_s"] is None, "nobody has measured them"
    sizes = [layer["size_bytes"] for layer in found["layers"].values()]
    assert sum(sizes) == found["gradient_bytes"] == 4 * (40 + 400 * 300 + 300 + 20 * 300)
    assert set(found["schemes"].values()) == {"ps"} and "fc.weight" in found["schemes"]
    assert set(found["codecs"].values()) == {"raw"}
    rate_bps, latency_s = found["probed"]
    assert rate_bps > 1e6 and latency_s > 0.0


def test_the_best_scheme_is_the_coordinators(pool: FirstRanks) -> None:
    """As of a profile with the same layers; 2 K (P1 - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2."""
    found = asked(pool, strategy="wfbp", servers=2)
    assert found["servers"] == 2
    assert found["roles"] == ("worker and server", "worker and server", "worker")
    tensors = (
        ProfileTensor("conv.weight", (4, 1, 3, 3), "f32", 0.0, 0.1, "Conv2d"),
        ProfileTensor("conv.bias", (4,), "f32", 0.0, 0.1, "Conv2d"),
        ProfileTensor("fc.weight", (300, 400), "f32", 0.0, 0.1, "Linear"),
        ProfileTensor("fc.bias", (300,), "f32", 0.0, 0.1, "Linear"),
        ProfileTensor("words.weight", (20, 300), "f32", 0.0, 0.1, "Embedding"),
    )
    for batch in (2, 500):
        for rule in ("poseidon", "auto"):
            profile = Profile("Classifier", batch, 0.05, 0.1, tensors)
            coordinator = Coordinator(profile, ClusterFacts(3, 1e9, servers=2), rule=rule)
            for name in ("conv", "fc", "words"):
                choice, expected = (
                    found["best"][f"{name} {batch} {rule}"],
                    coordinator.best_scheme(name),
                )
                assert choice["scheme"] == expected.scheme
                assert [cost["node_floats"] for cost in choice["costs"]] == [
                    cost.node_floats for cost in expected.costs
                ]
    # 2 * 2 * 2 * 700 = 5,600 numbers as factors, 2 * 120,000 * 3 / 2 by servers.
    few, many = found["best"]["fc 2 poseidon"], found["best"]["fc 500 poseidon"]
    assert few["scheme"] == "sfb" and few["costs"][0]["node_floats"] == 5_600
    assert many["scheme"] == "ps" and many["costs"][0]["node_floats"] == 360_000
    assert found["by index"]


def test_what_the_book_does_not_have_is_refused(pool: FirstRanks) -> None:
    before, rate, nothing, layer, batch, half, model = asked(pool, strategy="ring")["refused"]
    assert "no prepared models" in before
    assert "no 'rate_bps': it has job, ranks, workers" in rate
    assert "needs a name; known are job" in nothing
    assert "no 'fc9'" in layer
    assert "batch_size is 0" in batch
    assert "batch_size is 2.5" in half and "whole number" in half
    assert "has not prepared" in model


def test_a_ring_has_no_servers_and_codecs_are_told(pool: FirstRanks) -> None:
    found = asked(pool, strategy="ring", codec="qsgd:bits=8")
    assert found["roles"] == ("worker",) * 3 and found["servers"] == 0
    assert found["codecs"]["fc.weight"].startswith("qsgd:bits=8")
    assert set(found["schemes"].values()) == {"ring"}


def test_ranks_that_only_serve_have_addresses_and_a_role(pool: FirstRanks) -> None:
    first, second, served = pool.run(f"{MODULE}:ask_beside_servers")
    assert first == second and len(served) == 1
    assert (first["ranks"], first["workers"], first["servers"]) == (3, 2, 1)
    assert first["roles"] == ("worker", "worker", "server")
    assert len({*first["addresses"]}) == 3 and None not in first["addresses"]
    # One server that trains nothing sends and receives 2 P1 M N / P2.
    assert first["best"]["fc 500 poseidon"]["costs"][0]["node_floats"] == 2 * 2 * 120_000


def test_ranks_that_only_talk_to_their_node_have_no_address(pool: FirstRanks) -> None:
    first, *others = pool.run(f"{MODULE}:ask_on_nodes", ranks=4)
    assert others == [first] * 3
    assert first["roles"] == ("worker and server", "worker") * 2
    assert [address is None for address in first["addresses"]] == [False, True, False, True]
    assert all("each of 2 nodes" in it["reason"] for it in first["best"].values())
    # Two nodes, each worker and server: 2 M N (2 + 2 - 2) / 2 whatever the batch, or the factors of
    # both ranks to the other node and from it: 2 (2 K) (2 - 1) (M + N).
    assert first["servers"] == 2
    for batch, scheme in ((2, "sfb"), (500, "ps")):
        choice = first["best"][f"fc {batch} poseidon"]
        costs = {cost["scheme"]: cost["node_floats"] for cost in choice["costs"]}
        assert choice["scheme"] == scheme
        assert costs["ps"] == 2 * 120_000 and costs["sfb"] == 2 * 2 * batch * 700


def test_nodes_whose_ranks_all_talk_to_the_network_are_counted(pool: FirstRanks) -> None:
    """Both are on this machine, as in an emulated cluster."""
    first, *others = pool.run(f"{MODULE}:ask_on_nodes", ranks=4, local="shared")
    assert others == [first] * 3
    assert None not in first["addresses"] and len(set(first["nodes"])) == 1
    for batch in (2, 500):
        costs = first["best"][f"fc {batch} poseidon"]["costs"]
        assert 2 * 120_000 in [cost["node_floats"] for cost in costs]


def test_ranks_by_themselves_need_no_word_of_nodes(pool: FirstRanks) -> None:
    assert not any("nodes" in it["reason"] for it in asked(pool)["best"].values())
