"""Step time of layers with different aggregation schemes, from bytes alone.

This small model complements the engine's simulator for whole layers on one server, which the engine
does not run, and for node traffic by count (Poseidon, Zhang et al. 2017). Every node is worker and
server, with one full-duplex port. A layer sends and receives table 1's count of numbers. A port
carries them in the order in which gradients are ready, as in wait-free backpropagation, and the
next step begins when all are there.

The result is a lower limit: it ignores latency, hosts, sums, frames, and that one node's sending
waits for another's receiving (except for whole layers on one server, whose replies wait for what
the server receives). `tests/planning/schemes/test_step_time.py` compares it with the engine for the
schemes of both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gradlane.planning.schemes.costs import Layer

WHOLE = "whole"
"""A whole layer on one server, its gradient pushed and pulled, as in frameworks without slices. Not
a scheme of plans."""
ORDERS = ("ready", "after")
"""Start of sending: as soon as a gradient is ready, or after backward."""


@dataclass(frozen=True)
class Traffic:
    """Bytes of one layer through the port of one node."""

    sends: float
    """Sent, as `receives` is received, once the gradient is ready."""
    receives: float
    replies: float = 0.0
    """Sent once all of `receives` is there."""
    reply_receives: float = 0.0
    """Received once the owner replies."""


@dataclass(frozen=True)
class HybridStep:
    """The predicted step.

    Attributes:
        step_s: its time.
        compute_s: time that the accelerator works, rebuilding of gradients included.
        rebuild_s: time for rebuilding gradients from factors, of that.
        node_bytes: bytes that each node sends and receives, together.
    """

    step_s: float
    compute_s: float
    rebuild_s: float
    node_bytes: tuple[float, ...]

    @property
    def stall_share(self) -> float:
        """Share of the step in which the accelerator waits."""
        return 1.0 - self.compute_s / self.step_s


@dataclass(frozen=True)
class NodeCluster:
    """A cluster of equal nodes, each worker and server, unless there are dedicated servers.

    Attributes:
        count: of them.
        goodput_bps: bits a second of payload that a port carries each way.
        operations_per_s: of the accelerator, for rebuilding gradients; infinite: that is free.
        serving: number of dedicated servers besides these nodes.
    """

    count: int
    goodput_bps: float
    operations_per_s: float = math.inf
    serving: int = 0


def hybrid_step(
    layers: Sequence[Layer],
    schemes: Mapping[str, str],
    nodes: NodeCluster,
    *,
    batch_rows: int,
    compute_s: float,
    order: str = "ready",
    bytes_share: float = 1.0,
) -> HybridStep:
    """Return the step time and the traffic of each node's port.

    Args:
        layers: of the model, with the moments at which their gradients are ready.
        schemes: by the name of the layer: `ps`, `sfb`, `adam` or `whole`.
        nodes: the cluster.
        batch_rows: rows of the factors of layers without a count of their own.
        compute_s: forward and backward.
        order: one of `ORDERS`.
        bytes_share: bytes on the wire over bytes of the gradient.

    Raises:
        ValueError: unknown order or scheme, or factors of a layer that has none.
    """
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r}; choose {' or '.join(ORDERS)}")
    count = nodes.count
    bytes_per_s = nodes.goodput_bps / 8.0
    all_nodes = range(count + nodes.serving)
    out = [_PortDirection(bytes_per_s) for _ in all_nodes]
    into = [_PortDirection(bytes_per_s) for _ in all_nodes]
    rebuilt_s, end_s, owner = 0.0, 0.0, -1
    for layer in sorted(layers, key=lambda one: one.ready_s or 0.0):
        scheme = schemes[layer.name]
        if scheme in ("adam", WHOLE):
            owner = (owner + 1) % count
        rebuild_s = _rebuild_s(layer, scheme, nodes, batch_rows)
        ready_s = (layer.ready_s or 0.0) if order == "ready" else compute_s
        traffic = [
            _traffic(layer, scheme, node == owner, nodes, batch_rows, bytes_share)
            if node < count
            else _server_traffic(layer, scheme, nodes, bytes_share)
            for node in all_nodes
        ]
        moments = [out[node].transfer(ready_s, traffic[node].sends) for node in all_nodes]
        moments += [into[node].transfer(ready_s, traffic[node].receives) for node in all_nodes]
        if any(one.replies for one in traffic):
            # Project Adam's server makes the gradient of the factors before it answers.
            answer_s = max(moments) + rebuild_s
            moments += [out[node].transfer(answer_s, traffic[node].replies) for node in all_nodes]
            moments += [
                into[node].transfer(answer_s, traffic[node].reply_receives) for node in all_nodes
            ]
        elif rebuild_s > 0.0:
            rebuilt_s += rebuild_s
            moments.append(max(moments) + rebuild_s)
        end_s = max(end_s, *moments)
    return HybridStep(
        step_s=max(compute_s + rebuilt_s, end_s),
        compute_s=compute_s + rebuilt_s,
        rebuild_s=rebuilt_s,
        node_bytes=tuple(
            one.transferred_bytes + other.transferred_bytes
            for one, other in zip(out, into, strict=True)
        ),
    )


def _rebuild_s(layer: Layer, scheme: str, nodes: NodeCluster, batch_rows: int) -> float:
    """Return the time for multiplying the other workers' factors; backward multiplies the own
    ones."""
    if nodes.count == 1 or scheme not in ("sfb", "adam") or layer.matrix is None:
        return 0.0
    rows, columns = layer.matrix
    vectors = (nodes.count - 1) * (layer.rows or batch_rows)
    return 2.0 * vectors * rows * columns / nodes.operations_per_s


class _PortDirection:
    """One direction of a port, which transfers one layer after another."""

    def __init__(self, bytes_per_s: float) -> None:
        self.transferred_bytes = 0.0
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def transfer(self, ready_s: float, size_bytes: float) -> float:
        """Transfer bytes that are ready at a moment; return when the transfer ends."""
        if size_bytes <= 0.0:
            return ready_s
        self.transferred_bytes += size_bytes
        self._free_s = max(self._free_s, ready_s) + size_bytes / self._bytes_per_s
        return self._free_s


def _traffic(
    layer: Layer, scheme: str, owns: bool, nodes: NodeCluster, batch_rows: int, bytes_share: float
) -> Traffic:
    """Return a layer's traffic for the port of one node: table 1, split into sent and received."""
    whole, count = layer.size_bytes * bytes_share, nodes.count
    if scheme == "ps":
        # To and from the others' shards, and as many for the own shard, where there is one.
        direction_bytes = whole if nodes.serving else 2.0 * (count - 1) / count * whole
        return Traffic(direction_bytes, direction_bytes)
    if scheme == WHOLE:
        factor_bytes = whole
    elif layer.matrix is None:
        raise ValueError(f"layer {layer.name!r} has no factors: its scheme cannot be {scheme!r}")
    else:
        element_bytes = layer.size_bytes / layer.elements
        factor_bytes = (layer.rows or batch_rows) * sum(layer.matrix) * element_bytes
    if scheme == "sfb":
        direction_bytes = (count - 1) * factor_bytes
        return Traffic(direction_bytes, direction_bytes)
    if scheme not in ("adam", WHOLE):
        raise ValueError(f"unknown scheme {scheme!r}")
    if owns:
        return Traffic(0.0, (count - 1) * factor_bytes, replies=(count - 1) * whole)
    return Traffic(factor_bytes, 0.0, reply_receives=whole)


def _server_traffic(layer: Layer, scheme: str, nodes: NodeCluster, bytes_share: float) -> Traffic:
    """Return a layer's traffic for the port of a dedicated server."""
    if scheme != "ps":
        return Traffic(0.0, 0.0)
    direction_bytes = nodes.count / nodes.serving * layer.size_bytes * bytes_share
    return Traffic(direction_bytes, direction_bytes)
