"""torch's own tests of its backends, `DistributedTest` of the installed torch, over gradlane.

`python -m tests.distributed.torch_suite --ranks 2` runs every test twice: over Gloo, and over
gradlane. Which tests there are is decided as for Gloo. Counts are printed, and each test that Gloo
passes and gradlane does not. The tests are torch's, and need `expecttest`; nothing
of them is here. `--only REGEX` picks some; `--json PATH` writes the outcomes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import re
import tempfile
import time
import unittest
from collections import Counter
from pathlib import Path
from typing import Any


def run(names: list[str], backend: str) -> dict[str, str]:
    """Run tests and return `passed`, `skipped` or the end of the error of each."""
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test

    if backend != "gloo":
        import gradlane.distributed

        gradlane.distributed.register()
        # The tests are chosen by now, and only ask for this name from here on.
        os.environ["BACKEND"] = distributed_test.BACKEND = backend
    cases: Any = distributed_test

    class Cases(cases.TestDistBackend, cases.DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # Torch is loaded already, which takes longer than most tests.
            self._start_processes(multiprocessing.get_context("fork").Process)

    found = [name for name in dir(Cases) if name.startswith("test_")]
    outcomes = {}
    for name in names or found:
        began = time.monotonic()
        result = unittest.TestResult()
        Cases(name).run(result)
        if result.skipped:
            outcomes[name] = "skipped"
        elif result.wasSuccessful():
            outcomes[name] = "passed"
        else:
            trouble = (result.errors + result.failures)[0][1]
            lines = [line.strip() for line in trouble.splitlines() if "Error" in line]
            outcomes[name] = (lines or ["failed"])[-1][:300]
        print(
            f"{backend} {name}: {outcomes[name][:160]} ({time.monotonic() - began:.0f} s)",
            flush=True,
        )
    return outcomes


def main() -> None:
    """Run the suite over one backend in this process, or over both, each in its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--backend", choices=("gloo", "gradlane"))
    given = parser.parse_args()
    if importlib.util.find_spec("expecttest") is None:
        parser.error("torch's tests need expecttest: pip install expecttest")
    os.environ.update(
        WORLD_SIZE=str(given.ranks),
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60",
    )
    outcomes: dict[str, dict[str, str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TEMP_DIR"] = folder
        for backend in [given.backend] if given.backend else ["gloo", "gradlane"]:
            outcomes[backend] = _in_a_child(given.only, backend)
    for backend, found in outcomes.items():
        kinds = Counter(it if it in ("passed", "skipped") else "failed" for it in found.values())
        print(f"{backend}, {given.ranks} ranks: " + ", ".join(f"{kinds[it]} {it}" for it in kinds))
    gloo, own = outcomes.get("gloo", {}), outcomes.get("gradlane", {})
    for name, outcome in sorted(own.items()):
        if gloo.get(name) == "passed" and outcome != "passed":
            print(f"Gloo alone passes {name}: {outcome}")
    if given.json:
        given.json.write_text(json.dumps(outcomes, indent=1) + "\n")


def _in_a_child(only: str, backend: str) -> dict[str, str]:
    """Run the suite in a fresh process: a registration changes the whole process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_serve, args=(theirs, only, backend))
    child.start()
    theirs.close()
    found: dict[str, str] = ours.recv()
    child.join()
    return found


def _serve(pipe: Any, only: str, backend: str) -> None:
    os.environ["BACKEND"] = "gloo"
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    names = [it for it in dir(base) if it.startswith("test_") and re.search(only, it)]
    pipe.send(run(names, backend))


if __name__ == "__main__":
    main()
