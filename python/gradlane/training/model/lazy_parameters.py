"""Parameters whose gradient or value is under way: a touch of one waits, or raises.

A prepared parameter stays the user's object. While the gradients of a step are averaged, its class
is one whose `.grad` waits for the mean; while its update is due, one whose operations all wait.
`parameter.__class__` is its own at all times, and so are the classes of copies. So references that
a program keeps (lists made once, attributes, new `param_groups`) see what they would see without
gradlane. With nothing under way the parameter has its own class again, and costs nothing.
`waiting_classes` makes the classes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from gradlane.training.torch_internals import disabled_torch_function, many_at_once_types

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

    def run_outside(self, call: Callable[[], _Result]) -> _Result:
        """Run a call of the program inside of such a call: its reads wait as ever."""
        depth, self.depth = self.depth, 0
        try:
            return call()
        finally:
            self.depth = depth


UNGUARDED: Any = disabled_torch_function
"""`__torch_function__` of classes whose operations are torch's own."""
_CLASS: Any = object.__dict__["__class__"]
set_class: Callable[[Tensor, type[Tensor]], None] = _CLASS.__set__
"""Set an object's class, past its property of that name."""
StandIns = tuple[type[Tensor], type[Tensor], type[Tensor]]
"""The class of a parameter while nothing is under way, while its mean is due, and its update."""


def _answers(own: type[Tensor]) -> bool:
    """Return whether torch's functions ask a class, which may leave all others out.

    Classes with a `__torch_dispatch__` find themselves by their type, so they keep it.
    """
    inherited = (UNGUARDED, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]
    asked: Any = own.__torch_function__
    is_dispatched = own.__torch_dispatch__ is not Tensor.__torch_dispatch__
    return getattr(asked, "__func__", asked) not in inherited and not is_dispatched


class LazyParameters:
    """Switches the classes of a model's trained parameters."""

    def __init__(self, parameters: Sequence[Tensor], untrained: Iterable[Tensor] = ()) -> None:
        """Leave the parameters their own classes.

        Args:
            parameters: by tensor number.
            untrained: the model's other tensors. One with a `__torch_function__` of its own waits
                for parameters that it meets in an operation, as trained ones of such classes do.
        """
        self._parameters = parameters
        self._untrained = [(one, type(one)) for one in untrained if _answers(type(one))]
        self._own: list[type[Tensor]] = [*map(type, parameters)]
        self.are_plain = all(own.__torch_function__ is UNGUARDED for own in set(self._own))
        """Whether torch's functions are no class's own."""
        self._settled = self._gradient_due = self._update_due = self._own

    def install(self, make: Callable[[type[Tensor]], StandIns]) -> None:
        """Have a touch of a parameter wait while something is under way.

        Args:
            make: returns the classes that stand in for one of the parameters' own.
        """
        others = (own for _, own in self._untrained)
        made = {own: make(own) for own in {*self._own, *others}}
        self._settled, self._gradient_due, self._update_due = (
            [made[own][number] for own in self._own] for number in range(3)
        )
        many_at_once_types.extend(self._stepped_as_own())
        for one, own in self._untrained:
            set_class(one, made[own][0])
        self.make_ready()

    def _stepped_as_own(self) -> set[type[Tensor]]:
        """Return classes in which torch's optimizers step parameters as in their own."""
        pairs = zip(self._own, self._update_due, strict=True)
        return {due for own, due in pairs if own in (Tensor, nn.Parameter) and due is not own}

    def remove(self) -> None:
        """Give all parameters their own classes, for good."""
        self._switch(self._own, None)
        for tensor, own in self._untrained:
            set_class(tensor, own)
        for one in self._stepped_as_own().intersection(many_at_once_types):
            many_at_once_types.remove(one)

    def expect_gradients(self, indices: Iterable[int] | None = None) -> None:
        """Have `.grad` of some parameters, or of all, wait."""
        self._switch(self._gradient_due, indices)

    def expect_updates(self) -> None:
        """Have each parameter wait, whatever is done with it."""
        self._switch(self._update_due, None)

    def make_ready(self, indices: Iterable[int] | None = None) -> None:
        """Have some parameters, or all, wait no more."""
        self._switch(self._settled, indices)

    def _switch(self, classes: list[type[Tensor]], indices: Iterable[int] | None) -> None:
        if indices is None:
            # A loop outside of Python: there may be thousands, in each step.
            deque(map(set_class, self._parameters, classes), maxlen=0)
            return
        for index in indices:
            set_class(self._parameters[index], classes[index])
