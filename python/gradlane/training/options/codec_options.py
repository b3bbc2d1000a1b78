"""The codecs that gradients can travel in, as objects and as texts: `Qsgd(bits=8)`, `qsgd:bits=8`.

Their arithmetic and the rules of their texts are in `crates/gradlane-codec/src/encode/`, where a
new codec goes first. Python reads texts in `parse_codec` alone: the core checks a text and writes
it in full, and the object has the numbers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import ClassVar

from gradlane.errors import RefusedError
from gradlane.training.core import load_codecs
from gradlane.training.options.option_fields import (
    OptionGroup,
    check_options,
    option,
    option_rules,
    read_int,
)

RAW = "raw"
"""No codec: the bytes of the elements themselves."""
LOSSLESS = (RAW, "f32")
"""Texts that mean no codec."""
ROUNDING = ("bf16", "f16")
"""Codecs that round each value by itself; factors travel in these, and as they are with others."""
_BUCKETS = {1: 128, 2: 128, 4: 512, 8: 512, 16: 8192}
"""Values of a bucket of `Qsgd` by its bits, as in Grubic et al. 2018."""
_OPTIMAL_BITS = (2, 4)


@dataclass(frozen=True, repr=False)
class CodecOptions(OptionGroup):
    """A codec with its options; `text` is how plans and command lines write it."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        check_options(self, lambda name: f"{type(self).__name__}.{name}")

    @property
    def text(self) -> str:
        """The name, and the options that are not the defaults."""
        given = []
        for one in fields(self):
            value = getattr(self, one.name)
            if value != one.default:
                switch = "on" if value else "off"
                given.append(f"{one.name}={switch if isinstance(value, bool) else value}")
        return f"{self.name}:{','.join(given)}" if given else self.name


def _residual(default: bool) -> bool:
    """Return the field of error feedback."""
    made: bool = option(
        default, "Add what a step did not send to the next one's gradient (error feedback)."
    )
    return made


def _check_bucket(codec: _Bucketed | Qsgd | TopK) -> None:
    bucket = codec.bucket
    has_names = isinstance(codec, _Bucketed)
    if bucket in ("column", "tensor") and has_names:
        return
    if not isinstance(bucket, int) or bucket % 32 or not 32 <= bucket <= 1 << 20:
        names = "'column', 'tensor' or " if has_names else ""
        raise RefusedError(
            f"{type(codec).__name__}.bucket is {bucket!r}; it must be {names}a multiple of 32 from "
            "32 to 1048576"
        )


def _read_bucket(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True, repr=False)
class Bf16(CodecOptions):
    """The upper half of an f32, rounded to nearest even: 2 bytes a value."""

    name = "bf16"
    residual: bool = _residual(False)


@dataclass(frozen=True, repr=False)
class F16(CodecOptions):
    """IEEE 754 binary16, rounded to nearest even: 2 bytes a value; larger ones become infinity."""

    name = "f16"
    residual: bool = _residual(False)


@dataclass(frozen=True, repr=False)
class Qsgd(CodecOptions):
    """Random, unbiased rounding to few levels of a bucket's scale (Alistarh et al. 2017)."""

    name = "qsgd"
    bits: int = option(4, "Bits of a value's code.", unit="bits", known=(1, 2, 4, 8, 16))
    bucket: int | None = option(
        None,
        "Consecutive values that share a scale: a multiple of 32 up to 1048576; if absent 128, "
        "128, 512, 512 and 8192 for 1, 2, 4, 8 and 16 bits.",
        read=read_int,
    )
    norm: str = option(
        "max",
        "The scale of a bucket: its largest magnitude, or its 2-norm.",
        known=("max", "l2"),
    )
    levels: str | None = option(
        None,
        "`sign`: 2^(bits-1) - 1 magnitudes with a sign, and zero; `uniform`: the ends of "
        "2^bits - 1 equal intervals, without zero; `optimal`, with 2 or 4 bits: where each "
        "bucket's variance is smallest, which takes long; if absent `sign`, and `uniform` for 1 "
        "bit.",
        known=("sign", "uniform", "optimal"),
    )
    ring: str = option(
        "hops",
        "How a ring adds up: `hops`: each decodes, adds and encodes; `integer`: codes of one scale "
        "are added as integers.",
        known=("hops", "integer"),
    )
    residual: bool = _residual(False)

    @property
    def bucket_values(self) -> int:
        """Number of values that share a scale."""
        return self.bucket or _BUCKETS[self.bits]

    @property
    def levels_in_force(self) -> str:
        """Where the levels stand."""
        return self.levels or self._usual_levels

    @property
    def _usual_levels(self) -> str:
        return "uniform" if self.bits == 1 else "sign"

    def __post_init__(self) -> None:
        """Check every option; the usual bucket and the usual levels are written as none.

        Raises:
            ValueError: an option is out of its range, or does not go with another one.
        """
        super().__post_init__()
        if self.bucket == _BUCKETS[self.bits]:
            object.__setattr__(self, "bucket", None)
        if self.bucket is not None:
            _check_bucket(self)
        levels = self.levels_in_force
        if levels != "sign" and self.ring == "integer":
            raise RefusedError(
                f"Qsgd.levels is {levels!r} with ring='integer', where a rank without a gradient "
                "adds zeros and all ranks have the same levels: use levels='sign'"
            )
        if levels == "sign" and self.bits == 1:
            raise RefusedError(
                "Qsgd.levels is 'sign' with bits=1, where a sign leaves no bit for a magnitude: "
                "use levels='uniform'"
            )
        if levels == "optimal" and self.bits not in _OPTIMAL_BITS:
            raise RefusedError(
                f"Qsgd.levels is 'optimal' with bits={self.bits}: use bits=2 or bits=4, or levels="
                "'uniform'"
            )
        if self.levels == self._usual_levels:
            object.__setattr__(self, "levels", None)


