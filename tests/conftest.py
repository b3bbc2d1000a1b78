"""Fixtures of all tests: the package from this tree, and one thread of computation a process.

Ranks share the machine's cores, so more threads would only fight for them.
"""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.forked_programs import ForkedPrograms
    from tests.training.model.pool import RankPool

_SOURCES = [str(Path(__file__).parent.parent / folder) for folder in ("papers", "python")]

os.environ.setdefault("OMP_NUM_THREADS", "1")
for _source in _SOURCES:
    if _source not in sys.path:
        sys.path.insert(0, _source)
# How long a machine takes decides no test; where CI is set, hypothesis has a profile that says so.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
if "CI" not in os.environ:
    settings.load_profile("busy")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that runs this in the background has Ctrl-C ignored, here and in all that tests start.
    signal.signal(signal.SIGINT, signal.default_int_handler)


_PROCESS_FIXTURES = {"pool", "programs", "started"}
_PROCESS_FOLDERS = (
    "lab",
    "papers",
    "faults",
    "loop_fuzzing",
    "training/serving",
    "training/node",
)
_ABOUT_S = {"slow": 30.0, "root": 6.0, "processes": 3.0, "other": 0.15}
"""Seconds of a test by the first that it is, for the order of files."""


def pytest_configure(config: pytest.Config) -> None:
    """Keep the order of files that is given below: xdist would begin with those of most tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test: `unit` or `integration`, and `root` where it applies.

    Where processes share the files, those that take longest come first, so that none is left over.
    """
    from tests.namespaces import needs_namespaces

    about_s: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        processes = _PROCESS_FIXTURES.intersection(getattr(item, "fixturenames", ()))
        is_unit = not processes and not file.startswith(_PROCESS_FOLDERS)
        item.add_marker("unit" if is_unit else "integration")
        if needs_namespaces.mark in item.iter_markers():
            item.add_marker("root")
        kinds = {one.name for one in item.iter_markers()} | {"processes" if processes else "other"}
        about_s[item.path] += next(seconds for kind, seconds in _ABOUT_S.items() if kind in kinds)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: -about_s[item.path])
    # Torch, the tests and what they load stay until the end: garbage is not looked for there.
    gc.freeze()
    atexit.register(gc.unfreeze)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four rank processes for all tests; a scenario that hangs ends them, the next has others."""
    from tests.training.model.pool import RankPool

    ranks = RankPool(4)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def programs() -> Iterator[ForkedPrograms]:
    """The process that forks programs for all tests."""
    from tests.forked_programs import ForkedPrograms

    process = ForkedPrograms()
    yield process
    process.close()


@pytest.fixture
def each_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no gradients of this process travel together: the test holds tensors by number."""
    monkeypatch.setattr("gradlane.training.model.joined_gradients.MEMBER_BYTES_MAX", 0)
