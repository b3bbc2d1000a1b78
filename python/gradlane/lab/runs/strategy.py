"""Names of communication strategies as the command line spells them.

Parsing needs no torch, so that mistakes are found before anything is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gradlane.training.node.rules import COLLECTIVE, NODE_STRATEGIES
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.local_updates import NAME as LOCAL
from gradlane.training.options.local_updates import Local, parse_local
from gradlane.training.options.option_groups import Network
from gradlane.training.options.options import Options
from gradlane.training.options.stragglers import WAIT, Stragglers, parse_stragglers
from gradlane.training.options.strategy import (
    ASGD,
    FACTOR_SCHEMES,
    RING,
    STRATEGIES,
    LocalSums,
    Strategy,
    own_slice_elems,
    strategy_features,
)
from gradlane.training.plans.settings import LEARNING_STEPS

AUTO = "auto"
"""The strategy that is none: gradlane finds its settings while training."""
POSEIDON = "poseidon"
"""p3 with the scheme of each layer by Poseidon's rule."""

GOING_ON = "going-on"
"""Behind `p3/`: training would go on without lost ranks."""

SEALED = "sealed"
"""Behind `p3/`: all that ranks send each other is encrypted and authenticated."""

LANES = "lanes="
"""Behind `p3/`, before a number: connections of a pair of ranks."""

ANY_ROUNDING = "any-rounding"
"""Behind `auto:`: it may choose a ring or factors, whose results differ in the last bits."""

DDP_BUCKET_MB_DEFAULT = 25.0

Family = Literal["none", "ddp-gloo", "ddp-gather", "gradlane"]


_ALONE = LocalSums("off")


