"""Says whether a loop over sharded models has the bits of torch alone.

The reference is torch's own HSDP over Gloo for two nodes, for more FSDP with a hook that averages
in the order of nodes, and the rounds of local updates written out with torch. With a codec, whose
bits torch alone does not have, gradients of the first step are close to the reference's. In each
case nodes have the same bits as each other where they have met.
"""

from __future__ import annotations

import atexit
import re
from typing import Any

from tests.loop_fuzzing.description import Loop
from tests.loop_fuzzing.program import Note
from tests.loop_fuzzing.sharded_ranks import ShardedRanks
from tests.loop_fuzzing.verdict import Verdict, other_things, other_values

REFUSALS = (
    r"has \d+ layers? with trained parameters",
    r"is (?:torch\.)?bfloat16, in which",
    r"no trained parameter",
)
"""Words of refusals that need nothing strange."""
_CLOSE = (0.25, 0.05)
"""Relative and absolute distance of a gradient under a codec."""
_RANKS: dict[tuple[int, int], ShardedRanks] = {}


def judge_sharded(loop: Loop) -> Verdict:
    """Run a loop on processes that this one keeps, and compare."""
    assert loop.sharding is not None
    key = (loop.ranks, loop.sharding.local)
    if key not in _RANKS:
        _RANKS[key] = ShardedRanks(*key)
        atexit.register(_RANKS[key].close)
    return verdict_of(loop, _RANKS[key].run(loop))


def verdict_of(loop: Loop, results: list[dict[str, Any] | str]) -> Verdict:
    """Return what the results of all ranks come to."""
    assert loop.sharding is not None
    ended = [one for one in results if isinstance(one, dict)]
    kinds = {one["kind"] for one in ended}
    if kinds == {"torch does not"} and len(ended) == len(results):
        return Verdict("torch does not", ended[0]["text"].splitlines()[0][:200])
    refused = [one for one in ended if any(re.search(w, one.get("error", "")) for w in REFUSALS)]
    if len(refused) == len(results):
        return Verdict("refused", refused[0]["error"])
    for one in ended:
        if one["kind"] == "error":
            return Verdict(_head(one["error"]), one["text"])
    missing = [(rank, one) for rank, one in enumerate(results) if isinstance(one, str)]
    if missing:
        hang = all(one.startswith("nothing") for _, one in missing)
        text = "\n".join(f"rank {rank}: {one}" for rank, one in missing)
        return Verdict("hangs" if hang else "the process died", text)
    for rank, result in enumerate(ended):
        if result["kind"] != "same":
            return Verdict(result["kind"], f"rank {rank}: {result['text']}")
    for rank, result in enumerate(ended):
        first = ended[rank % loop.sharding.local]
        if result["sums"] != first["sums"]:
            return Verdict("nodes differ", f"rank {rank}: {result['sums']}, not {first['sums']}")
    return Verdict("same")


def first_difference(loop: Loop, wanted: list[Note], seen: list[Note]) -> tuple[str, str]:
    """Return the kind and the place of the first difference; `same` if there is none."""
    codec = "codec" in loop.options
    stepped = next((n for n, one in enumerate(loop.actions) if one.do == "step"), 0)
    for must, one in zip(wanted, seen, strict=True):
        if found := other_things(loop, must, one):
            return found
        if codec and (must.action >= stepped or "update" in loop.options):
            # From here on the reference is elsewhere.
            return "same", ""
        if found := other_values(loop, must, one, _CLOSE if codec else None):
            return found
    return "same", ""


def _head(text: str) -> str:
    return re.sub(r"'[^']*'|[0-9]+", "#", text)[:80]
