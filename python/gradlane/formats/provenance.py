"""Origin of measured rows: the machine, the packages, the command."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

NOT_INSTALLED = "not installed"


def package_versions() -> dict[str, str]:
    """Return the versions of gradlane and its dependencies, by name."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("gradlane", "torch", "numpy"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = NOT_INSTALLED
    return versions


def machine_facts() -> dict[str, Any]:
    """Return the processors, their current load, the time and the command."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processors": os.cpu_count(),
        "processor_model": model,
        "load_average_at_start": os.getloadavg()[0],
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": ["gradlane", *sys.argv[1:]],
    }
