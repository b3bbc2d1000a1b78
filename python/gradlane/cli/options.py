"""Options that commands share, and the files behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradlane.training.options.option_fields import GroupType, option_rules

JsonPath = Annotated[
    Path | None, typer.Option("--json", help="Write what is printed, machine-readable.")
]
CostsPath = Annotated[
    Path | None,
    typer.Option("--costs", help="Constants of a machine, as `lab calibrate --json` wrote them."),
]
HtmlPath = Annotated[Path | None, typer.Option("--html", help="Write a page with plots.")]
RunsBudgetS = Annotated[
    float,
    typer.Option(
        "--budget-s",
        help="Begin no further run after so many seconds; call again for more.",
        show_default="no limit",
    ),
]


def session_option(options: type[Any], field_name: str) -> Any:
    """Return a command's option for an option of a session, with its help."""
    rules = option_rules(options)[field_name]
    default = getattr(options, field_name)
    shown = False if default is None else str(default)
    return typer.Option(help=rules.doc.replace("`", ""), show_default=shown)


def given_options(group: type[GroupType], **values: Any) -> GroupType:
    """Return a group of options of the values that a command was given."""
    return group(**{name: value for name, value in values.items() if value is not None})


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read the rows of a lab run; `ValueError` where there are none."""
    return rows_in(read_json(results), results)


def read_json(path: Path) -> Any:
    """Read a file; `ValueError` where it cannot be read or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as failure:
        raise ValueError(f"cannot read {path}: {failure.strerror}") from failure
    except ValueError as failure:
        raise ValueError(f"{path} is not JSON: {failure}") from failure


def rows_in(content: Any, path: Path) -> list[dict[str, Any]]:
    """Return what a file held as rows of a lab run; `ValueError` where it is something else."""
    if not isinstance(content, list) or not content or "strategy" not in content[0]:
        raise ValueError(
            f"{path} holds no rows of a lab run or a what-if: make it with `lab run --json` or "
            "`whatif --json`"
        )
    return content


def require_writable(*paths: Path | None) -> None:
    """Raise `ValueError` for a path whose folder is missing, before minutes of work are lost."""
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")


def write_json(path: Path | None, content: Any) -> None:
    """Write a command's results; None: the user asked for no file."""
    require_writable(path)
    if path is not None:
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
