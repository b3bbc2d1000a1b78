"""Options as fields of frozen dataclasses: default, range, unit, meaning, agreement, in one place.

`gradlane.init` and its objects, the command line, the agreement between ranks, the environment
variables and `docs/options.md` are made from these fields.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, TypeVar

from gradlane.errors import RefusedError

REQUIRED: Any = MISSING
"""In place of the default of an option that has to be given."""
_RULES = "option"
_LONGEST_S = 1e9
"""The longest time that an option may be, in seconds; clocks count no longer ones."""
_PREFIX = "GRADLANE_"
_YES, _NO = ("1", "yes", "on", "true"), ("", "0", "no", "off", "false")


@dataclass(frozen=True)
class OptionRules:
    """The rules of an option.

    Attributes:
        doc: its meaning, in a sentence; a field without one is no option of a command.
        name: the name in errors, between ranks, in the environment and on the command line; unique
            in a session.
        unit: of its value, empty for names and numbers without one.
        least: the smallest value, itself allowed.
        most: the largest value, itself allowed.
        above: the value must be larger than this.
        below: the value must be smaller than this.
        known: the only values.
        agreed: whether all ranks must give the same value.
        read: turns the text of an environment variable, or of a command line, into a value.
        in_environment: whether a variable can give the option.
        refuses_empty: whether an empty variable is refused, and not taken for an absent one.
        text: the default as a command line has it, where it is read from one; else empty.
        repeated: whether a command line may have the option several times; the value is a tuple.
    """

    doc: str
    name: str
    unit: str
    least: float | None
    most: float | None
    above: float | None
    below: float | None
    known: Sequence[Any]
    agreed: bool
    read: Callable[[str], Any]
    in_environment: bool
    refuses_empty: bool
    text: str
    repeated: bool

    @property
    def variable(self) -> str:
        """The environment variable of the option."""
        return _PREFIX + self.name.upper()

    @property
    def allowed(self) -> str:
        """The allowed values in words; empty where every value is."""
        words = ", ".join(map(str, self.known)) or self.limits
        return f"{words} {self.unit}".strip()

    @property
    def limits(self) -> str:
        """The limits of a number in words; empty without one."""
        if self.least is not None and self.most is not None:
            return f"{self.least} to {self.most}"
        limits = [
            "" if self.above is None else f"above {self.above}",
            "" if self.least is None else f"{self.least} or more",
            "" if self.most is None else f"at most {self.most}",
            "" if self.below is None else f"below {self.below}",
        ]
        return ", ".join(filter(None, limits))

    def allows(self, number: float) -> bool:
        """Return whether a number is within the limits; NaN is not, where there are some."""
        return (
            (self.above is None or number > self.above)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.below is None or number < self.below)
        )


def option(
    default: Any = REQUIRED,
    doc: str = "",
    *,
    name: str = "",
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    known: Sequence[Any] = (),
    agreed: bool = False,
    read: Callable[[str], Any] | None = None,
    in_environment: bool = True,
    shown: bool = True,
    refuses_empty: bool = False,
    text: str = "",
    repeated: bool = False,
) -> Any:
    """Return the field of an option; None as a value is always in range.

    Args:
        default: the value if none is given; `REQUIRED`: what `text` is read as, or one has to be.
        doc: as in `OptionRules`.
        name: as in `OptionRules`; empty: the field's own.
        unit: as in `OptionRules`.
        least: as in `OptionRules`.
        most: as in `OptionRules`.
        above: as in `OptionRules`.
        below: as in `OptionRules`.
        known: as in `OptionRules`.
        agreed: as in `OptionRules`.
        read: as in `OptionRules`; None: as the type of the default is read.
        in_environment: as in `OptionRules`.
        shown: whether `repr` shows the value; False for secrets.
        refuses_empty: as in `OptionRules`.
        text: as in `OptionRules`.
        repeated: as in `OptionRules`.
    """
    if text and read:
        default = read(text)
        default = tuple(default) if isinstance(default, list) else default
    read = read or _READERS.get(type(default), str)
    rules = OptionRules(
        doc,
        name,
        unit,
        least,
        most,
        above,
        below,
        tuple(known),
        agreed,
        read,
        in_environment,
        refuses_empty,
        text,
        repeated,
    )
    return field(default=default, repr=shown, metadata={_RULES: rules})


def option_rules(options: Any) -> dict[str, OptionRules]:
    """Return the rules of a dataclass's options by the names of their fields."""
    found = {}
    for one in fields(options):
        rules: OptionRules | None = one.metadata.get(_RULES)
        if rules is not None:
            found[one.name] = replace(rules, name=rules.name or one.name)
    return found


