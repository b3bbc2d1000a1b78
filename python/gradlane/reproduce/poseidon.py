"""The figures of Poseidon (Zhang et al., USENIX ATC 2017), by bytes.

The model is `gradlane.planner.hybrid`: ports that carry table 1's bytes, first come first served,
and nothing else that takes time. It is given twice: with ports that are fully used, and with the
share of 40 Gbit/s that makes *one* published number right (VGG19-22K by WFBP on 32 nodes, 21.5x),
as what their transport reached. All other rows with that share are predictions.
"""

from __future__ import annotations

from functools import cache

from gradlane.planner.coordinator import Coordinator
from gradlane.planner.hybrid import WHOLE, HybridStep, Node, hybrid_step
from gradlane.planner.schemes import SCHEMES, Counts
from gradlane.planner.settings import ClusterFacts
from gradlane.reproduce.comparison import Curve, Figure, Ours, given, published_of
from gradlane.reproduce.simulations import Simulations
from gradlane.whatif.grid import GOODPUT_SHARE
from gradlane.whatif.profiles import Profile, synthetic_profile

BATCHES = {"googlenet": 128, "inception_v3": 32, "vgg19": 32, "vgg19_22k": 32, "resnet152": 32}
SCHEDULES = {
    # What each system does: schemes by a rule, and when it begins to send.
    "ps": ("ps", "after"),
    "wfbp": ("ps", "ready"),
    "poseidon": ("poseidon", "ready"),
    "adam": ("adam", "ready"),
    "tf": ("whole", "ready"),
}


def seconds(model: str, engine: str) -> float:
    """Return the batch time on one Titan X."""
    batch = BATCHES[model]
    if model == "resnet152":
        # Not in the paper: as fast an accelerator as for Inception-V3, by operations.
        known = synthetic_profile("inception_v3")
        asked = synthetic_profile("resnet152")
        assert known.flops is not None and asked.flops is not None
        return seconds("inception_v3", engine) * asked.flops / known.flops
    return float(batch / given(f"poseidon_{model}_{engine}"))


@cache
def _profile(model: str, engine: str) -> Profile:
    return synthetic_profile(model, seconds(model, engine))


@cache
def step(
    model: str, engine: str, nodes: int, rate_gbps: float, system: str, share: float
) -> HybridStep:
    """Return a step of a system.

    Args:
        model: one of `BATCHES`.
        engine: `caffe` or `tf`, whose single node decides the batch time.
        nodes: each with one accelerator, worker and server.
        rate_gbps: of every port.
        system: one of `SCHEDULES`.
        share: of the port's goodput that the transport uses.
    """
    profile = _profile(model, engine)
    book = Coordinator(profile, ClusterFacts(nodes, rate_gbps * 1e9), rule="poseidon")
    layers = [book.query(name) for name in book.query("layers")]
    rule, order = SCHEDULES[system]
    schemes = {}
    for layer in layers:
        scheme = rule
        if rule == "poseidon":
            scheme = book.best_scheme(layer.name).scheme
        elif rule == "adam":
            scheme = "adam" if layer.matrix else "ps"
        elif rule == "whole":
            scheme = WHOLE
        schemes[layer.name] = scheme
    assert profile.flops is not None
    return hybrid_step(
        layers,
        schemes,
        Node(nodes, rate_gbps * 1e9 * GOODPUT_SHARE * share, 3 * profile.flops / profile.compute_s),
        batch_rows=profile.batch_size,
        compute_s=profile.compute_s,
        order=order,
    )


def speedup(
    model: str, engine: str, nodes: int, rate_gbps: float, system: str, share: float = 1.0
) -> float:
    """Return throughput over that of one node."""
    made = step(model, engine, nodes, rate_gbps, system, share)
    return nodes * _profile(model, engine).compute_s / made.step_s


@cache
def fitted_share() -> float:
    """Return the share of 40 Gbit/s with which WFBP gives the published 21.5x."""
    wanted = published_of("poseidon:fig5")["vgg19_22k_wfbp"].value
    assert wanted is not None
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2.0
        if speedup("vgg19_22k", "caffe", 32, 40, "wfbp", middle) < wanted:
            low = middle
        else:
            high = middle
    return high


