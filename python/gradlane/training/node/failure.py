"""Failures as they pass between the ranks of a node, and between ranks and nodes.

The channel between nodes numbers its ranks by nodes: its `rank 1` is the leader of node 1. Texts
that pass through it name ranks of the whole world, and are marked as such on the way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass

from gradlane.training.core import CoreModule
from gradlane.training.rendezvous.deadline import SuspendAwareDeadline

KEEPALIVES_PER_TIMEOUT = 8
"""Heartbeats of a rank in one silence timeout."""
_MARK = "world rank"
_RANK = re.compile(r"\brank (\d+)")
_MARKED_RANK = re.compile(rf"\b{_MARK} (\d+)")
_NODE = re.compile(r"\b(?<!world )rank (\d+)")


@dataclass(frozen=True)
class Failure:
    """The reason why a channel has failed.

    Attributes:
        message: with ranks of the world, or nodes.
        last_complete_step: the last step that was whole, or None.
        rank: the rank at fault, or None.
        timed_out: True if ranks were alive but did not take part.
    """

    message: str
    last_complete_step: int | None
    rank: int | None
    timed_out: bool = False

    def to_bytes(self) -> bytes:
        """Serialize the failure for another rank of the node."""
        return json.dumps(asdict(self)).encode()

    @staticmethod
    def from_bytes(text: bytes) -> Failure:
        """Parse a failure that another rank of the node has sent."""
        return Failure(**json.loads(text))

    def text_for_other_nodes(self) -> str:
        """Return the message for other nodes, which names the rank at fault and not only its
        node."""
        if self.rank is None or _RANK.search(self.message):
            return self.message
        return f"{self.message} (rank {self.rank})"

    def to_error(self, core: CoreModule) -> Exception:
        """Return the failure as an error of the core."""
        kind = core.ChannelTimeout if self.timed_out else core.ChannelError
        return kind(self.message, self.last_complete_step, self.rank)


class KeepaliveMonitor:
    """Detects ranks of the node whose process stands still."""

    def __init__(self, timeout_s: float, peers: Iterable[int], pulse: Callable[[int], int]) -> None:
        """Start the timeouts.

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
        """Return a local rank that was silent for too long; call it once an interval.

        Args:
            departed: local ranks that have said goodbye.
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
    """Mark the ranks in a text as ranks of the world, for the channel between nodes."""
    return _RANK.sub(rf"{_MARK} \1", reason)


def failure_in_world_ranks(
    core: CoreModule, error: Exception, rank_of_node: Callable[[int], int]
) -> Failure:
    """Convert an error of the channel between nodes into a failure with ranks of the world.

    Args:
        core: defines the error.
        error: a `ChannelError` of that channel.
        rank_of_node: returns the leader of a node.
    """
    message = str(error.args[0]) if error.args else str(error)
    last = error.args[1] if len(error.args) > 1 else None
    node = error.args[2] if len(error.args) > 2 else None
    marked_rank = _MARKED_RANK.search(message)
    timed_out = isinstance(error, core.ChannelTimeout)
    message = in_world_ranks(message, rank_of_node, as_nodes=timed_out)
    rank = (
        int(marked_rank.group(1)) if marked_rank else None if node is None else rank_of_node(node)
    )
    return Failure(message, last, rank, timed_out)


def in_world_ranks(text: str, rank_of_node: Callable[[int], int], *, as_nodes: bool = False) -> str:
    """Return a text of the channel between nodes with ranks of the world, or with nodes.

    Args:
        text: whose ranks are nodes, unless they are marked.
        rank_of_node: returns the leader of a node.
        as_nodes: whether any rank of a node may be meant, as also where one is marked.
    """
    as_nodes = as_nodes or _MARKED_RANK.search(text) is not None

    def named(found: re.Match[str]) -> str:
        node = int(found.group(1))
        return f"node {node}" if as_nodes else f"rank {rank_of_node(node)}"

    return _MARKED_RANK.sub(r"rank \1", _NODE.sub(named, text))
