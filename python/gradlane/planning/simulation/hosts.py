"""Hosts of simulated ranks: their processors, and the threads that run on them."""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.training.options.option_groups import Network

USUAL_PROCESSORS = 12
"""Processors of a rank where nothing is said: a rank that has an accelerator seldom has fewer."""


@dataclass(frozen=True)
class Host:
    """Processors and threads of a rank."""

    lanes: int | None = None
    """Connections to each other rank, each with a thread of its own; None: as many as a session
    takes by its processors and the rate of its port."""
    work_threads: int | None = None
    """Threads that add gradients up; None: one a lane."""
    processors: int = 0
    """Threads that run at a time; 0: all."""

    def threads(self, port_rate_bps: float | None) -> tuple[int, int]:
        """Return the lanes and the work threads behind a port of this rate; None: of any."""
        _, own = Network().thread_counts(self.processors, port_rate_bps)
        lanes = own if self.lanes is None else self.lanes
        return lanes, lanes if self.work_threads is None else self.work_threads

    def __str__(self) -> str:
        """Return the host in words."""
        if self.lanes is None:
            most, _ = self.threads(None)
            lanes = f"a lane for 10 Gbit/s, {most} at most," if most > 1 else "1 lane"
            text = f"{lanes} and as many work threads a rank"
            return f"{text}, as a session takes with {self.processors} processors"
        lanes = "1 lane" if self.lanes == 1 else f"{self.lanes} lanes"
        threads = f"{lanes} and {self.work_threads} work threads a rank"
        return f"{threads} on {self.processors} processors" if self.processors else threads


def host_with(processors: int) -> Host:
    """Return the threads that a session takes where a rank has so many processors."""
    return Host(processors=processors)


def parse_host(text: str) -> Host:
    """Parse a number of processors of a rank, or its threads: `lanes=2,work=3`.

    With `processors=4` behind them, four of these threads run at a time.

    Raises:
        ValueError: the text is neither.
    """
    if text.strip().isdigit() and 1 <= int(text) <= 4096:
        return host_with(int(text))
    parts = dict(part.partition("=")[::2] for part in text.replace(" ", "").split(","))
    counts = {name: int(one) if one.isdigit() else 0 for name, one in parts.items()}
    known = set(parts) in ({"lanes", "work"}, {"lanes", "work", "processors"})
    if not known or not all(1 <= count <= 64 for count in counts.values()):
        raise ValueError(
            f"host is {text!r}; give the number of processors of a rank, such as 16, or its "
            "threads, such as lanes=2,work=3 or lanes=2,work=3,processors=4"
        )
    return Host(counts["lanes"], counts["work"], counts.get("processors", 0))