def _both(
    key: str, model: str, engine: str, nodes: int, rate_gbps: float, system: str, why: str
) -> list[Ours]:
    share = fitted_share()
    full = step(model, engine, nodes, rate_gbps, system, 1.0)
    limit = "What full ports and free hosts allow at most."
    if system == "tf":
        limit = "Servers take whole layers in turn; where theirs put them is not known."
    elif full.rebuild_s > 0.01 * full.step_s:
        limit = (
            "The port does not decide. Rebuilding the others' gradients is taken to be as fast as "
            "the step's own arithmetic, and is all that is missing to linear."
        )
    return [
        Ours(key, speedup(model, engine, nodes, rate_gbps, system), limit, "full ports"),
        Ours(
            key,
            speedup(model, engine, nodes, rate_gbps, system, share),
            why,
            f"{100 * share:.0f} % of the port",
        ),
    ]


def figure_5(simulations: Simulations) -> list[Ours | Curve]:
    """Caffe at 40 GbE, 32 nodes."""
    del simulations
    near = "As published: near linear."
    rows: list[Ours | Curve] = [
        *_both("googlenet_wfbp", "googlenet", "caffe", 32, 40, "wfbp", near),
        *_both(
            "vgg19_wfbp",
            "vgg19",
            "caffe",
            32,
            40,
            "wfbp",
            "29.8 of 32 may be called near linear.",
        ),
        *_both(
            "vgg19_22k_wfbp", "vgg19_22k", "caffe", 32, 40, "wfbp", "The number that was fitted."
        ),
        *_both(
            "vgg19_22k_poseidon",
            "vgg19_22k",
            "caffe",
            32,
            40,
            "poseidon",
            "The same: factors are so few bytes that a third of the port is enough.",
        ),
    ]
    rows += _curves(("googlenet", "vgg19", "vgg19_22k"), "caffe")
    rows += _sequential()
    return rows


def _sequential() -> list[Curve]:
    """Caffe+PS: nothing overlaps, and one node is as slow as the paper says."""
    curves = []
    for model in ("googlenet", "vgg19", "vgg19_22k"):
        slow_s = BATCHES[model] / given(f"poseidon_{model}_ps")
        alone_s = seconds(model, "caffe")
        points = []
        for nodes in (1, 2, 4, 8, 16, 32):
            made = step(model, "caffe", nodes, 40, "ps", fitted_share())
            step_s = slow_s + made.step_s - alone_s
            points.append((float(nodes), nodes * alone_s / step_s))
        name = f"{model} by Caffe+PS, 40 GbE, fitted share"
        curves.append(Curve(name, "nodes", "speed-up", tuple(points)))
    return curves


def _curves(models: tuple[str, ...], engine: str, rate_gbps: float = 40) -> list[Curve]:
    """The lines of a picture: both systems on every number of nodes."""
    return [
        Curve(
            f"{model} by {system}, {rate_gbps} GbE, {text}",
            "nodes",
            "speed-up",
            tuple(
                (nodes, speedup(model, engine, nodes, rate_gbps, system, share))
                for nodes in (1, 2, 4, 8, 16, 32)
            ),
        )
        for model in models
        for system in ("wfbp", "poseidon")
        for share, text in ((1.0, "full ports"), (fitted_share(), "fitted share"))
    ]


def figure_6(simulations: Simulations) -> list[Ours | Curve]:
    """TensorFlow at 40 GbE, 32 nodes."""
    del simulations
    whole = (
        "Whole layers on one server each, which the fitted share makes too slow: TensorFlow's own "
        "transport is another one."
    )
    rows: list[Ours | Curve] = [
        *_both(
            "inception_v3_poseidon",
            "inception_v3",
            "tf",
            32,
            40,
            "poseidon",
            "Near linear with either.",
        ),
        *_both("inception_v3_tf", "inception_v3", "tf", 32, 40, "tf", whole),
        *_both(
            "vgg19_22k_wfbp",
            "vgg19_22k",
            "tf",
            32,
            40,
            "wfbp",
            "A prediction: the share was fitted to Caffe's number.",
        ),
        *_both(
            "vgg19_22k_poseidon",
            "vgg19_22k",
            "tf",
            32,
            40,
            "poseidon",
            "The same with a third of the port.",
        ),
    ]
    return [*rows, *_curves(("inception_v3", "vgg19", "vgg19_22k"), "tf")]


