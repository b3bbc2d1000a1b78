"""The options of a session, checked where they are given, not where they are used."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gradlane.training.options.codec_choice import RAW, CodecRules
from gradlane.training.options.option_fields import agreed_options, check_options, option
from gradlane.training.options.stragglers import (
    AHEAD_STEPS,
    LATE,
    WAIT,
    check_stragglers,
    parse_stragglers,
)

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
LOCAL_SUMS = ("host", "collective", "auto")
"""Where they do: in the host's memory, or where their gradients are."""
SFB = "sfb"
"""The scheme of weights whose gradient travels as factors, from every rank to every other."""
ADAM = "adam"
"""The scheme of weights whose gradient travels as factors, to one rank, which sends the mean back:
Project Adam's (Chilimbi et al., OSDI 2014), and none of the optimizer's."""
FACTOR_SCHEMES = (SFB, ADAM)
"""Schemes in which ranks send factors of gradients."""
SCHEMES = ("ps", RING, *FACTOR_SCHEMES)
"""How gradients are aggregated: on servers, round a ring, or those of linear layers and embeddings
from factors and all others on servers."""
PLAN_RULES: dict[str, tuple[str, ...]] = {"auto": ("ps",), "poseidon": (SFB, "ps")}
"""Schemes that a plan's rule chooses among: what changes no bit, and algorithm 1 of Poseidon (Zhang
et al. 2017). No rule chooses `adam`, which is there to compare with, nor `ring`, which moves as
much as servers do and adds up in another order."""


@dataclass(frozen=True)
class Options:
    """What `gradlane.init` was given; there stands what each option means, here what it may be.

    Some are kept in another form than they are given in: `codec`, `factors` (given as `scheme`),
    `prometheus` (as a port), paths.
    """

    strategy: str = option("p3", known=STRATEGIES, agreed=True)
    slice_elems: int | None = option(None, least=1, agreed=True)
    seed: int = option(0, least=0, agreed=True)
    codec: CodecRules = option(RAW, agreed=True)
    factors: str = option("", agreed=True)
    exact_order: bool = option(True, agreed=True)
    update: str = option("worker", known=UPDATES, agreed=True)
    local: str = option("off", known=LOCALS, agreed=True)
    local_sums: str = option("host", known=LOCAL_SUMS, agreed=True)
    stragglers: str = option(WAIT, agreed=True)
    late: str = option(LATE[0], known=LATE, agreed=True)
    ahead_steps: int = option(AHEAD_STEPS, least=1, agreed=True)
    servers: int | None = option(None, least=1, agreed=True)
    workers: int | None = option(None, least=1, agreed=True)
    interface: str | None = None
    advertise: str | None = None
    ports: tuple[int, int] | None = None
    silence_timeout_s: float = option(30.0, above=0)
    progress_timeout_s: float = option(1800.0, above=0)
    connect_timeout_s: float = option(300.0, above=0)
    frame_bytes: int = option(65_096, least=1, agreed=True)
    low_water_bytes: int = option(65_536, least=1)
    send_buffer_bytes: int = option(0, least=0)
    pacing: bool = True
    work_threads: int = option(1, least=0)
    io_threads: int = option(1, least=1, most=64)
    check_every: int | None = option(None, least=0, agreed=True)
    trace: bool = False
    trace_path: Path | None = None
    prometheus: tuple[str, int] | None = None
    checkpoint: Path | None = None
    checkpoint_every: int = option(1000, least=1)
    checkpoint_keep: int = option(3, least=1)
    summary: bool = True

    def __post_init__(self) -> None:
        """Check every option, and what goes with what.

        Raises:
            ValueError: an option is out of its range, or does not go with another one; the message
                names it.
        """
        check_options(self)
        if self.strategy == RING:
            self._check_ring()
        if self.strategy == ASGD:
            self._check_asgd()
        if self.factors:
            _one_of("scheme", self.factors, FACTOR_SCHEMES)
            why = factors_refusal(self.strategy, self.update)
            if why:
                raise ValueError(f"scheme is {self.factors!r}, but {why}")
        names = ("strategy", "factors", "update")
        others = {name: getattr(self, name) for name in names}
        check_stragglers(self.stragglers, self.late, others)
        if self.servers is not None and self.strategy == RING:
            raise ValueError(
                f"servers is {self.servers} with strategy 'ring', which has no servers"
            )
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
        if self.workers is not None and self.workers != world_size:
            self._check_serving(self.workers, world_size)
        rule = parse_stragglers(self.stragglers)
        if rule is not None and rule.backup >= world_size > 1:
            raise ValueError(
                f"stragglers is {self.stragglers!r} with {world_size} ranks: at least one has to "
                "contribute to each step"
            )

    def _check_serving(self, workers: int, world_size: int) -> None:
        """Check what goes with ranks that only serve."""
        if workers > world_size:
            raise ValueError(f"workers is {workers}, but there are {world_size} ranks")
        why = serving_refusal(self)
        if why:
            raise ValueError(
                f"workers is {workers} of {world_size} ranks, so that the others only serve, but "
                f"{why}"
            )

    def agreed(self) -> dict[str, object]:
        """Return the options that must be the same on every rank."""
        # To take a checkpoint is a collective call.
        every = self.checkpoint_every if self.checkpoint else 0
        return {**agreed_options(self), "checkpoint_every": every}


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
    if scheme in FACTOR_SCHEMES:
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
    return _serverless_refusal(strategy, update, "factors are not added up there")


def serving_refusal(options: Options) -> str:
    """Say why ranks that only serve do not go with other options; empty if they do."""
    if options.servers is not None:
        return (
            f"servers is {options.servers}, which makes ranks servers that train: leave it out, "
            "the ranks that do not train are the servers"
        )
    if options.strategy == RING:
        return "strategy is 'ring', which has no servers: use p3"
    if options.strategy == ASGD:
        return (
            "strategy is 'asgd', which keeps the optimizer's settings and state where the "
            "training program runs: use servers= among the ranks that train"
        )
    if options.update == "server":
        return (
            "update is 'server': the optimizer's settings and state come from the owner's own "
            "program, which these ranks do not run: use update='worker', or servers= among the "
            "ranks that train"
        )
    if options.stragglers != WAIT:
        return (
            f"stragglers is {options.stragglers!r}: owners apart do not hear who is left out; use "
            "stragglers='wait', or servers= among the ranks that train"
        )
    return ""


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
