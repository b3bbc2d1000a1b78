"""Options as fields of frozen dataclasses: default, range and who must agree, in one place each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, field, fields
from typing import Any

_RULES = "option"


def option(
    default: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    known: Sequence[str] = (),
    agreed: bool = False,
) -> Any:
    """Return the field of an option; None as a value is always in range.

    Args:
        default: its value where none is given.
        least: the smallest value, itself allowed.
        most: the largest value, itself allowed.
        above: the value must be larger than this.
        known: the only values.
        agreed: whether all ranks must give the same value.
    """
    rules = {"least": least, "most": most, "above": above, "known": known, "agreed": agreed}
    return field(default=default, metadata={_RULES: rules})


def check_options(options: Any, named: Callable[[str], str] = str) -> None:
    """Check each option by itself.

    Args:
        options: a dataclass.
        named: turns a field's name into the one that the user knows.

    Raises:
        ValueError: an option is out of its range; the message names it.
    """
    for one in fields(options):
        value, rules = getattr(options, one.name), one.metadata.get(_RULES)
        if value is None or rules is None:
            continue
        if rules["known"] and value not in rules["known"]:
            raise ValueError(
                f"unknown {named(one.name)} {value!r}; known are {', '.join(rules['known'])}"
            )
        least, most, above = rules["least"], rules["most"], rules["above"]
        if above is not None and not value > above:
            raise ValueError(f"{named(one.name)} is {value}; it must be above {above}")
        if (least is not None and not value >= least) or (most is not None and not value <= most):
            limits = f"{least} or more" if most is None else f"{least} to {most}"
            raise ValueError(f"{named(one.name)} is {value}; it must be {limits}")


def agreed_options(options: Any) -> dict[str, Any]:
    """Return the options that must be the same on every rank, by name."""
    return {one.name: getattr(options, one.name) for one in fields(options) if _is_agreed(one)}


def on_command_line(name: str) -> str:
    """Return the name that a field has as an option of a command."""
    return name.replace("_", "-")


def _is_agreed(one: Field[Any]) -> bool:
    rules = one.metadata.get(_RULES)
    return rules is not None and rules["agreed"]
