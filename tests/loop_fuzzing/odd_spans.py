"""Where a loop is odd, and from where to where gradlane may refuse it.

What stands as *right* in `docs/constructs.md` or `docs/optimizers.md` may not be refused: it is odd
all the same, and has no span.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tests.loop_fuzzing.description import Action, Loop
from tests.loop_fuzzing.models import ODD_BUFFERS

_LISTED = ("parameters", "groups", "attributes", "modules", "live_state")
"""Ways to parameters that are guarded."""
_LASTING = ("hook", "wrap_step", "regroup", "look_aside", "hold_gradients")
"""Actions that show their effect in any later step."""
_STEPS = ("step", "scaled_step", "step_other", "step_by_hand")
_QUIET = ("unhook", "look_at_calls", "wait_aside", "descend")
_ODD = (
    "look_at_gradients",
    "change_gradients",
    "assign_gradients",
    "hold_gradients",
    "look_at_held",
    "zero_by_hand",
    "climb",
    "step_by_hand",
    "step_other",
    "look_at_kept",
    "follow_kept",
    "write_kept",
    "look_at_state",
    "change_state",
    "regroup",
    "wrap_step",
    "hook",
    "look_aside",
    "backward_twice",
    "write_buffer",
    "look_at_buffer",
    "meet",
    "look_at_cache",
    "drift",
)


@dataclass(frozen=True)
class Span:
    """Where an oddity may be refused.

    Attributes:
        label: what it is.
        start: the first action in which it may be refused; -1: `prepare`.
        end: the last one.
        ranks: who does it, one of whom must say so; None: all.
    """

    label: str
    start: int
    end: int
    ranks: tuple[int, ...] | None = None


def labels(loop: Loop) -> tuple[str, ...]:
    """Return what is odd in a loop, each once."""
    found = {_label(action) for action in loop.actions if _is_odd(action)}
    found.update(span.label for span in _of_loop(loop))
    found.update(f"class {name}" for model in loop.models for name in model.classes)
    found.update(f"outer {'.'.join(one.outer)}" for one in loop.optimizers if one.outer)
    found.update("early scheduler" for one in loop.optimizers if one.early_scheduler)
    return tuple(sorted(found))


def spans(loop: Loop) -> list[Span]:
    """Return where a loop may be refused for an oddity."""
    found = [*_of_loop(loop)]
    for place, action in enumerate(loop.actions):
        if _is_odd(action) and not _is_listed(action):
            end = len(loop.actions) if action.do in _LASTING else _end_of_step(loop, place)
            found.append(Span(_label(action), place, end, action.ranks))
    return found


def _of_loop(loop: Loop) -> Iterator[Span]:
    first = max(_end_of_step(loop, 0, model) for model in range(len(loop.models)))
    last = len(loop.actions)
    for optimizer in loop.optimizers:
        if optimizer.wrapped is not None:
            yield Span(f"wrapped {'.'.join(optimizer.wrapped)}", -1, first)
        if optimizer.derived is not None and (
            optimizer.derived[0] not in ("super", "mixin") or loop.serves
        ):
            yield Span(f"derived {'.'.join(optimizer.derived)}", -1, first)
        if optimizer.counts is not None:
            yield Span(f"counts in {optimizer.counts}", -1, first)
    for model in loop.models:
        for extra in model.extras:
            if extra in ODD_BUFFERS and extra != "tally":
                yield Span(f"buffer {extra}", -1, last)
    for name, value in loop.defaults.items():
        if name != "device_in":
            yield Span(f"default {name} {value}", -1, last)


def _end_of_step(loop: Loop, place: int, model: int | None = None) -> int:
    model = loop.actions[place].model if model is None and loop.actions else model
    for later in range(place, len(loop.actions)):
        action = loop.actions[later]
        if action.model == model and action.do in (*_STEPS, "joined"):
            return _next_backward(loop, later)
    return len(loop.actions)


def _next_backward(loop: Loop, step: int) -> int:
    """Return where a step ends that is applied later: the ranks' statuses are read by then."""
    for later in range(step + 1, len(loop.actions)):
        if loop.actions[later].do in ("backward", "backward_twice", "assign_gradients", "joined"):
            return later
    return len(loop.actions)


def _is_odd(action: Action) -> bool:
    given = action.given
    if action.do in _QUIET:
        return False
    odd_backward = given.get("toggled") is not None or given.get("inputs") is not None
    return action.thread or action.do in _ODD or odd_backward


def _is_listed(action: Action) -> bool:
    """Whether the documentation says that it is right."""
    given = action.given
    how, via = given.get("how"), given.get("via")
    if action.thread:
        return False
    if action.do in ("meet", "look_at_cache", "drift"):
        return True
    if action.do == "look_at_kept":
        return via in _LISTED
    if action.do == "follow_kept":
        return via in _LISTED and how != "group_lists"
    if action.do == "write_kept":
        return via in _LISTED and how not in ("numpy", "detached")
    if action.do == "look_at_state":
        return how == "save_dict"
    if action.do == "change_state":
        return how in ("keep", "load")
    return action.do == "hook" and how in ("step_before", "step_after")


def _label(action: Action) -> str:
    given = action.given
    words = [str(given[name]) for name in ("how", "inside", "made", "via") if name in given]
    words += [name for name in ("toggled", "inputs") if given.get(name) is not None]
    return ".".join([action.do, *words]) + (" in a thread" if action.thread else "")
