"""Commands of other distributions: what one adds to the command line, and how it is found.

A distribution that names a `Plugin` in the entry point group `gradlane.plugins` adds its commands
and its pages. One that does not load is named on standard error; the other commands stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import typer

from gradlane.formats.reported_error import ReportedError

GROUP = "gradlane.plugins"
"""The group of entry points."""
PAPERS = "gradlane-papers"
"""The distribution of the papers' figures, experiments and accuracy."""
PAPERS_COMMANDS = (
    "reproduce",
    *(f"lab {name}" for name in ("accuracy", "bandwidth", "scaling", "slices", "utilization")),
)
"""Its commands: where it is not installed, each says so."""

_PANEL = "Commands of "

PageWriter = Callable[[Sequence[Any], Path], str]
"""Writes the HTML page of a results file's rows; returns a note to print, empty if none."""


@dataclass(frozen=True)
class Plugin:
    """What a distribution adds to the command line.

    Attributes:
        commands: functions as typer takes them, by name: `NAME`, or `GROUP NAME` in the group of a
            command, such as `lab slices`.
        pages: writers of `gradlane report`'s page, by the field `preset` of a file's rows.
    """

    commands: Mapping[str, Callable[..., None]]
    pages: Mapping[str, PageWriter] = field(default_factory=dict)


class Plugins:
    """The plug-ins that are installed, their commands added to groups of commands.

    Args:
        groups: by name; the empty name is that of the commands without a group.
        entries: of the group `GROUP`; None: those of this environment.
    """

    def __init__(
        self, groups: Mapping[str, typer.Typer], entries: Iterable[EntryPoint] | None = None
    ) -> None:
        self._groups = groups
        self._pages: dict[str, PageWriter] = {}
        self._broken: set[str] = set()
        added: dict[str, str] = {}
        for entry in entry_points(group=GROUP) if entries is None else entries:
            distribution = entry.value if entry.dist is None else entry.dist.name
            try:
                plugin = _loaded(entry)
                self._check(plugin, added)
            except Exception as failure:
                self._broken.add(distribution)
                typer.echo(
                    f"gradlane: the commands of {distribution} are left out: {entry.value} does "
                    f"not load: {type(failure).__name__}: {failure}",
                    err=True,
                )
                continue
            for name, function in plugin.commands.items():
                added[name] = distribution
                self._add(name, function, rich_help_panel=f"{_PANEL}{distribution}")
            self._pages.update(plugin.pages)
        for name in PAPERS_COMMANDS:
            if name not in added:
                self._add_missing(name)

    def page_writer(self, preset: str) -> PageWriter:
        """Return what writes the page of a preset's rows.

        Raises:
            ReportedError: no plug-in that is installed has it.
        """
        if preset not in self._pages:
            raise self._lacks(f"the page of rows of the preset {preset!r}")
        return self._pages[preset]

    def _check(self, plugin: Plugin, added: Mapping[str, str]) -> None:
        for name in plugin.commands:
            group, _, own = name.rpartition(" ")
            if group not in self._groups:
                raise ValueError(f"command {name!r}: there is no group {group!r}")
            if name in added or own in _names(self._groups[group]):
                raise ValueError(
                    f"command {name!r} is there already, of {added.get(name, 'gradlane')}"
                )

    def _add(self, name: str, function: Callable[..., None], **settings: Any) -> None:
        group, _, own = name.rpartition(" ")
        self._groups[group].command(own, **settings)(function)

    def _add_missing(self, name: str) -> None:
        """Add a hidden command that takes any arguments and says what to install."""

        def missing(context: typer.Context) -> None:
            del context
            raise self._lacks(f"the command `gradlane {name}`")

        taken = {"ignore_unknown_options": True, "allow_extra_args": True}
        self._add(name, missing, hidden=True, add_help_option=False, context_settings=taken)

    def _lacks(self, wanted: str) -> ReportedError:
        if PAPERS in self._broken:
            return ReportedError(f"{wanted} is of {PAPERS}, which does not load; see above")
        return ReportedError(
            f"{wanted} is of {PAPERS}, which is not installed: `pip install {PAPERS}`, or in a "
            "clone `pip install ./papers`"
        )


def distribution_of(command: Any) -> str:
    """Return the distribution that a command of typer's is of."""
    panel = str(getattr(command, "rich_help_panel", ""))
    return panel.removeprefix(_PANEL) if panel.startswith(_PANEL) else "gradlane"


def preset_of(content: Any) -> str:
    """Return the preset of a results file's content; empty where it is none's."""
    is_rows = isinstance(content, list) and bool(content) and isinstance(content[0], dict)
    return str(content[0].get("preset") or "") if is_rows else ""


def _loaded(entry: EntryPoint) -> Plugin:
    plugin = entry.load()
    if not isinstance(plugin, Plugin):
        raise TypeError(f"it is a {type(plugin).__name__} in place of a Plugin")
    return plugin


def _names(group: typer.Typer) -> set[str]:
    """Return the names of a group's commands and groups."""
    commands = {
        one.name or getattr(one.callback, "__name__", "") for one in group.registered_commands
    }
    return commands | {one.name or "" for one in group.registered_groups}