def figure_7(simulations: Simulations) -> list[Ours]:
    """Stall of the accelerator on eight nodes at 40 GbE."""
    del simulations
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
    del simulations
    lower = (
        "The published number lies between: their transport used more of a port of 10 Gbit/s than "
        "of one of 40."
    )
    free = "The same with a third of the port: factors leave room in it."
    rows: list[Ours | Curve] = [
        *_both("vgg19_ps", "vgg19", "caffe", 16, 10, "wfbp", lower),
        *_both("vgg19_22k_ps", "vgg19_22k", "caffe", 16, 10, "wfbp", lower),
        *_both("vgg19_22k_poseidon", "vgg19_22k", "caffe", 16, 10, "poseidon", free),
        *_both(
            "vgg19_ps_30",
            "vgg19",
            "caffe",
            16,
            30,
            "wfbp",
            "The paper: servers would need 30 GbE or more for what factors do at 10.",
        ),
    ]
    for rate in (2, 5):
        rows += _curves(("googlenet",), "caffe", rate)
    for rate in (5, 10, 20):
        rows += _curves(("vgg19", "vgg19_22k"), "caffe", rate)
    return rows


def figure_9(simulations: Simulations) -> list[Ours]:
    """ResNet-152 on 32 nodes, its throughput."""
    del simulations
    why = "ResNet-152's single-node speed is not in the paper; it is Inception-V3's, by operations."
    return _both("throughput", "resnet152", "tf", 32, 40, "poseidon", why)


def figure_10(simulations: Simulations) -> list[Ours]:
    """Traffic of each node, VGG-19 on eight nodes."""
    del simulations
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
    rows += _both(
        "adam_speedup",
        "vgg19",
        "tf",
        8,
        40,
        "adam",
        "The server of the largest layer sends 2.9 GB a step.",
    )
    return rows


def table_1(simulations: Simulations) -> list[Ours]:
    """The worked example: 4096 x 4096, K = 32, eight workers and servers."""
    del simulations
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


def table_3(simulations: Simulations) -> list[Ours]:
    """Parameters of the networks."""
    del simulations
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


def section_2(simulations: Simulations) -> list[Ours]:
    """What AlexNet would need on eight nodes."""
    del simulations
    profile = synthetic_profile("alexnet")
    sends = 7 / 8 * profile.size_bytes / profile.compute_s * 8 / 1e9
    why = (
        "The paper's 840 million are bytes (240 million gradients x 7/8 x 4), which it takes for "
        "floats: its own numbers make 6.7 Gbit/s. As a server a node sends as much again."
    )
    return [Ours("alexnet_rate", sends, why)]


_BYTES = "the model of bytes (`gradlane.planner.hybrid`), Titan X batch times of section 5.1"
FIGURES = (
    Figure("poseidon:sec2", "what AlexNet asks of a network", "counted", section_2),
    Figure("poseidon:table1", "numbers that each scheme moves", "counted", table_1),
    Figure("poseidon:table3", "the networks", "counted", table_3),
    Figure("poseidon:fig5", "scaling with Caffe at 40 GbE", _BYTES, figure_5),
    Figure("poseidon:fig6", "scaling with TensorFlow at 40 GbE", _BYTES, figure_6),
    Figure("poseidon:fig7", "busy and stalled accelerators", _BYTES, figure_7),
    Figure("poseidon:fig8", "scaling with Caffe at lower bandwidth", _BYTES, figure_8),
    Figure("poseidon:fig9", "ResNet-152: throughput", _BYTES, figure_9),
    Figure("poseidon:fig10", "traffic of each node", _BYTES, figure_10),
    Figure(
        "poseidon:fig11",
        "convergence with 1-bit gradients",
        needs="training runs on CIFAR-10. Small networks instead: `gradlane lab accuracy --scheme "
        "onebit`",
    ),
)
