"""The rank program of lab runs: one a rank, started once for a cluster, given one request after
another."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Any

from gradlane.lab.cluster.rank_program import Answers, answer_requests


def _answer(request: dict[str, Any], rank: int, answers: Answers) -> dict[str, Any]:
    kind = request.pop("kind")
    if kind == "trial":
        from gradlane.lab.runs.messages import TrialRequest
        from gradlane.lab.runs.trial import run_trial

        trial = TrialRequest.from_json(request)
        return asdict(run_trial(trial, rank, answers.report_step, answers.count_ports))
    if kind == "serve":
        from gradlane.lab.runs.messages import TrialRequest
        from gradlane.lab.runs.serving import run_serving

        return asdict(run_serving(TrialRequest.from_json(request), rank))
    if kind == "stream":
        from gradlane.planning.probe.stream import run_stream

        return asdict(run_stream(**request))
    if kind == "rest":
        return {}
    raise ValueError(f"unknown request {kind!r}")


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    answer_requests(lambda request, answers: _answer(request, rank, answers))


if __name__ == "__main__":
    main()
