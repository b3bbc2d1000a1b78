"""Limits of an emulated cluster, checked before anything of the kernel's is loaded."""

from __future__ import annotations

NODES_MAX = 250


def check_port_rate(rate_bps: int) -> None:
    """Refuse rates that cannot be shaped.

    Args:
        rate_bps: bits a second on the wire, headers included; real, not nominal.

    Raises:
        ValueError: the rate is under 1 Mbit/s or over 100 Gbit/s.
    """
    if not 10**6 <= rate_bps <= 10**11:
        raise ValueError(
            f"cannot shape a port to {rate_bps} bit/s: choose 1 Mbit/s to 100 Gbit/s (after "
            "division by the dilation)"
        )
