"""The figures of low-precision communication (Grubic et al., EDBT 2018).

Every legible cell of figures 10 and 11, and what follows from the same model of the exchange
(`lowprec_model`): speed-ups (6, 7), the DGX-1 (8, 9, 14, 15), scalability (12, 13), and price and
size of models (16).
"""

from __future__ import annotations

from collections.abc import Callable

from gradlane.lab.papers.comparison import (
    Curve,
    Figure,
    Ours,
    Speed,
    first_above,
    published_of,
    published_tables,
    speeds,
)
from gradlane.lab.papers.lowprec_model import (
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
from gradlane.lab.papers.simulations import Simulations
from gradlane.lab.papers.trained import LOWPREC_5
from gradlane.planning.models import ARCHITECTURES

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
    ours = samples_per_s(primitive, cell.network, cell.encoding, cell.gpus)
    return 100.0 * (ours / cell.value - 1.0)


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
    text = f"held out; our step: {_composition(primitive, network, encoding, gpus)}"
    if abs(deviation) <= NEAR:
        return text
    return f"{text}; " + "; ".join(_reasons(primitive, cell, deviation))


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


def _table(primitive: str) -> Callable[[Simulations], list[Ours]]:
    """Return ours of every legible cell of a table."""

    def run(_: Simulations) -> list[Ours]:
        found = []
        for cell in speeds(TABLES[primitive]):
            value = samples_per_s(primitive, cell.network, cell.encoding, cell.gpus)
            if cell.gpus == 1:
                why, role = "goes into the model: the speed of one GPU", "input"
            elif cell.network == FITTED:
                why, role = "one of the cells that the model's constants were fitted to", "fitted"
            else:
                why, role = why_of(primitive, cell), ""
            found.append(Ours(cell.key, value, why, role=role))
        return found

    return run


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


def figure_3(_: Simulations) -> list[Ours]:
    """Parameters of the networks."""
    why = "the same layers, or torchvision's; the paper rounds"
    whys = {"resnet110": "1.7 million in its authors' paper (He et al. 2015, table 6) as well"}
    return [
        Ours(name, ARCHITECTURES[name]().numel / 1e6, whys.get(name, why))
        for name in published_of("lowprec:fig3")
    ]


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


def figure_6(_: Simulations) -> list[Ours]:
    """Speed-ups with MPI that the text names."""
    reshaped = max(
        _gain("mpi", network, "1bit_reshaped", gpus, over="1bit")
        for network in IMAGES
        for gpus in (2, 4, 8, 16)
    )
    saved = _communication("alexnet", "32bit", 16) / _communication("alexnet", "4bit", 16)
    table = cells("mpi")
    inception = table["bn_inception", "2bit", 16].value / table["bn_inception", "32bit", 16].value
    smaller = "full precision's row is not legible; held out"
    needed = table["vgg19", "4bit", 8].value / 3.0
    own = samples_per_s("mpi", "vgg19", "32bit", 8)
    implied = "with the compute that their cell of 2 bits implies {:.1f}x"
    return [
        Ours(
            "vgg19_8",
            _gain("mpi", "vgg19", "4bit", 8),
            f"{smaller}: 3x implies {needed:.0f} samples/s in full precision, ours are {own:.0f}",
        ),
        Ours(
            "vgg19_16",
            _gain("mpi", "vgg19", "4bit", 16),
            f"{smaller}; {implied.format(_implied_gain('vgg19', '4bit'))}",
        ),
        Ours(
            "alexnet_communication",
            saved,
            "16 GPUs; full precision's row is not legible, and bytes alone are 7.6 times fewer",
        ),
        Ours(
            "alexnet_whole",
            _gain("mpi", "alexnet", "4bit", 16),
            f"16 GPUs; {smaller}; {implied.format(_implied_gain('alexnet', '4bit'))}; with 4 GPUs "
            f"{_gain('mpi', 'alexnet', '4bit', 4):.1f}x",
        ),
        Ours(
            "alexnet_most",
            max(_gain("mpi", "alexnet", "2bit", gpus) for gpus in (2, 4, 8, 16)),
            f"2 bits on 16 GPUs; {implied.format(_implied_gain('alexnet', '2bit'))}; section 5.2 "
            "says 2x at 4 bits",
        ),
        Ours(
            "bn_inception_whole",
            _gain("mpi", "bn_inception", "2bit", 16),
            f"16 GPUs, where their own table has {inception:.2f}x",
        ),
        Ours(
            "reshaped_most",
            reshaped,
            "the largest over all networks and GPUs; their own table has 3.1x at most "
            "(ResNet-152, 16 GPUs)",
            role="fitted",
        ),
    ]


def figure_7(_: Simulations) -> list[Ours]:
    """Speed-ups with NCCL that the text names."""
    native = {
        network: step_s("mpi", network, "8bit", 8) / step_s("nccl", network, "8bit", 8)
        for network in IMAGES
    }
    best = max(native, key=lambda name: native[name])
    table = cells("nccl")
    vgg = table["vgg19", "4bit", 8].value / table["vgg19", "32bit", 8].value
    theirs = f"their own table has {vgg:.2f}x at 4 bits"
    gain = _gain("nccl", "vgg19", "4bit", 8)
    return [
        Ours("vgg19_most", gain, theirs),
        Ours("vgg19_most_summary", gain, theirs),
        Ours("native", native[best], f"NCCL over MPI at 8 bits on 8 GPUs; most with {best}"),
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


def _dgx_row(figure: str, primitive: str, encoding: str) -> list[Ours]:
    """Return VGG-19's speed-up on the DGX-1, and which machine would explain the paper's."""
    wanted = published_of(figure)["vgg19"].value
    assert wanted is not None
    faster = first_above(
        lambda speed: _dgx_gain(primitive, encoding, speed=speed), wanted, 1.0, 100.0
    )
    why = (
        f"GPUs 1.4 times as fast as EC2's, as the text says; {wanted:g}x follows from GPUs "
        f"{faster:.1f} times as fast"
    )
    if primitive == "nccl":
        slower = first_above(
            lambda less: _dgx_gain(primitive, encoding, link=NVLINK / less), wanted, 1.0, 100.0
        )
        why += f", or from links of {NVLINK / slower / 1e9:.1f} GB/s in place of 20"
    return [Ours("vgg19", _dgx_gain(primitive, encoding), why)]


def figure_8(_: Simulations) -> list[Ours]:
    """VGG-19 on the DGX-1 with MPI."""
    return _dgx_row("lowprec:fig8", "mpi", "2bit")


def figure_9(_: Simulations) -> list[Ours]:
    """VGG-19 on the DGX-1 with NCCL."""
    return _dgx_row("lowprec:fig9", "nccl", "4bit")


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


def figure_12(_: Simulations) -> list[Ours | Curve]:
    """Scalability with MPI."""
    table = cells("mpi")
    one_bit = table["alexnet", "1bit_reshaped", 16].value / one_gpu("alexnet")
    deep = table["resnet152", "32bit", 16].value / one_gpu("resnet152")
    computing = max(
        _scalability("mpi", network, "32bit", 8) for network in ("bn_inception", "resnet50")
    )
    return [
        Ours("full_8", computing, "the better of BN-Inception and ResNet-50"),
        Ours(
            "alexnet_full_16",
            _scalability("mpi", "alexnet", "32bit", 16),
            f"held out; {_alone_at_memory():.1f}x without the part `memory`, which was fitted to "
            "ResNet-152's 467 smaller tensors",
        ),
        Ours(
            "alexnet_one_bit_16",
            _scalability("mpi", "alexnet", "1bit_reshaped", 16),
            f"the text contradicts their own table, which has {one_bit:.1f}x",
        ),
        Ours(
            "resnet152_full_16",
            _scalability("mpi", "resnet152", "32bit", 16),
            f"the text contradicts their own table, which has {deep:.1f}x",
            role="fitted",
        ),
        Ours("resnet152_quantized_16", _scalability("mpi", "resnet152", "2bit", 16), "with 2 bits"),
        *_scaling_curves("mpi", (1, 2, 4, 8, 16)),
    ]


def figure_13(_: Simulations) -> list[Ours | Curve]:
    """Scalability with NCCL."""
    full = max(_scalability("nccl", network, "32bit", 8) for network in IMAGES[1:4])
    gain = max(_gain("nccl", network, "4bit", 8) for network in IMAGES)
    theirs = max(
        cells("nccl")[network, "4bit", 8].value / cells("nccl")[network, "32bit", 8].value
        for network in IMAGES
    )
    return [
        Ours("full_8", full, "the best of BN-Inception and the ResNets"),
        Ours(
            "quantized_most",
            gain,
            f"a bound, at 4 bits on 8 GPUs: their own table has {theirs:.2f}x at most",
        ),
        *_scaling_curves("nccl", (1, 2, 4, 8)),
    ]


def _dgx_scaling(primitive: str) -> Callable[[Simulations], list[Ours | Curve]]:
    def run(_: Simulations) -> list[Ours | Curve]:
        found: list[Ours | Curve] = []
        for network in IMAGES:
            alone = one_gpu(network) * DGX_SPEED
            for encoding in ("32bit", "4bit"):
                points = tuple(
                    (
                        float(gpus),
                        batch_of(network, gpus)
                        / _dgx_s(primitive, network, encoding, gpus)
                        / alone,
                    )
                    for gpus in (2, 4, 8)
                )
                name = f"{network}, {encoding}, DGX-1, {primitive.upper()}"
                found.append(Curve(name, "GPUs", "scalability", points))
                if network == "resnet50" and encoding == "4bit":
                    why = "ResNet-50 with 4 bits on 8 GPUs"
                    found.append(Ours("near_linear", points[-1][1], why))
        return found

    return run


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


def figure_16(_: Simulations) -> list[Ours | Curve]:
    """Price of training, and what 8 bits bring to a model that grows."""
    prices = {network: _price(network) for network in IMAGES}
    text = ", ".join(
        f"{name} ${price:,.0f} on {best} GPU{'s' if best != '1' else ''}"
        for name, (price, best) in prices.items()
    )
    points = tuple((float(times), _grown_gain(times)) for times in (1, 2, 5, 10, 20, 50, 100, 1000))
    return [
        Ours(
            "alexnet_to_resnet50",
            prices["resnet50"][0] - prices["alexnet"][0],
            f"epochs and prices of figures 2 and 3, 8 bits with NCCL: {text}",
        ),
        Ours(
            "resnet50_to_resnet152",
            prices["resnet152"][0] - prices["resnet50"][0],
            "the same; the cheapest machine is that with one GPU, whose speed is published",
        ),
        Ours(
            "bound",
            points[-1][1],
            "an AlexNet of a thousand times the parameters: the bound, less a scale a bucket "
            f"and its kernel (without kernels {_grown_gain(1000, without=KERNELS):.2f}x)",
        ),
        Curve("AlexNet grown, 8 bits over full precision", "times the size", "x", points),
    ]


_FITTED = (
    "the model of copies, messages and kernels in `lab/papers/lowprec_model.py`, fitted to "
    "ResNet-152 alone"
)
FIGURES = (
    Figure("lowprec:fig3", "the networks", "counted", figure_3),
    LOWPREC_5,
    Figure("lowprec:fig6", "speed-ups with MPI", _FITTED, figure_6),
    Figure("lowprec:fig7", "speed-ups with NCCL", _FITTED, figure_7),
    Figure("lowprec:fig8", "DGX-1 with MPI", _FITTED, figure_8),
    Figure("lowprec:fig9", "DGX-1 with NCCL", f"{_FITTED}; links of 20 GB/s", figure_9),
    Figure("lowprec:fig10", "all speeds with MPI (also figure 6)", _FITTED, _table("mpi")),
    Figure("lowprec:fig11", "all speeds with NCCL (also figure 7)", _FITTED, _table("nccl")),
    Figure("lowprec:fig12", "scalability with MPI", _FITTED, figure_12),
    Figure("lowprec:fig13", "scalability with NCCL", _FITTED, figure_13),
    Figure("lowprec:fig14", "scalability of the DGX-1 with MPI", _FITTED, _dgx_scaling("mpi")),
    Figure(
        "lowprec:fig15",
        "scalability of the DGX-1 with NCCL",
        f"{_FITTED}; links of 20 GB/s",
        _dgx_scaling("nccl"),
    ),
    Figure("lowprec:fig16", "price, and larger models", _FITTED, figure_16),
)
