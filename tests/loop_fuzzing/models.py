"""Builds a described model, with the same values in it wherever it is built."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import checkpoint

from tests.device import DEVICE
from tests.loop_fuzzing import description

WIDTH = 4
TOKENS = 3
BATCH = 2
WORDS = 5

_building = threading.Lock()
"""Modules draw their first values from the generator that all threads share."""


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Conv2d(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(WIDTH, WIDTH, (3, 1), padding=(1, 0), bias=False)
        self.to(memory_format=torch.channels_last)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.conv(hidden.transpose(1, 2).unsqueeze(3)).squeeze(3).transpose(1, 2)  # type: ignore[no-any-return]


class Batch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Group(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Words(nn.Module):
    """Adds an embedding of words that the hidden values choose, so that it depends on the rank."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, sparse=sparse)

    def forward(self, hidden: Tensor) -> Tensor:
        chosen = (hidden.detach().float().sum(-1).nan_to_num().abs() * 7).long() % WORDS
        return hidden + self.embedding(chosen).to(hidden.dtype)  # type: ignore[no-any-return]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(WIDTH, WIDTH, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        # Under autocast torch's LSTM fails on processors that lack instructions for bfloat16.
        with torch.autocast(DEVICE.type, enabled=False):
            return self.cells(hidden)[0]  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]  # type: ignore[no-any-return]


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.up(self.down(hidden).tanh())  # type: ignore[no-any-return]


