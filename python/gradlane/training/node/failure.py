"""Failures as they pass between a node's ranks, and between ranks and nodes.

The channel between nodes numbers its ranks by nodes, and says `rank 1` for the rank that speaks for
node 1. What is told through it in words names ranks of the whole world: such words are marked on
the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass

from gradlane.training.core import CoreModule
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline

KEEPALIVES_PER_TIMEOUT = 8
"""Signs of life that a rank gives its node in a silence timeout."""
_MARK = "world rank"
_RANK = re.compile(r"\brank (\d+)")
_MARKED_RANK = re.compile(rf"\b{_MARK} (\d+)")
_NODE = re.compile(r"\b(?<!world )rank (\d+)")


@dataclass(frozen=True)
class Failure:
    """Why a channel has ended before its time.

    Attributes:
        message: what happened, with ranks of the whole world, or nodes.
        last_complete_step: the last step that was whole, or None.
        rank: the rank at fault, or None.
        timed_out: whether ranks were alive and did not take part.
    """

    message: str
    last_complete_step: int | None
    rank: int | None
    timed_out: bool = False

    def to_bytes(self) -> bytes:
        """Return what another rank of the node is told."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Failure:
        """Return what another rank of the node has told."""
        return Failure(**json.loads(text))

    def text_for_other_nodes(self) -> str:
        """Return what other nodes are told: it names the rank at fault, not its node alone."""
        if self.rank is None or _RANK.search(self.message):
            return self.message
        return f"{self.message} (rank {self.rank})"

    def to_error(self, core: CoreModule) -> Exception:
        """Return it as the core raises it."""
        kind = core.ChannelTimeout if self.timed_out else core.ChannelError
        return kind(self.message, self.last_complete_step, self.rank)


class KeepaliveMonitor:
    """Watches the signs of life of the other ranks of a node."""

    def __init__(self, timeout_s: float, peers: Iterable[int], pulse: Callable[[int], int]) -> None:
        """Begin to watch.

        Args:
            timeout_s: seconds that a rank may be silent.
            peers: local ranks.
            pulse: returns a number that changes as long as the process of a local rank runs.
        """
        self.timeout_s = timeout_s
        self.interval_s = timeout_s / KEEPALIVES_PER_TIMEOUT
        self._pulse = pulse
        self._last = {peer: (pulse(peer), SuspendAwareDeadline(timeout_s)) for peer in peers}

    def first_silent(self, departed: Container[int]) -> int | None:
        """Return a local rank that was silent for too long; to be called once an interval.

        Args:
            departed: local ranks that have left.
        """
        for peer, (last, deadline) in self._last.items():
            now = self._pulse(peer)
            if now != last:
                deadline.renew()
                self._last[peer] = (now, deadline)
            elif deadline.is_over(self.interval_s) and peer not in departed:
                return peer
        return None


def mark_world_ranks(reason: str) -> str:
    """Return words for the channel between nodes: its own ranks are nodes."""
    return _RANK.sub(rf"{_MARK} \1", reason)


def failure_in_world_ranks(
    core: CoreModule, error: Exception, rank_of_node: Callable[[int], int]
) -> Failure:
    """Return a failure of the channel between nodes, with ranks of the whole world.

    Args:
        core: where the error comes from.
        error: a `ChannelError` of that channel.
        rank_of_node: the rank that speaks for a node.
    """
    message = str(error.args[0]) if error.args else str(error)
    last = error.args[1] if len(error.args) > 1 else None
    node = error.args[2] if len(error.args) > 2 else None
    marked_rank = _MARKED_RANK.search(message)
    timed_out = isinstance(error, core.ChannelTimeout)

    def named(found: re.Match[str]) -> str:
        node = int(found.group(1))
        # Any rank of a node may have told it, or keep the node from taking part.
        return f"node {node}" if marked_rank or timed_out else f"rank {rank_of_node(node)}"

    message = _MARKED_RANK.sub(r"rank \1", _NODE.sub(named, message))
    rank = (
        int(marked_rank.group(1)) if marked_rank else None if node is None else rank_of_node(node)
    )
    return Failure(message, last, rank, timed_out)
