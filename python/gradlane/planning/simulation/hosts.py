"""Hosts of simulated ranks: their processors, and the threads that sessions take on them."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.training.options.option_groups import Network

USUAL_PROCESSORS = 12
"""Processors of a rank where nothing is said: a rank that has an accelerator seldom has fewer."""


@dataclass(frozen=True)
class Host:
    """Threads of a rank."""

    lanes: int
    """Connections to each other rank, each with a thread of its own."""
    work_threads: int
    """Threads that add gradients up."""
    processors: int | None = None
    """Processors by which a session takes so many threads; None: the threads were given."""

    def __str__(self) -> str:
        """Return the host in words."""
        lanes = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        threads = f"{lanes} and {self.work_threads} work threads a rank"
        if self.processors is None:
            return threads
        return f"{threads}, as a session takes with {self.processors} processors"


def host_with(processors: int) -> Host:
    """Return the threads that a session takes where a rank has so many processors."""
    work_threads, lanes = Network().thread_counts(processors)
    return Host(lanes, work_threads, processors)


def parse_host(text: str) -> Host:
    """Parse a number of processors of a rank, or `lanes=2,work=3`, its threads.

    Raises:
        ValueError: the text is neither.
    """
    if text.strip().isdigit() and 1 <= int(text) <= 4096:
        return host_with(int(text))
    parts = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    counts = [
        int(one) if one.isdigit() else 0 for one in (parts.get("lanes", ""), parts.get("work", ""))
    ]
    if set(parts) != {"lanes", "work"} or not all(1 <= count <= 64 for count in counts):
        raise ValueError(
            f"host is {text!r}; give the number of processors of a rank, such as 16, or its "
            "threads, such as lanes=2,work=3"
        )
    return Host(*counts)
