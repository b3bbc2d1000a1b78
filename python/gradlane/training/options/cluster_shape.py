"""Which ranks a cluster has: those that train, by nodes, and those that own slices."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.training.options.compatibility import Feature, refusal


@dataclass(frozen=True)
class ClusterShape:
    """The ranks of a cluster, as commands, plans, the simulator and the lab describe them.

    Attributes:
        workers: ranks that train.
        ranks_per_node: how many of them share a node and its port.
        servers: number of workers that own slices, the first ones; None: all.
        serving: number of dedicated servers, which then own all slices, each on a node of its own.
    """

    workers: int
    ranks_per_node: int = 1
    servers: int | None = None
    serving: int = 0

    def check(self) -> None:
        """Check that there can be such a cluster.

        Raises:
            ValueError: there cannot; the message names what is out of its range.
        """
        if self.servers is not None and not 1 <= self.servers <= self.workers:
            raise ValueError(f"servers is {self.servers}; use 1 to {self.workers}, the ranks")
        if unfilled := self.unfilled:
            raise ValueError(unfilled)
        if self.serving and self.ranks_per_node > 1:
            raise ValueError(
                f"{self.serving} ranks only serve, each on a node of its own: leave out "
                f"ranks-per-node, which is {self.ranks_per_node}"
            )
        if self.serving and self.servers is not None:
            serving = {Feature.SERVING: f"{self.serving} ranks that only serve"}
            raise ValueError(refusal(serving, {Feature.SERVERS: f"servers={self.servers}"}))

    @property
    def unfilled(self) -> str:
        """Why the workers do not fill the nodes; empty if they do."""
        if self.ranks_per_node < 1 or self.workers % self.ranks_per_node:
            return f"{self.workers} workers do not fill nodes of {self.ranks_per_node}"
        return ""

    @property
    def needs_no_network(self) -> str:
        """Why nothing passes a network between nodes of several ranks; empty if something does."""
        if self.workers == self.ranks_per_node > 1:
            node = f"one node of {self.ranks_per_node}"
            return f"{self.workers} workers are {node}, which needs no network"
        return ""

    @property
    def machines(self) -> int:
        """Number of nodes, those of dedicated servers included."""
        return self.workers // self.ranks_per_node + self.serving

    @property
    def ranks(self) -> int:
        """Number of ranks, dedicated servers included."""
        return self.workers + self.serving

    @property
    def owners(self) -> int:
        """Number of ranks that own slices."""
        return self.serving or self.servers or self.workers
