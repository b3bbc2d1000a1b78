"""Constructs that read parameters in other ways than by calling the module that owns them.

Each is trained for some steps twice: alone, and prepared on a core that delivers a result only when
it is waited for. A read that does not wait sees the values of the step before, and differs.
"""

from __future__ import annotations

import copy
import functools
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import fusion, prune
from torch.utils.checkpoint import checkpoint

from tests.adapter.constructs import Construct
from tests.adapter.late_core import LateCore
from tests.adapter.models import Attention, SmallCnn, seeded
from tests.adapter.ranks import run_ranks
from tests.adapter.reference import same_bits

STEPS = 4

Use = Callable[[Any, Tensor], Tensor]


class Small(nn.Module):
    """Two layers and a parameter of its own; inputs (N, 4), outputs (N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.first(values).tanh()) * self.scale  # type: ignore[no-any-return]


def call(model: Any, values: Tensor) -> Tensor:
    """Call the model."""
    result: Tensor = model(values)
    return result


def values_of(step: int, shape: tuple[int, ...]) -> Tensor:
    """The inputs of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(shape, generator=generator)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    forward: Use,
    use: Use,
    shape: tuple[int, ...],
) -> list[Tensor]:
    """Train some steps; return what the construct saw after each, and the parameters."""
    seen = []
    for step in range(STEPS):
        values = values_of(step, shape)
        forward(model, values).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(use(model, values).detach().clone())
    return seen + [parameter.detach().clone() for parameter in model.parameters()]


def compare(
    defer: bool | None,
    *,
    build: Callable[[], nn.Module],
    forward: Use = call,
    use: Use = call,
    arrange: Callable[[Any, Tensor], tuple[Use, Use]] | None = None,
    shape: tuple[int, ...] = (3, 4),
) -> None:
    """Assert that a construct sees the same bits in a prepared model as in a plain one.

    Args:
        defer: as in `prepare`.
        build: makes the model, the same each time.
        forward: the training forward.
        use: the construct; its result is compared after each step.
        arrange: called once the model is prepared, instead of giving the two above.
        shape: of the inputs.
    """

    def run(session: Any) -> list[Tensor]:
        torch.manual_seed(5)
        model = seeded(build)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        if session is not None:
            session.prepare(model, optimizer, defer=defer)
        uses = arrange(model, values_of(0, shape)) if arrange else (forward, use)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(model, optimizer, *uses, shape)

    plain = run(None)
    (late,) = run_ranks(1, run, core=LateCore())
    assert same_bits(plain, late), [
        torch.equal(one, other) for one, other in zip(plain, late, strict=True)
    ]
    seen = plain[1:STEPS]
    assert not all(torch.equal(plain[0], one) for one in seen), "it sees nothing of the training"


def reads(
    name: str,
    use: Use = call,
    *,
    build: Callable[[], nn.Module] = Small,
    section: str = "Modules that use parameters without calling their owner",
    note: str = "",
    refused: str | None = None,
    defers: tuple[bool | None, ...] = (None, False),
    **settings: Any,
) -> Construct:
    """Describe a construct by what it does with a model; see `compare`."""
    check = functools.partial(compare, build=build, use=use, **settings)
    return Construct(section, name, check, refused=refused, note=note, defers=defers)


# ---- modules


def in_eval(model: Any, values: Tensor) -> Tensor:
    """Evaluate without gradients."""
    model.eval()
    with torch.no_grad():
        result: Tensor = model(values)
    model.train()
    return result


def encoder_layer() -> nn.Module:
    """A transformer layer, in whose evaluation torch may take a path without calls."""
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def encoder() -> nn.Module:
    """A stack of transformer layers."""
    return nn.TransformerEncoder(encoder_layer(), 2)  # type: ignore[arg-type]


