"""The modules and parameters of a model as it was prepared."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from gradlane.errors import UsageError
from gradlane.training.rendezvous.tensor_table import TensorEntry
from gradlane.training.torch_internals import children_of, parameters_of


class ModelStructure:
    """Remembers what a model consists of, and finds what the program has changed since."""

    def __init__(self, model: nn.Module, entries: Sequence[TensorEntry]) -> None:
        """Remember a model.

        Args:
            model: the user's.
            entries: the tensor table.
        """
        self._model = model
        self._entries = entries
        self._frozen = [entry for entry in entries if not entry.trained]
        self.modules = list(model.modules())
        """All modules of the model."""
        self._children = [tuple(children_of(module).values()) for module in self.modules]
        self._owned = [tuple(parameters_of(module).values()) for module in self.modules]

    def check_unchanged(self) -> None:
        """Check that the model still is the one that was prepared.

        Raises:
            UsageError: modules or parameters were added, removed or replaced, or frozen
                parameters are trained now.
        """
        for module, children, owned in zip(self.modules, self._children, self._owned, strict=True):
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
        now = {name: id(parameter) for name, parameter in self.raw_parameters()}
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

    def raw_parameters(self) -> list[tuple[str, Tensor]]:
        """Return `named_parameters()` as they are now, without waiting: values are not read."""
        found: dict[int, tuple[str, Tensor]] = {}
        for prefix, module in self._model.named_modules():
            for name, parameter in dict.items(parameters_of(module)):
                if parameter is not None and id(parameter) not in found:
                    full_name = f"{prefix}.{name}" if prefix else name
                    found[id(parameter)] = (full_name, parameter)
        return list(found.values())


def _same(mapping: dict[str, Any], expected: tuple[Any, ...]) -> bool:
    if not expected:
        return not len(mapping)
    # The children of a scripted module are in no dictionary of Python's.
    values = dict.values(mapping) if isinstance(mapping, dict) else mapping.values()
    return len(values) == len(expected) and all(map(operator.is_, values, expected))
