"""Take the factors of layers as their backward runs.

A layer with a factor hook runs its usual forward. In backward it gives its inputs and output
gradients to the hook, and does not multiply them: there is one product, of all ranks' factors.
Wherever the program may want the gradient itself (`torch.autograd.grad`, hooks on the parameter,
graphs of gradients, gradients that add up in `.grad`, code that is compiled or transformed) it is
computed and returned as ever.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from gradlane.training.factors.block import LinearFactors, Part, TouchedRows, can_travel
from gradlane.training.modules.compiled import is_tracing
from gradlane.training.modules.gradient_intake import raw_grad
from gradlane.training.torch_internals import (
    backward_hooks,
    parameters_of,
    peek_transforms,
    post_accumulate_hooks,
    will_execute,
)

_ATTRIBUTE = "_gradlane_factor_hook"


class FactorSink(Protocol):
    """Takes the factors of a model's layers."""

    def wants_factors(self, index: int) -> bool:
        """Whether factors of a tensor can be taken now, in this backward."""

    def take_factors(self, index: int, part: Part) -> None:
        """Take factors; their memory may change after the call."""

    def end_parts(self, index: int) -> None:
        """Note that all layers that use the tensor are through with this backward."""


class OwnFactors(Protocol):
    """A layer that is no `nn.Linear` and has factors all the same, such as one that is replayed.

    It looks at `factor_hook_of(self)` in its backward, and gives the hook what it has.
    """

    gives_factors: bool
    """Whether it has any."""

    def rebuild(
        self, contributions: Sequence[Sequence[Part]], divisor: int, out: Tensor, *, aside: bool
    ) -> None:
        """Write the mean of all ranks' gradients, as `gradlane.training.factors.rebuild` does.

        Args:
            contributions: the parts of each rank, in rank order.
            divisor: number of ranks.
            out: overwritten.
            aside: a thread beside the one that runs the model calls.
        """


def own_factors(module: nn.Module) -> OwnFactors | None:
    """Return a layer as one with factors of its own, if it is one."""
    gives = getattr(type(module), "gives_factors", False) and module.__dict__.get("gives_factors")
    return cast(OwnFactors, module) if gives else None