class Recurrent(nn.Module):
    """An LSTM, which holds its weights in a list besides; inputs (T, N, 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, bidirectional=True)
        self.cell = nn.GRUCell(8, 4)

    def forward(self, values: Tensor) -> Tensor:
        hidden, _ = self.lstm(values)
        return self.cell(hidden[-1])  # type: ignore[no-any-return]


class Containers(nn.Module):
    """Parameters in lists and dictionaries, used by their owner's parent."""

    def __init__(self) -> None:
        super().__init__()
        self.several = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.named = nn.ParameterDict({"one": nn.Parameter(torch.ones(4))})
        self.linear = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.linear(values) * self.several[0] + self.several[1] * self.named["one"]  # type: ignore[no-any-return]


class HoldsByList(nn.Module):
    """Ties a weight by a plain list, past torch's registration."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.tied = HeldWeight([self.last.weight])

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.tied(values))  # type: ignore[no-any-return]


class HeldWeight(nn.Module):
    """Uses parameters that it has no part in."""

    def __init__(self, held: list[Tensor]) -> None:
        super().__init__()
        self.held = {"weights": (held,)}

    def forward(self, values: Tensor) -> Tensor:
        return values @ self.held["weights"][0][0]


class Forwarding(Small):
    """Finds attributes in other places, as wrappers do."""

    def __getattr__(self, name: str) -> Any:
        if name == "gain":
            return self.__dict__["_parameters"]["scale"]
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("first"), name)

    def forward(self, values: Tensor) -> Tensor:
        return nn.functional.linear(values, self.weight, self.bias) * self.gain + self.last(values)  # type: ignore[no-any-return]


def old_weight_norm() -> nn.Module:
    """Weight norm as it was before parametrizations."""
    model = Small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nn.utils.weight_norm(model.first)
    return model


def old_spectral_norm() -> nn.Module:
    """Spectral norm as it was before parametrizations."""
    model = Small()
    nn.utils.spectral_norm(model.first)
    return model


def new_weight_norm() -> nn.Module:
    """Weight norm by parametrization."""
    model = Small()
    nn.utils.parametrizations.weight_norm(model.first)
    return model


def new_spectral_norm() -> nn.Module:
    """Spectral norm by parametrization."""
    model = Small()
    nn.utils.parametrizations.spectral_norm(model.first)
    return model


class Symmetric(nn.Module):
    """A user's own parametrization with a parameter in it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4, 4))

    def forward(self, weight: Tensor) -> Tensor:
        return (weight.triu() + weight.triu(1).T) * self.gain


def own_parametrization() -> nn.Module:
    """A parametrization of the user's, on top of torch's."""
    model = Small()
    nn.utils.parametrizations.orthogonal(model.last)
    nn.utils.parametrize.register_parametrization(model.first, "weight", Symmetric())
    return model


def cached_parametrization(model: Any, values: Tensor) -> Tensor:
    """Read parametrized weights within torch's cache."""
    with nn.utils.parametrize.cached():
        return call(model, values) + call(model, values)


def pruned() -> nn.Module:
    """A pruned layer, whose weight is made by a hook."""
    model = Small()
    prune.l1_unstructured(model.first, "weight", amount=0.5)  # type: ignore[no-untyped-call]
    return model


def prune_again(model: Any, values: Tensor) -> Tensor:
    """Prune a pruned layer further, which looks at its weights."""
    prune.l1_unstructured(model.first, "weight", amount=1)  # type: ignore[no-untyped-call]
    return call(model, values)


