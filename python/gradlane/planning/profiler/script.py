"""Recording of an unmodified training script.

Optimizers mark the ends of steps: torch calls global hooks after every `optimizer.step()`. During
the first step, torch's global forward hooks find the modules that are called from outside; those
that own parameters of an optimizer are the model. From then on only the model's own hooks remain,
so global hooks do not slow the recording down. (Searching the heap for modules would find models
that are never called, and cannot distinguish a model from an enclosing one.)

A step goes from the end of one `optimizer.step()` to the end of the next of the same optimizer. It
includes the next batch, all forwards and backwards, and the steps of other optimizers. Optimizers
outside of torch, models that are called only inside compiled functions, and parameters that no
called module owns are not seen; `RecordedScript` notes them.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradlane.formats.profile import ProfileError
from gradlane.planning.profiler.nested import with_tensors
from gradlane.planning.profiler.operations import backward_of
from gradlane.planning.profiler.options import RecordingOptions
from gradlane.planning.profiler.recorder import Recorder
from gradlane.training.factors.rows import sparse_weights
from gradlane.training.model.lazy_parameter_dict import LazyParameterDict
from gradlane.training.modules.forward_order import inside_backward
from gradlane.training.session import lifecycle
from gradlane.training.torch_internals import compiled_inside, parameters_of

CALLS_STEP = 2
"""The step, after the one that finds the model, whose calls of the model are kept."""
LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables that launchers such as torchrun set, and scripts for them read."""


class LauncherMissingError(ProfileError):
    """The script asked for an environment variable that a launcher sets, and none has set it."""


@dataclass
class RecordedScript:
    """The recording of a script, with notes on what it misses."""

    model: nn.Module
    """The recorded model; a dictionary of modules if the script calls several by themselves."""
    name: str
    """Its class."""
    recorder: Recorder
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    """The outermost calls of one step: module, arguments, keyword arguments."""
    notes: list[str] = field(default_factory=list)
    """Notes for the reader of the profile."""


class _StopScript(BaseException):
    """Ends a script; a script's `except Exception` does not catch it."""


def run_script(
    target: str,
    arguments: Sequence[str],
    options: RecordingOptions,
    *,
    is_module: bool = False,
    on_step: Callable[[int], None] | None = None,
) -> RecordedScript:
    """Run a training script in this process, as `python target arguments` would, and record it.

    Args:
        target: path of the script, or the name of a module.
        arguments: `sys.argv[1:]` of the script.
        options: which steps are recorded.
        is_module: whether `target` is a module, as after `python -m`.
        on_step: called with the number of recorded steps, after each.

    Returns:
        The recording.

    Raises:
        LauncherMissingError: the script failed since no launcher has started it.
        ProfileError: the script failed (its traceback is printed), or took no steps that could
            be seen.
    """
    if not is_module and not Path(target).is_file():
        raise ProfileError(f"there is no script {target!r}")
    watcher = _ScriptRecorder(options, on_step)
    before = sys.argv, sys.path
    sys.argv = [target, *arguments]
    first = str(Path.cwd()) if is_module else str(Path(target).resolve().parent)
    sys.path = [first, *sys.path]
    watcher.begin()
    try:
        if is_module:
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(target, run_name="__main__")
    except _StopScript:
        pass
    except SystemExit as ended:
        if ended.code not in (None, 0):
            raise ProfileError(f"{target} ended with status {ended.code!r}") from ended
    except Exception as error:
        lifecycle.abort_all(error)
        refusal = _refusal_in(error)
        if refusal is not None:
            raise refusal from None
        failure = f"{target} failed: {type(error).__name__}: {error}"
        if _misses_launcher(error):
            raise LauncherMissingError(failure) from error
        traceback.print_exc()
        raise ProfileError(failure) from error
    finally:
        watcher.end()
        sys.argv, sys.path = before
    return watcher.result(target)


def _refusal_in(error: BaseException | None) -> ProfileError | None:
    """Return the refusal to record that an error is, or that it follows from."""
    while error is not None and not isinstance(error, ProfileError):
        error = error.__cause__
    return error


