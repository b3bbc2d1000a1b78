"""Findings of `gradlane doctor`: a verdict for each check, and a remedy."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from gradlane.formats.untrusted import escaped


class Verdict(enum.Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """Training works, but slower or less safely than it could."""
    FAULT = "fault"
    """Training does not start, or breaks off."""


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        check: its name.
        verdict: how bad it is.
        found: what is there.
        remedy: what to do; empty where nothing has to be done.
        ranks: the ranks that it was found on; empty on a single machine.
    """

    check: str
    verdict: Verdict
    found: str
    remedy: str = ""
    ranks: tuple[int, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Return all fields."""
        return {**asdict(self), "verdict": self.verdict.value, "ranks": list(self.ranks)}

    @staticmethod
    def from_json(row: dict[str, str]) -> Finding:
        """Return a finding that another rank has sent.

        Raises:
            ValueError: it is none.
        """
        try:
            return Finding(
                escaped(str(row["check"])),
                Verdict(row["verdict"]),
                escaped(str(row["found"])),
                escaped(str(row["remedy"])),
            )
        except KeyError as error:
            raise ValueError(f"a finding without {error}") from error


def ok(check: str, found: str) -> Finding:
    """Return a finding that all is well."""
    return Finding(check, Verdict.OK, found)


def warning(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that slows training down, or makes it less safe."""
    return Finding(check, Verdict.WARNING, found, remedy)


def fault(check: str, found: str, remedy: str) -> Finding:
    """Return a finding that breaks a training."""
    return Finding(check, Verdict.FAULT, found, remedy)


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks, equal ones once with the ranks that have them.

    Args:
        by_rank: the findings of each rank, in rank order.
    """
    found: dict[Finding, list[int]] = {}
    order: dict[str, int] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            order.setdefault(finding.check, len(order))
            found.setdefault(finding, []).append(rank)
    joined = [
        Finding(one.check, one.verdict, one.found, one.remedy, tuple(ranks))
        for one, ranks in found.items()
    ]
    return sorted(joined, key=lambda one: (order[one.check], one.ranks))
