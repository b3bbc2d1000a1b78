"""The figures of low-precision communication (Grubic et al., EDBT 2018).

Every legible cell of figures 10 and 11, and what follows from the same model of the exchange
(`lowprec_model`): speed-ups (6, 7), the DGX-1 (8, 9, 14, 15), scalability (12, 13), and price and
size of models (16).
"""

from __future__ import annotations

from functools import partial

from gradlane.planning.models import ARCHITECTURES
from gradlane_papers.reproduction.comparison import (
    Curve,
    Number,
    Reproduce,
    Speed,
    first_above,
    ours,
    published_of,
    published_tables,
    reproduces,
    speeds,
)
from gradlane_papers.reproduction.lowprec_model import (
    FITTED,
    KERNELS,
    TABLES,
    Errors,
    alone_s,
    batch_of,
    cells,
    constants,
    encoded,
    errors,
    is_share_measured,
    one_gpu,
    parts_s,
    samples_per_s,
    share_of,
    share_s,
    step_s,
    units,
)
from gradlane_papers.reproduction.simulations import Simulations

NEAR = 10.0
"""Percent up to which a cell needs no other reason than the model."""
IMAGENET = 1_300_000
"""Training samples (figure 1)."""
DGX_SPEED = 1.4
"""A GPU of the DGX-1 over one of EC2 (section 5.2: about 40 % faster)."""
NVLINK = 20e9
"""Bytes a second and way of a link of the DGX-1's first GPUs (NVLink 1)."""
IMAGES = ("alexnet", "bn_inception", "resnet50", "resnet152", "vgg19")


def _deviation(primitive: str, cell: Speed) -> float:
    made = samples_per_s(primitive, cell.network, cell.encoding, cell.gpus)
    return 100.0 * (made / cell.value - 1.0)


def _composition(primitive: str, network: str, encoding: str, gpus: int) -> str:
    """Return what a step consists of, by the model."""
    whole_s = step_s(primitive, network, encoding, gpus)
    shares = {"compute": share_s(primitive, network, gpus) / whole_s}
    parts = parts_s(primitive, network, encoding, gpus)
    shares |= {name: seconds / whole_s for name, seconds in parts.items()}
    ordered = sorted(shares.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in ordered if share >= 0.02)


def why_of(primitive: str, cell: Speed) -> str:
    """Return why a held-out cell is near the model or not, by what the model and the table say."""
    network, encoding, gpus = cell.network, cell.encoding, cell.gpus
    deviation = _deviation(primitive, cell)
    reasons = [] if abs(deviation) <= NEAR else _reasons(primitive, cell, deviation)
    return "; ".join([_composition(primitive, network, encoding, gpus), *reasons])


def _reasons(primitive: str, cell: Speed, deviation: float) -> list[str]:
    network, encoding, gpus = cell.network, cell.encoding, cell.gpus
    table = cells(primitive)
    reasons = []
    if not is_share_measured(primitive, network, gpus):
        reasons.append(
            f"no cell gives the time of a share of {share_of(network, gpus):g} samples, and small "
            "shares have speeds of their own (section 5.2)"
        )
    quiet = table.get((network, "2bit", gpus))
    if quiet is not None and encoding != "2bit":
        off = _deviation(primitive, quiet)
        if off / deviation > 0.5:
            reasons.append(f"{off:+.0f} % with 2 bits: not the bytes, in which encodings differ")
    by_mpi = cells("mpi").get((network, encoding, gpus))
    if primitive == "nccl" and by_mpi is not None and by_mpi.value > cell.value:
        reasons.append(
            f"their slower primitive, MPI, has {by_mpi.value:g} in the same cell of figure 10"
        )
    gap_s = batch_of(network, gpus) / cell.value - step_s(primitive, network, encoding, gpus)
    if encoding == "1bit" and gap_s > 0.0:
        more_s = gap_s / units(network, encoding, gpus)["messages"]
        reasons.append(
            f"CNTK quantizes columns in all {encoded(network, encoding).tensors} tensors: "
            f"{1e6 * more_s:.0f} µs more a message would be enough"
        )
    if encoding == "1bit_reshaped" and gap_s > 0.0:
        seconds = parts_s(primitive, network, encoding, gpus)
        times = 1.0 + gap_s / (seconds["averages"] + seconds["scales"])
        reasons.append(f"kernels of buckets of 64 would have to take {times:.1f} times as long")
    linear = gpus * one_gpu(network)
    if cell.value > linear and share_of(network, gpus) == batch_of(network, 1):
        reasons.append(f"more than {gpus} times one GPU's, {linear:g}, at the same share")
    if not reasons:
        row = {
            one.gpus: _deviation(primitive, one)
            for one in table.values()
            if (one.network, one.encoding) == (network, encoding) and one.gpus != gpus
        }
        others = ", ".join(f"{off:+.0f} % with {known}" for known, off in row.items())
        reasons.append(
            f"no part of the model explains it; the other cells of its row: {others} GPUs"
        )
    return reasons


