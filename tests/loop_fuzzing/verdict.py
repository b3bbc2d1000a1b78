"""Says whether what the ranks saw is what the reference says, to the last bit."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

import gradlane
from tests.device import DEVICE
from tests.loop_fuzzing.description import Loop
from tests.loop_fuzzing.odd_spans import Span, spans
from tests.loop_fuzzing.program import Note
from tests.loop_fuzzing.ranks import Outcome, quietly, run_ranks
from tests.loop_fuzzing.reference import Reference

REFUSALS: dict[str, str] = {
    "several_backwards": r"got another gradient in step",
    "read_by_some": r"the ranks ended step \d+ differently|the ranks wait for each other",
    "all_inside": r"was changed in place before it was averaged",
    "server_reads": r"update=\"server\"|before optimizer\.step\(\)",
    "server_forgets": r"update=\"server\"",
    "thawed": r"was frozen when the model was prepared",
    "layouts": r"the memory formats of parameters differ between|has stride \[",
    "reformat": r"was converted after prepare",
}
"""Constructs that may be refused, and the words of the refusal."""
LATE = ("all_inside",)
"""Those that are refused at `optimizer.step()`, when the program may have seen wrong gradients."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a loop.

    Attributes:
        kind: `same`, `refused`, `not on this device` where torch itself or an update on servers
            does not go there, `torch does not` where torch alone fails on a sharded model, or how
            it is wrong; what shrinking must keep.
        text: one line, or a traceback.
    """

    kind: str
    text: str = ""

    @property
    def is_right(self) -> bool:
        """Whether there is nothing to complain of."""
        return self.kind in ("same", "refused", "not on this device", "torch does not")


def judge(loop: Loop, *, real: bool = False) -> Verdict:
    """Run a loop both ways and compare."""

    def run() -> Verdict:
        if loop.serves and DEVICE.type != "cpu":
            return Verdict("not on this device", "updates on servers")
        try:
            expected = Reference(loop).run()
        except Exception as error:
            if DEVICE.type != "cpu":
                return Verdict("not on this device", _head(error, 200))
            return Verdict(f"reference: {type(error).__name__}", "".join(_trace(error)))
        return compare(loop, expected, run_ranks(loop, real=real))

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, loop.defaults.get("dtype", "float32")))
    try:
        verdict: Verdict = quietly(run)
    finally:
        torch.set_default_dtype(before)
    return verdict


def compare(loop: Loop, expected: list[list[Note]], outcomes: list[Outcome]) -> Verdict:
    """Compare what every rank saw with what it must see."""
    if any(_is_refusal(one.error, set(LATE) & set(loop.strange)) for one in outcomes):
        return Verdict("refused", "late")
    alarm = _alarm(outcomes)
    if alarm is not None:
        return alarm
    refusal = _refused_oddity(loop, expected, outcomes)
    if refusal is not None:
        return refusal
    # Whoever is refused a gradient tells the others, who may have seen its first part by then.
    refused = [one.action for one in outcomes if _is_refusal(one.error, loop.strange)]
    ended = all(one.error is not None for one in outcomes)
    until = min(refused) if refused and ended else None
    for rank, (wanted, outcome) in enumerate(zip(expected, outcomes, strict=True)):
        difference = _first_difference(loop, wanted, outcome, before=until)
        if difference is not None:
            return Verdict(difference[0], f"rank {rank}: {difference[1]}")
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if not errors:
        return _compare_ends(loop, outcomes)
    # The others only repeat what the first one gave up for.
    own = [error for error in errors if not isinstance(error, gradlane.PeerLostError)] or errors
    for error in own:
        if not _is_refusal(error, loop.strange):
            return Verdict(f"{type(error).__name__}: {_head(error)}", "".join(_trace(error)))
    return Verdict("refused", str(own[0]).splitlines()[0])


def _alarm(outcomes: list[Outcome]) -> Verdict | None:
    """Return what no loop may end with: hanging, or an error of somebody else's."""
    for rank, outcome in enumerate(outcomes):
        error = outcome.error
        if error is None:
            continue
        text = f"rank {rank}, action {outcome.action}: {''.join(_trace(error))}"
        if isinstance(error, (TimeoutError, gradlane.ProgressTimeoutError)):
            return Verdict("hangs", text)
        if not isinstance(error, (gradlane.GradlaneError, ValueError)):
            return Verdict(f"foreign {type(error).__name__}: {_head(error)}", text)
        if "broke off in step" in str(error) and not isinstance(error, gradlane.PeerLostError):
            return Verdict(f"broke off: {_head(error)}", text)
    return None


def _refused_oddity(
    loop: Loop, expected: list[list[Note]], outcomes: list[Outcome]
) -> Verdict | None:
    """Whether a loop was refused for an oddity, in time, by who does it, and ended everywhere."""
    own = [
        (rank, outcome)
        for rank, outcome in enumerate(outcomes)
        if outcome.error is not None
        and not isinstance(outcome.error, gradlane.PeerLostError)
        and not _is_refusal(outcome.error, loop.strange)
    ]
    for span in spans(loop):
        if not any(_is_within(span, rank, outcome) for rank, outcome in own):
            continue
        if any(
            _first_difference(loop, wanted, outcome, before=span.start)
            for wanted, outcome in zip(expected, outcomes, strict=True)
        ):
            continue
        spared = [rank for rank, outcome in enumerate(outcomes) if outcome.error is None]
        if spared:
            return Verdict(
                "refused on some ranks",
                f"rank {spared[0]} ended without an error\n{own[0][1].error}",
            )
        return Verdict("refused", f"{span.label}: {_head(own[0][1].error, 200)}")
    return None


