"""The figures of "Is network the bottleneck of distributed training?" (Zhang et al. 2020).

Servers of eight V100, all-reduce by rings. Its own model is `ring-fused` of `gradlane whatif` with
the authors' inputs: logs of gradient times (`resnet50-v100-bs32.json`, `vgg16-v100-bs32.json` in
`--profiles DIR`) and measured additions (`vec_add_v100.csv` beside that folder). Without them
profiles are made from operation counts with the logs' batch and backward times, additions cost
nothing, and every figure says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from gradlane.lab.papers.comparison import Curve, Figure, Ours, first_above, given, published_of
from gradlane.lab.papers.simulations import FREE, Job, Simulations, with_times
from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.lists import read_additions
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.planning.simulation.scenarios import RING_FUSED, Cluster, run_scenario, scenario_of

GPUS = 8
"""In a server."""
PROCESSORS = 96
"""In a server."""
MODELS = ("resnet50", "resnet101", "vgg16")
LOGS = {"resnet50": "resnet50-v100-bs32", "vgg16": "vgg16-v100-bs32"}
RATIOS = (1, 2, 3, 4, 5, 6, 7, 8, 10)
ENOUGH = 0.95


def profile_of(simulations: Simulations, model: str) -> Profile:
    """Return what a V100 computes at a batch of 32."""
    recorded = simulations.recorded(model, LOGS.get(model, ""))
    if recorded is not None:
        return recorded
    # There is no log of ResNet-101: as long as ResNet-50's, times its operations.
    source = "resnet50" if model == "resnet101" else model
    more = ARCHITECTURES[model]().operations / ARCHITECTURES[source]().operations
    batch_s = given(f"whatif_{source}_batch_s") * more
    backward_s = given(f"whatif_{source}_backward_s") * more
    return with_times(synthetic_profile(model), batch_s - backward_s, backward_s)


def scaling(
    simulations: Simulations,
    model: str,
    servers: int,
    rate_gbps: float,
    *,
    compression: float = 1.0,
    topology: str = "flat",
) -> float:
    """Return the scaling factor of `ring-fused`, in percent."""
    cluster = Cluster(
        workers=servers * GPUS,
        rate_bps=rate_gbps * 1e9,
        strategy=RING_FUSED,
        compression=compression,
        topology=topology,
        workers_per_node=GPUS,
        additions=_additions(simulations),
    )
    scenario = scenario_of(profile_of(simulations, model), cluster)
    return 100.0 * float(run_scenario(scenario)["report"]["scaling_factor"])


def _additions(simulations: Simulations) -> Sequence[tuple[float, float]]:
    folder = simulations.profile_dir
    path = Path(folder).parent / "vec_add_v100.csv" if folder else None
    return read_additions(path) if path is not None and path.is_file() else ()


def figure_1(simulations: Simulations) -> list[Ours]:
    """Measured scaling at 100 Gbit/s; ours is what the network allows."""
    rows = []
    for key, published in published_of("whatif:fig1").items():
        if key == "most":
            continue
        model, servers = key.rsplit("_", 1)
        assert published.value is not None
        at_rate = partial(scaling, simulations, model, int(servers))
        like = first_above(at_rate, published.value, 1.0, 100.0, rounds=12)
        why = (
            f"Ours is what a full network allows; theirs is that of {like:.0f} Gbit/s in full use: "
            "the transport loses the rest (their figure 4: 32 at most)."
        )
        rows.append(Ours(key, scaling(simulations, model, int(servers), 100), why))
    best = max(row.value for row in rows)
    return [*rows, Ours("most", best, "The same: the transport's loss, row by row above.")]


def _transport() -> Job:
    """Return gradlane's own transport, VGG-16 on eight servers at 100 Gbit/s."""
    cluster = Cluster(
        workers=GPUS * 8, rate_bps=1e11, strategy="wfbp", ranks_per_node=GPUS, local="leader"
    )
    return Job("vgg16", cluster, given("whatif_vgg16_batch_s"))


def figure_2(simulations: Simulations) -> list[Ours]:
    """Computation time of 64 workers over that of one, and the scaling that an increase allows."""
    report = simulations.run([_transport()])[0]
    alone_s = given("whatif_vgg16_batch_s")
    longest = given("whatif_longest_compute") / 100.0
    return [
        Ours(
            "longer",
            100.0 * (float(report["compute_s"]) / alone_s - 1.0),
            "the simulator's accelerator is not slowed down by communication: theirs runs NCCL's "
            "kernels beside backward, and Horovod's hooks",
        ),
        Ours(
            "bound",
            100.0 / (1.0 + longest),
            "by definition of scaling: one over one plus the largest increase, 15 %",
        ),
    ]


