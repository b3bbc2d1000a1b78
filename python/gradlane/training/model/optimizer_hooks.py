"""Hooks on one optimizer of a prepared model."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable
from itertools import chain, repeat
from typing import Any

from torch.optim import Optimizer

from gradlane.errors import UsageError
from gradlane.training.model.lazy_list import install_lazy_groups, plain, remove_lazy_groups
from gradlane.training.model.lazy_state import LazyState, install_lazy_state, remove_lazy_state
from gradlane.training.model.optimizers import evaluates_closure, written_step
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.modules.compiled import compile_disabled
from gradlane.training.modules.gradient_intake import raw_grad
from gradlane.training.torch_internals import (
    DisableTorchFunctionSubclass,
    has_state_hooks,
    mark_as_wrapped,
    note_step,
    patch_step,
)


class OptimizerHooks:
    """Has the `step`, `zero_grad` and state of one optimizer go through the model's steps."""

    def __init__(self, optimizer: Optimizer, number: int, on_step_end: Callable[[], None]) -> None:
        """Remember what the optimizer looks like before anything is changed.

        Args:
            optimizer: the user's.
            number: the optimizer's, among those of the model.
            on_step_end: called whenever a training step has ended for all of them.
        """
        patch_step(optimizer)
        self.step_whole: Callable[..., Any] = optimizer.step
        self.ended_steps = 0
        """Calls of `step()`."""
        self._optimizer = optimizer
        self._number = number
        self._on_step_end = compile_disabled(on_step_end)
        self._handles: list[Any] = []
        self._saves_state = False
        self._own_step: Any = None
        self._own_zero_grad: Any = None
        self._had_own_step = "step" in optimizer.__dict__
        self._class_step = type(optimizer).step

    def install(self, steps: TrainingSteps) -> None:
        """Install all hooks."""
        hooks, optimizer, step_whole = self, self._optimizer, self.step_whole
        zero_whole = optimizer.zero_grad
        is_plain_zero = getattr(zero_whole, "__func__", None) is Optimizer.zero_grad
        if evaluates_closure(optimizer):
            end_step = compile_disabled(steps.evaluations.step)
        else:
            end_step = compile_disabled(steps.step_end.end_step)

        def before_state() -> None:
            if steps.stages.in_order.keeps_means and not hooks._saves_state:
                raise UsageError(
                    'optimizer.state is touched with update="server": the state is on the '
                    "servers; optimizer.state_dict() and load_state_dict() bring and replace it"
                )
            steps.gate.before_optimizer_state()

        def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            """Update the parameters: at once, or as the averaged gradients arrive."""
            if not hooks._handles:
                return step_whole() if closure is None else step_whole(closure)
            hooks._check_class_step()
            # Lists that the program has replaced since are guarded from now on, too.
            install_lazy_groups(self, steps)
            if steps.stages.in_order.keeps_means and not isinstance(self.state, LazyState):
                raise UsageError(
                    'optimizer.state was replaced with update="server": the state is on the '
                    "servers; give load_state_dict() one to go on from"
                )
            install_lazy_state(self, before_state)
            hooks.ended_steps += 1
            # Learning rate schedulers look at this to see the order of calls.
            note_step(self)
            result = end_step(closure, hooks._number)
            if steps.step_end.has_ended:
                hooks._on_step_end()
            return result

        def zero_optimizer(self: Optimizer, set_to_none: bool = True) -> None:
            """Reset the gradients; between backward and step, forget those under way."""
            if not hooks._handles:
                zero_whole(set_to_none)
                return
            steps.step_end.discard(set_to_none, hooks._number)
            if is_plain_zero and _has_no_gradient(self):
                return
            steps.gate.bypass(functools.partial(zero_whole, set_to_none))

        # Another session that prepares the optimizer looks for the code that steps.
        step.__wrapped__ = step_whole  # type: ignore[attr-defined]
        mark_as_wrapped(step, step_whole)
        self._own_step = types.MethodType(step, optimizer)
        self._own_zero_grad = types.MethodType(zero_optimizer, optimizer)
        optimizer.__dict__["step"] = self._own_step
        optimizer.__dict__["zero_grad"] = self._own_zero_grad
        install_lazy_groups(optimizer, steps)
        install_lazy_state(optimizer, before_state)

        def before_state_dict(*_: Any) -> None:
            steps.gate.before_optimizer_state()
            hooks._saves_state = True

        def after_state_dict(*_: Any) -> None:
            # Loading has put another mapping there.
            install_lazy_state(optimizer, before_state)
            hooks._saves_state = False

        self._handles += [
            optimizer.register_state_dict_pre_hook(before_state_dict, prepend=True),
            optimizer.register_state_dict_post_hook(after_state_dict),
            optimizer.register_load_state_dict_pre_hook(before_state_dict, prepend=True),
            optimizer.register_load_state_dict_post_hook(after_state_dict),
        ]

    def remove(self) -> None:
        """Remove all hooks; the optimizer is a plain one afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        remove_lazy_groups(self._optimizer)
        remove_lazy_state(self._optimizer)
        own = self._optimizer.__dict__
        # The program may have wrapped the replacement since: then it stays, and passes calls on.
        if own.get("step") is self._own_step:
            del own["step"]
            if self._had_own_step:
                own["step"] = self.step_whole
        if own.get("zero_grad") is self._own_zero_grad:
            del own["zero_grad"]

    def _check_class_step(self) -> None:
        """Raise `UsageError` where the optimizer's class has got another `step` since.

        torch would call that one; what stands in its place here calls the one of `prepare`.
        """
        now = type(self._optimizer).step
        if self._had_own_step or now is self._class_step:
            return
        if written_step(now) is written_step(self._class_step):
            return  # torch.compile wraps those of some classes when it is used first.
        raise UsageError(
            f"{type(self._optimizer).__name__}.step is another function than when the optimizer "
            "was prepared, because the class or the optimizer's __class__ was changed: do that "
            "before prepare(), or wrap step of the optimizer itself"
        )


class HolderHooks:
    """Has an optimizer that steps those of a model read and reset nothing that is under way."""

    def __init__(self, holder: Optimizer, steps: TrainingSteps) -> None:
        """Guard it until `remove`."""
        self._holder = holder
        self._handles: list[Any] = []
        self._own_zero_grad: Any = None
        install_lazy_groups(holder, steps)
        if has_state_hooks(holder):
            wait = _ignoring(steps.gate.before_optimizer_state)
            self._handles.append(holder.register_state_dict_pre_hook(wait, prepend=True))
            self._handles.append(holder.register_load_state_dict_pre_hook(wait, prepend=True))
        if type(holder).zero_grad is not Optimizer.zero_grad or "zero_grad" in vars(holder):
            return  # It calls that of each.
        zero_whole = holder.zero_grad

        def zero_all(self: Optimizer, set_to_none: bool = True) -> None:
            """Reset the gradients of all optimizers."""
            steps.step_end.discard(set_to_none)
            steps.gate.bypass(functools.partial(zero_whole, set_to_none))

        self._own_zero_grad = types.MethodType(zero_all, holder)
        holder.__dict__["zero_grad"] = self._own_zero_grad

    def remove(self) -> None:
        """Take all hooks off; it is a plain one afterwards."""
        for handle in self._handles:
            handle.remove()
        remove_lazy_groups(self._holder)
        if self._holder.__dict__.get("zero_grad") is self._own_zero_grad is not None:
            del self._holder.__dict__["zero_grad"]


def _has_no_gradient(optimizer: Optimizer) -> bool:
    """Return whether `.grad` of all parameters is None, whatever is still to come there."""
    # A loop outside of Python: there may be thousands, in each step.
    parameters = chain.from_iterable(plain(group["params"]) for group in optimizer.param_groups)
    with DisableTorchFunctionSubclass():
        return all(map(operator.is_, map(raw_grad, parameters), repeat(None)))


def _ignoring(call: Callable[[], None]) -> Callable[..., None]:
    return lambda *_: call()
