"""The options of a session, checked where they are given, not where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradlane.codec_choice import RAW, CodecRules
from gradlane.stragglers import AHEAD_STEPS, LATE, WAIT, check_stragglers, parse_stragglers

ASGD = "asgd"
"""The strategy in which nobody waits for anybody else's gradients."""
RING = "ring"
"""The strategy that is p3 round a ring, and the scheme of its tensors."""
EXACT_STRATEGIES = ("p3", "slicing", "wfbp", "kvstore", "deferred-pull")
"""Strategies that give the same results to the last bit: those of synchronous training on servers,
which add up in rank order."""
STRATEGIES = (*EXACT_STRATEGIES, RING, ASGD)
SLICE_ELEMS = {
    "p3": 50_000,
    "slicing": 50_000,
    "wfbp": (2 << 20) // 4,
    RING: 16_384,
    ASGD: 50_000,
}
"""The engine's own slice sizes of the strategies that cut every tensor into slices; a ring's slices
are never larger."""
RING_ENCODED_SLICE_ELEMS = 65_536
"""The same for encoded slices: a hop costs a host as much for few bytes as for many."""
UPDATES = ("worker", "server")
LOCALS = ("off", "leader", "shared", "auto")
"""Whether the ranks of a node add up before the network, and how many of them then send."""
SFB = "sfb"
"""The scheme of weights whose gradient travels as factors, from every rank to every other."""
FACTOR_SCHEMES = (SFB,)
"""Schemes in which ranks send factors of gradients."""
SCHEMES = ("ps", RING, SFB)
"""How gradients are aggregated: on servers, round a ring, or those of linear layers and embeddings
from factors and all others on servers."""


