"""Refuse steps of other optimizers that hold a prepared model's parameters.

Such a step would see gradients that are on their way, and the session would not know of it. One
that steps the prepared optimizer within, such as a look-ahead, is welcome.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from gradlane.errors import UsageError
from gradlane.training.model.failure_latch import FailureLatch
from gradlane.training.model.lazy_list import plain
from gradlane.training.model.lazy_parameters import Exemption
from gradlane.training.model.model_structure import ModelStructure
from gradlane.training.model.optimizers import gradlane_hook
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.rendezvous.tensor_table import TensorEntry


class OtherOptimizers:
    """Watches the steps of all optimizers of the process for one prepared model."""

    def __init__(
        self,
        prepared: Sequence[Optimizer],
        trained: Sequence[TensorEntry],
        index_of: Mapping[int, int],
        exempt: Exemption,
        failure: FailureLatch,
        ended_steps: Callable[[], int],
        structure: ModelStructure,
    ) -> None:
        """Watch until `remove`.

        Args:
            prepared: the optimizers that may step.
            trained: the model's trained parameters.
            index_of: their numbers, by `id`.
            exempt: threads in it are in an update of the model's own.
            failure: the model's.
            ended_steps: counts the calls of `step()` of the prepared ones.
            structure: knows the parameters that the model was prepared with, and has now.
        """
        self._prepared = prepared
        self._trained = trained
        self._index_of = index_of
        self._exempt = exempt
        self._failure = failure
        self._ended_steps = ended_steps
        self._structure = structure
        self._begun: dict[int, int] = {}
        self._seen: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        """Trained parameters of the optimizers that hold none of this model."""
        _watch_all()
        _WATCHES[id(self)] = weakref.ref(self)

    def remove(self) -> None:
        """Stop watching."""
        _WATCHES.pop(id(self), None)

    def before(self, other: Optimizer) -> None:
        """Note that an optimizer is about to step.

        Raises:
            UsageError: it holds parameters of the model, inside backward; or parameters that the
                model got since it was prepared, which no session averages.
        """
        name = self._shared(other)
        if name is not None:
            if inside_backward():
                self._refuse(other, name, " inside backward()")
            self._begun[id(other)] = self._ended_steps()
        elif not self._is_own(other):
            self._check_stranger(other)

    def after(self, other: Optimizer) -> None:
        """Note that an optimizer has stepped.

        Raises:
            UsageError: it holds parameters of the model, and has not stepped the prepared one.
        """
        begun = self._begun.pop(id(other), None)
        if begun is not None and begun == self._ended_steps():
            self._refuse(other, self._shared(other) or "", "")

    def _is_own(self, other: Optimizer) -> bool:
        return self._steps(other) or self._failure.error is not None

    def _steps(self, other: Optimizer) -> bool:
        """Return whether an optimizer is a prepared one, or part of an update in this thread."""
        return any(other is one for one in self._prepared) or self._exempt.depth > 0

    def _check_stranger(self, other: Optimizer) -> None:
        """Check, once, that an optimizer trains nothing that the model got since `prepare`.

        Not those of other models, whose updates may come while a model is called with their
        parameters, as by `functional_call`.
        """
        if any(watch._steps(other) for watch in _watches()):
            return
        held = {
            id(parameter)
            for group in other.param_groups
            for parameter in plain(group["params"])
            if parameter.requires_grad
        }
        if self._seen.get(other) != len(held):
            self._seen[other] = len(held)
            if any(id(one) in held for _, one in self._structure.raw_parameters()):
                self._structure.check_unchanged()

    def _shared(self, other: Optimizer) -> str | None:
        if self._is_own(other):
            return None
        for group in other.param_groups:
            for parameter in plain(group["params"]):
                index = self._index_of.get(id(parameter))
                if index is not None:
                    return self._trained[index].name
        return None

    def _refuse(self, other: Optimizer, name: str, where: str) -> NoReturn:
        raise UsageError(
            f"another {type(other).__name__} than the prepared optimizer has stepped parameter "
            f"{name!r}{where}: call session.prepare(model, optimizer) with the one that trains the "
            "model, or with a list of all that do, on all ranks"
        )


_WATCHES: dict[int, weakref.ref[OtherOptimizers]] = {}
_watches_all = False


def _watch_all() -> None:
    """Have torch call the watches. Once: torch's hooks are one mapping for all threads."""
    global _watches_all
    if not _watches_all:
        _watches_all = True
        register_optimizer_step_pre_hook(gradlane_hook(_before))
        register_optimizer_step_post_hook(gradlane_hook(_after))


def _watches() -> list[OtherOptimizers]:
    return [watch for one in list(_WATCHES.values()) if (watch := one()) is not None]


def _before(optimizer: Optimizer, *_: Any) -> None:
    for watch in _watches():
        watch.before(optimizer)


def _after(optimizer: Optimizer, *_: Any) -> None:
    for watch in _watches():
        watch.after(optimizer)
