"""Why VGG-19 gains more from P3 than ideal overlap allows: the table in docs/simulator.md.

Simulates four ranks with a host that costs nothing and with a slow server, whose sums run at 1 GB/s
a contribution on one thread. `python benchmarks/vgg19_gain.py` prints the table, `--json FILE`
writes its rows; it takes about half a minute.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from gradlane.planning.simulation.scenarios import Cluster
from gradlane.report.markdown import markdown_table
from gradlane_papers.reproduction.simulations import FREE, SLOW_SERVER, Job, Simulations

RATES_GBPS = (8, 10, 15)
STRATEGIES = ("kvstore", "slicing", "p3")
HOSTS = {"free": FREE, "slow server": SLOW_SERVER}
DRAWS = 3
"""Connections are unequal in a way that is drawn: the mean counts."""


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    json_path: Path | None = parser.parse_args().json_path
    simulations = Simulations()
    rows, lines = [], []
    for host, costs in HOSTS.items():
        for rate in RATES_GBPS:
            cluster = Cluster(workers=4, rate_bps=rate * 1e9, costs=costs)
            steps = {}
            for name in STRATEGIES:
                draws = [replace(cluster, strategy=name, share_seed=seed) for seed in range(DRAWS)]
                jobs = [Job("vgg19", draw) for draw in draws]
                steps[name] = sum(simulations.steps_s(jobs)) / DRAWS
            rows.append({"rate_bps": rate * 1e9, "host": host, "step_s": steps})
            cells = (f"{step_s * 1e3:.0f}" for step_s in steps.values())
            gains = (f"{steps['kvstore'] / steps[name]:.2f}x" for name in STRATEGIES[1:])
            lines.append((f"{rate} Gbit/s", host, *cells, *gains))
    columns = ("rate", "host", *STRATEGIES, "slicing / kvstore", "p3 / kvstore")
    print(markdown_table(columns, lines, numbers="n-nnnnn"))
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