@dataclass(frozen=True)
class LabStrategy:
    """One way to communicate.

    Attributes:
        text: as it was written; it names the strategy in results.
        family: what implements it.
        setting: the gradlane strategy, or `auto`: what gradlane finds by itself, or `poseidon`, or
            one of `FACTOR_SCHEMES`; empty in the other families.
        bucket_mb: DDP's bucket size in MiB, as torch counts it; 0 in the other families.
        stragglers: written after the name, as in `p3/backup=1` or `p3/backup=1:carry`.
        going_on: whether training would go on without lost ranks, as in `gradlane.init`; written
            after the name, as in `p3/going-on`.
        sealed: whether ranks have a secret, so that connections are sealed; written after the name,
            as in `p3/sealed`.
        lanes: connections of a pair of ranks, as in `gradlane.Network`; written after the name, as
            in `p3/lanes=2`. None: as a session takes by itself.
        hook: what encodes DDP's gradients: `fp16`, `bfloat16` and `powersgd[:RANK]` of PyTorch's
            own, or a codec for `gradlane.ddp.ddp_hook`; empty where nothing does.
        local: what gradlane's ranks of one node add up.
        any_rounding: whether what gradlane finds may add up in another order than that of the
            ranks.
        rounds: local updates, written after the name, as in `p3/local:steps=8`; None: ranks
            exchange in each step.
    """

    text: str
    family: Family
    setting: str = ""
    bucket_mb: float = 0.0
    hook: str = ""
    local: LocalSums = _ALONE
    any_rounding: bool = False
    stragglers: Stragglers = Options.stragglers
    going_on: bool = False
    sealed: bool = False
    rounds: Local | None = None
    lanes: int | None = None

    def with_local(self, rounds: Local) -> LabStrategy:
        """Return the same strategy with local updates.

        Raises:
            ValueError: the strategy is none of gradlane's, or does not go with them.
        """
        text = f"{self.text}/{rounds.text}"
        if self.family != "gradlane":
            raise ValueError(f"{text}: only gradlane's strategies have local updates")
        if why := self.refusal_of(Feature.LOCAL, rounds.text):
            raise ValueError(why)
        return replace(self, text=text, rounds=rounds)

    def with_stragglers(self, rule: str) -> LabStrategy:
        """Return the same strategy with a rule for ranks that are late.

        Args:
            rule: such as `wait`, `drop` or `backup=1:carry`; `going-on`: none may be late, but some
                may be lost; `sealed`: none may be late, and connections are sealed; `local:...`:
                none may be late, and updates are local; `lanes=2`: none may be late, and a pair of
                ranks has two connections.

        Raises:
            ValueError: the rule is unknown, or the strategy is none of gradlane's that has servers
                and waits for all.
        """
        if rule == GOING_ON:
            Options.of(strategy=self.setting, going_on=True)
            return replace(self, text=f"{self.text}/{rule}", going_on=True)
        if rule == SEALED:
            if self.family != "gradlane":
                raise ValueError(f"{self.text}/{rule}: only gradlane's strategies are sealed")
            return replace(self, text=f"{self.text}/{rule}", sealed=True)
        if rule.partition(":")[0] == LOCAL:
            return self.with_local(parse_local(rule))
        if rule.startswith(LANES):
            if self.family != "gradlane":
                raise ValueError(f"{self.text}/{rule}: only gradlane's strategies have lanes")
            count = rule.removeprefix(LANES)
            if not count.isdigit():
                raise ValueError(f"{self.text}/{rule}: lanes is {count!r}; give a number")
            lanes = Network(lanes=int(count)).lanes
            return replace(self, text=f"{self.text}/{rule}", lanes=lanes)
        name, colon, late = rule.partition(":")
        if parse_stragglers(name) is None and not colon:
            return self
        if self.setting not in STRATEGIES:
            raise ValueError(f"{self.text}/{rule}: only gradlane's strategies leave ranks out")
        stragglers = Stragglers(name, late) if colon else Stragglers(name)
        Options.of(strategy=self.setting, stragglers=stragglers)
        return replace(self, text=f"{self.text}/{rule}", stragglers=stragglers)

    @property
    def is_baseline(self) -> bool:
        """Whether this is stock DDP, which others are compared with."""
        return self.family == "ddp-gloo" and not self.hook

    def slice_elems(self, wanted: int | None, encoded: bool = False) -> int | None:
        """Return the slice size in force, in elements; None where slices have no common size.

        Args:
            wanted: what was asked for, or None for the strategy's own.
            encoded: whether gradients travel in a codec.
        """
        if self.family != "gradlane" or self.is_planned:
            return None
        own = own_slice_elems(Strategy.name if self.sends_factors else self.setting, encoded)
        return own if wanted is None else wanted

    def session_strategy(self, slice_elems: int | None) -> Strategy:
        """Return the strategy of its session: where a plan decides, the one to begin with.

        Args:
            slice_elems: as for `gradlane.init`.
        """
        own = self.is_planned or self.sends_factors
        return Strategy(
            Strategy.name if own else self.setting,
            scheme=self.scheme,
            slice_elems=slice_elems,
            exact_order=not self.any_rounding,
        )

    def session_keywords(self, slice_elems: int | None) -> dict[str, Any]:
        """Return the keywords of `gradlane.init` for its session.

        Args:
            slice_elems: as for `gradlane.init`.
        """
        return {
            "strategy": self.session_strategy(slice_elems),
            "update": self.update,
            "local": self.local,
            "stragglers": self.stragglers,
            "going_on": self.going_on,
        }

    @property
    def update(self) -> str | Local:
        """Where, or how, its session updates parameters."""
        return self.rounds or ("server" if self.is_asynchronous else "worker")

    @property
    def is_planned(self) -> bool:
        """Whether gradlane finds its settings by itself."""
        return self.setting == AUTO

    @property
    def is_hybrid(self) -> bool:
        """Whether each layer goes by the scheme that Poseidon's rule says."""
        return self.setting == POSEIDON

    @property
    def scheme(self) -> str | None:
        """The scheme of all layers that have factors, with p3; None: there is none for all."""
        return self.setting if self.setting in FACTOR_SCHEMES else None

    @property
    def sends_factors(self) -> bool:
        """Whether layers that have factors may send those."""
        return self.is_hybrid or self.scheme is not None

    @property
    def learning_steps(self) -> int:
        """Steps before the warm-up in which a plan is found."""
        return LEARNING_STEPS if self.is_planned else 0

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange gradients at all."""
        return self.family != "none"

    def refusal_of(self, feature: Feature, words: str) -> str:
        """Return why one of gradlane's strategies does not go with a feature; empty if it does.

        Args:
            feature: such as ranks that only serve, which rest while other strategies run.
            words: what asks for it.
        """
        return refusal({feature: words}, self.features)

    @property
    def features(self) -> dict[Feature, str]:
        """What its sessions ask for, each in words; nothing for strategies of others."""
        if self.family != "gradlane":
            return {}
        where = "server" if self.is_asynchronous else "worker"
        words = f"strategy {self.text}"
        found = strategy_features(self.setting, where, self.scheme or "", self.stragglers.rule)
        found |= {
            feature: words
            for feature, is_given in (
                (Feature.LOCAL, self.rounds is not None),
                (Feature.NODES, self.local.mode != "off"),
                (Feature.GOING_ON, self.going_on),
                (Feature.PLAN, self.is_planned or self.is_hybrid),
                (Feature.PLAN_RULE, self.is_planned),
            )
            if is_given
        }
        return found

    @property
    def sums_in_rank_order(self) -> bool:
        """Whether the averaged gradient is bit-identical to the sum in rank order over N."""
        on_servers = self.setting not in (RING, ASGD) and not self.any_rounding
        sums_on_servers = on_servers and self.local.mode == "off"
        return self.family in ("gradlane", "ddp-gather") and sums_on_servers

    @property
    def is_asynchronous(self) -> bool:
        """Whether each rank's gradients are applied alone, so that no mean exists."""
        return self.setting == ASGD


