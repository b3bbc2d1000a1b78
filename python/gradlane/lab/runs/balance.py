"""How evenly a run's traffic was spread over nodes, and what ranks own over ranks."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

EVEN_BELOW = 1.1
"""What is uneven by less, largest over mean, is not worth a line."""


def imbalance(values: Sequence[float]) -> float:
    """Return the largest over the mean; 1.0 where there is nothing."""
    mean = statistics.fmean(values) if values else 0.0
    return max(values) / mean if mean > 0 else 1.0


def balance_of(
    ports: Sequence[tuple[float, float]], ranks: Sequence[Mapping[str, Any]], steps: int
) -> dict[str, Any]:
    """Return the balance of a run as it is kept in its row.

    Args:
        ports: (received, sent) bytes of each node in all these steps.
        ranks: what each rank counted in them as an owner, as `Communication.owner_counters` says;
            empty where nobody owns anything.
        steps: between two moments at which nobody had anything to send.

    Returns:
        `nodes`: rows of `node`, `rx_bytes_per_step` and `tx_bytes_per_step` through its port;
        `owners`: rows of `rank`, `owned_bytes` (of gradients that it adds up or makes for all), and
        `rx_bytes_per_step` and `tx_bytes_per_step` of payloads to and from it as their owner; and
        `port_imbalance`, of the busier direction of each port, and `owned_imbalance`, both largest
        over mean.
    """
    busier = [max(pair) for pair in ports]
    owned = [int(rank["owned_bytes"]) for rank in ranks]
    return {
        "nodes": [
            {"node": node, "rx_bytes_per_step": rx / steps, "tx_bytes_per_step": tx / steps}
            for node, (rx, tx) in enumerate(ports)
        ],
        "owners": [
            {
                "rank": number,
                "owned_bytes": owned[number],
                "rx_bytes_per_step": rank["rx_bytes"] / steps,
                "tx_bytes_per_step": rank["tx_bytes"] / steps,
            }
            for number, rank in enumerate(ranks)
        ],
        "port_imbalance": imbalance(busier),
        "owned_imbalance": imbalance(owned),
    }


def balance_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for each strategy whose ports or owners are uneven.

    Args:
        rows: fields of rows of one workload at one rate.
    """
    last = {
        str(row["strategy"]): row.get("balance") or {}
        for row in rows
        if row["strategy"] != "none"  # Greetings alone are uneven, and nobody minds.
    }
    notes = []
    for strategy, balance in last.items():
        if max(_of(balance, "port_imbalance"), _of(balance, "owned_imbalance")) < EVEN_BELOW:
            continue
        nodes = balance["nodes"]
        busiest = max(nodes, key=_busier)
        least = min(_busier(node) for node in nodes)
        note = (
            f"{strategy}: node {busiest['node']} is busiest with {_busier(busiest) / 1e6:.1f} MB a "
            f"step one way, {balance['port_imbalance']:.2f} times the mean; the least busy has "
            f"{least / 1e6:.1f} MB"
        )
        owners = balance.get("owners") or []
        if any(owner["owned_bytes"] for owner in owners):
            most = max(owners, key=lambda owner: int(owner["owned_bytes"]))
            note += (
                f"; rank {most['rank']} owns {most['owned_bytes'] / 1e6:.1f} MB, "
                f"{balance['owned_imbalance']:.2f} times the mean"
            )
        notes.append(f"{note}.")
    return notes


def _of(balance: Mapping[str, Any], name: str) -> float:
    return float(balance.get(name, 1.0))


def _busier(node: Mapping[str, Any]) -> float:
    return max(float(node["rx_bytes_per_step"]), float(node["tx_bytes_per_step"]))
