"""The codec of each tensor: one for all but the smallest tensors, or one by pattern.

Codecs are texts here, as plans have them (`codec_options.py`); `raw` is none. Given alone, a codec
is for all tensors but the smallest. Of a quantizer these are left in full precision as long as more
than 99 % of all parameters are encoded (Grubic et al. 2018, section 3.2.2): biases and norms hardly
cost bytes, and they suffer most. A sparse codec is for every layer (Lin et al.
2018, algorithm 1), but for tensors of one value: 1 % in full precision would be ten times as many
bytes as everything else. Given by pattern, the first pattern that fits a tensor's name counts, and
nothing else: tensors that no pattern fits are left alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from gradlane.errors import RefusedError
from gradlane.training.core import load_codecs
from gradlane.training.options.codec_options import (
    LOSSLESS,
    RAW,
    CodecOptions,
    Dgc,
    Qsgd,
    TopK,
    codec_text,
    parse_codec,
)
from gradlane.training.options.compatibility import Feature

QUANTIZED_SHARE = 0.99
"""More than this share of all parameters is encoded where one codec is given for all."""
SMALLEST_SPARSE = 2
"""Elements of the smallest tensor that a sparse codec is for: of one value none can be left out."""
ENCODED_DTYPES = ("f32", "f16", "bf16")
"""Dtypes that codecs encode; others travel as they are."""

CodecArgument: TypeAlias = str | CodecOptions | Mapping[str, str | CodecOptions | None] | None
"""The argument `codec` of `gradlane.init`."""
CodecRules: TypeAlias = str | tuple[tuple[str, str], ...]
"""A checked argument: a codec, or patterns with their codecs."""


@dataclass(frozen=True)
class CodecFacts:
    """The effect of a codec on a tensor.

    Attributes:
        codec: its canonical text.
        granule_elems: slices begin at multiples of this number of elements.
        fixed_size: whether all encodings are equally long.
        residual_width: numbers that error feedback keeps for each value.
        unbiased: whether the expectation of a decoded value is the value.
        wire_bytes_max: most bytes of the encoded tensor; exact with `fixed_size`. On a ring half of
            what goes round in all laps.
        wire_bytes_expected: bytes of its contribution and its mean on average, half of both.
    """

    codec: str
    granule_elems: int
    fixed_size: bool
    residual_width: int
    unbiased: bool
    wire_bytes_max: int
    wire_bytes_expected: int


@dataclass(frozen=True)
class CodedTensor:
    """A trained tensor as codecs see it.

    Attributes:
        name: as in `named_parameters()`.
        dtype: in the core's terms: `f32`, `f16`, ...
        sizes: sizes of its dimensions in the order of its storage, slowest first.
    """

    name: str
    dtype: str
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.sizes:
            count *= size
        return count


@dataclass(frozen=True)
class CodecChoice:
    """The codec of a tensor and the reason.

    Attributes:
        tensor: the tensor's name.
        codec: canonical text, or `raw`.
        reason: why this codec.
        facts: its effect; None for `raw`.
    """

    tensor: str
    codec: str
    reason: str
    facts: CodecFacts | None = None


def codec_rules(codec: CodecArgument) -> CodecRules:
    """Check the form of a codec argument; return `raw` for all that mean no codec.

    Text may also hold patterns, as on the command line: `*.bias=f32;*=qsgd:bits=4`.

    Raises:
        ValueError: the argument is no codec, and no mapping of patterns to codecs.
    """
    if codec is None or isinstance(codec, CodecOptions):
        return codec_text(codec)
    if isinstance(codec, str):
        text = codec.strip()
        before = text.split(":", 1)[0]
        if ";" not in text and "=" not in before:
            return RAW if text in LOSSLESS else _not_empty(text, "the codec")
        entries = [entry.partition("=") for entry in text.split(";") if entry.strip()]
        bad = next((name for name, equals, _ in entries if not equals or not name.strip()), None)
        if bad is not None:
            raise RefusedError(
                f"codec {codec!r}: {bad!r} is no pattern with a codec; write name=codec;name=codec"
            )
        codec = {name.strip(): value.strip() for name, _, value in entries}
    if not isinstance(codec, Mapping):
        raise RefusedError(
            f"codec is {codec!r}; give a text such as 'qsgd:bits=4', an object such as "
            "gradlane.codecs.Qsgd(bits=4), or a dictionary of patterns and such codecs"
        )
    rules = []
    for pattern, value in codec.items():
        text = codec_text(value)
        if not isinstance(pattern, str) or not isinstance(text, str):
            raise RefusedError(
                f"codec {pattern!r}: {value!r}: patterns are texts, and codecs texts or objects"
            )
        if any(sign in pattern for sign in ";=:"):
            raise RefusedError(
                f"codec pattern {pattern!r} has one of ; = : in it: use * or ? there"
            )
        text = _not_empty(text.strip(), f"the codec of {pattern!r}")
        rules.append((pattern, RAW if text in LOSSLESS else text))
    if all(text == RAW for _, text in rules):
        return RAW
    return tuple(rules)


def rules_text(rules: CodecRules) -> str:
    """Return rules as one text, which `codec_rules` reads."""
    if isinstance(rules, str):
        return rules
    return ";".join(f"{pattern}={codec}" for pattern, codec in rules)


def _not_empty(text: str, what: str) -> str:
    if not text:
        raise RefusedError(f"{what} is empty; write one such as 'qsgd:bits=4', or 'raw' for none")
    return text


def _codecs_of(rules: CodecRules) -> list[str]:
    """Return the codecs of rules, without `raw`."""
    texts = [rules] if isinstance(rules, str) else [text for _, text in rules]
    return [text for text in texts if text != RAW]


def check_codecs(rules: CodecRules) -> None:
    """Check the texts of all codecs.

    Raises:
        ValueError: a codec or one of its options is unknown; the message lists the known.
    """
    for text in _codecs_of(rules):
        codec_facts(text, "f32", (1,))
    limits = {text: local_clip(text) for text in _codecs_of(rules)}
    clipped = {text: limit for text, limit in limits.items() if limit}
    if len(set(clipped.values())) > 1:
        raise RefusedError(
            f"codecs {' and '.join(map(repr, clipped))} clip to different norms, and the norm is "
            "that of all gradients of a rank: give all the same clip"
        )


def local_clip(codec: str) -> float:
    """Return the `clip` of a codec: the norm that a step's gradient is clipped to; 0 for none."""
    options = parse_codec(codec)
    return options.clip if isinstance(options, Dgc) else 0.0


