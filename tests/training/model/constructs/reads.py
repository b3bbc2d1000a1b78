"""Reads of the model: listings, copies, averages that follow it, hooks of the user's."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import fusion

from tests.training.model.constructs import Construct
from tests.training.model.constructs.comparison import STEPS, Small, Use, call, reads, values_of
from tests.training.model.late_core import LateCore
from tests.training.model.models import SmallCnn, seeded
from tests.training.model.ranks import run_ranks
from tests.training.model.reference import same_bits


def vector(model: Any, values: Tensor) -> Tensor:
    """All parameters in one vector."""
    return nn.utils.parameters_to_vector(model.parameters())


def assign_vector(model: Any, values: Tensor) -> Tensor:
    """Replace all parameters by a vector made of them."""
    nn.utils.vector_to_parameters(vector(model, values) * 0.5, model.parameters())
    return vector(model, values)


def saved(model: Any, values: Tensor) -> Tensor:
    """Save the model as a whole and load it."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return call(torch.load(file, weights_only=False), values)


def saved_state(model: Any, values: Tensor) -> Tensor:
    """Save the model's state and load it into another model."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = Small()
    other.load_state_dict(torch.load(file, weights_only=True))
    return call(other, values)


def state_with_hooks(model: Any, values: Tensor) -> Tensor:
    """The state as hooks of the user's change it."""
    first = model.first
    handles = [
        first.register_state_dict_pre_hook(
            lambda module, *_: module.register_buffer("norm", module.weight.detach().norm())
        ),
        first.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update(sum=module.weight.detach().sum())
        ),
    ]
    state = model.state_dict()
    for handle in handles:
        handle.remove()
    del first.norm
    return torch.stack([state["first.norm"], state["sum"]])


def all_names(model: Any, values: Tensor) -> Tensor:
    """Everything that `named_parameters()` and `buffers()` give."""
    tensors = [*dict(model.named_parameters()).values(), *model.buffers()]
    return torch.cat([one.detach().flatten().float() for one in tensors])


def initialized_again(model: Any, values: Tensor) -> Tensor:
    """Look at every module, and change it."""
    sums: list[Tensor] = []

    def visit(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            sums.append(module.weight.detach().sum())
            with torch.no_grad():
                module.weight.mul_(0.9)

    model.apply(visit)
    return torch.stack(sums)


def fused(model: Any, values: Tensor) -> Tensor:
    """Fold the batch norm into the convolution before it."""
    model.eval()
    layer = fusion.fuse_conv_bn_eval(model.body[0], model.body[1])
    model.train()
    return call(layer, values)


def data_swapped(model: Any, values: Tensor) -> Tensor:
    """Swap the memory of a parameter."""
    model.first.weight.data = model.first.weight.data * 0.5
    return call(model, values)


def loaded(model: Any, values: Tensor) -> Tensor:
    """Load a state between steps."""
    model.load_state_dict({name: one * 0.5 for name, one in model.state_dict().items()})
    return call(model, values)


def functional(model: Any, values: Tensor) -> Tensor:
    """Call the model with other parameters."""
    doubled = {name: 2 * one for name, one in model.named_parameters()}
    result: Tensor = torch.func.functional_call(model, doubled, (values,))
    return result


def functional_in_part(model: Any, values: Tensor) -> Tensor:
    """Call the model with one other parameter; the rest are its own."""
    result: Tensor = torch.func.functional_call(model, {"scale": torch.zeros(4)}, (values,))
    return result + functional(model, values)


SEES = "Looking at the model"
READS = [
    reads("`model.parameters()`, `named_parameters()`, `buffers()`", all_names, section=SEES),
    reads(
        "`state_dict()`, `torch.save` of it, `load_state_dict` elsewhere", saved_state, section=SEES
    ),
    reads(
        "`state_dict()` with hooks of one's own", state_with_hooks, section=SEES, newer_than="2.4"
    ),
    reads("`load_state_dict()` between steps", loaded, section=SEES),
    reads("`torch.save(model)`", saved, section=SEES),
    reads("`pickle`", lambda m, v: call(pickle.loads(pickle.dumps(m)), v), section=SEES),
    reads("`copy.deepcopy(model)`", lambda m, v: call(copy.deepcopy(m), v), section=SEES),
    reads("`copy.copy(model)`", lambda m, v: call(copy.copy(m), v), section=SEES),
    reads("`parameters_to_vector`", vector, section=SEES),
    reads("`vector_to_parameters`", assign_vector, section=SEES),
    reads("`torch.func.functional_call`", functional_in_part, section=SEES),
    reads("`model.apply(...)`", initialized_again, section=SEES),
    reads(
        "`nn.utils.fusion`",
        fused,
        section=SEES,
        build=SmallCnn,
        shape=(2, 1, 8, 8),
    ),
    reads("`module.weight.data = ...`", data_swapped, section=SEES),
    reads("`model.to(...)` where nothing changes", lambda m, v: call(m.to("cpu"), v), section=SEES),
]

# ---- copies that follow the model


def averaged(model: Any, values: Tensor) -> tuple[Use, Use]:
    """torch's own moving average."""
    average = torch.optim.swa_utils.AveragedModel(
        model,
        multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5),  # type: ignore[no-untyped-call]
        use_buffers=True,
    )

    def use(model: Any, values: Tensor) -> Tensor:
        average.update_parameters(model)
        return call(average, values)

    return call, use


