"""Built parts that tests need."""

from __future__ import annotations

import importlib.util

import pytest

needs_core = pytest.mark.skipif(
    importlib.util.find_spec("gradlane._core") is None, reason="the compiled core is not built"
)
