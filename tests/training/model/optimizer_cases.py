"""Every optimizer of `torch.optim` with every option that changes its numbers, and the page of it.

The cases are made from the signatures of the installed torch, so that an option that it learns is
tried too. `python -m tests.training.model.optimizer_cases > docs/optimizers.md` writes the page; a
test compares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from gradlane.training.model.optimizers import OPTIMIZER_SUPPORT

Parameters = Iterable[torch.nn.Parameter]

LR = 0.01

EXTRA: dict[str, dict[str, dict[str, Any]]] = {
    "ASGD": {"weight_decay": {"weight_decay": 0.1}},
    "Adadelta": {"weight_decay": {"weight_decay": 0.1}},
    "Adafactor": {"weight_decay": {"weight_decay": 0.1, "beta2_decay": -0.5}},
    "Adagrad": {
        "initial_accumulator_value": {"initial_accumulator_value": 0.3},
        "lr_decay": {"lr_decay": 0.1, "weight_decay": 0.1},
    },
    "Adam": {"weight_decay": {"weight_decay": 0.1}},
    "AdamW": {"weight_decay": {"weight_decay": 0.1}},
    "Adamax": {"weight_decay": {"weight_decay": 0.1}},
    "Muon": {"adjust_lr_fn": {"adjust_lr_fn": "match_rms_adamw"}},
    "NAdam": {"weight_decay": {"weight_decay": 0.1, "momentum_decay": 0.01}},
    "RAdam": {"weight_decay": {"weight_decay": 0.1}},
    "RMSprop": {"momentum": {"momentum": 0.9, "weight_decay": 0.1}},
    "Rprop": {"step_sizes": {"step_sizes": (1e-4, 1e-2)}},
    "SGD": {
        "momentum": {"momentum": 0.9, "dampening": 0.1},
        "weight_decay": {"weight_decay": 0.1},
    },
}
"""Options that are numbers, by class and by name of the case."""

NEEDS: dict[str, dict[str, Any]] = {
    "nesterov": {"momentum": 0.9},
    "decoupled_weight_decay": {"weight_decay": 0.1},
}
"""What else an option asks for."""

REFUSED_OPTIONS = {
    "capturable": "for parameters on the CPU, where torch refuses it too",
    "differentiable": "autograd cannot follow an update that happens later than `step()`",
}
"""Options that are refused by name, with the reason."""


@dataclass(frozen=True)
class Case:
    """One optimizer with some options."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    tensor_lr: bool = False

    def make(self, parameters: Parameters) -> Optimizer:
        """Make the optimizer."""
        lr: Any = torch.tensor(LR) if self.tensor_lr else LR
        made: Optimizer = getattr(torch.optim, self.kind)(parameters, lr=lr, **self.options)
        return made


def torch_optimizers() -> list[str]:
    """Return the names of all optimizers that the installed torch has."""
    return sorted(
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    )


def driven() -> list[str]:
    """Return the names of those that are taken, with dense gradients."""
    return [
        name
        for name in torch_optimizers()
        if OPTIMIZER_SUPPORT[name].takes_dense and not OPTIMIZER_SUPPORT[name].evaluates
    ]


def flags(kind: str) -> list[str]:
    """Return the options of a class that are on or off and are not refused."""
    signature = inspect.signature(getattr(torch.optim, kind))
    return [
        name
        for name, parameter in signature.parameters.items()
        if name in ("foreach", "fused")
        or (isinstance(parameter.default, bool) and name not in REFUSED_OPTIONS)
    ]


def takes_tensor_lr(kind: str) -> bool:
    """Whether a class takes a tensor as its learning rate."""
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    try:
        Case(kind, tensor_lr=True).make([parameter])
    except ValueError:
        return False
    return True


def cases() -> dict[str, Case]:
    """Return every case by its name."""
    found: dict[str, Case] = {}
    for kind in driven():
        found[kind] = Case(kind)
        for flag in flags(kind):
            default = inspect.signature(getattr(torch.optim, kind)).parameters[flag].default
            options = {flag: not default, **NEEDS.get(flag, {})}
            found[f"{kind}-{flag}"] = Case(kind, options)
        for name, options in EXTRA.get(kind, {}).items():
            found[f"{kind}-{name}"] = Case(kind, options)
        if takes_tensor_lr(kind):
            found[f"{kind}-tensor-lr"] = Case(kind, tensor_lr=True)
            if "foreach" in flags(kind):
                found.pop(f"{kind}-tensor-lr-foreach", None)
    return found


def capturable_cases() -> dict[str, Case]:
    """Return the cases that need an accelerator."""
    return {
        f"{kind}-capturable": Case(kind, {"capturable": True})
        for kind in driven()
        if "capturable" in inspect.signature(getattr(torch.optim, kind)).parameters
    }


def page() -> str:
    """Return the text of `docs/optimizers.md`."""
    lines = [HEAD]
    names = cases()
    for name in torch_optimizers():
        way = OPTIMIZER_SUPPORT[name]
        worker = "as gradients arrive" if way.in_parts else "whole, at `step()`"
        worker = "by evaluations" if way.evaluates else worker
        server = "yes" if way.on_servers else "no"
        options = [
            f"`{one.removeprefix(name + '-')}`" for one in names if one.startswith(name + "-")
        ]
        sparse = "as they are" if way.takes_sparse else "made dense"
        if not way.takes_dense:
            sparse += ", no others"
        lines.append(f"| `{name}` | {worker} | {server} | {sparse} | {', '.join(options)} |")
    refused = [f"| `{option}` | refused: {why} |" for option, why in REFUSED_OPTIONS.items()]
    return "\n".join(lines) + MIDDLE + "\n".join(refused) + TAIL


