"""The step time that perfect overlap of computation and communication could reach.

It is a lower bound for one scheme and codec, whatever the order of transmission, as long as every
step waits for its own gradients: no exact, synchronous strategy can be faster.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gradlane.planning.models.timings import TensorTiming

Float64Array = npt.NDArray[np.float64]

SCHEMES = ("ps", "ring", "sfb", "adam", "hierarchical", "collected")
"""Schemes with known traffic: sharded parameter server, ring all-reduce, factors from every rank to
every other one or to one that sends the whole back, sums of nodes on sharded servers, factors of a
node's ranks that its leader sends to every other node."""


@dataclass(frozen=True)
class Bound:
    """The bound and the three limits whose largest it is, in nominal seconds."""

    step_s: float
    """The largest of the three."""
    compute_s: float
    """Forward and backward without communication."""
    port_s: float
    """Time that the busiest port needs for the bytes of one step, in one direction."""
    pair_s: float
    """Limit by gradients that are ready late and needed early; see `bound_step_s`."""
    binding: str
    """The binding limit: 'compute', 'port', or 'pair READY -> NEED' with the names of two
    tensors."""


def port_bytes(
    size_bytes: float,
    *,
    workers: int,
    scheme: str = "ps",
    local_ranks: int = 1,
    servers: int | None = None,
    serving: int = 0,
    answer_bytes: float = 0.0,
) -> float:
    """Return the bytes of one tensor through the busiest port, in each direction.

    With a server on every worker and slices spread evenly, a worker sends (N-1)/N of its
    gradients and, as a server, its 1/N of the averages to N-1 others; a ring all-reduce
    sends (N-1)/N in each of its two phases. Both make 2 (N-1)/N of the tensor. Factors go to the
    N-1 others. Where L workers share a node's port, what goes between them does not pass it: L
    times 2 (N-L)/N of the tensor is left, and of a ring over neighbours as much as before. Where
    they add up first, the nodes are the N, and factors go to each other node once. Where S ranks
    alone are servers, each of them gives its 1/S of the averages to N-1 others and sends (S-1)/S of
    its own gradients: (N+S-2)/S.
    Where one rank answers for all (`adam`), ports are not equal, and this is their mean, of what
    they send: `port_loads` has each.

    Where S ranks beside the workers only serve, each worker sends all of its gradients, and a
    server its 1/S of the averages to N workers: the busier of the two ports carries max(1, N/S).

    Args:
        size_bytes: bytes of the tensor, or of one rank's factors, as they travel.
        workers: number of ranks.
        scheme: one of `SCHEMES`.
        local_ranks: ranks of a node, which share its port.
        servers: so many ranks are servers, of scheme `ps` with a rank a node; None: all.
        serving: so many ranks beside the workers are the servers instead.
        answer_bytes: bytes of the tensor, of scheme `adam`, where `size_bytes` is a rank's factors.

    Raises:
        ValueError: for an unknown scheme, fewer than one worker, or servers that are no ranks.
    """
    if scheme not in SCHEMES:
        raise ValueError(f"no bound is known for scheme '{scheme}'; use {' or '.join(SCHEMES)}")
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if servers is not None and not 1 <= servers <= workers:
        raise ValueError(f"servers must be 1 to {workers}, the number of workers, got {servers}")
    if scheme == "hierarchical":
        nodes = workers // local_ranks
        return 2.0 * (nodes - 1) / nodes * size_bytes
    if scheme == "collected":
        return (workers - local_ranks) * size_bytes
    if scheme == "sfb":
        return local_ranks * (workers - local_ranks) * size_bytes
    if scheme == "adam":
        return local_ranks * (workers - local_ranks) / workers * (size_bytes + answer_bytes)
    if scheme == "ps" and serving:
        return max(1.0, workers / serving) * size_bytes
    if scheme == "ps" and servers is not None:
        return (workers + servers - 2.0) / servers * size_bytes
    if scheme == "ps":
        return 2.0 * local_ranks * (workers - local_ranks) / workers * size_bytes
    return 2.0 * (workers - 1) / workers * size_bytes


