"""Files of measured constants: what they change, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gradlane.planning.simulation.costs import CostsError, MachineCosts, read_costs
from gradlane.planning.simulation.profiles import synthetic_profile
from gradlane.planning.simulation.scenarios import Cluster, run_scenario, scenario_of


def written(tmp_path: Path, **changes: Any) -> Path:
    content: dict[str, Any] = {
        "format": "gradlane-costs",
        "version": 1,
        "measured": {"date": "2026-11-21"},
        "constants": {"wake_s": {"value": 0.002, "how": "made up"}},
        **changes,
    }
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_constants_reach_the_simulation(tmp_path: Path) -> None:
    constants = {
        "wake_s": {"value": 0.002},
        "goodput_share": {"value": 0.5},
        "send_buffer_floor_bytes": {"value": 131072.0},
    }
    costs = read_costs(written(tmp_path, constants=constants))
    assert costs.host == {"wake_s": 0.002}
    profile = synthetic_profile("resnet50")
    usual = Cluster(workers=2, rate_bps=1e9)
    scenario = scenario_of(profile, Cluster(workers=2, rate_bps=1e9, costs=costs))
    assert scenario["costs"] == {"wake_s": 0.002}
    assert scenario["network"]["goodput_share"] == 0.5
    assert scenario["network"]["send_buffer_floor_bytes"] == 131072
    # Half of the goodput makes a step that the port decides about twice as long.
    before = run_scenario(scenario_of(profile, usual))["report"]["step_s"]
    after = run_scenario(scenario)["report"]["step_s"]
    assert 1.6 * before < after < 2.2 * before


def test_a_free_host_stays_free() -> None:
    cluster = Cluster(workers=2, rate_bps=1e9, free_host=True, costs=MachineCosts({"wake_s": 0.5}))
    assert scenario_of(synthetic_profile("resnet50"), cluster)["costs"]["wake_s"] == 0.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"format": "gradlane-profile"}, "format"),
        ({"version": 2}, "version"),
        ({"constants": {}}, "constants"),
        ({"constants": {"speed": {"value": 1.0}}}, "constants.speed"),
        ({"constants": {"wake_s": 0.1}}, r"constants\.wake_s\.value"),
        ({"constants": {"wake_s": {"value": -1.0}}}, r"constants\.wake_s\.value"),
        ({"constants": {"wake_s": {"value": float("nan")}}}, r"constants\.wake_s\.value"),
        ({"constants": {"goodput_share": {"value": 0.0}}}, r"constants\.goodput_share"),
    ],
)
def test_files_that_make_no_sense_are_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(CostsError, match=named):
        read_costs(written(tmp_path, **changes))


def test_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="cannot read"):
        read_costs(tmp_path / "absent.json")
    (tmp_path / "text.json").write_text("{", encoding="utf-8")
    with pytest.raises(CostsError, match="not JSON"):
        read_costs(tmp_path / "text.json")
