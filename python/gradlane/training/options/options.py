"""The options of a session, checked where they are given, not where they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

from gradlane.training.options.codec_choice import (
    CodecArgument,
    CodecRules,
    codec_rules,
    unused_codec_option,
)
from gradlane.training.options.codec_options import RAW, CodecOptions, Dgc, Qsgd, parse_codec
from gradlane.training.options.going_on import GoingOn, check_going_on_world
from gradlane.training.options.local_updates import Local
from gradlane.training.options.option_fields import (
    OptionGroup,
    agreed_options,
    check_options,
    option,
    option_rules,
    with_environment,
)
from gradlane.training.options.option_groups import Checkpoints, Monitoring, Network, Rendezvous
from gradlane.training.options.stragglers import LEAVES_OUT, Stragglers, check_stragglers
from gradlane.training.options.strategy import (
    ASGD,
    RING,
    UPDATES,
    LocalSums,
    Strategy,
    factors_refusal,
    ring_refusal,
    serverless_refusal,
)


@dataclass(frozen=True)
class Options:
    """All options of a session, as `gradlane.init` takes them; `docs/options.md` lists them."""

    strategy: Strategy = option(
        Strategy(), "How gradients are cut, ordered and added up: the name, or a `Strategy`."
    )
    codec: CodecRules = option(
        RAW,
        "How gradients travel: as they are if absent; a codec such as `codecs.Qsgd(bits=8)`, or "
        "its text `qsgd:bits=8`: in fewer bytes, at a loss, but for the smallest tensors (of "
        "quantizers less than 1 % of all parameters, of `topk` and `dgc` those of one value); a "
        "dictionary of patterns and codecs, of which the first that fits a parameter's name counts "
        "(`docs/low-precision.md`).",
        agreed=True,
    )
    update: str | Local = option(
        UPDATES[0],
        "Where the optimizer runs: `worker`: any optimizer, on every rank; `server`: SGD, Adam or "
        "AdamW, on each slice's owner, which keeps the state (`docs/optimizers.md`); `Local(...)`: "
        "any optimizer, on every rank by itself, with an exchange every so many steps "
        "(`docs/local-updates.md`).",
        known=UPDATES,
        agreed=True,
    )
    local: LocalSums = option(
        LocalSums(), "What the ranks of a node add up before the network: the mode, or `LocalSums`."
    )
    stragglers: Stragglers = option(
        Stragglers(), "Whether steps go on without late ranks: the rule, or `Stragglers`."
    )
    going_on: GoingOn = option(
        GoingOn(on=False),
        "Whether training goes on when ranks are lost: `True`, or `GoingOn` (`docs/going-on.md`).",
    )
    servers: int | None = option(
        None,
        "Number of ranks, from rank 0 on, that own slices; all do if absent (`docs/servers.md`).",
        least=1,
        agreed=True,
    )
    workers: int | None = option(
        None,
        "Number of ranks, from rank 0 on, that train; those after them only serve: they own all "
        "slices, see `Session.serve`. All train if absent.",
        least=1,
        agreed=True,
    )
    check_every: int | None = option(
        None,
        "Steps between comparisons of all parameters of all ranks, which makes ranks wait for each "
        "other (of frozen ones, a part in turn, and all that torch has counted a write of); 0: "
        "never; if absent, a sample after steps 1, 10 and every 100, which no rank waits for (with "
        '`update="worker"`), and one as the session closes.',
        unit="steps",
        least=0,
        agreed=True,
    )
    rendezvous: Rendezvous = option(Rendezvous(), "Which rank this is, and where the ranks meet.")
    network: Network = option(
        Network(), "Addresses, secret, time-outs, frames, buffers and threads."
    )
    checkpoints: Checkpoints = option(Checkpoints(), "Where and when checkpoints are written.")
    monitoring: Monitoring = option(
        Monitoring(), "Prometheus, a live page, timelines, the line at the end."
    )

    @classmethod
    def of(
        cls,
        *,
        strategy: str | Strategy | None = None,
        codec: CodecArgument = None,
        update: str | Local = UPDATES[0],
        local: str | LocalSums | None = None,
        stragglers: str | Stragglers | None = None,
        going_on: bool | GoingOn = False,
        rendezvous: Rendezvous | None = None,
        network: Network | None = None,
        checkpoints: Checkpoints | None = None,
        monitoring: Monitoring | None = None,
        environment: Mapping[str, str] = MappingProxyType({}),
        **others: Any,
    ) -> Options:
        """Return options from the arguments of `gradlane.init`, and from environment variables.

        Args:
            strategy: as for `gradlane.init`.
            codec: as for `gradlane.init`.
            update: as for `gradlane.init`.
            local: as for `gradlane.init`.
            stragglers: as for `gradlane.init`.
            going_on: as for `gradlane.init`.
            rendezvous: as for `gradlane.init`.
            network: as for `gradlane.init`.
            checkpoints: as for `gradlane.init`.
            monitoring: as for `gradlane.init`.
            environment: the variables, such as `os.environ`.
            others: `servers`, `workers` and `check_every`.

        Raises:
            ValueError: an option or a variable is out of its range, or does not go with another
                one; the message names it.
            TypeError: an argument is of another kind.
        """
        return cls(
            strategy=_group("strategy", Strategy, strategy),
            codec=codec_rules(codec),
            update=update if isinstance(update, str) else _group("update", Local, update),
            local=_group("local", LocalSums, local),
            stragglers=_group("stragglers", Stragglers, stragglers),
            going_on=GoingOn(on=going_on)
            if isinstance(going_on, bool)
            else _group("going_on", GoingOn, going_on),
            rendezvous=with_environment(_group("rendezvous", Rendezvous, rendezvous), environment),
            network=with_environment(_group("network", Network, network), environment),
            checkpoints=with_environment(
                _group("checkpoints", Checkpoints, checkpoints), environment
            ),
            monitoring=with_environment(_group("monitoring", Monitoring, monitoring), environment),
            **others,
        )

    def __post_init__(self) -> None:
        """Check every option, and the combinations of options.

        Raises:
            ValueError: an option is out of its range, or does not go with another one; the message
                names it.
        """
        check_options(self)
        if self.strategy.name == RING:
            self._check_ring()
        if self.strategy.name == ASGD:
            self._check_asgd()
        if self.strategy.factors:
            why = factors_refusal(self.strategy.name, self.update_place)
            if why:
                raise ValueError(f"scheme is {self.strategy.factors!r}, but {why}")
        unused = unused_codec_option(self.codec, encodes_means=self.update != "server")
        if unused:
            raise ValueError(unused)
        others: dict[str, object] = {
            "strategy": self.strategy.name,
            "scheme": self.strategy.factors,
            "update": self.update_place,
        }
        check_stragglers(self.stragglers.rule, others)
        lanes = self.network.lanes or 1
        if lanes > 1 and self.stragglers.leaves_out:
            raise ValueError(
                f"stragglers={self.stragglers.rule!r} with lanes={lanes}: which ranks a step "
                "leaves out is decided in one lane; leave lanes out"
            )
        self._check_going_on()
        refusal = local_refusal(self) if self.local_updates is not None else ""
        if refusal:
            raise ValueError(f"update is {self.update!r}, with {refusal}")

    def _check_ring(self) -> None:
        why = ring_refusal(self.strategy.name, self.update_place)
        if why:
            raise ValueError(f"strategy is 'ring', but {why}")
        if self.servers is not None:
            raise ValueError(
                f"servers is {self.servers} with strategy 'ring', which has no servers"
            )

    def _check_asgd(self) -> None:
        if self.update != "server":
            raise ValueError(
                f'strategy="asgd" with update={self.update!r}: each gradient is applied alone, '
                'where the parameters are kept for all ranks, so it asks for update="server"; '
                "otherwise every rank would train a model of its own"
            )
        if self.check_every:
            raise ValueError(
                f'check_every is {self.check_every} with strategy="asgd": the ranks\' parameters '
                "differ while they train, so there is nothing to compare; use 0"
            )

    def _check_going_on(self) -> None:
        if self.rendezvous.join and not self.going_on.on:
            raise ValueError(
                "join without going_on: a rank joins a training that goes on when ranks come and "
                "go; open all sessions with going_on=True"
            )
        refusal = going_on_refusal(self) if self.going_on.on else ""
        if refusal:
            raise ValueError(f"going_on with {refusal}")

    @property
    def local_updates(self) -> Local | None:
        """How each rank's optimizer runs by itself; None: all ranks average each gradient."""
        return self.update if isinstance(self.update, Local) else None

    @property
    def update_place(self) -> str:
        """Where the optimizer runs, `worker` or `server`."""
        return self.update if isinstance(self.update, str) else UPDATES[0]

    @property
    def may_have_lanes(self) -> bool:
        """Whether a pair of ranks may have several connections."""
        return not (self.going_on.on or self.stragglers.leaves_out)

    @property
    def is_asynchronous(self) -> bool:
        """Whether ranks train without waiting for each other."""
        return self.strategy.name == ASGD

    def check_world(self, world_size: int) -> None:
        """Check the options that depend on the number of ranks.

        Raises:
            ValueError: an option does not go with it.
        """
        if self.servers is not None and self.servers > world_size:
            raise ValueError(
                f"servers is {self.servers}, but there are {world_size} ranks: give fewer"
            )
        if self.workers is not None and self.workers != world_size:
            self._check_serving(self.workers, world_size)
        rule = self.stragglers.parsed
        if rule is not None and rule.backup >= world_size > 1:
            raise ValueError(
                f"stragglers is {self.stragglers.rule!r} with {world_size} ranks: at least one "
                "has to contribute to each step"
            )
        check_going_on_world(self.going_on, self.strategy.slice_elems, world_size)

    def _check_serving(self, workers: int, world_size: int) -> None:
        """Check the options that go with ranks that only serve."""
        if workers > world_size:
            raise ValueError(f"workers is {workers}, but there are {world_size} ranks: give fewer")
        why = serving_refusal(self)
        if why:
            raise ValueError(
                f"workers is {workers} of {world_size} ranks, so that the others only serve, but "
                f"{why}"
            )

    def agreed(self) -> dict[str, object]:
        """Return the options that must be the same on every rank."""
        # To take a checkpoint is a collective call, and any rank may become the first one, which
        # removes old ones.
        agreed = agreed_options(self)
        if not self.checkpoints.folder:
            agreed |= {"checkpoint_every": 0, "checkpoint_keep": 0}
        return agreed


