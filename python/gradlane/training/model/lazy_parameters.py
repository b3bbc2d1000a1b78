"""Parameters whose gradient or value is under way: a touch of one waits, or raises.

A prepared parameter stays the user's object. While the gradients of a step are averaged, its class
is one whose `.grad` waits for the mean; while its update is due, one whose operations all wait.
So references that a program keeps (lists made once, attributes, new `param_groups`) see what they
would see without gradlane. With nothing under way the parameter has its own class again, and costs
nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradlane.training.modules.compiled import is_read_by_compiler
from gradlane.training.modules.gradient_intake import raw_grad

_Result = TypeVar("_Result")


class Exemption(threading.local):
    """How deep a thread is in calls whose reads of parameters wait for nothing."""

    depth = 0

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Run a call whose reads of parameters, in this thread, wait for nothing."""
        self.depth += 1
        try:
            return call()
        finally:
            self.depth -= 1


class AccessGuard(Protocol):
    """Called before a parameter is touched."""

    exempt: Exemption
    """Threads in it ask nothing."""

    def before_operation(self, parameter: Tensor) -> None:
        """Wait until a parameter's value may be used, or raise."""

    def before_grad(self, parameter: Tensor) -> None:
        """Wait until `.grad` of a parameter may be read, or raise."""

    def write_grad(self, parameter: Tensor, gradient: Tensor | None) -> None:
        """Set `.grad` of a parameter once it may be written, or raise."""


_PROPERTIES = """
shape dtype device layout requires_grad is_leaf ndim grad_fn names itemsize nbytes output_nr
retains_grad grad is_cuda is_cpu is_sparse is_sparse_csr is_mkldnn is_meta is_quantized is_nested
is_mps is_xpu is_xla is_hpu _backward_hooks _post_accumulate_grad_hooks _version _base
"""
_METHODS = """
size stride dim numel nelement element_size ndimension storage_offset is_contiguous
is_floating_point is_complex is_signed is_inference get_device register_hook is_conj is_neg
register_post_accumulate_grad_hook requires_grad_ __len__ __hash__ is_same_size is_shared
is_pinned
new_empty new_zeros new_ones new_full
"""
_FUNCTIONS = """
numel is_floating_point is_complex is_same_size empty_like zeros_like ones_like full_like rand_like
randn_like
"""


def _metadata_functions() -> frozenset[Any]:
    """Return the functions that tell nothing of a tensor's values.

    Programs come to `.grad` through the classes' property, which has waited.
    """
    found: set[Any] = set()
    for name in _PROPERTIES.split():
        attribute = getattr(torch.Tensor, name, None)
        if attribute is not None:
            found.add(attribute.__get__)
            if hasattr(attribute, "__set__"):
                found.add(attribute.__set__)
    methods = (getattr(torch.Tensor, name, None) for name in _METHODS.split())
    found.update(method for method in methods if method is not None)
    found.update(getattr(torch, name) for name in _FUNCTIONS.split())
    return frozenset(found)


_METADATA = _metadata_functions()


def _classes_for(own: type[Tensor], guard: AccessGuard) -> tuple[type[Tensor], type[Tensor]]:
    """Return the two classes that stand in for a parameter's own."""

    exempt = guard.exempt

    def get_grad(self: Tensor) -> Tensor | None:
        if not exempt.depth and not is_read_by_compiler():
            guard.before_grad(self)
        return raw_grad(self)

    def set_grad(self: Tensor, gradient: Tensor | None) -> None:
        guard.write_grad(self, gradient)

    def delete_grad(self: Tensor) -> None:
        set_grad(self, None)

    def as_own(self: Tensor, call: Callable[..., Any], argument: Any) -> Any:
        """Copy or pickle a parameter, once it has its update, as its own class."""
        if isinstance(self, update_due):
            guard.before_operation(self)
        lazy, self.__class__ = type(self), own
        try:
            return call(self, argument)
        finally:
            self.__class__ = lazy

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        return as_own(self, own.__deepcopy__, memo)

    def reduce(self: Tensor, protocol: Any) -> Any:
        return as_own(self, own.__reduce_ex__, protocol)

    @classmethod  # type: ignore[misc]
    def torch_function(
        cls: type[Tensor],
        function: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function not in _METADATA:
            for one in _tensors_in((*args, *(kwargs or {}).values())):
                if isinstance(one, update_due):
                    guard.before_operation(one)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    grad = property(get_grad, set_grad, delete_grad, "The gradient; waits for the mean.")
    common = {"grad": grad, "__deepcopy__": deepcopy, "__reduce_ex__": reduce, "__slots__": ()}
    make: Any = type(own)
    gradient_due: type[Tensor] = make(own.__name__, (own,), dict(common))
    update_due: type[Tensor] = make(
        own.__name__, (own,), {**common, "__torch_function__": torch_function}
    )
    for lazy in (gradient_due, update_due):
        lazy.__module__, lazy.__qualname__ = own.__module__, own.__qualname__
    return gradient_due, update_due


def _tensors_in(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        else:
            yield value


class LazyParameters:
    """Switches the classes of a model's trained parameters."""

    def __init__(self, parameters: Sequence[Tensor], guard: AccessGuard) -> None:
        """Leave every parameter as it is.

        Args:
            parameters: by tensor number.
            guard: asked whenever one of them is touched while something is under way.
        """
        made: dict[type[Tensor], tuple[type[Tensor], type[Tensor]]] = {}
        self._own = [(one, type(one)) for one in parameters]
        for _, own in self._own:
            if own not in made:
                made[own] = _classes_for(own, guard)
        self._gradient_due = [(one, made[own][0]) for one, own in self._own]
        self._update_due = [(one, made[own][1]) for one, own in self._own]

    def expect_gradients(self, indices: Iterable[int] | None = None) -> None:
        """Have `.grad` of some parameters, or of all, wait."""
        _switch(self._gradient_due, indices)

    def expect_updates(self) -> None:
        """Have each parameter wait, whatever is done with it."""
        _switch(self._update_due, None)

    def settle(self, indices: Iterable[int] | None = None) -> None:
        """Give some parameters, or all, their own class again."""
        _switch(self._own, indices)


def _switch(classes: list[tuple[Tensor, type[Tensor]]], indices: Iterable[int] | None) -> None:
    chosen = classes if indices is None else map(classes.__getitem__, indices)
    for parameter, one in chosen:
        parameter.__class__ = one
