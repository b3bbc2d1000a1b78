"""Strategies and schemes, and sums within a node: how gradients are cut, ordered and added up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradlane.errors import RefusedError
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.option_fields import OptionGroup, option, read_int
from gradlane.training.options.stragglers import WAIT

ASGD = "asgd"
"""The asynchronous strategy."""
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
SPLITTING_STRATEGIES = ("kvstore", "deferred-pull")
"""Strategies that split only tensors of a size or more, as MXNet's KVStore does, so that slices
have no common size. Workers pull results from their servers."""
RING_ENCODED_SLICE_ELEMS = 65_536
"""The same for encoded slices: a hop costs a host as much for few bytes as for many."""
UPDATES = ("worker", "server")
"""The default first."""
LOCALS = ("off", "leader", "shared", "auto")
"""Whether the ranks of a node add up before the network, and how many of them then send."""
LOCAL_SUMS = ("host", "collective", "auto")
"""Where they do: in the host's memory, or where their gradients are."""
SFB = "sfb"
"""The scheme of weights whose gradient travels as factors, from every rank to every other."""
ADAM = "adam"
"""The scheme of weights whose gradient travels as factors, to one rank, which sends the mean back:
Project Adam's (Chilimbi et al., OSDI 2014), and none of the optimizer's."""
ROWS = "rows"
"""The scheme of sparse gradients, whose rows travel from every rank to every other. Parameters have
it by themselves; nobody chooses it."""
FACTOR_SCHEMES = (SFB, ADAM)
"""Schemes in which ranks send factors of gradients."""
SCHEMES = ("ps", RING, *FACTOR_SCHEMES)
"""How gradients are aggregated: on servers, round a ring, or those of linear layers and embeddings
from factors and all others on servers."""
PLAN_RULES: dict[str, tuple[str, ...]] = {"auto": ("ps",), "poseidon": (SFB, "ps")}
"""Schemes that the rule of a plan chooses among: those that keep every bit, and algorithm 1 of
Poseidon (Zhang et al. 2017). No rule chooses `adam`, which is a baseline, nor `ring`, which moves
as many bytes as servers and adds up in another order."""


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
    """Return the number of ranks of a strategy's ring; None without a ring."""
    return world_size if strategy == RING else None


