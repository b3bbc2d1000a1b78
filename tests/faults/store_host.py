"""A process that hosts the rendezvous store, as torchrun's agent or `gradlane store` does."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

from gradlane.cli.store import store
from tests.faults.isolation import isolate

_POLL_S = 0.01


def main() -> None:
    """Host the store of a job on the job's last node."""
    job = json.loads(Path(sys.argv[1]).read_text())
    isolate(job, job["nodes"][-1])
    is_up = Path(job["folder"]) / "store-is-up"
    if (job["scenario"] or {}).get("store"):
        threading.Thread(target=_note_answer, args=(job["port"], is_up), daemon=True).start()
        store(host="0.0.0.0", port=job["port"])
        return
    hosted = TCPStore("0.0.0.0", job["port"], is_master=True, wait_for_workers=False)
    is_up.touch()
    signal.pause()
    del hosted


def _note_answer(port: int, is_up: Path) -> None:
    """Write down that the store is there."""
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            is_up.touch()
            return
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
