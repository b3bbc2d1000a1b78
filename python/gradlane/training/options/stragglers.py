"""Rules for late ranks and their gradients: `wait`, `drop`, `backup=b`.

Needs no torch and no core: options are checked where they are given.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from gradlane.errors import RefusedError
from gradlane.training.options.option_fields import OptionGroup, option

WAIT = "wait"
LATE = ("discard", "carry")
AHEAD_STEPS = 4
LEAVES_OUT = ("p3", "slicing", "wfbp")
"""Strategies in which a step can go on without a rank."""


@dataclass(frozen=True)
class StragglerRule:
    """When a step goes on without late ranks.

    Attributes:
        backup: number of ranks that each step leaves out; 0: the late ones.
        factor: a rank is late that takes more than this multiple of the median time of recent
            steps; None: a rank that is later than half of the ranks by more than the usual spread
            over ranks and steps.
    """

    backup: int = 0
    factor: float | None = None

    def core_rule(self, ahead_steps: int) -> str:
        """Return the rule as the core takes it, in JSON."""
        close: str | dict[str, dict[str, int]] = "spread"
        if self.backup:
            close = {"backup": {"ranks": self.backup}}
        elif self.factor is not None:
            close = {"deadline": {"percent": round(self.factor * 100)}}
        return json.dumps({"close": close, "ahead_steps": ahead_steps})


def parse_stragglers(text: str) -> StragglerRule | None:
    """Parse a rule; return None for `wait`.

    Args:
        text: `wait`, `drop`, `drop=FACTOR` or `backup=RANKS`.

    Raises:
        ValueError: the text is no rule, or its number is out of range.
    """
    name, equals, number = text.partition("=")
    if text == WAIT:
        return None
    if text == "drop":
        return StragglerRule()
    try:
        if name == "drop" and equals and 1.01 <= float(number) <= 100:
            return StragglerRule(factor=float(number))
        if name == "backup" and equals and int(number) >= 1:
            return StragglerRule(backup=int(number))
    except ValueError:
        pass
    raise RefusedError(
        f"stragglers is {text!r}; it is 'wait', 'drop' (later than ranks usually differ by), "
        "'drop=1.5' (times as long as recent steps, 1.01 to 100) or 'backup=1' (ranks that no "
        "step waits for, 1 or more)"
    )


@dataclass(frozen=True, repr=False)
class Stragglers(OptionGroup):
    """Whether steps go on without late ranks; see `docs/stragglers.md`."""

    rule: str = option(
        WAIT,
        "`wait`: each step waits for all ranks; `backup=1`: for all but one (or more); `drop`: "
        "until a rank is later than half of the others by more than ranks and steps usually "
        "differ by; `drop=1.5`: at 1.5 times the length of recent steps. The mean is over the "
        "ranks that were in time. Put the batches through `Session.keep_pace` then.",
        name="stragglers",
        agreed=True,
    )
    late: str = option(
        LATE[0],
        "What becomes of a late gradient: `discard`, or `carry`: it is added to the next one of "
        "its rank.",
        known=LATE,
        agreed=True,
    )
    ahead_steps: int = option(
        AHEAD_STEPS,
        "Steps that the others may be ahead of the slowest rank, which keeps as many results.",
        unit="steps",
        least=1,
        agreed=True,
    )

    def __post_init__(self) -> None:
        """Check every option, and that a rule for late gradients has some.

        Raises:
            ValueError: an option is out of its range, or does not go with another one.
        """
        super().__post_init__()
        if self.parsed is None and self.late != LATE[0]:
            raise RefusedError(
                f'late is {self.late!r} with stragglers="wait": nobody is late there'
            )
        if self.parsed is None and self.ahead_steps != AHEAD_STEPS:
            raise RefusedError(
                f'ahead_steps is {self.ahead_steps} with stragglers="wait": nobody is ahead there'
            )

    @property
    def parsed(self) -> StragglerRule | None:
        """The rule; None for `wait`."""
        return parse_stragglers(self.rule)

    @property
    def leaves_out(self) -> bool:
        """Whether steps go on without late ranks."""
        return self.rule != WAIT
