"""The figures of Poseidon (Zhang et al., USENIX ATC 2017), simulated and by bytes.

Figures 5 and 8 are simulated: the engine sends slices of 2 MB first come first served on servers,
and factors where the paper's formula says so; hosts take no time, and rebuilding takes the
accelerator's. Beside them, and for what the engine has no scheme for, stands the model
`planning/schemes/step_time.py`: ports that carry table 1's bytes and nothing else that takes time.

Both are given twice: with ports that are fully used, and with the share of 40 Gbit/s with which the
model of bytes makes *one* published number right (VGG19-22K by WFBP on 32 nodes, 21.5x), as what
their transport reached. All other rows with that share are predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.planning.schemes.costs import SCHEMES, Counts
from gradlane.planning.schemes.layers import schemes_by_rule
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import FREE_HOST, Cluster
from gradlane_papers.reproduction.comparison import Curve, Number, ours, published_of, reproduces
from gradlane_papers.reproduction.poseidon_bytes import (
    NODES,
    curves_of,
    fitted_share,
    profile_of,
    share_for,
    speedup,
    step,
)
from gradlane_papers.reproduction.poseidon_others import sequential_speedup
from gradlane_papers.reproduction.simulations import Job, Simulations


def simulated_job(model: str, nodes: int, rate_gbps: float, system: str, share: float) -> Job:
    """Return the simulation of a system with Caffe's batch times.

    Args:
        model: one of `BATCHES`.
        nodes: each with one accelerator, worker and server.
        rate_gbps: of every port.
        system: `wfbp`, or `poseidon`: the same with factors where the formula says so.
        share: of the port's goodput that the transport uses.
    """
    profile = profile_of(model, "caffe")
    schemes = schemes_by_rule("poseidon", profile, nodes) if system == "poseidon" else ()
    costs = MachineCosts(host=FREE_HOST, network={"goodput_share": GOODPUT_SHARE * share})
    cluster = Cluster(nodes, rate_gbps * 1e9, "wfbp", schemes=schemes, costs=costs)
    return Job(model, cluster, profile.compute_s)


def simulated_speedups(simulations: Simulations, jobs: Sequence[Job]) -> list[float]:
    """Return throughput over that of one node, of each job."""
    return [
        job.cluster.workers * profile_of(job.model, "caffe").compute_s / step_s
        for job, step_s in zip(jobs, simulations.steps_s(jobs), strict=True)
    ]


def _simulated(
    simulations: Simulations, key: str, model: str, nodes: int, rate_gbps: float, system: str
) -> list[Number]:
    """Return a published number's rows: simulated and by bytes, with both shares of the port."""
    shares = {"full": 1.0, "share": fitted_share()}
    jobs = [simulated_job(model, nodes, rate_gbps, system, share) for share in shares.values()]
    rows = []
    speedups = simulated_speedups(simulations, jobs)
    for (tag, share), simulated in zip(shares.items(), speedups, strict=True):
        by_bytes = speedup(model, "caffe", nodes, rate_gbps, system, share)
        rows.append(ours(key, simulated, tag, share=100 * share))
        rows.append(ours(key, by_bytes, f"bytes, {tag}", share=100 * share))
    return rows


def _both(
    key: str, model: str, engine: str, nodes: int, rate_gbps: float, system: str, **facts: float
) -> list[Number]:
    """Return a published number's rows by bytes, with both shares of the port."""
    share = fitted_share()
    full = step(model, engine, nodes, rate_gbps, system, 1.0)
    rebuilds = system != "tf" and full.rebuild_s > 0.01 * full.step_s
    fitted = speedup(model, engine, nodes, rate_gbps, system, share)
    return [
        ours(
            key,
            speedup(model, engine, nodes, rate_gbps, system),
            "rebuilding" if rebuilds else "full",
        ),
        ours(key, fitted, "share", share=100 * share, **facts),
    ]


