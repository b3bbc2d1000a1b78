"""Optimizer steps later than the user's call, in as many parts as gradients arrive.

Every part runs with the hyper-parameters of the moment of `optimizer.step()`, without grad,
inference mode or autocast, whatever is in force where it is triggered; the optimizer's own groups
are never written.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradlane.errors import UsageError
from gradlane.training.model.lazy_state import plain_state
from gradlane.training.model.optimizers import has_step_hooks, mixes_first_steps
from gradlane.training.model.stages.momentum_takeover import MomentumTakeover
from gradlane.training.model.update_log import UpdateLog
from gradlane.training.modules.compiled import not_compiling
from gradlane.training.modules.gradient_intake import raw_grad, set_raw_grad, sum_of
from gradlane.training.torch_internals import (
    STEP_HOOKS,
    DisableTorchFunction,
    DisableTransforms,
    compiling_flag,
    count_dispatch_modes,
    count_function_modes,
    disable_dispatch_modes,
    peek_transforms,
    set_tracing_state,
    tracing_state,
)

_PLACE = operator.itemgetter(0)
_Row = tuple[tuple[int, int], int, Tensor, Tensor]
"""Place, number, parameter and mean of a parameter that is stepped."""
_BY_SCALER = ("grad_scale", "found_inf")
"""Attributes by which `GradScaler` has fused optimizers unscale."""


class DeferredUpdate:
    """Records a step of one optimizer, and runs it whole or in parts."""

    def __init__(
        self,
        optimizer: Optimizer,
        step: Callable[..., Any],
        step_of_class: Callable[[Optimizer], Any] | None,
        parameters: Sequence[Tensor],
        *,
        is_known: bool,
        may_defer: bool = True,
        takeover: MomentumTakeover | None = None,
    ) -> None:
        """Drive an optimizer.

        Args:
            optimizer: the user's.
            step: its own `step`, as it was before it was replaced.
            step_of_class: its class's, if that is the same; else None.
            parameters: trained parameters by tensor number.
            is_known: the optimizer is torch's own. Any other is stepped whole once, and then in
                parts if it has written nothing but parameters and their state.
            may_defer: whether updates may happen later than the user's call.
            takeover: says whose momentum has been applied on the way, or None.
        """
        self._takeover = takeover
        self.may_defer = may_defer
        """Whether updates may happen later than the user's call, on this rank or on servers."""
        self.is_known = is_known
        self.in_parts = is_known
        """Whether a step may be done in parts."""
        self._judged = is_known
        self.notice = ""
        """The warning for the program after this step, or empty."""
        self._optimizer = optimizer
        self._step = step
        self._step_of_class = step_of_class
        self._parameters = parameters
        self._index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._groups: list[dict[str, Any]] = []
        self._place: dict[int, tuple[int, int]] = {}
        self._listed: list[tuple[Tensor, ...]] = []
        """The parameters of each group that `_place` is of."""
        self._state: MutableMapping[Any, Any] = {}
        self._states_before = 0
        """How many entries the state had at the recorded step."""
        self._stepped: set[int] = set()
        self._written: set[int] = set()
        self._leaves_zeros = False
        self._leaves_none = False
        self._empty: list[tuple[tuple[int, int], Tensor]] = []
        """Place and parameter of those without elements that have a gradient."""
        self._empty_due: list[tuple[tuple[int, int], Tensor]] = []
        """Those of them that the recorded step has yet to step."""
        self._log: UpdateLog | None = None
        self._scaler: dict[str, Any] = {}
        """How a scaler has the optimizer unscale gradients in the recorded step."""

    def keep_log(self, log: UpdateLog) -> None:
        """Note in a log what each update uses, from the next recorded step on."""
        self._log = log

    def record(self) -> None:
        """Keep every group's hyper-parameters as they are now.

        Raises:
            UsageError: the optimizer was given a parameter that the model did not have.
        """
        groups: list[dict[str, Any]] = []
        listed: list[tuple[Tensor, ...]] = []
        for group in self._optimizer.param_groups:
            groups.append({key: _kept(value) for key, value in group.items() if key != "params"})
            listed.append(tuple(list.__iter__(group["params"])))
        if not self._is_placed(listed):
            self._place_all(listed)
        self._groups, self._empty_due = groups, self._empty
        if self._log is not None:
            self._log.begin(groups)
        self._state = plain_state(self._optimizer)
        self._states_before = len(self._state)
        own = vars(self._optimizer)
        # The scaler takes them off again after `step`, and writes its scale in `update`.
        self._scaler = {name: _kept(own[name]) for name in _BY_SCALER if name in own}
        self.expect_step()

    def _is_placed(self, listed: list[tuple[Tensor, ...]]) -> bool:
        """Return whether these groups are the last ones, with nothing but trained parameters."""
        return (
            len(listed) == len(self._listed)
            and sum(map(len, listed)) == len(self._place)
            and all(map(_are_same, listed, self._listed))
        )

    def _place_all(self, listed: list[tuple[Tensor, ...]]) -> None:
        """Note where each parameter is in the groups.

        Raises:
            UsageError: one was not there when the model was prepared.
        """
        place: dict[int, tuple[int, int]] = {}
        empty: list[tuple[tuple[int, int], Tensor]] = []
        for number, group in enumerate(listed):
            for position, parameter in enumerate(group):
                index = self._index_of.get(id(parameter))
                if index is not None:
                    place[index] = (number, position)
                elif parameter.numel() == 0:
                    if raw_grad(parameter) is not None:
                        empty.append(((number, position), parameter))
                elif parameter.requires_grad:
                    raise UsageError(
                        f"group {number} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that was not trained when the model was "
                        "prepared: call session.prepare(model, optimizer) again, on all ranks"
                    )
        self._place, self._empty, self._listed = place, empty, listed

    def expect_step(self) -> None:
        """Have means stay in `.grad` until the next recorded step, or until they are reset."""
        self._stepped.clear()
        self._written.clear()
        self._leaves_zeros = False
        self._leaves_none = False

    def hold(self, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Put means of a step that the optimizer has not taken into `.grad`, or drop them.

        Args:
            arrived: tensor numbers and averaged gradients, laid out like the parameters.
        """
        for index, mean in arrived:
            parameter = self._parameters[index]
            fresh = raw_grad(parameter)
            if self._leaves_none or (self._leaves_zeros and fresh is not None):
                continue
            with torch.no_grad(), torch.inference_mode(False):
                if self._leaves_zeros:
                    mean = torch.zeros_like(mean)
                set_raw_grad(parameter, mean if fresh is None else sum_of(mean, fresh))

    @property
    def drops_means(self) -> bool:
        """Whether the recorded step leaves no mean in `.grad`, and nothing keeps one.

        Optimizers of others may keep gradients in their state, and a log does.
        """
        return self._leaves_none and self.is_known and self._log is None

    def holds(self, index: int) -> bool:
        """Return whether the recorded step has a parameter."""
        return index in self._place

    @property
    def count(self) -> int:
        """Number of trained parameters in the recorded step."""
        return len(self._place)

    def apply_held(self, indices: Iterable[int]) -> None:
        """Step the parameters whose means are in `.grad` already, in one call of the optimizer."""
        arrived = []
        for index in indices:
            parameter = self._parameters[index]
            mean = raw_grad(parameter)
            if mean is not None:
                set_raw_grad(parameter, None)
                arrived.append((index, mean))
        self.apply(arrived)

    def defers(self) -> bool:
        """Return whether the next update may happen later and in parts."""
        return (
            self.may_defer
            and self.in_parts
            and not has_step_hooks(self._optimizer)
            and not mixes_first_steps(self._optimizer)
        )

    @property
    def is_guarded(self) -> bool:
        """Whether a look at the optimizer's groups is noticed: the program has rebuilt none."""
        return all(type(group["params"]) is not list for group in self._optimizer.param_groups)

    @property
    def is_scaled(self) -> bool:
        """Whether a scaler has the optimizer unscale gradients itself, in `step`."""
        return getattr(self._optimizer, "grad_scale", None) is not None

    def check_unscaled(self, step: int) -> None:
        """Check that no scaler has judged gradients before they are averaged.

        Args:
            step: number of the step that is to begin.

        Raises:
            UsageError: `GradScaler` steps a fused optimizer, and has seen own gradients.
        """
        if getattr(self._optimizer, "found_inf", None) is not None:
            raise UsageError(
                f"GradScaler has looked at this rank's own gradients for step {step}: every "
                "backward() of the step was inside session.no_sync(), and the optimizer's groups "
                "were rebuilt; run the last backward() outside of it"
            )

    def zero_in_place(self) -> None:
        """Do what `zero_grad(set_to_none=False)` means for gradients that are not in `.grad` yet.

        Torch leaves zeros where a gradient was, with which the next step decays and moves on.
        """
        if self._leaves_none:
            return
        self._leaves_zeros = True
        for index in self._stepped:
            self._leave_zeros(index)

    def leave_none(self) -> None:
        """Do what `zero_grad()` means: leave nothing in `.grad` after the update."""
        self._leaves_zeros = False
        self._leaves_none = True

    def note_written(self, index: int) -> None:
        """Note that the program has set `.grad` since the step: it stays there."""
        self._written.add(index)

    def stepped_elsewhere(self, index: int) -> None:
        """Note that a server has stepped a parameter; `.grad` is left as after a step here."""
        self._stepped.add(index)
        if self._leaves_zeros:
            self._leave_zeros(index)

    def _leave_zeros(self, index: int) -> None:
        parameter = self._parameters[index]
        if raw_grad(parameter) is None and index not in self._written:
            # It may be a read in inference mode that waits.
            with torch.inference_mode(False):
                set_raw_grad(parameter, torch.zeros_like(parameter))

    def step_whole(self) -> None:
        """Step the optimizer on `.grad`, as the program would."""
        before = None if self._judged else _settings(self._optimizer)
        groups = self._optimizer.param_groups
        if self._takeover is not None:
            groups = self._takeover.groups_for_step(groups)
        if self._log is not None:
            for index in self._place:
                gradient = raw_grad(self._parameters[index])
                if gradient is not None:
                    self._log.note_gradient(index, gradient)
        self._step_with(groups)
        if self._log is not None:
            self._log.end()
        if before is not None:
            written = differing(before, _settings(self._optimizer))
            self.in_parts, self._judged = not written, True
            if written:
                self.notice = (
                    f"{_writes(self._optimizer, written)}; it is stepped whole from now on: "
                    "step() waits for all gradients"
                )

    def step_evaluating(self, closure: Callable[[], Any]) -> Any:
        """Step the optimizer, which calls a closure as often as it likes."""
        return self._step_with(self._optimizer.param_groups, closure)

    def _step_with(self, groups: list[dict[str, Any]], *arguments: Any) -> Any:
        """Step the optimizer with some groups, on the state that it had at the recorded step."""
        optimizer = self._optimizer
        own_groups, own_state = optimizer.param_groups, optimizer.state
        optimizer.param_groups = groups
        optimizer.state = self._state  # type: ignore[assignment]
        try:
            return self._step(*arguments)
        finally:
            optimizer.param_groups, optimizer.state = own_groups, own_state

    def _step_apart(self, groups: list[dict[str, Any]]) -> None:
        """Step some groups on a twin: other threads may read and write the optimizer meanwhile.

        Hooks that were registered after the recorded step are left out: they see the next ones.
        """
        own = vars(self._optimizer)
        given = {
            "param_groups": groups,
            "state": self._state,
            **{name: OrderedDict() for name in STEP_HOOKS},
            **self._scaler,
        }
        if self._step_of_class is None:
            # A step of the instance's own may go to the optimizer itself.
            kept = {name: own[name] for name in given if name in own}
            own.update(given)
            try:
                self._step()
            finally:
                for name in given.keys() - kept.keys():
                    del own[name]
                own.update(kept)
            return
        before = {**own, **given}
        twin = object.__new__(type(self._optimizer))
        vars(twin).update(before)
        vars(twin).pop("step", None)
        try:
            self._step_of_class(twin)
        finally:
            for name, value in vars(twin).items():
                if name not in given and before.get(name) is not value:
                    own[name] = value

    def apply(self, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Step the parameters whose averaged gradients are given, in one call of the optimizer.

        As after a step of torch, each gradient is in `.grad` afterwards, unless the program has
        reset or replaced it since. Gradients that have begun to add up for the next step stay.

        Args:
            arrived: tensor numbers and averaged gradients, laid out like the parameters.
        """
        places, parameters = self._place, self._parameters
        rows: list[_Row] = [
            (places[index], index, parameters[index], mean)
            for index, mean in arrived
            if index in places
        ]
        if not rows:
            return
        if self._log is not None:
            for _, index, _, mean in rows:
                self._log.note_gradient(index, mean)
        # Nothing of these is exchanged, but the optimizer keeps state of them, too.
        empty, self._empty_due = self._empty_due, []
        rows += [(place, -1, parameter, torch.empty_like(parameter)) for place, parameter in empty]
        rows.sort(key=_PLACE)
        # Loops outside of Python: there may be thousands, in each step.
        stepped = [parameter for _, _, parameter, _ in rows]
        local = [*map(raw_grad, stepped)]
        deque(map(set_raw_grad, stepped, [mean for _, _, _, mean in rows]), maxlen=0)
        groups = [
            {**self._groups[number], "params": [parameter for _, _, parameter, _ in members]}
            for number, members in itertools.groupby(rows, key=_group_of)
        ]
        if self._takeover is not None:
            groups = self._takeover.groups_for_step(groups)
        try:
            with undisturbed():
                before = None if self.is_known else _settings(self._optimizer, groups)
                self._step_apart(groups)
                if before is not None:
                    written = differing(before, _settings(self._optimizer, groups))
                    if written:
                        raise RuntimeError(
                            f"{_writes(self._optimizer, written)}; pass defer=False to prepare()"
                        )
        finally:
            if self._leaves_none:
                deque(map(set_raw_grad, stepped, local), maxlen=0)
            else:
                for (_, index, parameter, _), fresh in zip(rows, local, strict=True):
                    if fresh is not None or index in self._written:
                        set_raw_grad(parameter, fresh)
                    elif self._leaves_zeros:
                        self._zero(parameter)

    def end_parts(self) -> None:
        """End a step that was done in parts.

        New entries of the state are put into the order that one whole step would have made them in:
        gradients arrive in an order that differs by rank.
        """
        if self._log is not None:
            self._log.end()
        state = self._state
        if len(state) <= self._states_before:
            return
        places = {id(self._parameters[index]): place for index, place in self._place.items()}
        places.update((id(one), place) for place, one in self._empty)
        last = (len(self._groups), 0)
        new = [(places.get(id(key), last), key) for key in list(state)[self._states_before :]]
        for _, key in sorted(new, key=_PLACE):
            state[key] = state.pop(key)

    def _zero(self, parameter: Tensor) -> None:
        gradient = raw_grad(parameter)
        if gradient is not None:
            with torch.no_grad(), torch.inference_mode(False):
                gradient.zero_()


def _group_of(row: _Row) -> int:
    return row[0][0]


def undisturbed() -> ExitStack:
    """Return a context without the modes in force where an update happens to be triggered.

    Inference mode, autocast, tracing, the transforms of torch.func and modes such as
    `FakeTensorMode` are for the forward that waits, not for the update. Grad mode is the
    optimizer's own.

    While torch 2.15 compiles a frame, `torch.compiler.is_compiling()` is true for all code, and
    Adam then rounds its bias corrections in f32. Whether an update falls into a compilation
    depends on when gradients arrive: ranks would drift apart.
    """
    stack = ExitStack()
    if compiling_flag():
        stack.enter_context(not_compiling())
    if peek_transforms() is not None:
        stack.enter_context(DisableTransforms())
    if count_function_modes() > 0:
        stack.enter_context(DisableTorchFunction())
    if count_dispatch_modes() > 0:
        stack.enter_context(disable_dispatch_modes())
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    for device_type in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device_type):
            stack.enter_context(torch.autocast(device_type, enabled=False))
    tracing = tracing_state()
    if tracing is not None:
        set_tracing_state(None)
        stack.callback(set_tracing_state, tracing)
    return stack


def _are_same(some: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> bool:
    return len(some) == len(others) and all(map(operator.is_, some, others))


def own_values(optimizer: Optimizer) -> dict[str, Any]:
    """Return copies of the plain values and tensors in attributes of an optimizer."""
    return {
        name: _kept(value)
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, float, str, tuple, list, Tensor)) and name != "param_groups"
    }


def _settings(optimizer: Optimizer, groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return what a step of an optimizer that treats each parameter by itself does not write."""
    found = {f"self.{name}": value for name, value in own_values(optimizer).items()}
    for number, group in enumerate(optimizer.param_groups if groups is None else groups):
        for key, value in group.items():
            if key != "params":
                found[f"param_groups[{number}][{key!r}]"] = _kept(value)
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names whose values are new or others."""
    return [name for name in after if name not in before or not _equal(before[name], after[name])]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        both = isinstance(one, Tensor) and isinstance(other, Tensor)
        return both and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one is other or one == other)


def _writes(optimizer: Optimizer, names: list[str]) -> str:
    return (
        f"step() of {type(optimizer).__name__} writes {', '.join(names[:3])}, so it does not "
        "treat each parameter by itself"
    )


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(_kept(one) for one in value)
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value
