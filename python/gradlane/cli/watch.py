"""The command `gradlane watch`: the live page of a session, in a terminal."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradlane.formats.live_state import NEXT_QUERY, STATE_PATH, LiveState, StepRow, read_state
from gradlane.formats.rates import format_rate
from gradlane.formats.reported_error import ReportedError
from gradlane.formats.serialization.strict_json import FormatError
from gradlane.formats.untrusted import escaped
from gradlane.report.console import format_time, wide_console
from gradlane.training.options.endpoint import parse_address

REQUEST_TIMEOUT_S = 6.0
"""Longest wait for one answer; a session answers within two seconds."""
STATE_BYTES_MAX = 16 << 20
RETRY_S = 5.0
"""How long a session that has answered before is asked again."""
_LINE_EVERY_S = 10.0
"""Seconds between two lines where standard output is no terminal."""
_LAYERS_SHOWN = 8
_RANKS_SHOWN = 16
_EVENTS_SHOWN = 5
_BARS = "▁▂▃▄▅▆▇█"


class _NoAnswerError(ReportedError):
    """The session does not answer."""


def run_watch(address: str, *, once: bool, as_json: bool) -> None:
    """Show the state of a session until it ends or Ctrl-C.

    Args:
        address: of the live page: `PORT`, `HOST:PORT` or its URL.
        once: show it once.
        as_json: print each state as one line of JSON.

    Raises:
        ValueError: the address is none.
        ReportedError: nobody answers, or the session did not close in order.
    """
    host, port = parse_address(
        address.removeprefix("http://").removesuffix("/"), "the address of the live page"
    )
    states = _follow(host, port)
    with suppress(KeyboardInterrupt):
        if once:
            states = iter([next(states)])
        if as_json:
            last = None
            for last in states:
                typer.echo(json.dumps(last))
        else:
            last = _show(states, wide_console(), is_live=not once)
        if last is not None and last["ending"]:
            _tell_ending(last, is_quiet=as_json)


def _tell_ending(state: LiveState, *, is_quiet: bool) -> None:
    """Print how the session has ended.

    Raises:
        ReportedError: it did not close in order.
    """
    when = f"after {state['step']} steps and {_span(state['uptime_s'])}"
    if state["ending"] != "closed":
        raise ReportedError(f"the session has ended {when}: {escaped(state['ending'])}")
    if not is_quiet:
        typer.echo(f"The session closed in order {when}.")


def _follow(host: str, port: int) -> Iterator[LiveState]:
    """Yield the state, and each later one until the session ends.

    Raises:
        ReportedError: nobody answers, or something else than a session.
    """
    try:
        last = _read(host, port, "")
    except _NoAnswerError as error:
        raise ReportedError(
            f"{error}; is the training running, with Monitoring(dashboard=...), and is this its "
            "address? Rank 0 logs it; from another machine open a way to it first: "
            f"ssh -L {port}:127.0.0.1:{port} MACHINE"
        ) from error
    yield last
    while not last["ending"]:
        try:
            last = _read(host, port, f"?{NEXT_QUERY}")
        except _NoAnswerError as error:
            last = _read_again(host, port, last, error)
        yield last


def _read_again(host: str, port: int, last: LiveState, error: _NoAnswerError) -> LiveState:
    """Ask a session again that has answered before."""
    deadline_s = time.monotonic() + RETRY_S
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        with suppress(_NoAnswerError):
            return _read(host, port, "")
    raise ReportedError(
        f"rank {last['rank']} answers no more, after step {last['step']}, and has not said that "
        f"its session ends ({error}): its process was killed or its machine is gone; what the "
        "program has printed may say why"
    ) from error


def _read(host: str, port: int, query: str) -> LiveState:
    """Ask for one state.

    Raises:
        _NoAnswerError: nobody answers.
        ReportedError: something else than a session answers.
    """
    place = f"{host}:{port}"
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", STATE_PATH + query)
        with connection.getresponse() as answer:
            content = answer.read(STATE_BYTES_MAX + 1)
            if answer.length and len(content) <= STATE_BYTES_MAX:
                raise ConnectionError("the answer breaks off")
    except OSError as error:
        reason = error.strerror or error
        raise _NoAnswerError(f"nobody answers at {place}: {reason}") from error
    except http.client.HTTPException as error:
        raise ReportedError(
            f"{place} does not answer as a live page does ({type(error).__name__}): is it the port "
            "of Monitoring(dashboard=...)?"
        ) from error
    finally:
        connection.close()
    if answer.status == http.client.SERVICE_UNAVAILABLE:
        raise _NoAnswerError(f"the session at {place} has no state at present")
    if answer.status != http.client.OK:
        raise ReportedError(
            f"{place} answers {STATE_PATH} with {answer.status}: is it the port of "
            "Monitoring(dashboard=...)?"
        )
    if len(content) > STATE_BYTES_MAX:
        raise ReportedError(f"{place} answers with over {STATE_BYTES_MAX >> 20} MiB, no state")
    try:
        return read_state(content)
    except FormatError as error:
        raise ReportedError(f"{place} is read, but {error}") from error


def _show(states: Iterable[LiveState], console: Console, *, is_live: bool) -> LiveState | None:
    """Print states as they come, and return the last: in place on a terminal, else in lines."""
    last: LiveState | None = None
    if not is_live:
        for last in states:
            console.print(picture(last, console.height))
        return last
    if not console.is_terminal:
        said_s = 0.0
        for last in states:
            if time.monotonic() - said_s >= _LINE_EVERY_S:
                said_s = time.monotonic()
                typer.echo(line(last))
        return last
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for last in states:
            live.update(picture(last, console.height), refresh=True)
    return last


def line(state: LiveState) -> str:
    """Return a state in one line."""
    steps, window = state["steps"], state["window"]
    text = (
        f"step {state['step']}: {format_time(steps['median_s'])} (median), "
        f"{window['wait_share']:.0%} waiting"
    )
    if state["layers"] and window["wait_share"] > 0:
        text += f", most for {escaped(state['layers'][0]['name'])!r}"
    return f"{text}; {_status(state)[0]}"


def picture(state: LiveState, height: int) -> Group:
    """Return a state as tables, as many rows as a terminal has room for.

    Args:
        state: what to show.
        height: of the terminal, in lines.
    """
    text, style = _status(state)
    room = max(2, (height - 20) // 3)
    parts: list[RenderableType] = [
        Text.assemble(
            (f"Rank {state['rank']} of {state['world_size']}", "bold"),
            f", {escaped(state['strategy'])}, {_span(state['uptime_s'])}: ",
            (text, style),
        ),
        _figures(state),
        _layers(state, min(room, _LAYERS_SHOWN)),
        _ranks(state, min(room, _RANKS_SHOWN)),
        _codecs(state),
        _events(state, min(room, _EVENTS_SHOWN)),
    ]
    return Group(*parts)


def _status(state: LiveState) -> tuple[str, str]:
    """Return what the training does, and the style of that."""
    if state["ending"]:
        ending = escaped(state["ending"])
        return f"session {ending}", "green" if ending == "closed" else "bold red"
    if not state["is_stalled"]:
        return ("training", "green") if state["step"] else ("no step yet", "yellow")
    text = f"no news since {_span(state['quiet_s'])}: no step has begun"
    wait = state["wait"]
    if wait is None:
        return f"{text}; the program is not waiting for gradients", "bold red"
    what = escaped(wait["tensors"][0]) if wait["tensors"] else "all"
    more = f" and {wait['tensor_count'] - 1} more" if wait["tensor_count"] > 1 else ""
    return f"{text}; the program waits for {what}{more} of step {wait['step']}", "bold red"


def _figures(state: LiveState) -> Text:
    steps, window = state["steps"], state["window"]
    sent, received = (
        8 * sum(row[name] for row in state["ranks"])
        for name in ("tx_bytes_per_s", "rx_bytes_per_s")
    )
    return Text.assemble(
        (f"step {state['step']:,}", "bold"),
        f"   {format_time(steps['median_s'])} a step (median)   ",
        (f"{window['wait_share']:.0%} waiting", "bold red" if window["wait_share"] > 0.25 else ""),
        f"   sent {format_rate(sent)}   received {format_rate(received)}{_clipping(state)}\n",
        (sparkline(state["recent"]), "blue"),
    )


def _clipping(state: LiveState) -> str:
    if not state["clip_steps"]:
        return ""
    share = state["clipped_steps"] / state["clip_steps"]
    return f"   clipped by {state['clip_factor']:.3g} ({share:.0%} of the steps)"


def sparkline(rows: Sequence[StepRow], width: int = 64) -> str:
    """Return the times of the last steps as a line of bars; five medians and more are the top."""
    times_s = [row["mean_s"] for row in rows[-width:]]
    if not times_s:
        return ""
    top_s = min(max(times_s), 5 * sorted(times_s)[len(times_s) // 2]) or 1.0
    return "".join(_BARS[min(7, max(0, int(8 * time_s / top_s)))] for time_s in times_s)


def _span(seconds: float) -> str:
    """Return a duration in its two largest units."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _table(title: str, *columns: str) -> Table:
    table = Table(show_edge=False, pad_edge=False, header_style="dim")
    table.add_column(title, overflow="ellipsis", no_wrap=True, max_width=44)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _layers(state: LiveState, rows: int) -> Table:
    table = _table(
        f"waited for, last {_span(state['window']['length_s'])}",
        *("share", "a step", "since the start", "longest", "in step"),
    )
    for row in state["layers"][:rows]:
        table.add_row(
            Text(escaped(row["name"])),
            f"{row['recent_share']:.0%}",
            format_time(row["recent_wait_s"]),
            format_time(row["wait_s"]),
            format_time(row["wait_s_max"]) if row["max_step"] else "-",
            f"{row['max_step']:,}" if row["max_step"] else "-",
        )
    return table


