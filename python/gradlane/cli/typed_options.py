"""Options of commands made from dataclasses, so that an option is written once.

A parameter of a command whose type is a dataclass of options stands for one option of the command
a field, with the field's default, meaning and parser:

    @lab.command("run")
    @typed
    def lab_run(options: LabOptions, json_path: JsonPath = None) -> None: ...

Fields without a meaning are none. `Annotated[Network, Taken("lanes")]` takes some fields alone. A
parameter `FaultSettings | None` is None unless the options without a default are given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from gradlane.training.options.option_fields import (
    OptionGroup,
    OptionRules,
    on_command_line,
    option_rules,
    read_flag,
    read_float,
    read_int,
)

_READ_BY_TYPER = {read_int: int, read_float: float, read_flag: bool, Path: Path, str: str}
_ABSENT = inspect.Parameter.empty


class Taken:
    """The options of a dataclass that a command has.

    Args:
        names: fields; all with a meaning if absent.
        without: fields that the command has no option for.
        values: of fields; other defaults than the dataclass's where these are options.
    """

    def __init__(self, *names: str, without: Collection[str] = (), **values: Any) -> None:
        self._names = names
        self._without = without
        self.values = values

    def rules(self, kind: type[Any]) -> dict[str, OptionRules]:
        """Return the rules of a dataclass's options that the command has, by field."""
        return {
            name: rules
            for name, rules in option_rules(kind).items()
            if (name in self._names or (rules.doc and not self._names))
            and name not in self._without
        }


def typed(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for typer that has the options of its dataclasses, and makes these."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, _Group] = {}
    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = _group_of(hints[name])
        if group is None:
            own = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            parameters.append(own)
        else:
            groups[name] = group
            parameters += group.parameters()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {name: group.make(given) for name, group in groups.items()}
        command(**made, **given)

    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


class _Group:
    """A command's options of one dataclass."""

    def __init__(self, kind: type[Any], taken: Taken, *, may_be_absent: bool) -> None:
        self._kind = kind
        self._taken = taken
        self._may_be_absent = may_be_absent
        self._rules = taken.rules(kind)

    def parameters(self) -> list[inspect.Parameter]:
        """Return the options as parameters of a function for typer."""
        return [self._parameter(name, rules) for name, rules in self._rules.items()]

    def _parameter(self, name: str, rules: OptionRules) -> inspect.Parameter:
        own = getattr(self._kind, name, _ABSENT)
        default = self._taken.values.get(name, own)
        kind: Any = _READ_BY_TYPER.get(rules.read, str)
        flag = f"--{on_command_line(rules.name)}"
        shown: bool | str = True
        if rules.repeated:
            kind, default = list[kind], None
        elif rules.text:
            default = rules.text
        elif rules.read not in _READ_BY_TYPER and default is not _ABSENT:
            default = None
        # What is given goes before environment variables, so a default must not count as given.
        if self._may_be_absent:
            shown, default = False, None
        elif issubclass(self._kind, OptionGroup) and default == own:
            shown, default = False if default is None else str(default), None
        info = typer.Option(flag, help=rules.doc.replace("`", ""), show_default=shown)
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind | None if default is None else kind, info],
        )

    def make(self, given: dict[str, Any]) -> Any:
        """Return the object, whose options are taken out of the command's.

        Raises:
            ValueError: an option cannot be read, is out of range, or lacks one that it needs.
        """
        values = dict(self._taken.values)
        for name, rules in self._rules.items():
            value = given.pop(name)
            if value is None:
                continue
            if rules.repeated:
                values[name] = tuple(_read(rules, one) for one in value)
                continue
            value = _read(rules, value)
            # A text may say several fields at once, as that of `--servers`.
            values |= value._asdict() if hasattr(value, "_asdict") else {name: value}
        if self._may_be_absent:
            missing = [
                rules.name
                for name, rules in self._rules.items()
                if name not in values and not hasattr(self._kind, name)
            ]
            if missing and values:
                first = on_command_line(self._rules[next(iter(values))].name)
                needed = on_command_line(missing[0])
                raise ValueError(
                    f"--{first} has no effect without --{needed}: leave it out, or add --{needed}"
                )
            if missing:
                return None
        return self._kind(**values)


def _read(rules: OptionRules, value: Any) -> Any:
    """Return the value of an option whose text typer has not read already."""
    if rules.read in _READ_BY_TYPER:
        return value
    try:
        return rules.read(value)
    except ValueError as refusal:
        flag = on_command_line(rules.name)
        if flag in str(refusal) or rules.name in str(refusal):
            raise
        raise ValueError(f"--{flag}: {refusal}") from None


def _group_of(hint: Any) -> _Group | None:
    """Return the group of a parameter's type; None for one that typer takes as it is."""
    taken = Taken()
    if get_origin(hint) is Annotated:
        hint, *notes = get_args(hint)
        taken = next((one for one in notes if isinstance(one, Taken)), taken)
    kinds = [one for one in get_args(hint) if one is not NoneType] or [hint]
    if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]):
        return _Group(kinds[0], taken, may_be_absent=NoneType in get_args(hint))
    return None
