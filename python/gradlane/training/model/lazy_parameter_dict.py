"""A module's parameter mapping that waits: reading a parameter waits for its update.

Hooks see modules that are called. Parameters are also read without a call: attention reads its
output projection's weights, weight norm and EMA copies read them, `parameters()` and
`state_dict()` list them. All of those go through `Module._parameters`, which this replaces.
Copies and pickles of it are plain dictionaries.
"""

from __future__ import annotations

import weakref
from collections.abc import ItemsView, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from gradlane.errors import UsageError
from gradlane.training.model.lazy_dict import LazyDict
from gradlane.training.model.training_steps import TrainingSteps
from gradlane.training.modules.compiled import (
    StaleFlag,
    compile_disabled,
    enters_compiled_code,
    is_read_by_compiler,
    is_tracing,
    only_inlined,
)
from gradlane.training.torch_internals import BUFFERS, MODULES, PARAMETERS, parameters_of

Parameter = nn.Parameter | None


class LazyParameterDict(LazyDict[Parameter]):
    """Stands in for `Module._parameters` of one module."""

    __slots__ = ("_before_compiled_read", "_gate", "_module", "_phases", "_stale_flag", "steps")

    def __init__(self, module: nn.Module, steps: TrainingSteps, stale_flag: StaleFlag) -> None:
        """Guard a module's parameters.

        Args:
            module: the user's.
            steps: those of the model.
            stale_flag: the module's, for compiled code.
        """
        # A scripted module's own mapping is none of Python's.
        super().__init__(parameters_of(module).items())
        self._module = weakref.ref(module)
        self.steps = steps
        """Those of the model."""
        self._gate, self._phases = steps.gate, steps.phases
        self._stale_flag = stale_flag
        self._before_compiled_read = compile_disabled(self._wait_for_all)

    @only_inlined
    def __getitem__(self, name: str) -> Parameter:
        """Return a parameter once it has its update."""
        parameter = dict.__getitem__(self, name)
        if is_tracing():
            # The module's flag first: it is all that is in the graph while it is down.
            if self._stale_flag.stale and self._phases.reads_wait:
                self._before_compiled_read()
        elif self._phases.reads_wait:
            if enters_compiled_code():
                if self._stale_flag.stale:
                    self._before_compiled_read()
            elif parameter is not None:
                self._gate.before_read(parameter, self._evaluates())
        return parameter

    def __setitem__(self, name: str, parameter: Parameter) -> None:
        """Replace a parameter.

        Raises:
            UsageError: by a shard, as `fully_shard` does.
        """
        if type(parameter).__module__.startswith("torch.distributed."):
            raise UsageError(
                f"parameter {name!r} of a prepared {type(self._module()).__name__} would become a "
                "shard: fully_shard() keeps a part of each parameter on a rank, gradlane all of "
                "them; leave it out"
            )
        dict.__setitem__(self, name, parameter)

    def items(self) -> ItemsView[str, Parameter]:  # type: ignore[override]
        """List names and parameters once they are right."""
        if self._phases.lists_wait and not is_read_by_compiler():
            self._before_list()
        return dict.items(self)

    def _wait_for_all(self) -> None:
        for parameter in dict.values(self):
            if parameter is not None:
                self._gate.before_read(parameter, self._evaluates())

    def _evaluates(self) -> bool:
        module = self._module()
        return module is not None and not module.training

    def _before_list(self) -> None:
        if self._phases.lists_wait and not is_read_by_compiler():
            self._gate.before_list([*dict.values(self)])


_PLAIN: type[dict[str, Any]] = type(vars(nn.Module())[PARAMETERS])
"""The class of torch's own mappings: an `OrderedDict` in torch 2.4."""


def install_lazy_parameters(module: nn.Module, steps: TrainingSteps, stale_flag: StaleFlag) -> None:
    """Replace a module's parameter mapping by a waiting one."""
    module.__dict__[PARAMETERS] = LazyParameterDict(module, steps, stale_flag)


def remove_lazy_parameters(module: nn.Module) -> None:
    """Give a module a plain parameter mapping again."""
    guarded = module.__dict__.get(PARAMETERS)
    if isinstance(guarded, LazyParameterDict):
        module.__dict__[PARAMETERS] = _PLAIN(dict.items(guarded))


class SharedParameterTracker:
    """Guards modules that are built after `prepare` and share parameters with the model.

    Such as those that FX makes, lists of parameters, and layers that weights are tied to later.
    """

    def __init__(self, steps: TrainingSteps, parameters: Iterable[Tensor]) -> None:
        """Watch the registration of parameters until `remove`.

        Args:
            steps: those of the model.
            parameters: the model's.
        """
        self._steps = steps
        self._shared = {id(parameter) for parameter in parameters}
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        # Sessions that were given up are not closed, and must not be kept alive by a global hook.
        _TRACKERS[id(self)] = weakref.ref(self)
        weakref.finalize(self, _TRACKERS.pop, id(self), None)
        _follow_all()

    def remove(self) -> None:
        """Stop watching, and make the modules plain ones again."""
        _TRACKERS.pop(id(self), None)
        for module in self._modules:
            remove_lazy_parameters(module)

    def on_registration(self, module: nn.Module, name: str, parameter: Parameter) -> None:
        """Guard a module that was given one of the parameters.

        Raises:
            UsageError: its other parameters are of another prepared model.
        """
        if id(parameter) not in self._shared:
            return
        guarded = parameters_of(module)
        if not isinstance(guarded, LazyParameterDict):
            install_lazy_parameters(module, self._steps, StaleFlag())
            self._modules.add(module)
        elif guarded.steps is not self._steps:
            raise UsageError(
                f"parameter {name!r} of a {type(module).__name__} belongs to another prepared "
                "model than the module's other parameters: keep them in modules of their own"
            )


_TRACKERS: dict[int, weakref.ref[SharedParameterTracker]] = {}
_follows_all = False


def _follow_all() -> None:
    """Have torch call the followers. Once: torch goes through its hooks in any thread."""
    global _follows_all
    if not _follows_all:
        _follows_all = True
        register_module_parameter_registration_hook(_on_registration)


def _on_registration(module: nn.Module, name: str, parameter: Parameter) -> None:
    for one in list(_TRACKERS.values()):
        followers = one()
        if followers is not None:
            followers.on_registration(module, name, parameter)


def held_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield parameters that a module keeps in plain attributes, lists and dictionaries.

    Past torch's registration, but used in its forward all the same.
    """
    own = (value for name, value in module.__dict__.items() if name not in _REGISTERED)
    yield from _parameters_in(list(own), depth=3)


_REGISTERED = (PARAMETERS, BUFFERS, MODULES)


def _parameters_in(values: Iterable[Any], depth: int) -> Iterator[nn.Parameter]:
    for value in values:
        if isinstance(value, nn.Parameter):
            yield value
        elif depth > 0 and type(value) in (list, tuple, set, dict):
            members = value.values() if type(value) is dict else value
            yield from _parameters_in(list(members), depth - 1)