def answer_owners(size_bytes: Sequence[float], servers: int) -> list[int]:
    """Return the rank that answers for each tensor of scheme `adam`, as the engine assigns them.

    Each goes to the rank with the fewest bytes so far, the first of equals, and counts with a
    block's header and padding to 16 bytes (`gradlane.training.factors.block`).

    Args:
        size_bytes: of the tensors, in their order in the model.
        servers: the first so many ranks own any.
    """
    loads = [(0, rank) for rank in range(servers)]
    owners = []
    for size in size_bytes:
        load, rank = heapq.heappop(loads)
        owners.append(rank)
        heapq.heappush(loads, (load + 16 + -(-int(size) // 16) * 16, rank))
    return owners


def port_loads(
    timings: Sequence[TensorTiming],
    wire_bytes: Sequence[float],
    schemes: Sequence[str],
    *,
    workers: int,
    local_ranks: int = 1,
    servers: int | None = None,
    serving: int = 0,
) -> Float64Array:
    """Return the bytes of each tensor through the ports that may be the busiest, one way each.

    Where all ports are alike that is one; with tensors of scheme `adam` it is what each node sends
    and what each node receives. Where ranks only serve, the last one is theirs.

    Args:
        timings: of the tensors, for their sizes.
        wire_bytes: what travels for each, as in `bound_step_s`.
        schemes: of each.
        workers: number of ranks.
        local_ranks: ranks of a node, which share its port.
        servers: so many ranks are servers; None: all.
        serving: so many ranks beside the workers are the servers instead.

    Returns:
        A row for each port and direction, a column for each tensor.
    """
    ports = 2 * (workers // local_ranks) if "adam" in schemes else 1
    loads = np.zeros((ports + (1 if serving else 0), len(timings)))
    answered = [index for index, scheme in enumerate(schemes) if scheme == "adam"]
    sizes = [timings[index].size_bytes for index in answered]
    owners = dict(zip(answered, answer_owners(sizes, servers or workers), strict=True))
    for index, scheme in enumerate(schemes):
        if serving and scheme == "ps":
            loads[:ports, index] = wire_bytes[index]
            loads[ports, index] = workers / serving * wire_bytes[index]
            continue
        if scheme != "adam":
            loads[:ports, index] = port_bytes(
                wire_bytes[index],
                workers=workers,
                scheme=scheme,
                local_ranks=local_ranks,
                servers=servers,
            )
            continue
        block, whole = wire_bytes[index], float(timings[index].size_bytes)
        outside, home = workers - local_ranks, owners[index] // local_ranks
        for node in range(workers // local_ranks):
            owns = node == home
            loads[2 * node, index] = outside * whole if owns else local_ranks * block
            loads[2 * node + 1, index] = outside * block if owns else local_ranks * whole
    return loads


def bound_step_s(
    timings: Sequence[TensorTiming],
    *,
    workers: int,
    goodput_bps: float,
    compute_s: float,
    scheme: str = "ps",
    codec_ratio: float = 1.0,
    wire_bytes: Sequence[float] | None = None,
    schemes: Sequence[str] = (),
    local_ranks: int = 1,
    servers: int | None = None,
    serving: int = 0,
    clips: bool = False,
) -> Bound:
    """Compute the perfect-overlap bound on the step time.

    It is the largest of three limits. The step computes for `compute_s`. Each port carries the
    bytes of all tensors. And for every pair of tensors (i, k): all tensors that become ready no
    earlier than i and are needed no later than k must travel between ready_i of this step and
    need_k of the next, so step >= ready_i + their time on a port - need_k. Where gradients are
    clipped by the norm of all of them, the first leg of all others that are ready no earlier than
    i must be over by then as well.

    Args:
        timings: when each gradient is ready and its parameter needed, nominal seconds.
        workers: number of ranks.
        goodput_bps: bits a second of payload that a port carries in each direction, at once.
        compute_s: nominal seconds of forward and backward, best measured without communication.
        scheme: one of `SCHEMES`, of all tensors.
        codec_ratio: bytes of a gradient over bytes that travel for it; 1 without a codec.
        wire_bytes: what travels for each gradient, where codecs differ; in place of the ratio.
        schemes: of each tensor, where they differ.
        local_ranks: ranks of a node, which share its port.
        servers: so many ranks are servers; None: all.
        serving: so many ranks beside the workers are the servers instead.
        clips: gradients are clipped by the norm of all of them, so no parameter is used before the
            first legs of all are over.

    Returns:
        The bound, its parts, and which of them binds.

    Raises:
        ValueError: if a rate or ratio is not positive, the scheme is unknown, or there are not as
            many `wire_bytes` as tensors.
    """
    if not goodput_bps > 0.0:
        raise ValueError(f"goodput must be positive, got {goodput_bps} bit/s")
    if not codec_ratio > 0.0:
        raise ValueError(f"codec ratio must be positive, got {codec_ratio}")
    if wire_bytes is None:
        wire_bytes = [timing.size_bytes / codec_ratio for timing in timings]
    if len(wire_bytes) != len(timings):
        raise ValueError(f"wire bytes of {len(wire_bytes)} tensors for {len(timings)}")
    of_each = schemes or [scheme] * len(timings)
    if len(of_each) != len(timings):
        raise ValueError(f"schemes of {len(of_each)} tensors for {len(timings)}")
    loads = port_loads(
        timings,
        wire_bytes,
        of_each,
        workers=workers,
        local_ranks=local_ranks,
        servers=servers,
        serving=serving,
    )
    travel_s = 8.0 * loads / goodput_bps
    port_s = float(travel_s.sum(axis=1).max())
    first_legs = np.zeros(len(timings))
    if clips:
        first_legs[:] = [_first_leg(one, workers, servers, serving) for one in of_each]
    pairs = [_pair_limit(timings, port, first_legs) for port in travel_s if port.sum() > 0.0]
    pair_s, pair = max(pairs, default=(0.0, ""))
    step_s = max(compute_s, port_s, pair_s)
    if step_s == compute_s:
        binding = "compute"
    elif step_s == port_s:
        binding = "port"
    else:
        binding = f"pair {pair}"
    return Bound(step_s, compute_s, port_s, pair_s, binding)


def _first_leg(scheme: str, workers: int, servers: int | None, serving: int) -> float:
    """Return the share of a tensor's bytes through the busiest port before its squares are known.

    It is half with servers on all ranks, rings and nodes. Where S of N ranks are servers, each
    receives N-1 gradients of its slices and the S-1 means of the others. All is in the first leg
    where ranks need the mean itself: of factors, or with servers that do not train.
    """
    if serving or scheme in ("sfb", "adam", "collected"):
        return 1.0
    return (workers - 1.0) / (workers + (servers or workers) - 2.0) if workers > 1 else 0.0


def describe_binding(binding: str) -> str:
    """Return what binds a bound in words, from `Bound.binding`."""
    kind, _, names = binding.partition(" ")
    if kind != "pair":
        return {"port": "the bytes of a step through a port"}.get(kind, f"the {binding}")
    ready, _, need = names.partition(" -> ")
    if ready == need:
        return f"the way of {ready}, from its gradient in backward to its use in the next forward"
    return (
        f"the way of all tensors between two: their gradients are ready in backward with that of "
        f"{ready} or later, and the next forward uses them with {need} or earlier"
    )


def _pair_limit(
    timings: Sequence[TensorTiming], travel_s: Float64Array, first_legs: Float64Array
) -> tuple[float, str]:
    """Return the largest pair term and its pair, in O(n^2): sums over a quadrant of (ready,
    need)."""
    ready_s, ready_at = np.unique([timing.ready_s for timing in timings], return_inverse=True)
    need_s, need_at = np.unique([timing.need_s for timing in timings], return_inverse=True)
    firsts = np.zeros(len(ready_s))
    seconds = np.zeros((len(ready_s), len(need_s)))
    tensors = np.zeros((len(ready_s), len(need_s)), dtype=np.int64)
    np.add.at(firsts, ready_at, first_legs * travel_s)
    np.add.at(seconds, (ready_at, need_at), (1.0 - first_legs) * travel_s)
    np.add.at(tensors, (ready_at, need_at), 1)
    # Entry (i, k) becomes the sum over ready no earlier than i and need no later than k.
    seconds = seconds[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    tensors = tensors[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)
    # Of all that is ready no earlier the first leg, and of what is needed by then the rest.
    firsts = firsts[::-1].cumsum()[::-1]
    limits = (ready_s + firsts)[:, np.newaxis] + seconds - need_s[np.newaxis, :]
    if not first_legs.any():
        # A pair without tensors between is no limit.
        limits[tensors == 0] = -np.inf
    first, last = np.unravel_index(int(limits.argmax()), limits.shape)
    ready_name = timings[int(np.flatnonzero(ready_at == first)[0])].name
    need_name = timings[int(np.flatnonzero(need_at == last)[0])].name
    return max(float(limits[first, last]), 0.0), f"{ready_name} -> {need_name}"
