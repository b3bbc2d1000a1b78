"""Scales means as they arrive: by the ranks' weights, by `GradScaler`, and by clipping.

Clipping and unscaling need no wait for means. The owners of slices add up the squares of the means
that they have made, and tell all ranks one number each (`engine/src/gradient_norm.rs`). So the norm
is known once the last slice is *reduced*, and updates go on as means arrive, during the next
forward, as without clipping. Means of factors and rows have no owner: each rank adds their squares,
once all blocks are here. The sum is exact: neither plan, slice size nor order of arrival changes a
bit of the norm.

The factor of clipping is that of `torch.nn.utils.clip_grad_norm_`: `max_norm / (norm + 1e-6)`, at
most 1. The norm is finite exactly if all means are, which is what `GradScaler` asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from gradlane.training.core import CoreModule, SquareSum
from gradlane.training.torch_internals import (
    DisableTorchFunctionSubclass,
    foreach_unscale,
    values_of_sparse,
)

_EPSILON = 1e-6
_CORE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
}


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


def exact_norm(core: CoreModule, gradients: Sequence[Tensor]) -> float:
    """Return the norm of gradients that are here, rounded once at the end.

    Args:
        core: adds up squares.
        gradients: of any shapes and layouts; sparse ones count as dense ones.
    """
    squares = core.SquareSum()
    for gradient in gradients:
        add_squares(squares, gradient)
    return squares.root()


def add_squares(squares: SquareSum, gradient: Tensor) -> None:
    """Add the squares of a gradient of any shape and layout, exactly."""
    dense = gradient.detach()
    if dense.layout is torch.sparse_coo:
        dense = values_of_sparse(dense.coalesce())
    elif dense.layout is not torch.strided:
        dense = dense.to_dense()
    if dense.is_complex():
        dense = torch.view_as_real(dense.resolve_conj())
    dense = dense.cpu().contiguous()
    squares.add(_CORE_NAMES[dense.dtype], dense.data_ptr(), dense.nbytes)


def norm_dtype(gradients: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of a norm: f64 if a gradient has it, and f32 otherwise."""
    wide = {torch.float64, torch.complex128}
    return torch.float64 if wide & set(gradients) else torch.float32


class StepWeighting:
    """How the means of one step become means over all samples.

    Each rank has multiplied its gradients with its number of samples, and the mean over N ranks has
    divided their sum by N in place of by the samples of all ranks.
    """

    def __init__(self, wait: Callable[[], float]) -> None:
        """Weigh means.

        Args:
            wait: returns N over the samples of all ranks, once these are known.
        """
        self._wait = wait
        self._factor: float | None = None

    def factor(self) -> float:
        """Wait for all ranks' samples; return what means are multiplied with."""
        if self._factor is None:
            self._factor = self._wait()
        return self._factor

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Weigh means in place, once each."""
        with torch.no_grad(), torch.inference_mode(False):
            for gradient in gradients:
                gradient.mul_(self.factor())


class StepUnscaling:
    """How `GradScaler` unscales the gradients of one step.

    Where all means are finite, it finds stand-ins in place of the gradients of a group that are
    under way: ones. What it multiplies them with is what each gradient is multiplied with when it
    arrives, by the same operation.
    """

    def __init__(self, devices: Iterable[torch.device], indices: Set[int]) -> None:
        """Make the stand-ins.

        Args:
            devices: of the gradients.
            indices: numbers of the parameters whose means are unscaled.
        """
        self.indices = indices
        self._factors = {
            device: torch.ones((), dtype=torch.float32, device=device)
            for device in dict.fromkeys(devices)
        }

    @property
    def count(self) -> int:
        """Number of parameters whose means are unscaled."""
        return len(self.indices)

    def stand_ins(self) -> list[Tensor]:
        """Return tensors whose `.grad` is to be checked and unscaled."""
        found = []
        for factor in self._factors.values():
            stand_in = torch.empty_like(factor)
            stand_in.grad = factor
            found.append(stand_in)
        return found

    @property
    def factor(self) -> float:
        """Factor on all gradients, once `GradScaler` has applied it to the stand-ins."""
        return next(iter(self._factors.values())).item()

    def scale(self, gradients: Iterable[Tensor]) -> None:
        """Unscale gradients in place, once each."""
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for gradient in gradients:
            alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
        with torch.no_grad(), torch.inference_mode(False):
            for (device, _), some in alike.items():
                factor = self._factors[device]
                foreach_unscale(some, torch.zeros_like(factor), factor)


class StepClipping:
    """How the gradients of one step are clipped."""

    def __init__(self, max_norm: float, dtype: torch.dtype, wait: Callable[[], float]) -> None:
        """Clip to a norm.

        Args:
            max_norm: the largest norm that gradients keep.
            dtype: of the norm, in which the factor is computed.
            wait: returns the norm of all gradients, once it is known.
        """
        self._max_norm = max_norm
        self.norm = LazyNorm.of(dtype, wait)
        self._factor: Tensor | None = None

    def factor(self) -> Tensor:
        """Wait for the norm; return what gradients are multiplied with."""
        if self._factor is None:
            self._factor = torch.clamp(self._max_norm / (self.norm + _EPSILON), max=1.0)
        return self._factor

    def scale(self, gradients: Sequence[Tensor]) -> None:
        """Clip gradients in place, once each; waits for the norm."""
        factor = self.factor() if gradients else None
        if factor is not None and factor.item() != 1.0:
            with torch.no_grad(), torch.inference_mode(False):
                for gradient in gradients:
                    gradient.mul_(factor.to(gradient.device))

    def check_finite(self) -> None:
        """Wait for the norm.

        Raises:
            RuntimeError: it is infinite or not a number, as torch says it.
        """
        if not torch.isfinite(self.norm):
            raise RuntimeError(
                f"the norm of all averaged gradients is {self.norm.item()}, so they cannot be "
                "clipped; pass error_if_nonfinite=False to scale them by it all the same"
            )
