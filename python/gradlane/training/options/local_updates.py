"""Optimizers that run on each rank by itself and exchange rarely.

Needs no torch and no core: options are checked where they are given.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from gradlane.errors import RefusedError
from gradlane.training.options.option_fields import OptionGroup, option, option_rules

NAME = "local"

AVERAGE, SGD, NESTEROV = OUTER = ("average", "sgd", "nesterov")
"""The outer optimizers."""


@dataclass(frozen=True, repr=False)
class Local(OptionGroup):
    """Steps of each rank's own optimizer, with rare exchanges; see `docs/local-updates.md`."""

    steps: int = option(
        32,
        "Steps of each rank's own optimizer from one exchange of a parameter to the next.",
        name="local_steps",
        unit="steps",
        least=1,
        agreed=True,
    )
    outer: str = option(
        NESTEROV,
        "What moves the values that all ranks have in common, by the mean difference of all ranks "
        "to them: `average`: nothing more, so that they are the mean of the ranks' (Local SGD); "
        "`sgd`: SGD with momentum; `nesterov`: SGD with Nesterov momentum (DiLoCo).",
        known=OUTER,
        agreed=True,
    )
    outer_lr: float = option(
        0.7, "Learning rate of `sgd` and `nesterov`; `average` has none.", above=0, agreed=True
    )
    outer_momentum: float = option(
        0.9,
        "Momentum of `sgd` and `nesterov`; `average` has none.",
        least=0,
        below=1,
        agreed=True,
    )
    fragments: int = option(
        1,
        "Parts of the model, of whole layers, that are exchanged in turn; each of them every "
        "`steps` steps. 1: all at once.",
        least=1,
        agreed=True,
    )
    overlap_steps: int = option(
        0,
        "Steps that go on while an exchange is under way, before its result is used; at most "
        "`steps` through `fragments`. 0: `optimizer.step()` waits for it.",
        unit="steps",
        least=0,
        agreed=True,
    )
    mix: float = option(
        1.0,
        "Share of the common value in a parameter once a result is used; the rest is this rank's "
        "own value, with the steps that it took meanwhile. 1: the common value alone.",
        above=0,
        most=1,
        agreed=True,
    )

    def __post_init__(self) -> None:
        """Check every option, and that they go together.

        Raises:
            ValueError: an option is out of its range, or does not go with another one.
        """
        super().__post_init__()
        if self.fragments > self.steps:
            raise RefusedError(
                f"fragments is {self.fragments} with steps={self.steps}: each fragment has a step "
                "of its own for its exchange; give as many steps as fragments, or more"
            )
        if self.overlap_steps > self.steps // self.fragments:
            raise RefusedError(
                f"overlap_steps is {self.overlap_steps} with steps={self.steps} and "
                f"fragments={self.fragments}: an exchange ends before the next fragment's begins; "
                f"give {self.steps // self.fragments} or fewer"
            )
        kind = type(self)
        momentum_is_given = self.outer_momentum != kind.outer_momentum
        if self.outer == AVERAGE and (self.outer_lr != kind.outer_lr or momentum_is_given):
            raise RefusedError(
                f"outer is {AVERAGE!r}, which has neither a learning rate nor momentum: leave "
                f"outer_lr and outer_momentum out, or use outer={SGD!r}"
            )

    @property
    def text(self) -> str:
        """The options that are not the defaults, as `parse_local` reads them."""
        given = [
            f"{one.name}={getattr(self, one.name)}"
            for one in fields(self)
            if getattr(self, one.name) != one.default
        ]
        return f"{NAME}:{','.join(given)}" if given else NAME


def parse_local(text: str) -> Local:
    """Parse local updates, such as `local:steps=32,outer=average`.

    Raises:
        ValueError: an option is unknown, out of its range, or does not go with another one.
    """
    name, _, options = text.strip().partition(":")
    if name != NAME:
        raise RefusedError(f"{text!r} is not {NAME!r}, or {NAME!r} with options after a colon")
    rules = option_rules(Local)
    values = {}
    for part in filter(None, map(str.strip, options.split(","))):
        key, _, value = map(str.strip, part.partition("="))
        if key not in rules:
            raise RefusedError(f"{text!r}: {key!r} is no option; there are: {', '.join(rules)}")
        try:
            values[key] = rules[key].read(value)
        except ValueError as error:
            raise RefusedError(f"{text!r}: {key}={value}: {error}") from None
    return Local(**values)
