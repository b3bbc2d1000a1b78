"""Which weights of a model travel as factors, and what the core is told of them.

Only weights of layers that can be tapped have factors. Their biases and everything else go on as
their strategy says, also where a plan gives a whole layer the scheme `sfb`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from gradlane.errors import RefusedError
from gradlane.training.core import BLOCK_MOST_BYTES
from gradlane.training.factors.block import Part, block_bytes
from gradlane.training.factors.capture import can_factor, own_factors
from gradlane.training.factors.rebuild import rebuild
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.codec_options import RAW, ROUNDING
from gradlane.training.options.compatibility import Feature, refusal
from gradlane.training.options.options import Options
from gradlane.training.options.strategy import ADAM, FACTOR_SCHEMES, SFB, strategy_features
from gradlane.training.rendezvous.tensor_table import TensorEntry, state_entry
from gradlane.training.torch_internals import parameters_of

_BLOCK_DTYPE = "f32"
"""Blocks are cut like tensors of this dtype, whatever is in them."""
_BLOCK_ELEMENT_BYTES = 4
_DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
_SENT_AS = {codec: _DTYPES[codec] for codec in ROUNDING}
"""What factors travel in under a codec."""


@dataclass(frozen=True)
class Factored:
    """A weight that travels as factors.

    Attributes:
        entry: its place in the tensor table.
        layers: those that use it; several where it is tied.
        scheme: one of `FACTOR_SCHEMES`: whether they go to all ranks, or to one that answers.
        sent_as: the dtype that factors are rounded to; None: they travel as they are.
        parts: the word for what its blocks hold.
    """

    entry: TensorEntry
    layers: tuple[nn.Module, ...]
    scheme: str = SFB
    sent_as: torch.dtype | None = None
    parts: ClassVar[str] = "factors"

    @property
    def is_answered(self) -> bool:
        """Whether one rank makes the mean for all."""
        return self.scheme == ADAM

    @property
    def most_bytes(self) -> int:
        """Bytes of the largest block: that of a whole gradient."""
        return block_bytes(self.entry.nbytes)

    def mean(
        self,
        contributions: Sequence[Sequence[Part]],
        divisor: int,
        memory: Callable[[], Tensor],
    ) -> Tensor:
        """Return the mean of all ranks' gradients, as `gradlane.training.factors.rebuild` makes it.

        Args:
            contributions: the parts of each rank, in rank order; none is no gradient.
            divisor: number of ranks that the mean is over.
            memory: returns memory for a whole gradient.
        """
        out = memory()
        own = own_factors(self.layers[0]) if self.layers else None
        if own is None:
            rebuild(contributions, divisor, out)
        else:
            own.rebuild(contributions, divisor, out, aside=self.is_answered)
        return out

    def plan_row(self) -> dict[str, Any]:
        """Return the row of the plan's tensor whose blocks are gathered."""
        return {
            "name": self.entry.name,
            "numel": self.most_bytes // _BLOCK_ELEMENT_BYTES,
            "dtype": _BLOCK_DTYPE,
            "role": "parameter",
            "scheme": "answer" if self.is_answered else "gather",
        }

    def first_values(self) -> TensorEntry:
        """Return the entry that its values have in step 0, in which there are no blocks."""
        return state_entry(f"{self.entry.name} (first values)", self.entry.tensor)


def layers_by_weight(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return the layers of a model that can be tapped, by the `id` of their weight."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        if can_factor(module):
            weight = dict.__getitem__(parameters_of(module), "weight")
            found.setdefault(id(weight), []).append(module)
    return found


def choose_factored(
    model: nn.Module, trained: Sequence[TensorEntry], schemes: Mapping[str, str], options: Options
) -> dict[int, Factored]:
    """Choose the weights that travel as factors.

    Args:
        model: the user's.
        trained: table entries of its trained parameters.
        schemes: those of a plan, by name; empty: the options count.
        options: in force for the model.

    Returns:
        By tensor number.

    Raises:
        ValueError: a plan names a tensor that cannot; the message says which and why.
    """
    given = {index: schemes.get(entry.name, "") for index, entry in enumerate(trained)}
    wanted = {index: scheme for index, scheme in given.items() if scheme in FACTOR_SCHEMES}
    if not wanted and not (options.strategy.factors and not schemes):
        return {}
    for index, scheme in wanted.items():
        words = f"a plan that aggregates {trained[index].name!r} by scheme {scheme!r}"
        others = strategy_features(options.strategy.name, options.update_place)
        why = refusal({Feature.FACTORS: words}, others)
        if why:
            raise RefusedError(why)
    layers = layers_by_weight(model)
    chosen = {}
    for index in wanted or range(len(trained)):
        entry, scheme = trained[index], wanted.get(index, options.strategy.factors)
        own = layers.get(id(entry.tensor), [])
        problem = "" if own else "no nn.Linear or nn.Embedding with torch's own forward uses it"
        if own and block_bytes(entry.nbytes) > BLOCK_MOST_BYTES:
            problem = f"its {entry.nbytes} bytes are over the 4 GiB that a block may have"
        if not problem:
            chosen[index] = Factored(entry, tuple(own), scheme)
        elif wanted and len(entry.shape) > 1:
            raise RefusedError(
                f"the plan aggregates {entry.name!r} by scheme {scheme!r}, but it has no factors: "
                f"{problem}; plan='poseidon' chooses layers of this model"
            )
    return chosen


def with_dtypes(
    factored: Mapping[int, Factored], choices: Sequence[CodecChoice]
) -> dict[int, Factored]:
    """Return weights whose factors are rounded as their codec rounds gradients.

    Args:
        factored: by tensor number.
        choices: the codecs of all tensors.
    """
    return {
        index: replace(one, sent_as=_SENT_AS.get(choices[index].codec))
        if one.entry.dtype == torch.float32
        else one
        for index, one in factored.items()
    }


def without_codecs(
    choices: Iterable[CodecChoice], factored: Mapping[int, Factored]
) -> list[CodecChoice]:
    """Return choices of codecs with none for tensors that travel as factors or rows."""
    return [
        CodecChoice(choice.tensor, RAW, _why_not_encoded(choice, factored[index]))
        if index in factored
        else choice
        for index, choice in enumerate(choices)
    ]


def _why_not_encoded(choice: CodecChoice, one: Factored) -> str:
    if one.sent_as is not None:
        return f"travels as {one.parts}, in {choice.codec}"
    text = f"travels as {one.parts}, which are not encoded"
    if choice.codec == RAW or one.scheme not in FACTOR_SCHEMES:
        return text
    return (
        f"{text} by {choice.codec}: they are of other samples in each step, so what one step has "
        f"lost belongs to none after it; {' and '.join(ROUNDING)} go"
    )
