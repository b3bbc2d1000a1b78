"""Poseidon's numbers beside its figures: single nodes, several accelerators a node, CNTK's 1 bit.

Caffe+PS copies gradients and parameters between accelerator and host without overlap (section 5.1);
the rate of these copies is fitted to VGG-19's single node, and all else is predicted with it.
CNTK's exchange is the model of `lowprec_model`, with its kernels as fast as a Titan X and a port of
40 Gbit/s in place of the machine's memory.
"""

from __future__ import annotations

from functools import cache

from gradlane.lab.papers.comparison import Figure, Ours, given
from gradlane.lab.papers.lowprec_model import KERNELS, constants, one_gpu, units
from gradlane.lab.papers.poseidon_bytes import BATCHES, profile_of, seconds, step
from gradlane.lab.papers.simulations import FREE, Simulations
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of

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


def one_node(_: Simulations) -> list[Ours]:
    """Throughput of a single node."""
    rows = []
    for model in ("googlenet", "vgg19", "vgg19_22k"):
        speed = BATCHES[model] / (seconds(model, "caffe") + copies_s(model))
        fitted = model == "vgg19"
        why = f"copies at {copy_rate() / 1e9:.1f} GB/s, fitted to VGG-19"
        rows.append(Ours(f"{model}_ps", speed, why, role="fitted" if fitted else ""))
    hidden = (
        "one rank sends nothing, so it is as fast as the engine alone, whose speed is published"
    )
    alone = {
        "vgg19_22k_poseidon": "poseidon_vgg19_22k_caffe",
        "vgg19_tf_poseidon": "poseidon_vgg19_tf",
        "vgg19_22k_tf_poseidon": "poseidon_vgg19_22k_tf",
    }
    rows += [Ours(key, given(name), hidden, role="input") for key, name in alone.items()]
    return rows


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


def multi(_: Simulations) -> list[Ours]:
    """Several accelerators a node."""
    slowest = min(_local_speedup(model) for model in ("googlenet", "vgg19", "vgg19_22k"))
    rows = [Ours("one_node", slowest, "simulated: the slowest of three; PCIe at 10 GB/s")]
    for model in ("googlenet", "vgg19"):
        alone_s = seconds(model, "caffe")
        # A tree of four: two levels up with gradients, two down with parameters.
        tree_s = 4.0 * profile_of(model, "caffe").size_bytes / copy_rate()
        why = (
            f"a tree after backward without overlap, copies at Caffe+PS's "
            f"{copy_rate() / 1e9:.1f} GB/s"
        )
        rows.append(Ours(f"{model}_caffe", 4.0 * alone_s / (alone_s + tree_s), why))
    for model in ("googlenet", "vgg19"):
        why = (
            "simulated: 4 nodes of 8 ranks that add up on PCIe first, 10 Gbit/s, times of a K80 "
            "(figure 10 of the low-precision paper); backward hides all of it"
        )
        rows.append(Ours(model, _nodes_speedup(model), why))
    return rows


def cntk(_: Simulations) -> list[Ours]:
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
        why = (
            f"held out: constants of the low-precision paper's ResNet-152; bytes "
            f"{1e3 * port_s:.0f} ms, messages {1e3 * messages_s:.0f} ms, kernels "
            f"{1e3 * kernels_s:.0f} ms after a backward that hides none of it"
        )
        rows.append(Ours(f"vgg19_{nodes}", nodes * alone_s / (alone_s + exchange_s), why))
    return rows


def section_3(_: Simulations) -> list[Ours]:
    """Shares of parameters and of computation."""

    def upper(model: str) -> tuple[float, float]:
        network = ARCHITECTURES[model]()
        dense = [layer for layer in network.layers if layer.kind == "Linear"]
        numbers = sum(one.numel for layer in dense for one in layer.parameters)
        operations = sum(layer.operations for layer in dense)
        return 100.0 * numbers / network.numel, 100.0 * (1.0 - operations / network.operations)

    counted = "counted for VGG-19; the paper means a family of networks"
    return [
        Ours("fc_share", upper("vgg19")[0], counted),
        Ours("conv_share", upper("vgg19")[1], counted),
        Ours("vgg19_22k_fc", upper("vgg19_22k")[0], "counted"),
    ]


FIGURES = (
    Figure("poseidon:sec3", "where parameters and computation are", "counted", section_3),
    Figure(
        "poseidon:one_node",
        "throughput of a single node",
        "copies of Caffe+PS at one rate, fitted to VGG-19",
        one_node,
    ),
    Figure("poseidon:multi", "several accelerators a node", "simulated, hosts free", multi),
    Figure(
        "poseidon:cntk",
        "CNTK with 1-bit gradients",
        "the exchange of `lab/papers/lowprec_model.py` on ports of 40 Gbit/s",
        cntk,
    ),
)
