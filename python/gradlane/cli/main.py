"""The `gradlane` command.

Arguments are checked before anything is started; heavy imports happen inside the commands, so
that help and mistakes are answered at once. Errors are one sentence on standard error: status 2
for wrong arguments, 1 for everything else, 130 after Ctrl-C, 143 after SIGTERM; `--debug` shows
the traceback. The commands of the lab are in `lab.py`, those that ask about a network in
`planning_commands.py`: both, and plug-ins, load when a command is asked for that is not here, so
that a command starts with its own options alone.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer.main
from typer.core import TyperGroup

from gradlane.cli.lasting_output import lasting_output
from gradlane.cli.options import (
    FROM_MONITORING,
    FROM_RUNS,
    HtmlPath,
    JsonPath,
    read_json,
    remedied,
    require_writable,
    rows_in,
    write_json,
)
from gradlane.cli.secret import secret
from gradlane.cli.serve import serve
from gradlane.cli.store import store
from gradlane.formats.reported_error import ReportedError
from gradlane.formats.signals import Terminated, unwind_on_sigterm
from gradlane.formats.untrusted import escaped, escaped_lines

if TYPE_CHECKING:
    from gradlane.cli.plugins import Plugins


class _LateGroup(TyperGroup):
    """The commands of `gradlane`; what is left of them loads when a name is not found."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of a name, or None; loads no more than it takes to find it."""
        for load in (_load_planning, _plugins):
            if cmd_name not in self.commands:
                load()
                self.commands = typer.main.get_group(app).commands
        return self.commands.get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        self.get_command(ctx, "")
        return super().list_commands(ctx)


app = typer.Typer(
    cls=_LateGroup,
    help="Data-parallel training at the speed of the compute, over networks that are slower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(secret, name="secret")
trace_commands = typer.Typer(help="Timelines of runs.", no_args_is_help=True)
app.add_typer(trace_commands, name="trace")


def _show_version(asked: bool) -> None:
    if asked:
        version()
        raise typer.Exit


@app.callback()
def _main(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="As `version`."),
    ] = False,
) -> None:
    # `main` reads the flag from the arguments, since an error may come before this is called; the
    # other one has its callback.
    del debug, version


@app.command()
def version(json_path: JsonPath = None) -> None:
    """Print the versions of gradlane and of what it runs on."""
    from gradlane.formats.provenance import package_versions

    versions = package_versions()
    write_json(json_path, versions)
    for name, text in versions.items():
        typer.echo(f"{name} {text}")


@app.command()
def demo(
    context: typer.Context,
    workload: Annotated[
        str | None,
        typer.Option(help="Train this instead, such as gpt2_small, as in `gradlane lab run`."),
    ] = None,
    rate: Annotated[
        str | None,
        typer.Option(
            help="Rate of every port, such as 1gbit; of a given workload by default one "
            "at which its gradients take as long as its compute."
        ),
    ] = None,
    html_path: HtmlPath = Path("demo.html"),
    json_path: JsonPath = None,
) -> None:
    """Train a real model on four emulated nodes, with DDP beside gradlane, in a few minutes."""
    from gradlane.formats.rates import parse_rate
    from gradlane.lab.cluster.privilege import ensure_namespaces
    from gradlane.lab.runs.demo import parts_of, run_demo
    from gradlane.report.console import wide_console

    parts = parts_of(workload, None if rate is None else parse_rate(rate))
    require_writable(json_path, page=html_path)
    unwind_on_sigterm(context)
    ensure_namespaces(sys.argv[1:])
    run_demo(wide_console(), json_path=json_path, html_path=html_path, parts=parts)


app.command()(serve)
app.command()(store)


@app.command()
def watch(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Of the live page, as the session logs it.")
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the state once, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each state as one line of JSON.")
    ] = False,
) -> None:
    """Show a running training, until its session ends or Ctrl-C.

    The session is opened with gradlane.Monitoring(dashboard="HOST:PORT"). The status is 0 if the
    session closes in order, else 1.
    """
    from gradlane.cli.watch import run_watch

    run_watch(address, once=once, as_json=as_json)


@app.command()
def dashboard(
    alerts: Annotated[
        bool, typer.Option("--alerts", help="Print rules for Prometheus in its place.")
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option(
            help="With --alerts: rate of every rank's port, such as 10gbit; adds a rule for ports "
            "that stay below."
        ),
    ] = None,
) -> None:
    """Print a dashboard for Grafana, over the metrics of gradlane.Monitoring(prometheus=...).

    As JSON: `gradlane dashboard > gradlane.json` is imported in Grafana; the file of `gradlane
    dashboard --alerts > gradlane-rules.yml` goes into `rule_files` of Prometheus.
    """
    from gradlane.formats.rates import parse_rate
    from gradlane.report.grafana import alerts as rules
    from gradlane.report.grafana import dashboard as panels

    if rate is not None and not alerts:
        raise ValueError("--rate is of --alerts: a dashboard shows rates, whatever the port's")
    found = rules(None if rate is None else parse_rate(rate)) if alerts else panels()
    typer.echo(json.dumps(found, indent=2))


