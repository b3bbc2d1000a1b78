"""Runs the loop of one seed, and makes it small if it fails; worker processes import this."""

from __future__ import annotations

from typing import Any

from tests.loop_fuzzing.description import Loop
from tests.loop_fuzzing.generate import generate
from tests.loop_fuzzing.odd_spans import labels
from tests.loop_fuzzing.sharded_loops import generate_sharded
from tests.loop_fuzzing.sharded_verdict import judge_sharded
from tests.loop_fuzzing.shrink import shrink
from tests.loop_fuzzing.verdict import Verdict, judge

_ATTEMPTS = 200
_ATTEMPTS_WHERE_HANGING = 12


def loop_of(seed: int, ranks: tuple[int, ...], *, odd: bool, sharded: bool) -> Loop:
    """Return the loop of a seed; see `run_seed`."""
    return generate_sharded(seed, ranks) if sharded else generate(seed, ranks, odd=odd)


def judge_loop(loop: Loop, *, real: bool = False) -> Verdict:
    """Run a loop both ways and compare; with sharded models always over the compiled core."""
    return judge(loop, real=real) if loop.sharding is None else judge_sharded(loop)


def run_seed(
    seed: int, ranks: tuple[int, ...], real_every: int, odd: bool = True, sharded: bool = False
) -> dict[str, Any]:
    """Run the loop of one seed.

    Args:
        seed: of the loop.
        ranks: world sizes to choose from.
        real_every: every so many seeds run over the compiled core; 0: none.
        odd: whether loops may be odd.
        sharded: whether models are sharded by `fully_shard`.
    """
    loop = loop_of(seed, ranks, odd=odd, sharded=sharded)
    real = sharded or (real_every > 0 and seed % real_every == 0)
    verdict = judge_loop(loop, real=real)
    return {
        "seed": seed,
        "ranks": loop.ranks,
        "core": "real" if real else "double",
        "kind": verdict.kind,
        "failed": not verdict.is_right,
        "labels": labels(loop),
        "text": verdict.text,
        "loop": "" if verdict.is_right else loop.to_json(),
    }


def shrink_result(result: dict[str, Any]) -> dict[str, Any]:
    """Return a failed result of `run_seed` with the loop made small."""
    real = result["core"] == "real"
    loop = Loop.from_json(result["loop"])
    smaller = make_small(loop, Verdict(result["kind"]), real)
    text = judge_loop(smaller, real=real).text or result["text"]
    return {**result, "text": text, "labels": labels(smaller), "loop": smaller.to_json()}


def make_small(loop: Loop, verdict: Verdict, real: bool = False) -> Loop:
    """Shrink a failing loop, keeping the way it fails."""
    attempts = _ATTEMPTS_WHERE_HANGING if verdict.kind == "hangs" else _ATTEMPTS
    return shrink(
        loop, lambda smaller: judge_loop(smaller, real=real).kind == verdict.kind, attempts
    )
