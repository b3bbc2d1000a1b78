"""The information book: facts of a cluster and a model by name, and the best scheme of a layer.

After Poseidon (Zhang et al., USENIX ATC 2017, section 4.1): the coordinator collects "the cluster
information (e.g., the number of workers and server nodes, their IP addresses) and the model
architecture", maintains them on all nodes, and answers `Query` and `BestScheme`. `Coordinator` has
the book of a profile; `session_book` that of a model in training, from what all ranks have agreed
on, so that it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import nn

from gradlane.formats.link_report import LinkReport
from gradlane.formats.profile import Profile, ProfileTensor
from gradlane.planning.planner.reasons import scheme_reason
from gradlane.planning.schemes.costs import (
    FULLY_CONNECTED,
    SCHEMES,
    Cost,
    Counts,
    Layer,
    costs_of,
)
from gradlane.planning.schemes.layers import layers_of
from gradlane.training.factors.factored_weights import layers_by_weight
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import PLAN_RULES, RING
from gradlane.training.rendezvous.addresses import endpoint
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.rendezvous import PublishedAddress
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import parameters_of

WORKER, SERVER, BOTH = "worker", "server", "worker and server"


@dataclass(frozen=True)
class SchemeChoice:
    """The chosen scheme of one layer.

    Attributes:
        scheme: the cheapest one that the rule allows.
        costs: of each scheme that fits the layer, the cheapest first; under the rule `poseidon`
            also of `adam`, which it never chooses.
        reason: in words.
    """

    scheme: str
    costs: tuple[Cost, ...]
    reason: str


class BookedModel(Protocol):
    """A connected model."""

    model: nn.Module
    codecs: Sequence[CodecChoice]

    @property
    def trained(self) -> Sequence[TensorEntry]:
        """Its trained parameters, in the order of the tensor table."""

    @property
    def schemes(self) -> dict[str, str]:
        """Aggregation scheme of each of them, by name."""

    @property
    def ranks_each(self) -> int:
        """Number of consecutive ranks that talk to the network as one, those of a node."""

    def addresses(self) -> Sequence[PublishedAddress | None]:
        """Return where each rank listens; None for one that only talks to its own node."""


class InformationBook:
    """Entries by name, and the layers of a model."""

    def __init__(
        self,
        entries: Mapping[str, Any],
        layers: Sequence[Layer],
        servers: int,
        *,
        serving: bool,
        summing_nodes: int = 0,
    ) -> None:
        """Write the book.

        Args:
            entries: by name; `workers` among them.
            layers: of the model; the entry `layers` names them.
            servers: ranks that own slices, of a scheme with servers.
            serving: whether these train nothing.
            summing_nodes: nodes whose ranks add up before the network; 0: each rank sends its own.
        """
        self._summing_nodes = summing_nodes
        self.layers = tuple(layers)
        self._entries = {**entries, "layers": tuple(layer.name for layer in layers)}
        self._servers = servers
        self._serving = serving

    def query(self, *names: str) -> Any:
        """Read entries.

        Args:
            names: of entries, or of layers, which give their `Layer`. An entry goes before a layer
                of the same name.

        Returns:
            The value of one name, or a tuple of those of several.

        Raises:
            ValueError: no name is given, or one is unknown.
        """
        if not names:
            known = ", ".join(self._entries)
            raise ValueError(f"query() needs a name; known are {known}, and layers")
        values = tuple(
            self._entries[name] if name in self._entries else self.layer(name) for name in names
        )
        return values[0] if len(values) == 1 else values

    def layer(self, layer: str | int) -> Layer:
        """Return a layer by its name or its index.

        Raises:
            ValueError: there is no such layer.
        """
        if isinstance(layer, int) and not isinstance(layer, bool):
            if 0 <= layer < len(self.layers):
                return self.layers[layer]
            raise ValueError(f"there is no layer {layer}: they are 0 to {len(self.layers) - 1}")
        for one in self.layers:
            if one.name == layer:
                return one
        raise ValueError(
            f"the book has no {layer!r}: it has {', '.join(self._entries)}, and the layers that "
            "query('layers') names"
        )

    def best_scheme(self, layer: Layer, *, batch_size: int, rule: str) -> SchemeChoice:
        """Choose the scheme that moves the fewest numbers for a layer.

        Under the rule `poseidon` this is the paper's BestScheme (algorithm 1): factors for a fully
        connected layer where 2 K (P1 - 1) (M + N) <= 2 M N (P1 + P2 - 2) / P2, else servers.

        Args:
            layer: of this book.
            batch_size: samples of a worker: K, unless the layer knows its own rows.
            rule: a key of `PLAN_RULES`.

        Raises:
            ValueError: there is no such rule, or the batch is empty or no whole number.
        """
        if rule not in PLAN_RULES:
            raise ValueError(f"unknown rule {rule!r} of a plan; known are {', '.join(PLAN_RULES)}")
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(
                f"batch_size is {batch_size!r}; use the samples of a worker, a whole number, "
                "1 or more"
            )
        rows, workers = layer.rows or batch_size, self._entries["workers"]
        candidates = PLAN_RULES[rule]
        compared = candidates if rule == "auto" else tuple(SCHEMES)
        if self._summing_nodes:
            # A node's leader sends the factors of all its ranks once.
            rows, workers = rows * workers // self._summing_nodes, self._summing_nodes
        counts = Counts(rows, workers, self._servers, self._serving)
        costs = costs_of(layer, counts, compared)
        best = next(cost for cost in costs if cost.scheme in candidates)
        reason = scheme_reason(layer, counts, best, costs)
        if self._summing_nodes:
            reason += f", which is each of {workers} nodes: its ranks' gradients add up first"
        return SchemeChoice(best.scheme, tuple(costs), reason)


def session_book(
    booked: BookedModel, options: Options, rank_info: RankInfo, links: LinkReport | None
) -> InformationBook:
    """Write the book of a model in training.

    Args:
        booked: the model.
        options: in force for it.
        rank_info: any rank's: of it only what all ranks have in common is read.
        links: as they were measured last, the same on every rank; None: they were not.
    """
    addresses = booked.addresses()
    layers = _layers_of(booked)
    roles = [
        _role(rank, address is not None, options, rank_info)
        for rank, address in enumerate(addresses)
    ]
    entries: dict[str, Any] = {
        "job": rank_info.job,
        "ranks": rank_info.ranks,
        "workers": rank_info.world_size,
        "servers": sum(role != WORKER for role in roles),
        "roles": tuple(roles),
        "addresses": tuple(it and endpoint(it["host"], it["port"]) for it in addresses),
        "nodes": tuple(it and it["node"] for it in addresses),
        "strategy": options.strategy.name,
        "update": options.update_place,
        "model": type(booked.model).__name__,
        "gradient_bytes": sum(layer.size_bytes for layer in layers),
        "schemes": booked.schemes,
        "codecs": {choice.tensor: choice.codec for choice in booked.codecs},
    }
    if links is not None:
        entries |= {"rate_bps": links.rate_bps, "latency_s": links.latency_s}
    nodes = rank_info.world_size // booked.ranks_each if booked.ranks_each > 1 else 0
    owners = nodes or rank_info.serving or options.servers or rank_info.world_size
    return InformationBook(
        entries,
        layers,
        owners,
        serving=rank_info.serving > 0,
        summing_nodes=nodes,
    )


def _role(rank: int, is_on_network: bool, options: Options, rank_info: RankInfo) -> str:
    if rank >= rank_info.world_size:
        return SERVER
    owns = options.servers is None or rank < options.servers
    if rank_info.serving or options.strategy.name == RING or not owns or not is_on_network:
        return WORKER
    return BOTH


def _layers_of(booked: BookedModel) -> list[Layer]:
    """Return the layers as those of a profile, without times, which nobody has measured."""
    kinds: dict[int, str] = {}
    tapped = layers_by_weight(booked.model)
    for module in booked.model.modules():
        kind = str(getattr(module, "stands_for", type(module).__name__))
        own = [one for one in dict.values(parameters_of(module)) if one is not None]
        if kind in FULLY_CONNECTED and not any(id(one) in tapped for one in own):
            # Its gradient cannot be had as factors.
            kind = ""
        for parameter in own:
            kinds.setdefault(id(parameter), kind)
    tensors = []
    for entry in booked.trained:
        shape = tuple(entry.shape) + ((2,) if entry.dtype.is_complex else ())
        layer = kinds.get(id(entry.tensor)) or None
        tensors.append(ProfileTensor(entry.name, shape, entry.coded().dtype, 0.0, 0.0, layer))
    profile = Profile(type(booked.model).__name__, 1, 0.0, 0.0, tuple(tensors))
    return [replace(layer, need_s=None, ready_s=None) for layer in layers_of(profile)]
