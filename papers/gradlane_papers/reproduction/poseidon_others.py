"""Poseidon's numbers beside its figures: single nodes, several accelerators a node, CNTK's 1 bit.

Caffe+PS copies gradients and parameters between accelerator and host without overlap (section 5.1);
the rate of these copies is fitted to VGG-19's single node, and all else is predicted with it.
CNTK's exchange is the model of `lowprec_model`, with its kernels as fast as a Titan X and a port of
40 Gbit/s in place of the machine's memory.
"""

from __future__ import annotations

from functools import cache

from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of
from gradlane_papers.reproduction.comparison import Number, given, ours, reproduces
from gradlane_papers.reproduction.lowprec_model import KERNELS, constants, one_gpu, units
from gradlane_papers.reproduction.poseidon_bytes import BATCHES, profile_of, seconds, step
from gradlane_papers.reproduction.simulations import FREE, Simulations

LOCAL_RATE_BPS = 80e9
"""Between the accelerators of a node: PCIe 3.0, of which 10 GB/s reach a copy."""
NODE_GPUS = 8
"""Of a p2.8xlarge."""


@cache
def copy_rate() -> float:
    """Return the bytes a second of Caffe+PS's copies, fitted to VGG-19 on one node."""
    slow_s = BATCHES["vgg19"] / float(given("poseidon_vgg19_ps"))
    return 2.0 * profile_of("vgg19", "caffe").size_bytes / (slow_s - seconds("vgg19", "caffe"))


def copies_s(model: str) -> float:
    """Return the time of Caffe+PS's copies: gradients to the host, parameters back."""
    return 2.0 * profile_of(model, "caffe").size_bytes / copy_rate()


def sequential_speedup(model: str, nodes: int, rate_gbps: float, share: float = 1.0) -> float:
    """Return the speed-up of Caffe+PS: full ports, its own copies, and nothing overlaps."""
    exchanged_s = step(model, "caffe", nodes, rate_gbps, "ps", share).step_s
    own_s = BATCHES[model] / float(given(f"poseidon_{model}_ps")) - seconds(model, "caffe")
    return nodes * seconds(model, "caffe") / (exchanged_s + own_s)


@reproduces("poseidon:one_node")
def one_node(_: Simulations) -> list[Number]:
    """Throughput of a single node."""
    rows = []
    for model in ("googlenet", "vgg19", "vgg19_22k"):
        speed = BATCHES[model] / (seconds(model, "caffe") + copies_s(model))
        rows.append(ours(f"{model}_ps", speed, rate=copy_rate() / 1e9))
    alone = {
        "vgg19_22k_poseidon": "poseidon_vgg19_22k_caffe",
        "vgg19_tf_poseidon": "poseidon_vgg19_tf",
        "vgg19_22k_tf_poseidon": "poseidon_vgg19_22k_tf",
        "googlenet_poseidon": "poseidon_googlenet_caffe",
        "vgg19_poseidon": "poseidon_vgg19_caffe",
        "inception_v3_tf_poseidon": "poseidon_inception_v3_tf",
    }
    return [*rows, *(ours(key, given(name), "alone") for key, name in alone.items())]


def _local_speedup(model: str) -> float:
    """Return the speed-up of four accelerators of a node, each layer sent when it is ready."""
    profile = profile_of(model, "caffe")
    cluster = Cluster(4, LOCAL_RATE_BPS, "wfbp", costs=FREE)
    step_s = float(run_scenario(scenario_of(profile, cluster))["report"]["step_s"])
    return 4.0 * profile.compute_s / step_s


def _nodes_speedup(model: str) -> float:
    """Return the speed-up of four nodes of eight K80, which add up locally first."""
    slower = one_gpu("vgg19") / float(given("poseidon_vgg19_caffe"))
    batch_s = seconds(model, "caffe") / slower
    cluster = Cluster(
        4 * NODE_GPUS,
        10e9,
        "wfbp",
        local="leader",
        ranks_per_node=NODE_GPUS,
        local_rate_bps=LOCAL_RATE_BPS,
        costs=FREE,
    )
    report = run_scenario(scenario_of(synthetic_profile(model, batch_s), cluster))["report"]
    return cluster.workers * batch_s / float(report["step_s"])


@reproduces("poseidon:multi")
def multi(_: Simulations) -> list[Number]:
    """Several accelerators a node."""
    slowest = min(_local_speedup(model) for model in ("googlenet", "vgg19", "vgg19_22k"))
    rows = [ours("one_node", slowest)]
    for model in ("googlenet", "vgg19"):
        alone_s = seconds(model, "caffe")
        # A tree of four: two levels up with gradients, two down with parameters.
        tree_s = 4.0 * profile_of(model, "caffe").size_bytes / copy_rate()
        speedup = 4.0 * alone_s / (alone_s + tree_s)
        rows.append(ours(f"{model}_caffe", speedup, "tree", rate=copy_rate() / 1e9))
    return [*rows, *(ours(model, _nodes_speedup(model)) for model in ("googlenet", "vgg19"))]


@reproduces("poseidon:cntk")
def cntk(_: Simulations) -> list[Number]:
    """CNTK with 1 bit on VGG-19."""
    faster = given("poseidon_vgg19_caffe") / one_gpu("vgg19")
    alone_s = seconds("vgg19", "caffe")
    rows = []
    for nodes in (8, 16, 32):
        amounts = units("vgg19", "1bit", nodes)
        each = constants("mpi")
        port_s = amounts["link"] / (40e9 / 8 * GOODPUT_SHARE)
        messages_s = each["messages"] * amounts["messages"]
        kernels_s = sum(each[name] * amounts[name] for name in KERNELS) / faster
        exchange_s = port_s + messages_s + kernels_s
        speedup = nodes * alone_s / (alone_s + exchange_s)
        parts_ms = {"port": port_s, "messages": messages_s, "kernels": kernels_s}
        facts = {name: 1e3 * part_s for name, part_s in parts_ms.items()}
        rows.append(ours(f"vgg19_{nodes}", speedup, **facts))
    return rows


@reproduces("poseidon:sec3")
def section_3(_: Simulations) -> list[Number]:
    """Shares of parameters and of computation."""

    def upper(model: str) -> tuple[float, float]:
        network = ARCHITECTURES[model]()
        dense = [layer for layer in network.layers if layer.kind == "Linear"]
        numbers = sum(one.numel for layer in dense for one in layer.parameters)
        operations = sum(layer.operations for layer in dense)
        return 100.0 * numbers / network.numel, 100.0 * (1.0 - operations / network.operations)

    return [
        ours("fc_share", upper("vgg19")[0]),
        ours("conv_share", upper("vgg19")[1]),
        ours("vgg19_22k_fc", upper("vgg19_22k")[0]),
    ]