@trace_commands.command("merge")
def trace_merge(
    files: Annotated[
        list[Path], typer.Argument(help="The ranks' files, such as trace.rank*.json.")
    ],
    output: Annotated[Path, typer.Option(help="Where all ranks go; .gz compresses.")],
) -> None:
    """Join the timelines of a run's ranks into one file, their clocks aligned."""
    from gradlane.formats.timeline.chrome import read_chrome, write_chrome
    from gradlane.formats.timeline.merge import merge

    require_writable(output)
    with remedied(FROM_MONITORING):
        timelines = [read_chrome(path) for path in files]
    timeline = merge(timelines)
    write_chrome(timeline, output)
    for note in timeline.notes:
        typer.echo(escaped(note))
    typer.echo(f"wrote {output}")


@app.command()
def report(
    results: Annotated[Path, typer.Argument(help="A file that --json wrote.")],
    html_path: HtmlPath = None,
) -> None:
    """Make an HTML page with plots of a results file."""
    from gradlane.cli.plugins import preset_of
    from gradlane.lab.runs.page import report_from_results, text_of_marked
    from gradlane.lab.runs.rows import rows_of
    from gradlane.planning.advice.page import report_from_whatif

    from_results = f"{FROM_RUNS}, and so does `gradlane whatif --json answer.json`"
    with remedied(from_results):
        content = read_json(results)
    target = html_path or results.with_suffix(".html")
    require_writable(page=target)
    note = ""
    if isinstance(content, dict) and "rows" in content and "answers" in content:
        report_from_whatif(content, target)
    elif preset := preset_of(content):
        note = _plugins().page_writer(preset)(content, target)
    else:
        with remedied(from_results):
            rows = rows_of(rows_in(content, results))
        report_from_results(rows, target)
        note = text_of_marked(rows)
    if note:
        typer.echo(note)
    typer.echo(f"wrote {target}")


def _join_lines(commands: typer.Typer) -> None:
    """Give commands the help of their docstrings with one line a paragraph, which typer wraps."""
    for command in commands.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        command.help = "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))
    for group in commands.registered_groups:
        if group.typer_instance is not None:
            _join_lines(group.typer_instance)


@functools.cache
def _load_planning() -> None:
    from gradlane.cli.planning_commands import add_planning

    add_planning(app)
    _join_lines(app)


@functools.cache
def _plugins() -> Plugins:
    """Return the plug-ins, with all commands loaded: none may take a name of gradlane's own."""
    from gradlane.cli.lab import lab
    from gradlane.cli.plugins import Plugins

    _load_planning()
    app.add_typer(lab, name="lab")
    plugins = Plugins({"": app, "lab": lab})
    _join_lines(app)
    return plugins


def all_commands() -> Any:
    """Return all commands as typer has them."""
    _plugins()
    return typer.main.get_command(app)


_join_lines(app)


def main() -> None:
    """Run the command line; never returns."""
    debug = "--debug" in sys.argv[1:]
    try:
        with lasting_output():
            app()
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except SystemExit as end:
        # Typer makes this of Ctrl-C, without a word.
        if end.code == 130:
            typer.echo("interrupted", err=True)
        raise
    except Terminated:
        typer.echo("terminated", err=True)
        sys.exit(143)
    except ModuleNotFoundError as failure:
        if debug or (failure.name or "").startswith("gradlane"):
            raise
        wanted = (failure.name or "").partition(".")[0]
        need = f"`pip install {wanted}`"
        if wanted in ("plotly", "pyroute2", "sklearn"):
            need = "the lab and the reports need `pip install 'gradlane[lab]'`"
        typer.echo(f"gradlane: the package {wanted} is missing: {need}", err=True)
        sys.exit(1)
    except Exception as failure:
        if debug:
            raise
        typer.echo(f"gradlane: {escaped_lines(str(failure))}", err=True)
        if isinstance(failure, ReportedError) and failure.details:
            typer.echo("what the rank said last:", err=True)
            last = "\n".join(failure.details.rstrip().splitlines()[-12:])
            typer.echo(escaped_lines(last), err=True)
        if not isinstance(failure, (ValueError, ReportedError)):
            typer.echo(f"({type(failure).__name__}; --debug shows where)", err=True)
        sys.exit(2 if isinstance(failure, ValueError) else 1)
