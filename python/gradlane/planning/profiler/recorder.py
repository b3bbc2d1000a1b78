"""Recording of a model's training steps: compute times, and times of gradients and parameters.

Hooks record moments on a tape and do nothing else. A forward inside backward (activation
checkpointing) is no forward and leaves no mark. Compiled code makes no marks inside: a compiled
module is seen from outside, and its gradient hooks run.

On a model that a gradlane session has prepared, waits for other ranks are recorded and subtracted,
so the profile holds the compute time alone. The session's own computation (updates as gradients
arrive) stays in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradlane.formats.profile import Profile, ProfileError, ProfileModule, ProfileTensor
from gradlane.planning.profiler.nested import samples_in
from gradlane.planning.profiler.options import STEPS_MAX
from gradlane.planning.profiler.rows import RowCountHook, RowCounts, has_rows
from gradlane.planning.profiler.tape import EVALUATION, Clock, CudaClock, HostClock, Mark, Tape
from gradlane.planning.profiler.timeline import StepMedians, read_step
from gradlane.training.factors.rows import sparse_weights
from gradlane.training.modules.compiled import is_tracing, register_pre_hook_first
from gradlane.training.rendezvous.wait_notifier import WAIT_NOTIFIER
from gradlane.training.torch_internals import compiled_call, compiled_inside, graph_task_id

_DTYPES = {
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float64: "f64",
    torch.complex64: "f32",
    torch.complex128: "f64",
}
"""Dtypes of gradients, as profiles name them; complex numbers are pairs."""


class Recorder:
    """Records the computation of one model in the steps between `begin_step` and `end_step`.

    ::

        recorder = Recorder(model)
        recorder.attach()
        for batch in batches:
            recorder.begin_step()
            loss_fn(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.end_step()
        recorder.detach()
        recorder.profile("my model").save("profile.json")
    """

    def __init__(
        self, model: nn.Module, *, batch_size: int | None = None, clock: Clock | None = None
    ) -> None:
        """Prepare to record a model; see `attach`.

        Args:
            model: any module; all of its trained parameters on the CPU, or on one CUDA device.
            batch_size: samples in a step of this rank. None: the first dimension of the first
                tensor that the model is called with, summed over the calls of a step.
            clock: where moments are read from; None: the model's device.

        Raises:
            ValueError: no parameter is trained, or they are on several devices or of a dtype that
                has no gradients to average.
        """
        self.model = model
        parameters = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and parameter.numel() > 0
        }
        _check_parameters(parameters)
        self._parameters = parameters
        self._modules = dict(model.named_modules())
        device = next(iter(parameters.values())).device
        self._device = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        if clock is None:
            clock = CudaClock(device) if device.type == "cuda" else HostClock()
        self._tape = Tape(clock)
        self._batch_size = batch_size
        self._samples = _SampleCount(self._tape)
        self._rows = RowCounts()
        self._sparse = sparse_weights(model)
        self._handles: list[Any] = []
        self._steps: deque[list[Mark]] = deque(maxlen=STEPS_MAX)

    @property
    def batch_size(self) -> int | None:
        """Samples in a step; None if it was not given and the model's inputs do not show it."""
        return self._batch_size or self._samples.in_step

    @property
    def recorded_steps(self) -> int:
        """Number of recorded steps that are kept."""
        return len(self._steps)

    def attach(self) -> None:
        """Register the hooks on the model.

        Raises:
            RuntimeError: they are on it already.
        """
        if self._handles:
            raise RuntimeError("this recorder is attached already: call detach() first")
        number = {id(module): index for index, module in enumerate(self._modules.values())}
        for module in _uncompiled_modules(self.model):
            code = 2 * number[id(module)]
            # Scripted modules run hooks, but refuse to have any registered by their own method.
            self._handles += [
                register_pre_hook_first(module, _ForwardHook(self._tape, code)),
                nn.Module.register_forward_hook(module, _ForwardHook(self._tape, code + 1)),
            ]
            if has_rows(module, self._sparse):
                rows = RowCountHook(self._rows)
                self._handles.append(nn.Module.register_forward_pre_hook(module, rows))
        self._handles.append(
            nn.Module.register_forward_pre_hook(self.model, self._samples, with_kwargs=True)
        )
        for index, parameter in enumerate(self._parameters.values()):
            code = 2 * len(self._modules) + index
            mark = _GradientHook(self._tape, code)
            self._handles.append(parameter.register_post_accumulate_grad_hook(mark))  # type: ignore[no-untyped-call]
        WAIT_NOTIFIER.add_observer(self._tape)

    def detach(self) -> None:
        """Remove the hooks and drop a step in progress; recorded steps stay."""
        if self._tape.is_recording:
            self._tape.end()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        WAIT_NOTIFIER.remove_observer(self._tape)

    def begin_step(self) -> None:
        """Begin to record a step; call it before fetching the batch to include that time.

        Raises:
            RuntimeError: not attached, or a step is being recorded.
        """
        if not self._handles:
            raise RuntimeError("begin_step() on a recorder without hooks: call attach() first")
        if self._tape.is_recording:
            raise RuntimeError("begin_step() inside a step: call end_step() first")
        self._samples.begin()
        self._rows.begin()
        self._tape.begin()

    def end_step(self) -> None:
        """End the step and keep it; steps without any gradient do not count.

        Raises:
            RuntimeError: no step is being recorded.
        """
        if not self._tape.is_recording:
            raise RuntimeError("end_step() without a step: call begin_step() first")
        self._steps.append(self._tape.end())
        self._samples.end()
        self._rows.end()

    def profile(self, model_name: str) -> Profile:
        """Return the medians over the recorded steps. On CUDA, waits until the device is done.

        Args:
            model_name: for readers.

        Raises:
            ProfileError: no step with a gradient was recorded.
        """
        count = len(self._modules)
        clock = self._tape.clock
        steps = StepMedians(read_step(clock.seconds(marks), count) for marks in self._steps)
        if not len(steps):
            raise ProfileError(
                f"nothing was recorded of {model_name!r}: no step between begin_step() and "
                f"end_step() had a backward that reached its parameters ({len(self._steps)} steps)"
            )
        batch = steps.batch()
        compute_s = batch.median_s
        forward_s = min(steps.forward_s(), compute_s)
        return Profile(
            model=model_name,
            batch_size=self.batch_size or 1,
            forward_s=forward_s,
            compute_s=compute_s,
            tensors=tuple(self._tensors(steps, forward_s, compute_s)),
            device=self._device,
            batch=batch,
            modules=tuple(
                ProfileModule(name, type(module).__name__, steps.calls(index))
                for index, (name, module) in enumerate(self._modules.items())
                if steps.start_s(index) is not None
            ),
        )

    def _tensors(
        self, steps: StepMedians, forward_s: float, compute_s: float
    ) -> list[ProfileTensor]:
        needs_s, around_s, layers = self._needs(steps)
        tensors = []
        for index, (name, parameter) in enumerate(self._parameters.items()):
            # A missing gradient is known at the end of the step, and delays nothing.
            ready_s = steps.ready_s(index)
            need_s = needs_s.get(id(parameter))
            if need_s is None:
                need_s = forward_s if ready_s is None else around_s[id(parameter)]
            owner = layers[id(parameter)]
            shape = tuple(parameter.shape) + ((2,) if parameter.is_complex() else ())
            rows = self._rows.rows_of(owner, parameter)
            # Medians of different steps may lie a little beyond each other.
            tensors.append(
                ProfileTensor(
                    name=name,
                    shape=shape,
                    dtype=_DTYPES[parameter.dtype],
                    need_s=min(max(need_s, 0.0), forward_s),
                    ready_s=min(
                        max(compute_s if ready_s is None else ready_s, forward_s), compute_s
                    ),
                    layer=getattr(owner, "stands_for", type(owner).__name__),
                    rows=None if id(parameter) in self._sparse or len(shape) != 2 else rows,
                    sparse_rows=rows if id(parameter) in self._sparse else None,
                    gradients=steps.gradients(index),
                )
            )
        return tensors

    def _needs(
        self, steps: StepMedians
    ) -> tuple[dict[int, float], dict[int, float], dict[int, nn.Module]]:
        """Return when forward first needs each parameter, and its layer, by `id`.

        Returns:
            The first call of a module that owns the parameter, if any; the first call of the
            nearest enclosing module, for parameters that are used without calling their module
            (attention's output projection, which may need them a little later); and layers.
        """
        starts_s = {name: steps.start_s(index) for index, name in enumerate(self._modules)}
        needs_s: dict[int, float] = {}
        around_s: dict[int, float] = {}
        layers: dict[int, nn.Module] = {}
        for name, module in self._modules.items():
            start_s = starts_s[name]
            outer_s = _start_around(name, starts_s)
            for _, parameter in module.named_parameters(recurse=False):
                key = id(parameter)
                layers.setdefault(key, module)
                around_s[key] = min(around_s.get(key, outer_s), outer_s)
                if start_s is not None:
                    needs_s[key] = min(needs_s.get(key, start_s), start_s)
        return needs_s, around_s, layers


def _start_around(name: str, starts_s: Mapping[str, float | None]) -> float:
    while True:
        start_s = starts_s.get(name)
        if start_s is not None:
            return start_s
        if not name:
            return 0.0
        name = name.rpartition(".")[0]


def _check_parameters(parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise ValueError("the model has no trained parameter (requires_grad=True) to profile")
    devices = sorted({str(parameter.device) for parameter in parameters.values()})
    if len(devices) > 1:
        raise ValueError(
            f"the model's parameters are on {', '.join(devices)}: one device has no common time "
            "with another, so a model on several cannot be profiled"
        )
    for name, parameter in parameters.items():
        if parameter.dtype not in _DTYPES:
            raise ValueError(
                f"parameter {name!r} has dtype {parameter.dtype}, which cannot be averaged; "
                f"supported are {', '.join(map(str, _DTYPES))}"
            )


def _uncompiled_modules(module: nn.Module) -> list[nn.Module]:
    """List a module and its submodules, except those inside compiled code, which hooks would break
    up."""
    found: dict[int, nn.Module] = {}

    def add(one: nn.Module) -> None:
        if id(one) not in found:
            found[id(one)] = one
            compiled = compiled_inside(one) is not one or compiled_call(one) is not None
            for child in () if compiled else one.children():
                add(child)

    add(module)
    return list(found.values())


class _ForwardHook:
    """Hook for the begin or end of a module's forward."""

    __slots__ = ("_code", "_tape")

    def __init__(self, tape: Tape, code: int) -> None:
        self._tape = tape
        self._code = code

    def __call__(self, *_: Any) -> None:
        if is_tracing() or graph_task_id() != -1:
            return
        tape = self._tape
        tape.append((self._code, tape.now()))

    def __reduce__(self) -> Any:
        """Copies of the model are not recorded."""
        return _no_hook, ()


class _GradientHook:
    """Hook for a part of a parameter's gradient."""

    __slots__ = ("_code", "_tape")

    def __init__(self, tape: Tape, code: int) -> None:
        self._tape = tape
        self._code = code

    def __call__(self, parameter: Tensor) -> None:
        tape = self._tape
        tape.append((self._code, tape.now()))

    def __reduce__(self) -> Any:
        """Copies of the model are not recorded."""
        return _no_hook, ()


class _SampleCount:
    """Hook of the whole model that counts samples and records evaluations."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._samples = 0
        self.in_step: int | None = None
        """Samples in the last step that had any."""

    def begin(self) -> None:
        self._samples = 0

    def end(self) -> None:
        if self._samples:
            self.in_step = self._samples

    def __call__(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        if not self._tape.is_recording or is_tracing() or graph_task_id() != -1:
            return
        if not module.training:
            self._tape.append((EVALUATION, self._tape.now()))
        elif torch.is_grad_enabled():
            self._samples += samples_in((arguments, keywords)) or 0

    def __reduce__(self) -> Any:
        """Copies of the model are not recorded."""
        return _no_hook, ()


def _no_op(*_: Any) -> None:
    return None


def _no_hook() -> Callable[..., None]:
    return _no_op