def _table(primitive: str, _: Simulations) -> list[Number]:
    """Return ours of every legible cell of a table."""
    found = []
    for cell in speeds(TABLES[primitive]):
        value = samples_per_s(primitive, cell.network, cell.encoding, cell.gpus)
        if cell.gpus == 1:
            found.append(ours(cell.key, value, "input"))
        elif cell.network == FITTED:
            found.append(ours(cell.key, value, "fitted"))
        else:
            found.append(ours(cell.key, value, reasons=why_of(primitive, cell)))
    return found


def held_out() -> tuple[str, ...]:
    """Return the networks to which nothing was fitted."""
    return tuple(name for name in published_tables()["networks"] if name != FITTED)


def fit_quality(primitive: str) -> list[tuple[str, Errors]]:
    """Return the model's errors: on the fitted network, held out, and with parts switched off."""
    others = held_out()
    rows = [
        ("fitted: ResNet-152", errors(primitive, (FITTED,))),
        ("held out: all other networks", errors(primitive, others)),
    ]
    for part in (*constants(primitive), "shares"):
        text = f"held out, without {part}"
        rows.append((text, errors(primitive, others, without=(part,))))
    rows.append(
        (
            "held out, bytes alone",
            errors(primitive, others, without=("messages", "scales", "averages", "shares")),
        )
    )
    return rows


@reproduces("lowprec:fig3")
def figure_3(_: Simulations) -> list[Number]:
    """Parameters of the networks."""
    return [ours(name, ARCHITECTURES[name]().numel / 1e6) for name in published_of("lowprec:fig3")]


def _gain(primitive: str, network: str, encoding: str, gpus: int, over: str = "32bit") -> float:
    """Return the throughput of an encoding over that of another one."""
    own_s = step_s(primitive, network, encoding, gpus)
    return step_s(primitive, network, over, gpus) / own_s


def _communication(network: str, encoding: str, gpus: int) -> float:
    """Return the time of the exchange without kernels, which the paper counts as computation."""
    parts = parts_s("mpi", network, encoding, gpus)
    return parts["link"] + parts["memory"] + parts["messages"]


def _implied_gain(network: str, encoding: str) -> float:
    """Return a speed-up with MPI on 16 GPUs with the compute that the cell of 2 bits implies."""
    cell = cells("mpi")[network, "2bit", 16]
    compute_s = batch_of(network, 16) / cell.value
    compute_s -= sum(parts_s("mpi", network, "2bit", 16).values())
    full_s, own_s = (
        compute_s + sum(parts_s("mpi", network, one, 16).values()) for one in ("32bit", encoding)
    )
    return full_s / own_s


@reproduces("lowprec:fig6")
def figure_6(_: Simulations) -> list[Number]:
    """Speed-ups with MPI that the text names."""
    counts = (2, 4, 8, 16)
    gain = partial(_gain, "mpi")
    saved = _communication("alexnet", "32bit", 16) / _communication("alexnet", "4bit", 16)
    reshaped = max(gain(one, "1bit_reshaped", k, over="1bit") for one in IMAGES for k in counts)
    table = cells("mpi")
    inception = table["bn_inception", "2bit", 16].value / table["bn_inception", "32bit", 16].value
    return [
        ours(
            *("vgg19_8", gain("vgg19", "4bit", 8)),
            needed=table["vgg19", "4bit", 8].value / 3.0,
            own=samples_per_s("mpi", "vgg19", "32bit", 8),
        ),
        ours("vgg19_16", gain("vgg19", "4bit", 16), implied=_implied_gain("vgg19", "4bit")),
        ours("alexnet_communication", saved),
        ours(
            *("alexnet_whole", gain("alexnet", "4bit", 16)),
            implied=_implied_gain("alexnet", "4bit"),
            four=gain("alexnet", "4bit", 4),
        ),
        ours(
            *("alexnet_most", max(gain("alexnet", "2bit", k) for k in counts)),
            implied=_implied_gain("alexnet", "2bit"),
        ),
        ours("bn_inception_whole", gain("bn_inception", "2bit", 16), theirs=inception),
        ours("reshaped_most", reshaped),
    ]


