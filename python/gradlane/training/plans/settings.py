"""The engine's settings in a plan, and the facts of the cluster that they are for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from gradlane.errors import RefusedError
from gradlane.formats.rates import format_rate, parse_rate
from gradlane.training.node.rules import AUTO, LEADER, OFF, with_local
from gradlane.training.options.cluster_shape import ClusterShape
from gradlane.training.options.codec_choice import codec_rules, rules_text
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.option_fields import option, read_int
from gradlane.training.options.option_groups import Network
from gradlane.training.options.options import Options
from gradlane.training.options.server_places import servers_text
from gradlane.training.options.stragglers import WAIT, Stragglers, parse_stragglers
from gradlane.training.options.strategy import UPDATES, Strategy, own_slice_elems, strategy_features

LEARNING_STEPS = 7
"""Training steps after which a session that finds its own plan decides. The first one is not
recorded: it sends everything at its end and includes all one-time costs."""
_FRAME_BYTES_MOST = 4 << 20
_WORKERS_MOST = 100_000


@dataclass(frozen=True)
class Settings:
    """The settings of a plan.

    All settings give the same results, bit by bit, except for the codec, for `ring` against other
    strategies, and for sums on nodes.

    Attributes:
        strategy: one of `gradlane.training.options.strategy.STRATEGIES`.
        slice_elems: most elements in a slice; None: the strategy's own choice.
        frame_bytes: payload of a frame, on fast connections up to three times as much.
        send_buffer_bytes: the kernel's send buffer, a peer; 0: fitted to the path while sending.
        codec: of gradients, in one text as `rules_text` of `training/options/codec_choice.py`
            writes it; None: the session's.
        local: sums on nodes, as in `gradlane.init`; None: the session's.
    """

    strategy: str = Strategy.name
    slice_elems: int | None = Strategy.slice_elems
    frame_bytes: int = Network.frame_bytes
    send_buffer_bytes: int = Network.send_buffer_bytes
    codec: str | None = None
    local: str | None = None

    def __post_init__(self) -> None:
        """Check every setting, and write a strategy's own slice size as None.

        Raises:
            ValueError: one is out of its range; the message names it.
        """
        self.applied_to(Options())
        if not 64 <= self.frame_bytes <= _FRAME_BYTES_MOST:
            raise RefusedError(f"frame_bytes is {self.frame_bytes}; use 64 to {_FRAME_BYTES_MOST}")
        if self.slice_elems == self._own_slice_elems:
            object.__setattr__(self, "slice_elems", None)

    @classmethod
    def of(cls, options: Options) -> Settings:
        """Return the settings of a session."""
        return cls(
            strategy=options.strategy.name,
            slice_elems=options.strategy.slice_elems,
            frame_bytes=options.network.frame_bytes,
            send_buffer_bytes=options.network.send_buffer_bytes,
            codec=None if options.codec == RAW else rules_text(options.codec),
            local=None if options.local.mode == AUTO else options.local.mode,
        )

    def applied_to(self, options: Options) -> Options:
        """Return a session's options with these settings.

        Raises:
            ValueError: a setting does not go with one of them.
        """
        changed = replace(
            options,
            strategy=replace(options.strategy, name=self.strategy, slice_elems=self.slice_elems),
            network=replace(
                options.network,
                frame_bytes=self.frame_bytes,
                send_buffer_bytes=self.send_buffer_bytes,
            ),
            codec=options.codec if self.codec is None else codec_rules(self.codec),
            local=options.local if self.local is None else replace(options.local, mode=self.local),
        )
        return with_local(changed)

    @property
    def slice_elems_in_force(self) -> int | None:
        """The slice size, also if it is the strategy's own; None if it has none."""
        return self.slice_elems or self._own_slice_elems

    @property
    def _own_slice_elems(self) -> int | None:
        return own_slice_elems(self.strategy, self.codec not in (None, RAW))

    def to_json(self) -> dict[str, Any]:
        """Return the settings with units in their names."""
        values = asdict(self)
        for name in ("codec", "local"):
            if values[name] is None:
                del values[name]
        return values

    @property
    def adds_up_on_nodes(self) -> bool:
        """True if the ranks of a node add up before anything goes to the network, where there are
        several of them."""
        return self.local not in (None, OFF)


