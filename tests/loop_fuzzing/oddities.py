"""What few programs do to gradients, parameters, optimizers and buffers, as actions of a program.

Each of these must give what plain torch gives, or be refused; `verdict.py` says when it may be.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import functools
import io
import itertools
import pickle
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from tests.loop_fuzzing.program import Program

FOREIGN = (RuntimeError, TypeError, AttributeError, ValueError, LookupError, pickle.PicklingError)
"""What torch itself raises where an operation is impossible: noted, and the same everywhere."""


def _parameters(program: Program, model: int) -> list[Tensor]:
    return list(program.models[model].parameters())


def _kept(program: Program, model: int) -> list[Tensor]:
    return program.kept_lists[model]


def _groups(program: Program, model: int) -> list[Tensor]:
    return [one for group in program.optimizers[model].param_groups for one in group["params"]]


def _kept_groups(program: Program, model: int) -> list[Tensor]:
    return [one for kept in program.kept_groups[model] for one in kept]


def _attributes(program: Program, model: int) -> list[Tensor]:
    found = [
        getattr(module, name)
        for module in program.models[model].modules()
        for name in list(module._parameters)
    ]
    return list({id(one): one for one in found if one is not None}.values())


def _modules(program: Program, model: int) -> list[Tensor]:
    modules = program.models[model].modules()
    found = [one for module in modules for one in module.parameters(recurse=False)]
    return list({id(one): one for one in found}.values())


def _live_state(program: Program, model: int) -> list[Tensor]:
    values = program.models[model].state_dict(keep_vars=True).values()
    found = [one for one in values if isinstance(one, nn.Parameter)]
    return list({id(one): one for one in found}.values())


VIAS: dict[str, Callable[[Program, int], list[Tensor]]] = {
    "parameters": _parameters,
    "kept": _kept,
    "groups": _groups,
    "kept_groups": _kept_groups,
    "attributes": _attributes,
    "modules": _modules,
    "live_state": _live_state,
}
"""How a program gets at its parameters; those called `kept` were listed before `prepare`."""


def _saved(value: Any) -> Any:
    memory = io.BytesIO()
    torch.save(value, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


def _bare(one: Tensor) -> Tensor:
    """Return a gradient itself: an operation less than on a parameter."""
    return one.detach() if one.requires_grad else one


def _by_address(one: Tensor) -> Tensor:
    whole = _bare(one)
    if not whole.is_contiguous() or whole.numel() == 0:
        return whole.clone()
    pointer = whole.data_ptr()
    if whole.device.type != "cpu":
        return whole.cpu()
    words = ctypes.string_at(pointer, whole.numel() * whole.element_size())
    return torch.frombuffer(bytearray(words), dtype=whole.dtype)


def _through_graph(one: Tensor) -> Tensor:
    factor = torch.ones_like(one, requires_grad=True)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((factor * _bare(one)).abs().sum(), factor)
    return gradient


def _twice(one: Tensor) -> Tensor:
    return one + one


@functools.cache
def _script() -> Any:
    # Newer torch warns of it.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(_twice)


LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clone": lambda one: _bare(one).clone(),
    "norm": lambda one: one.norm(),
    "item": lambda one: torch.tensor(one.abs().sum().item(), dtype=torch.float64),
    "tolist": lambda one: torch.tensor(_bare(one).tolist()),
    "numpy": lambda one: torch.from_numpy(_bare(one).numpy().copy()),
    "data": lambda one: one.data.clone(),
    "deepcopy": lambda one: copy.deepcopy(one).detach(),
    "save": lambda one: _saved(one).detach(),
    "add": lambda one: _bare(one) + 1,
    "view": lambda one: _bare(one).reshape(-1),
    "stack": lambda one: torch.stack([_bare(one), _bare(one)]),
    "foreach": lambda one: torch._foreach_mul([_bare(one)], 1.0)[0],
    "out": lambda one: torch.add(_bare(one), 0, out=torch.empty_like(one)),
    "einsum": lambda one: torch.einsum("i->", _bare(one).flatten()),
    "compare": lambda one: _bare(one) == _bare(one).clone(),
    "bool": lambda one: torch.tensor(bool(_bare(one).abs().max() > 0.01)),
    "format": lambda one: torch.tensor(list(f"{_bare(one).flatten()[0].item():.6g}".encode())),
    "type": lambda one: _bare(one).to(torch.complex128),
    "chunk": lambda one: torch.cat([part.clone() for part in _bare(one).flatten().chunk(2)]),
    "asarray": lambda one: torch.from_numpy(np.array(np.asarray(_bare(one)))),
    "ufunc": lambda one: torch.from_numpy(np.add(_bare(one), 1)),
    "dlpack": lambda one: torch.utils.dlpack.from_dlpack(_bare(one)).clone(),
    "pickle": lambda one: pickle.loads(pickle.dumps(_bare(one))),
    "rows": lambda one: torch.stack([row.clone() for row in _bare(one)]),
    "transpose": lambda one: _bare(one).T.clone(),
    "address": _by_address,
    "script": lambda one: _script()(_bare(one)),
    "vmap": lambda one: torch.func.vmap(lambda row: row * 2)(_bare(one)),
    "graph": _through_graph,
    "alias": lambda one: torch.Tensor._make_subclass(torch.Tensor, _bare(one)).clone(),
    "shape": lambda one: torch.tensor([*one.shape, one.element_size(), one.numel()]),
}
"""How a program looks at a tensor, by Python and by C."""


@torch.no_grad()
def _change(how: str, one: Tensor) -> None:
    gradient = one.grad
    if how == "assign":
        one.grad = torch.full_like(one, 0.125)
    elif gradient is None:
        return
    elif how == "none":
        one.grad = None
    elif how == "mul":
        gradient.mul_(0.5)
    elif how == "data":
        gradient.data.mul_(0.5)
    elif how == "half":
        one.grad = gradient * 0.5
    elif how == "augmented":
        assert one.grad is not None
        one.grad *= 0.5
    elif how == "decay":
        gradient.add_(one.detach(), alpha=0.25)
    elif how == "copy":
        gradient.copy_(torch.full_like(gradient, 0.25))
    elif how == "zero":
        gradient.zero_()
    elif how == "detach_zero":
        gradient.detach_()
        gradient.zero_()
    elif how == "index":
        gradient.view(-1)[::2] = 0
    elif how == "mask":
        gradient.masked_fill_(gradient.detach().real > 0, 0)
    elif how == "numpy":
        gradient.numpy()[...] *= 0.5
    elif how == "set_data":
        gradient.data = gradient.data * 0.5
    elif how == "out":
        torch.mul(gradient, 0.5, out=gradient)
    elif how == "clamp":
        torch.clamp_(gradient, -0.01, 0.01)
    elif how == "foreach":
        torch._foreach_mul_([gradient], 0.5)
    elif how == "set":
        memory: Any = gradient
        memory.set_((gradient * 0.5).clone())
    elif how == "lerp":
        gradient.lerp_(torch.zeros_like(gradient), 0.5)
    elif how == "script":
        one.grad = _script()(gradient)
    elif how == "delete":
        del one.grad
    else:
        raise KeyError(how)


def _added(program: Program, kept: list[Tensor]) -> list[Tensor]:
    return [one.flatten()[:1] + other.flatten()[:1] for one, other in itertools.pairwise(kept)]


def _averaged(program: Program, kept: list[Tensor]) -> list[Tensor]:
    if [one.shape for one in program.meeting] != [one.shape for one in kept]:
        program.meeting = [torch.zeros_like(one) for one in kept]
    torch._foreach_lerp_(program.meeting, [one.detach() for one in kept], 0.5)
    torch._foreach_mul_(program.meeting, 0.5)
    for mean, one in zip(program.meeting, kept, strict=True):
        mean.add_(one, alpha=0.25)
    return program.meeting


def _copied(_: Program, kept: list[Tensor]) -> list[Tensor]:
    copies = [torch.zeros_like(one) for one in kept]
    torch._foreach_copy_(copies, kept)
    return copies


MEETINGS: dict[str, Callable[[Program, list[Tensor]], list[Tensor]]] = {
    "norms": lambda _, kept: list(torch._foreach_norm([*kept], float("inf"))),
    "maximum": lambda _, kept: [torch.maximum(kept[0].real.max(), kept[-1].real.max())],
    "cat": lambda _, kept: [torch.cat([one.flatten() for one in kept])],
    "vector": lambda _, kept: [nn.utils.parameters_to_vector(kept)],
    "where": lambda _, kept: [
        torch.where(torch.tensor(True), kept[-1], kept[0].flatten()[0].to(kept[-1].dtype))
    ],
    "total": lambda _, kept: [nn.utils.get_total_norm(kept)],
    "meshed": lambda _, kept: list(torch.cartesian_prod(kept[0].flatten(), kept[-1].flatten())),
    "kron": lambda _, kept: [torch.kron(kept[0], kept[-1])],
    "add": _added,
    "average": _averaged,
    "copy": _copied,
    "deepcopy": lambda _, kept: list(copy.deepcopy({"kept": (*kept,)})["kept"]),
    "pickle": lambda _, kept: [one.detach() for one in pickle.loads(pickle.dumps(kept))],
}
"""How a program gives many parameters to one operation."""

CHANGES = (
    "assign",
    "none",
    "mul",
    "data",
    "half",
    "augmented",
    "decay",
    "copy",
    "zero",
    "detach_zero",
    "index",
    "mask",
    "numpy",
    "set_data",
    "out",
    "clamp",
    "foreach",
    "set",
    "lerp",
    "script",
    "delete",
)
"""How a program changes a gradient."""

WHOLE_CHANGES = ("foreach_all", "clip", "clip_value", "clip_by_hand", "normalize")
"""How it changes all of them at once."""


@torch.no_grad()
def _change_all(how: str, parameters: list[Tensor]) -> list[Tensor]:
    gradients = [one.grad for one in parameters if one.grad is not None]
    if how == "clip":
        return [nn.utils.clip_grad_norm_(parameters, 0.1)]
    if how == "clip_value":
        nn.utils.clip_grad_value_(parameters, 0.02)
    elif gradients and how == "foreach_all":
        torch._foreach_mul_(gradients, 0.5)
    elif gradients and how == "clip_by_hand":
        total = torch.stack([one.abs().float().norm() for one in gradients]).norm()
        for one in gradients:
            one.mul_((0.1 / (total + 1e-6)).clamp(max=1.0).to(one.dtype))
        return [total]
    elif gradients and how == "normalize":
        for one in gradients:
            one.div_(one.abs().max() + 1)
    return []


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    """Return what an optimizer keeps of each parameter, read through `optimizer.state`."""
    found = [torch.tensor([one in optimizer.state for one in parameters])]
    for one in parameters:
        if one in optimizer.state:
            found += _tensors(optimizer.state[one])
    return found


def _tensors(state: dict[str, Any]) -> list[Tensor]:
    values = [state[name] for name in sorted(state)]
    return [
        one if isinstance(one, Tensor) else torch.tensor(float(one), dtype=torch.float64)
        for one in values
        if one is not None
    ]


def _in_order(states: Iterable[dict[str, Any]]) -> list[Tensor]:
    """Return states in the order of their keys, which is that of torch."""
    return [one for state in states for one in _tensors(state)]


def _copy_state(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    twin = copy.deepcopy(optimizer)
    parameters = [one for group in twin.param_groups for one in group["params"]]
    return [*parameters, *optimizer_state(twin, parameters)]


def _save_optimizer(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    twin = _saved(optimizer)
    parameters = [one for group in twin.param_groups for one in group["params"]]
    return [*parameters, *optimizer_state(twin, parameters)]


def _state_dict_values(state: dict[str, Any]) -> list[Tensor]:
    by_number = state["state"]
    return [tensor for number in sorted(by_number) for tensor in _tensors(by_number[number])]


def _load_elsewhere(optimizer: torch.optim.Optimizer, parameters: list[Tensor]) -> list[Tensor]:
    groups = [
        {**group, "params": [one.detach().clone() for one in group["params"]]}
        for group in optimizer.param_groups
    ]
    base: Any = next(one for one in type(optimizer).__mro__ if one.__module__.startswith("torch."))
    other: torch.optim.Optimizer = base(groups, lr=0.1)
    other.load_state_dict(optimizer.state_dict())
    return _state_dict_values(other.state_dict())


STATE_READS: dict[str, Callable[[torch.optim.Optimizer, list[Tensor]], list[Tensor]]] = {
    "by_parameter": optimizer_state,
    "values": lambda optimizer, _: [
        torch.tensor(len(optimizer.state)),
        *_in_order(list(optimizer.state.values())),
    ],
    "items": lambda optimizer, _: _in_order(
        [{**state, "key": key} for key, state in list(optimizer.state.items())]
    ),
    "get": lambda optimizer, parameters: [
        one for key in parameters for one in _tensors(optimizer.state.get(key, {}))
    ],
    "vars": lambda optimizer, _: _in_order(list(vars(optimizer)["state"].values())),
    "getstate": lambda optimizer, _: _in_order(list(optimizer.__getstate__()["state"].values())),
    "copy": lambda optimizer, _: _in_order(list(dict(optimizer.state).values())),
    "deepcopy": lambda optimizer, _: _copy_state(optimizer),
    "deepcopy_state": lambda optimizer, _: _in_order(list(copy.deepcopy(optimizer.state).values())),
    "shallow": lambda optimizer, _: _in_order(list(copy.copy(optimizer).state.values())),
    "save": lambda optimizer, _: _save_optimizer(optimizer),
    "save_dict": lambda optimizer, _: _state_dict_values(_saved(optimizer.state_dict())),
    "elsewhere": _load_elsewhere,
    "kept": lambda optimizer, parameters: optimizer_state(optimizer, parameters[:1]),
}
"""How a program reads what an optimizer keeps."""

STATE_CHANGES = (
    "clear",
    "replace",
    "pop",
    "delete",
    "zero",
    "assign",
    "refill",
    "inner_clear",
    "keep",
    "load",
    "setstate",
)
"""How it changes that; all but `keep` act on the next update."""


class Oddities:
    """Actions of a program that are odd; `Program` has them all."""

    rank: int
    models: list[Any]
    optimizers: list[torch.optim.Optimizer]
    kept_lists: list[list[Tensor]]
    kept_groups: list[list[list[Tensor]]]
    kept_buffers: list[dict[str, Tensor]]

    def start_oddities(self) -> None:
        """Keep lists as a program does that makes them before `prepare`."""
        self.kept_lists = [list(model.parameters()) for model in self.models]
        self.kept_groups = [
            [list(group["params"]) for group in optimizer.param_groups]
            for optimizer in self.optimizers
        ]
        self.kept_buffers = [dict(model.named_buffers()) for model in self.models]
        self.copies: dict[int, list[Tensor]] = {}
        self.held: dict[int, list[Tensor]] = {}
        self.averages_of_kept: dict[int, list[Tensor]] = {}
        self.optimizer_states: dict[int, Any] = {}
        self.others: dict[int, torch.optim.Optimizer] = {}
        self.calls = [0 for _ in self.models]
        self.hooks: list[Any] = []
        self.threads: list[tuple[threading.Thread, list[str]]] = []
        self.meeting: list[Tensor] = []
        self.caches: dict[int, list[tuple[int, Tensor]]] = {}

    def _via(self, via: str, model: int, only: int | None = None) -> list[Tensor]:
        program: Any = self
        found = VIAS[via](program, model)
        return found if only is None else [found[only % len(found)]]

    def _noting(self, label: str, look: Callable[[], list[Tensor]]) -> None:
        """Note what was seen, or the type of torch's own error."""
        program: Any = self
        try:
            values = [one.detach().clone() for one in look()]
        except FOREIGN as error:
            if type(error).__module__.startswith("gradlane"):
                raise
            program.note(f"{label} raised {type(error).__name__}", [])
        else:
            program.note(label, values)

    # ---- gradients

    def look_at_gradients(self, model: int, *, via: str, how: str, only: int | None = None) -> None:
        """Look at `.grad`."""

        def look() -> list[Tensor]:
            found = [one.grad for one in self._via(via, model, only)]
            present = torch.tensor([one is not None for one in found])
            return [present, *(LOOKS[how](one) for one in found if one is not None)]

        self._noting(f"gradients.{how}", look)

    def change_gradients(self, model: int, *, via: str, how: str, only: int | None = None) -> None:
        """Change or replace `.grad`."""

        def change() -> list[Tensor]:
            trained = [one for one in self._via(via, model, only) if one.requires_grad]
            if how in WHOLE_CHANGES:
                return _change_all(how, trained)
            for one in trained:
                _change(how, one)
            return []

        self._noting(f"change.{how}", change)

    def assign_gradients(self, model: int, *, through: list[int], data: int, via: str) -> None:
        """Compute gradients with `torch.autograd.grad` and assign them."""
        program: Any = self
        loss = program.forward(through, data)
        program.note("loss", [loss])
        trained = [one for one in self._via(via, model) if one.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        for one, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                one.grad = gradient if one.grad is None else one.grad + gradient

    def hold_gradients(self, model: int, *, via: str) -> None:
        """Keep references to gradients."""
        self.held[model] = [one.grad for one in self._via(via, model) if one.grad is not None]

    def look_at_held(self, model: int) -> None:
        """Look at the gradients that were kept."""
        self._noting("held gradients", lambda: list(self.held.get(model, [])))

    def zero_by_hand(self, model: int, *, via: str, how: str) -> None:
        """Zero gradients without `zero_grad()`."""
        for one in self._via(via, model):
            if one.grad is not None and how == "none":
                one.grad = None
            elif one.grad is not None:
                # As torch's `zero_grad()`: a view cannot be detached in place.
                if one.grad.grad_fn is not None:
                    one.grad.detach_()
                one.grad.zero_()

    @torch.no_grad()
    def climb(self, model: int, *, via: str) -> None:
        """Go up along this rank's own gradients, as SAM does."""
        parameters = self._via(via, model)
        self.copies[model] = [one.detach().clone() for one in parameters]
        for one in parameters:
            if one.grad is not None:
                one.add_(one.grad, alpha=0.05)

    @torch.no_grad()
    def descend(self, model: int, *, via: str) -> None:
        """Go back to where `climb` began."""
        for one, value in zip(self._via(via, model), self.copies.get(model, []), strict=False):
            one.copy_(value)

    # ---- updates without the optimizer

    @torch.no_grad()
    def step_by_hand(self, model: int, *, via: str, how: str) -> None:
        """Update parameters along their gradients without an optimizer."""
        parameters = [one for one in self._via(via, model) if one.grad is not None]
        if how == "foreach" and parameters:
            gradients = [one.grad for one in parameters if one.grad is not None]
            torch._foreach_add_(parameters, gradients, alpha=-0.1)
            return
        for one in parameters:
            assert one.grad is not None
            if how == "data":
                one.data.add_(one.grad.data, alpha=-0.1)
            else:
                one.sub_(0.1 * one.grad)

    def step_other(self, model: int, *, via: str, made: str) -> None:
        """Step another optimizer than the prepared one."""
        if made == "copy":
            other = self.others.get(model)
            if other is None:
                kind: Any = type(self.optimizers[model])
                other = kind(
                    [
                        {**group, "params": list(group["params"])}
                        for group in self.optimizers[model].param_groups
                    ]
                )
        else:
            other = self.others.get(model) or torch.optim.SGD(
                self._via(via, model), lr=0.1, momentum=0.5
            )
        self.others[model] = other
        other.step()
        if made == "zeroes":
            other.zero_grad()

    # ---- parameters

    def look_at_kept(self, model: int, *, via: str, how: str, only: int | None = None) -> None:
        """Look at parameters."""
        self._noting(
            f"kept.{how}", lambda: [LOOKS[how](one) for one in self._via(via, model, only)]
        )

    @torch.no_grad()
    def follow_kept(self, model: int, *, via: str, how: str) -> None:
        """Update a moving average of parameters in one of the usual ways."""
        parameters = self._via(via, model)
        if how == "group_lists":
            values: list[Tensor] = []
            for group in self.optimizers[model].param_groups:
                sums = [torch.zeros_like(one) for one in list.__iter__(group["params"])]
                torch._foreach_add_(sums, group["params"])
                values += sums
            self._noting("follow.group_lists", lambda: values)
            return
        shapes = [one.shape for one in parameters]
        average = self.averages_of_kept.get(model)
        if average is None or [one.shape for one in average] != shapes:
            average = self.averages_of_kept[model] = [torch.zeros_like(one) for one in parameters]
        if how == "foreach":
            torch._foreach_mul_(average, 0.5)
            torch._foreach_add_(average, parameters, alpha=0.5)
        elif how == "lerp":
            for mine, one in zip(average, parameters, strict=True):
                mine.lerp_(one.detach(), 0.5)
        elif how == "data":
            for mine, one in zip(average, parameters, strict=True):
                mine.copy_(mine * 0.5 + one.data * 0.5)
        elif how == "copy":
            for mine, one in zip(average, parameters, strict=True):
                mine.copy_(one)
        else:
            norms = torch._foreach_norm(parameters)
            self._noting("follow.norms", lambda: list(norms))
        kept = average
        self._noting(f"follow.{how}", lambda: kept)

    @torch.no_grad()
    def meet(self, model: int, *, how: str) -> None:
        """Give kept parameters of all models to one operation."""
        kept = [one for each in self.kept_lists for one in each if one.numel() > 0]
        if model:
            kept = kept[::-1]
        program: Any = self
        self._noting(f"meet.{how}", lambda: MEETINGS[how](program, kept))

    @torch.no_grad()
    def look_at_cache(self, model: int) -> None:
        """Look at copies of kept parameters that are made anew where `_version` has moved."""
        cache = self.caches.setdefault(model, [])
        for place, one in enumerate(self.kept_lists[model]):
            if place == len(cache):
                cache.append((one._version, one.detach().clone()))
            elif cache[place][0] != one._version:
                cache[place] = (one._version, one.detach().clone())
        self._noting("cache", lambda: [value for _, value in cache])

    @torch.no_grad()
    def drift(self, model: int, *, via: str, factor: float) -> None:
        """Change frozen parameters, alike on all ranks."""
        for one in self._via(via, model):
            # Torch writes no expanded tensor.
            if not one.requires_grad and (one.numel() < 2 or 0 not in one.stride()):
                one.mul_(factor)

    @torch.no_grad()
    def write_kept(self, model: int, *, via: str, how: str) -> None:
        """Change parameters in place."""
        parameters = [one for one in self._via(via, model) if one.requires_grad]
        if how == "foreach":
            torch._foreach_mul_(parameters, 0.875)
        elif how == "swap":
            values = [one.detach().clone() for one in parameters]
            for one, value in zip(parameters, values, strict=True):
                one.data = value * 0.875
        for one in parameters:
            if how == "mul":
                one.mul_(0.875)
            elif how == "data":
                one.data.mul_(0.875)
            elif how == "clamp" and not one.is_complex():
                one.data.clamp_(-0.25, 0.25)
            elif how == "copy":
                one.copy_(one.detach() * 0.875)
            elif how == "numpy" and one.dtype in (torch.float32, torch.float64):
                one.detach().numpy()[...] *= 0.875
            elif how == "detached":
                one.detach().mul_(0.875)
            elif how == "init":
                nn.init.constant_(one, 0.25)

    # ---- optimizers

    def look_at_state(self, model: int, *, how: str) -> None:
        """Look at what the optimizer keeps."""
        optimizer, parameters = self.optimizers[model], self.kept_lists[model]
        self._noting(f"state.{how}", lambda: STATE_READS[how](optimizer, parameters))

    @torch.no_grad()
    def change_state(self, model: int, *, how: str, only: int = 0) -> None:
        """Change what the optimizer keeps."""
        optimizer = self.optimizers[model]
        parameters = self.kept_lists[model]
        one = parameters[only % len(parameters)]
        state: Any = optimizer.state
        if how == "clear":
            state.clear()
        elif how == "replace":
            optimizer.state = collections.defaultdict(dict)
        elif how == "pop":
            state.pop(one, None)
        elif how == "delete" and one in state:
            del state[one]
        elif how == "zero":
            for kept in state.values():
                for tensor in kept.values():
                    if isinstance(tensor, Tensor) and tensor.dim() > 0:
                        tensor.zero_()
        elif how == "assign" and one in state:
            state[one] = {
                name: tensor * 0.5 if isinstance(tensor, Tensor) and tensor.dim() > 0 else tensor
                for name, tensor in state[one].items()
            }
        elif how == "refill":
            kept = {key: dict(values) for key, values in state.items()}
            state.clear()
            state.update(kept)
        elif how == "inner_clear" and one in state:
            state[one].clear()
        elif how == "keep":
            self.optimizer_states[model] = copy.deepcopy(optimizer.state_dict())
        elif how == "load" and model in self.optimizer_states:
            kept = self.optimizer_states[model]
            if len(kept["param_groups"]) == len(optimizer.param_groups):
                optimizer.load_state_dict(copy.deepcopy(kept))
        elif how == "setstate":
            optimizer.__setstate__({"state": collections.defaultdict(dict)})

    def regroup(self, model: int, *, how: str) -> None:
        """Make the optimizer's groups anew."""
        optimizer = self.optimizers[model]
        groups = optimizer.param_groups
        if how == "pop_add":
            last = groups.pop()
            optimizer.add_param_group({**last, "params": list(last["params"])})
        elif how == "list":
            groups[0]["params"] = list(groups[0]["params"])
        elif how == "comprehension":
            optimizer.param_groups = [
                {**group, "params": [one for one in group["params"]]} for group in groups
            ]
        elif how == "slice":
            groups[:] = [dict(group, params=list(group["params"])) for group in groups]
        elif how == "split" and len(groups[0]["params"]) > 1:
            first, *rest = groups[0]["params"]
            groups[0]["params"] = rest
            optimizer.add_param_group({**groups[0], "params": [first]})
        elif how == "reverse":
            groups.reverse()
        elif how == "remove" and len(groups[0]["params"]) > 1:
            groups[0]["params"].pop()
        elif how == "kept":
            for group, kept in zip(groups, self.kept_groups[model], strict=False):
                group["params"] = kept
        elif how == "setstate":
            optimizer.__setstate__({"param_groups": [dict(group) for group in groups]})

    def wrap_step(self, model: int, *, how: str, inside: str) -> None:
        """Wrap `optimizer.step`."""
        wrap_step(self.optimizers[model], how, self.around_step(model, inside))

    def around_step(self, model: int, inside: str) -> Callable[[Callable[..., Any], Any], Any]:
        """Return what a wrapper does: it is called with the inner step."""

        def around(inner: Callable[..., Any], *arguments: Any) -> Any:
            self.calls[model] += 1
            optimizer = self.optimizers[model]
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            if inside == "clip":
                nn.utils.clip_grad_norm_(parameters, 0.1)
            elif inside == "clip_kept":
                nn.utils.clip_grad_norm_(self.kept_lists[model], 0.1)
            elif inside == "halve":
                for one in parameters:
                    if one.grad is not None:
                        one.grad.mul_(0.5)
            elif inside == "noise":
                generator = torch.Generator().manual_seed(self.calls[model])
                for one in parameters:
                    noise = torch.rand(one.shape, generator=generator, dtype=torch.float32)
                    if one.grad is not None:
                        one.grad.add_(noise.to(one.device, one.dtype), alpha=0.125)
            elif inside == "skip":
                norms = [
                    one.grad.abs().float().norm() for one in parameters if one.grad is not None
                ]
                if norms and float(torch.stack(norms).norm()) > 1.0:
                    return None
            result = inner(*arguments)
            if inside == "decay":
                with torch.no_grad():
                    for one in parameters:
                        if one.requires_grad:
                            one.mul_(0.875)
            elif inside == "note":
                self._noting("inside step", lambda: list(parameters))
            return result

        return around

    def look_at_calls(self, model: int) -> None:
        """Note how many times a wrapper was called."""
        program: Any = self
        program.note("calls", [torch.tensor(self.calls[model])])

    # ---- hooks

    def hook(self, model: int, *, how: str, only: int) -> None:
        """Register a hook for one parameter's gradients."""
        trained = [one for one in self.kept_lists[model] if one.requires_grad]
        one: Any = trained[only % len(trained)]
        optimizer = self.optimizers[model]

        def halve(*_: Any) -> None:
            if one.grad is not None:
                one.grad.mul_(0.5)

        def halve_anew(*_: Any) -> None:
            if one.grad is not None:
                one.grad = one.grad * 0.5

        if how == "tensor":
            self.hooks.append(one.register_hook(lambda gradient: gradient * 0.5))
        elif how == "tensor_clamp":
            self.hooks.append(one.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05)))
        elif how == "tensor_in_place":
            self.hooks.append(one.register_hook(lambda gradient: gradient.mul_(0.5)))
        elif how == "accumulated":
            self.hooks.append(one.register_post_accumulate_grad_hook(halve))
        elif how == "accumulated_anew":
            self.hooks.append(one.register_post_accumulate_grad_hook(halve_anew))
        elif how == "all_accumulated":
            each: Any
            for each in trained:
                self.hooks.append(each.register_post_accumulate_grad_hook(_halve))
        elif how == "node":
            with torch.enable_grad():
                node = one.view_as(one).grad_fn.next_functions[0][0]
            self.hooks += [node, node.register_hook(halve)]
        elif how == "node_before":
            with torch.enable_grad():
                node = one.view_as(one).grad_fn.next_functions[0][0]
            self.hooks += [
                node,
                node.register_prehook(lambda gradients: tuple(g * 0.5 for g in gradients)),
            ]
        elif how == "step_before":
            self.hooks.append(optimizer.register_step_pre_hook(lambda *_: self._clip_groups(model)))
        elif how == "step_after":
            self.hooks.append(
                optimizer.register_step_post_hook(
                    lambda *_: self._noting("after step", lambda: self._via("parameters", model))
                )
            )

    def _clip_groups(self, model: int) -> None:
        nn.utils.clip_grad_norm_(self._via("groups", model), 0.1)

    def unhook(self, model: int) -> None:
        """Take all hooks away."""
        for one in self.hooks:
            if hasattr(one, "remove"):
                one.remove()
        self.hooks.clear()

    # ---- threads

    def look_aside(self, model: int, *, how: str, times: int) -> None:
        """Look at something from another thread while training goes on."""

    def wait_aside(self, model: int) -> None:
        """Wait for the other threads."""
        program: Any = self
        failed: list[str] = []
        for thread, errors in self.threads:
            thread.join(20.0)
            failed += ["hangs"] if thread.is_alive() else errors
        self.threads.clear()
        program.note("aside" + (f" raised {failed[0]}" if failed else ""), [])

    def backward_twice(self, model: int, *, through: list[int], data: int) -> None:
        """Run two forwards and backwards, in a rank at the same time."""
        program: Any = self
        for number in range(2):
            program.forward(through, data, batch=data * 2 + 1000 + number).backward()

    # ---- buffers

    @torch.no_grad()
    def write_buffer(self, model: int, *, how: str, value: float) -> None:
        """Change the buffer `tally` by hand."""
        owner = self.models[model]
        if how == "in_place":
            owner.tally.add_(value)
        elif how == "attribute":
            owner.tally = owner.tally + value
        elif how == "mapping":
            owner._buffers["tally"] = owner._buffers["tally"] + value
        elif how == "data":
            owner.tally.data.add_(value)
        elif how == "kept":
            self.kept_buffers[model]["tally"].add_(value)
        elif how == "register":
            owner.register_buffer("tally", owner.tally + value)
        elif how == "load":
            state = {**owner.state_dict(), "tally": owner.tally + value}
            owner.load_state_dict(state)
        elif how == "numpy":
            owner.tally.numpy()[...] += value

    def look_at_buffer(self, model: int, *, via: str) -> None:
        """Look at the buffer `tally`."""
        owner = self.models[model]
        if via == "attribute":
            self._noting("tally", lambda: [owner.tally])
        else:
            self._noting("tally", lambda: [owner._buffers["tally"]])


