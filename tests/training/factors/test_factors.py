"""Sums that are rebuilt from factors against gradients that autograd computes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from gradlane.planning.simulation.profiles import Profile, ProfileTensor
from gradlane.planning.simulation.scenarios import Cluster, narrow_tensors
from gradlane.training import factors
from gradlane.training.factors.block import BlockError, Dense, Part, pack, unpack
from gradlane.training.factors.factored_weights import Factored, with_dtypes
from gradlane.training.options.codec_choice import choose_codecs, codec_rules
from gradlane.training.rendezvous.tensor_table import build_table

Layer = nn.Linear | nn.Embedding


class Collector:
    """Takes the factors of one rank's layers, as blocks of bytes."""

    def __init__(self) -> None:
        self.parts: dict[int, list[Part]] = {}
        self.wants = True

    def wants_factors(self, index: int) -> bool:
        return self.wants

    def take_factors(self, index: int, part: Part) -> None:
        # What is kept is a copy: the next operation of the program may write over the memory.
        self.parts.setdefault(index, []).extend(through_bytes([part], self.shapes[index]))

    def end_parts(self, index: int) -> None:
        pass

    def tap(self, *layers: Layer) -> None:
        self.shapes: dict[int, Tensor] = {i: layer.weight for i, layer in enumerate(layers)}
        for index, layer in enumerate(layers):
            assert factors.can_factor(layer)
            factors.install(layer, self, index)


def through_bytes(parts: list[Part], weight: Tensor) -> list[Part]:
    return unpack(pack(parts), weight.shape, weight.dtype, sender=0)


def mean_of(collectors: list[Collector], index: int) -> Tensor:
    weight = collectors[0].shapes[index]
    out = torch.full_like(weight, float("nan")).detach()
    contributions = []
    for collector in collectors:
        parts = list(collector.parts.get(index, []))
        local = collector.shapes[index].grad
        contributions.append(([Dense(local)] if local is not None else []) + parts)
    factors.rebuild(contributions, len(collectors), out)
    return out


def gradient_of(parameter: Tensor | None) -> Tensor:
    assert parameter is not None and parameter.grad is not None
    return parameter.grad.double()


def expected_of(layers: Sequence[Layer]) -> Tensor:
    gradients = [gradient_of(layer.weight) for layer in layers]
    return torch.stack(gradients).sum(0) / len(layers)


def run_ranks(
    make: Callable[[], Any], program: Callable[[Any, int], None], ranks: int = 3
) -> tuple[list[Any], list[Any], list[Collector]]:
    """The same program on plain layers and on tapped ones: one pair for each rank."""
    torch.manual_seed(7)
    plain = [make() for _ in range(ranks)]
    for layer in plain[1:]:
        layer.load_state_dict(plain[0].state_dict())
    tapped = copy.deepcopy(plain)
    collectors = []
    for rank in range(ranks):
        collectors.append(Collector())
        collectors[rank].tap(tapped[rank])
        for layer in (plain[rank], tapped[rank]):
            torch.manual_seed(100 + rank)
            program(layer, rank)
    return plain, tapped, collectors


def close(found: Tensor, expected: Tensor, bits: int = 20) -> None:
    if expected.numel() == 0:
        return
    scale = float(expected.abs().max()) + 1e-30
    assert float((found.double() - expected).abs().max()) <= scale * 2.0**-bits * 8


