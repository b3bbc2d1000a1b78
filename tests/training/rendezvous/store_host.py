"""Hosts a rendezvous store, as a launcher's agent does, until it is ended.

Argument: the file that is made with the port in it.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from torch._C._distributed_c10d import TCPStore

if __name__ == "__main__":
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = Path(sys.argv[1])
    unfinished = path.with_suffix(".new")
    unfinished.write_text(str(store.port))
    unfinished.rename(path)
    threading.Event().wait()
