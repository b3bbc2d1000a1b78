"""The way from a real workload's profile to a prediction of its run, without any timing."""

from __future__ import annotations

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gradlane.formats.profile import Profile
from tests.paths import ROOT

# Looked for, not loaded: that takes a second in each process that shares the tests.
if importlib.util.find_spec("sklearn") is None:
    pytest.skip("scikit-learn is not installed", allow_module_level=True)
SCRIPT = ROOT / "benchmarks" / "profile_prediction.py"


def load() -> Any:
    specification = importlib.util.spec_from_file_location("profile_prediction", SCRIPT)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_a_real_workload_is_profiled_and_predicted() -> None:
    prediction = load()
    profile = prediction.record("digits-cnn", 2, 2, paced=False)
    assert isinstance(profile, Profile)
    assert len(profile.tensors) == 8 and profile.batch_size == 32
    assert profile.batch is not None and profile.batch.steps == 2
    steps_s = []
    for rate_bps in (1_000_000, 10_000_000_000):
        row = SimpleNamespace(
            workload="digits-cnn",
            strategy="p3",
            workers=2,
            rate_bps=rate_bps,
            slice_elems=None,
            step_s_median=1.0,
            cpu_share=0.5,
        )
        compared = prediction.compare(profile, row)
        assert compared.error == compared.predicted_step_s - 1.0
        steps_s.append(compared.predicted_step_s)
    # A port of 1 Mbit/s needs nine seconds for the 1.1 MB; the other is no obstacle.
    assert steps_s[0] > 8.0 > steps_s[1] > 0.9 * profile.compute_s
