"""Text on a terminal: its width, and durations."""

from __future__ import annotations

from rich.console import Console


def wide_console() -> Console:
    """Return a console on standard output, 110 columns wide where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=110)


def format_time(seconds: float) -> str:
    """Return a duration in seconds or, below one, in milliseconds."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"