@dataclass(frozen=True)
class ClusterFacts(ClusterShape):
    """The cluster of a plan."""

    rate_bps: float = option(
        name="rate", doc="Rate of every port, such as 10gbit.", read=parse_rate
    )
    latency_s: float = option(0.0, "One-way time between two ports.")
    update: str = option("worker", "Where the optimizer runs: worker, server.")
    stragglers: str = WAIT
    """Rule for late ranks, as in `gradlane.init`."""
    clips: bool = option(False, "Gradients are clipped by the norm of all of them.", name="clip")
    lanes: int | None = option(
        None,
        "Connections to each other rank; as many as a session takes with 12 processors if absent.",
        least=1,
        most=16,
        read=read_int,
    )

    def __post_init__(self) -> None:
        """Check every fact.

        Raises:
            ValueError: one is out of its range; the message names it.
        """
        if not 1 <= self.workers <= _WORKERS_MOST:
            raise RefusedError(f"workers is {self.workers}; use 1 to {_WORKERS_MOST:,}")
        if not 1e3 <= self.rate_bps <= 1e15:
            raise RefusedError(f"rate_bps is {self.rate_bps}; use 1e3 to 1e15 bits a second")
        if not 0.0 <= self.latency_s <= 10.0:
            raise RefusedError(f"latency_s is {self.latency_s}; use 0 to 10 seconds")
        self.check_shape()
        if why := self.servers_refusal:
            raise RefusedError(why)
        if self.update not in UPDATES:
            raise RefusedError(f"unknown update {self.update!r}; known are {', '.join(UPDATES)}")
        parse_stragglers(self.stragglers)
        features = strategy_features(Settings.strategy, self.update, stragglers=self.stragglers)
        features |= self.shape_features
        if self.clips:
            features[Feature.CLIP] = "gradients that are clipped"
        why = refusal(features)
        if why:
            raise RefusedError(why)

    @property
    def leaves_out(self) -> bool:
        """True if steps go on without late ranks."""
        return self.stragglers != WAIT

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.workers // self.ranks_per_node

    @property
    def where(self) -> str:
        """The cluster, in words."""
        owners = servers_text(self.servers, self.serving)
        owners = owners and f", {owners},"
        if self.ranks_per_node > 1:
            owners = f" on {self.nodes} nodes of {self.ranks_per_node}"
        clips = " with clipping" if self.clips else ""
        lanes = f" over {self.lanes} lanes" if self.lanes and self.lanes > 1 else ""
        return f"{self.workers} workers{owners} at {format_rate(self.rate_bps)}{lanes}{clips}"

    def to_json(self) -> dict[str, Any]:
        """Return the facts by name, without those that have their usual value: `servers` if all
        ranks are, `serving` if all ranks train, `ranks_per_node` if it is 1, `stragglers` if all
        are waited for, `clips` if nothing is clipped, and `lanes` if nobody gave them."""
        facts = asdict(self)
        if not self.leaves_out:
            del facts["stragglers"]
        if self.ranks_per_node == 1:
            del facts["ranks_per_node"]
        if self.servers is None:
            del facts["servers"]
        if not self.serving:
            del facts["serving"]
        if not self.clips:
            del facts["clips"]
        if self.lanes is None:
            del facts["lanes"]
        return facts


def local_of_session(settings: Settings, facts: ClusterFacts) -> str | None:
    """Return the sums on nodes of a session with these settings; None without nodes of several
    ranks."""
    if facts.ranks_per_node == 1 or facts.nodes == 1:
        return None
    if settings.local not in (None, AUTO):
        return settings.local
    options = Options(
        update=facts.update, servers=facts.servers, stragglers=Stragglers(facts.stragglers)
    )
    applied = replace(settings, local=AUTO).applied_to(options)
    return LEADER if applied.local.mode == AUTO else OFF