def without_clip(codec: str) -> str:
    """Return a codec's text without its `clip`."""
    options = parse_codec(codec)
    return replace(options, clip=0.0).text if isinstance(options, Dgc) else codec


def codec_features(rules: CodecRules, *, on_ring: bool) -> dict[Feature, str]:
    """Return what a codec asks for beside itself, each in words.

    Args:
        rules: checked.
        on_ring: whether tensors go round a ring.
    """
    found: dict[Feature, str] = {}
    for text in _codecs_of(rules):
        parsed = parse_codec(text)
        has_residual = isinstance(parsed, Dgc) or getattr(parsed, "residual", False)
        is_integer = isinstance(parsed, Qsgd) and parsed.ring == "integer"
        for feature, is_given, where in (
            (Feature.DGC, isinstance(parsed, Dgc), ""),
            (Feature.RESIDUAL, has_residual, ""),
            (Feature.RESIDUAL_ON_RING, has_residual and on_ring, " on a ring"),
            (Feature.DECAY, isinstance(parsed, TopK) and parsed.decay < 1, ""),
            (Feature.INTEGER_RING, is_integer and on_ring, " on a ring"),
        ):
            if is_given:
                found.setdefault(feature, f"codec {text!r}{where}")
    return found


def unused_codec_option(
    rules: CodecRules, *, has_ring: bool = True, encodes_means: bool = True
) -> str:
    """Return which option of a codec would have no effect, and why; empty if all have one.

    Args:
        rules: checked.
        has_ring: whether some tensors go round a ring.
        encodes_means: whether means are encoded on their way back.
    """
    for text in _codecs_of(rules):
        options = parse_codec(text)
        if isinstance(options, Qsgd) and options.ring == "integer" and not has_ring:
            return (
                f"codec {text!r} without a ring: ring=integer is how one adds up; leave it out, or "
                "use strategy 'ring'"
            )
        if (
            isinstance(options, TopK | Dgc)
            and options.broadcast_ratio is not None
            and not encodes_means
        ):
            return (
                f"codec {text!r} where means are not encoded (update='server', asgd, gathering "
                "hooks): broadcast_ratio is theirs; leave it out"
            )
    return ""


