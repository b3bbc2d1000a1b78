"""A process that hosts the rendezvous store, as torchrun's agent does, until it is ended."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from tests.faults.isolation import isolate


def main() -> None:
    """Host the store of a job on the job's last node."""
    job = json.loads(Path(sys.argv[1]).read_text())
    isolate(job, job["nodes"][-1])
    store = TCPStore("0.0.0.0", job["port"], is_master=True, wait_for_workers=False)
    (Path(job["folder"]) / "store-is-up").touch()
    signal.pause()
    del store


if __name__ == "__main__":
    main()
