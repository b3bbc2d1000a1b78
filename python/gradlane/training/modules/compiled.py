"""Keep torch.compile from cutting graphs at hooks: compiled code waits once.

Compiled code reads parameters past Python. When it is traced, a check of one flag a module is all
that is left of the hooks: while the flag is down, nothing of gradlane is in the graph. The first
hook that a compiled region meets with its flag up waits for everything below its module, and takes
all flags there down. So a region waits where it begins, and regions overlap with one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradlane.training.torch_internals import (
    compiling_flag,
    forward_pre_hooks,
    frame_callback,
    reads_for_shapes,
    set_compiling_flag,
    skip_code,
)

_REASON = (
    "gradlane waits here for parameters whose update is under way; where the graph must not end, "
    "compile the module, not a function around it, or call session.synchronize() first"
)
_Function = TypeVar("_Function", bound=Callable[..., Any])
Hook = Callable[[Tensor], None]


class StaleFlag:
    """The flag of one module: whether some of its parameters may lack their update.

    Only compiled code looks at it, which can check an attribute but not ask the core.
    """

    __slots__ = ("stale",)

    def __init__(self) -> None:
        """Start with the flag up: the first forward also observes the order."""
        self.stale = True


is_tracing: Callable[[], bool] = torch.compiler.is_dynamo_compiling
"""Whether this code is being traced by torch.compile: a constant in what is traced, else False."""


def enters_compiled_code() -> bool:
    """Whether functions that are called now, in this thread, would be compiled."""
    return frame_callback() not in _NOT_COMPILING


def compile_disabled(function: _Function) -> _Function:
    """Return a function that torch.compile neither traces nor compiles: it ends the graph."""
    disable: Callable[..., Any] = torch.compiler.disable
    try:
        opaque_function: _Function = disable(function, reason=_REASON)
    except TypeError:  # torch before 2.7 takes no reason.
        opaque_function = disable(function)
    return opaque_function


def compile_disabled_hook(take: Callable[[int, Tensor], None], index: int) -> Hook:
    """Return a gradient hook that torch.compile neither traces nor compiles; where it does neither,
    the hook costs no more than a call.

    Args:
        take: called with the index and the parameter.
        index: of the parameter.
    """

    @only_inlined
    def hook(parameter: Tensor) -> None:
        if is_tracing() or frame_callback() not in _NOT_COMPILING:
            compile_disabled(take)(index, parameter)
        else:
            take(index, parameter)

    return hook


class _CompilingElsewhere(threading.local):
    """Stands in for torch's flag, one for all threads, that code is being compiled: not so in
    threads that are in `not_compiling`. The compilation that set the flag takes it down, too."""

    depth = 0

    def __bool__(self) -> bool:
        return not self.depth


_ELSEWHERE: Any = _CompilingElsewhere()


@contextmanager
def not_compiling() -> Iterator[None]:
    """Have `torch.compiler.is_compiling()` be false in this thread, whatever is compiled now."""
    _ELSEWHERE.depth += 1
    if compiling_flag() is True:
        set_compiling_flag(_ELSEWHERE)
    try:
        yield
    finally:
        _ELSEWHERE.depth -= 1


def only_inlined(function: _Function) -> _Function:
    """Have a function traced where compiled code calls it, but never compiled by itself."""
    # Every optimizer loads the compiler, so that takes no time.
    skip_code(function.__code__)
    return function


def register_pre_hook_first(module: nn.Module, hook: Callable[..., Any]) -> RemovableHandle:
    """Register a forward pre-hook before all others, also on a scripted module.

    Torch's own way, `prepend=True`, moves it in the order that an `OrderedDict` keeps beside that
    of its dict. Some compilers (torch 2.11) go by the latter, and guard one hook by another.
    """
    handle = nn.Module.register_forward_pre_hook(module, hook)
    hooks = forward_pre_hooks(module)
    for key in [*hooks][:-1]:
        hooks[key] = hooks.pop(key)
    return handle


is_read_by_compiler = reads_for_shapes
"""Whether torch.compile is at work in this thread and reads for shapes, not for values."""


_NOT_COMPILING = (None, False)
if hasattr(frame_callback, "__code__"):
    only_inlined(frame_callback)
