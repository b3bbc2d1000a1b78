"""The numbers of `Session.metrics()`: their names, and their computation from the core's counters.

All values are plain dictionaries, lists and numbers, so that `json.dumps` takes them. Names carry
units: `*_s` are seconds, `*_bytes` bytes, `*_share` numbers from 0 to 1. Counters only grow;
`queued_*` and `*_in_flight` are momentary states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypedDict, TypeVar

from gradlane.formats.live_state import StepTimes
from gradlane.training.rendezvous.membership import Membership

Reading = dict[str, Any]
"""A channel's counters, as the core reports them."""


class PeerMetrics(TypedDict):
    """Traffic with one rank, and its queues; zeros for this rank itself.

    `tx_bytes` and `rx_bytes` are payloads and gradlane's own headers, without those of TCP and IP;
    a payload's bytes count when its frame is whole. A message is a slice, or a notice of one.
    `owned_bytes`, also of this rank itself, are those of gradients that the rank adds up, or makes
    of factors for all.
    """

    rank: int
    tx_bytes: int
    rx_bytes: int
    tx_payload_bytes: int
    rx_payload_bytes: int
    tx_frames: int
    rx_frames: int
    queued_messages: int
    queued_bytes: int
    in_flight_bytes: int
    owned_bytes: int


class TensorWait(TypedDict):
    """Waits of this rank's program for one tensor's result.

    `count`, `wait_s` and `wait_s_mean` are of waits for the tensor itself, as before a module's
    forward, and `last_step` is the training step of the last one, 0 for none. `whole_step_s` and
    `whole_step_count` are of waits for a whole step, as clipping has them, that ended with this
    tensor. `wait_s_max` is the longest of all these waits, `max_step` its training step, 0 for
    none. `wait_share` is their share of all waits.
    """

    model: int
    name: str
    count: int
    wait_s: float
    wait_s_mean: float
    wait_s_max: float
    max_step: int
    last_step: int
    whole_step_count: int
    whole_step_s: float
    wait_share: float


class Straggler(TypedDict):
    """Lateness of one rank's contributions to slices that this rank owns.

    `last_count` says to how many it was the last rank to contribute, `last_share` to which share of
    all. `late_s` is how much later that was than the rank before it: what all would have gained,
    had it been no later than that one. Gradients of other ranks come through the network and those
    of this rank do not; only the sum over all owners, as the summary has it, is fair to all.
    """

    rank: int
    last_count: int
    last_share: float
    late_s: float
    late_s_mean: float
    late_s_max: float
    max_step: int


class LeftOutSteps(TypedDict):
    """Steps that went on without one rank (`stragglers="drop"` or `"backup=b"`).

    `left_out_share` is of all steps whose contributors were chosen. On rank 0, which chooses them,
    `late_s_mean` and `late_s_max` say how much later than the decision its gradients were there, in
    the `late_count` of these steps that it did not pass; zeros on other ranks.
    """

    rank: int
    left_out_steps: int
    left_out_share: float
    late_count: int
    late_s_mean: float
    late_s_max: float
    max_step: int


class Lost(TypedDict):
    """A rank that training has gone on without: the step that it was lost in, and why.

    `residuals` is the number of tensors whose codec keeps a residual: that of its contributions to
    these is lost, and that of the means of those slices that it owned.
    """

    rank: int
    step: int
    reason: str
    residuals: int


class Joined(TypedDict):
    """A rank that has joined, and its first training step."""

    rank: int
    step: int


