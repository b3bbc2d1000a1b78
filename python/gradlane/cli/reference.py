"""The pages `docs/cli.md` and `docs/environment.md`, made from the commands and the options.

`python -m gradlane.cli.reference docs` writes both into the folder `docs`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gradlane.cli.main import all_commands
from gradlane.cli.plugins import distribution_of
from gradlane.training.options.option_fields import option_rules
from gradlane.training.options.option_groups import ENVIRONMENT_GROUPS
from gradlane.training.options.reference import FURTHER_VARIABLES

_CLI_HEAD = """# Commands

`gradlane COMMAND --help` says the same on a terminal. `--json FILE` and `--html FILE` write what a
command prints as data and as a page. The exit status is 0; 1 after an error; 2 for a wrong
argument; 130 after Ctrl-C and 143 after SIGTERM. `gradlane --debug COMMAND` shows tracebacks.
`gradlane --install-completion` has the shell complete commands and options
([install](install.md#completion)).

`python -m gradlane.cli.reference docs` writes this page.
"""
_VARIABLES_HEAD = """# Environment variables

A value that the program gives to `gradlane.init` goes before its variable. Options that are
switched on or off take `1`, `true`, `yes`, `on` or `0`, `false`, `no`, `off`. A variable that
begins with `GRADLANE_` and is unknown is warned of. Meanings, defaults and ranges:
[options](options.md).

`python -m gradlane.cli.reference docs` writes this page.

| variable | option |
| --- | --- |
"""
_LAUNCHERS = """
## Of launchers

Rank, world size and meeting place come from torchrun, Slurm or MPI: `RANK`, `WORLD_SIZE`,
`LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT` and what Slurm and MPI call them
([launchers](coming-from-ddp.md#launchers)). For a store that outlives all ranks see
[launching](launching.md).
"""


def cli_page() -> str:
    """Return the page of commands."""
    return _CLI_HEAD + "".join(_sections(all_commands(), "gradlane"))


def variables_page() -> str:
    """Return the page of environment variables."""
    rows = [
        (rules.variable, f"`{group.__name__}.{name}`")
        for group in ENVIRONMENT_GROUPS
        for name, rules in option_rules(group).items()
        if rules.in_environment
    ]
    rows += [(name, f"none: {meaning}") for name, meaning in FURTHER_VARIABLES.items()]
    table = "".join(f"| `{name}` | {option} |\n" for name, option in sorted(rows))
    return _VARIABLES_HEAD + table + _LAUNCHERS


def _sections(command: Any, path: str) -> Iterator[str]:
    """Yield a section for a command, or for each command of a group."""
    children = getattr(command, "commands", None)
    if children is None:
        yield f"\n## {path}\n\n{_paragraphs(command.help)}\n"
        if (distribution := distribution_of(command)) != "gradlane":
            yield f"\nOf the distribution `{distribution}` ([install](install.md)).\n"
        if (usage := _usage(command, path)) != f"{path} [OPTIONS]":
            yield f"\n```text\n{usage}\n```\n"
        rows = [row for one in command.params if (row := _row(one)) is not None]
        if rows:
            yield "\n| argument | default | meaning |\n| --- | --- | --- |\n" + "".join(rows)
        return
    for name in sorted(children):
        if not children[name].hidden:
            yield from _sections(children[name], f"{path} {name}")


def _usage(command: Any, path: str) -> str:
    """Return the synopsis of a command."""
    words = [path]
    if any(one.param_type_name == "option" for one in command.params):
        words.append("[OPTIONS]")
    for one in command.params:
        if one.param_type_name == "argument":
            name = (one.metavar or one.name or "").upper()
            dots = "..." if one.nargs == -1 else ""
            words.append(f"{name}{dots}" if one.required else f"[{name}{dots}]")
    return " ".join(words)


def _row(parameter: Any) -> str | None:
    """Return the row of an argument or option; None for those that are not shown."""
    if getattr(parameter, "hidden", False):
        return None
    if parameter.param_type_name == "argument":
        names = f"`{(parameter.metavar or parameter.name or '').upper()}`"
    else:
        names = ", ".join(f"`{one}`" for one in [*parameter.opts, *parameter.secondary_opts])
    default = parameter.default
    if parameter.required:
        shown = "needed"
    elif default is None or default is False or callable(default) or default in ("", (), []):
        shown = "-"
    else:
        text = getattr(default, "value", default)
        shown = f"`{'on' if text is True else text}`"
    meaning = re.sub(r"([|\[])", r"\\\1", _paragraphs(parameter.help))
    return f"| {names} | {shown} | {meaning} |\n"


def _paragraphs(text: str | None) -> str:
    """Return a help text with each paragraph on one line."""
    blocks = (text or "").replace("\b", "").split("\n\n")
    return "\n\n".join(" ".join(block.split()) for block in blocks).strip()


def main(folder: Path) -> None:
    """Write both pages."""
    (folder / "cli.md").write_text(cli_page(), encoding="utf-8")
    (folder / "environment.md").write_text(variables_page(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