def unused_pattern(rules: CodecRules, names: Sequence[str], fitting: set[str]) -> str:
    """Return which pattern fits no tensor, with names that are near; empty if each fits some.

    A pattern that fits what one before it has decided fits.

    Args:
        rules: checked.
        names: of all tensors; frozen ones may be trained later.
        fitting: patterns that have fit tensors of the session's other models; this one's are added.
    """
    for pattern, _ in () if isinstance(rules, str) else rules:
        if any(fnmatchcase(name, pattern) for name in names):
            fitting.add(pattern)
        if pattern in fitting:
            continue
        near = get_close_matches(pattern, names, n=3, cutoff=0.5) or list(names[:3])
        return (
            f"codec pattern {pattern!r} fits no parameter of the model, which has "
            f"{', '.join(map(repr, near))}: mend the pattern, or leave it out"
        )
    return ""


def local_limit(codecs: Iterable[str], ranks: int) -> float:
    """Return the largest norm of all gradients of a rank before they are encoded; 0 for no limit.

    The norm of a mean of independent gradients is smaller than theirs by the square root of their
    number, so that a rank's own has the limit over that root (Lin et al. 2018, section 3.2).

    Args:
        codecs: of a model's tensors.
        ranks: that train.
    """
    return max(map(local_clip, codecs), default=0.0) / math.sqrt(ranks)


def codec_facts(
    text: str, dtype: str, sizes: Sequence[int], ring_ranks: int | None = None
) -> CodecFacts | None:
    """Return the effect of a codec on a tensor; None if it changes nothing.

    Args:
        text: the codec.
        dtype: the tensor's, in the core's terms.
        sizes: of its dimensions in the order of its storage.
        ring_ranks: ranks of the ring that it goes round; None: it goes to servers.

    Raises:
        ValueError: the text is no codec, or cannot go round a ring of this size.
    """
    facts = json.loads(load_codecs().codec_json(text, dtype, list(sizes), ring_ranks))
    return None if facts is None else CodecFacts(**facts)


def choose_codecs(
    rules: CodecRules, tensors: Sequence[CodedTensor], ring_ranks: int | None = None
) -> list[CodecChoice]:
    """Give each tensor its codec.

    Args:
        rules: as `codec_rules` returns them.
        tensors: all trained tensors.
        ring_ranks: ranks of the ring that they go round; None: they go to servers.

    Raises:
        ValueError: a codec is unknown, or cannot go round.
    """
    if rules == RAW:
        return [CodecChoice(tensor.name, RAW, "no codec is given") for tensor in tensors]
    if isinstance(rules, str):
        encodable = (one.numel for one in tensors if one.dtype in ENCODED_DTYPES)
        smallest = smallest_for(rules, encodable)
        return [_by_size(rules, tensor, smallest, ring_ranks) for tensor in tensors]
    return [_by_pattern(rules, tensor, ring_ranks) for tensor in tensors]


