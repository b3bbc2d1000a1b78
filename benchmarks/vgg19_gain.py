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

from rich.progress import track

from gradlane.planning.simulation.costs import MachineCosts
from gradlane.planning.simulation.profiles import Profile, synthetic_profile
from gradlane.planning.simulation.scenarios import FREE_HOST, Cluster, run_scenario, scenario_of

RATES_GBPS = (8, 10, 15)
STRATEGIES = ("kvstore", "slicing", "p3")
SLOW_SUM_BYTE_S = 1e-9
HOSTS = {
    "free": MachineCosts(host=FREE_HOST),
    "slow server": MachineCosts(host={**FREE_HOST, "reduce_byte_s": SLOW_SUM_BYTE_S}),
}
DRAWS = 3
"""Connections are unequal in a way that is drawn: the mean counts."""


def step_s(profile: Profile, cluster: Cluster) -> float:
    """Return the mean simulated step over the draws."""
    draws = [replace(cluster, share_seed=seed) for seed in range(DRAWS)]
    reports = [run_scenario(scenario_of(profile, draw))["report"] for draw in draws]
    return sum(float(report["step_s"]) for report in reports) / DRAWS


def main() -> None:
    """Simulate, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, dest="json_path")
    json_path: Path | None = parser.parse_args().json_path
    profile = synthetic_profile("vgg19")
    cases = [(host, rate) for host in HOSTS for rate in RATES_GBPS]
    rows = []
    for host, rate in track(cases, "simulating", transient=True):
        cluster = Cluster(workers=4, rate_bps=rate * 1e9, costs=HOSTS[host])
        steps = {name: step_s(profile, replace(cluster, strategy=name)) for name in STRATEGIES}
        rows.append({"rate_bps": rate * 1e9, "host": host, "step_s": steps})
    print("| rate | host | kvstore | slicing | p3 | slicing / kvstore | p3 / kvstore |")
    print("| ---: | --- | ---: | ---: | ---: | ---: | ---: |")
    for row, (host, rate) in zip(rows, cases, strict=True):
        steps = row["step_s"]
        assert isinstance(steps, dict)
        cells = " | ".join(f"{steps[name] * 1e3:.0f}" for name in STRATEGIES)
        gains = " | ".join(f"{steps['kvstore'] / steps[name]:.2f}x" for name in STRATEGIES[1:])
        print(f"| {rate} Gbit/s | {host} | {cells} | {gains} |")
    if json_path is not None:
        json_path.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
