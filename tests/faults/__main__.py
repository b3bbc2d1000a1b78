"""Injects faults into real trainings and judges what comes of them: `python -m tests.faults`.

Prints a line a fault, with its seed, and a table. Exit status 0: no hang, no wrong culprit, no lost
checkpoint, nothing left over.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from gradlane.lab.cluster.privilege import why_no_namespaces
from tests.faults.campaign import Campaign, Result
from tests.faults.going_on import scenario as going_on
from tests.faults.going_on import starting
from tests.faults.going_on.campaign import GoingOnCampaign, StartingCampaign
from tests.faults.local_updates import scenario as local_updates
from tests.faults.local_updates.campaign import LocalCampaign
from tests.faults.local_updates.scenario import EXCHANGING
from tests.faults.on_options import scenario as on_options
from tests.faults.on_options.campaign import OptionsCampaign
from tests.faults.on_store import scenario as on_store
from tests.faults.on_store.campaign import StoreCampaign
from tests.faults.scenario import BEFORE_CONNECTED, FAULTS, JOINING, MOMENTS, PREPARING
from tests.faults.verdict import KINDS
from tests.forked_programs import ForkedPrograms

_CAMPAIGNS: dict[str, type[Campaign]] = {
    "ending": Campaign,
    "going-on": GoingOnCampaign,
    "starting": StartingCampaign,
    "local-updates": LocalCampaign,
    "store": StoreCampaign,
    "options": OptionsCampaign,
}
_FAULTS: dict[str, Sequence[str]] = {
    "ending": FAULTS,
    "going-on": going_on.FAULTS,
    "starting": starting.FAULTS,
    "local-updates": local_updates.FAULTS,
    "store": on_store.FAULTS,
    "options": on_options.FAULTS,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; returns the exit status."""
    options = _parse(arguments)
    seeds = options.only or range(options.seed, options.seed + options.count)
    began_s = time.monotonic()
    results: list[Result] = []
    why_not = why_no_namespaces()
    if why_not:
        print(f"no network namespaces ({why_not}): cut links and partitions are skipped")
    with (
        contextlib.closing(ForkedPrograms()) as programs,
        _CAMPAIGNS[options.campaign](programs, why_not, options.keep) as campaign,
    ):
        if isinstance(campaign, GoingOnCampaign):
            campaign.local_size = options.local_size
        for result in campaign.run_all(seeds, options.jobs):
            results.append(result)
            _show(result, len(results), len(seeds), options)
    summary = summarize(results, time.monotonic() - began_s)
    print("\n" + table(results, _FAULTS[options.campaign]))
    print(_closing(summary))
    if options.json:
        rows = [result.to_json() for result in results]
        Path(options.json).write_text(json.dumps({**summary, "results": rows}, indent=1))
    return 1 if summary["failed"] else 0


def _show(result: Result, number: int, count: int, options: argparse.Namespace) -> None:
    scenario = result.scenario
    where = "namespaces" if scenario.namespaces else "loopback"
    print(
        f"{number:>4}/{count}  seed {scenario.seed:<8} {result.word:<16} {result.seconds:5.1f} s  "
        f"{scenario}{' (missed)' if result.is_late else ''}, {where}"
        f"{', agent' if scenario.agent else ''}",
        flush=True,
    )
    if result.problems:
        for problem in result.problems:
            print(f"            {problem}", flush=True)
        mode = "" if options.campaign == "ending" else f"--{options.campaign} "
        size = f"--local-size {options.local_size} " if options.local_size > 1 else ""
        again = f"{mode}{size}--only {scenario.seed}"
        print(f"            repeat with: python -m tests.faults {again}")
    if options.only:
        for rank, error in enumerate(result.errors):
            print(f"            rank {rank}: {error or 'no error'}", flush=True)