@reproduces("poseidon:fig5")
def figure_5(simulations: Simulations) -> list[Number | Curve]:
    """Caffe at 40 GbE, 32 nodes."""
    rows: list[Number | Curve] = []
    for key in ("googlenet_wfbp", "vgg19_wfbp", "vgg19_22k_wfbp", "vgg19_22k_poseidon"):
        model, system = key.rsplit("_", 1)
        rows += _simulated(simulations, key, model, 32, 40, system)
    rows += _simulated_curves(simulations, ("googlenet", "vgg19", "vgg19_22k"), 40)
    rows += _caffe_ps("vgg19_22k_16", "vgg19_22k", 40)
    rows += _sequential()
    return rows


def _caffe_ps(key: str, model: str, rate_gbps: float) -> list[Number]:
    """Return a number of 16 nodes without overlap: with Caffe+PS's copies and without."""
    bytes_alone = speedup(model, "caffe", 16, rate_gbps, "ps")
    with_copies = sequential_speedup(model, 16, rate_gbps)
    return [
        ours(key, with_copies, "copies", bytes_alone=bytes_alone),
        ours(key, bytes_alone, "sequential"),
    ]


def _sequential() -> list[Curve]:
    """Caffe+PS: nothing overlaps, and one node is as slow as the paper says."""
    return [
        Curve(
            f"{model} by Caffe+PS, 40 GbE, fitted share",
            "nodes",
            "speed-up",
            tuple(
                (float(nodes), sequential_speedup(model, nodes, 40, fitted_share()))
                for nodes in NODES
            ),
        )
        for model in ("googlenet", "vgg19", "vgg19_22k")
    ]


def _simulated_curves(
    simulations: Simulations, models: tuple[str, ...], rate_gbps: float
) -> list[Curve]:
    """Return the lines of a picture, simulated: both systems on every number of nodes."""
    jobs = {
        f"{model} by {system}, {rate_gbps} GbE, simulated, {text}": [
            simulated_job(model, nodes, rate_gbps, system, share) for nodes in NODES
        ]
        for model in models
        for system in ("wfbp", "poseidon")
        for share, text in ((1.0, "full ports"), (fitted_share(), "fitted share"))
    }
    simulations.run([job for line in jobs.values() for job in line])
    return [
        Curve(
            name,
            "nodes",
            "speed-up",
            tuple(zip(map(float, NODES), simulated_speedups(simulations, line), strict=True)),
        )
        for name, line in jobs.items()
    ]


@reproduces("poseidon:fig6")
def figure_6(_: Simulations) -> list[Number | Curve]:
    """TensorFlow at 40 GbE, 32 nodes."""
    rows: list[Number | Curve] = []
    for key in ("inception_v3_poseidon", "inception_v3_tf", "vgg19_22k_wfbp", "vgg19_22k_poseidon"):
        model, system = key.rsplit("_", 1)
        rows += _both(key, model, "tf", 32, 40, system)
    whole = speedup("inception_v3", "tf", 32, 40, "tf")
    better = speedup("inception_v3", "tf", 32, 40, "poseidon") / whole
    rows.append(ours("inception_v3_tf_text", whole))
    rows.append(ours("inception_v3_gain", 100.0 * (better - 1.0)))
    return [*rows, *curves_of(("inception_v3", "vgg19", "vgg19_22k"), "tf")]


@reproduces("poseidon:fig7")
def figure_7(_: Simulations) -> list[Number]:
    """Stall of the accelerator on eight nodes at 40 GbE."""
    share = fitted_share()
    return [
        ours(
            "stall",
            100.0 * step(model, "tf", 8, 40, system, share).stall_share,
            model=model,
            system=system,
            share=100 * share,
        )
        for model in ("inception_v3", "vgg19", "vgg19_22k")
        for system in ("tf", "wfbp", "poseidon")
    ]