MODULES = [
    reads("`nn.MultiheadAttention`", build=Attention, shape=(2, 5, 8)),
    reads("`nn.MultiheadAttention` in evaluation", in_eval, build=Attention, shape=(2, 5, 8)),
    reads("`nn.TransformerEncoderLayer`", build=encoder_layer, shape=(2, 5, 8)),
    reads(
        "`nn.TransformerEncoder` in evaluation",
        lambda m, v: (in_eval(m, v) * 1e4).round(),
        build=encoder,
        shape=(2, 5, 8),
        note="its fused path is not taken while hooks are on the model: equal to rounding",
    ),
    reads("`nn.LSTM`, `nn.GRUCell`", build=Recurrent, shape=(3, 2, 4)),
    reads(
        "`lstm.forward(...)`, past its hooks",
        lambda m, v: m.lstm.forward(v)[0],
        build=Recurrent,
        shape=(3, 2, 4),
    ),
    reads("`module.forward(...)`, past its hooks", lambda m, v: m.first.forward(v)),
    reads("`nn.ParameterList`, `nn.ParameterDict`", build=Containers),
    reads("a parameter of another module, in a plain list or dict of a module", build=HoldsByList),
    reads("a module with its own `__getattr__`", build=Forwarding),
    reads("`nn.utils.weight_norm` (old)", build=old_weight_norm),
    reads("`nn.utils.spectral_norm` (old)", build=old_spectral_norm),
    reads("`parametrizations.weight_norm`", build=new_weight_norm),
    reads("`parametrizations.spectral_norm`", build=new_spectral_norm),
    reads(
        "`parametrizations.orthogonal`, a parametrization of one's own", build=own_parametrization
    ),
    reads("`parametrize.cached()`", cached_parametrization, build=own_parametrization),
    reads("`nn.utils.prune`, before `prepare`", build=pruned),
    reads("`nn.utils.prune` on a pruned layer, between steps", prune_again, build=pruned),
]

# ---- reads of the model


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
    reads("`state_dict()` with hooks of one's own", state_with_hooks, section=SEES),
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

# ---- running it in other ways


def checkpointed(reentrant: bool) -> Use:
    """Forward with activation checkpointing."""

    def forward(model: Any, values: Tensor) -> Tensor:
        values = values.requires_grad_()
        hidden: Any = checkpoint(model.first, values, use_reentrant=reentrant)
        hidden = checkpoint(model.last, hidden.tanh(), use_reentrant=reentrant)
        result: Tensor = hidden * model.scale
        return result

    return forward


def compiled(
    model: Any, values: Tensor, backend: str = "eager", **settings: Any
) -> tuple[Use, Use]:
    """Compile the prepared model."""
    torch._dynamo.reset()
    ready: Any = torch.compile(model, backend=backend, **settings)
    return (lambda _, values: call(ready, values),) * 2


def compiled_in_place(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Compile the layers of the prepared model one by one."""
    torch._dynamo.reset()
    model.first.compile(backend="aot_eager")
    model.last.compile(backend="aot_eager")
    return call, call


def compiled_around(model: Any, values: Tensor, fullgraph: bool = False) -> tuple[Use, Use]:
    """Compile a function that calls the model and reads a parameter."""
    torch._dynamo.reset()

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def around(values: Tensor) -> Tensor:
        bare = nn.functional.linear(values, model.last.weight)
        result: Tensor = model(values) + bare * model.scale
        return result

    return (lambda _, values: around(values),) * 2


def backward_compiled(model: Any, values: Tensor) -> Tensor:
    """Run forward and backward in compiled code, and leave the caller's backward nothing to do."""
    torch._dynamo.reset()

    @torch.compile(backend="eager")
    def run() -> None:
        call(model, values).square().mean().backward()  # type: ignore[no-untyped-call]

    with torch._dynamo.config.patch(compiled_autograd=True):
        run()
    return torch.zeros(1, requires_grad=True)


def compiled_before() -> nn.Module:
    """A model that was compiled before `prepare`."""
    torch._dynamo.reset()
    model: Any = torch.compile(Small(), backend="eager")
    return model  # type: ignore[no-any-return]


def traced(model: Any, values: Tensor) -> Tensor:
    """Trace the model while an update is due, and call the result twice."""
    program: Any = torch.jit.trace(model, (values,), check_trace=False)  # type: ignore[no-untyped-call]
    program(values)
    return call(program, values)


def traced_by_fx(model: Any, values: Tensor) -> Tensor:
    """Take the model apart into a graph, which shares its parameters."""
    return call(torch.fx.symbolic_trace(model), values)


def under_fake_tensors(model: Any, values: Tensor) -> Tensor:
    """Run the model under a mode in which nothing is computed, then for real."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        model(values)
    return call(model, values)


def exported(model: Any, values: Tensor) -> Tensor:
    """Export the model."""
    return call(torch.export.export(model, (values,)).module(), values)


def transformed(model: Any, values: Tensor) -> Tensor:
    """Call the model inside transforms of torch.func, where memory must not be written."""
    gradient: Any = torch.func.grad(lambda one: model(one).square().sum())(values)
    jacobian: Any = torch.func.vmap(torch.func.jacrev(model))(values)
    return gradient + jacobian.sum(1)  # type: ignore[no-any-return]


def inference(model: Any, values: Tensor) -> Tensor:
    """Evaluate in inference mode, with autocast."""
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        result: Tensor = model(values).float()
    return result.clone()


class WithScript(nn.Module):
    """A model with a traced and a scripted part, whose inside no hook reaches."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.traced: Any = torch.jit.trace(  # type: ignore[no-untyped-call]
                nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (torch.ones(1, 4),), check_trace=False
            )
            self.scripted: Any = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        self.last = nn.Linear(4, 4)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.scripted(self.traced(values)))  # type: ignore[no-any-return]


