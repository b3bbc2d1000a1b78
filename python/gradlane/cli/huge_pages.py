"""Simulations of many ranks wait for memory; in huge pages they take a third less time.

The C library asks the kernel for them if `GLIBC_TUNABLES` says so when the process starts, and at
no other time, so that a command that will simulate many ranks starts itself anew.
"""

from __future__ import annotations

import os
import platform
import sys

MANY_RANKS = 500
"""From here on a simulation takes longer than a start of Python by far."""
_TUNABLES = "GLIBC_TUNABLES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def prefer_huge_pages(ranks: int) -> None:
    """Replace this process by the same command with huge pages, where that is worth it.

    Returns where it is not: for few ranks, without glibc, where the user (or this) has chosen
    tunables already, and where the command's arguments are not those of the process, as in tests.
    glibc before 2.35 knows no such tunable, and passes over it.

    Args:
        ranks: of the largest cluster that will be simulated.
    """
    arguments = sys.argv[1:]
    is_own = sys.orig_argv[-len(arguments) :] == arguments
    if ranks < MANY_RANKS or _TUNABLES in os.environ or not is_own:
        return
    if platform.libc_ver()[0] != "glibc":
        return
    os.environ[_TUNABLES] = _HUGE_PAGES
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