@reproduces("poseidon:fig8")
def figure_8(simulations: Simulations) -> list[Number | Curve]:
    """Caffe at lower bandwidth."""
    rows: list[Number | Curve] = []
    for key, model, rate, system in (
        ("vgg19_ps", "vgg19", 10, "wfbp"),
        ("vgg19_22k_ps", "vgg19_22k", 10, "wfbp"),
        ("vgg19_22k_poseidon", "vgg19_22k", 10, "poseidon"),
        ("vgg19_ps_30", "vgg19", 30, "wfbp"),
    ):
        rows += _simulated(simulations, key, model, 16, rate, system)
    rows += _caffe_ps("vgg19_ps", "vgg19", 10) + _caffe_ps("vgg19_22k_ps", "vgg19_22k", 10)
    rows += _simulated_curves(simulations, ("vgg19", "vgg19_22k"), 10)
    for rate in (2, 5):
        rows += curves_of(("googlenet",), "caffe", rate)
    for rate in (5, 20):
        rows += curves_of(("vgg19", "vgg19_22k"), "caffe", rate)
    return rows


@reproduces("poseidon:fig9")
def figure_9(_: Simulations) -> list[Number]:
    """ResNet-152 on 32 nodes, its throughput."""
    return _both("throughput", "resnet152", "tf", 32, 40, "poseidon")


@reproduces("poseidon:fig10")
def figure_10(_: Simulations) -> list[Number]:
    """Traffic of each node, VGG-19 on eight nodes."""
    share = fitted_share()
    rows: list[Number] = []
    for system in ("wfbp", "adam", "poseidon"):
        traffic = step("vgg19", "tf", 8, 40, system, share).node_bytes
        least, most = min(traffic), max(traffic)
        balance = most / least
        rows.append(ours("balance", balance, system=system, least=least / 1e6, most=most / 1e6))
    wanted = published_of("poseidon:fig10")["adam_speedup"].value
    assert wanted is not None
    needed = 100 * share_for("vgg19", "tf", 8, 40, "adam", wanted)
    adam = _both("adam_speedup", "vgg19", "tf", 8, 40, "adam", wanted=wanted, needed=needed)
    return [*rows, *adam]


@reproduces("poseidon:table1")
def table_1(_: Simulations) -> list[Number]:
    """Count the worked example: 4096 x 4096, K = 32, eight workers and servers."""
    counts = Counts(rows=32, workers=8, servers=8)
    ps, sfb, adam = SCHEMES["ps"], SCHEMES["sfb"], SCHEMES["adam"]
    assert ps.server_floats and ps.both_floats and adam.both_floats and adam.server_floats
    cells = {
        "ps_worker": ps.worker_floats,
        "ps_server": ps.server_floats,
        "ps_both": ps.both_floats,
        "sfb": sfb.worker_floats,
        "adam_server": adam.server_floats,
        "adam_worker": adam.worker_floats,
        "adam_both": adam.both_floats,
    }
    return [ours(key, floats(4096, 4096, counts) / 1e6) for key, floats in cells.items()]


@reproduces("poseidon:table3")
def table_3(_: Simulations) -> list[Number]:
    """Parameters of the networks."""
    return [
        ours(model, sum(t.numel for t in synthetic_profile(model).tensors) / 1e6)
        for model in published_of("poseidon:table3")
    ]


@reproduces("poseidon:sec2")
def section_2(_: Simulations) -> list[Number]:
    """Return what AlexNet would need on eight nodes."""
    profile = synthetic_profile("alexnet")
    assert SCHEMES["ps"].both_floats
    counts = Counts(rows=profile.batch_size, workers=8, servers=8)
    floats = SCHEMES["ps"].both_floats(profile.size_bytes // 4, 1, counts)
    return [
        ours("alexnet_parameters", profile.size_bytes / 4e6),
        ours("alexnet_gradients", profile.size_bytes / 4 / profile.compute_s / 1e6),
        ours("alexnet_rate", 32 * floats / profile.compute_s / 1e9),
    ]