class Uncalled(nn.Module):
    """Uses the parameters of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden, self.inner.weight, self.inner.bias)


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList([torch.empty(WIDTH), torch.empty(WIDTH)])
        self.named = nn.ParameterDict({"bend": torch.empty(WIDTH)})

    def forward(self, hidden: Tensor) -> Tensor:
        scale, shift = self.listed
        return (hidden * scale + shift) * self.named["bend"]  # type: ignore[no-any-return]


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight + weight.transpose(-1, -2)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "linear_no_bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "narrow": Narrow,
    "conv": Conv,
    "conv2d_channels_last": Conv2d,
    "batch_norm": Batch,
    "layer_norm": lambda: nn.LayerNorm(WIDTH),
    "group_norm": Group,
    "words": lambda: Words(sparse=False),
    "sparse_words": lambda: Words(sparse=True),
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "attention": Attention,
    "encoder_layer": lambda: nn.TransformerEncoderLayer(
        WIDTH, 2, WIDTH, dropout=0.0, batch_first=True
    ),
    "uncalled": Uncalled,
    "listed": Listed,
}
TIES = ("linear", "linear_no_bias")
"""Kinds with a weight of their own that can be shared or computed from others."""

NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": lambda module: parametrizations.weight_norm(module),
    "old_weight_norm": lambda module: old_weight_norm(module),
    "spectral_norm": lambda module: parametrizations.spectral_norm(module),
    "old_spectral_norm": lambda module: old_spectral_norm(module),
    "symmetric": lambda module: parametrize.register_parametrization(module, "weight", Symmetric()),
}
OLD_NORMS = ("old_weight_norm", "old_spectral_norm")
"""Those whose weight is what a forward has computed."""
CALLS = (
    "plain",
    "residual",
    "checkpoint",
    "reentrant",
    "functional",
    "no_grad",
    "never",
)
EXTRAS = (
    "scale",
    "scalar",
    "empty",
    "empty_used",
    "views",
    "transposed",
    "strided",
    "complex_buffer",
    "frozen_scale",
    "complex",
    "joined",
    "hooked",
)

EXPANDED = ("expanded", "expanded_frozen")
ODD_BUFFERS = (
    "tally",
    *EXPANDED,
    "resized",
    "replaced",
    "mapped",
    "inference",
    "flags",
    "shared",
    "sliced",
    "count",
    "overlapping",
    "growing",
)
"""Buffers, and a frozen parameter, that few models have."""


class Stranger(nn.Module):
    """A described model.

    Attributes:
        moment: (step, rank) of the program; blocks that are used at times look at it.
        computes_in: what all parameters are cast to in the forward, where that is another dtype.
    """

    moment: tuple[int, int]
    computes_in: torch.dtype | None
    late: nn.Parameter | None
    scalar: Tensor
    turn: Tensor
    empty_used: Tensor
    complex: Tensor

    def __init__(self, described: description.Model) -> None:
        super().__init__()
        self.moment = (0, 0)
        self.computes_in = None
        self.late = None
        self.described = described
        self.blocks = nn.ModuleList([self._build(block) for block in described.blocks])
        for number, block in enumerate(described.blocks):
            if block.tied_to is not None:
                owner: Any = self.blocks[block.tied_to]
                tied: Any = self.blocks[number]
                tied.weight = owner.weight
        for extra in described.extras:
            self._add(extra)

    def _build(self, block: description.Block) -> nn.Module:
        if block.same_as is not None:
            return nn.Identity()
        module = KINDS[block.kind]()
        if block.norm is not None:
            NORMS[block.norm](module)
        if block.frozen:
            module.requires_grad_(False)
        return module.to(getattr(torch, block.dtype or self.described.dtype))

    def _add(self, extra: str) -> None:
        dtype = getattr(torch, self.described.dtype)
        if extra == "scale":
            self.scale = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
        elif extra == "scalar":
            self.scalar = nn.Parameter(torch.empty((), dtype=dtype))
        elif extra in ("empty", "empty_used"):
            setattr(self, extra, nn.Parameter(torch.empty(0, WIDTH, dtype=dtype)))
        elif extra == "views":
            shared = torch.empty(2 * WIDTH, dtype=dtype)
            self.first_view = nn.Parameter(shared[:WIDTH])
            self.second_view = nn.Parameter(shared[WIDTH:])
        elif extra == "joined":
            self.left = nn.Parameter(torch.empty(WIDTH // 2, dtype=dtype))
            self.right = nn.Parameter(torch.empty(WIDTH // 2, dtype=dtype))
            self.other = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
        elif extra == "hooked":
            self.hooked = nn.Parameter(torch.empty(WIDTH, dtype=dtype))
            halve: Any = self.hooked.register_hook
            halve(lambda gradient: gradient * 0.5)
        elif extra == "transposed":
            self.transposed = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=dtype).t())
        elif extra == "strided":
            # Fused optimizers of torch read what lies between.
            self.strided = nn.Parameter(torch.zeros(WIDTH, 2 * WIDTH, dtype=dtype)[:, ::2])
        elif extra == "complex_buffer":
            self.register_buffer("turn", torch.empty(WIDTH, dtype=torch.complex64))
        elif extra == "frozen_scale":
            self.frozen_scale = nn.Parameter(torch.empty(WIDTH, dtype=dtype), requires_grad=False)
        elif extra == "complex":
            self.complex = nn.Parameter(torch.empty(WIDTH, dtype=torch.complex64))
        else:
            self._add_buffer(extra, dtype)

    def _add_buffer(self, extra: str, dtype: torch.dtype) -> None:
        zeros = torch.zeros(WIDTH, dtype=dtype)
        if extra == "expanded":
            self.register_buffer(extra, (torch.arange(WIDTH) * 0.25).to(dtype).expand(3, WIDTH))
        elif extra == "expanded_frozen":
            one = torch.full((1,), 0.75, dtype=dtype).expand(WIDTH)
            self.expanded_frozen = nn.Parameter(one, requires_grad=False)
        elif extra == "resized":
            self.register_buffer(extra, torch.empty(0, dtype=dtype))
        elif extra == "inference":
            with torch.inference_mode():
                made = torch.full((WIDTH,), 0.5, dtype=dtype)
            self.register_buffer(extra, made)
        elif extra == "flags":
            self.register_buffer(extra, torch.zeros(5, dtype=torch.bool))
        elif extra == "shared":
            self.register_buffer("shared", zeros)
            self.register_buffer("shared_too", zeros)
        elif extra == "sliced":
            self.register_buffer(extra, torch.zeros(2 * WIDTH, dtype=dtype)[::2])
        elif extra == "count":
            self.register_buffer(extra, torch.zeros((), dtype=torch.int64))
        elif extra == "overlapping":
            self.register_buffer(extra, zeros)
            self.register_buffer("overlapped", zeros[1:])
        elif extra == "growing":
            self.register_buffer(extra, torch.zeros(1, dtype=dtype))
        else:
            self.register_buffer(extra, zeros)

    def forward(self, hidden: Tensor) -> Tensor:
        for block, module in zip(self.described.blocks, self.blocks, strict=True):
            if block.call == "never" or not self._is_time(block):
                continue
            if block.same_as is not None:
                module = self.blocks[block.same_as]
                block = self.described.blocks[block.same_as]
            dtype = self.computes_in or getattr(torch, block.dtype or self.described.dtype)
            hidden = _call(block.call, module, hidden.to(dtype)).tanh()
        dtype = self.computes_in or getattr(torch, self.described.dtype)
        return self._extras(hidden.to(dtype))

    def _is_time(self, block: description.Block) -> bool:
        if block.when is None:
            return True
        modulus, remainder, ranks_differ = block.when
        step, rank = self.moment
        return (step + (rank if ranks_differ else 0)) % modulus == remainder

    def _extras(self, hidden: Tensor) -> Tensor:
        for extra in self.described.extras:
            if extra == "scale":
                hidden = hidden * self.scale
            elif extra == "frozen_scale":
                hidden = hidden * self.frozen_scale
            elif extra == "scalar":
                hidden = hidden + self.scalar
            elif extra == "empty_used":
                hidden = hidden + self.empty_used.sum()
            elif extra == "views":
                hidden = hidden * self.first_view + self.second_view
            elif extra == "joined":
                # The gradients of the joined ones are views of what `other` has yet to read.
                doubled = self.other * 2
                hidden = hidden * (doubled + torch.cat([self.left, self.right]))
            elif extra == "hooked":
                hidden = hidden + self.hooked
            elif extra in ("transposed", "strided"):
                hidden = hidden @ getattr(self, extra)
            elif extra == "complex_buffer":
                hidden = hidden + self.turn.real.to(hidden.dtype)
            elif extra == "complex":
                hidden = hidden + self.complex.abs().to(hidden.dtype)
            elif extra in ODD_BUFFERS:
                hidden = self._use_buffer(extra, hidden)
        return hidden if self.late is None else hidden * self.late

    def _use_buffer(self, extra: str, hidden: Tensor) -> Tensor:
        buffers: Any = self
        used: Tensor = hidden
        seen = hidden.detach()[0, 0]
        learns = self.training and torch.is_grad_enabled()
        if extra == "tally":
            used = hidden + buffers.tally
        elif extra == "expanded":
            used = hidden + buffers.expanded[0]
        elif extra == "expanded_frozen":
            used = hidden * buffers.expanded_frozen
        elif extra == "inference":
            used = hidden + buffers.inference
        elif extra == "resized":
            if learns and not buffers.resized.numel():
                buffers.resized.resize_(WIDTH).copy_(seen)
            used = hidden + buffers.resized if buffers.resized.numel() else hidden
        elif extra == "replaced":
            if learns:
                buffers.replaced = buffers.replaced * 0.5 + seen
            used = hidden + buffers.replaced.detach()
        elif extra == "mapped":
            if learns:
                self._buffers["mapped"] = buffers.mapped * 0.5 + seen
            used = hidden + buffers.mapped.detach()
        elif learns and extra == "flags":
            buffers.flags[:WIDTH].copy_(seen > 0)
        elif learns and extra in ("shared", "sliced", "overlapping"):
            getattr(self, extra).mul_(0.5).add_(seen)
        elif learns and extra == "count":
            buffers.count += self.moment[1] + 1
        elif learns and extra == "growing":
            buffers.growing = torch.cat([buffers.growing, seen[:1]])
        return used


def _call(how: str, module: nn.Module, hidden: Tensor) -> Tensor:
    if how == "residual":
        added: Tensor = hidden + module(hidden)
        return added
    if how == "checkpoint":
        # The generator of random numbers is shared by all threads: nothing to preserve.
        return checkpoint(module, hidden, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
    if how == "reentrant":
        return checkpoint(module, hidden, use_reentrant=True, preserve_rng_state=False)  # type: ignore[no-any-return]
    if how == "functional":
        return functional_call(module, dict(module.named_parameters()), (hidden,))  # type: ignore[no-any-return]
    if how == "no_grad":
        with torch.no_grad():
            aside: Tensor = module(hidden)
        return hidden + aside
    return module(hidden)  # type: ignore[no-any-return]


class OwnParameter(nn.Parameter):
    """A parameter of a class of the program's."""


