"""Move this process into a network namespace, then become another program.

Run by path as `enter_namespace.py DESCRIPTOR PROGRAM ARGUMENT...`, so that it imports nothing of
gradlane: no thread exists yet, and the whole later process lives in the namespace. It stands in
for `nsenter`, which not every machine has, and for `os.setns`, which Python has from 3.12 on.
"""

from __future__ import annotations

import ctypes
import os
import sys

_CLONE_NEWNET = 0x40000000


def main() -> None:
    """Enter the namespace behind the descriptor in argument one; execute arguments two onward."""
    descriptor = int(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        code = ctypes.get_errno()
        raise SystemExit(f"cannot enter the network namespace: {os.strerror(code)}")
    os.close(descriptor)
    os.execv(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