def figure_3(simulations: Simulations) -> list[Ours]:
    """Scaling of ResNet-50 against bandwidth, two servers, measured."""
    flat = "The paper's ring over all 16 GPUs as if each had a port of this rate for itself."
    nodes = "GPUs add up inside their server first; the rest at 10 Gbit/s is the transport's loss."
    found = []
    for rate in (1, 10):
        found.append(Ours(f"rate_{rate}", scaling(simulations, "resnet50", 2, rate), flat, "flat"))
        hierarchical = scaling(simulations, "resnet50", 2, rate, topology="hierarchical")
        found.append(Ours(f"rate_{rate}", hierarchical, nodes, "hierarchical", main=True))
    at = [scaling(simulations, "resnet50", 2, rate, topology="hierarchical") for rate in (25, 100)]
    why = "a full network is enough from 25 Gbit/s on, too: at a higher level than theirs"
    found.append(Ours("plateau", 100.0 * at[0] / at[1], why, "hierarchical"))
    return found


def figure_4(simulations: Simulations) -> list[Ours]:
    """Use of a port of 100 Gbit/s."""
    report = simulations.run(
        [
            Job(
                "vgg16",
                Cluster(workers=8, rate_bps=1e11, strategy="wfbp"),
                given("whatif_vgg16_batch_s"),
            )
        ]
    )[0]
    use = 100.0 * float(report["tx_utilization"])
    io = 100.0 * float(report["io_utilization"])
    return [
        Ours(
            "used",
            use,
            f"Another transport with the same trouble: gradlane's I/O thread, as measured on two "
            f"cores of a virtual machine, works {io:.0f} % of the time and is the limit.",
            "wfbp of gradlane, VGG-16, 8 ranks",
        )
    ]


def figure_5(simulations: Simulations) -> list[Ours]:
    """Use of 96 processors by gradlane's own transport, VGG-16 on eight servers."""
    report = simulations.run([_transport()])[0]
    busy = 100.0 * (float(report["io_utilization"]) + float(report["work_utilization"]))
    why = (
        "gradlane's I/O and work thread of the rank that speaks for a server, at 100 Gbit/s, of 96 "
        "processors; theirs counts loading and decoding images, Python and MPI of eight ranks"
    )
    return [Ours(key, busy / PROCESSORS, why) for key in ("least", "most")]


def figure_6(simulations: Simulations) -> list[Ours | Curve]:
    """Simulated scaling against bandwidth on eight servers, and what was measured."""
    why = "Full use of 100 Gbit/s is enough for these models at a batch of 32 on a V100."
    found: list[Ours | Curve] = [
        Ours(f"{model}_100", scaling(simulations, model, 8, 100), why) for model in MODELS
    ]
    rates = (1, 10, 25, 40, 100)
    curves = [
        Curve(
            f"{model}, 8 servers",
            "Gbit/s",
            "scaling, %",
            tuple((rate, scaling(simulations, model, 8, rate)) for rate in rates),
        )
        for model in MODELS
    ]
    return [*found, *curves]


def figure_7(simulations: Simulations) -> list[Ours]:
    """Simulated scaling against servers at 100 Gbit/s."""
    return [
        Ours(
            "all",
            scaling(simulations, model, servers, 100),
            "Full use of the network is enough.",
            f"{model}, {servers} servers",
        )
        for model in MODELS
        for servers in (2, 4, 8)
    ]


def figure_8(simulations: Simulations) -> list[Ours]:
    """Compression that is enough at 10 Gbit/s, eight servers."""
    found = []
    for model in MODELS:
        at = {ratio: scaling(simulations, model, 8, 10, compression=ratio) for ratio in RATIOS}
        enough = next((ratio for ratio, value in at.items() if value >= 100 * ENOUGH), None)
        found.append(
            Ours(
                f"{model}_enough",
                float(enough) if enough is not None else float("inf"),
                f"95 % scaling; at 5x {at[5]:.1f} %, at 10x {at[10]:.1f} %. "
                + (
                    "2x to 5x is right for the ResNets."
                    if model != "vgg16"
                    else "5x is not enough."
                ),
            )
        )
    twice = scaling(simulations, "resnet50", 8, 10, compression=2)
    found.append(Ours("resnet50_least", twice, "2x is not yet enough; 3x is"))
    found.append(
        Ours(
            "vgg16_10x", scaling(simulations, "vgg16", 8, 10, compression=10), "Near 100 % indeed."
        )
    )
    return found