def script_alone(model: Any, values: Tensor) -> Tensor:
    """Call a scripted part by itself."""
    return torch.cat([call(model.scripted, values), call(model.traced, values)])


def shared_later(model: Any, values: Tensor) -> tuple[Use, Use]:
    """Build a module after `prepare` that shares a parameter with the model."""
    other = nn.Linear(4, 4)
    other.weight = model.first.weight
    held = nn.ParameterList(model.last.parameters())

    def use(model: Any, values: Tensor) -> Tensor:
        return call(other, values).detach() + held[0].detach()[:3]  # type: ignore[no-any-return]

    return call, use


RUNS = "Running the model in other ways"
RUNNING = [
    reads("`checkpoint(use_reentrant=False)`", section=RUNS, forward=checkpointed(False)),
    reads("`checkpoint(use_reentrant=True)`", section=RUNS, forward=checkpointed(True)),
    reads(
        "`torch.compile(model)` after `prepare`",
        section=RUNS,
        arrange=compiled,
        note="one graph; it waits where it begins for the parameters of its module",
    ),
    reads(
        "`torch.compile(model, fullgraph=True)`",
        section=RUNS,
        arrange=functools.partial(compiled, fullgraph=True),
    ),
    reads(
        "`torch.compile(model)` before `prepare`",
        section=RUNS,
        build=compiled_before,
    ),
    reads(
        "`layer.compile()`, layer by layer",
        section=RUNS,
        arrange=compiled_in_place,
        note="updates overlap between the layers",
    ),
    reads(
        "`torch.compile` of a function that calls the model or reads its parameters",
        section=RUNS,
        arrange=compiled_around,
        note="the graph ends where it waits",
    ),
    reads(
        "`torch.compile(fullgraph=True)` of such a function, or of a layer of `torch.nn` by itself",
        section=RUNS,
        arrange=functools.partial(compiled_around, fullgraph=True),
        refused="gradlane waits here for parameters whose update is under way",
        note="compile the model, call `session.synchronize()` before, or use `defer=False`",
        defers=(None,),
    ),
    reads(
        "`compiled_autograd`",
        section=RUNS,
        forward=backward_compiled,
    ),
    reads("`torch.jit.trace` of the prepared model", traced, section=RUNS),
    reads("traced and scripted submodules", section=RUNS, build=WithScript),
    reads(
        "a traced or scripted submodule called by itself",
        script_alone,
        section=RUNS,
        build=WithScript,
    ),
    reads(
        "`torch.jit.script` of the prepared model",
        lambda m, v: call(torch.jit.script(m), v),
        section=RUNS,
        refused="script its modules before prepare(), or after session.close()",
    ),
    reads("`torch.fx.symbolic_trace`", traced_by_fx, section=RUNS),
    reads("`torch.export`", exported, section=RUNS),
    reads("a module built later that shares a parameter", section=RUNS, arrange=shared_later),
    reads("`torch.func.grad`, `vmap`, `jacrev` over the model", transformed, section=RUNS),
    reads("`FakeTensorMode` and other modes around a forward", under_fake_tensors, section=RUNS),
    reads("`inference_mode`, `autocast` around an evaluation", inference, section=RUNS),
]

CONSTRUCTS = [*MODULES, *READS, *EMA, *HOOKS, *RUNNING]