class FactorHook:
    """Passes one layer's factors on to a sink."""

    def __init__(self, sink: FactorSink, index: int, weight: Tensor) -> None:
        """Give a weight's factors, as tensor `index`, to a sink."""
        self._sink = sink
        self._index = index
        self.weight = weight
        self._accumulation: Any = torch.autograd.graph.get_gradient_edge(weight).node

    def is_open(self) -> bool:
        """Whether the running backward would only add the gradient to an empty `.grad`."""
        weight = self.weight
        # The program may look at the sum of `.grad` and the new gradient.
        if raw_grad(weight) is not None or backward_hooks(weight) or torch.is_grad_enabled():
            return False
        hooks = post_accumulate_hooks(weight) or {}
        if not all(map(_is_own, hooks.values())):
            return False
        try:
            accumulates = will_execute(self._accumulation)
        except RuntimeError:  # torch.autograd.grad() asks for it.
            return False
        return accumulates and self._sink.wants_factors(self._index)

    def take(self, part: Part) -> None:
        """Pass factors on."""
        self._sink.take_factors(self._index, part)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Return None: a copy of the layer has a weight of its own, which no sink takes."""

    def __reduce__(self) -> Any:
        """Pickle as nothing."""
        return types.NoneType, ()


def _is_own(hook: Any) -> bool:
    """Return whether a hook is one of gradlane's, which need no gradient."""
    module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return str(module).partition(".")[0] == "gradlane"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hook: FactorHook, inputs: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.hook = hook
        ctx.save_for_backward(inputs, weight)
        return functional.linear(inputs, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (output_gradient,) = gradients
        inputs, weight = ctx.saved_tensors
        _, wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        with torch.autocast(output_gradient.device.type, enabled=False):
            rows = output_gradient.reshape(-1, weight.shape[0])
            input_gradient = rows.matmul(weight).reshape(inputs.shape) if wants_input else None
            bias_gradient = rows.sum(0) if wants_bias else None
            weight_gradient = None
            if wants_weight:
                input_rows = inputs.reshape(-1, weight.shape[1])
                if ctx.hook.is_open():
                    ctx.hook.take(LinearFactors(input_rows, rows))
                else:
                    weight_gradient = rows.t().matmul(input_rows)
        return None, input_gradient, weight_gradient, bias_gradient


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hook: FactorHook, indices: Tensor, weight: Tensor, padding: int | None
    ) -> Tensor:
        ctx.hook = hook
        ctx.padding = padding
        ctx.count = weight.shape[0]
        ctx.save_for_backward(indices)
        return functional.embedding(indices, weight, padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (output_gradient,) = gradients
        (indices,) = ctx.saved_tensors
        padding = -1 if ctx.padding is None else ctx.padding
        if not ctx.needs_input_grad[2]:
            return None, None, None, None
        if not ctx.hook.is_open():
            gradient = torch.ops.aten.embedding_dense_backward(
                output_gradient, indices, ctx.count, padding, False
            )
            return None, None, gradient, None
        ctx.hook.take(_touched(indices.reshape(-1), output_gradient, padding))
        return None, None, None, None


def _touched(indices: Tensor, output_gradient: Tensor, padding: int) -> TouchedRows:
    rows = output_gradient.reshape(indices.shape[0], output_gradient.shape[-1])
    if padding >= 0:
        kept = indices != padding
        indices, rows = indices[kept], rows[kept]
    numbers, place = torch.unique(indices.to(torch.int64), return_inverse=True)
    exact = torch.promote_types(rows.dtype, torch.float32)
    values = torch.zeros(numbers.shape[0], rows.shape[1], dtype=exact, device=rows.device)
    values.index_add_(0, place, rows.to(exact))
    return TouchedRows(numbers, values.to(rows.dtype))


def factor_hook_of(module: nn.Module) -> FactorHook | None:
    """Return the hook on a layer, if there is one."""
    hook: FactorHook | None = module.__dict__.get(_ATTRIBUTE)
    return hook


def can_factor(module: nn.Module) -> bool:
    """Whether a layer's weight gradient can be sent as factors.

    Linear layers and embeddings with torch's own forward can; not embeddings that are sparse, that
    change their weight in forward (`max_norm`) or weigh their gradient (`scale_grad_by_freq`).
    """
    own = own_factors(module) is not None
    if not own and not isinstance(module, (nn.Linear, nn.Embedding)):
        return False
    if _ATTRIBUTE not in module.__dict__ and "forward" in module.__dict__:
        return False
    weight: Tensor | None = parameters_of(module).get("weight")
    if weight is None or not can_travel(weight.dtype) or not weight.is_contiguous():
        return False
    if own:
        return weight.dim() == 2
    if isinstance(module, NonDynamicallyQuantizableLinear):
        # Multi-head attention reads its weight and never calls it.
        return False
    if isinstance(module, nn.Linear):
        return type(module).forward is nn.Linear.forward
    if isinstance(module, nn.Embedding):
        plain = module.max_norm is None and not module.scale_grad_by_freq and not module.sparse
        return plain and type(module).forward is nn.Embedding.forward
    return False


def install(module: nn.Module, sink: FactorSink, index: int) -> None:
    """Tap a layer for which `can_factor` holds; the module stays the user's own object.

    Args:
        module: the layer.
        sink: gets the factors.
        index: number of its weight.
    """
    weight = dict.__getitem__(parameters_of(module), "weight")
    assert weight is not None
    module.__dict__[_ATTRIBUTE] = FactorHook(sink, index, weight)
    if own_factors(module) is not None:
        return
    forward = _forward_linear if isinstance(module, nn.Linear) else _forward_embedding
    module.__dict__["forward"] = types.MethodType(forward, module)


def remove(module: nn.Module) -> None:
    """Take a hook off again."""
    hook = module.__dict__.pop(_ATTRIBUTE, None)
    if hook is not None and own_factors(module) is None:
        module.__dict__.pop("forward", None)


def _open_hook_of(module: nn.Module, weight: Tensor) -> FactorHook | None:
    """The hook to use in this forward, or None where it has to be torch's own."""
    if is_tracing() or peek_transforms() is not None:
        return None
    hook = factor_hook_of(module)
    if hook is None or hook.weight is not weight:
        return None
    return hook if torch.is_grad_enabled() and weight.requires_grad else None


def _forward_linear(self: nn.Linear, input: Tensor) -> Tensor:
    weight, bias = self.weight, self.bias
    hook = _open_hook_of(self, weight)
    if hook is None:
        return functional.linear(input, weight, bias)
    device = input.device.type
    if torch.is_autocast_enabled(device) and input.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            narrow_bias = None if bias is None else bias.to(dtype)
            narrow: Tensor = _Linear.apply(hook, input.to(dtype), weight.to(dtype), narrow_bias)
        return narrow
    output: Tensor = _Linear.apply(hook, input, weight, bias)
    return output


def _forward_embedding(self: nn.Embedding, input: Tensor) -> Tensor:
    weight = self.weight
    hook = _open_hook_of(self, weight)
    if hook is None:
        return functional.embedding(input, weight, self.padding_idx)
    output: Tensor = _Embedding.apply(hook, input, weight, self.padding_idx)
    return output


# A bound method is pickled by its name: a copy that is unpickled has its class's own forward.
_forward_linear.__name__ = "forward"
_forward_embedding.__name__ = "forward"