def averaged_by_hand(model: Any, values: Tensor) -> tuple[Use, Use]:
    """A moving average as people write it."""
    average: Any = copy.deepcopy(model).requires_grad_(False)

    def use(model: Any, values: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(its, 0.5)
        return call(average, values)

    return call, use


def update_bn(model: Any, values: Tensor) -> Tensor:
    """Collect the statistics of batch norms anew, in training mode and without gradients."""
    torch.optim.swa_utils.update_bn([values, values + 1], model)
    return torch.cat([one.flatten().float() for one in model.buffers()])


EMA = [
    reads("`swa_utils.AveragedModel`", section=SEES, arrange=averaged),
    reads(
        "a moving average over `zip(ema.parameters(), ...)`", section=SEES, arrange=averaged_by_hand
    ),
    reads("`swa_utils.update_bn`", update_bn, section=SEES, build=SmallCnn, shape=(2, 1, 8, 8)),
]

# ---- hooks


def hooked(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Forward hooks of the user's that look at parameters, some before all others."""
    seen: list[Tensor] = []
    held = list(model.first.parameters())

    def look(module: nn.Module, *_: Any) -> None:
        seen.append(torch.cat([one.detach().flatten() for one in held]))

    def read(module: nn.Module, *_: Any) -> None:
        seen.append(torch.cat([one.detach().flatten() for one in module.parameters()]))

    model.first.register_forward_pre_hook(look)
    model.first.register_forward_pre_hook(read, prepend=True)
    model.first.register_forward_hook(look)

    def use(model: Any, values: Tensor) -> Tensor:
        seen.clear()
        call(model, values)
        return torch.cat(seen)

    return call, use


def hooked_before() -> nn.Module:
    """A model with hooks that the user registered before `prepare`."""
    model = Small()

    def scale(module: Any, arguments: tuple[Tensor]) -> tuple[Tensor]:
        return (arguments[0] * module.weight.detach().sum(),)

    model.last.register_forward_pre_hook(scale, prepend=True)
    model.last.register_forward_hook(lambda module, _, out: out + module.bias.detach().sum())
    return model


def in_backward(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Backward hooks that read parameters."""
    seen: list[Tensor] = [torch.zeros(())]

    def look(module: Any, *_: Any) -> None:
        seen.append(module.weight.detach().sum() + sum(one.sum() for one in model.parameters()))

    model.last.register_full_backward_hook(look)
    model.first.register_full_backward_pre_hook(look)
    return call, lambda model, values: torch.stack([one.detach() for one in seen[-2:]]).sum()


HOOKS = [
    reads("forward hooks registered before `prepare`", section=SEES, build=hooked_before),
    reads(
        "forward hooks registered after `prepare`, also with `prepend=True`",
        section=SEES,
        arrange=hooked,
    ),
    reads("`register_full_backward_hook` and `_pre_hook`", section=SEES, arrange=in_backward),
]

# ---- parameters that the program keeps


def cached_by_version(model: Any, values: Tensor) -> tuple[Use, Use]:
    """The transposed weight, made anew when the weight has changed."""
    weight = model.first.weight
    cache = {weight._version: weight.detach().t().clone()}

    def use(model: Any, values: Tensor) -> Tensor:
        version = weight._version
        if version not in cache:
            cache.clear()
            cache[version] = weight.detach().t().clone()
        result: Tensor = values @ cache[version]
        return result

    return call, use


class OfManifold(nn.Parameter):
    """A parameter of a class of the program's."""


def two_classes() -> nn.Module:
    """A model with a parameter of a class of its own."""
    model: Any = Small()
    model.last.bias = OfManifold(torch.ones(4))
    return model  # type: ignore[no-any-return]


def norms(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Norms of all parameters, of whatever class, in one operation."""
    kept = list(model.parameters())
    return call, lambda model, values: torch.stack(torch._foreach_norm(kept))


class Labelled(Tensor):
    """A tensor with `__torch_function__`: operations with it give such tensors."""


def labelled(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Add a parameter to a tensor of another class."""
    scale = model.scale
    mine = torch.ones(4).as_subclass(Labelled)

    def use(model: Any, values: Tensor) -> Tensor:
        result = mine * scale
        assert type(result) is Labelled
        return result.as_subclass(Tensor)

    return call, use


def two_models(defer: bool | None) -> None:
    """Weights are of one prepared model, biases of another, as with an optimizer for each."""

    def run(session: Any) -> list[Tensor]:
        model: Any = seeded(Small)
        layers = (model.first, model.last)
        parts = [nn.ParameterList([getattr(one, name) for one in layers]) for name in _OF_A_LAYER]
        model.scale.requires_grad_(False)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.5) for part in parts]
        if session is not None:
            for part, optimizer in zip(parts, optimizers, strict=True):
                session.prepare(part, optimizer, defer=defer)
        seen = []
        for step in range(STEPS):
            values = values_of(step, (3, 4))
            model(values).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            seen.append(model(values).detach())
        return seen

    (late,) = run_ranks(1, run, core=LateCore())
    assert same_bits(run(None), late)


_OF_A_LAYER = ("weight", "bias")
KEPT = "Parameters that a program keeps"
KEEPS = [
    reads("a cache that is keyed by `p._version`", section=KEPT, arrange=cached_by_version),
    reads(
        "one operation over parameters of several classes",
        section=KEPT,
        build=two_classes,
        arrange=norms,
    ),
    Construct(KEPT, "one operation over parameters of two prepared models", two_models),
    reads("an operand that has its own `__torch_function__`", section=KEPT, arrange=labelled),
]

CONSTRUCTS = [*READS, *EMA, *HOOKS, *KEEPS]
