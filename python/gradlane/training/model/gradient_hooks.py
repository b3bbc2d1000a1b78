"""Hooks on parameters that take their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradlane.training.modules.compiled import compile_disabled, compile_disabled_hook
from gradlane.training.torch_internals import post_accumulate_hooks, queue_callback


class GradientHooks:
    """Takes gradients after all other hooks on their parameters, also those registered later."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Register nothing yet; `parameters` are by tensor number."""
        self._parameters = parameters
        self._takes: list[Callable[[int, Tensor], None]] = []
        self._hooks: list[tuple[dict[int, Any], int]] = []
        self._handles: list[Any] = []
        self._newest_hook = RemovableHandle.next_id

    def install(self, takes: Sequence[Callable[[int, Tensor], None]]) -> None:
        """Register one hook on each parameter.

        Args:
            takes: by tensor number, called with that and the parameter once a gradient is in
                `.grad`.
        """
        self._takes = [*map(compile_disabled, takes)]
        for index, (parameter, take) in enumerate(zip(self._parameters, takes, strict=True)):
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
            queue_callback(functools.partial(self._takes[index], index, parameter))
        return later

    def remove(self) -> None:
        """Take them off the parameters."""
        for handle in self._handles:
            handle.remove()
