"""Norms of a model's residuals, read from the core in parts while it trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gradlane.training.core import Channel

ELEMENTS_MAX = 1 << 20
"""About how many numbers are read at a time: 4 MB, less than a millisecond of an I/O thread."""


class ResidualNorms:
    """The norms of one rank's residuals, those of contributions that it has encoded.

    Each call reads the next part of the slices, so a large model is up to date after several.
    """

    def __init__(self, channel: Channel, tensors: Sequence[str]) -> None:
        """Read nothing yet.

        Args:
            channel: the model's.
            tensors: names of its tensors, by number.
        """
        self._channel = channel
        self._tensors = tensors
        self._next = 0
        self._is_complete = False
        self._squares: dict[int, dict[int, float]] = {}

    def read(self) -> Mapping[str, float]:
        """Read on, and return the norms by tensor; nothing before all slices were read once.

        After the end of the channel the last norms stay.
        """
        try:
            rows, self._next = self._channel.residual_squares(self._next, ELEMENTS_MAX)
        except Exception:
            # The channel has ended or failed, which its program hears of; a report ends nothing.
            rows = []
        else:
            self._is_complete = self._is_complete or self._next == 0
        for tensor, part, squares in rows:
            self._squares.setdefault(tensor, {})[part] = squares
        if not self._is_complete:
            return {}
        return {
            self._tensors[tensor]: math.sqrt(sum(parts.values()))
            for tensor, parts in self._squares.items()
        }
