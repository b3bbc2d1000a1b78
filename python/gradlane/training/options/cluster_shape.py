"""Which ranks a cluster has: those that train, by nodes, and those that own slices."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from gradlane.errors import RefusedError
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.option_fields import option, read_int
from gradlane.training.options.server_places import parse_servers


@dataclass(frozen=True)
class ClusterShape:
    """The ranks of a cluster: commands, plans, the simulator and the lab add what they need."""

    workers: int = option(doc="Ranks that train.", read=read_int)
    _: KW_ONLY
    ranks_per_node: int = option(1, "Ranks on each node, which share its port.")
    servers: int | None = option(
        None,
        "3: the first three ranks own slices; separate=2: two ranks beside the workers own them, "
        "and only serve; all workers if absent.",
        read=parse_servers,
    )
    serving: int = 0
    """Number of dedicated servers, which then own all slices, each on a node of its own."""

    def check_shape(self) -> None:
        """Check that there can be such a cluster.

        Raises:
            ValueError: there cannot; the message names what is out of its range.
        """
        if self.servers is not None and not 1 <= self.servers <= self.workers:
            raise RefusedError(f"servers is {self.servers}; use 1 to {self.workers}, the ranks")
        if unfilled := self.unfilled:
            raise RefusedError(unfilled)
        if why := refusal(self.shape_features):
            raise RefusedError(why)

    @property
    def shape_features(self) -> dict[Feature, str]:
        """The features of the ranks, each in words."""
        found = {
            Feature.SERVERS: f"servers={self.servers}" if self.servers is not None else "",
            Feature.SERVING: f"{self.serving} ranks that only serve" if self.serving else "",
            Feature.RANKS_PER_NODE: (
                f"ranks-per-node {self.ranks_per_node}" if self.ranks_per_node > 1 else ""
            ),
        }
        return {feature: words for feature, words in found.items() if words}

    @property
    def servers_refusal(self) -> str:
        """Why plans and simulations cannot have these servers on these nodes; empty if they can."""
        nodes = {Feature.PLANNED_NODES: f"{self.ranks_per_node} ranks on a node"}
        return refusal(nodes, self.shape_features) if self.ranks_per_node > 1 else ""

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
