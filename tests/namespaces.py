"""Tests of the emulated cluster run where network namespaces can be made."""

from __future__ import annotations

import pytest

from gradlane.lab.cluster.privilege import why_no_namespaces

REASON = why_no_namespaces()
needs_namespaces = pytest.mark.skipif(
    REASON is not None, reason=f"network namespaces cannot be made here: {REASON}"
)