@settings(max_examples=20, deadline=None)
@given(
    inputs=st.integers(1, 9),
    outputs=st.integers(1, 9),
    leading=st.lists(st.integers(0, 3), min_size=0, max_size=3),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_linear_with_any_leading_dimensions(
    inputs: int, outputs: int, leading: list[int], bias: bool, dtype: torch.dtype
) -> None:
    def program(layer: Any, rank: int) -> None:
        # Ranks have batches of different sizes.
        sizes = [*leading[:-1], leading[-1] + rank] if leading else []
        batch = torch.randn(*sizes, inputs, dtype=dtype, requires_grad=True)
        (layer(batch) ** 2).sum().backward()
        assert batch.grad is not None
        layer.seen = batch.grad.clone()

    plain, tapped, collectors = run_ranks(
        lambda: nn.Linear(inputs, outputs, bias=bias, dtype=dtype), program
    )
    for layer, other in zip(plain, tapped, strict=True):
        assert other.weight.grad is None
        close(other.seen, layer.seen.double())
        if bias:
            close(other.bias.grad, layer.bias.grad.double())
    close(mean_of(collectors, 0), expected_of(plain))


def test_all_ranks_rebuild_the_same_bits() -> None:
    def program(layer: Any, rank: int) -> None:
        layer(torch.randn(5 + rank, 33)).square().sum().backward()

    _, _, collectors = run_ranks(lambda: nn.Linear(33, 17), program)
    assert torch.equal(mean_of(collectors, 0), mean_of(collectors, 0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_parameters_are_added_up_in_f32(dtype: torch.dtype) -> None:
    def program(layer: Any, rank: int) -> None:
        layer(torch.randn(6, 8, dtype=dtype)).float().square().sum().backward()

    plain, _, collectors = run_ranks(lambda: nn.Linear(8, 4, dtype=dtype), program)
    close(mean_of(collectors, 0), expected_of(plain), bits=7)


def test_autocast_sends_narrow_factors() -> None:
    def program(layer: Any, rank: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(torch.randn(6, 8))
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()

    plain, tapped, collectors = run_ranks(lambda: nn.Linear(8, 4), program)
    (part,) = collectors[0].parts[0]
    assert isinstance(part, factors.LinearFactors)
    assert part.inputs.dtype == torch.bfloat16
    close(mean_of(collectors, 0), expected_of(plain), bits=7)
    assert torch.equal(plain[0].bias.grad, tapped[0].bias.grad)


def test_backward_inside_autocast_is_right_too() -> None:
    def program(layer: Any, rank: int) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            layer(torch.randn(6, 8)).float().square().sum().backward()

    plain, _, collectors = run_ranks(lambda: nn.Linear(8, 4), program)
    close(mean_of(collectors, 0), expected_of(plain), bits=7)


def test_several_backwards_and_shared_use_add_up() -> None:
    def program(layer: Any, rank: int) -> None:
        layer(torch.randn(3, 8)).square().sum().backward()
        layer(layer(torch.randn(4, 8))).sum().backward()

    plain, _, collectors = run_ranks(lambda: nn.Linear(8, 8), program)
    assert len(collectors[0].parts[0]) == 3
    close(mean_of(collectors, 0), expected_of(plain), bits=19)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    def program(layer: Any, rank: int) -> None:
        batch = torch.randn(3, 8, requires_grad=True)
        output: Any = checkpoint(lambda x: layer(x).tanh(), batch, use_reentrant=reentrant)
        output.sum().backward()

    plain, tapped, collectors = run_ranks(lambda: nn.Linear(8, 8), program)
    assert tapped[0].weight.grad is None
    close(mean_of(collectors, 0), expected_of(plain))


def test_weight_used_elsewhere_adds_a_dense_part() -> None:
    def program(layer: Any, rank: int) -> None:
        hidden = layer(torch.randn(3, 8))
        loss: Any = functional.linear(hidden, layer.weight.t()).square().sum()
        loss.backward()

    plain, tapped, collectors = run_ranks(lambda: nn.Linear(8, 4), program)
    assert tapped[0].weight.grad is not None and collectors[0].parts
    close(mean_of(collectors, 0), expected_of(plain), bits=19)


def test_gradients_that_somebody_asks_for_are_computed() -> None:
    layer = nn.Linear(8, 4)
    collector = Collector()
    collector.tap(layer)
    batch = torch.randn(3, 8)
    (asked,) = torch.autograd.grad(layer(batch).square().sum(), layer.weight)
    assert not collector.parts and asked.shape == layer.weight.shape
    # A loss made of gradients has factors of its own.
    (graph,) = torch.autograd.grad(layer(batch).square().sum(), layer.weight, create_graph=True)
    assert graph.requires_grad and not collector.parts
    (expected,) = torch.autograd.grad(graph.square().sum(), layer.weight, retain_graph=True)
    cast(Any, graph).square().sum().backward()
    close(mean_of([collector], 0), expected.double(), bits=18)
    collector.parts.clear()
    # What is in `.grad` already is added to.
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer(batch).sum().backward()
    before = layer.weight.grad.clone()
    layer(batch).sum().backward()
    assert not collector.parts and not torch.equal(before, layer.weight.grad)
    layer.weight.grad = None
    seen: list[Tensor] = []
    handle = cast(Any, layer.weight).register_hook(seen.append)
    layer(batch).sum().backward()
    assert len(seen) == 1 and not collector.parts
    handle.remove()
    layer.weight.grad = None
    # Whoever registers a hook, other than gradlane itself, wants to see the gradient.
    hooks = [
        cast(Any, layer.weight).register_post_accumulate_grad_hook(lambda _: None) for _ in range(2)
    ]
    layer(batch).sum().backward()
    assert layer.weight.grad is not None and not collector.parts
    for handle in hooks:
        handle.remove()
    layer.weight.grad = None
    layer(batch).sum().backward(inputs=[layer.bias])
    assert layer.weight.grad is None and not collector.parts
    layer(batch).sum().backward()
    assert layer.weight.grad is None and len(collector.parts[0]) == 1


def test_transforms_and_functional_calls_see_torchs_own_layer() -> None:
    layer = nn.Linear(8, 4)
    collector = Collector()
    collector.tap(layer)
    batch = torch.randn(3, 8)
    values = {name: value.detach().clone() for name, value in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        output: Tensor = torch.func.functional_call(layer, parameters, (one,))
        return output.square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, batch)
    assert each["weight"].shape == (3, 4, 8) and not collector.parts
    with torch.no_grad():
        layer(batch)
    layer.weight.requires_grad_(False)
    layer(batch).sum().backward()
    assert not collector.parts


def test_copies_and_removal_are_plain_layers() -> None:
    layer = nn.Linear(8, 4)
    collector = Collector()
    collector.tap(layer)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        copied(torch.randn(2, 8)).sum().backward()
        assert copied.weight.grad is not None and not collector.parts
    factors.remove(layer)
    assert "forward" not in layer.__dict__
    layer(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None


def test_compiled_layers_compute_their_gradient() -> None:
    layer = nn.Linear(8, 4)
    collector = Collector()
    collector.tap(layer)
    compiled = torch.compile(layer, backend="aot_eager")
    compiled(torch.randn(2, 8)).sum().backward()
    assert layer.weight.grad is not None and not collector.parts


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 12),
    dim=st.integers(1, 5),
    count=st.integers(0, 30),
    padded=st.booleans(),
)
def test_embeddings_send_the_rows_that_were_touched(
    rows: int, dim: int, count: int, padded: bool
) -> None:
    def program(layer: Any, rank: int) -> None:
        indices = torch.randint(0, rows, (count + rank,))
        layer(indices).square().sum().backward()

    plain, tapped, collectors = run_ranks(
        lambda: nn.Embedding(rows, dim, padding_idx=0 if padded else None), program
    )
    assert tapped[0].weight.grad is None
    for collector in collectors:
        for part in collector.parts.get(0, []):
            assert isinstance(part, factors.TouchedRows)
            assert part.indices.shape[0] <= min(rows, count + 2)
    close(mean_of(collectors, 0), expected_of(plain))


def test_what_cannot_be_factored() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    for layer in (
        Own(3, 3),
        nn.Conv2d(1, 1, 1),
        nn.Embedding(3, 3, sparse=True),
        nn.Embedding(3, 3, max_norm=1.0),
        nn.Embedding(3, 3, scale_grad_by_freq=True),
        nn.LayerNorm(3),
    ):
        assert not factors.can_factor(layer)
    assert factors.can_factor(nn.Linear(3, 3)) and factors.can_factor(nn.Embedding(3, 3))


def test_ranks_without_a_gradient_count_as_zeros() -> None:
    out = torch.full((2, 3), float("nan"))
    factors.rebuild([[], []], 2, out)
    assert torch.equal(out, torch.zeros(2, 3))
    factors.rebuild([[], [Dense(torch.ones(2, 3))]], 2, out)
    assert torch.equal(out, torch.full((2, 3), 0.5))


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=120), st.integers(0, 40), st.integers(0, 255))
def test_foreign_bytes_are_refused_or_understood(noise: bytes, at: int, byte: int) -> None:
    shape, dtype = torch.Size([3, 2]), torch.float32
    parts: list[Part] = [
        factors.LinearFactors(torch.randn(2, 2), torch.randn(2, 3)),
        factors.TouchedRows(torch.tensor([0, 2]), torch.randn(2, 2)),
    ]
    honest = pack(parts)
    changed = honest.clone()
    changed[at % honest.numel()] = byte
    out = torch.empty(shape)
    for block in (torch.tensor(list(noise), dtype=torch.uint8), changed, honest[: at % 90]):
        try:
            factors.rebuild([unpack(block, shape, dtype, sender=3)], 1, out)
        except BlockError as error:
            assert "rank 3" in str(error)
    assert len(unpack(honest, shape, dtype, sender=3)) == 2


@pytest.mark.parametrize("codec", ["raw", "f32", "bf16", "f16", "qsgd:bits=8", "int8", "topk"])
def test_factors_are_rounded_by_the_codecs_that_simulations_take_for_it(codec: str) -> None:
    layer = nn.Linear(40, 30, bias=False)
    entries = build_table(layer)
    choices = choose_codecs(codec_rules({"*": codec}), [one.coded() for one in entries])
    (one,) = with_dtypes({0: Factored(entries[0], (layer,))}, choices).values()
    assert (one.sent_as is not None) == (codec in ("bf16", "f16"))
    profile = Profile("one", 8, 0.1, 0.3, (ProfileTensor("weight", (30, 40), "f32", 0.0, 0.2),))
    narrow = narrow_tensors(profile, Cluster(4, 1e9, codec=codec))
    assert bool(narrow) == (one.sent_as is not None)