@reproduces("lowprec:fig7")
def figure_7(_: Simulations) -> list[Number]:
    """Speed-ups with NCCL that the text names."""
    native = {
        network: step_s("mpi", network, "8bit", 8) / step_s("nccl", network, "8bit", 8)
        for network in IMAGES
    }
    best = max(native, key=lambda name: native[name])
    table = cells("nccl")
    theirs = table["vgg19", "4bit", 8].value / table["vgg19", "32bit", 8].value
    gain = _gain("nccl", "vgg19", "4bit", 8)
    return [
        *(ours(key, gain, theirs=theirs) for key in ("vgg19_most", "vgg19_most_summary")),
        ours("native", native[best], best=best),
    ]


def _dgx_s(
    primitive: str,
    network: str,
    encoding: str,
    gpus: int,
    *,
    speed: float = DGX_SPEED,
    link: float = NVLINK,
) -> float:
    """Return a step on the DGX-1.

    Args:
        primitive: `mpi` or `nccl`.
        network: one of `IMAGES`.
        encoding: of the gradients.
        gpus: that are used.
        speed: of a GPU over one of EC2.
        link: bytes a second and way between GPUs, of NCCL.
    """
    parts = parts_s(primitive, network, encoding, gpus)
    if primitive == "nccl":
        parts["link"] = units(network, encoding, gpus)["link"] / link
    return share_s(primitive, network, gpus) / speed + sum(
        seconds / speed if name in KERNELS else seconds for name, seconds in parts.items()
    )


def _dgx_gain(primitive: str, encoding: str, **machine: float) -> float:
    full_s = _dgx_s(primitive, "vgg19", "32bit", 8, **machine)
    return full_s / _dgx_s(primitive, "vgg19", encoding, 8, **machine)


def _dgx_row(figure: str, primitive: str, encoding: str, _: Simulations) -> list[Number]:
    """Return VGG-19's speed-up on the DGX-1, and which machine would explain the paper's."""
    wanted = published_of(figure)["vgg19"].value
    assert wanted is not None
    facts = {
        "wanted": wanted,
        "faster": first_above(
            lambda speed: _dgx_gain(primitive, encoding, speed=speed), wanted, 1.0, 100.0
        ),
    }
    if primitive == "nccl":
        slower = first_above(
            lambda less: _dgx_gain(primitive, encoding, link=NVLINK / less), wanted, 1.0, 100.0
        )
        facts["link"] = NVLINK / slower / 1e9
    return [ours("vgg19", _dgx_gain(primitive, encoding), **facts)]


def _scalability(primitive: str, network: str, encoding: str, gpus: int) -> float:
    """Return samples a second over those of one GPU (section 5.3)."""
    return samples_per_s(primitive, network, encoding, gpus) / one_gpu(network)


def _scaling_curves(primitive: str, counts: tuple[int, ...]) -> list[Curve]:
    return [
        Curve(
            f"{network}, {encoding}, {primitive.upper()}",
            "GPUs",
            "scalability",
            tuple((float(k), _scalability(primitive, network, encoding, k)) for k in counts),
        )
        for network in IMAGES
        for encoding in ("32bit", "4bit")
    ]


def _alone_at_memory() -> float:
    """Return AlexNet's scalability in full precision as if no other GPU used the host's memory."""
    seconds = step_s("mpi", "alexnet", "32bit", 16, without=("memory",))
    return batch_of("alexnet", 16) / seconds / one_gpu("alexnet")


@reproduces("lowprec:fig12")
def figure_12(_: Simulations) -> list[Number | Curve]:
    """Scalability with MPI."""
    scalability = partial(_scalability, "mpi")
    table = cells("mpi")
    one_bit = table["alexnet", "1bit_reshaped", 16].value / one_gpu("alexnet")
    deep = table["resnet152", "32bit", 16].value / one_gpu("resnet152")
    full = max(scalability(network, "32bit", 8) for network in ("bn_inception", "resnet50"))
    return [
        ours("full_8", full),
        ours("alexnet_full_16", scalability("alexnet", "32bit", 16), alone=_alone_at_memory()),
        ours("alexnet_one_bit_16", scalability("alexnet", "1bit_reshaped", 16), theirs=one_bit),
        ours("resnet152_full_16", scalability("resnet152", "32bit", 16), theirs=deep),
        ours("resnet152_quantized_16", scalability("resnet152", "2bit", 16)),
        *_scaling_curves("mpi", (1, 2, 4, 8, 16)),
    ]