@dataclass(frozen=True)
class Options:
    """What `gradlane.init` was given; its defaults are these.

    Attributes:
        strategy: one of `STRATEGIES`.
        slice_elems: elements in a slice at most; None is the strategy's own choice.
        seed: places whole tensors on servers where the strategy draws them, and decides how codecs
            round.
        codec: how gradients travel: one codec, or patterns with theirs; `raw` is none.
        factors: whether weights of linear layers and embeddings travel as factors.
        exact_order: whether a plan that is found keeps to sums in rank order: it changes no bit.
        update: `"worker"`: any per-parameter optimizer on every rank; `"server"`: SGD,
            Adam or AdamW on the owner.
        local: one of `LOCALS`.
        stragglers: `"wait"`, `"drop"`, `"drop=FACTOR"` or `"backup=RANKS"`.
        late: what becomes of gradients that a step went on without: one of `LATE`.
        ahead_steps: how many steps may be decided ahead of the slowest rank.
        servers: the first so many ranks own slices; None: all.
        interface: network interface to use, or None.
        advertise: address or name that other ranks reach this one at, or None.
        ports: lowest and highest port to listen on, or None for any.
        silence_timeout_s: a rank that sends nothing for so long is lost.
        progress_timeout_s: how long to wait for ranks that are alive but do not take part.
        connect_timeout_s: how long to wait for all ranks to appear.
        frame_bytes: largest payload of a frame; what an urgent slice waits for at most, a peer.
        low_water_bytes: bytes that may wait unsent in the kernel, a peer.
        send_buffer_bytes: the kernel's send buffer, a peer; 0: fitted to the path while sending.
        work_threads: threads that add gradients up; 0: the thread that drives the sockets does.
        check_every: compare all ranks' parameters every so many steps; 0 is never.
        trace: keep a trace of frames for `Session.take_trace`.
        trace_path: write a timeline to this file at the end, each rank its own; or None.
        prometheus: host and port to answer Prometheus at, this rank's own; or None.
        checkpoint: folder that checkpoints are written to, shared by all ranks; or None.
        checkpoint_every: training steps from one checkpoint to the next.
        checkpoint_keep: complete checkpoints that are kept.
        summary: whether rank 0 prints a line at the end: what the steps have waited for.
    """

    strategy: str = "p3"
    slice_elems: int | None = None
    seed: int = 0
    codec: CodecRules = RAW
    factors: bool = False
    exact_order: bool = True
    update: str = "worker"
    local: str = "off"
    stragglers: str = WAIT
    late: str = LATE[0]
    ahead_steps: int = AHEAD_STEPS
    servers: int | None = None
    interface: str | None = None
    advertise: str | None = None
    ports: tuple[int, int] | None = None
    silence_timeout_s: float = 30.0
    progress_timeout_s: float = 1800.0
    connect_timeout_s: float = 300.0
    frame_bytes: int = 65_536
    low_water_bytes: int = 65_536
    send_buffer_bytes: int = 0
    work_threads: int = 1
    check_every: int = 0
    trace: bool = False
    trace_path: Path | None = None
    prometheus: tuple[str, int] | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = 1000
    checkpoint_keep: int = 3
    summary: bool = True

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        _one_of("strategy", self.strategy, STRATEGIES)
        _one_of("update", self.update, UPDATES)
        _one_of("local", self.local, LOCALS)
        if self.strategy == RING:
            self._check_ring()
        if self.strategy == ASGD:
            self._check_asgd()
        if self.factors:
            why = factors_refusal(self.strategy, self.update)
            if why:
                raise ValueError(f"scheme is 'sfb', but {why}")
        names = ("strategy", "factors", "update", "codec", "check_every", "checkpoint")
        others = {name: getattr(self, name) for name in names}
        check_stragglers(self.stragglers, self.late, self.ahead_steps, others)
        if self.servers is not None and self.servers < 1:
            raise ValueError(f"servers is {self.servers}; at least one rank owns slices")
        if self.servers is not None and self.strategy == RING:
            raise ValueError(
                f"servers is {self.servers} with strategy 'ring', which has no servers"
            )
        if self.slice_elems is not None and self.slice_elems < 1:
            raise ValueError(f"slice_elems is {self.slice_elems}; a slice has 1 element or more")
        for name in ("silence_timeout_s", "progress_timeout_s", "connect_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be above 0 seconds")
        for name in ("frame_bytes", "low_water_bytes", "checkpoint_every", "checkpoint_keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("send_buffer_bytes", "work_threads", "check_every", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.trace_path is not None and not self.trace_path.absolute().parent.is_dir():
            raise ValueError(f"trace_path is {self.trace_path}, whose folder does not exist")
        if self.prometheus is not None and not 0 <= self.prometheus[1] <= 65535:
            raise ValueError(f"prometheus_port is {self.prometheus[1]}; it must be 0 to 65535")
        if self.ports is not None:
            low, high = self.ports
            if not 1 <= low <= high <= 65535:
                raise ValueError(f"ports is {self.ports}; it must be (low, high) in 1 to 65535")

    def _check_ring(self) -> None:
        why = ring_refusal(self.strategy, self.update)
        if why:
            raise ValueError(f"strategy is 'ring', but {why}")

    def _check_asgd(self) -> None:
        if self.update != "server":
            raise ValueError(
                f'strategy="asgd" with update={self.update!r}: each gradient is applied alone, '
                'where the parameters are kept for all ranks, so it asks for update="server"; '
                "otherwise every rank would train a model of its own"
            )
        if self.codec != RAW:
            raise ValueError(
                f'codec {self.codec!r} with strategy="asgd": pushes that are applied alone are not '
                "encoded; use another strategy, or no codec"
            )
        if self.check_every:
            raise ValueError(
                f'check_every is {self.check_every} with strategy="asgd": the ranks\' parameters '
                "differ while they train, so there is nothing to compare; use 0"
            )

    @property
    def is_asynchronous(self) -> bool:
        """Whether ranks train without waiting for each other."""
        return self.strategy == ASGD

    @property
    def leaves_out(self) -> bool:
        """Whether steps go on without ranks that are late."""
        return self.stragglers != WAIT

    def check_world(self, world_size: int) -> None:
        """Check the options that depend on the number of ranks.

        Raises:
            ValueError: one does not go with it.
        """
        if self.servers is not None and self.servers > world_size:
            raise ValueError(f"servers is {self.servers}, but there are {world_size} ranks")
        rule = parse_stragglers(self.stragglers)
        if rule is not None and rule.backup >= world_size > 1:
            raise ValueError(
                f"stragglers is {self.stragglers!r} with {world_size} ranks: at least one has to "
                "contribute to each step"
            )

    def agreed(self) -> dict[str, object]:
        """Return the options that must be the same on every rank."""
        names = (
            "strategy",
            "slice_elems",
            "seed",
            "codec",
            "factors",
            "exact_order",
            "update",
            "local",
            "frame_bytes",
            "check_every",
            "stragglers",
            "late",
            "ahead_steps",
            "servers",
        )
        own = {name: getattr(self, name) for name in names}
        # To take one is a collective call.
        return {**own, "checkpoint_every": self.checkpoint_every if self.checkpoint else 0}


def own_slice_elems(strategy: str, encoded: bool) -> int | None:
    """Return the engine's own slice size, in elements; None where slices have no common size.

    Args:
        strategy: one of `STRATEGIES`.
        encoded: whether gradients travel in a codec.
    """
    if strategy == RING and encoded:
        return RING_ENCODED_SLICE_ELEMS
    return SLICE_ELEMS.get(strategy)


def ring_ranks(strategy: str, world_size: int) -> int | None:
    """Return of how many ranks the ring is that a strategy's tensors go round; None: of none."""
    return world_size if strategy == RING else None


def strategy_of(strategy: str, scheme: str | None) -> str:
    """Return the strategy that another one is with a scheme.

    Args:
        strategy: one of `STRATEGIES`.
        scheme: one of `SCHEMES`, or None: the strategy's own.

    Raises:
        ValueError: the scheme is unknown, or does not go with the strategy.
    """
    if scheme is None:
        return strategy
    _one_of("scheme", scheme, SCHEMES)
    if scheme == SFB:
        return strategy
    if (scheme == RING) == (strategy == RING):
        return strategy
    if scheme == RING and strategy == Options.strategy:
        return RING
    if strategy == RING:
        raise ValueError("scheme is 'ps', but strategy 'ring' goes round a ring: use strategy 'p3'")
    why = ring_refusal(strategy, Options.update)
    raise ValueError(
        f"scheme is 'ring', but {why or f'not offered with strategy {strategy!r}'}: use strategy "
        f"{Options.strategy!r}"
    )


def ring_refusal(strategy: str, update: str) -> str:
    """Say why tensors cannot go round a ring under these settings; empty if they can.

    Args:
        strategy: one of `STRATEGIES`.
        update: one of `UPDATES`.
    """
    return _serverless_refusal(strategy, update, "a ring has none")


def factors_refusal(strategy: str, update: str) -> str:
    """Say why no tensor can travel as factors under these settings; empty if some can.

    Args:
        strategy: one of `STRATEGIES`.
        update: one of `UPDATES`.
    """
    return _serverless_refusal(strategy, update, "factors go to every rank instead")


def _serverless_refusal(strategy: str, update: str, why: str) -> str:
    if update == "server":
        return (
            "update is 'server', which keeps optimizer state on the servers that own slices, and "
            f"{why}: use update='worker'"
        )
    if strategy in ("kvstore", "deferred-pull"):
        return f"in strategy {strategy!r} workers pull from servers, and {why}"
    return ""


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"unknown {name} {value!r}; known are {', '.join(known)}")