def strategy_of(strategy: str, scheme: str | None) -> str:
    """Return the strategy that results from a strategy and a scheme.

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
    if scheme == RING and strategy == STRATEGIES[0]:
        return RING
    if strategy == RING:
        ring = {Feature.RING: f'strategy="{strategy}"'}
        raise RefusedError(refusal({Feature.PS_SCHEME: f'scheme="{scheme}"'}, ring))
    others = strategy_features(strategy, UPDATES[0])
    why = refusal({Feature.RING: f'scheme="{scheme}"'}, others)
    raise RefusedError(
        why or f"scheme is 'ring', but strategy is {strategy!r}: use strategy {STRATEGIES[0]!r}"
    )


def strategy_features(
    strategy: str, update: str, factors: str = "", stragglers: str = WAIT
) -> dict[Feature, str]:
    """Return the features that the names of some settings ask for, each in these words.

    Args:
        strategy: one of `STRATEGIES`.
        update: one of `UPDATES`.
        factors: one of `FACTOR_SCHEMES`, or empty.
        stragglers: the rule.
    """
    named = {RING: Feature.RING, ASGD: Feature.ASGD}
    named |= dict.fromkeys(SPLITTING_STRATEGIES, Feature.PULLS)
    found = {named[strategy]: f'strategy="{strategy}"'} if strategy in named else {}
    if update == UPDATES[1]:
        found[Feature.SERVER] = f'update="{update}"'
    if factors:
        found[Feature.FACTORS] = f'scheme="{factors}"'
    if factors == ADAM:
        found[Feature.ONE_OWNER] = f'scheme="{factors}"'
    if stragglers != WAIT:
        found[Feature.STRAGGLERS] = f'stragglers="{stragglers}"'
    return found


def plan_features(rule: str, schemes: Mapping[str, str] | None) -> dict[Feature, str]:
    """Return the features of a plan, or of a rule that will find one, each in words.

    Args:
        rule: one of `PLAN_RULES`, or empty.
        schemes: of a plan, by the name of a tensor; None: the rule chooses them.
    """
    found = {Feature.PLAN_RULE: f'prepare(plan="{rule}")'} if rule else {}
    kinds = {RING: Feature.PLAN_RING} | dict.fromkeys(FACTOR_SCHEMES, Feature.PLAN_FACTORS)
    chosen = [("some layers", one) for one in PLAN_RULES.get(rule, ())]
    for name, scheme in chosen if schemes is None else schemes.items():
        if scheme in kinds:
            found.setdefault(kinds[scheme], f"a plan that has scheme {scheme!r} for {name!r}")
    return found


def ring_refusal(strategy: str, update: str) -> str:
    """Return why no tensor can go round a ring under these settings; empty if some can.

    Args:
        strategy: one of `STRATEGIES`.
        update: one of `UPDATES`.
    """
    return refusal({Feature.RING: "a ring"}, strategy_features(strategy, update))


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RefusedError(f"unknown {name} {value!r}; known are {', '.join(known)}")


@dataclass(frozen=True, repr=False)
class Strategy(OptionGroup):
    """How gradients are cut, ordered and added up."""

    name: str = option(
        STRATEGIES[0],
        "`p3`, `slicing`, `wfbp`, `kvstore` and `deferred-pull` give the same results; `ring` "
        "gives them at two ranks and other roundings at more (`docs/ring.md`); `asgd` is "
        "asynchronous: each rank's gradients are applied alone, and no rank waits for another "
        "(`docs/asynchronous.md`).",
        name="strategy",
        known=STRATEGIES,
        agreed=True,
    )
    scheme: str | None = option(
        None,
        "`ps`: gradients are added up on servers; `ring`: round a ring, which makes `p3` the "
        "strategy `ring`; `sfb`: weights of linear layers and embeddings travel as factors, from "
        "every rank to every other; `adam`: as factors to one rank, which sends the mean to all "
        "(`docs/factors.md`); the strategy's own if absent.",
        known=SCHEMES,
        agreed=True,
    )
    slice_elems: int | None = option(
        None,
        "Elements in a slice at most; with `kvstore` and `deferred-pull`, the first size of a "
        "tensor that is split, one part a server, where smaller ones go whole. The strategy's own "
        "if absent (1,000,000 in these two).",
        unit="elements",
        least=1,
        agreed=True,
        read=read_int,
    )
    seed: int = option(
        0,
        "Places whole tensors where a strategy draws their server, and decides how codecs round.",
        least=0,
        agreed=True,
    )
    exact_order: bool = option(
        True,
        "A plan that is found keeps to sums in rank order and changes no bit. False: it may choose "
        "a ring or factors, and `local_sums` of `auto` collectives, whose results differ in the "
        "last bits (`docs/planning.md`).",
        agreed=True,
    )

    def __post_init__(self) -> None:
        """Check every option, and write a scheme that is a strategy as one.

        Raises:
            ValueError: an option is out of its range, or does not go with another one.
        """
        super().__post_init__()
        object.__setattr__(self, "name", strategy_of(self.name, self.scheme))
        object.__setattr__(self, "scheme", self.factors or None)

    @property
    def factors(self) -> str:
        """The scheme in which ranks send factors of gradients; empty where they do not."""
        return self.scheme if self.scheme in FACTOR_SCHEMES else ""


@dataclass(frozen=True, repr=False)
class LocalSums(OptionGroup):
    """Whether and where the ranks of a node add up before the network."""

    mode: str = option(
        "auto",
        "`off`: each rank talks to all others by itself; `leader`: the ranks of a node add up in "
        "shared memory, and the first one talks to the network for all; `shared`: each does, for "
        "its share; `auto`: `leader` where there are several nodes of several ranks and it goes "
        "with the other options, else `off`. Sums are then taken node by node, another rounding "
        "than in the order of ranks (`docs/several-accelerators.md`).",
        name="local",
        known=LOCALS,
        agreed=True,
    )
    where: str = option(
        "host",
        "`host`: in shared memory; `collective`: where the gradients are, in a group of "
        "torch.distributed's (NCCL on CUDA devices, Gloo in plain memory), so that only ranks that "
        "talk to the network copy to the host; `auto`: the latter where all gradients are on CUDA "
        "devices and no bit changes (two ranks a node), or `exact_order` is off.",
        name="local_sums",
        known=LOCAL_SUMS,
        agreed=True,
    )
