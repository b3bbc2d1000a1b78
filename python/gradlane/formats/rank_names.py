"""Names of ranks in messages."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_MOST = 8


def ranks_text(ranks: Sequence[int]) -> str:
    """Return "rank 3" or "ranks 1, 3", of more than eight the first eight."""
    shown = ", ".join(map(str, ranks[:_SHOWN_MOST])) + (", …" if len(ranks) > _SHOWN_MOST else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