HEAD = """# Optimizers

`python -m tests.training.model.optimizer_cases` writes this page from the table that the program
uses and the cases that its tests run. Each case is held bit by bit against the same loop without
gradlane: parameters and optimizer state, with each step in two parts.

| `torch.optim` | `update="worker"` | `update="server"` | sparse gradients | options tried |
| --- | --- | --- | --- | --- |"""

MIDDLE = """

`Adafactor` of transformers and of timm, and `Lion` of timm and of lion-pytorch, step as gradients
arrive from their second step on. Any other class steps whole: `step()` waits for all averaged
gradients, and a warning says so. If its update of a parameter needs nothing of another parameter,
give the class an attribute `steps_per_parameter = True`, or pass `defer=True` to `prepare()`. A
subclass of one of torch's that has its own `step()` counts as another class. The attribute of a
class does not speak for a `step` that the program has wrapped on the optimizer itself: that is
stepped whole.

An optimizer that steps another one, such as a look-ahead, is prepared itself and steps whole; or
the one inside is prepared, steps as gradients arrive, and the outer one waits for what it reads.

## Options

| option | what happens |
| --- | --- |
| `foreach`, `fused` | as in torch; one call steps all tensors whose gradients are there |
| `foreach`: `SGD`, f16 and bf16 on the CPU | `step()` waits while only some have a momentum |
| `maximize` | as in torch, on servers too |
"""

TAIL = """

The hyper-parameters at the moment of `optimizer.step()` count. They are copied there, tensors
(learning rates, betas) as well, so that schedulers and assignments to `param_groups` may run at
once, before the update has happened.

- **Closures.** `optimizer.step(closure)` evaluates the closure first, once, and then steps, as
  torch does for all optimizers but `LBFGS`, which calls it itself, as often as it likes. So does
  any class with an attribute `evaluates_closure = True`. Each evaluation waits for the means of
  its gradients, which are in `.grad` when the closure returns, and gets the mean of the ranks'
  losses in place of this rank's: all optimizers decide alike how far they go. They weigh by
  `session.weight()`, if the closure calls it. An evaluation has two exchanges; all of one
  `step()` are one step of training.
- **Schedulers.** All of `torch.optim.lr_scheduler` are tested, also the ones that change momentum
  or betas (`OneCycleLR`, `CyclicLR`), stepped before or after `optimizer.step()`.
- **Step hooks** (`register_step_pre_hook`, `register_step_post_hook`) must see whole steps:
  `step()` then waits for all gradients.
- **`state_dict()` and `load_state_dict()`** may be called between steps at any time: they wait
  for the update that is due.

## Several optimizers

```python
matrices = [one for one in model.parameters() if one.ndim == 2]
others = [one for one in model.parameters() if one.ndim != 2]
optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=3e-4)]
session.prepare(model, optimizers)
```

A tuple, a dictionary, or an object of the program's own that holds them in attributes, or in lists
there, and calls the `step()` of each, is taken as well. Each parameter is in one of them. They may
be called in any order, each with its own schedulers, `zero_grad()` and `state_dict()`, and each is
stepped in parts, or whole, by itself; `GradScaler` steps them one by one.

- The first `step()` ends the step on the network. One that is not called then, in some steps or
  ever, finds what DDP leaves it: averaged gradients that stay in `.grad` until its own
  `zero_grad()`, and to which the next backward adds.
- `session.clip_grad_norm_()` clips the gradients of all, before the first one steps.
- A training step is over once each of them has stepped, or its gradients were reset: checkpoints
  are taken there.
- Ranks that step different ones of them are named.
- `update="server"` takes one optimizer.

## Sparse gradients

Gradients of `nn.Embedding(sparse=True)` and `nn.EmbeddingBag(sparse=True)`, and of everything
that `SparseAdam` steps, travel as rows, not dense: see [sparse gradients](sparse.md). The mean has
the rows that some rank has, and the optimizer steps on it as torch does on one process. Optimizers
that torch gives no sparse gradients get the mean dense, and so do `SGD` and `Adagrad` with
`momentum`, `weight_decay` or `fused`.

## Updates on the servers

With `update="server"` the owner of each slice keeps the optimizer's state of that slice, so that
it is sharded over the ranks, and parameters are sent in place of averaged gradients.

- The arithmetic follows torch's single-tensor form, operation by operation: what depends on
  the step alone (bias corrections) in double precision as Python computes it, everything else in
  f32, each operation rounded on its own. Torch's CPU kernels fuse multiplications with additions,
  and take square roots from a vector library that is not always correctly rounded, so that
  torch's own result may differ in the last bit in each step. `foreach` and `fused` say which
  kernel of torch's to use and mean nothing here. A tensor learning rate is taken as its number.
- f16 and bf16 parameters have f32 state and are rounded once a step.
- `amsgrad`, settings that are not finite, and step hooks are refused.
- Updates begin in backward: settings are those at the first gradient of a step. Changing them
  before `step()` is an error, so step schedulers after `optimizer.step()`.
- `optimizer.state_dict()` gathers the state from all ranks and is a **collective call**: call it
  on every rank, also where the result is not saved. Its result has torch's own format, whole
  tensors by parameter. It can be loaded with another number of ranks, other slices or another
  strategy, by `update="worker"`, and by torch alone; and theirs here. Every rank loads the same
  file; that they do is checked before the next step.
- For f16 and bf16 parameters call `load_state_dict()` after `prepare()`: before it, torch rounds
  the state to the parameters' dtype.
- The owners may be [ranks that train nothing](servers.md#servers-that-update).
- Take the `state_dict()` before the session is closed: afterwards the optimizer has no state, and
  refuses to be saved or stepped until one is loaded.
"""


MakeOptimizer = Callable[[Parameters], Optimizer]


if __name__ == "__main__":
    print(page(), end="")
