"""The rank program of lab runs: one a rank, started once for a cluster, given one request after
another."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from gradlane.lab.cluster.rank_program import Answers, answer_requests

if TYPE_CHECKING:
    from gradlane.lab.runs.messages import TrialResult
    from gradlane.lab.runs.traffic import OwnerCounters


def _trial(answers: Answers, rank: int, request: dict[str, Any]) -> TrialResult:
    from gradlane.lab.runs.messages import TrialRequest
    from gradlane.lab.runs.trial import run_trial

    trial = TrialRequest.from_json(request)
    return run_trial(trial, rank, answers.report_step, answers.count_ports)


def _serve(rank: int, request: dict[str, Any]) -> OwnerCounters:
    from gradlane.lab.runs.messages import TrialRequest
    from gradlane.lab.runs.trial import run_serving

    return run_serving(TrialRequest.from_json(request), rank)


def main() -> None:
    """Answer requests for the rank in argument one until the input ends."""
    rank = int(sys.argv[1])
    answer_requests(
        lambda answers: {
            "trial": lambda **request: _trial(answers, rank, request),
            "serve": lambda **request: _serve(rank, request),
        }
    )


if __name__ == "__main__":
    main()
