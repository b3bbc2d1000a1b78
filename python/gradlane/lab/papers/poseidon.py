"""The figures of Poseidon (Zhang et al., USENIX ATC 2017), simulated and by bytes.

Figures 5 and 8 are simulated: the engine sends slices of 2 MB first come first served on servers,
and factors where the paper's formula says so; hosts take no time, and rebuilding takes the
accelerator's. Beside them, and for what the engine has no scheme for, stands the model
`planning/schemes/hybrid.py`: ports that carry table 1's bytes and nothing else that takes time.

Both are given twice: with ports that are fully used, and with the share of 40 Gbit/s with which the
model of bytes makes *one* published number right (VGG19-22K by WFBP on 32 nodes, 21.5x), as what
their transport reached. All other rows with that share are predictions.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.lab.papers.comparison import Curve, Figure, Ours, published_of
from gradlane.lab.papers.poseidon_bytes import (
    NODES,
    curves_of,
    fitted_share,
    profile_of,
    share_for,
    speedup,
    step,
)
from gradlane.lab.papers.poseidon_others import sequential_speedup
from gradlane.lab.papers.simulations import Job, Simulations
from gradlane.lab.papers.trained import POSEIDON_9B, POSEIDON_11
from gradlane.planning.schemes.costs import SCHEMES, Counts
from gradlane.planning.schemes.layers import schemes_by_rule
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.grid import GOODPUT_SHARE
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import FREE_HOST, Cluster

_FITTED = "vgg19_22k_wfbp"
"""The number of figure 5 that the share of the port was fitted to, by bytes."""
_LIMIT = "What full ports and free hosts allow at most."
_OVERLAP = "With overlap; the published number is that of a server without it."
_REBUILDING = (
    "The port does not decide. Rebuilding the others' gradients is taken to be as fast as the "
    "step's own arithmetic, and is all that is missing to linear."
)


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
    simulations: Simulations,
    key: str,
    model: str,
    nodes: int,
    rate_gbps: float,
    system: str,
    whys: tuple[str, str],
    *,
    main: bool = True,
) -> list[Ours]:
    """Return a published number's rows: simulated and by bytes, with both shares of the port.

    The simulation with the fitted share is the main one, unless another row is.
    """
    shares = (1.0, fitted_share())
    jobs = [simulated_job(model, nodes, rate_gbps, system, share) for share in shares]
    rows = []
    speedups = simulated_speedups(simulations, jobs)
    for share, simulated, why in zip(shares, speedups, whys, strict=True):
        port = "full ports" if share == 1.0 else f"{100 * share:.0f} % of the port"
        by_bytes = speedup(model, "caffe", nodes, rate_gbps, system, share)
        fitted = "fitted" if key == _FITTED and share != 1.0 else ""
        rows.append(Ours(key, simulated, why, f"simulated, {port}", main and share != 1.0, fitted))
        rows.append(Ours(key, by_bytes, "What bytes alone allow.", f"by bytes, {port}"))
    return rows


def _both(
    key: str, model: str, engine: str, nodes: int, rate_gbps: float, system: str, why: str
) -> list[Ours]:
    """Return a published number's rows by bytes, with both shares of the port.

    The main one has the share that was fitted to Poseidon's transport, where that is the system's.
    """
    share = fitted_share()
    full = step(model, engine, nodes, rate_gbps, system, 1.0)
    limit = _LIMIT
    if system == "tf":
        limit = (
            "Servers take whole layers in turn; where theirs put them, and how much of a port "
            "TensorFlow's own transport uses, is not known."
        )
    elif full.rebuild_s > 0.01 * full.step_s:
        limit = _REBUILDING
    own = system != "tf"
    return [
        Ours(
            key, speedup(model, engine, nodes, rate_gbps, system), limit, "full ports", main=not own
        ),
        Ours(
            key,
            speedup(model, engine, nodes, rate_gbps, system, share),
            why,
            f"{100 * share:.0f} % of the port",
            main=own,
        ),
    ]


def figure_5(simulations: Simulations) -> list[Ours | Curve]:
    """Caffe at 40 GbE, 32 nodes."""
    cases = (
        ("googlenet_wfbp", "googlenet", "wfbp", _LIMIT, "As published: near linear."),
        (
            *("vgg19_wfbp", "vgg19", "wfbp", _LIMIT),
            "Where the port is nearly full, queues and unequal flows cost a tenth.",
        ),
        (
            *("vgg19_22k_wfbp", "vgg19_22k", "wfbp", _LIMIT),
            "The number to which the share was fitted, by bytes.",
        ),
        (
            *("vgg19_22k_poseidon", "vgg19_22k", "poseidon", _REBUILDING),
            "The same: factors are so few bytes that a third of the port is enough.",
        ),
    )
    rows: list[Ours | Curve] = []
    for key, model, system, full, fitted in cases:
        rows += _simulated(simulations, key, model, 32, 40, system, (full, fitted))
    rows += _simulated_curves(simulations, ("googlenet", "vgg19", "vgg19_22k"), 40)
    rows += _caffe_ps("vgg19_22k_16", "vgg19_22k", 40)
    rows += _sequential()
    return rows


def _caffe_ps(key: str, model: str, rate_gbps: float) -> list[Ours]:
    """Return a number of 16 nodes without overlap: with Caffe+PS's copies and without."""
    bytes_alone = speedup(model, "caffe", 16, rate_gbps, "ps")
    with_copies = sequential_speedup(model, 16, rate_gbps)
    nothing = "nothing overlaps, full ports"
    why = (
        f"Caffe+PS as section 5.1 has it, with the copies of its single node; without these "
        f"{bytes_alone:.1f}x"
    )
    return [
        Ours(key, with_copies, why, f"{nothing}, copies", main=True),
        Ours(key, bytes_alone, "By bytes alone.", nothing),
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


def figure_6(_: Simulations) -> list[Ours | Curve]:
    """TensorFlow at 40 GbE, 32 nodes."""
    cases = (
        ("inception_v3_poseidon", "inception_v3", "poseidon", "Near linear with either."),
        (
            *("inception_v3_tf", "inception_v3", "tf"),
            "Whole layers on one server each, which the fitted share makes too slow: TensorFlow's "
            "own transport is another one.",
        ),
        (
            *("vgg19_22k_wfbp", "vgg19_22k", "wfbp"),
            "A prediction: the share was fitted to Caffe's number.",
        ),
        (*("vgg19_22k_poseidon", "vgg19_22k", "poseidon"), "The same with a third of the port."),
    )
    rows: list[Ours | Curve] = []
    for key, model, system, why in cases:
        rows += _both(key, model, "tf", 32, 40, system, why)
    whole = speedup("inception_v3", "tf", 32, 40, "tf")
    better = speedup("inception_v3", "tf", 32, 40, "poseidon") / whole
    contradicts = (
        "full ports; the paper contradicts itself, 20x in section 1 and 10x in section 5.1"
    )
    rows.append(Ours("inception_v3_tf_text", whole, contradicts))
    rows.append(Ours("inception_v3_gain", 100.0 * (better - 1.0), contradicts))
    return [*rows, *curves_of(("inception_v3", "vgg19", "vgg19_22k"), "tf")]


def figure_7(_: Simulations) -> list[Ours]:
    """Stall of the accelerator on eight nodes at 40 GbE."""
    share = fitted_share()
    return [
        Ours(
            "stall",
            100.0 * step(model, "tf", 8, 40, system, share).stall_share,
            "The picture has no numbers; TensorFlow waits most, Poseidon hardly, as it shows.",
            f"{model}, {system}, {100 * share:.0f} % of the port",
        )
        for model in ("inception_v3", "vgg19", "vgg19_22k")
        for system in ("tf", "wfbp", "poseidon")
    ]


def figure_8(simulations: Simulations) -> list[Ours | Curve]:
    """Caffe at lower bandwidth."""
    cases = (
        ("vgg19_ps", "vgg19", 10, "wfbp", _OVERLAP, _OVERLAP),
        ("vgg19_22k_ps", "vgg19_22k", 10, "wfbp", _OVERLAP, _OVERLAP),
        (
            *("vgg19_22k_poseidon", "vgg19_22k", 10, "poseidon"),
            "The port does not decide; what is missing to linear is rebuilding.",
            "Convolutions wait behind factors that meet at ports: 1.06 s before rebuilding, "
            "and 0.94 s in the order of p3.",
        ),
        (
            *("vgg19_ps_30", "vgg19", 30, "wfbp", _LIMIT),
            "The paper: servers would need 30 GbE or more for what factors do at 10.",
        ),
    )
    rows: list[Ours | Curve] = []
    for key, model, rate, system, full, fitted in cases:
        main = key not in ("vgg19_ps", "vgg19_22k_ps")
        whys = (full, fitted)
        rows += _simulated(simulations, key, model, 16, rate, system, whys, main=main)
    rows += _caffe_ps("vgg19_ps", "vgg19", 10) + _caffe_ps("vgg19_22k_ps", "vgg19_22k", 10)
    rows += _simulated_curves(simulations, ("vgg19", "vgg19_22k"), 10)
    for rate in (2, 5):
        rows += curves_of(("googlenet",), "caffe", rate)
    for rate in (5, 20):
        rows += curves_of(("vgg19", "vgg19_22k"), "caffe", rate)
    return rows


def figure_9(_: Simulations) -> list[Ours]:
    """ResNet-152 on 32 nodes, its throughput."""
    why = "ResNet-152's single-node speed is not in the paper; it is Inception-V3's, by operations."
    return _both("throughput", "resnet152", "tf", 32, 40, "poseidon", why)


def figure_10(_: Simulations) -> list[Ours]:
    """Traffic of each node, VGG-19 on eight nodes."""
    share = fitted_share()
    rows: list[Ours] = []
    for system in ("wfbp", "adam", "poseidon"):
        traffic = step("vgg19", "tf", 8, 40, system, share).node_bytes
        rows.append(
            Ours(
                "balance",
                max(traffic) / min(traffic),
                f"{min(traffic) / 1e6:.0f} to {max(traffic) / 1e6:.0f} MB a node and step, by "
                "table 1's counts; under Adam three nodes own the three large layers.",
                system,
            )
        )
    wanted = published_of("poseidon:fig10")["adam_speedup"].value
    assert wanted is not None
    needed = share_for("vgg19", "tf", 8, 40, "adam", wanted)
    why = (
        f"The server of the largest layer sends 2.9 GB a step; {wanted:g}x follows from "
        f"{100 * needed:.0f} % of the port, more than was fitted to servers that all send alike."
    )
    return [*rows, *_both("adam_speedup", "vgg19", "tf", 8, 40, "adam", why)]


def table_1(_: Simulations) -> list[Ours]:
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
    return [
        Ours(key, floats(4096, 4096, counts) / 1e6, "Table 1's formula.")
        for key, floats in cells.items()
    ]


def table_3(_: Simulations) -> list[Ours]:
    """Parameters of the networks."""
    whys = {
        "cifar10_quick": "The same layers.",
        "googlenet": "torchvision's; the paper counts another variant (Caffe's has 7.0 million).",
        "inception_v3": "Without the auxiliary classifier, with which it has 27.2 million.",
        "vgg19": "The same layers; the paper rounds down.",
        "vgg19_22k": "The same layers.",
        "resnet152": "The same layers.",
    }
    return [
        Ours(model, sum(t.numel for t in synthetic_profile(model).tensors) / 1e6, why)
        for model, why in whys.items()
    ]


def section_2(_: Simulations) -> list[Ours]:
    """Return what AlexNet would need on eight nodes."""
    profile = synthetic_profile("alexnet")
    sends = 7 / 8 * profile.size_bytes / profile.compute_s * 8 / 1e9
    why = (
        "The paper's 840 million are bytes (240 million gradients x 7/8 x 4), which it takes for "
        "floats: its own numbers make 6.7 Gbit/s. As a server a node sends as much again."
    )
    gradients = profile.size_bytes / 4 / profile.compute_s / 1e6
    return [
        Ours("alexnet_parameters", profile.size_bytes / 4e6, "The same layers."),
        Ours("alexnet_gradients", gradients, "By the batch time of 0.25 s."),
        Ours("alexnet_rate", sends, why),
    ]


_SIMULATED = (
    "simulated, 2 to 32 ranks: slices of 2 MB first come first served, free hosts, Titan X batch "
    "times of section 5.1; and the model of bytes (`gradlane.planning.schemes.hybrid`)"
)
_BYTES = (
    "the model of bytes (`gradlane.planning.schemes.hybrid`), Titan X batch times of section 5.1"
)
FIGURES = (
    Figure("poseidon:sec2", "what AlexNet asks of a network", "counted", section_2),
    Figure("poseidon:table1", "numbers that each scheme moves", "counted", table_1),
    Figure("poseidon:table3", "the networks", "counted", table_3),
    Figure("poseidon:fig5", "scaling with Caffe at 40 GbE", _SIMULATED, figure_5),
    Figure("poseidon:fig6", "scaling with TensorFlow at 40 GbE", _BYTES, figure_6),
    Figure("poseidon:fig7", "busy and stalled accelerators", _BYTES, figure_7),
    Figure("poseidon:fig8", "scaling with Caffe at lower bandwidth", _SIMULATED, figure_8),
    Figure("poseidon:fig9", "ResNet-152: throughput", _BYTES, figure_9),
    Figure("poseidon:fig10", "traffic of each node", _BYTES, figure_10),
    POSEIDON_9B,
    POSEIDON_11,
)