@torch.no_grad()
def _halve(one: Tensor) -> None:
    if one.grad is not None:
        one.grad.mul_(0.5)


def wrap_step(optimizer: Any, how: str, around: Callable[..., Any]) -> None:
    """Replace `step` of an optimizer by one that calls `around` with the one before."""
    inner = optimizer.step
    if how == "wraps":

        @functools.wraps(inner)
        def wrapped(*arguments: Any) -> Any:
            return around(inner, *arguments)

        optimizer.step = wrapped
    elif how == "method":
        function = inner.__func__ if hasattr(inner, "__func__") else inner

        @functools.wraps(function)
        def bound(self: torch.optim.Optimizer, *arguments: Any) -> Any:
            return around(inner, *arguments)

        optimizer.step = types.MethodType(bound, optimizer)
    elif how == "plain":
        optimizer.step = lambda *arguments: around(inner, *arguments)
    elif how == "partial":
        optimizer.step = functools.partial(around, inner)
    elif how == "update_wrapper":
        caller = _Caller(inner, around)
        functools.update_wrapper(caller, inner)
        optimizer.step = caller
    elif how == "like_scheduler":

        @functools.wraps(inner)
        def counted(*arguments: Any) -> Any:
            return around(inner, *arguments)

        marked: Any = counted
        marked._wrapped_by_lr_sched = True
        optimizer.step = counted
    else:
        raise KeyError(how)


