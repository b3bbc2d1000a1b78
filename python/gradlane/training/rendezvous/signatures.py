"""Signatures of the values that ranks leave in the rendezvous store.

A store has no authentication: any process that reaches it can write any key. Where the job has a
secret, each value is stored as `gradlane-signed 1 RANK MAC VALUE`. The MAC is under a key derived
from the secret and the job, over the whole key, the rank that writes, and the value. The key names
job, incarnation and channel, so that a value of another start, channel or key is refused
(`docs/decisions/0059-signed-store-values.md`). Where it has none, values are stored as
`gradlane-value 1 RANK MAC VALUE` under a key that everybody knows: what another program leaves in
the store, or moves from one key to another, is refused as well, and whoever forges values is not.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradlane.errors import RendezvousError
from gradlane.formats.authentication import MAC_BYTES, derived_key, mac, same_mac

_MARK = b"gradlane-signed 1 "
_UNSIGNED_MARK = b"gradlane-value 1 "
_KNOWN_KEY = derived_key(b"", "store values of a job without a secret")
_SIGNED_AGAIN = "set GRADLANE_SECRET_FILE to the same secret on every rank"


class StoreValueRefusedError(RendezvousError):
    """A value in the rendezvous store is not signed, or not as the job's secret signs it."""


@dataclass(frozen=True)
class StoreSigner:
    """Signs this rank's values, and checks those of others.

    Attributes:
        rank: this rank.
        key: derived from secret and job; None where the job has no secret.
        where: the store's address and host, for errors.
    """

    rank: int
    key: bytes | None
    where: str

    @classmethod
    def of(cls, rank: int, secret: str | None, job: str, where: str) -> StoreSigner:
        """Derive the key of a job's store from its secret; None: values are not signed."""
        key = None if secret is None else derived_key(secret.encode(), "store values", job)
        return cls(rank, key, where)

    def sign(self, path: str, value: str | bytes) -> bytes:
        """Return what is stored for a value of this rank.

        Args:
            path: the whole key.
            value: what the others are to read.
        """
        content = value.encode() if isinstance(value, str) else value
        code = self._code(path, self.rank, content).hex()
        return b"%s%d %s " % (self._mark, self.rank, code.encode()) + content

    def check(self, path: str, stored: bytes, writer: int | None) -> bytes:
        """Return the value that a rank has stored.

        Args:
            path: the whole key.
            stored: what the store returned.
            writer: the rank that writes the key; None: any rank may.

        Raises:
            StoreValueRefusedError: it is not signed, or its signature is wrong; the message names
                key, rank and remedy.
        """
        if self.key is None and stored.startswith(_MARK):
            raise self._refused(
                path,
                writer,
                f"it is signed with a secret, and rank {self.rank} has none: {_SIGNED_AGAIN}, "
                "or on none",
            )
        if self.key is not None and not stored.startswith(_MARK):
            raise self._refused(
                path,
                writer,
                "it is not signed: its rank has no secret, or another process has written it; "
                f"{_SIGNED_AGAIN}, and keep strangers away from the store",
            )
        is_marked = stored.startswith(self._mark)
        rank_text, _, rest = stored[len(self._mark) :].partition(b" ")
        code_text, space, content = rest.partition(b" ")
        if is_marked and space and len(code_text) == 2 * MAC_BYTES and rank_text.isdigit():
            rank = int(rank_text[:9])
            expected = self._code(path, rank, content).hex()
            if same_mac(code_text.decode("latin-1"), expected) and writer in (None, rank):
                return content
        if self.key is None:
            raise self._refused(
                path,
                writer,
                "another process has written or changed it, or moved it here from another key: "
                "keep strangers away from the store, give the job a secret (GRADLANE_SECRET_FILE), "
                "and start again with a fresh store or another job name",
            )
        raise self._refused(
            path,
            writer,
            "its signature is wrong: its rank has another secret, or another process has changed "
            "it, moved it here from another key, or left it here from a start with another secret; "
            f"{_SIGNED_AGAIN}, keep strangers away from the store, and start again with a fresh "
            "store or another job name",
        )

    def claimed(self, path: str, stored: bytes) -> tuple[bytes, bool]:
        """Return a stored value, and whether it is signed as this rank's values are.

        Args:
            path: the whole key, which any rank writes.
            stored: what the store returned.
        """
        try:
            return self.check(path, stored, None), True
        except StoreValueRefusedError:
            is_marked = stored.startswith((_MARK, _UNSIGNED_MARK))
            return stored.split(b" ", 4)[-1] if is_marked else stored, False

    @property
    def _mark(self) -> bytes:
        return _UNSIGNED_MARK if self.key is None else _MARK

    def _code(self, path: str, rank: int, content: bytes) -> bytes:
        key = _KNOWN_KEY if self.key is None else self.key
        return mac(key, path.encode("utf-8", "surrogatepass"), b"%d" % rank, content)

    def _refused(self, path: str, writer: int | None, reason: str) -> StoreValueRefusedError:
        whose = "any rank may write" if writer is None else f"rank {writer} writes"
        return StoreValueRefusedError(
            f"rank {self.rank} refuses the value of {path!r}, which {whose}, in the rendezvous "
            f"store {self.where}: {reason}"
        )
