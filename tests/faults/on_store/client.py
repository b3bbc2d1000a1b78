"""A new client of a store, which ends with status 0 if it is answered: `client JOB.json`."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from tests.faults.isolation import isolate

_ANSWER_S = 20.0


def main() -> None:
    """Set a key and read it."""
    job = json.loads(Path(sys.argv[1]).read_text())
    isolate(job, job["nodes"][-1])
    store = TCPStore("127.0.0.1", job["port"], timeout=timedelta(seconds=_ANSWER_S))
    store.set("asked", "1")
    assert store.get("asked") == b"1"


if __name__ == "__main__":
    main()
