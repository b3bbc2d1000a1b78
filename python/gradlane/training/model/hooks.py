"""Hooks on the user's model and optimizer: how they are installed and removed.

The objects stay the user's own: hooks run before all others, `step` and `zero_grad` are replaced on
the instances only, and copies of the model carry none of it.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradlane.training.model.lazy_buffer_dict import install_lazy_buffers, remove_lazy_buffers
from gradlane.training.model.lazy_parameter_dict import (
    LazyParameterDict,
    SharedParameterTracker,
    held_parameters,
    install_lazy_parameters,
    remove_lazy_parameters,
)
from gradlane.training.model.model_structure import ModelStructure
from gradlane.training.model.optimizer_hooks import HolderHooks, OptimizerHooks
from gradlane.training.model.other_optimizers import OtherOptimizers
from gradlane.training.model.several_optimizers import members_of
from gradlane.training.model.step_listeners import StepListeners
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.model.validation import refuse_assignment, refuse_wrapping
from gradlane.training.model.waiting_classes import waiting_classes
from gradlane.training.modules.compiled import (
    StaleFlag,
    compile_disabled,
    enters_compiled_code,
    is_tracing,
    only_inlined,
    register_pre_hook_first,
)
from gradlane.training.modules.graph_splits import GraphSplits
from gradlane.training.modules.stale_flags import StaleFlags
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import PARAMETERS, parameters_of, register_load_hook


class ForwardWait:
    """Forward pre-hook: waits for the updates of the parameters that a module uses."""

    __slots__ = (
        "_below",
        "_flags_below",
        "_gate",
        "_indices",
        "_phases",
        "_splits",
        "_stale_flag",
        "_wait_for_all",
    )

    def __init__(
        self,
        steps: TrainingSteps,
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
        self._phases, self._gate = steps.phases, steps.gate
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
            if self._stale_flag.stale and self._phases.reads_wait:
                self._wait_for_all(module.training)
        elif enters_compiled_code():
            if self._stale_flag.stale:
                self._wait_for_all(module.training)
            if self._splits is not None:
                self._splits.begin()
        elif self._phases.reads_wait:
            self._gate.before_forward(self._indices, module.training)

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
        if self._splits is not None and self._phases.reads_wait and training:
            self._splits.note_wait()
        self._gate.before_forward(self._below, training)
        for stale_flag in self._flags_below:
            stale_flag.stale = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Return a hook that waits for nothing: a copy has parameters of its own."""
        return wait_for_nothing

    def __reduce__(self) -> Any:
        """Pickle as a hook that waits for nothing."""
        return _nothing, ()


def wait_for_nothing(*_: Any) -> None:
    """Do nothing: replaces a hook in copies of a prepared model."""


def _nothing() -> Callable[..., None]:
    return wait_for_nothing


def zero_grad(self: nn.Module, set_to_none: bool = True) -> None:
    """Reset the gradients of a prepared model: never waits, never touches memory in flight."""
    original = functools.partial(type(self).zero_grad, self, set_to_none)
    guarded = parameters_of(self)
    if isinstance(guarded, LazyParameterDict):
        guarded.steps.step_end.discard(set_to_none)
        guarded.steps.gate.bypass(original)
    else:
        original()


class HookManager:
    """Installs hooks on one model and one optimizer, and removes them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        structure: ModelStructure,
        stale_flags: StaleFlags,
        listeners: StepListeners,
        trained: Sequence[TensorEntry],
        buffer_owners: Set[int],
        *,
        splits_graphs: bool,
    ) -> None:
        """Remember what the model and the optimizer look like before anything is changed.

        Args:
            model: the user's.
            optimizer: the user's.
            structure: the modules of the model.
            stale_flags: those of its modules.
            listeners: called at the end of each training step.
            trained: table entries of the trained parameters, by tensor number.
            buffer_owners: modules with buffers that are kept alike, by `id`.
            splits_graphs: whether gradients are sent, so that a graph of the whole model is split.
        """
        self._splits_graphs = splits_graphs
        self._buffer_owners = buffer_owners
        self._optimizer_hooks = [
            OptimizerHooks(member, number, listeners.step_ended)
            for number, member in enumerate(members_of(optimizer))
        ]
        self._model = model
        self._optimizer = optimizer
        self._structure = structure
        self._modules = structure.modules
        self._stale_flags = stale_flags
        self._trained = trained
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(trained)}
        self._used_by: dict[nn.Module, tuple[int, ...]] = {}
        self._scripted = [
            (module, module.__dict__.get(PARAMETERS))
            for module in self._modules
            if isinstance(module, torch.jit.ScriptModule)
        ]
        self._handles: list[Any] = []
        self._had_model_zero_grad = "zero_grad" in model.__dict__

    def install(self, steps: TrainingSteps) -> None:
        """Install all hooks."""
        refuse_wrapping()
        steps.lazy.install(functools.partial(waiting_classes, gate=steps.gate))
        buffers_index = steps.exchange.layout.buffers_index
        self._used_by = {one: self._indices_used(one, buffers_index) for one in self._modules}
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
                    self._stale_flags.of(module),
                    [self._stale_flags.of(one) for one in module.modules()],
                    splits,
                )
                self._handles.append(register_pre_hook_first(module, hook))
        captured = steps.exchange.layout.captured
        take, take_part = steps.intake.take_gradient, steps.factors.take_dense
        takes = [take_part if index in captured else take for index in range(len(self._trained))]
        steps.hooks.install(takes)
        self._handles.append(steps.hooks)
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
                steps.gate.exempt,
                steps.phases.failure,
                lambda: sum(hooks.ended_steps for hooks in self._optimizer_hooks),
                self._structure,
            )
        )
        for module in self._modules:
            install_lazy_parameters(module, steps, self._stale_flags.of(module))
            handle = register_load_hook(module, refuse_assignment, with_module=True)
            self._handles.append(handle)
            if id(module) in self._buffer_owners:
                install_lazy_buffers(module, steps)
        self._handles.append(
            SharedParameterTracker(steps, [entry.tensor for entry in self._trained])
        )
        self._handles.append(steps.lazy)
        if not self._had_model_zero_grad:
            self._model.__dict__["zero_grad"] = types.MethodType(zero_grad, self._model)

    def remove_with(self, handle: Any) -> None:
        """Remove another handle together with the hooks."""
        self._handles.append(handle)

    def _indices_used(self, module: nn.Module, buffers_index: int) -> tuple[int, ...]:
        """Return the tensors that a module owns, or holds past torch's registration."""
        own = (one for one in parameters_of(module).values() if one is not None)
        found = (self._index_of.get(id(one)) for one in (*own, *held_parameters(module)))
        used = [index for index in found if index is not None]
        if id(module) in self._buffer_owners:
            used.append(buffers_index)
        return tuple(dict.fromkeys(used))

    def _indices_below(self, module: nn.Module) -> tuple[int, ...]:
        """Return the tensors that a module and all modules in it use, each once."""
        below = (index for one in module.modules() for index in self._used_by[one])
        return tuple(dict.fromkeys(below))

    def step_whole(self, number: int) -> Callable[..., Any]:
        """Return the own `step` of an optimizer, as it was before it was replaced."""
        return self._optimizer_hooks[number].step_whole

    def remove(self) -> None:
        """Remove all hooks; the model and the optimizer are plain ones afterwards."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
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