class _Caller:
    def __init__(self, inner: Callable[..., Any], around: Callable[..., Any]) -> None:
        self._inner, self._around = inner, around

    def __call__(self, *arguments: Any) -> Any:
        return self._around(self._inner, *arguments)


WRAPS = ("wraps", "method", "plain", "partial", "update_wrapper", "like_scheduler")
"""How `step` of an object is wrapped."""
SUBCLASSES = ("decorated", "assigned", "super", "mixin", "getattr")
"""How `step` of a class is."""
INSIDES = ("clip", "clip_kept", "halve", "noise", "skip", "decay", "note")
"""What a wrapper does."""
COUNTS = ("group", "self", "history", "state")
"""Where an optimizer that says it steps per parameter counts."""


def subclass(base: type[Any], how: str, around: Callable[[Any], Callable[..., Any]]) -> type[Any]:
    """Return a subclass of an optimizer's class whose step calls `around(self)`."""
    if how == "decorated":

        class Decorated(base):  # type: ignore[misc]
            @functools.wraps(base.step)
            def step(self, *arguments: Any) -> Any:
                return around(self)(functools.partial(base.step, self), *arguments)

        return Decorated
    if how == "assigned":

        class Assigned(base):  # type: ignore[misc]
            pass

        original = base.step

        @functools.wraps(original)
        def assigned(self: Any, *arguments: Any) -> Any:
            return around(self)(functools.partial(original, self), *arguments)

        Assigned.step = assigned
        return Assigned
    if how == "super":

        class Super(base):  # type: ignore[misc]
            def step(self, *arguments: Any) -> Any:
                return around(self)(super().step, *arguments)

        return Super
    if how == "mixin":

        class Mixin:
            def step(self, *arguments: Any) -> Any:
                return around(self)(super().step, *arguments)  # type: ignore[misc]

        return type("Mixed", (Mixin, base), {})

    class Looked(base):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if name == "step" and "step" not in super().__getattribute__("__dict__"):
                inner = found

                @functools.wraps(inner)
                def step(*arguments: Any) -> Any:
                    return around(self)(inner, *arguments)

                return step
            return found

    return Looked


