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

from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.lists import read_additions
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.planning.simulation.scenarios import RING_FUSED, Cluster, run_scenario, scenario_of
from gradlane_papers.reproduction.comparison import (
    Curve,
    Number,
    first_above,
    given,
    ours,
    published_of,
    reproduces,
)
from gradlane_papers.reproduction.simulations import FREE, Job, Simulations, with_times

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


@reproduces("whatif:fig1", inputs=inputs)
def figure_1(simulations: Simulations) -> list[Number]:
    """Measured scaling at 100 Gbit/s; ours is what the network allows."""
    rows = []
    for key, published in published_of("whatif:fig1").items():
        if key == "most":
            continue
        model, servers = key.rsplit("_", 1)
        assert published.value is not None
        at_rate = partial(scaling, simulations, model, int(servers))
        on_nodes = partial(at_rate, topology="hierarchical")
        like, nodes = (
            first_above(at, published.value, 1.0, 100.0, rounds=12) for at in (at_rate, on_nodes)
        )
        rows.append(ours(key, at_rate(100), like=like, nodes=nodes))
    return [*rows, ours("most", max(row.value for row in rows))]


def _transport() -> Job:
    """Return gradlane's own transport, VGG-16 on eight servers at 100 Gbit/s."""
    cluster = Cluster(
        workers=GPUS * 8, rate_bps=1e11, strategy="wfbp", ranks_per_node=GPUS, local="leader"
    )
    return Job("vgg16", cluster, given("whatif_vgg16_batch_s"))


@reproduces("whatif:fig2")
def figure_2(simulations: Simulations) -> list[Number]:
    """Computation time of 64 workers over that of one, and the scaling that an increase allows."""
    report = simulations.run([_transport()])[0]
    alone_s = given("whatif_vgg16_batch_s")
    longest = given("whatif_longest_compute") / 100.0
    return [
        ours("longer", 100.0 * (float(report["compute_s"]) / alone_s - 1.0)),
        ours("bound", 100.0 / (1.0 + longest)),
    ]


@reproduces("whatif:fig3", inputs=inputs)
def figure_3(simulations: Simulations) -> list[Number]:
    """Scaling of ResNet-50 against bandwidth, two servers, measured."""

    def at(rate: float, topology: str) -> float:
        return scaling(simulations, "resnet50", 2, rate, topology=topology)

    found = [
        ours(f"rate_{rate}", at(rate, topology), topology)
        for rate in (1, 10)
        for topology in ("flat", "hierarchical")
    ]
    plateau = 100.0 * at(25, "hierarchical") / at(100, "hierarchical")
    return [*found, ours("plateau", plateau)]


@reproduces("whatif:fig4")
def figure_4(simulations: Simulations) -> list[Number]:
    """Use of a port of 100 Gbit/s."""
    cluster = Cluster(workers=8, rate_bps=1e11, strategy="wfbp")
    report = simulations.run([Job("vgg16", cluster, given("whatif_vgg16_batch_s"))])[0]
    io = 100.0 * float(report["io_utilization"])
    return [ours("used", 100.0 * float(report["tx_utilization"]), io=io)]


@reproduces("whatif:fig5")
def figure_5(simulations: Simulations) -> list[Number]:
    """Use of 96 processors by gradlane's own transport, VGG-16 on eight servers."""
    report = simulations.run([_transport()])[0]
    busy = 100.0 * (float(report["io_utilization"]) + float(report["work_utilization"]))
    return [ours(key, busy / PROCESSORS) for key in ("least", "most")]


@reproduces("whatif:fig6", inputs=inputs)
def figure_6(simulations: Simulations) -> list[Number | Curve]:
    """Simulated scaling against bandwidth on eight servers, and what was measured."""
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
    found = [ours(f"{model}_100", scaling(simulations, model, 8, 100)) for model in MODELS]
    return [*found, *curves]


@reproduces("whatif:fig7", inputs=inputs)
def figure_7(simulations: Simulations) -> list[Number]:
    """Simulated scaling against servers at 100 Gbit/s."""
    return [
        ours("all", scaling(simulations, model, servers, 100), model=model, servers=servers)
        for model in MODELS
        for servers in (2, 4, 8)
    ]


@reproduces("whatif:fig8", inputs=inputs)
def figure_8(simulations: Simulations) -> list[Number]:
    """Compression that is enough at 10 Gbit/s, eight servers."""
    found = []
    for model in MODELS:
        at = {ratio: scaling(simulations, model, 8, 10, compression=ratio) for ratio in RATIOS}
        enough = (float(ratio) for ratio, value in at.items() if value >= 100 * ENOUGH)
        found.append(ours(f"{model}_enough", next(enough, float("inf")), five=at[5], ten=at[10]))
    twice = scaling(simulations, "resnet50", 8, 10, compression=2)
    tenth = scaling(simulations, "vgg16", 8, 10, compression=10)
    return [*found, ours("resnet50_least", twice), ours("vgg16_10x", tenth)]


@reproduces("whatif:sizes")
def sizes(_: Simulations) -> list[Number]:
    """Sizes of the models."""
    layer = max(one.numel for one in ARCHITECTURES["vgg16"]().parameters) * 4 / 2**20
    rows = [ours(model, ARCHITECTURES[model]().numel * 4 / 2**20) for model in MODELS]
    return [*rows, ours("vgg16_layer", layer)]


@reproduces("whatif:sec4")
def section_4(_: Simulations) -> list[Number]:
    """Time for all parameters at 100 Gbit/s."""
    return [ours(model, ARCHITECTURES[model]().numel * 4 * 8 / 1e11 * 1e3) for model in MODELS]


@reproduces("whatif:open")
def open_question(simulations: Simulations) -> list[Curve]:
    """Section 4 asks what scheduling and servers bring where the network is fully used (R31)."""
    rates = (5, 10, 25, 40, 100)
    curves = []
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
