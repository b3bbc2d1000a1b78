"""Options that commands share, and the files behind them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from gradlane.formats.profile import Profile
    from gradlane.planning.simulation.costs import MachineCosts

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
        help="Seconds after which no further run begins; call again for more.",
        show_default="no limit",
    ),
]


FROM_PROFILE = "`gradlane profile --json profile.json train.py` makes one"
FROM_CALIBRATE = "`gradlane lab calibrate --json costs.json` makes one"
FROM_MONITORING = 'a session with `Monitoring(trace="trace.json")` writes one for each rank'
FROM_RUNS = "`gradlane lab run --json results.json` makes one"


@contextlib.contextmanager
def remedied(remedy: str) -> Iterator[None]:
    """Return a context that ends the refusal of a file with the command that makes one.

    Args:
        remedy: says which command makes such a file.
    """
    try:
        yield
    except ValueError as refusal:
        raise ValueError(f"{refusal}; {remedy}") from refusal


def profile_of(text: str, batch_time_s: float | None) -> Profile:
    """Return the profile of a file or of a model by name, its step as long as is given."""
    from gradlane.planning.simulation.profiles import check_batch_time, find_profile

    # A file that lacks something has a remedy; this has none.
    check_batch_time(batch_time_s)
    with remedied(FROM_PROFILE):
        return find_profile(text, batch_time_s)


def accumulated_profile(text: str, batch_time: str | None) -> Profile:
    """Return the profile of a file or a model whose step is as long as is given.

    Args:
        text: the file or the model's name.
        batch_time: seconds of a batch, `4x0.05` for four whose gradients are added up; None: the
            profile's own.

    Raises:
        ValueError: the time is none.
    """
    batches, is_several, seconds = (batch_time or "").rpartition("x")
    try:
        count = int(batches) if is_several else 1
        batch_time_s = float(seconds) if batch_time is not None else None
    except ValueError:
        count, batch_time_s = 0, None
    if not 1 <= count <= 100_000:
        raise ValueError(
            f"batch-time-s is {batch_time!r}; write seconds, such as 0.2, or 4x0.05 for four "
            "batches of 0.05 s before each exchange"
        )
    return profile_of(text, batch_time_s).accumulated(count)


def costs_of(path: Path | None) -> MachineCosts | None:
    """Return the constants of a file; None without a file."""
    from gradlane.planning.simulation.costs import read_costs

    with remedied(FROM_CALIBRATE):
        return None if path is None else read_costs(path)


def read_rows(results: Path) -> list[dict[str, Any]]:
    """Read the rows of a lab run; `ValueError` where there are none."""
    with remedied(FROM_RUNS):
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
        raise ValueError(f"{path} holds no rows of a lab run or a what-if")
    return content


def require_writable(*paths: Path | None, page: Path | None = None) -> None:
    """Check what a command will write, before minutes of work are lost.

    Args:
        paths: files; None: not asked for.
        page: a page with plots.

    Raises:
        ValueError: a folder is missing.
        ModuleNotFoundError: the package that makes plots is.
    """
    if page is not None and find_spec("plotly") is None:
        raise ModuleNotFoundError("a page with plots needs plotly", name="plotly")
    for path in (*paths, page):
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"cannot write {path}: its folder does not exist")
        if path is not None and path.is_dir():
            raise ValueError(f"cannot write {path}: it is a folder")


def write_json(path: Path | None, content: Any) -> None:
    """Write a command's results; None: the user asked for no file."""
    require_writable(path)
    if path is not None:
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
