"""The classes of parameters whose gradient or value is under way; `lazy_parameters` switches them.

A touch of such a parameter goes through the model's gate, which waits, or raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradlane.training.model.kernel.gate import Gate
from gradlane.training.model.lazy_parameters import UNGUARDED, StandIns, set_class
from gradlane.training.modules.compiled import compile_disabled, is_read_by_compiler
from gradlane.training.modules.gradient_intake import raw_grad
from gradlane.training.torch_internals import DisableTorchFunctionSubclass

_PROPERTIES = """
shape dtype device layout requires_grad is_leaf ndim grad_fn names itemsize nbytes output_nr
retains_grad grad is_cuda is_cpu is_sparse is_sparse_csr is_mkldnn is_meta is_quantized is_nested
is_mps is_xpu is_xla is_hpu _backward_hooks _post_accumulate_grad_hooks _base
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


def waiting_classes(own: type[Tensor], gate: Gate) -> StandIns:
    """Return the class of a parameter while nothing is under way, and two that stand in for it.

    The first one is the parameter's own, unless that has its own `__torch_function__`: torch may
    ask that alone about an operation with parameters of other models, whose updates may be due.

    No call, such as a copy, puts them aside: other threads may touch the parameter meanwhile.

    Args:
        own: the parameter's own class.
        gate: lets a touch of the parameter through.
    """

    exempt = gate.exempt
    methods: Any = own
    is_unguarded = own.__torch_function__ is UNGUARDED

    def get_grad(self: Tensor) -> Tensor | None:
        if not exempt.depth and not is_read_by_compiler():
            gate.before_grad(self)
        return raw_grad(self)

    def set_grad(self: Tensor, gradient: Tensor | None) -> None:
        gate.write_grad(self, gradient)

    def delete_grad(self: Tensor) -> None:
        set_grad(self, None)

    def make_own(_: type[Tensor], *arguments: Any, **options: Any) -> Any:
        """Make another parameter, as programs do by `type(parameter)(values)`."""
        return own(*arguments, **options)

    def own_class(_: Tensor) -> type[Tensor]:
        return own

    def change_class(self: Tensor, other: type[Tensor]) -> None:
        """Change the class, as `torch.utils.swap_tensors` does, once nothing is under way."""
        if type(self) is update_due:
            gate.before_operation(self)
        else:
            gate.before_grad(self)
        set_class(self, other)

    def wait(self: Tensor) -> None:
        if type(self) is update_due:
            gate.before_operation(self)

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        wait(self)
        return methods.__deepcopy__(self, memo)

    def reduce(self: Tensor, protocol: Any) -> Any:
        wait(self)
        return _replaced(methods.__reduce_ex__(self, protocol), dict.fromkeys(stand_ins, own))

    def as_subclass(self: Tensor, other: type[Tensor]) -> Tensor:
        """Wait, which torch's own does not let others do."""
        wait(self)
        return methods.as_subclass(self, other)  # type: ignore[no-any-return]

    @classmethod  # type: ignore[misc]
    def waiting_function(
        cls: type[Tensor],
        function: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if function not in _METADATA and _wait_for_all((*args, *kwargs.values())):
            return function(*args, **kwargs)
        if is_unguarded and len(types) == 1:
            with DisableTorchFunctionSubclass():
                return function(*args, **kwargs)
        return _call_as_own(function, types, args, kwargs)

    grad = property(get_grad, set_grad, delete_grad, "The gradient; waits for the mean.")
    common = {
        "__class__": property(own_class, change_class),
        "__new__": make_own,
        "__deepcopy__": deepcopy,
        "__reduce_ex__": reduce,
        "__slots__": (),
        _OWN: own,
    }
    make: Any = type(own)
    own_operations = {} if is_unguarded else {"__torch_function__": waiting_function}
    settled: type[Tensor] = (
        own if is_unguarded else make(own.__name__, (own,), {**common, **own_operations})
    )
    gradient_due: type[Tensor] = make(
        own.__name__, (own,), {**common, "grad": grad, **own_operations}
    )
    update_due: type[Tensor] = make(
        own.__name__,
        (own,),
        {
            **common,
            "grad": grad,
            "as_subclass": as_subclass,
            "__torch_function__": waiting_function,
            _WAIT: staticmethod(compile_disabled(gate.before_operation)),
        },
    )
    stand_ins = (settled, gradient_due, update_due)
    for lazy in stand_ins:
        lazy.__module__, lazy.__qualname__ = own.__module__, own.__qualname__
    return stand_ins


_OWN = "_gradlane_own"
"""Attribute of the classes that stand in for others: the class that they stand in for."""
_WAIT = "_gradlane_wait"
"""Attribute of the classes of parameters whose update is due: waits for that of one."""


def _wait_for_all(values: Iterable[Any]) -> bool:
    """Wait for the updates of all parameters among an operation's arguments, of whatever model.

    Returns:
        Whether there were any, and none is due any more; not so in an update itself.
    """
    waited, settled = False, True
    for value in _tensors_in(values):
        wait = getattr(type(value), _WAIT, None)
        if wait is not None:
            wait(value)
            waited, settled = True, settled and not hasattr(type(value), _WAIT)
    return waited and settled


def _call_as_own(
    function: Callable[..., Any],
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call an operation as if all its arguments had their own classes, as torch does."""
    own: list[Any] = [*dict.fromkeys(getattr(one, _OWN, one) for one in types)]
    asked = [one for one in own if one.__torch_function__ is not UNGUARDED]
    for one in asked:
        result = one.__torch_function__(function, tuple(asked), args, kwargs)
        if result is not NotImplemented:
            return result
    if asked:
        return NotImplemented
    with DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _replaced(value: Any, classes: dict[type, type]) -> Any:
    """Return the result of `__reduce_ex__` with some classes replaced by others."""
    if type(value) is tuple:
        return tuple(_replaced(one, classes) for one in value)
    return classes.get(value, value) if isinstance(value, type) else value


def _tensors_in(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _tensors_in(value)
        elif isinstance(value, dict):
            yield from _tensors_in(value.values())
        else:
            yield value
