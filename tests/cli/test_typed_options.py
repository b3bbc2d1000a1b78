"""Options of commands that are made from dataclasses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import typer
import typer.main

from gradlane.cli.main import all_commands
from gradlane.cli.typed_options import Taken, typed
from gradlane.formats.durations import parse_duration_s
from gradlane.lab.calibration.options import CalibrationOptions
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.transport.options import TransportOptions
from gradlane.planning.profiler.options import RecordingOptions
from gradlane.planning.simulation.faults import FaultSettings
from gradlane.planning.simulation.lists import Grid
from gradlane.planning.simulation.paths import Paths
from gradlane.training.options.option_fields import (
    OptionGroup,
    check_options,
    on_command_line,
    option,
    option_rules,
    read_int,
    with_environment,
)
from gradlane.training.plans.settings import ClusterFacts


def _twice(text: str) -> int:
    return 2 * int(text)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@dataclass(frozen=True)
class Timed:
    """Options without variables."""

    after_s: float = option(name="after", doc="When.", read=parse_duration_s, text="2s", most=60)
    count: int = option(3, "How many.", least=1)
    sizes: tuple[int, ...] = option((), "Which.", name="size", read=_twice, repeated=True)
    names: tuple[str, ...] = option((), "Whose.", read=_parts)
    loud: bool = option(False, "Whether it is heard.")
    hidden: int = option(7, least=0)

    def __post_init__(self) -> None:
        """Raise `ValueError` for what is out of range."""
        check_options(self, on_command_line)


@dataclass(frozen=True, repr=False)
class Reached(OptionGroup):
    """Options that variables give, too."""

    port: int | None = option(None, "Where.", read=read_int)
    wait_s: float = option(300.0, "How long.")


@dataclass(frozen=True)
class Lost:
    """Options of which one is needed."""

    every_s: float = option(name="lost-every", doc="How often.", read=parse_duration_s)
    back_s: float = option(name="back-time", doc="How long.", read=parse_duration_s, text="60s")


MADE: list[Any] = []


@typed
def command(
    timed: Timed,
    reached: Annotated[Reached, Taken(wait_s=60.0)],
    lost: Lost | None,
    own: Annotated[str, typer.Option(help="No field's.")] = "",
) -> None:
    """Keep what was made."""
    MADE[:] = [timed, reached, lost, own]


def made(*arguments: str) -> list[Any]:
    one = typer.Typer()
    one.command()(command)
    typer.main.get_command(one).main(list(arguments), standalone_mode=False)
    return MADE


def test_defaults_are_those_of_the_dataclasses() -> None:
    timed, reached, lost, own = made()
    assert timed == Timed() and timed.after_s == 2.0 and lost is None and own == ""
    # A port that is not given may still come from its variable, and the command's wait does not.
    found = with_environment(reached, {"GRADLANE_PORT": "5", "GRADLANE_WAIT_S": "1"})
    assert (found.port, found.wait_s) == (5, 60.0)


def test_texts_are_read_and_checked_by_the_rules_of_their_fields() -> None:
    timed, reached, lost, _ = made(
        *(
            "--after",
            "500ms",
            "--size",
            "2",
            "--size",
            "5",
            "--names",
            "a,b",
            "--loud",
            "--port",
            "4000",
        ),
        *("--lost-every", "6h", "--back-time", "1min", "--own", "x"),
    )
    assert timed == Timed(after_s=0.5, sizes=(4, 10), names=("a", "b"), loud=True)
    assert (reached.port, lost) == (4000, Lost(21600.0, 60.0))
    for words, said in (
        (("--after", "500"), "--after: '500' has no unit"),
        (("--after", "2min"), "after is 120.0; it must be at most 60"),
        (("--count", "0"), "count is 0"),
        (("--back-time", "1s"), "--back-time has no effect without --lost-every"),
    ):
        with pytest.raises(ValueError, match=said):
            made(*words)


def test_fields_without_a_meaning_are_no_options() -> None:
    one = typer.Typer()
    one.command()(command)
    flags = {flag for it in typer.main.get_command(one).params for flag in it.opts}
    assert flags >= {"--after", "--count", "--size", "--loud", "--own"} and "--hidden" not in flags


KINDS: dict[str, tuple[Any, ...]] = {
    "lab run": (LabOptions,),
    "lab transport": (TransportOptions,),
    "lab calibrate": (CalibrationOptions,),
    "profile": (RecordingOptions,),
    "plan": (ClusterFacts,),
    "whatif": (Grid, Paths, FaultSettings),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_documented_field_is_an_option_of_its_command(name: str) -> None:
    found = all_commands()
    for word in name.split():
        found = found.commands[word]
    helps = {flag: one.help for one in found.params for flag in one.opts}
    for kind in KINDS[name]:
        for rules in option_rules(kind).values():
            if rules.doc:
                assert helps[f"--{on_command_line(rules.name)}"] == rules.doc.replace("`", "")
