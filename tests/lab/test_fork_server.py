"""The process that ranks are forked from."""

from __future__ import annotations

import os
from pathlib import Path

from gradlane.lab.cluster.fork_server import running_fork_server
from gradlane.lab.cluster.namespaces import Cluster
from tests.namespaces import needs_namespaces
from tests.paths import ROOT


@needs_namespaces
def test_ranks_run_the_sources_that_they_are_started_with(tmp_path: Path) -> None:
    """One build beside another in one cluster: none has what was loaded for another one."""
    (tmp_path / "gradlane").symlink_to(ROOT / "python" / "gradlane")
    (tmp_path / "where.py").write_text("import gradlane\nprint(gradlane.__file__)\n")
    found = []
    with Cluster(1, 100_000_000) as cluster:
        for first in (ROOT / "python", tmp_path, ROOT / "python"):
            environment = {"PYTHONPATH": os.pathsep.join(map(str, (first, tmp_path)))}
            with (tmp_path / "errors").open("w+b") as errors:
                child = running_fork_server(environment).fork(
                    "where",
                    [],
                    namespace=cluster.namespace_descriptor(0),
                    environment=environment,
                    stderr=errors,
                    timeout_s=60.0,
                )
                child.stdin.close()
                with child.stdout:
                    found.append(Path(child.stdout.read().decode().strip()).parent.parent)
                assert child.wait(60.0) == 0, (tmp_path / "errors").read_text()
    assert found == [ROOT / "python", tmp_path, ROOT / "python"]
