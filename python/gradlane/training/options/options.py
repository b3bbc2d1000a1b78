"""The options of a session, checked where they are given, not where they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, NoneType
from typing import Any

from gradlane.errors import RefusedError
from gradlane.training.options.codec_choice import (
    CodecRules,
    codec_features,
    codec_rules,
    unused_codec_option,
)
from gradlane.training.options.codec_options import RAW
from gradlane.training.options.compatibility import Feature, refusal
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
from gradlane.training.options.option_groups import (
    ENVIRONMENT_GROUPS,
    Checkpoints,
    Monitoring,
    Network,
    Rendezvous,
)
from gradlane.training.options.stragglers import Stragglers
from gradlane.training.options.strategy import (
    ASGD,
    LOCAL_SUMS,
    LOCALS,
    RING,
    UPDATES,
    LocalSums,
    Strategy,
    strategy_features,
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
        "its text `qsgd:bits=8`: in fewer bytes, at a loss. The smallest tensors stay as they are: "
        "under quantizers less than 1 % of all parameters, under `topk` and `dgc` tensors of one "
        "value. A dictionary gives codecs by pattern, and the first that fits a parameter's name "
        "counts (`docs/low-precision.md`).",
        agreed=True,
    )
    update: str | Local = option(
        UPDATES[0],
        "Where the optimizer runs: `worker`: any optimizer, on every rank; `server`: SGD, Adam or "
        "AdamW, on each slice's owner, which keeps the state (`docs/optimizers.md`); `Local(...)`: "
        "any optimizer, on every rank by itself, with rare exchanges "
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
    def of(cls, *, environment: Mapping[str, str] = MappingProxyType({}), **given: Any) -> Options:
        """Return options from keywords of `gradlane.init`, and from environment variables.

        Args:
            environment: the variables, such as `os.environ`.
            given: the keywords; None stands for the default.

        Raises:
            ValueError: an option or a variable is out of its range, or does not go with another
                one; the message names it.
            TypeError: an argument is of another kind.
        """
        groups = {name: _group(name, kind, given.get(name)) for name, kind in GROUPS.items()}
        for name, group in groups.items():
            if isinstance(group, ENVIRONMENT_GROUPS):
                groups[name] = with_environment(group, environment)
        return cls(**{**given, **groups, "codec": codec_rules(given.get("codec"))})

    def __post_init__(self) -> None:
        """Check every option, and the combinations of options.

        Raises:
            ValueError: an option is out of its range, or does not go with another one; the message
                names it.
        """
        check_options(self)
        # Who serves is known once the number of ranks is.
        others = dict(self.features)
        others.pop(Feature.SERVING, None)
        why = refusal(others)
        if why:
            raise RefusedError(why)
        without_a_folder = self.checkpoints.options_without_a_folder()
        if without_a_folder:
            raise RefusedError(without_a_folder)
        unused = unused_codec_option(self.codec, encodes_means=self.update != "server")
        if unused:
            raise RefusedError(unused)

    @functools.cached_property
    def features(self) -> dict[Feature, str]:
        """The features in force, each in the words that ask for it."""
        codec = self.codec
        found = strategy_features(
            self.strategy.name, self.update_place, self.strategy.factors, self.stragglers.rule
        )
        found |= {
            feature: words
            for feature, is_given, words in (
                (Feature.LOCAL, self.local_updates, "update=gradlane.Local(...)"),
                (Feature.GOING_ON, self.going_on.on, "going_on"),
                (Feature.JOINS, self.rendezvous.join, "join"),
                (Feature.SERVERS, self.servers is not None, f"servers={self.servers}"),
                (Feature.SERVING, self.workers is not None, f"workers={self.workers}"),
                (Feature.CHECK_EVERY, self.check_every, f"check_every={self.check_every}"),
                (Feature.CODEC, codec != RAW, f"codec {codec!r}"),
                (Feature.PATTERNS, not isinstance(codec, str), "a dictionary of codecs"),
                (Feature.NODES, self.local.mode in LOCALS[1:3], f'local="{self.local.mode}"'),
                (Feature.SHARED, self.local.mode == LOCALS[2], f'local="{self.local.mode}"'),
                (Feature.NO_NODES, self.local.mode == LOCALS[0], f'local="{self.local.mode}"'),
                (
                    Feature.COLLECTIVE,
                    self.local.where == LOCAL_SUMS[1],
                    f'local_sums="{self.local.where}"',
                ),
                (Feature.CHECKPOINTS, self.checkpoints.folder is not None, "checkpoints="),
                (Feature.TRACE, self.monitoring.trace is not None, "trace="),
            )
            if is_given
        }
        return found | codec_features(codec, on_ring=self.strategy.name == RING)

    @property
    def local_updates(self) -> Local | None:
        """How each rank's optimizer runs by itself; None: all ranks average each gradient."""
        return self.update if isinstance(self.update, Local) else None

    @property
    def update_place(self) -> str:
        """Where the optimizer runs, `worker` or `server`."""
        return self.update if isinstance(self.update, str) else UPDATES[0]

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
            raise RefusedError(
                f"servers is {self.servers}, but there are {world_size} ranks: give fewer"
            )
        if self.workers is not None and self.workers > world_size:
            raise RefusedError(
                f"workers is {self.workers}, but there are {world_size} ranks: give fewer"
            )
        if self.workers is not None and self.workers != world_size:
            words = f"workers={self.workers} of {world_size} ranks, so that the others only serve,"
            why = refusal({Feature.SERVING: words}, self.features)
            if why:
                raise RefusedError(why)
        rule = self.stragglers.parsed
        if rule is not None and rule.backup >= world_size > 1:
            raise RefusedError(
                f"stragglers is {self.stragglers.rule!r} with {world_size} ranks: at least one "
                "has to contribute to each step"
            )
        check_going_on_world(self.going_on, self.strategy.slice_elems, world_size)

    def agreed(self) -> dict[str, object]:
        """Return the options that must be the same on every rank."""
        # To take a checkpoint is a collective call, and any rank may become the first one, which
        # removes old ones.
        agreed = agreed_options(self)
        if not self.checkpoints.folder:
            agreed |= {"checkpoint_every": 0, "checkpoint_keep": 0}
        return agreed


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


def _group(name: str, kind: type[OptionGroup], given: Any) -> Any:
    """Return the object of an argument, which a text or a truth may stand for."""
    if given is None:
        return getattr(Options, name)
    if isinstance(given, kind):
        return given
    plain, made = _PLAIN.get(kind, (NoneType, None))
    if made is not None and isinstance(given, plain):
        return made(given)
    plains = {str: "a text or ", bool: "True, False or "}.get(plain, "")
    raise TypeError(f"{name} is {given!r}; give {plains}a gradlane.{kind.__name__}")


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
_PLAIN: dict[type[OptionGroup], tuple[type, Callable[[Any], Any]]] = {
    Strategy: (str, Strategy),
    Local: (str, str),
    LocalSums: (str, LocalSums),
    Stragglers: (str, Stragglers),
    GoingOn: (bool, lambda on: GoingOn(on=on)),
}
"""What can be given in place of an object, and what is made of it."""