def summarize(results: list[Result], elapsed_s: float) -> dict[str, Any]:
    """Return counts: faults run, skipped and failed, and faults by kind of problem."""
    kinds = Counter(kind for one in results for kind in {problem.kind for problem in one.problems})
    return {
        "faults": sum(not one.skipped for one in results),
        "skipped": sum(bool(one.skipped) for one in results),
        "failed": sum(bool(one.problems) for one in results),
        "on_rank_0": sum(0 in one.scenario.victims for one in results if not one.skipped),
        "missed_moments": sum(one.is_late for one in results),
        "asked": sum(getattr(one.scenario, "asks_at", None) is not None for one in results),
        "joined": sum(one.joined for one in results),
        "elapsed_s": round(elapsed_s, 1),
        "problems": {kind: kinds[kind] for kind in KINDS},
        "pauses_s": _pauses_s(results),
    }


def _pauses_s(results: list[Result]) -> dict[str, list[float]]:
    """Return the seconds without a step after single faults: median, worst and number by fault."""
    pauses: dict[str, list[float]] = {}
    for one in results:
        scenario = one.scenario
        if isinstance(scenario, going_on.GoingOnScenario) and one.pause_s is not None:
            name = scenario.fault if scenario.second is None else "two faults"
            if scenario.asks_at is not None:
                name = "a fault where a rank joins"
            pauses.setdefault(name, []).append(one.pause_s)
    return {
        name: [round(statistics.median(values), 3), round(max(values), 3), len(values)]
        for name, values in sorted(pauses.items())
    }


def _closing(summary: dict[str, Any]) -> str:
    problems = ", ".join(f"{count} {kind}" for kind, count in summary["problems"].items())
    pauses = "".join(
        f"\nno step after {name}: median {median:.2f} s, worst {worst:.2f} s, of {count:.0f}"
        for name, (median, worst, count) in summary["pauses_s"].items()
    )
    joins = f"\n{summary['joined']} of {summary['asked']} ranks joined" if summary["asked"] else ""
    return (
        f"{summary['faults']} faults in {summary['elapsed_s']:.0f} s "
        f"({summary['on_rank_0']} on rank 0, {summary['skipped']} skipped, "
        f"{summary['missed_moments']} two steps after their moment): "
        f"{summary['failed']} failed; {problems}{pauses}{joins}"
    )


def _order(result: Result) -> int:
    return (*BEFORE_CONNECTED, *PREPARING, *MOMENTS, *EXCHANGING, *JOINING).index(
        result.scenario.moment
    )


def table(results: list[Result], faults: Sequence[str] = FAULTS) -> str:
    """Return a table of faults by moments: how many ran, and how many of them failed."""
    lines = ["moment".ljust(12) + "".join(fault.rjust(18) for fault in faults)]
    for moment in dict.fromkeys(one.scenario.moment for one in sorted(results, key=_order)):
        cells = []
        for fault in faults:
            here = [
                one
                for one in results
                if (one.scenario.moment, one.scenario.fault) == (moment, fault) and not one.skipped
            ]
            failed = sum(bool(one.problems) for one in here)
            cells.append(f"{len(here)} ({failed} failed)" if failed else str(len(here) or "-"))
        lines.append(moment.ljust(12) + "".join(cell.rjust(18) for cell in cells))
    return "\n".join(lines)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="of the first; they are consecutive")
    parser.set_defaults(campaign="ending")
    chosen: dict[str, Any] = {"action": "store_const", "dest": "campaign"}
    parser.add_argument(
        "--going-on", const="going-on", help="trainings that go on without lost ranks", **chosen
    )
    parser.add_argument(
        "--starting", const="starting", help="in init(), prepare() and step 1 of these", **chosen
    )
    parser.add_argument(
        "--local-updates", const="local-updates", help="local updates that go on", **chosen
    )
    parser.add_argument(
        "--store", const="store", help="attackers and faults of the rendezvous store", **chosen
    )
    parser.add_argument("--options", const="options", help="ranks whose options differ", **chosen)
    parser.add_argument(
        "--local-size", type=int, default=1, help="with --going-on: ranks of a node, which add up"
    )
    parser.add_argument("--count", type=int, default=200, help="number of faults")
    parser.add_argument("--only", type=int, nargs="+", help="run these seeds, and print all errors")
    parser.add_argument("--jobs", type=int, default=3, help="trainings at once")
    parser.add_argument("--keep", type=Path, help="folder for the files of all runs, which stay")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
