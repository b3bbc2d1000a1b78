"""Costs of sums in a node's shared memory: of a byte copied or added, and of a word.

Copies and sums are those of `gradlane.training.node.sums`, on memory that is larger than caches, in
parts of the size of layers; processor time counts, so that others on the machine hardly matter. The
word goes from one process to another over the kind of socket that a node's ranks have, and back.
"""

from __future__ import annotations

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable

import numpy as np

from gradlane.training.node.sums import copy, local_mean

PART_BYTES = 4 << 20
REGION_BYTES = 64 << 20
RANKS = 2
"""Ranks of the node that adds up."""
_WORD = b"word of sixteen."


def copy_byte_s(repeat: int) -> list[float]:
    """Return processor seconds of copying a byte, once for each repeat."""
    source, target = _region(), _region()

    def one(offset: int) -> None:
        copy(source.ctypes.data + offset, target.ctypes.data + offset, PART_BYTES)

    return [seconds / PART_BYTES for seconds in _passes(one, repeat)]


def sum_byte_s(repeat: int) -> list[float]:
    """Return processor seconds of adding up a byte of one contribution, once for each repeat."""
    gradients, out = [_region() for _ in range(RANKS)], _region()

    def one(offset: int) -> None:
        present = [(gradient.ctypes.data + offset, PART_BYTES) for gradient in gradients]
        local_mean("f32", present, RANKS, (out.ctypes.data + offset, PART_BYTES))

    return [seconds / (RANKS * PART_BYTES) for seconds in _passes(one, repeat)]


def word_s(trials: int) -> list[float]:
    """Return seconds of half a round trip of a word to another process, once for each trial."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    arguments = (there, here)
    other = multiprocessing.get_context("fork").Process(target=_echo, args=arguments, daemon=True)
    other.start()
    there.close()
    found = []
    with here:
        for _ in range(trials):
            begin_s = time.perf_counter()
            here.send(_WORD)
            here.recv(len(_WORD))
            found.append((time.perf_counter() - begin_s) / 2)
    other.join()
    return found


def middle_word_s(trials: int, repeat: int) -> list[float]:
    """Return the median of as many words, once for each repeat."""
    return [statistics.median(word_s(trials)) for _ in range(repeat)]


def _echo(there: socket.socket, other_end: socket.socket) -> None:
    # Held here, too, it would never be closed.
    other_end.close()
    while word := there.recv(len(_WORD)):
        there.send(word)


def _region() -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    # Pages that were never written are all the same one.
    return np.ones(REGION_BYTES // 4, dtype=np.float32)


def _passes(one: Callable[[int], None], repeat: int) -> list[float]:
    """Return processor seconds of a part in each pass over the region but the first."""
    found = []
    for number in range(repeat + 1):
        begin_ns = time.thread_time_ns()
        for offset in range(0, REGION_BYTES, PART_BYTES):
            one(offset)
        if number:
            found.append((time.thread_time_ns() - begin_ns) / 1e9 / (REGION_BYTES // PART_BYTES))
    return found