class Metrics(TypedDict):
    """The result of `Session.metrics()`: sums over all models of the session, on this rank.

    `step` is the number of the current training step, of the model with the most. `codec_ratio`
    is bytes of gradients and results before encoding through bytes sent for them; 1.0 without a
    codec. `clip_steps` is how often `session.clip_grad_norm_()` was called, and `clipped_steps` how
    often it has scaled gradients down; `clip_factor` is what those of the last step were multiplied
    by (the least of several models; 1.0 without a call, 0.0 where the norm is not finite), and
    `clip_factor_mean` the mean over `clip_steps`.

    `served_tx_bytes` and `served_rx_bytes` are payloads of results that this rank sent as
    the owner of slices, and of what it got for them. `gathered_slices` is how many of this rank's
    slices all ranks have contributed to, and `tied_slices` those of them without a late rank.
    `left_out` is empty if steps wait for all ranks. There are no reconnections: a lost
    connection ends the session, or, with `going_on`, training goes on without a rank. Ranks have
    the numbers of the start here, and `rank` and `world_size` are those; where a rank has joined,
    the numbers since the last one has. `members` are the ranks that train now, `generation` is 0
    until ranks are lost or join, and `lost` and `joined` are those that were and did.
    `channels` has the core's own counters, one of each model.
    """

    rank: int
    world_size: int
    members: list[int]
    generation: int
    lost: list[Lost]
    joined: list[Joined]
    step: int
    tx_bytes: int
    rx_bytes: int
    tx_payload_bytes: int
    rx_payload_bytes: int
    tx_frames: int
    rx_frames: int
    raw_bytes: int
    encoded_bytes: int
    served_tx_bytes: int
    served_rx_bytes: int
    codec_ratio: float
    clip_steps: int
    clipped_steps: int
    clip_factor: float
    clip_factor_sum: float
    clip_factor_mean: float
    queued_messages: int
    queued_bytes: int
    queued_jobs: int
    jobs_in_flight: int
    outgoing_frames: int
    scratch_bytes: int
    wait_s: float
    io_cpu_s: float
    work_cpu_s: float
    acceptor_cpu_s: float
    turns: int
    plan_version: int
    refused_connections: int
    reconnects: int
    steps: StepTimes
    peers: list[PeerMetrics]
    tensor_waits: list[TensorWait]
    layer_waits: list[TensorWait]
    stragglers: list[Straggler]
    gathered_slices: int
    tied_slices: int
    decided_steps: int
    left_out: list[LeftOutSteps]
    channels: list[Reading]


_SUMS = (
    "tx_bytes",
    "rx_bytes",
    "tx_payload_bytes",
    "rx_payload_bytes",
    "tx_frames",
    "rx_frames",
    "raw_bytes",
    "encoded_bytes",
    "served_tx_bytes",
    "served_rx_bytes",
    "clip_steps",
    "clipped_steps",
    "clip_factor_sum",
    "gathered_slices",
    "tied_slices",
    "decided_steps",
    "wait_s",
    "io_cpu_s",
    "work_cpu_s",
    "acceptor_cpu_s",
    "turns",
    "refused_connections",
)
_STATES = (
    "queued_messages",
    "queued_bytes",
    "queued_jobs",
    "jobs_in_flight",
    "outgoing_frames",
    "scratch_bytes",
    "in_flight_bytes",
    "owned_bytes",
)
_PEERS_ONLY = ("in_flight_bytes", "owned_bytes")
_STEP_OF_MAX = {"wait_s_max": "wait_step_max", "late_s_max": "late_step_max"}
"""Maximum counters, and the step of each maximum."""


def join_readings(before: Reading, now: Reading) -> Reading:
    """Add the counters of a model's closed channel to those of its current one."""
    joined = {**now, **{name: now.get(name, 0) + before.get(name, 0) for name in (*_SUMS, "step")}}
    joined["peers"] = _join_tables(before, now, "peers")
    for name in ("stragglers", "left_out"):
        joined[name] = _join_tables(before, now, name)
    waits = {row["name"]: row for row in before.get("waits", ())}
    for row in now.get("waits", ()):
        waits[row["name"]] = _join_rows(waits.get(row["name"], {}), row)
    joined["waits"] = list(waits.values())
    return joined


