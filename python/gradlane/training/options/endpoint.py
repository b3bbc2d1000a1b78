"""Addresses at which a session answers: a port, or a host and a port."""

from __future__ import annotations

import re

from gradlane.errors import RefusedError
from gradlane.formats.untrusted import escaped

LOOPBACK = "127.0.0.1"
_ADDRESS = re.compile(r"(?:(?:\[(?P<ipv6>[^\[\]]+)\]|(?P<host>[^:\[\]\s]+)):)?(?P<port>[0-9]{1,5})")


def parse_address(text: str, name: str) -> tuple[str, int]:
    """Parse `PORT` (of the loopback interface), `HOST:PORT` or `[IPv6]:PORT`.

    Args:
        text: the address.
        name: of the option or variable, for the message.

    Raises:
        ValueError: the text is no address.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise RefusedError(
            f"{name} is {escaped(text)}; it must be PORT (for callers on this machine), HOST:PORT "
            "or [IPv6]:PORT; 0.0.0.0:PORT and [::]:PORT are all addresses of this machine"
        )
    return match["ipv6"] or match["host"] or LOOPBACK, int(match["port"])