def sizes(_: Simulations) -> list[Ours]:
    """Sizes of the models."""
    why = "in mebibytes, which the paper writes as MB"
    mebibytes = {model: ARCHITECTURES[model]().numel * 4 / 2**20 for model in MODELS}
    layer = max(one.numel for one in ARCHITECTURES["vgg16"]().parameters) * 4 / 2**20
    rows = [Ours(model, size, why) for model, size in mebibytes.items()]
    return [*rows, Ours("vgg16_layer", layer, f"{why}; rounded")]


def section_4(_: Simulations) -> list[Ours]:
    """Time for all parameters at 100 Gbit/s."""
    return [
        Ours(
            model,
            ARCHITECTURES[model]().numel * 4 * 8 / 1e11 * 1e3,
            "The paper divides mebibytes by decimal gigabits, which makes 5 % less.",
        )
        for model in MODELS
    ]


def open_question(simulations: Simulations) -> list[Ours | Curve]:
    """Section 4 asks what scheduling and servers bring where the network is fully used (R31)."""
    rates = (5, 10, 25, 40, 100)
    curves: list[Ours | Curve] = []
    for model in ("resnet50", "vgg16"):
        profile = profile_of(simulations, model)
        for strategy in ("wfbp", "p3"):
            points = []
            for rate in rates:
                cluster = Cluster(workers=8, rate_bps=rate * 1e9, strategy=strategy, costs=FREE)
                report = run_scenario(scenario_of(profile, cluster))["report"]
                points.append((float(rate), 100.0 * float(report["scaling_factor"])))
            name = f"{model}, 8 servers, {strategy}"
            curves.append(Curve(name, "Gbit/s", "scaling, %", tuple(points)))
        ring = tuple(
            (float(rate), scaling(simulations, model, 8, rate, topology="hierarchical"))
            for rate in rates
        )
        curves.append(Curve(f"{model}, 8 servers, fused ring", "Gbit/s", "scaling, %", ring))
    return curves


PAPERS_MODEL = "the paper's model"
"""Role of a figure whose formula and inputs are the paper's."""
SUBSTITUTES = "not the paper's inputs (profiles by operation counts, additions cost nothing)"


def inputs(simulations: Simulations) -> str:
    """Name the inputs of `ring-fused`, from those that `scaling` takes."""
    logs = [model for model, stem in LOGS.items() if simulations.recorded(model, stem) is not None]
    additions = bool(_additions(simulations))
    if len(logs) == len(LOGS) and additions:
        return (
            f"{PAPERS_MODEL}, from the authors' logs of ResNet-50 and VGG-16 and their additions; "
            "ResNet-101 has no log and takes ResNet-50's times by operations"
        )
    if not logs and not additions:
        return SUBSTITUTES
    others = [model for model in LOGS if model not in logs]
    profiles = [f"logs of {' and '.join(logs)}"] * bool(logs)
    profiles += [f"no log of {' and '.join(others)} in the folder"] * bool(others)
    cost = "measured" if additions else "cost nothing: no vec_add_v100.csv beside the folder"
    return f"not the paper's inputs ({'; '.join(profiles)}; additions {cost})"


_MODEL = "ring-fused"
FIGURES = (
    Figure("whatif:fig1", "scaling at 100 Gbit/s", _MODEL, figure_1, inputs=inputs),
    Figure(
        "whatif:fig2",
        "computation time against servers",
        "simulated, nodes of 8 ranks that add up first; and arithmetic",
        figure_2,
    ),
    Figure("whatif:fig3", "ResNet-50 against bandwidth", _MODEL, figure_3, inputs=inputs),
    Figure("whatif:fig4", "use of 100 Gbit/s", "simulated, the project's own host", figure_4),
    Figure(
        "whatif:fig5",
        "use of processors",
        "simulated, the project's own host, nodes of 8 ranks that add up first",
        figure_5,
    ),
    Figure("whatif:fig6", "simulated scaling against bandwidth", _MODEL, figure_6, inputs=inputs),
    Figure("whatif:fig7", "simulated scaling against servers", _MODEL, figure_7, inputs=inputs),
    Figure("whatif:fig8", "compression", _MODEL, figure_8, inputs=inputs),
    Figure("whatif:sizes", "sizes of the models", "counted", sizes),
    Figure("whatif:sec4", "time for all parameters", "counted", section_4),
    Figure(
        "whatif:open",
        "the open question: scheduling on a full network",
        "simulated, 8 nodes of 8 GPUs that add up locally first, free hosts",
        open_question,
    ),
)