def metrics_of(
    rank: int,
    world_size: int,
    steps: StepTimes,
    readings: Sequence[Reading],
    membership: Membership | None = None,
    residuals: int = 0,
) -> Metrics:
    """Sum up the counters of all models of a session.

    Args:
        rank: this rank.
        world_size: number of ranks.
        steps: step times.
        readings: counters, one for each model; a missing counter is 0.
        membership: the ranks that train; None: all.
        residuals: tensors whose codec keeps a residual.
    """

    def total(name: str) -> Any:
        return sum(reading.get(name, 0) for reading in readings)

    waits = [
        tensor_wait_row(number, row)
        for number, reading in enumerate(readings, 1)
        for row in reading.get("waits", ())
    ]
    wait_s = float(total("wait_s"))
    gathered = int(total("gathered_slices"))
    late_rows = _sum_rows(reading.get("stragglers", ()) for reading in readings)
    peer_rows = _sum_rows(reading.get("peers", ()) for reading in readings)
    decided = total("decided_steps")
    left_out = _sum_rows(reading.get("left_out", ()) for reading in readings)
    encoded = total("encoded_bytes")
    metrics: Any = {name: total(name) for name in (*_SUMS, *_STATES) if name not in _PEERS_ONLY}
    metrics.update(
        rank=rank,
        world_size=world_size,
        members=list(range(world_size) if membership is None else membership.members),
        generation=0 if membership is None else membership.generation,
        lost=[]
        if membership is None
        else [{**asdict(one), "residuals": residuals} for one in membership.lost],
        joined=[] if membership is None else [asdict(one) for one in membership.joined],
        step=max((reading.get("step", 0) for reading in readings), default=0),
        codec_ratio=total("raw_bytes") / encoded if encoded else 1.0,
        clip_factor=min((reading.get("clip_factor", 1.0) for reading in readings), default=1.0),
        clip_factor_mean=total("clip_factor_sum") / (total("clip_steps") or 1),
        plan_version=max((reading.get("plan_version", 0) for reading in readings), default=0),
        reconnects=0,
        steps=steps,
        peers=[{"rank": peer, **row} for peer, row in enumerate(peer_rows)],
        tensor_waits=_sorted_by_wait(waits, wait_s),
        layer_waits=_sorted_by_wait(sum_by_layer(waits), wait_s),
        stragglers=[straggler_row(late, row, gathered) for late, row in enumerate(late_rows)],
        left_out=[left_out_row(out, row, decided) for out, row in enumerate(left_out)],
        channels=list(readings),
    )
    result: Metrics = metrics
    return result


def tensor_wait_row(model: int, row: Mapping[str, Any]) -> TensorWait:
    """Convert a core's row of waits to a `TensorWait`."""
    count, wait_s = int(row["count"]), float(row["wait_s"])
    return {
        "model": model,
        "name": str(row["name"]),
        "count": count,
        "wait_s": wait_s,
        "wait_s_mean": wait_s / count if count else 0.0,
        "wait_s_max": float(row["wait_s_max"]),
        "max_step": int(row["wait_step_max"]),
        "last_step": int(row["wait_step_last"]),
        "whole_step_count": int(row["last_of_step_count"]),
        "whole_step_s": float(row["last_of_step_wait_s"]),
        "wait_share": 0.0,
    }


def sum_by_layer(waits: Iterable[TensorWait]) -> list[TensorWait]:
    """Sum up waits by the module that owns each tensor; tensors without a module stay."""
    layers: dict[tuple[int, str], TensorWait] = {}
    for wait in waits:
        layer = layer_of(wait["name"])
        before = layers.get((wait["model"], layer))
        if before is None:
            layers[(wait["model"], layer)] = {**wait, "name": layer}
            continue
        if wait["wait_s_max"] > before["wait_s_max"]:
            before["wait_s_max"], before["max_step"] = wait["wait_s_max"], wait["max_step"]
        before["last_step"] = max(before["last_step"], wait["last_step"])
        before["count"] += wait["count"]
        before["wait_s"] += wait["wait_s"]
        before["wait_s_mean"] = before["wait_s"] / before["count"] if before["count"] else 0.0
        before["whole_step_count"] += wait["whole_step_count"]
        before["whole_step_s"] += wait["whole_step_s"]
    return list(layers.values())


