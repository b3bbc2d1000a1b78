"""Looks for strangers: `python -m tests.strangers --loops 2000 --seed 1`.

Prints a line a loop, with its seed, and for each failure the shrunk loop and how to repeat it.
Exit status 0: no difference.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.strangers.generate import generate
from tests.strangers.search import run_seed


def main(arguments: list[str] | None = None) -> int:
    """Run loops; returns the exit status."""
    options = _parse(arguments)
    ranks = tuple(int(one) for one in options.ranks.split(","))
    if options.show:
        print(generate(options.seed, ranks).to_json())
        return 0
    began = time.monotonic()
    results: list[dict[str, Any]] = []
    for result in _results(options, ranks):
        results.append(result)
        print(
            f"seed {result['seed']:>10}  {result['ranks']} ranks  {result['core']:<6} "
            f"{result['kind']}{': ' + result['refusal'] if result['refusal'] else ''}",
            flush=True,
        )
        if result["failed"]:
            print(_describe(result, options.ranks), flush=True)
            if options.stop:
                break
    elapsed_s = time.monotonic() - began
    failed = [result for result in results if result["failed"]]
    kinds = Counter(result["kind"] for result in results)
    print(f"{len(results)} loops in {elapsed_s:.0f} s: {len(failed)} failed")
    for kind, count in kinds.most_common():
        print(f"{count:>8}  {kind}")
    if options.json:
        summary = {"loops": len(results), "elapsed_s": elapsed_s, "kinds": kinds}
        Path(options.json).write_text(json.dumps({**summary, "results": results}, indent=1))
    return 1 if failed else 0


def _results(options: argparse.Namespace, ranks: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    seeds: Iterable[int] = range(options.seed, options.seed + options.loops)
    real_every = 1 if options.real else options.real_every
    if options.jobs == 1:
        for seed in seeds:
            yield run_seed(seed, ranks, real_every, not options.no_shrink)
        return
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        futures = [
            pool.submit(run_seed, seed, ranks, real_every, not options.no_shrink) for seed in seeds
        ]
        try:
            for future in futures:
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _describe(result: dict[str, Any], ranks: str) -> str:
    real = " --real" if result["core"] == "real" else ""
    return (
        f"--- {result['kind']}\n{result['text']}\n{result['loop']}\n--- repeat with: "
        f"python -m tests.strangers --seed {result['seed']} --loops 1 --ranks {ranks}{real}"
    )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.strangers", description=__doc__)
    parser.add_argument("--loops", type=int, default=200, help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first; they are consecutive")
    parser.add_argument("--ranks", default="2,3", help="world sizes to choose from")
    parser.add_argument("--real", action="store_true", help="all over the compiled core")
    parser.add_argument("--real-every", type=int, default=0, help="every so many over it")
    parser.add_argument("--jobs", type=int, default=1, help="processes to use")
    parser.add_argument("--stop", action="store_true", help="stop at the first failure")
    parser.add_argument("--no-shrink", action="store_true", help="print failing loops as drawn")
    parser.add_argument("--show", action="store_true", help="print the loop of --seed and stop")
    parser.add_argument("--json", help="write the results to this file")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