def smallest_for(codec: str, numels: Iterable[int]) -> int:
    """Return the least number of elements of a tensor that a codec for all tensors is for.

    Args:
        codec: its text. A sparse one is for all of `SMALLEST_SPARSE` and more, any other for so
            many that over 99 % of all elements are encoded.
        numels: elements of each tensor that can be encoded.
    """
    if is_sparse(codec):
        return SMALLEST_SPARSE
    return smallest_encoded(numels)


def is_sparse(codec: str) -> bool:
    """Return whether a codec sends the largest values alone."""
    return isinstance(parse_codec(codec), TopK | Dgc)


def smallest_encoded(numels: Iterable[int]) -> int:
    """Return the least number of elements of an encoded tensor: over 99 % of all are encoded.

    Args:
        numels: elements of each tensor that can be encoded; 0 is returned without any.
    """
    sizes = sorted(numels)
    total, below = sum(sizes), 0
    for position, size in enumerate(sizes):
        first_of_size = position == 0 or sizes[position - 1] < size
        if first_of_size and position > 0 and total - below <= QUANTIZED_SHARE * total:
            return sizes[position - 1]
        below += size
    return sizes[-1] if sizes else 0


def _by_size(text: str, tensor: CodedTensor, smallest: int, ring_ranks: int | None) -> CodecChoice:
    if tensor.dtype in ENCODED_DTYPES and tensor.numel < smallest:
        reason = f"below {smallest:,} elements; the others are over 99 % of all"
        if is_sparse(text):
            reason = "a single value, of which none can be left out"
        return CodecChoice(tensor.name, RAW, reason)
    return _made(text, tensor, "the codec for all", ring_ranks)


def _by_pattern(
    rules: Iterable[tuple[str, str]], tensor: CodedTensor, ring_ranks: int | None
) -> CodecChoice:
    for pattern, text in rules:
        if fnmatchcase(tensor.name, pattern):
            return _made(text, tensor, f"fits {pattern!r}", ring_ranks)
    return CodecChoice(tensor.name, RAW, "fits no pattern")


def _made(text: str, tensor: CodedTensor, reason: str, ring_ranks: int | None) -> CodecChoice:
    if text == RAW:
        return CodecChoice(tensor.name, RAW, reason)
    if tensor.dtype not in ENCODED_DTYPES:
        known = ", ".join(ENCODED_DTYPES)
        return CodecChoice(tensor.name, RAW, f"{tensor.dtype}: codecs are for {known}")
    if tensor.numel == 0:
        return CodecChoice(tensor.name, RAW, "has no elements")
    facts = codec_facts(text, tensor.dtype, tensor.sizes, ring_ranks)
    if facts is None:
        return CodecChoice(tensor.name, RAW, f"{text} changes nothing of {tensor.dtype}")
    if facts.fixed_size and facts.wire_bytes_max >= tensor.numel * _bytes_of(tensor.dtype):
        what = f"{facts.codec} would take {facts.wire_bytes_max} bytes"
        return CodecChoice(tensor.name, RAW, f"{what}, not fewer than it has")
    return CodecChoice(tensor.name, facts.codec, reason, facts)


def _bytes_of(dtype: str) -> int:
    return 4 if dtype == "f32" else 2


def rows_with_codecs(
    rows: Sequence[Mapping[str, Any]],
    tensors: Sequence[CodedTensor],
    choices: Sequence[CodecChoice],
) -> list[dict[str, Any]]:
    """Return rows of a tensor table with the codecs of the first ones.

    Args:
        rows: the plan's tensors, those of `tensors` first.
        tensors: the trained ones.
        choices: their codecs.
    """
    made = [dict(row) for row in rows]
    for row, tensor, choice in zip(made, tensors, choices, strict=False):
        if choice.codec != RAW:
            row.update(codec=choice.codec, sizes=list(tensor.sizes))
    return made
