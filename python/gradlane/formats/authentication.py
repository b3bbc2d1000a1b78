"""Keys derived from a job's secret, and message authentication codes under them.

The primitives are those of the standard library: HKDF (RFC 5869) and HMAC (RFC 2104) over SHA-256.
Each purpose has a key of its own, so that a code of one purpose is worth nothing for another.
"""

from __future__ import annotations

import hashlib
import hmac

MAC_BYTES = 32
_SALT = b"gradlane"


def derived_key(secret: bytes, purpose: str, context: str = "") -> bytes:
    """Return a key of 32 bytes for one purpose: HKDF with one block of output.

    Args:
        secret: of the job, with 128 bits or more; or another derived key.
        purpose: names the use of the key; a constant of the program.
        context: binds the key to something, such as a job; any text.
    """
    extracted = hmac.digest(_SALT, secret, hashlib.sha256)
    texts = (purpose.encode(), context.encode("utf-8", "surrogatepass"))
    information = b"".join(len(text).to_bytes(8, "little") + text for text in texts)
    return hmac.digest(extracted, information + b"\x01", hashlib.sha256)


def mac(key: bytes, *parts: bytes | memoryview) -> bytes:
    """Return the HMAC of some parts, each preceded by its length: no two lists are coded alike.

    Args:
        key: of 32 bytes.
        parts: bytes, or buffers of bytes; none is copied.
    """
    code = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        code.update(len(part).to_bytes(8, "little"))
        code.update(part)
    return code.digest()


def same_mac(found: str, expected: str) -> bool:
    """Compare a code that was found, any text, in a time that does not depend on the difference."""
    return hmac.compare_digest(found.encode("utf-8", "surrogatepass"), expected.encode())