def _ranks(state: LiveState, rows: int) -> Table:
    """Return the ranks; if not all have room, those that came last most often."""
    table = _table(
        "rank", *("came last", "late by", "sent to it", "received", "queued", "steps without it")
    )
    shown = sorted(state["ranks"], key=lambda row: -row["recent_last_share"])[:rows]
    for row in sorted(shown, key=lambda row: row["rank"]):
        role = {"self": " (this one)", "serves": " (serves)"}.get(row["role"], "")
        table.add_row(
            f"{row['rank']}{role}",
            f"{row['recent_last_share']:.0%}",
            format_time(row["recent_late_s_mean"]),
            format_rate(8 * row["tx_bytes_per_s"]),
            format_rate(8 * row["rx_bytes_per_s"]),
            f"{(row['queued_bytes'] + row['in_flight_bytes']) / 1e6:.1f} MB",
            f"{row['left_out_steps']:,}",
        )
    return table


def _codecs(state: LiveState) -> Text:
    texts = [
        f"{escaped(row['codec'])}: {row['tensors']} tensors"
        + ("" if row["residual_norm"] is None else f", residual {row['residual_norm']:.4g}")
        for row in state["codecs"]
    ]
    encodes = state["encoded_bytes"] not in (0, state["raw_bytes"])
    ratio = f"; bytes 1/{state['codec_ratio']:.3g}" if encodes else ""
    return Text("; ".join(texts) + ratio, style="dim")


def _events(state: LiveState, rows: int) -> Text:
    styles = {"warning": "yellow", "error": "bold red"}
    text = Text()
    for event in state["events"][-rows:]:
        text.append(f"{_span(event['at_s']):>9}  ", style="dim")
        text.append(f"{escaped(event['text'])}\n", style=styles.get(event["level"], ""))
    return text
