"""Take gradients out of `.grad`, in memory that the core may write the mean into.

The core writes possibly while backward still runs. So a gradient is lent as it is only if nothing
else can read its memory, and copied otherwise: autograd may give a parameter a view of memory that
another branch of the graph has yet to read.

A program may keep gradients from step to step, and zero them in place: a list of them, or one
buffer of which they are views. No look at these can be noticed. So a hook sees that somebody else
holds a gradient's object, or the memory of one that backward has added to; such a gradient is
watched, and gets the mean itself before backward returns, as with DDP. Memory is counted again once
backward's hooks are over: autograd itself may have held it until then (torch 2.7 does).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter
from sys import getrefcount
from typing import Any, cast

import torch
from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.rendezvous.tensor_table import TensorEntry, same_layout
from gradlane.training.torch_internals import (
    VERSION,
    address_of,
    count_owners,
    indices_of_sparse,
    values_of_sparse,
    version_of,
)

_GRAD: Any = Tensor.grad
raw_grad: Callable[[Tensor], Tensor | None] = _GRAD.__get__
"""Return a parameter's `.grad` without waiting."""
set_raw_grad: Callable[[Tensor, Tensor | None], None] = _GRAD.__set__
"""Set a parameter's `.grad` without waiting."""


def _owners(tensor: Tensor) -> int | None:
    """Return the number of references to a tensor's memory, seen from here; None: unknown."""
    if count_owners is None:
        return None
    storage = tensor.untyped_storage()
    return count_owners(address_of(storage))


def _references_in_place() -> int:
    """Return how many references a gradient has that is in `.grad` and in one list."""
    parameter = torch.empty(1, dtype=torch.float32, device="cpu", requires_grad=True)
    set_raw_grad(parameter, torch.empty(1, dtype=torch.float32, device="cpu"))
    found = [raw_grad(parameter)]
    return getrefcount(found[0])


_LISTED = [torch.empty(1, dtype=torch.float32, device="cpu")]
_SOLE_REFERENCES = getrefcount(_LISTED[0])
"""References of a tensor that one list holds, so counted; more: a program has it.

No variable holds it: a debugger that looks at a frame's variables keeps their values.
"""
_SOLE_REFERENCES_MAPPED = sum(map(getrefcount, _LISTED))
"""The same where they are counted by `map`."""
_REFERENCES_IN_PLACE = _references_in_place()
"""The same where it is in `.grad`, too: torch itself may have one then."""
_ALONE = _owners(torch.empty(1, dtype=torch.float32, device="cpu"))
"""Owners of memory that one tensor has to itself, by `_owners`."""


def is_alone(tensor: Tensor) -> bool:
    """Whether a tensor certainly has its memory to itself."""
    if count_owners is None:
        return False
    # As in `_owners`, without a call: this is asked of each gradient.
    storage = tensor.untyped_storage()
    return count_owners(address_of(storage)) == _ALONE


def is_row_sparse(gradient: Tensor) -> bool:
    """Whether a gradient is a sparse COO tensor of rows, as that of a sparse embedding is."""
    return gradient.layout is torch.sparse_coo and gradient.sparse_dim() == 1


def values_of(gradient: Tensor) -> Tensor:
    """Return the numbers of a gradient, in its own memory; what is not stored is zero.

    Numbers of one place are stored apart where a sparse gradient is not coalesced.
    """
    return values_of_sparse(gradient) if gradient.layout is torch.sparse_coo else gradient


