"""Whether this account may make network namespaces, and how to get there if it may not.

An account without the privilege can often still get it inside a user namespace of its own, where
it is root towards the namespaces that it makes, and nobody special towards the machine.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from gradlane.lab.cluster.errors import PrivilegeError

_CLONE_NEWNET = 0x40000000
_INSIDE = "GRADLANE_LAB_USER_NAMESPACE"
_ADVICE = (
    "run it as root (sudo), in a container started with --cap-add SYS_ADMIN --cap-add NET_ADMIN, "
    "or allow user namespaces (sysctl user.max_user_namespaces=10000, on Debian "
    "kernel.unprivileged_userns_clone=1, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0)"
)


def enter_network_namespace(descriptor: int | None) -> None:
    """Move the calling thread into a network namespace. Python has `os.setns` from 3.12 on.

    Args:
        descriptor: open descriptor of the namespace; None: a new one.

    Raises:
        OSError: the kernel refused it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if descriptor is None:
        name, failed = "unshare", libc.unshare(_CLONE_NEWNET)
    else:
        name, failed = "setns", libc.setns(descriptor, _CLONE_NEWNET)
    if failed:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}(CLONE_NEWNET): {os.strerror(code)}")


def in_network_namespace(descriptor: int | None, action: Callable[[], None]) -> None:
    """Run `action` in a thread of a network namespace; the calling thread stays where it is.

    Processes that the action starts are in the namespace. A new namespace lives on only if the
    action keeps a descriptor of it.

    Args:
        descriptor: open descriptor of the namespace; None: a new one.
        action: what to run.

    Raises:
        OSError: the kernel refused the namespace, or the action raised it.
    """
    failures: list[BaseException] = []

    def run() -> None:
        try:
            enter_network_namespace(descriptor)
            action()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, name="gradlane-lab-namespace")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def why_no_namespaces() -> str | None:
    """Return why network namespaces cannot be made here, or None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    try:
        in_network_namespace(None, lambda: None)
    except OSError as failure:
        return str(failure.strerror or failure)
    return None


def ensure_namespaces(arguments: Sequence[str]) -> None:
    """Return if network namespaces can be made, else start anew where they can be.

    Without the privilege this replaces the process: `python -m gradlane ARGUMENTS` runs inside a
    user namespace in which the account is mapped to root.

    Raises:
        PrivilegeError: neither way is open; the message says how to get the privilege.
    """
    reason = why_no_namespaces()
    if reason is None:
        return
    unshare = shutil.which("unshare")
    if os.environ.get(_INSIDE) or unshare is None:
        raise PrivilegeError(f"the lab cannot make network namespaces ({reason}); {_ADVICE}")
    prefix = [unshare, "--user", "--map-root-user", "--net", "--"]
    trial = subprocess.run([*prefix, "true"], capture_output=True, text=True, check=False)
    if trial.returncode != 0:
        raise PrivilegeError(
            f"the lab cannot make network namespaces ({reason}), nor a user namespace to make "
            f"them in ({trial.stderr.strip()}); {_ADVICE}"
        )
    os.environ[_INSIDE] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(unshare, [*prefix, sys.executable, "-m", "gradlane", *arguments])
