"""Names of ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence


def ranks_text(ranks: Sequence[int], most: int = 8) -> str:
    """Return "rank 3" or "ranks 1, 3", of more than `most` the first ones."""
    shown = ", ".join(map(str, ranks[:most])) + (", …" if len(ranks) > most else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