def sum_of(gradient: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two gradients, in place of the first one unless only that is sparse."""
    if gradient.is_sparse and not other.is_sparse:
        return other + gradient
    return gradient.add_(other)


_form_of = attrgetter("layout", "dtype", "shape", "device", "requires_grad", VERSION)
"""Return what a gradient is checked for."""


class GradientBatch:
    """Gradients that are taken at once, and the form that most have."""

    def __init__(self, indices: Sequence[int], trained: Sequence[TensorEntry]) -> None:
        """Prepare for the gradients of some table entries.

        Args:
            indices: their tensor numbers.
            trained: all entries, by number.
        """
        self.indices = indices
        entries = [trained[index] for index in indices]
        self.parameters = [entry.tensor for entry in entries]
        self.forms = [
            (torch.strided, entry.dtype, entry.shape, entry.device, False, 0) for entry in entries
        ]


class GradientIntake:
    """Takes gradients of trained parameters, one a step and tensor."""

    def __init__(self, trained: Sequence[TensorEntry]) -> None:
        """Take gradients of these table entries, by tensor number."""
        self._trained = trained
        self._copies: dict[int, Tensor] = {}
        self._watched: dict[int, Tensor | None] = {}
        """Those of this step that the program looks at, by tensor number; None: not taken yet."""
        self._suspected: set[int] = set()
        """Those of them whose memory autograd alone may have."""

    def begin_step(self) -> None:
        """Forget which gradients of the last step were watched."""
        self._watched.clear()
        self._suspected.clear()

    def is_watched(self) -> bool:
        """Whether the program looks at any gradient of this step; asked between backwards."""
        if self._suspected:
            self._count_again()
        return bool(self._watched)

    def _count_again(self) -> None:
        """Watch no gradient any more whose memory only autograd and other gradients had."""
        in_place = (raw_grad(entry.tensor) for entry in self._trained)
        tensors = [*in_place, *self._watched.values(), *self._copies.values()]
        here = {id(one): one for one in tensors if one is not None}.values()
        # Autograd gives several parameters views of one memory, as where they are joined.
        counts = Counter(
            address_of(one.untyped_storage()) for one in here if one.layout is torch.strided
        )
        for index in [*self._suspected]:
            gradient = self._watched[index]
            if gradient is None:
                gradient = raw_grad(self._trained[index].tensor)
            if gradient is not None and gradient.layout is torch.strided:
                others = counts[address_of(gradient.untyped_storage())] - 1
                if _owners(gradient) != (_ALONE or 0) + others:
                    continue
            self._suspected.remove(index)
            del self._watched[index]

    def give_back(self, index: int, mean: Tensor) -> Tensor:
        """Return the tensor for `.grad`: the program's own with the mean, if it looks at that."""
        watched = self._watched.pop(index, None)
        self._suspected.discard(index)
        if watched is None or watched.layout is not mean.layout:
            return mean
        with torch.no_grad(), torch.inference_mode(False):
            return watched.copy_(mean)

    def look(self, index: int) -> None:
        """Look at a gradient that stays in `.grad`, since more may come.

        Raises:
            UsageError: it cannot be averaged; the message names the parameter.
        """
        parameter = self._trained[index].tensor
        # It is not taken away for the look: another thread's backward may add to it now, since
        # torch runs hooks outside of the lock for that.
        found = [raw_grad(parameter)]
        is_held = getrefcount(found[0]) > _REFERENCES_IN_PLACE
        gradient = found.pop()
        if gradient is None:
            return
        check_gradient(self._trained[index], gradient)
        if self._is_shared(index, gradient, is_held=is_held):
            self._watched[index] = None

    def _is_shared(self, index: int, gradient: Tensor, *, is_held: bool) -> bool:
        """Whether others have a gradient, or the memory of one that backward has added to, such as
        one that was zeroed in place. That of a gradient just made may be shared by autograd alone.
        """
        if is_held:
            self._suspected.discard(index)
            return True
        if gradient.layout is not torch.strided or not version_of(gradient):
            return False
        if count_owners is None or _ALONE is None:
            return True  # Nobody knows.
        copy = self._copies.get(index)
        own = int(copy is not None and copy.data_ptr() == gradient.data_ptr())
        if _owners(gradient) == _ALONE + own:
            return False
        self._suspected.add(index)
        return True

    def take(self, index: int, parameter: Tensor) -> Tensor:
        """Return a gradient in memory of its own, laid out like its table entry.

        The parameter's `.grad` is None afterwards.

        Raises:
            UsageError: the gradient cannot be averaged; the message names the parameter.
        """
        gradient, is_held = self._fetch(index, parameter)
        entry = self._trained[index]
        if self._is_shared(index, gradient, is_held=is_held):
            self._watched[index] = gradient
        if gradient.layout is not torch.strided:
            gradient = _densified(entry, gradient)
        check_gradient(entry, gradient)
        if gradient.is_conj() or gradient.is_neg():
            gradient = gradient.resolve_conj().resolve_neg()
        if (
            is_alone(gradient)
            and self._watched.get(index) is not gradient
            and same_layout(gradient, entry.stride)
        ):
            return gradient
        with torch.no_grad():
            return self._copy_for(index, gradient).copy_(gradient)

    def take_batch(self, batch: GradientBatch) -> list[Tensor]:
        """Return all gradients of a batch, which are copied at once; `.grad` of each is None then.

        Raises:
            UsageError: one cannot be averaged; the message names the parameter.
        """
        parameters = batch.parameters
        # Loops outside of Python: this is done for each gradient.
        found = cast("list[Tensor]", [*map(raw_grad, parameters)])
        try:
            is_usual = [*map(_form_of, found)] == batch.forms
        except AttributeError:
            is_usual = False  # One is None.
        if is_usual:
            deque(map(set_raw_grad, parameters, repeat(None)), maxlen=0)
            if sum(map(getrefcount, found)) == len(found) * _SOLE_REFERENCES_MAPPED:
                return found
            deque(map(set_raw_grad, parameters, found), maxlen=0)
        found.clear()
        return self.take_for_copy(batch.indices)

    def take_for_copy(self, indices: Iterable[int]) -> list[Tensor]:
        """Return gradients that are copied at once; `.grad` of each is None afterwards.

        Args:
            indices: their tensor numbers.

        Raises:
            UsageError: one cannot be averaged; the message names the parameter.
        """
        trained, strided = self._trained, torch.strided
        found: list[Tensor] = []
        for index in indices:
            entry = trained[index]
            gradient, is_held = self._fetch(index, entry.tensor)
            if (is_held or version_of(gradient)) and self._is_shared(
                index, gradient, is_held=is_held
            ):
                self._watched[index] = gradient
            if gradient.layout is not strided:
                gradient = _densified(entry, gradient)
            # As in `check_gradient`, without a call: this is done for each gradient.
            if (
                gradient.dtype is not entry.dtype
                or gradient.shape != entry.shape
                or gradient.device != entry.device
                or gradient.requires_grad
            ):
                check_gradient(entry, gradient)
            found.append(gradient)
        return found

    def take_rows(self, index: int, parameter: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the numbers of the rows of a sparse gradient (i64, ascending), and their values.

        The parameter's `.grad` is None afterwards. Where it is no such gradient it stays, and None
        is returned.

        Raises:
            UsageError: the gradient cannot be averaged; the message names the parameter.
        """
        found = raw_grad(parameter)
        if found is not None and not is_row_sparse(found):
            return None
        gradient, _ = self._fetch(index, parameter)
        check_gradient(self._trained[index], gradient)
        with torch.no_grad():
            coalesced = gradient.coalesce()
        return indices_of_sparse(coalesced)[0], values_of_sparse(coalesced)

    def _fetch(self, index: int, parameter: Tensor) -> tuple[Tensor, bool]:
        """Take `.grad` away from a parameter; returns it, and whether others hold it, too."""
        found = [raw_grad(parameter)]
        set_raw_grad(parameter, None)
        is_held = getrefcount(found[0]) > _SOLE_REFERENCES
        gradient = found.pop()
        if gradient is None:
            raise UsageError(
                f"the gradient of {self._trained[index].name!r} is gone: another hook took it; "
                "leave it in .grad"
            )
        return gradient, is_held

    def _copy_for(self, index: int, gradient: Tensor) -> Tensor:
        """Return memory to copy into: last step's, unless the user still holds it."""
        copy = self._copies.get(index)
        if copy is None or not is_alone(copy):
            copy = torch.empty_strided(
                gradient.shape,
                self._trained[index].stride,
                dtype=gradient.dtype,
                device=gradient.device,
            )
            self._copies[index] = copy
        # A tensor of its own over the same memory, so that `.grad` never is the kept one.
        return copy.detach()


def _densified(entry: TensorEntry, gradient: Tensor) -> Tensor:
    """Return a sparse gradient, as of an embedding, with its zeros."""
    try:
        with torch.no_grad():
            if gradient.layout is torch.sparse_coo:
                # As rows do: values of one place are added up in one order, however they travel.
                gradient = gradient.coalesce()
            return gradient.to_dense()
    except (RuntimeError, NotImplementedError) as error:
        raise UsageError(
            f"the gradient of {entry.name!r} is {gradient.layout} and cannot be made dense: {error}"
        ) from error


def check_gradient(entry: TensorEntry, gradient: Tensor) -> None:
    """Check that a gradient is one that can be averaged.

    Raises:
        UsageError: it is not; the message names the parameter.
    """
    if gradient.dtype is not entry.dtype or gradient.shape != entry.shape:
        raise UsageError(
            f"the gradient of {entry.name!r} is {tuple(gradient.shape)} {gradient.dtype}, but the "
            f"parameter was prepared as {tuple(entry.shape)} {entry.dtype}: convert or change the "
            "model before prepare()"
        )
    if gradient.device != entry.device:
        raise UsageError(
            f"the gradient of {entry.name!r} is on {gradient.device}, but the parameter was "
            f"prepared on {entry.device}: move the model before prepare()"
        )
    if gradient.requires_grad:
        raise UsageError(
            f"the gradient of {entry.name!r} is part of a graph (create_graph=True), which cannot "
            "be averaged; use torch.autograd.grad for the inner gradient"
        )
