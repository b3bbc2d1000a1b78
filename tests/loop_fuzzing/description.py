"""What a random training loop is made of, as plain data that prints, shrinks and is kept as JSON.

A loop says what the user's program does on every rank; it says nothing of how gradients get from
rank to rank. `reference.py` and `ranks.py` each give it a meaning of their own.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Block:
    """A part of a model's chain; it maps (batch, tokens, width) onto the same shape.

    Attributes:
        kind: which modules, see `models.KINDS`.
        call: how it is called: `plain`, `residual`, `checkpoint`, `reentrant`, `functional`,
            `no_grad`, `frozen_forward`, `never`.
        norm: what computes its weight, see `models.NORMS`, or None.
        frozen: whether its parameters are not trained.
        tied_to: number of an earlier block of the same kind whose weight it shares.
        same_as: number of an earlier block that is called in its place.
        when: (modulus, remainder, whether ranks differ): in which steps it is used.
        dtype: its own dtype, or None for the model's.
    """

    kind: str
    call: str = "plain"
    norm: str | None = None
    frozen: bool = False
    tied_to: int | None = None
    same_as: int | None = None
    when: tuple[int, int, bool] | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Model:
    """A chain of blocks and parameters that hang on the model itself.

    Attributes:
        blocks: in the order of the forward.
        extras: which odd parameters the model has, see `models.EXTRAS`.
        dtype: of all parameters.
        classes: which classes of the program's own its parameters have, see
            `models.PARAMETER_CLASSES`; in turn with plain ones.
    """

    blocks: tuple[Block, ...]
    extras: tuple[str, ...] = ()
    dtype: str = "float32"
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """An optimizer over all parameters of a model.

    Attributes:
        kind: class in `torch.optim`.
        options: keyword arguments.
        groups: number of groups; each later one has other hyper-parameters.
        scheduler: see `optimizers.SCHEDULERS`, or None.
        early_scheduler: whether the scheduler is built before `prepare`.
        wrapped: (how, what it does): a wrapper of the object's `step`, made before `prepare`.
        derived: (how, what it does): a class derived from `kind` with a `step` of its own.
        counts: where an `oddities.Counts`, in place of `kind`, counts its steps.
        outer: (how, which is prepared): a look-ahead around it, see `look_ahead.py`.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    groups: int = 1
    scheduler: str | None = None
    early_scheduler: bool = False
    wrapped: tuple[str, str] | None = None
    derived: tuple[str, str] | None = None
    counts: str | None = None
    outer: tuple[str, str] | None = None


@dataclass(frozen=True)
class Action:
    """One thing that the program does.

    Attributes:
        do: a method of `program.Program`.
        model: number of the model and of its optimizer.
        ranks: which ranks do it; None: all.
        given: its arguments.
        thread: whether a thread of its own does it, for which the program waits.
    """

    do: str
    model: int = 0
    ranks: tuple[int, ...] | None = None
    given: dict[str, Any] = field(default_factory=dict)
    thread: bool = False


@dataclass(frozen=True)
class Sharding:
    """How `fully_shard` shards the models within nodes.

    Attributes:
        local: ranks of a node.
        units: numbers of the blocks that are units, each with its blocks; the root has the rest.
        param_dtype: of parameters in forward and backward, or None for their own.
        reduce_dtype: of gradients on their way, or None for `param_dtype`.
        division: what divides gradients, see `sharded_program.DIVISIONS`.
        keeps: whether parameters stay whole from forward to backward.
        columns: whether matrices are sharded by columns.
        zeros: whether unused parameters count as zeros.
    """

    local: int = 2
    units: tuple[tuple[int, ...], ...] = ()
    param_dtype: str | None = None
    reduce_dtype: str | None = None
    division: str = ""
    keeps: bool = False
    columns: bool = False
    zeros: bool = False


@dataclass(frozen=True)
class Loop:
    """A whole program.

    Attributes:
        seed: what it was drawn from; also draws initial values, batches and late results.
        ranks: world size.
        models: one or two.
        optimizers: one a model.
        actions: in order.
        options: for `gradlane.init`.
        defer: for `Session.prepare`.
        buffers: for `Session.prepare`.
        strange: constructs that may be refused, see `verdict.REFUSALS`.
        defaults: torch's defaults: `dtype`, and `device` in the calls that `device_in` names.
        sharding: how models are sharded within nodes; None: every rank has whole ones.
    """

    seed: int
    ranks: int
    models: tuple[Model, ...]
    optimizers: tuple[Optimizer, ...]
    actions: tuple[Action, ...]
    options: dict[str, Any] = field(default_factory=dict)
    defer: bool | None = None
    buffers: str = "broadcast"
    strange: tuple[str, ...] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    sharding: Sharding | None = None

    @property
    def serves(self) -> bool:
        """Whether updates run on the servers."""
        return self.options.get("update") == "server"

    def to_json(self) -> str:
        """Return the loop as JSON without what has its default value, an action a line."""
        parts = []
        for name, value in _sparse(self).items():
            text = json.dumps(value)
            if name in ("models", "optimizers", "actions"):
                text = "[\n  " + ",\n  ".join(json.dumps(one) for one in value) + "\n ]"
            parts.append(f'"{name}": {text}')
        return "{\n " + ",\n ".join(parts) + "\n}"

    @staticmethod
    def from_json(text: str) -> Loop:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        data["models"] = tuple(_model(one) for one in data["models"])
        data["optimizers"] = tuple(_optimizer(one) for one in data["optimizers"])
        data["actions"] = tuple(_action(one) for one in data["actions"])
        data["strange"] = tuple(data.get("strange", ()))
        if data.get("sharding") is not None:
            units = tuple(tuple(one) for one in data["sharding"].get("units", ()))
            data["sharding"] = Sharding(**{**data["sharding"], "units": units})
        return Loop(**data)


def _model(data: dict[str, Any]) -> Model:
    blocks = tuple(
        Block(**{**one, "when": tuple(one["when"]) if one.get("when") else None})
        for one in data["blocks"]
    )
    return Model(
        **{
            **data,
            "blocks": blocks,
            "extras": tuple(data.get("extras", ())),
            "classes": tuple(data.get("classes", ())),
        }
    )


def _optimizer(data: dict[str, Any]) -> Optimizer:
    pairs = {name: tuple(data[name]) for name in ("wrapped", "derived", "outer") if data.get(name)}
    return Optimizer(**{**data, **pairs})


def _action(data: dict[str, Any]) -> Action:
    ranks = data.get("ranks")
    return Action(**{**data, "ranks": None if ranks is None else tuple(ranks)})


def _sparse(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        sparse = {}
        for one in dataclasses.fields(value):
            held = getattr(value, one.name)
            default = (
                one.default_factory()
                if one.default_factory is not dataclasses.MISSING
                else one.default
            )
            if held != default:
                sparse[one.name] = _sparse(held)
        return sparse
    if isinstance(value, (list, tuple)):
        return [_sparse(one) for one in value]
    return value
