"""The lab's real workloads at full size: the same parameters as DDP's after 200 steps.

`.venv/bin/python -m benchmarks.same_learning` trains `digits-cnn` and `char-transformer` for 200
steps on four and on two ranks of this machine, over loopback, with torch's DDP and with gradlane,
from the same seed and with their own optimizers, and compares (some minutes on two cores; the tests
do the same with small models). `--json PATH` writes what is printed. The status is 0 only where
everything holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from tests.training.model.pool import RankPool

from gradlane.lab.workloads import REAL_NAMES

CLOSE_STEPS, CLOSE, SHARE = 10, 1e-5, 0.01


def compare(pool: RankPool, workload: str, ranks: int, steps: int) -> dict[str, Any]:
    """Train a workload in three ways; return what was found."""
    began_s = time.monotonic()
    common = {
        "ranks": ranks,
        "model_name": workload,
        "steps": steps,
        "optimizer_name": workload,
    }
    ours = pool.run("train", **common)
    in_order = pool.run("train_ddp", **common)
    stock = pool.run("train_ddp", gather=False, **common)
    bits = [{one["digests"][-1] for one in (*ours, *ddp)} for ddp in (in_order, stock)]
    losses = [(mine["losses"], theirs["losses"]) for mine, theirs in zip(ours, stock, strict=True)]
    early = max(
        abs(a - b)
        for mine, theirs in losses
        for a, b in zip(mine[:CLOSE_STEPS], theirs[:CLOSE_STEPS], strict=True)
    )
    late = max(abs(mine[-1] - theirs[-1]) / abs(theirs[-1]) for mine, theirs in losses)
    row = {
        "workload": workload,
        "ranks": ranks,
        "steps": steps,
        "bits_of_rank_order_hook": len(bits[0]) == 1,
        "bits_of_stock_ddp": len(bits[1]) == 1,
        "loss_difference_in_first_steps": early,
        "loss_share_at_the_end": late,
        "took_s": time.monotonic() - began_s,
    }
    row["holds"] = bool(
        row["bits_of_rank_order_hook"]
        and (ranks > 2 or row["bits_of_stock_ddp"])
        and early <= CLOSE
        and late <= SHARE
    )
    return row


def main() -> None:
    """Compare all workloads and print a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--workload", choices=REAL_NAMES, action="append")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    pool = RankPool(4)
    try:
        for workload in given.workload or REAL_NAMES:
            for ranks in (2, 4):
                print(f"{workload} on {ranks} ranks, {given.steps} steps ...", flush=True)
                rows.append(compare(pool, workload, ranks, given.steps))
                print("  " + "  ".join(f"{name}={value}" for name, value in rows[-1].items()))
    finally:
        pool.close()
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    sys.exit(0 if all(row["holds"] for row in rows) else 1)


if __name__ == "__main__":
    main()