def parse_strategy(text: str) -> LabStrategy:
    """Return the strategy with this name.

    Raises:
        ValueError: there is none, or its bucket size is no positive number.
    """
    whole, slash, rule = text.strip().rpartition("/")
    if slash and rule:
        return parse_strategy(whole).with_stragglers(rule)
    plain, plus, hook = (part.strip() for part in text.strip().partition("+"))
    name, colon, argument = plain.partition(":")
    if plus and (name != "ddp-gloo" or not hook):
        raise ValueError(
            f"{text!r}: what encodes gradients follows ddp-gloo, as in ddp-gloo+fp16, "
            "ddp-gloo+powersgd or ddp-gloo+qsgd:bits=8"
        )
    if name == "none" and not colon:
        return LabStrategy(text="none", family="none")
    if name in (*STRATEGIES, AUTO, POSEIDON, *FACTOR_SCHEMES) and not colon:
        return LabStrategy(text=name, family="gradlane", setting=name)
    if name in NODE_STRATEGIES and (not colon or argument == COLLECTIVE):
        return LabStrategy(
            text=text.strip(),
            family="gradlane",
            setting=Strategy.name,
            local=LocalSums(NODE_STRATEGIES[name], argument or LocalSums.where),
        )
    if name == AUTO and argument == ANY_ROUNDING:
        return LabStrategy(text=text.strip(), family="gradlane", setting=name, any_rounding=True)
    if name in ("ddp-gloo", "ddp-gather"):
        bucket_mb = DDP_BUCKET_MB_DEFAULT
        if colon:
            try:
                bucket_mb = float(argument)
            except ValueError:
                bucket_mb = 0.0
        if not 0 < bucket_mb < 1e6:
            raise ValueError(f"{text!r}: the bucket size must be a number of megabytes above 0")
        family: Family = "ddp-gloo" if name == "ddp-gloo" else "ddp-gather"
        return LabStrategy(text=text.strip(), family=family, bucket_mb=bucket_mb, hook=hook)
    ddp = (
        "ddp-gloo[:BUCKET_MB][+fp16|+bfloat16|+powersgd[:RANK]|+CODEC]",
        "ddp-gather[:BUCKET_MB]",
    )
    on_nodes = (f"{name}[:{COLLECTIVE}]" for name in NODE_STRATEGIES)
    further = (f"{AUTO}[:{ANY_ROUNDING}]", POSEIDON, *FACTOR_SCHEMES, *on_nodes)
    known = ", ".join(("none", *ddp, *STRATEGIES, *further))
    raise ValueError(f"there is no strategy {text!r}; there are: {known}")


def _split(text: str) -> list[str]:
    """Return the names of a list; further options of a codec, or of local updates, belong to the
    name before them."""
    names: list[str] = []
    for part in text.split(","):
        has_options = names and ("+" in names[-1] or f"/{LOCAL}" in names[-1])
        if has_options and "=" in part and not {"+", "/"}.intersection(part):
            names[-1] += f",{part.strip()}"
        elif part.strip():
            names.append(part.strip())
    return names


def parse_strategies(text: str) -> list[LabStrategy]:
    """Return the strategies of a comma-separated list, in its order.

    Raises:
        ValueError: one is unknown, one is there twice, or there is none.
    """
    strategies = [parse_strategy(part) for part in _split(text)]
    if not strategies:
        raise ValueError("name at least one strategy")
    names = [strategy.text for strategy in strategies]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"{', '.join(sorted(twice))}: each strategy may be named once")
    return strategies


def with_updates(strategies: list[LabStrategy], updates: Sequence[str]) -> list[LabStrategy]:
    """Return strategies, and gradlane's with each of some local updates, too.

    Args:
        strategies: as they were named.
        updates: such as `local:steps=8`, as in `gradlane whatif --update`.

    Raises:
        ValueError: an update is none, or does not go with a strategy.
    """
    rounds = [parse_local(text) for text in updates]
    ours = [one for one in strategies if one.family == "gradlane"]
    if rounds and not ours:
        raise ValueError(
            f"--update {updates[0]} has no effect without one of gradlane's strategies: leave it "
            "out, or add p3"
        )
    found: list[LabStrategy] = []
    for strategy in strategies:
        found.append(strategy)
        if strategy in ours and strategy.rounds is None:
            found += [strategy.with_local(one) for one in rounds]
    return list(dict.fromkeys(found))


def with_rules(strategies: list[LabStrategy], rules: str) -> list[LabStrategy]:
    """Return gradlane's strategies with each of some rules for stragglers, others as they are.

    Args:
        strategies: as they were named.
        rules: comma-separated, as in `gradlane.init(stragglers=...)`.

    Raises:
        ValueError: a rule is unknown, or does not go with a strategy.
    """
    named = [rule.strip() for rule in rules.split(",") if rule.strip()]
    if not named:
        raise ValueError("name at least one rule for stragglers, such as wait")
    found: list[LabStrategy] = []
    for strategy in strategies:
        is_exact = strategy.rounds is None
        if strategy.family == "gradlane" and not strategy.stragglers.leaves_out and is_exact:
            found += [strategy.with_stragglers(rule) for rule in named]
        else:
            found.append(strategy)
    if named != [WAIT] and all(one.family != "gradlane" for one in strategies):
        raise ValueError(
            f"--stragglers {rules} has no effect without one of gradlane's strategies: leave it "
            "out, or add p3"
        )
    return list(dict.fromkeys(found))
