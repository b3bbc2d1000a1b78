"""Ways to run a model without calling its modules one by one: compiled, traced, transformed."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.model.constructs.comparison import Small, Use, call, reads


def checkpointed(reentrant: bool) -> Use:
    """Forward with activation checkpointing."""

    def forward(model: Any, values: Tensor) -> Tensor:
        values = values.requires_grad_()
        hidden: Any = checkpoint(
            model.first, values, use_reentrant=reentrant, preserve_rng_state=False
        )
        hidden = checkpoint(
            model.last, hidden.tanh(), use_reentrant=reentrant, preserve_rng_state=False
        )
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
CONSTRUCTS = [
    reads("`checkpoint(use_reentrant=False)`", section=RUNS, forward=checkpointed(False)),
    reads("`checkpoint(use_reentrant=True)`", section=RUNS, forward=checkpointed(True)),
    reads(
        "`torch.compile(model)` after `prepare`",
        section=RUNS,
        arrange=compiled,
        note="one graph, or, with gradients of more than 1 MB, several, as under DDP, so that they "
        "leave during the backward; it waits where it begins for the parameters of its module",
    ),
    reads(
        "`torch.compile(model, fullgraph=True)`",
        section=RUNS,
        arrange=functools.partial(compiled, fullgraph=True),
        newer_than="2.4",
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
        newer_than="2.11",
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
    reads("`torch.export`", exported, section=RUNS, newer_than="2.4"),
    reads("a module built later that shares a parameter", section=RUNS, arrange=shared_later),
    reads("`torch.func.grad`, `vmap`, `jacrev` over the model", transformed, section=RUNS),
    reads("`FakeTensorMode` and other modes around a forward", under_fake_tensors, section=RUNS),
    reads("`inference_mode`, `autocast` around an evaluation", inference, section=RUNS),
]
