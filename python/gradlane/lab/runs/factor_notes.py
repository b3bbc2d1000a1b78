"""What is to be said beside rows of strategies that send factors, on a terminal and a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gradlane.training.options.options import FACTOR_SCHEMES

REPLAYED = (
    "Replayed factors: only the elements that are checked are rebuilt, and the time of the whole "
    "product is slept, at the speed of the step's own arithmetic. Digests are other ones than "
    "those of strategies without factors, since gradients and factors are invented apart."
)


def factor_notes(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what factors save by the schemes' costs and what was sent; empty without factors.

    Args:
        rows: fields of rows of one workload at one rate.
    """
    last = {str(row["strategy"]): row for row in rows}
    plain = last.get("p3", {})
    notes = []
    for strategy, row in last.items():
        by_scheme = (row.get("metrics") or {}).get("tensors_by_scheme", {})
        tensors = sum(by_scheme.get(scheme, 0) for scheme in FACTOR_SCHEMES)
        expected_bytes, sent_bytes = row.get("expected_tx_bytes"), row.get("tx_bytes_per_step")
        if not tensors or not expected_bytes or not sent_bytes:
            continue
        note = (
            f"{strategy}: factors for {tensors} tensors, {expected_bytes / 1e6:.1f} MB a port and "
            f"step by the schemes' costs, {sent_bytes / 1e6:.1f} MB sent with headers"
        )
        if plain.get("expected_tx_bytes") and plain.get("tx_bytes_per_step"):
            by_cost = expected_bytes / plain["expected_tx_bytes"]
            sent = sent_bytes / plain["tx_bytes_per_step"]
            note += f"; {by_cost:.3f} of p3's by cost, {sent:.3f} sent"
        notes.append(f"{note}.")
    return [*notes, REPLAYED] if notes else []