@reproduces("lowprec:fig13")
def figure_13(_: Simulations) -> list[Number | Curve]:
    """Scalability with NCCL."""
    full = max(_scalability("nccl", network, "32bit", 8) for network in IMAGES[1:4])
    gain = max(_gain("nccl", network, "4bit", 8) for network in IMAGES)
    theirs = max(
        cells("nccl")[network, "4bit", 8].value / cells("nccl")[network, "32bit", 8].value
        for network in IMAGES
    )
    vgg19 = {gpus: cells("nccl")["vgg19", "32bit", gpus] for gpus in (4, 8)}
    return [
        ours("full_8", full),
        ours("quantized_most", gain, theirs=theirs),
        ours("vgg19_batch", vgg19[8].value / vgg19[4].value),
        *_scaling_curves("nccl", (1, 2, 4, 8)),
    ]


def _dgx_scaling(primitive: str, _: Simulations) -> list[Number | Curve]:
    found: list[Number | Curve] = []
    for network in IMAGES:
        alone = one_gpu(network) * DGX_SPEED
        for encoding in ("32bit", "4bit"):
            points = tuple(
                (
                    float(gpus),
                    batch_of(network, gpus) / _dgx_s(primitive, network, encoding, gpus) / alone,
                )
                for gpus in (2, 4, 8)
            )
            name = f"{network}, {encoding}, DGX-1, {primitive.upper()}"
            found.append(Curve(name, "GPUs", "scalability", points))
            if network == "resnet50" and encoding == "4bit":
                found.append(ours("near_linear", points[-1][1]))
    return found


def _price(network: str) -> tuple[float, str]:
    """Return the dollars of a full training on the cheapest machine of EC2, and the machine."""
    tables = published_tables()
    samples = IMAGENET * tables["epochs"]["rows"][network]
    prices = {}
    for gpus, dollars in tables["machines"]["rows"].items():
        speed = samples_per_s("nccl", network, "8bit", int(gpus)) if int(gpus) <= 8 else None
        if speed is not None:
            prices[gpus] = samples / speed / 3600.0 * dollars
    best = min(prices, key=lambda gpus: prices[gpus])
    return prices[best], best


def _grown_gain(times: int, without: tuple[str, ...] = ()) -> float:
    """Return what 8 bits with NCCL on 8 GPUs bring to an AlexNet with more parameters a layer."""
    full_s, coded_s = (
        alone_s("alexnet", 8)
        + sum(
            seconds if name == "messages" else times * seconds
            for name, seconds in parts_s("nccl", "alexnet", encoding, 8).items()
            if name not in without
        )
        for encoding in ("32bit", "8bit")
    )
    return full_s / coded_s


@reproduces("lowprec:fig16")
def figure_16(_: Simulations) -> list[Number | Curve]:
    """Price of training, and what 8 bits bring to a model that grows."""
    prices = {network: _price(network) for network in IMAGES}
    text = ", ".join(
        f"{name} ${price:,.0f} on {best} GPU{'s' if best != '1' else ''}"
        for name, (price, best) in prices.items()
    )
    points = tuple((float(times), _grown_gain(times)) for times in (1, 2, 5, 10, 20, 50, 100, 1000))
    dearer = prices["resnet50"][0] - prices["alexnet"][0]
    return [
        ours("alexnet_to_resnet50", dearer, text=text),
        ours("resnet50_to_resnet152", prices["resnet152"][0] - prices["resnet50"][0]),
        ours("bound", points[-1][1], without=_grown_gain(1000, without=KERNELS)),
        Curve("AlexNet grown, 8 bits over full precision", "times the size", "x", points),
    ]


_OF_A_PRIMITIVE: dict[str, Reproduce] = {
    "lowprec:fig8": partial(_dgx_row, "lowprec:fig8", "mpi", "2bit"),
    "lowprec:fig9": partial(_dgx_row, "lowprec:fig9", "nccl", "4bit"),
    "lowprec:fig10": partial(_table, "mpi"),
    "lowprec:fig11": partial(_table, "nccl"),
    "lowprec:fig14": partial(_dgx_scaling, "mpi"),
    "lowprec:fig15": partial(_dgx_scaling, "nccl"),
}
for _name, _run in _OF_A_PRIMITIVE.items():
    reproduces(_name)(_run)
