"""What sessions of a test have connected, beside the objects that the program knows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch import nn

from gradlane.training.model.prepared import PreparedModel


@contextlib.contextmanager
def seen_prepared() -> Iterator[Callable[[nn.Module], PreparedModel]]:
    """Yield a function that returns how a model was last prepared since then, in any session."""
    prepared: dict[int, PreparedModel] = {}
    prepare = PreparedModel.__init__

    def noted(self: PreparedModel, *arguments: Any, **options: Any) -> None:
        prepare(self, *arguments, **options)
        prepared[id(self.model)] = self

    with mock.patch.object(PreparedModel, "__init__", noted):
        yield lambda model: prepared[id(model)]
