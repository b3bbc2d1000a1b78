"""Looks for loops that train otherwise than their reference.

`python -m tests.loop_fuzzing --loops 4000 --jobs 2`

`--sharded` draws loops over models that `fully_shard` has sharded, on ranks that are processes.

`GRADLANE_FUZZ_COMPILE=1` runs the models of ranks through `torch.compile`, and
`GRADLANE_TEST_DEVICE=cuda` on a device.

Prints the first seed, progress, failures as they come, and at the end each kind of them: how often
it came, a loop that was made small, and how to repeat it. Exit status 0: no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GRADLANE_SUMMARY", "0")

from tests.loop_fuzzing.odd_spans import labels
from tests.loop_fuzzing.search import loop_of, run_seed, shrink_result
from tests.loop_fuzzing.workers import Result, Workers

_PROGRESS_EVERY_S = 30.0
_PROGRESS_EVERY_SHRUNK = 20


def main(arguments: list[str] | None = None) -> int:
    """Run loops; returns the exit status."""
    options = _parse(arguments)
    ranks = tuple(int(one) for one in options.ranks.split(","))
    drawn = {"odd": not options.plain, "sharded": options.sharded}
    if options.show:
        print(loop_of(options.seed, ranks, **drawn).to_json())
        return 0
    began, told_s = time.monotonic(), 0.0
    print(f"{options.loops} loops from seed {options.seed} on", flush=True)
    results: list[Result] = []
    failed: list[Result] = []
    workers = Workers(options.jobs)
    real_every = 1 if options.real else options.real_every
    seeds = range(options.seed, options.seed + options.loops)
    calls = [(seed, ranks, real_every, *drawn.values()) for seed in seeds]
    for result in workers.run(run_seed, calls, _died):
        results.append(result)
        if result["failed"]:
            failed.append(result)
            print(f"seed {result['seed']}: {result['kind']}\n{result['text']}", flush=True)
        elapsed_s = time.monotonic() - began
        if elapsed_s > told_s + _PROGRESS_EVERY_S:
            told_s = elapsed_s
            print(f"{len(results)} loops in {elapsed_s:.0f} s: {len(failed)} failed", flush=True)
    elapsed_s = time.monotonic() - began
    if not options.no_shrink:
        failed = _shrink(workers, failed, options.shrink)
    groups = _by_kind(failed)
    for group in groups:
        print(_describe(group, options), flush=True)
    _print_refusals(results)
    print(
        f"{len(results)} loops from seed {options.seed} on in {elapsed_s:.0f} s: "
        f"{len(failed)} failed, in {len(groups)} ways"
    )
    kinds = Counter(result["kind"] for result in results)
    for kind, count in kinds.most_common():
        print(f"{count:>8}  {kind}")
    if options.json:
        summary = {"loops": len(results), "elapsed_s": elapsed_s, "kinds": kinds}
        text = json.dumps({**summary, "failures": failed, "results": results}, indent=1)
        Path(options.json).write_text(text)
    return 1 if failed else 0


def _died(arguments: tuple[Any, ...], code: int | None) -> Result:
    """Return the result of a loop that killed its process, or that did so while it was shrunk."""
    if isinstance(arguments[0], dict):
        return arguments[0]
    seed, ranks, _, odd, sharded = arguments
    loop = loop_of(seed, ranks, odd=odd, sharded=sharded)
    return {
        "seed": seed,
        "ranks": loop.ranks,
        "core": "double",
        "kind": f"the process died with {code}",
        "failed": True,
        "labels": labels(loop),
        "text": "",
        "loop": loop.to_json(),
    }


def _shrink(workers: Workers, failed: list[Result], most: int) -> list[Result]:
    """Make some of each kind of failures small; others of the kind are taken to be like them."""
    groups = _by_kind(failed)
    chosen = [
        (one,) for group in groups for one in group[:most] if "process died" not in one["kind"]
    ]
    smaller: dict[int, Result] = {}
    for result in workers.run(shrink_result, chosen, _died):
        smaller[result["seed"]] = result
        if len(smaller) % _PROGRESS_EVERY_SHRUNK == 0:
            print(f"made {len(smaller)} of {len(chosen)} small", flush=True)
    shrunk: list[Result] = []
    for group in groups:
        made = [smaller[one["seed"]] for one in group if one["seed"] in smaller] or group[:1]
        smallest = min(made, key=lambda one: len(one["loop"]))
        shrunk += [smaller.get(one["seed"], {**one, "labels": smallest["labels"]}) for one in group]
    return shrunk


def _by_kind(failed: list[Result]) -> list[list[Result]]:
    """Return failures that look alike together, the most frequent first, small loops first."""
    groups: dict[Any, list[Result]] = {}
    for result in failed:
        groups.setdefault((result["kind"], tuple(result["labels"])), []).append(result)
    for group in groups.values():
        group.sort(key=lambda one: len(one["loop"]))
    return sorted(groups.values(), key=len, reverse=True)


def _describe(group: list[Result], options: argparse.Namespace) -> str:
    result = group[0]
    real = " --real" if result["core"] == "real" and not options.sharded else ""
    sharded = " --sharded" if options.sharded else ""
    return (
        f"--- {len(group)} times: {result['kind']} [{', '.join(result['labels'])}]\n"
        f"{result['text']}\n{result['loop']}\n--- repeat with: python -m tests.loop_fuzzing "
        f"--seed {result['seed']} --loops 1 --ranks {options.ranks}{real}{sharded}"
    )


def _print_refusals(results: list[Result]) -> None:
    """Print what was refused by which words."""
    kinds = ("refused", "not on this device", "torch does not")
    refusals = Counter((one["kind"], one["text"]) for one in results if one["kind"] in kinds)
    for (kind, text), count in refusals.most_common():
        print(f"{kind} {count:>5}  {text[:160]}")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.loop_fuzzing", description=__doc__)
    drawn = random.SystemRandom().randrange(10**9)
    parser.add_argument("--loops", type=int, default=200, help="how many")
    parser.add_argument(
        "--seed", type=int, default=drawn, help="of the first; they are consecutive; else drawn"
    )
    parser.add_argument("--ranks", help="world sizes to choose from; else 2,3, or 4 if sharded")
    parser.add_argument("--plain", action="store_true", help="none with what few programs do")
    parser.add_argument("--sharded", action="store_true", help="over sharded models")
    parser.add_argument("--real", action="store_true", help="all over the compiled core")
    parser.add_argument("--real-every", type=int, default=0, help="every so many over it")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use")
    parser.add_argument("--no-shrink", action="store_true", help="print failing loops as drawn")
    parser.add_argument("--shrink", type=int, default=1, help="loops to make small of each kind")
    parser.add_argument("--show", action="store_true", help="print the loop of --seed and stop")
    parser.add_argument("--json", help="write the results to this file")
    options = parser.parse_args(arguments)
    options.ranks = options.ranks or ("4" if options.sharded else "2,3")
    return options


if __name__ == "__main__":
    sys.exit(main())
