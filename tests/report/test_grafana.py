"""The dashboard and the alerts ask for what a session serves, by the labels that it has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from gradlane.report.grafana import alerts, dashboard
from gradlane.training.monitoring.prometheus import exposition
from tests.command_line import run
from tests.training.monitoring.test_prometheus import Complete, parsed

NAME = re.compile(r"gradlane_\w+")
GROUPING = re.compile(r"\b(?:by|on) ?\(([\w, ]*)\)")
LEGEND = re.compile(r"{{ ?(?:\$labels\.)?(\w+) ?}}")


def served() -> dict[str, set[str]]:
    """Return the labels of each metric, beside those that Prometheus adds."""
    kinds, values = parsed(exposition(Complete.metrics(), residual_norm=0.5))
    labels: dict[str, set[str]] = {name: {"job", "instance"} for name in kinds}
    for name, pairs in values:
        labels[name].update(key for key, _ in pairs)
    return labels


def expressions() -> Iterator[tuple[str, str]]:
    """Yield each expression with what is said of its result."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield target["expr"], target["legendFormat"]
    for rule in alerts(10**10)["groups"][0]["rules"]:
        yield rule["expr"], rule["annotations"]["summary"]


def test_every_expression_asks_for_what_is_served() -> None:
    labels = served()
    asked = set()
    for expression, said in expressions():
        names = set(NAME.findall(expression))
        assert names and names <= labels.keys(), expression
        asked |= names
        known = set.union(*(labels[name] for name in names))
        wanted = {
            label.strip() for group in GROUPING.findall(expression) for label in group.split(",")
        }
        assert wanted - {""} <= known, expression
        assert set(LEGEND.findall(said)) <= known, said
        assert expression.count("(") == expression.count(")"), expression
    assert len(asked) >= 21 and "gradlane_clip_factor" in asked


def test_panels_stand_beside_each_other() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken and at["x"] + at["w"] <= 24
        taken |= cells
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${source}" for source in sources)
    assert {one["name"] for one in board["templating"]["list"]} == {"source", "job"}


@pytest.mark.parametrize("rate_bps", [None, 10**10])
def test_rules_have_all_that_prometheus_wants(rate_bps: int | None) -> None:
    (group,) = alerts(rate_bps)["groups"]
    rules = group["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) == 5 + (rate_bps is not None)
    for rule in rules:
        assert re.fullmatch(r"\d+m", rule["for"]) and rule["labels"]["severity"] == "warning"
        assert rule["annotations"].keys() == {"summary", "description"}
    assert ("5e+09" in json.dumps(rules)) == (rate_bps is not None)


def test_the_command_prints_both(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said, _ = run(monkeypatch, capsys, "dashboard")
    assert status == 0 and json.loads(said) == dashboard()
    status, said, _ = run(monkeypatch, capsys, "dashboard", "--alerts", "--rate", "10gbit")
    assert status == 0 and json.loads(said) == alerts(10**10)
    status, _, why = run(monkeypatch, capsys, "dashboard", "--rate", "10gbit")
    assert status == 2 and "--alerts" in why