class AskedParameter(nn.Parameter):
    """One that torch asks what its operations do."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


PARAMETER_CLASSES: dict[str, type[nn.Parameter]] = {"own": OwnParameter, "asked": AskedParameter}


def build_model(described: description.Model, seed: int) -> Stranger:
    """Build a model; the same seed gives the same values.

    Args:
        described: what to build.
        seed: draws the values of all parameters and buffers.
    """
    with _building:
        model = Stranger(described)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() == 0 or 0 not in parameter.stride():
                _fill(parameter, generator)
        for name, buffer in model.named_buffers():
            if name.endswith(("_u", "_v", "weight_u", "weight_v")):
                _fill(buffer, generator)
                buffer.div_(buffer.norm() + 1e-3)
            elif buffer.is_complex():
                _fill(buffer, generator)
        for module in model.modules():
            # The old weight norm keeps the computed weight as a plain attribute.
            for hook in module._forward_pre_hooks.values():
                if isinstance(hook, WeightNorm):
                    setattr(module, hook.name, hook.compute_weight(module))
    names = [*described.classes, ""] if described.classes else []
    for parameter, name in zip(model.parameters(), itertools.cycle(names), strict=False):
        if name:
            parameter.__class__ = PARAMETER_CLASSES[name]
    return model if DEVICE.type == "cpu" else model.to(DEVICE)


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    dtype = torch.complex64 if tensor.is_complex() else torch.float32
    drawn = torch.randn(tensor.shape, generator=generator, dtype=dtype)
    tensor.copy_(drawn * 0.4 + (0.3 if tensor.dim() <= 1 else 0.0))