def serving_refusal(options: Options) -> str:
    """Return why ranks that only serve do not go with other options; empty if they do."""
    if options.servers is not None:
        return (
            f"servers is {options.servers}, which gives slices to ranks that train: leave it out, "
            "the ranks that only serve own all slices"
        )
    if options.strategy.name == RING:
        return "strategy is 'ring', which has no servers: use p3"
    if options.strategy.name == ASGD:
        return (
            "strategy is 'asgd', whose ranks are in different steps: a server that trains nothing "
            "cannot tell whose learning rate is in force; use servers= among the ranks that train"
        )
    if options.stragglers.leaves_out:
        return (
            f"stragglers is {options.stragglers.rule!r}: dedicated servers do not learn which "
            "ranks a step leaves out; use stragglers='wait', or servers= among the ranks that train"
        )
    return ""


def going_on_refusal(options: Options) -> str:
    """Return the first option that excludes going on, with why and what to do; else empty."""
    strategy = options.strategy
    lanes = options.network.lanes or 1
    if lanes > 1:
        return f"lanes={lanes}: ranks agree on who goes on in one lane; leave lanes out"
    if options.update == "server":
        return (
            'update="server": a lost rank takes the optimizer\'s state of its slices along; use '
            'update="worker"'
        )
    if strategy.name not in (*LEAVES_OUT, RING):
        return (
            f"strategy {strategy.name!r}: only sums that every rank gets from their owners can be "
            f"finished without a lost rank; use {', '.join((*LEAVES_OUT, RING))}"
        )
    if strategy.factors:
        return (
            f"scheme {strategy.factors!r}: gradients are rebuilt from the factors of all ranks; "
            "leave the scheme out"
        )
    rules = [("*", options.codec)] if isinstance(options.codec, str) else options.codec
    for _, codec in rules:
        parsed = parse_codec(codec)
        if isinstance(parsed, Dgc):
            return (
                f"codec {codec!r}: its clipping is for the number of ranks at the start, and its "
                "momentum is untested when ranks are lost; use topk, which also sends the largest "
                "values"
            )
        why = _ring_codec_refusal(parsed) if strategy.name == RING else ""
        if why:
            return f"codec {codec!r} on a ring: {why}; use strategy 'p3'"
    if options.stragglers.leaves_out:
        return (
            f"stragglers={options.stragglers.rule!r}: a step could lack ranks that are late and "
            'ranks that are lost; use stragglers="wait"'
        )
    if options.servers is not None:
        return f"servers={options.servers}: the ranks that are left own all slices; leave it out"
    if options.workers is not None:
        return (
            f"workers={options.workers}: ranks that only serve take no part in agreeing on "
            "members; leave it out"
        )
    if options.check_every:
        return (
            f"check_every={options.check_every}: ranks would compare through the store, which may "
            "be lost with its rank; leave it out, and a sample is compared every 100 steps"
        )
    return ""