def check_options(options: Any, named: Callable[[str], str] = str) -> None:
    """Check each option by itself.

    Args:
        options: a dataclass.
        named: turns an option's name into the name that the user knows.

    Raises:
        ValueError: an option is out of its range; the message names it.
    """
    for field_name, rules in option_rules(options).items():
        value, name = getattr(options, field_name), named(rules.name)
        if value is None or isinstance(value, OptionGroup):
            continue
        if rules.known and value not in rules.known:
            raise RefusedError(
                f"unknown {name} {value!r}; known are {', '.join(map(str, rules.known))}"
            )
        if rules.limits and not rules.allows(value):
            raise RefusedError(f"{name} is {value}; it must be {rules.limits}")
        most = _LONGEST_S if rules.unit == "s" else sys.float_info.max
        if isinstance(value, (int, float)) and value > most:
            limit = f"at most {most:g} s" if rules.unit == "s" else "finite"
            raise RefusedError(f"{name} is {value}; it must be {limit}")


def agreed_options(options: Any) -> dict[str, Any]:
    """Return the options that must be the same on every rank, by name, groups included."""
    agreed: dict[str, Any] = {}
    for one in fields(options):
        value, rules = getattr(options, one.name), one.metadata.get(_RULES)
        if isinstance(value, OptionGroup):
            if rules is not None and rules.agreed:
                agreed[rules.name or one.name] = type(value).__name__
            agreed.update(agreed_options(value))
        elif rules is not None and rules.agreed:
            agreed[rules.name or one.name] = value
    return agreed


def on_command_line(name: str) -> str:
    """Return the name that an option has on a command line."""
    return name.replace("_", "-")


class OptionGroup:
    """The base of frozen dataclasses of options that belong together.

    A group knows the options that the program has given: only the others are read from the
    environment.
    """

    _given: frozenset[str]

    def __new__(cls, *positional: Any, **named: Any) -> Any:
        """Remember which options are given."""
        made = super().__new__(cls)
        order = [one.name for one in fields(cls)]  # type: ignore[arg-type]
        object.__setattr__(made, "_given", frozenset([*order[: len(positional)], *named]))
        return made

    def __post_init__(self) -> None:
        """Check every option by itself.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        check_options(self)

    def __repr__(self) -> str:
        shown = [
            f"{one.name}={getattr(self, one.name)!r}" if one.repr else f"{one.name}=..."
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) != one.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


GroupType = TypeVar("GroupType", bound=OptionGroup)


def with_environment(group: GroupType, environment: Mapping[str, str]) -> GroupType:
    """Return a group with the options that the program has not given read from variables.

    An empty variable says no to an option that is on or off, and nothing to any other one, unless
    the option refuses it.

    Raises:
        ValueError: a variable cannot be read, or is out of range; the message names it.
    """
    for field_name, rules in option_rules(group).items():
        text = environment.get(rules.variable)
        is_flag = rules.read is read_flag
        if field_name in group._given or not rules.in_environment or text is None:
            continue
        if not text and rules.refuses_empty:
            raise RefusedError(f"{rules.variable} is empty; give it a value, or unset it")
        if text or is_flag:
            try:
                value = rules.read(text)
                group = _replaced(group, field_name, value)
            except ValueError as error:
                reason = str(error)
                if reason.startswith(f"{rules.name} is "):
                    raise RefusedError(rules.variable + reason.removeprefix(rules.name)) from None
                raise RefusedError(f"{rules.variable} is {text!r}; {reason}") from None
    return group


def variables_of(group: type[OptionGroup]) -> Iterator[str]:
    """Yield the environment variables of a group's options."""
    for rules in option_rules(group).values():
        if rules.in_environment:
            yield rules.variable


def read_flag(text: str) -> bool:
    """Parse whether an option is on.

    Raises:
        ValueError: the text is neither yes nor no.
    """
    if text.lower() in (*_YES, *_NO):
        return text.lower() in _YES
    raise RefusedError("it must be 1 or 0")


def read_int(text: str) -> int:
    """Parse a whole number; `ValueError` for anything else."""
    try:
        return int(text)
    except ValueError:
        raise RefusedError("it must be a whole number") from None


def read_float(text: str) -> float:
    """Parse a number; `ValueError` for anything else."""
    try:
        return float(text)
    except ValueError:
        raise RefusedError("it must be a number") from None


def read_ports(text: str) -> tuple[int, int]:
    """Parse a range of ports, such as `4000-4010`, or a single port.

    Raises:
        ValueError: the text is neither.
    """
    low, _, high = text.partition("-")
    if not (low.isdecimal() and (high or low).isdecimal()):
        raise RefusedError(f"ports is {text!r}; use one, or the lowest and the highest: 4000-4010")
    return int(low), int(high or low)


def _replaced(group: GroupType, field_name: str, value: Any) -> GroupType:
    given = group._given
    changed = replace(group, **{field_name: value})  # type: ignore[type-var]
    object.__setattr__(changed, "_given", given)
    return changed


_READERS: dict[type, Callable[[str], Any]] = {
    bool: read_flag,
    int: read_int,
    float: read_float,
}
