"""When a row is evidence: what it measures must be the network, not the machine it ran on."""

from __future__ import annotations

CPU_BOUND_SHARE = 0.8
"""Above this busy share of the machine's processors, a row measures them."""
STOLEN_SHARE_MAX = 0.03
"""Above this share of their time a row measures other virtual machines on the same host: ports are
shaped by timers, and ranks wake up late. With 10 to 25 % the goodput of plain TCP streams was up to
11 % lower, and steps took up to a quarter longer (`awake.py` says what is done about it)."""
NO_EVIDENCE = (
    f"over {CPU_BOUND_SHARE:.0%} of this machine's processors busy, or over {STOLEN_SHARE_MAX:.0%} "
    "of their time taken by other virtual machines: no evidence"
)


def measures_machine(cpu_share: float, stolen_share: float) -> bool:
    """Whether a row is no evidence.

    Args:
        cpu_share: busy share, 0 to 1, of all processors, by whomever.
        stolen_share: share of their time that the host of this virtual machine gave to others.
    """
    return cpu_share > CPU_BOUND_SHARE or stolen_share > STOLEN_SHARE_MAX