def local_refusal(options: Options) -> str:
    """Return the first option that excludes local updates, with why and what to do; else empty."""
    if options.strategy.name == ASGD:
        return (
            f"strategy {ASGD!r}: it applies each gradient at once, and no gradient is sent here; "
            "use p3"
        )
    if options.strategy.factors:
        return (
            f"scheme {options.strategy.factors!r}: a difference of several steps is no product of "
            "one batch's factors; leave the scheme out"
        )
    rules = [("*", options.codec)] if isinstance(options.codec, str) else options.codec
    for _, codec in rules:
        if isinstance(parse_codec(codec), Dgc):
            return (
                f"codec {codec!r}: it applies the optimizer's momentum itself, and the optimizer "
                "runs between two exchanges here; use topk, which also sends the largest values"
            )
    if options.local.where == "collective":
        return (
            'local_sums="collective": a node\'s collectives take all gradients of each step, and '
            'differences are exchanged in turns; use where="host"'
        )
    if options.stragglers.leaves_out:
        return (
            f"stragglers={options.stragglers.rule!r}: what a late rank has learned in many steps "
            'would be left out; use stragglers="wait"'
        )
    if options.going_on.on:
        return (
            "going_on: an exchange that a rank is lost in is not finished without it yet; leave it "
            "out, and restart from a state that was saved after session.synchronize()"
        )
    if options.workers is not None:
        return (
            f"workers={options.workers}: no rank serves only, since the outer optimizer runs on "
            "every rank; leave it out, or give servers="
        )
    if options.check_every:
        return (
            f"check_every={options.check_every}: the ranks' parameters differ between two "
            "exchanges; leave it out, and a sample of the common values is compared"
        )
    if options.checkpoints.folder is not None:
        return (
            "checkpoints=: its files hold one model for all ranks, and each rank has its own here; "
            "leave it out, and save the model, the optimizer and session.state_dict() on every "
            "rank, or on one after session.synchronize()"
        )
    if options.monitoring.trace is not None:
        return (
            f"trace={options.monitoring.trace!r}: timelines are drawn from backward passes that "
            "send gradients; leave it out, and see session.metrics()"
        )
    return ""


