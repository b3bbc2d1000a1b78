"""The figures of P3 (Jayarajan et al., SysML 2019): four machines, KVStore beside P3."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gradlane.planning.models import ARCHITECTURES
from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile, ProfileTensor, synthetic_profile
from gradlane.planning.simulation.scenarios import FREE_HOST, Cluster, run_scenario, scenario_of
from gradlane_papers.reproduction import kvstore_model
from gradlane_papers.reproduction.comparison import Curve, Number, ours, reproduces
from gradlane_papers.reproduction.simulations import (
    FREE,
    MEASURED,
    SLOW_SERVER,
    Job,
    Simulations,
    drawn_step_s,
    gains,
    with_times,
)

RATES_GBPS = {
    "resnet50": (2, 3, 4, 5, 6, 7, 8, 10),
    "inception_v3": (1, 1.5, 2, 2.5, 3, 4, 5),
    "vgg19": (8, 10, 15, 20, 30),
    "sockeye": (1, 2, 3, 4, 6, 8),
}
"""Where figure 7's curves bend, for the batch times of `ARCHITECTURES`."""
UNIT_S = 0.1
"""A unit of time in figures 4 and 6."""
SLICES = (1_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
IDLE_SHARE = 0.05
"""A port idles in an interval in which it uses less than this."""
SLOW_MESSAGES = MachineCosts(
    host={"send_frame_s": 38e-6, "receive_frame_s": 38e-6, "work_s": 540e-6}
)
"""A host whose messages and sums cost ten times what the project's own takes for each."""
FORWARD_SHARES = (1 / 3, 0.25, 0.2)
"""Forward's part of a step: by operation counts, and shorter."""


def _four(rate_gbps: float, **changes: Any) -> Cluster:
    settings: dict[str, Any] = {"costs": FREE, **changes}
    return Cluster(workers=4, rate_bps=rate_gbps * 1e9, **settings)


def example(sizes: Sequence[int], **changes: Any) -> Profile:
    """Return a profile of layers whose forward and backward take one unit each."""
    count = len(sizes)
    tensors = tuple(
        ProfileTensor(
            f"layer{index + 1}.weight",
            (size,),
            "f32",
            changes.get("need_s", index * UNIT_S),
            (changes.get("ready_units", 2 * count) - index) * UNIT_S,
        )
        for index, size in enumerate(sizes)
    )
    forward_s = changes.get("forward_s", count * UNIT_S)
    return Profile("example", 1, forward_s, forward_s + count * UNIT_S, tensors)


def _example_scenario(profile: Profile, rate_bps: float) -> dict[str, Any]:
    return {
        "model": "cluster",
        "profile": profile.to_scenario(),
        "workers": 2,
        "strategy": "slicing",
        "network": {
            "rate_bps": rate_bps,
            "goodput_share": 1.0,
            "send_buffer_bytes": 20_000,
            "share_spread": 0.0,
        },
        "costs": dict(FREE_HOST),
        "frame_bytes": 10_000,
        "steps": 3,
    }


@reproduces("p3:fig4")
def figure_4(_: Simulations) -> list[Number]:
    """Three layers: forward and backward take one unit, synchronization two."""
    elements = 2_500_000
    delays = {}
    for strategy in ("slicing", "p3"):
        scenario = _example_scenario(example([elements] * 3), elements * 32 / (2 * UNIT_S))
        scenario |= {"strategy": strategy, "slice_elems": 2_500}
        report = run_scenario(scenario)["report"]
        delays[strategy] = (report["step_s"] - report["compute_s"]) / UNIT_S
    return [
        ours("delay_fifo", delays["slicing"]),
        ours("delay_p3", delays["p3"]),
        ours("saved", 100.0 * (1.0 - delays["p3"] / delays["slicing"])),
    ]


@reproduces("p3:fig6")
def figure_6(_: Simulations) -> list[Number]:
    """Simulate three layers; the middle one takes three times as long on the network."""
    from gradlane import _core

    unit = 250_000
    profile = example([unit, 3 * unit, unit], forward_s=0.0, need_s=0.0, ready_units=3)
    rows = [
        {"name": one.name, "numel": one.numel, "dtype": "f32", "role": "parameter"}
        for one in profile.tensors
    ]
    times = []
    for elements in (3 * unit, unit):
        plan = json.loads(_core.plan_json(json.dumps(rows), "slicing", elements, 0, "worker", 2))
        for piece in plan["slices"]:
            piece["owner"] = 1
        scenario = _example_scenario(profile, unit * 32 / UNIT_S)
        scenario |= {"strategy": plan["strategy"], "plan": plan}
        scenario |= {"work_depth": 4, "work_threads": 4}
        # Two contributions of a unit are added up in one unit of time.
        scenario["costs"]["reduce_byte_s"] = UNIT_S / (2 * unit * 4)
        times.append(run_scenario(scenario)["report"]["step_s"] / UNIT_S - 1.0)
    whole, sliced = times
    saved = 100.0 * (1.0 - sliced / whole)
    return [ours("whole", whole), ours("sliced", sliced), ours("saved", saved)]


@reproduces("p3:fig5")
def figure_5(_: Simulations) -> list[Number]:
    """Count how parameters are spread over layers."""
    network = ARCHITECTURES["vgg19"]()
    heaviest = max(sum(p.numel for p in layer.parameters) for layer in network.layers)
    return [ours("vgg19_heaviest", 100.0 * heaviest / network.numel)]


@reproduces("p3:fig7")
def figure_7(simulations: Simulations) -> list[Number | Curve]:
    """Throughput against bandwidth."""
    found: dict[str, dict[float, dict[str, float]]] = {
        model: {
            rate: gains(simulations, model, _four(rate), strategies=("slicing", "p3"))
            for rate in rates
        }
        for model, rates in RATES_GBPS.items()
    }
    best = {model: _best(rows) for model, rows in found.items()}
    resnet50 = found["resnet50"][4]
    slow = {
        (model, rate): gains(
            simulations, model, _four(rate, costs=SLOW_SERVER), strategies=("slicing", "p3")
        )
        for model, rates in {"vgg19": (15, 30), "sockeye": RATES_GBPS["sockeye"]}.items()
        for rate in rates
    }
    sockeye = {rate: rows for (model, rate), rows in slow.items() if model == "sockeye"}
    drops = {
        strategy: _drops_below(simulations, strategy, RATES_GBPS["resnet50"])
        for strategy in ("kvstore", "p3")
    }
    slicing = [
        found[model][rate]["slicing"]
        for model in ("resnet50", "inception_v3")
        for rate in RATES_GBPS[model]
    ]
    curves = [
        Curve(
            f"{model}: {strategy} over baseline",
            "Gbit/s",
            "%",
            tuple((rate, rows[rate][strategy]) for rate in rows),
        )
        for model, rows in found.items()
        for strategy in ("slicing", "p3")
    ]
    even = 100.0 * ((100.0 + resnet50["p3"]) / (100.0 + resnet50["slicing"]) - 1.0)
    (inception_rate, inception_gain), (sockeye_rate, sockeye_gain) = (
        best[model] for model in ("inception_v3", "sockeye")
    )
    slow_rate, slow_gain = _best(sockeye)
    return [
        *curves,
        ours("resnet50_gain", resnet50["p3"], even=even),
        ours("resnet50_abstract", best["resnet50"][1], rate=best["resnet50"][0]),
        ours("resnet50_baseline_drop", drops["kvstore"]),
        ours("resnet50_p3_drop", drops["p3"]),
        ours("small_layers_slicing", max(slicing, key=abs)),
        ours(
            *("inception_gain", inception_gain),
            rate=inception_rate,
            over_even=_over_even_inception(inception_rate),
        ),
        ours("vgg19_slicing", found["vgg19"][30]["slicing"]),
        ours("vgg19_slicing", slow["vgg19", 30]["slicing"], "slow"),
        ours(
            *("vgg19_slicing", _copied(30)["slicing"], "copies"),
            without_gpu=_copied(30, copy_byte_s=0.0)["slicing"],
            without_any=_copied(30, copy_byte_s=0.0, reply_byte_s=0.0, message_s=0.0)["slicing"],
        ),
        ours("vgg19_gain", found["vgg19"][15]["p3"]),
        ours("vgg19_gain", slow["vgg19", 15]["p3"], "slow", **_tried_for_copies()),
        ours("sockeye_gain", sockeye_gain, rate=sockeye_rate),
        ours(
            *("sockeye_gain", slow_gain, "slow"),
            rate=slow_rate,
            faster=_faster_sockeye(simulations),
        ),
    ]


def _copied(rate_gbps: float, **changes: Any) -> dict[str, float]:
    """Return what VGG-19 gains over a baseline whose copies take time, in percent."""
    profile = synthetic_profile("vgg19", changes.pop("batch_time_s", None))
    machine = replace(kvstore_model.Machine.fitted(), **changes)
    return kvstore_model.gains(profile, rate_gbps * 1e9, machine)


def _tried_for_copies() -> dict[str, Any]:
    """Return what P3 gains at 15 Gbit/s over copies, and with what was tried to bring it to 66 %.

    Copies of whole tensors by P3, too; sums that take longer; other batch times.
    """
    both = (kvstore_model.TO_HOST, kvstore_model.TO_DEVICE)
    whole = [_copied(15, copies_whole=frozenset(ways))["p3"] for ways in (both[:1], both[1:], both)]
    sums = [
        f"{_copied(15, sum_byte_s=s)['p3']:.0f} and {_copied(30, sum_byte_s=s)['slicing']:.0f} %"
        for s in (1.5e-9, 2e-9)
    ]
    batches = [
        f"{_copied(15, batch_time_s=times * ARCHITECTURES['vgg19']().batch_time_s)['p3']:.0f}"
        for times in (0.75, 1.5)
    ]
    return {
        **_copied(15),
        **dict(zip(("to_host", "to_device", "both"), whole, strict=True)),
        "sums": " or ".join(sums),
        "batches": " or ".join(batches),
    }


def _faster_sockeye(simulations: Simulations) -> str:
    """Say what Sockeye gains at 12 Gbit/s with shorter batch times."""
    cluster = _four(12, costs=SLOW_SERVER)
    batch_s = ARCHITECTURES["sockeye"]().batch_time_s
    found = []
    for times in (2, 4):
        gain = gains(simulations, "sockeye", cluster, batch_time_s=batch_s / times)["p3"]
        found.append(f"{gain:.0f} % at 12 Gbit/s with one {times} times shorter")
    return ", ".join(found)


def _over_even_inception(rate_gbps: float) -> str:
    """Say what Inception-V3 gains over even servers, by forward's share of a step."""
    profile = synthetic_profile("inception_v3")
    over_even = []
    for share in FORWARD_SHARES:
        forward_s = share * profile.compute_s
        shorter = with_times(profile, forward_s, profile.compute_s - forward_s)
        even_s, p3_s = (
            float(run_scenario(scenario_of(shorter, cluster))["report"]["step_s"])
            for cluster in (
                replace(_four(rate_gbps), strategy=strategy) for strategy in ("slicing", "p3")
            )
        )
        over_even.append(f"{100.0 * (even_s / p3_s - 1.0):.0f} % at {share:.2f}")
    return ", ".join(over_even)


def _best(rows: dict[float, dict[str, float]]) -> tuple[float, float]:
    rate = max(rows, key=lambda one: rows[one]["p3"])
    return rate, rows[rate]["p3"]


def _drops_below(simulations: Simulations, strategy: str, rates: Iterable[float]) -> float:
    """Return the lowest rate at which throughput is within 2 % of that at the highest one."""
    rates = sorted(rates)
    steps = [
        drawn_step_s(simulations, "resnet50", replace(_four(rate), strategy=strategy))
        for rate in rates
    ]
    enough = [rate for rate, step_s in zip(rates, steps, strict=True) if steps[-1] / step_s > 0.98]
    return float(enough[0])


_IDLE: dict[str, tuple[str, dict[str, float]]] = {
    "p3:fig8": ("kvstore", {"resnet50": 4, "vgg19": 15, "sockeye": 4}),
    "p3:fig9": ("p3", {"resnet50": 4, "vgg19": 15, "sockeye": 4}),
    "p3:fig13": ("deferred-pull", {"resnet50": 4}),
    "p3:fig14": ("wfbp", {"inception_v3": 1}),
}
"""By the figure: the strategy, and the rate of ports of each model in Gbit/s."""


def _idle(strategy: str, rates_gbps: dict[str, float], simulations: Simulations) -> list[Number]:
    """Return how ports are used: the share of intervals of 10 ms in which they hardly send.

    Counted is the middle of several steps.
    """
    reports = simulations.run(
        Job(model, replace(_four(rate), strategy=strategy, steps=4), interval_s=0.01)
        for model, rate in rates_gbps.items()
    )
    found = []
    for model, report in zip(rates_gbps, reports, strict=True):
        use = report["utilization"]["tx"]
        steady = use[len(use) // 4 : 3 * len(use) // 4]
        idle = 100.0 * sum(share < IDLE_SHARE for share in steady) / len(steady)
        found.append(ours(model, idle, used=100.0 * sum(steady) / len(steady)))
    return found


for _name, _setting in _IDLE.items():
    reproduces(_name)(partial(_idle, *_setting))


@reproduces("p3:fig10")
def figure_10(simulations: Simulations) -> list[Number | Curve]:
    """Scaling over 2 to 16 machines at 10 Gbit/s."""

    def gain(model: str, workers: int = 8, costs: MachineCosts = FREE) -> float:
        cluster = replace(_four(10, costs=costs), workers=workers)
        return gains(simulations, model, cluster)["p3"]

    models = ("vgg19", "sockeye", "resnet50")
    return [
        *(ours(model, gain(model)) for model in models),
        *(ours(model, gain(model, costs=SLOW_SERVER), "slow") for model in models[:2]),
        *(
            Curve(
                *(f"{model}: P3 over baseline", "machines", "%"),
                tuple((float(workers), gain(model, workers)) for workers in (2, 4, 8, 16)),
            )
            for model in models
        ),
    ]


@reproduces("p3:fig12")
def figure_12(simulations: Simulations) -> list[Number]:
    """Throughput against the size of slices, with hosts that take time."""

    def over_usual(model: str, rate: float, costs: MachineCosts) -> dict[int, float]:
        base = replace(_four(rate, costs=costs), strategy="p3")
        steps = simulations.steps_s(Job(model, replace(base, slice_elems=one)) for one in SLICES)
        usual_s = steps[SLICES.index(50_000)]
        return {
            one: 100.0 * (usual_s / step_s - 1.0) for one, step_s in zip(SLICES, steps, strict=True)
        }

    found = []
    for model, rate in (("resnet50", 4), ("vgg19", 10), ("sockeye", 4)):
        over = over_usual(model, rate, MEASURED)
        dearer = over_usual(model, rate, SLOW_MESSAGES)
        best = max(SLICES, key=lambda one: over[one])
        near = [one for one in SLICES if over[one] > over[best] - 1.5]
        found.append(
            ours(
                *(f"{model}_best", float(best)),
                rate=rate,
                small=over[1_000],
                large=over[1_000_000],
                best=over[best],
                first=near[0],
                last=near[-1],
                dearer=max(SLICES, key=lambda one: dearer[one]),
            )
        )
    return found
