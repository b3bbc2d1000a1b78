"""Hooks on the user's model and optimizer: how they are installed and removed.

The objects stay the user's own: hooks run before all others, `step` and `zero_grad` are replaced on
the instances only, and copies of the model carry none of it.
"""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradlane.errors import UsageError
from gradlane.training.model.lazy_buffer_dict import install_lazy_buffers, remove_lazy_buffers
from gradlane.training.model.lazy_parameter_dict import (
    SharedParameterTracker,
    held_parameters,
    install_lazy_parameters,
    remove_lazy_parameters,
)
from gradlane.training.model.optimizer_hooks import HolderHooks, OptimizerHooks
from gradlane.training.model.other_optimizers import OtherOptimizers
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.model.step_machine import StepMachine
from gradlane.training.model.validation import refuse_assignment, refuse_wrapping
from gradlane.training.modules.compiled import (
    StaleFlag,
    compile_disabled,
    compile_disabled_hook,
    enters_compiled_code,
    is_tracing,
    only_inlined,
    register_pre_hook_first,
)
from gradlane.training.modules.graph_splits import GraphSplits
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import (
    PARAMETERS,
    children_of,
    parameters_of,
    post_accumulate_hooks,
    queue_callback,
    register_load_hook,
)


class ForwardWait:
    """Forward pre-hook: waits for the updates of the parameters that a module uses."""

    __slots__ = (
        "_below",
        "_flags_below",
        "_indices",
        "_splits",
        "_stale_flag",
        "_steps",
        "_wait_for_all",
    )

    def __init__(
        self,
        steps: StepMachine,
        indices: tuple[int, ...],
        below: tuple[int, ...],
        stale_flag: StaleFlag,
        flags_below: list[StaleFlag],
        splits: GraphSplits | None,
    ) -> None:
        """Wait for the tensors that a module uses by itself.

        Args:
            steps: those of the model.
            indices: numbers of those tensors.
            below: numbers of the tensors of the module and all modules in it.
            stale_flag: the module's flag for compiled code.
            flags_below: the flags of the module and all modules in it.
            splits: splits the graphs of the module where it is compiled as a whole; None: it is no
                whole.
        """
        self._steps = steps
        self._indices = indices
        self._below = below
        self._stale_flag = stale_flag
        self._flags_below = flags_below
        self._splits = splits
        self._wait_for_all = compile_disabled(self._wait_below)

    @only_inlined
    def __call__(self, module: nn.Module, arguments: Any) -> None:
        """Wait, unless nothing is under way."""
        if is_tracing():
            if self._stale_flag.stale and self._steps.reads_wait:
                self._wait_for_all(module.training)
        elif enters_compiled_code():
            if self._stale_flag.stale:
                self._wait_for_all(module.training)
            if self._splits is not None:
                self._splits.begin()
        elif self._steps.reads_wait:
            self._steps.before_forward(self._indices, module.training)

    @property
    def __name__(self) -> str:
        """Refuse torch.jit.script, which asks for a name to compile the hook.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a model that gradlane has prepared: "
            "script its modules before prepare(), or after session.close()"
        )

    def _wait_below(self, training: bool) -> None:
        if self._splits is not None and self._steps.reads_wait and training:
            self._splits.note_wait()
        self._steps.before_forward(self._below, training)
        for stale_flag in self._flags_below:
            stale_flag.stale = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook that waits for nothing: a copy has parameters of its own."""
        return wait_for_nothing

    def __reduce__(self) -> Any:
        """Pickle as a hook that waits for nothing."""
        return _nothing, ()


class GradientHooks:
    """Takes gradients after all other hooks on their parameters, also those registered later."""

    def __init__(self, parameters: Sequence[Tensor], take: Callable[[int, Tensor], None]) -> None:
        """Register one hook on each parameter.

        Args:
            parameters: by tensor number.
            take: called with number and parameter once a gradient is in `.grad`.
        """
        self._take = compile_disabled(take)
        self._hooks: list[tuple[dict[int, Any], int]] = []
        self._handles: list[Any] = []
        for index, parameter in enumerate(parameters):
            register: Any = parameter.register_post_accumulate_grad_hook
            handle = register(compile_disabled_hook(take, index))
            hooks = post_accumulate_hooks(parameter)
            assert hooks is not None, "one was registered"
            self._handles.append(handle)
            self._hooks.append((hooks, handle.id))
        self._newest_hook = RemovableHandle.next_id

    def move_last(self, index: int, parameter: Tensor) -> bool:
        """Move all hooks behind those that were registered since; called as a backward begins.

        Args:
            index: the parameter whose hooks are running: torch goes through those that it had.
            parameter: the same.

        Returns:
            Whether its gradient is taken at the end of this backward instead of now.
        """
        later = False
        if RemovableHandle.next_id == self._newest_hook:
            return False  # No hook of any kind was registered since.
        self._newest_hook = RemovableHandle.next_id
        for number, (hooks, key) in enumerate(self._hooks):
            if next(reversed(hooks)) != key:
                hooks[key] = hooks.pop(key)
                later = later or number == index
        if later:
            queue_callback(functools.partial(self._take, index, parameter))
        return later

    def remove(self) -> None:
        """Take them off the parameters."""
        for handle in self._handles:
            handle.remove()


