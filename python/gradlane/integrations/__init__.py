"""Adapters for training frameworks that drive the loop themselves; each imports its framework."""

from __future__ import annotations

import importlib
from typing import Any


def __getattr__(name: str) -> Any:
    """Load an adapter, and its framework, when it is first asked for."""
    if name in ("accelerate", "lightning", "transformers"):
        return importlib.import_module(f"gradlane.integrations.{name}")
    raise AttributeError(f"module 'gradlane.integrations' has no attribute {name!r}")