def _is_within(span: Span, rank: int, outcome: Outcome) -> bool:
    # What ranks compare any of them may tell first.
    compares = isinstance(outcome.error, gradlane.SessionFailedError)
    by_rank = span.ranks is None or rank in span.ranks or compares
    return by_rank and span.start <= outcome.action <= span.end


def _head(error: BaseException | None, length: int = 80) -> str:
    text = f"{error} ".splitlines()[0]
    return re.sub(r"'[^']*'|[0-9]+", "#", text)[:length]


def _compare_ends(loop: Loop, outcomes: list[Outcome]) -> Verdict:
    """Compare the ranks' last parameters with each other: these agree to the last bit always."""
    count = len(loop.models)
    first, *others = [outcome.notes[-count:] for outcome in outcomes]
    for rank, other in enumerate(others, start=1):
        for mine, its in zip(first, other, strict=True):
            pairs = zip(mine.values, its.values, strict=True)
            if not all(is_equal(one, two) for one, two in pairs):
                return Verdict("ranks differ", f"rank 0 and rank {rank} end with other parameters")
    return Verdict("same")


def _is_refusal(error: BaseException | None, strange: Iterable[str]) -> bool:
    return isinstance(error, (gradlane.GradlaneError, ValueError)) and any(
        re.search(REFUSALS[one], str(error)) for one in strange
    )


def _first_difference(
    loop: Loop, wanted: list[Note], outcome: Outcome, before: int | None = None
) -> tuple[str, str] | None:
    for seen, must in zip(outcome.notes, wanted, strict=False):
        if before is not None and must.action >= before:
            return None
        found = other_things(loop, must, seen) or other_values(loop, must, seen, _tolerance(loop))
        if found is not None:
            return found
    if before is None and outcome.error is None and len(outcome.notes) != len(wanted):
        return "notes", f"saw {len(outcome.notes)} things, not {len(wanted)}"
    return None


def other_things(loop: Loop, must: Note, seen: Note) -> tuple[str, str] | None:
    """Return the kind and the place where something else was seen; None if it was the same."""
    if (seen.action, seen.label, len(seen.values)) == (must.action, must.label, len(must.values)):
        return None
    return (
        f"{must.label}: other things",
        f"{_place(loop, must)}: saw {seen.label} of {len(seen.values)}, "
        f"not {must.label} of {len(must.values)}",
    )


def other_values(
    loop: Loop, must: Note, seen: Note, tolerance: tuple[float, float] | None
) -> tuple[str, str] | None:
    """Return the kind and the place where the same things have other values, as by `is_equal`."""
    for number, (one, other) in enumerate(zip(seen.values, must.values, strict=True)):
        if not is_equal(one, other, tolerance):
            return (
                f"{must.label}: values",
                f"{_place(loop, must)}: {must.label} number {number} is {_show(one)}, "
                f"not {_show(other)}",
            )
    return None


def _place(loop: Loop, note: Note) -> str:
    return f"action {note.action} ({_describe(loop, note.action)})"


def _tolerance(loop: Loop) -> tuple[float, float] | None:
    """How close values must be, relative and absolute; None: equal in every bit.

    Updates on servers round in their own way: f16 and bf16 once, where torch does several times.
    """
    if not loop.serves:
        return None
    dtypes = {model.dtype for model in loop.models}
    return (0.05, 0.02) if dtypes & {"bfloat16", "float16"} else (1e-3, 1e-4)


def is_equal(one: Tensor, other: Tensor, tolerance: tuple[float, float] | None = None) -> bool:
    """Whether two tensors are equal: in every bit or within a tolerance, relative and absolute.

    One NaN is as good as another.
    """
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    one, other = _plain(one), _plain(other)
    if tolerance is None:
        return torch.equal(_bits(one), _bits(other)) or (
            one.is_floating_point() and torch.equal(_bits(_one_nan(one)), _bits(_one_nan(other)))
        )
    rtol, atol = tolerance
    return torch.allclose(one, other, rtol=rtol, atol=atol, equal_nan=True)


def _plain(tensor: Tensor) -> Tensor:
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    tensor = tensor.cpu()
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _one_nan(tensor: Tensor) -> Tensor:
    return tensor.masked_fill(tensor.isnan(), float("nan"))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _describe(loop: Loop, number: int) -> str:
    return loop.actions[number].do if number < len(loop.actions) else "close"


def _show(tensor: Tensor) -> str:
    flat = tensor.flatten()[:4].tolist()
    return f"{tuple(tensor.shape)} {tensor.dtype} {flat}"


def _trace(error: BaseException) -> list[str]:
    return traceback.format_exception(type(error), error, error.__traceback__)
