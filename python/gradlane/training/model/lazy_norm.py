"""A norm that is told to the program before it is known: it waits when it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradlane.training.torch_internals import DisableTorchFunctionSubclass


class LazyNorm(Tensor):
    """A norm of no dimensions that waits when an operation touches it."""

    _wait: Callable[[], float] | None

    @classmethod
    def of(cls, dtype: torch.dtype, wait: Callable[[], float]) -> LazyNorm:
        """Return a norm whose value a call returns."""
        norm = torch.zeros((), dtype=dtype, device="cpu").as_subclass(cls)
        norm._wait = wait
        return norm

    def resolve(self) -> Tensor:
        """Wait for the value; return it as a plain tensor over the same memory."""
        with DisableTorchFunctionSubclass(), torch.inference_mode(False):
            plain = self.as_subclass(Tensor)
            if self._wait is not None:
                plain.fill_(self._wait())
                self._wait = None
            return plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, and do what torch does with a plain tensor."""
        return func(
            *_resolved(args), **{name: _resolved(one) for name, one in (kwargs or {}).items()}
        )


def _resolved(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.resolve()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_resolved, value))
    return value
