"""Options of a group."""

from __future__ import annotations

from dataclasses import dataclass, field

from gradlane.training.options.option_groups import Network


@dataclass(frozen=True)
class GroupOptions:
    """Options for `init_process_group("gradlane", pg_options=...)` and `new_group`.

    Args:
        network: addresses, ports, secret, sealing, `connect_timeout_s` and `silence_timeout_s`;
            what is not given is read from the environment, as for `gradlane.init`. Its other
            options have no effect here.
        spin_us: microseconds for which a waiting thread asks its sockets again and again before it
            sleeps. It shortens waits where each rank has a processor of its own, and wastes time
            where several share one.
    """

    network: Network = field(default_factory=Network)
    spin_us: int = 0

    def __post_init__(self) -> None:
        """Check the range of `spin_us`."""
        if not 0 <= self.spin_us <= 1_000_000:
            raise ValueError(f"spin_us is {self.spin_us}; it must be 0 to 1000000")
