"""Runs the loop of one seed, and makes it small if it fails; worker processes import this."""

from __future__ import annotations

from typing import Any

from tests.strangers.description import Loop
from tests.strangers.generate import generate
from tests.strangers.shrink import shrink
from tests.strangers.verdict import Verdict, judge


def run_seed(seed: int, ranks: tuple[int, ...], real_every: int, shrinks: bool) -> dict[str, Any]:
    """Run the loop of one seed.

    Args:
        seed: of the loop.
        ranks: world sizes to choose from.
        real_every: every so many seeds run over the compiled core; 0: none.
        shrinks: whether to make a failing loop small.
    """
    loop = generate(seed, ranks)
    real = real_every > 0 and seed % real_every == 0
    verdict = judge(loop, real=real)
    result: dict[str, Any] = {
        "seed": seed,
        "ranks": loop.ranks,
        "core": "real" if real else "double",
        "kind": verdict.kind,
        "failed": not verdict.is_right,
        "refusal": verdict.text[:120] if verdict.kind == "refused" else "",
    }
    if not verdict.is_right:
        smaller = make_small(loop, verdict, real) if shrinks else loop
        result.update(text=judge(smaller, real=real).text or verdict.text, loop=smaller.to_json())
    return result


def make_small(loop: Loop, verdict: Verdict, real: bool = False) -> Loop:
    """Shrink a failing loop, keeping the way it fails."""
    return shrink(loop, lambda smaller: judge(smaller, real=real).kind == verdict.kind)
