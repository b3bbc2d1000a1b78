"""A dashboard for Grafana and alerts for Prometheus, over the metrics that sessions serve.

Both are JSON: Grafana imports it, and Prometheus reads it where it reads YAML, whose subset it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_WIDTH = 24
"""Columns of a dashboard."""
_HEIGHT = 8
_SELECTED = '{job=~"$job"}'


@dataclass(frozen=True)
class _Panel:
    """A plot over time.

    Attributes:
        title: what is plotted.
        unit: of Grafana.
        lines: an expression and its legend each.
        text: what it says to whoever watches.
    """

    title: str
    unit: str
    lines: Sequence[tuple[str, str]]
    text: str


def _sum_of_rates(name: str, by: str, factor: str = "") -> str:
    return f"{factor}sum by ({by}) (rate(gradlane_{name}{_SELECTED}[$__rate_interval]))"


_PANELS = (
    _Panel(
        "Time of a step",
        "s",
        [
            (f"max(gradlane_step_seconds{_SELECTED})", "step"),
            (f"max(gradlane_step_wait_seconds{_SELECTED})", "of it waiting"),
        ],
        "Medians of recent steps, of the rank with the longest. Waiting is what a faster network, "
        "fewer bytes or no late rank would save.",
    ),
    _Panel(
        "Steps a minute",
        "none",
        [(f"60 * min(rate(gradlane_steps_total{_SELECTED}[$__rate_interval]))", "steps")],
        "Of the slowest rank. None: evaluation, saving, or a training that stands still.",
    ),
    _Panel(
        "Share of steps spent waiting",
        "percentunit",
        [(f"gradlane_wait_share{_SELECTED}", "rank {{rank}}")],
        "A rank that waits less than the others is the one that they wait for.",
    ),
    _Panel(
        "Ranks",
        "none",
        [
            (f"max(gradlane_members{_SELECTED})", "train"),
            (f"max(gradlane_lost_ranks_total{_SELECTED})", "lost"),
            (f"max(gradlane_joined_ranks_total{_SELECTED})", "joined"),
        ],
        "With going_on=True a training goes on without lost ranks.",
    ),
    _Panel(
        "Sent by each rank",
        "bps",
        [(_sum_of_rates("sent_bytes_total", "rank", "8 * "), "rank {{rank}}")],
        "Means over the interval; within a step a port is idle while nothing waits to be sent.",
    ),
    _Panel(
        "Received by each rank",
        "bps",
        [(_sum_of_rates("received_bytes_total", "rank", "8 * "), "rank {{rank}}")],
        "As sent.",
    ),
    _Panel(
        "Waiting to be sent, by peer",
        "bytes",
        [(f"sum by (peer) (gradlane_queued_bytes{_SELECTED})", "to rank {{peer}}")],
        "A peer that much waits for has a slow port, or a slow program.",
    ),
    _Panel(
        "Layers that are waited for most",
        "s",
        [(f"topk(10, {_sum_of_rates('layer_wait_seconds_total', 'model, layer')})", "{{layer}}")],
        "Seconds of waiting a second, of all ranks together.",
    ),
    _Panel(
        "Which rank came last",
        "percentunit",
        [
            (
                f"{_sum_of_rates('last_contributions_total', 'from')} / on() group_left() "
                f"sum(rate(gradlane_gathered_slices_total{_SELECTED}[$__rate_interval]))",
                "rank {{from}}",
            )
        ],
        "Share of slices for which a rank was the last to contribute. Evenly spread: no rank is "
        "slower than the others.",
    ),
    _Panel(
        "How much later the last rank came",
        "s",
        [
            (
                f"{_sum_of_rates('late_seconds_total', 'from')} / "
                f"({_sum_of_rates('last_contributions_total', 'from')} > 0)",
                "rank {{from}}",
            )
        ],
        "Than the rank before it, a slice.",
    ),
    _Panel(
        "Bytes that codecs save",
        "none",
        [(f"avg(gradlane_codec_ratio{_SELECTED})", "bytes before encoding through sent")],
        "1 where gradients travel as they are.",
    ),
    _Panel(
        "Norm of the residuals",
        "none",
        [(f"gradlane_residual_norm{_SELECTED}", "rank {{rank}}")],
        "What codecs with error feedback have not sent yet. It levels out in a sound training.",
    ),
    _Panel(
        "Clipping of gradients",
        "none",
        [
            (f"min(gradlane_clip_factor{_SELECTED})", "factor of the last step"),
            (
                f"max(rate(gradlane_clipped_steps_total{_SELECTED}[$__rate_interval]) / "
                f"rate(gradlane_clip_steps_total{_SELECTED}[$__rate_interval]))",
                "share of steps that are scaled down",
            ),
        ],
        "Of session.clip_grad_norm_(). A factor that falls: gradients grow. 0: a norm that is not "
        "finite.",
    ),
    _Panel(
        "Processors that communication takes",
        "none",
        [
            (_sum_of_rates("io_cpu_seconds_total", "rank"), "rank {{rank}}, lanes"),
            (_sum_of_rates("work_cpu_seconds_total", "rank"), "rank {{rank}}, sums and codecs"),
        ],
        "Processor seconds a second. Near the number of lanes: the host is the limit.",
    ),
    _Panel(
        "Memory of the engine",
        "bytes",
        [(f"gradlane_scratch_bytes{_SELECTED}", "rank {{rank}}")],
        "Beside the model's.",
    ),
    _Panel(
        "Jobs that wait for a thread",
        "none",
        [(f"gradlane_queued_jobs{_SELECTED}", "rank {{rank}}")],
        "Sums and codecs that no thread has begun.",
    ),
    _Panel(
        "Callers that were refused",
        "none",
        [(f"sum by (rank) (gradlane_refused_connections_total{_SELECTED})", "rank {{rank}}")],
        "Connections of strangers, or of ranks with another secret.",
    ),
)


def dashboard() -> dict[str, Any]:
    """Return the dashboard, as Grafana imports it (schema version 39, Grafana 10 and newer)."""
    panels = []
    for number, panel in enumerate(_PANELS):
        width = _WIDTH // 2
        place = {"x": number % 2 * width, "y": number // 2 * _HEIGHT, "w": width, "h": _HEIGHT}
        panels.append(
            {
                "id": number + 1,
                "type": "timeseries",
                "title": panel.title,
                "description": panel.text,
                "datasource": _SOURCE,
                "gridPos": place,
                "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
                "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
                "targets": [
                    {
                        "refId": chr(ord("A") + line),
                        "datasource": _SOURCE,
                        "expr": expression,
                        "legendFormat": legend,
                    }
                    for line, (expression, legend) in enumerate(panel.lines)
                ],
            }
        )
    jobs = "label_values(gradlane_steps_total, job)"
    return {
        "title": "gradlane",
        "uid": "gradlane",
        "tags": ["gradlane"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {"name": "source", "label": "Source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "job",
                    "label": "Job",
                    "type": "query",
                    "datasource": _SOURCE,
                    "query": {"query": jobs, "refId": "job"},
                    "definition": jobs,
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": panels,
    }


_LAST = (
    "sum by (job, from) (rate(gradlane_last_contributions_total[10m])) "
    "/ on (job) group_left() sum by (job) (rate(gradlane_gathered_slices_total[10m]))"
)
_LATER = (
    "sum by (job, from) (rate(gradlane_late_seconds_total[10m])) "
    "/ (sum by (job, from) (rate(gradlane_last_contributions_total[10m])) > 0)"
)


def alerts(rate_bps: int | None = None) -> dict[str, Any]:
    """Return rules for Prometheus.

    Args:
        rate_bps: of every rank's port, in bits a second; None: no rule asks for it.
    """
    rules = [
        _rule(
            "GradlaneStraggler",
            f"{_LAST} > 0.6 and on (job, from) {_LATER} > on (job) group_left() "
            "0.05 * max by (job) (gradlane_step_seconds) "
            "and on (job) max by (job) (gradlane_members) > 2",
            "10m",
            "rank {{ $labels.from }} comes last for most slices",
            "Steps wait for it by a twentieth of a step and more: look at its machine, its data "
            "loading and its port.",
        ),
        _rule(
            "GradlaneRankLost",
            "max by (job) (increase(gradlane_lost_ranks_total[10m])) > 0",
            "0m",
            "a rank was lost, and the training goes on without it",
            "The session's log names the rank and the cause.",
        ),
        _rule(
            "GradlaneStandsStill",
            "max by (job) (increase(gradlane_steps_total[15m])) == 0",
            "15m",
            "no rank has begun a step for half an hour",
            "Long evaluations do this as well; `gradlane watch` shows which ranks wait for which.",
        ),
        _rule(
            "GradlaneResidualGrows",
            "gradlane_residual_norm > 2 * (gradlane_residual_norm offset 1h > 0)",
            "30m",
            "the residual of rank {{ $labels.rank }} has doubled within an hour",
            "The codec sends less than gradients bring: give it more bits, or a lower learning "
            "rate.",
        ),
        _rule(
            "GradlaneCallersRefused",
            "increase(gradlane_refused_connections_total[10m]) > 0",
            "0m",
            "rank {{ $labels.rank }} has refused callers",
            "Strangers, port scans, or ranks with another secret.",
        ),
    ]
    if rate_bps is not None:
        sent = "8 * sum by (job, rank) (rate(gradlane_sent_bytes_total[10m]))"
        rules.append(
            _rule(
                "GradlanePortBelowItsRate",
                f"gradlane_wait_share > 0.3 and on (job, rank) {sent} < {rate_bps / 2:g}",
                "15m",
                "rank {{ $labels.rank }} waits, and sends at less than half of its port's rate",
                "Measure the links with `gradlane probe`; other ranks that are late look the same "
                "(GradlaneStraggler).",
            )
        )
    return {"groups": [{"name": "gradlane", "rules": rules}]}


def _rule(name: str, expression: str, lasting: str, summary: str, text: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "for": lasting,
        "labels": {"severity": "warning"},
        "annotations": {"summary": f"gradlane: {summary}", "description": text},
    }