def _ring_codec_refusal(codec: CodecOptions | None) -> str:
    """Return why a ring with a codec does not go on; empty if it does. The core checks plans."""
    if getattr(codec, "residual", False):
        return "each rank holds back parts of sums, which are not its own contributions"
    if isinstance(codec, Qsgd) and codec.ring == "integer":
        return (
            "codes are added up by scales of all ranks, and servers would need another size of "
            "slices"
        )
    return ""


def rows_refusal(options: Options) -> str:
    """Return why sparse gradients are sent dense under some options; empty if rows travel."""
    if options.going_on.on:
        return "with going_on means are made again after a loss, which needs dense gradients"
    if options.stragglers.leaves_out:
        return f"stragglers={options.stragglers.rule!r} makes a dense mean of the ranks in time"
    if options.local.mode not in ("off", "auto"):
        return (
            f"local={options.local.mode!r}, where the ranks of a node add up first, which rows do "
            'not: use local="off"'
        )
    if options.local_updates is not None:
        return "differences of several steps touch more rows than a batch"
    return serverless_refusal(
        options.strategy.name, options.update_place, "rows are not added up there"
    )


def keywords_of(**given: Any) -> dict[str, Any]:
    """Return keywords of `gradlane.init` for options that are given by their own names.

    Options that stand in an object are put into one: `keywords_of(frame_bytes=4096)` is
    `{"network": Network(frame_bytes=4096)}`.

    Args:
        given: options by the names of `docs/options.md`, and keywords of `gradlane.init`.

    Raises:
        ValueError: an option is out of its range.
    """
    keywords: dict[str, Any] = {}
    for keyword, kind in GROUPS.items():
        if isinstance(given.get(keyword), kind):
            continue
        rules = option_rules(kind).items()
        own = {field: given.pop(one.name) for field, one in rules if one.name in given}
        if own:
            keywords[keyword] = kind(**own)
    return {**keywords, **given}


GroupType = TypeVar("GroupType", bound=OptionGroup)


def _group(name: str, kind: type[GroupType], given: str | GroupType | None) -> GroupType:
    """Return the object of an argument, which may be the text of its first option."""
    if given is None:
        return kind()
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and kind in _FROM_TEXT:
        return kind(given)
    texts = "a text or " if kind in _FROM_TEXT else ""
    raise TypeError(f"{name} is {given!r}; give {texts}a gradlane.{kind.__name__}")


GROUPS: dict[str, type[OptionGroup]] = {
    "strategy": Strategy,
    "update": Local,
    "local": LocalSums,
    "stragglers": Stragglers,
    "going_on": GoingOn,
    "rendezvous": Rendezvous,
    "network": Network,
    "checkpoints": Checkpoints,
    "monitoring": Monitoring,
}
"""The objects of `gradlane.init` by its keywords."""
_FROM_TEXT: tuple[type[OptionGroup], ...] = (Strategy, LocalSums, Stragglers)
"""Objects that the text of their first option can stand for."""