class Counts(torch.optim.Optimizer):
    """Steps per parameter, as it says, but counts its steps."""

    steps_per_parameter = True

    def __init__(self, groups: Any, where: str) -> None:
        """Count in `where`."""
        super().__init__(groups, {"lr": 0.1, "k": 0, "history": []})
        self.where = where
        self.k = 0
        for group in self.param_groups:
            group["history"] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with a rate that falls with the count."""
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is None:
                    continue
                count = {"group": group["k"], "self": self.k, "history": len(group["history"])}
                divisor = 1 + count.get(self.where, self.state[one].get("k", 0))
                one.sub_(one.grad * (group["lr"] / divisor))
                if self.where == "state":
                    self.state[one]["k"] = divisor
            if self.where == "group":
                group["k"] += 1
            elif self.where == "history":
                group["history"].append(1)
        if self.where == "self":
            self.k += 1


def aside(how: str, model: Any, optimizer: Any, kept: list[Tensor]) -> Callable[[], Any]:
    """Return what another thread does."""
    calls: dict[str, Callable[[], Any]] = {
        "state_dict": model.state_dict,
        "parameters": lambda: [one.detach().clone() for one in model.parameters()],
        "optimizer": optimizer.state_dict,
        "deepcopy": lambda: copy.deepcopy(model),
        "groups": lambda: [
            one.shape for group in optimizer.param_groups for one in group["params"]
        ],
        "kept": lambda: [one.detach().clone() for one in kept],
        "gradients": lambda: [one.grad for one in kept],
        "attributes": lambda: [one for module in model.modules() for one in module._parameters],
        "state": lambda: list(optimizer.state),
        "pickle": lambda: pickle.dumps(model.state_dict()),
        "norm": lambda: [one.norm().item() for one in model.parameters()],
    }
    return calls[how]


ASIDES = (
    "state_dict",
    "parameters",
    "optimizer",
    "deepcopy",
    "groups",
    "kept",
    "gradients",
    "attributes",
    "state",
    "pickle",
    "norm",
)
"""What other threads look at."""


BUFFER_WRITES = (
    "in_place",
    "attribute",
    "mapping",
    "data",
    "kept",
    "register",
    "load",
    "numpy",
)
"""How a buffer is written by hand."""


def named_tally(model: Any) -> Iterator[Tensor]:
    """Yield the buffer that actions write, past whatever guards it."""
    buffer = dict.get(model._buffers, "tally")
    if buffer is not None:
        yield buffer