def layer_of(tensor: str) -> str:
    """Return the name of the module that owns a parameter: `fc` for `fc.weight`.

    A parameter of the model itself, and gradlane's own tensors, keep their name.
    """
    layer, dot, _ = tensor.rpartition(".")
    return layer if dot else tensor


def waited_s(wait: TensorWait) -> float:
    """Return the seconds of all waits for a tensor or layer, whole-step waits included."""
    return wait["wait_s"] + wait["whole_step_s"]


def straggler_row(rank: int, row: Mapping[str, Any], gathered: int) -> Straggler:
    """Convert a core's row of late contributions to a `Straggler`."""
    count, late_s = int(row["last_count"]), float(row["late_s"])
    return {
        "rank": rank,
        "last_count": count,
        "last_share": count / gathered if gathered else 0.0,
        "late_s": late_s,
        "late_s_mean": late_s / count if count else 0.0,
        "late_s_max": float(row["late_s_max"]),
        "max_step": int(row["late_step_max"]),
    }


def left_out_row(rank: int, row: Mapping[str, Any], decided: int) -> LeftOutSteps:
    """Convert a core's row of steps without a rank to a `LeftOutSteps`."""
    steps, count = int(row["left_out_steps"]), int(row["late_count"])
    return {
        "rank": rank,
        "left_out_steps": steps,
        "left_out_share": steps / decided if decided else 0.0,
        "late_count": count,
        "late_s_mean": float(row["left_out_late_s"]) / count if count else 0.0,
        "late_s_max": float(row["late_s_max"]),
        "max_step": int(row["late_step_max"]),
    }


def renumber_steps(reading: Reading, training_step: Callable[[int], int]) -> Reading:
    """Number steps as the program does: a channel also counts steps outside of training."""

    def renumbered(row: Mapping[str, Any]) -> Reading:
        steps = ("wait_step_max", "wait_step_last", "late_step_max")
        return {**row, **{name: training_step(row[name]) for name in steps if name in row}}

    rows: Reading = {
        name: [renumbered(row) for row in reading[name]]
        for name in ("waits", "stragglers", "left_out")
        if name in reading
    }
    return {**reading, **rows}


_RowType = TypeVar("_RowType", bound=Mapping[str, Any])


def _sorted_by_wait(waits: list[TensorWait], wait_s: float) -> list[TensorWait]:
    for wait in waits:
        wait["wait_share"] = waited_s(wait) / wait_s if wait_s else 0.0
    return sorted(waits, key=waited_s, reverse=True)


def _sum_rows(tables: Iterable[Sequence[_RowType]]) -> list[Reading]:
    total: list[Reading] = []
    for table in tables:
        for number, row in enumerate(table):
            if number == len(total):
                total.append(dict(row))
            else:
                total[number] = _join_rows(total[number], row, add_states=True)
    return total


def _join_tables(before: Reading, now: Reading, name: str) -> list[Reading]:
    rows: list[Reading] = now.get(name, [])
    earlier: list[Reading] = before.get(name, [])
    if len(earlier) != len(rows):
        return rows
    return [_join_rows(one, other) for one, other in zip(earlier, rows, strict=True)]


def _join_rows(
    before: Mapping[str, Any], now: Mapping[str, Any], *, add_states: bool = False
) -> Reading:
    joined = dict(now)
    for name, value in before.items():
        step_name = _STEP_OF_MAX.get(name)
        if step_name is not None:
            if value > now.get(name, 0.0):
                joined[name], joined[step_name] = value, before[step_name]
        elif name in _STEP_OF_MAX.values() or not isinstance(value, (int, float)):
            continue
        elif name == "wait_step_last":
            joined[name] = max(value, now.get(name, 0)) if add_states else now.get(name, value)
        elif name not in _STATES or add_states:
            joined[name] = now.get(name, 0) + value
    return joined