@dataclass(frozen=True, repr=False)
class _Bucketed(CodecOptions):
    """A codec whose values share numbers by column, by tensor or by a fixed count."""

    bucket: int | str

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        super().__post_init__()
        _check_bucket(self)


@dataclass(frozen=True, repr=False)
class OneBit(_Bucketed):
    """The sign of each value, and two averages of each bucket (Seide et al. 2014)."""

    name = "onebit"
    bucket: int | str = option(
        "column",
        "Consecutive values that share averages: `column`: the last dimension, as in CNTK; "
        "`tensor`; or a multiple of 32 up to 1048576.",
        read=_read_bucket,
    )
    packing: str = option(
        "bytes", "The order of signs on the wire; `cntk`: as in CNTK.", known=("bytes", "cntk")
    )
    residual: bool = _residual(True)


@dataclass(frozen=True, repr=False)
class Int8(_Bucketed):
    """Eight bits between the least and the greatest value of a bucket."""

    name = "int8"
    bucket: int | str = option(
        512,
        "Consecutive values that share the ends: `column`, `tensor`, or a multiple of 32 up to "
        "1048576.",
        read=_read_bucket,
    )
    residual: bool = _residual(False)


@dataclass(frozen=True, repr=False)
class Fp8(_Bucketed):
    """Floats of eight bits, rounded to nearest even, times a power of two for each bucket."""

    name = "fp8"
    format: str = option(
        "e4m3",
        "`e4m3`: four bits of exponent and three of mantissa; `e5m2`: five and two.",
        known=("e4m3", "e5m2"),
    )
    bucket: int | str = option(
        128,
        "Consecutive values that share a scale: `column`, `tensor`, or a multiple of 32 up to "
        "1048576.",
        read=_read_bucket,
    )
    residual: bool = _residual(False)


@dataclass(frozen=True, repr=False)
class _Sparse(CodecOptions):
    """The options of codecs that send the largest values alone."""

    ratio: float = option(
        0.001, "Share of a slice's values that a rank sends, rounded up.", above=0, most=1
    )
    broadcast_ratio: float | None = option(
        None,
        "Share of a mean's values that its owner sends; as `ratio` if absent.",
        above=0,
        most=1,
        read=float,
    )

    def __post_init__(self) -> None:
        """Check every option; a `broadcast_ratio` that is the `ratio` is written as none.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        super().__post_init__()
        if self.broadcast_ratio == self.ratio:
            object.__setattr__(self, "broadcast_ratio", None)


@dataclass(frozen=True, repr=False)
class TopK(_Sparse):
    """The values that are largest by magnitude (Aji and Heafield 2017; Sarfi et al. 2025)."""

    name = "topk"
    bits: int = option(
        32,
        "Bits of a value that is sent: its sign and a level of its bucket; 32: the value itself.",
        unit="bits",
        known=(2, 4, 8, 32),
    )
    bucket: int | None = option(
        None,
        "Values in a row from which `ratio` of them are chosen, with levels of their own: a "
        "multiple of 32 up to 1048576; if absent a slice.",
        read=int,
    )
    decay: float = option(
        1.0,
        "Share of what a rank has not sent that is left when the next values are added to it; 1: "
        "all of it, so that nothing is lost.",
        above=0,
        most=1,
    )
    residual: bool = _residual(True)

    def __post_init__(self) -> None:
        """Check every option.

        Raises:
            ValueError: an option is out of its range, or does not go with another one.
        """
        super().__post_init__()
        if self.bucket is not None:
            _check_bucket(self)
        if self.decay < 1 and not self.residual:
            raise RefusedError(
                f"TopK.decay is {self.decay} with residual=False, where nothing is kept: leave "
                "decay out, or use residual=True"
            )


@dataclass(frozen=True, repr=False)
class Dgc(_Sparse):
    """Deep gradient compression: the largest values, with momentum taken before (Lin et al. 2018).

    Its residual holds momentum and unsent values, and is always on.
    """

    name = "dgc"
    momentum: float = option(
        0.9,
        "Momentum that is taken before the selection; the optimizer has none then.",
        least=0,
        below=1,
    )
    clip: float = option(
        0.0,
        "Largest 2-norm of a step's gradient; each rank clips its own to this over the square root "
        "of the number of ranks; 0: no limit.",
        least=0,
    )
    warmup: int = option(
        0,
        "Steps over which the share that is sent falls from a quarter to `ratio`.",
        unit="steps",
        least=0,
    )


CODECS: dict[str, type[CodecOptions]] = {
    kind.name: kind for kind in (Bf16, F16, Qsgd, OneBit, Int8, Fp8, TopK, Dgc)
}
"""The codecs by the names of their texts."""


@functools.lru_cache(maxsize=256)
def parse_codec(text: str) -> CodecOptions | None:
    """Parse a codec's text, such as `topk:ratio=0.01`; return None for `raw` and `f32`.

    Raises:
        ValueError: the text names no codec, or an option is unknown or out of its range; the
            message lists what there is.
    """
    if text.strip() in LOSSLESS:
        return None
    name, _, options = load_codecs().Codec(text, []).spec.partition(":")
    rules = option_rules(CODECS[name])
    given = dict(one.split("=") for one in options.split(",") if one)
    made: CodecOptions = CODECS[name](
        **{key: rules[key].read(value) for key, value in given.items()}
    )
    return made


def codec_text(codec: str | CodecOptions | None) -> str:
    """Return the text of a codec that is given as one, or as an object; `raw` for None."""
    if codec is None:
        return RAW
    return codec.text if isinstance(codec, CodecOptions) else codec
