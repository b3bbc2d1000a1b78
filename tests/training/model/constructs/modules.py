"""Modules that use parameters without calling the module that owns them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from tests.training.model.constructs.comparison import Small, call, reads
from tests.training.model.models import Attention


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


CONSTRUCTS = [
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