def _misses_launcher(error: Exception) -> bool:
    """Return whether a script failed at a variable of a launcher that is not set."""
    # Scripts set MASTER_ADDR and MASTER_PORT themselves, the others come from a launcher alone.
    if any(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")):
        return False
    if isinstance(error, KeyError):
        return error.args[:1] in [(name,) for name in LAUNCHER_VARIABLES]
    return any(f"environment variable {name} expected" in str(error) for name in LAUNCHER_VARIABLES)


class _ScriptRecorder:
    """Finds the model of a script in its first steps, then records it."""

    def __init__(
        self,
        options: RecordingOptions,
        on_step: Callable[[int], None] | None,
    ) -> None:
        self._options = options
        self._on_step = on_step
        self._handles: list[Any] = []
        self._depth = 0
        self._called: dict[int, nn.Module] = {}
        self._stepped: list[Optimizer] = []
        self._step_optimizer: Optimizer | None = None
        self._taken_steps = 0
        self._found: RecordedScript | None = None
        self._capture: list[Any] = []

    def begin(self) -> None:
        """Register the global hooks."""
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            # `always_call`, since exceptions are no reason to lose count of the depth.
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._optimizer_handle = register_optimizer_step_post_hook(self._after_step)

    def end(self) -> None:
        """Remove all hooks."""
        self._optimizer_handle.remove()
        self._remove_hooks()
        if self._found is not None:
            self._found.recorder.detach()

    def _remove_hooks(self) -> None:
        for handle in (*self._handles, *self._capture):
            handle.remove()
        self._handles, self._capture = [], []

    def result(self, target: str) -> RecordedScript:
        """Return the recording.

        Raises:
            ProfileError: too little was seen.
        """
        if self._found is None:
            seen = len(self._stepped)
            raise ProfileError(
                f"{target} took no two steps with an optimizer of torch's, so there is nothing to "
                "profile"
                + (f" ({seen} optimizer took one step)" if seen == 1 else "")
                + ": other optimizers, and processes that the script starts "
                "(torch.multiprocessing.spawn), are not seen; use gradlane.profile or "
                "gradlane.Recorder in the script instead"
            )
        if self._found.recorder.recorded_steps == 0:
            raise ProfileError(
                f"{target} ended after {self._taken_steps} steps, all of which were warm-up "
                f"(--warmup {self._options.warmup}): let it take more"
            )
        return self._found

    # ---- hooks

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        if inside_backward():
            return
        if self._depth == 0 and torch.is_grad_enabled():
            self._called[id(module)] = module
        self._depth += 1

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if not inside_backward():
            self._depth = max(self._depth - 1, 0)

    def _after_step(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        if self._found is None:
            if not any(optimizer is one for one in self._stepped):
                self._stepped.append(optimizer)
                return
            # The first that steps again has begun the second round: all optimizers are known.
            self._step_optimizer = optimizer
            self._found = self._find()
            self._taken_steps = 1
            self._remove_hooks()
            self._capture = [
                module.register_forward_pre_hook(self._keep_call, with_kwargs=True)
                for module in _roots_of(self._found.model)
            ]
            self._found.recorder.attach()
        if optimizer is not self._step_optimizer:
            return
        self._taken_steps += 1
        recorder = self._found.recorder
        if self._taken_steps > self._options.warmup:
            recorder.end_step()
            if self._on_step is not None:
                self._on_step(recorder.recorded_steps)
            if recorder.recorded_steps >= self._options.steps:
                self._step_optimizer = None
                recorder.detach()
                if not self._options.run_to_end:
                    raise _StopScript
                return
        if self._taken_steps > CALLS_STEP:
            self._remove_hooks()
        if self._taken_steps >= self._options.warmup:
            recorder.begin_step()

    def _keep_call(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not inside_backward() and torch.is_grad_enabled() and self._found is not None:
            self._found.calls.append((module, arguments, keywords))

    # ---- finding the model

    def _find(self) -> RecordedScript:
        """Find the model among the called modules.

        Raises:
            ProfileError: none of them owns a parameter of an optimizer.
        """
        trained = _parameters_of(self._stepped)
        roots = [
            module
            for module in map(_unwrap, self._called.values())
            if any(id(parameter) in trained for parameter in module.parameters())
        ]
        if not roots:
            raise ProfileError(
                "no module that the script calls owns a parameter of the optimizer (a model that "
                "is called inside a compiled function only cannot be seen): use gradlane.profile "
                "or gradlane.Recorder in the script instead"
            )
        _refuse_prepared(roots)
        notes = []
        if any(
            isinstance(one, DistributedDataParallel) and one.process_group.size() > 1
            for one in self._called.values()
        ):
            notes.append(
                "the script ran under DistributedDataParallel, whose communication counts as "
                "compute here: profile it with one process (Lightning: devices=1). Ranks that the "
                "script has started itself report errors, as the recorded one ends before them"
            )
        owned = {id(parameter) for module in roots for parameter in module.parameters()}
        missed = sum(1 for key in trained if key not in owned)
        if missed:
            notes.append(
                f"{missed} of the optimizer's {len(trained)} parameters belong to no module that "
                "the script calls, and are missing in the profile"
            )
        if len(self._stepped) > 1:
            notes.append(
                f"the script has {len(self._stepped)} optimizers; a step is one round of all"
            )
        model = roots[0] if len(roots) == 1 else _combine(roots)
        sparse = sparse_weights(model)
        as_rows = [name for name, one in model.named_parameters() if id(one) in sparse]
        if as_rows:
            notes.append(
                "sparse gradients travel as rows, and are simulated as those that the last "
                f"recorded step looked up: {', '.join(as_rows)}; DDP is simulated with dense ones"
            )
        name = type(compiled_inside(model)).__name__
        if len(roots) > 1:
            name = "+".join(type(root).__name__ for root in roots)
            notes.append(f"the script calls {len(roots)} models by themselves: {name}")
        return RecordedScript(
            model, name, Recorder(model, batch_size=self._options.batch_size), notes=notes
        )


def _parameters_of(optimizers: Sequence[Optimizer]) -> dict[int, Tensor]:
    return {
        id(parameter): parameter
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }


def _unwrap(module: nn.Module) -> nn.Module:
    """Return the model inside a wrapper for data parallelism."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        inner: nn.Module = module.module
        return inner
    return module


def _combine(roots: Sequence[nn.Module]) -> nn.ModuleDict:
    return nn.ModuleDict(
        {f"{type(root).__name__}{number}": root for number, root in enumerate(roots)}
    )


def _roots_of(model: nn.Module) -> list[nn.Module]:
    return list(model.values()) if type(model) is nn.ModuleDict else [model]


def _refuse_prepared(roots: Sequence[nn.Module]) -> None:
    for root in roots:
        if isinstance(parameters_of(root), LazyParameterDict):
            raise ProfileError(
                "the script prepares its model with gradlane: profile it without, or use "
                "gradlane.Recorder on the prepared model"
            )


def replay(found: RecordedScript) -> Callable[[], None]:
    """Return a step that repeats the calls of a script's model, and runs backward through them."""
    calls = [
        (module, *(with_tensors(one, _detached) for one in inputs))
        for module, *inputs in found.calls
    ]

    def step() -> None:
        outputs = [module(*arguments, **keywords) for module, arguments, keywords in calls]
        backward_of(outputs)

    return step


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach()
