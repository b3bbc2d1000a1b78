"""What processes that tests start have started themselves."""

from __future__ import annotations

from pathlib import Path


def children_of(process: int) -> list[int]:
    """Return what all threads of a process have started; nothing if it has ended meanwhile."""
    try:
        lists = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:
        return []
    return [int(one) for one in " ".join(lists).split()]


def descendants_of(process: int) -> list[int]:
    """Return the processes that a process started, and those that they did."""
    children = children_of(process)
    return children + [one for child in children for one in descendants_of(child)]