def wait_for_nothing(*_: Any) -> None:
    """Do nothing: replaces a hook in copies of a prepared model."""


def _nothing() -> Callable[..., None]:
    return wait_for_nothing


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """Reset the gradients of a prepared model: never waits, never touches memory in flight."""
    original = functools.partial(type(self).zero_grad, self, set_to_none)
    steps = getattr(parameters_of(self), "_steps", None)
    if steps is None:
        original()
    else:
        steps.discard(set_to_none)
        steps.bypass(original)


class HookManager:
    """Installs hooks on one model and one optimizer, and removes them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        entries: Sequence[TensorEntry],
        buffer_owners: Set[int],
        *,
        splits_graphs: bool,
    ) -> None:
        """Remember what the model and the optimizer look like before anything is changed.

        Args:
            model: the user's.
            optimizer: the user's.
            entries: the tensor table.
            buffer_owners: modules with buffers that are kept alike, by `id`.
            splits_graphs: whether gradients are sent, so that a graph of the whole model is split.
        """
        self._splits_graphs = splits_graphs
        self._buffer_owners = buffer_owners
        self._step_listeners: list[Callable[[], None]] = []
        self._gradient_hooks: GradientHooks | None = None
        self._optimizer_hooks = [
            OptimizerHooks(member, number, self.step_ended)
            for number, member in enumerate(members_of(optimizer))
        ]
        self._model = model
        self._optimizer = optimizer
        self._entries = entries
        self._trained = [entry for entry in entries if entry.trained]
        self._frozen = [entry for entry in entries if not entry.trained]
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        self._modules = list(model.modules())
        self._children = [tuple(children_of(module).values()) for module in self._modules]
        self._owned = [tuple(parameters_of(module).values()) for module in self._modules]
        self._stale_flag = {module: StaleFlag() for module in self._modules}
        self._used_by: dict[nn.Module, tuple[int, ...]] = {}
        self._scripted = [
            (module, module.__dict__.get(PARAMETERS))
            for module in self._modules
            if isinstance(module, torch.jit.ScriptModule)
        ]
        self._handles: list[Any] = []
        self._steps: StepMachine | None = None
        self._had_model_zero_grad = "zero_grad" in model.__dict__

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call a function after each training step, behind those that subscribed before.

        Args:
            listener: may remove all hooks.
        """
        self._step_listeners.append(listener)

    def install(self, steps: StepMachine) -> None:
        """Install all hooks."""
        refuse_wrapping()
        self._steps = steps
        self._used_by = {module: self._indices_used(module, steps) for module in self._modules}
        bytes_of = [entry.tensor.nbytes for entry in self._trained]
        for module in self._modules:
            below = self._indices_below(module)
            if below:
                held = sum(bytes_of[index] for index in below if 0 <= index < len(bytes_of))
                splits = None
                # Alone, a rank sends nothing; a part of the model is compiled as it is.
                if self._splits_graphs and sum(bytes_of) // 2 < held:
                    splits = GraphSplits(module, held)
                    self._handles.append(splits)
                scripted = isinstance(module, torch.jit.ScriptModule)
                hook = ForwardWait(
                    steps,
                    # Calls inside scripted code run no hooks.
                    below if scripted else self._used_by[module],
                    below,
                    self._stale_flag[module],
                    [self._stale_flag[one] for one in module.modules()],
                    splits,
                )
                self._handles.append(register_pre_hook_first(module, hook))
        self._gradient_hooks = GradientHooks(
            [entry.tensor for entry in self._trained], steps.take_gradient
        )
        self._handles.append(self._gradient_hooks)
        for hooks in self._optimizer_hooks:
            hooks.install(steps)
        holder = getattr(self._optimizer, "holder", None)
        if holder is not None:
            self._handles.append(HolderHooks(holder, steps))
        self._handles.append(
            OtherOptimizers(
                members_of(self._optimizer),
                self._trained,
                self._index_of,
                steps,
                lambda: sum(hooks.ended_steps for hooks in self._optimizer_hooks),
                self.check_unchanged,
                lambda: (parameter for _, parameter in _raw_parameters(self._model)),
            )
        )
        for module in self._modules:
            install_lazy_parameters(module, steps, self._stale_flag[module])
            handle = register_load_hook(module, refuse_assignment, with_module=True)
            self._handles.append(handle)
            if id(module) in self._buffer_owners:
                install_lazy_buffers(module, steps)
        self._handles.append(
            SharedParameterTracker(steps, [entry.tensor for entry in self._trained])
        )
        if not self._had_model_zero_grad:
            self._model.__dict__["zero_grad"] = types.MethodType(zero_grad, self._model)

    def follow(self, handle: Any) -> None:
        """Remove another handle together with the hooks."""
        self._handles.append(handle)

    def _indices_used(self, module: nn.Module, steps: StepMachine) -> tuple[int, ...]:
        """Return the tensors that a module owns, or holds past torch's registration."""
        own = (one for one in parameters_of(module).values() if one is not None)
        found = (self._index_of.get(id(one)) for one in (*own, *held_parameters(module)))
        used = [index for index in found if index is not None]
        if id(module) in self._buffer_owners:
            used.append(steps.buffers_index)
        return tuple(dict.fromkeys(used))

    def _indices_below(self, module: nn.Module) -> tuple[int, ...]:
        """Return the tensors that a module and all modules in it use, each once."""
        below = (index for one in module.modules() for index in self._used_by[one])
        return tuple(dict.fromkeys(below))

    def step_whole(self, number: int) -> Callable[..., Any]:
        """Return the own `step` of an optimizer, as it was before it was replaced."""
        return self._optimizer_hooks[number].step_whole

    def step_ended(self) -> None:
        """Call the listeners; a training step has ended."""
        for listener in tuple(self._step_listeners):
            listener()

    def move_last(self, index: int, parameter: Tensor) -> bool:
        """Have other hooks on the parameters run first; see `GradientHooks.move_last`."""
        return self._gradient_hooks is not None and self._gradient_hooks.move_last(index, parameter)

    def mark_stale(self) -> None:
        """Have compiled code wait, or raise, before it uses any parameter again."""
        for stale_flag in self._stale_flag.values():
            stale_flag.stale = True

    def remove(self) -> None:
        """Remove all hooks; the model and the optimizer are plain ones afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._steps is not None:
            self._steps.release()
        for module in self._modules:
            remove_lazy_parameters(module)
            remove_lazy_buffers(module)
        for module, mapping in self._scripted:
            if mapping is None:
                del module.__dict__[PARAMETERS]
            else:
                module.__dict__[PARAMETERS] = mapping
        if not self._had_model_zero_grad:
            self._model.__dict__.pop("zero_grad", None)
        for hooks in self._optimizer_hooks:
            hooks.remove()

    def check_unchanged(self) -> None:
        """Check that the model still is the one that was prepared.

        Raises:
            UsageError: modules or parameters were added, removed or replaced, or frozen
                parameters are trained now.
        """
        for module, children, owned in zip(self._modules, self._children, self._owned, strict=True):
            if not _same(children_of(module), children) or not _same(parameters_of(module), owned):
                raise UsageError(self._describe_change())
        self.check_still_frozen()

    def check_still_frozen(self) -> None:
        """Check that no parameter is trained that was frozen: no gradient of it is averaged.

        Raises:
            UsageError: one is.
        """
        for entry in self._frozen:
            if entry.tensor.requires_grad:
                raise UsageError(
                    f"parameter {entry.name!r} was frozen when the model was prepared and is "
                    "trained now: call session.prepare(model, optimizer) again, on all ranks"
                )

    def _describe_change(self) -> str:
        before = {entry.name: id(entry.tensor) for entry in self._entries}
        now = {name: id(parameter) for name, parameter in _raw_parameters(self._model)}
        for name, buffer in self._model.named_buffers():
            now[name] = before.get(name, id(buffer))
        added = [name for name in now if name not in before]
        removed = [name for name in before if name not in now]
        replaced = [name for name in now if name in before and now[name] != before[name]]
        changes = [
            f"{word} {', '.join(map(repr, names[:3]))}"
            for word, names in (("added", added), ("removed", removed), ("replaced", replaced))
            if names
        ]
        what = "; ".join(changes) or "its modules were changed"
        return (
            f"the model was changed after prepare(): {what}; change it before prepare(), or call "
            "session.prepare(model, optimizer) again, on all ranks"
        )


def _same(mapping: dict[str, Any], expected: tuple[Any, ...]) -> bool:
    if not expected:
        return not len(mapping)
    # The children of a scripted module are in no dictionary of Python's.
    values = dict.values(mapping) if isinstance(mapping, dict) else mapping.values()
    return len(values) == len(expected) and all(map(operator.is_, values, expected))


def _raw_parameters(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return `named_parameters()` without waiting: the values are not read."""
    found: dict[int, tuple[str, Tensor]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in dict.items(parameters_of(module)):
            if parameter is not None and id(parameter) not in found:
                full_name = f"{prefix}.{name}" if prefix else name
                found[id(parameter)] = (full_name, parameter)
    return list(found.values())
