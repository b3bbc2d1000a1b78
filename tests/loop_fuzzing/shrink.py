"""Makes a failing loop small: drops whatever it fails without, as long as it fails the same way."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from tests.loop_fuzzing.description import Block, Loop, Model
from tests.loop_fuzzing.models import ODD_BUFFERS

_REMOVABLE = (
    "detach",
    "autocast",
    "penalty",
    "no_sync",
    "losses",
    "zero",
    "toggled",
    "inputs",
    "only",
    "forwards",
    "sends",
    "is_last",
)
_BACKWARDS = ("backward", "backward_twice", "assign_gradients")
_STEPS = ("step", "scaled_step", "step_other", "step_by_hand")


def shrink(loop: Loop, still_fails: Callable[[Loop], bool], attempts: int = 300) -> Loop:
    """Return a smaller loop that still fails.

    Args:
        loop: fails.
        still_fails: whether another one fails in the same way.
        attempts: how many to try at most.
    """
    trials = iter(range(attempts))
    sensible = _is_sensible(loop.actions)

    def fails(smaller: Loop) -> bool:
        # A loop that is odd by itself may stay so, others must not become so.
        return (not sensible or _is_sensible(smaller.actions)) and still_fails(smaller)

    changed = True
    while changed:
        changed = False
        for change in (_plainest, _fewer_actions, _simpler):
            before = loop
            loop = _reduce(loop, change, fails, trials)
            changed = changed or loop != before
    return loop


def _reduce(
    loop: Loop,
    candidates: Callable[[Loop], Iterator[Loop]],
    still_fails: Callable[[Loop], bool],
    trials: Iterator[int],
) -> Loop:
    """Try all candidates; after a success go on from where it was, not from the start."""
    tried = 0
    while True:
        rest = itertools.islice(candidates(loop), tried, None)
        for smaller in rest:
            if next(trials, None) is None:
                return loop
            if still_fails(smaller):
                loop = smaller
                break
            tried += 1
        else:
            return loop


def _plainest(loop: Loop) -> Iterator[Loop]:
    """Loops that are simple in many things at once; most failures need none of them."""
    plain_model = Model((Block("linear_no_bias"),))
    models = tuple(
        dataclasses.replace(plain_model, extras=_odd_extras(model)) for model in loop.models
    )
    optimizers = tuple(
        dataclasses.replace(one, kind="SGD", options={"lr": 0.1, "momentum": 0.5}, groups=1)
        for one in loop.optimizers
    )
    unscheduled = tuple(
        dataclasses.replace(one, scheduler=None, early_scheduler=False) for one in loop.optimizers
    )
    several: tuple[dict[str, Any], ...] = (
        {"models": models, "optimizers": optimizers, "options": {}, "defer": None},
        {"models": models},
        {"optimizers": optimizers},
        {"optimizers": unscheduled},
    )
    for changes in several:
        smaller = dataclasses.replace(loop, **changes)
        if smaller != loop:
            yield smaller


def _odd_extras(model: Model) -> tuple[str, ...]:
    return tuple(extra for extra in model.extras if extra in ODD_BUFFERS)


def _fewer_actions(loop: Loop) -> Iterator[Loop]:
    """Loops without some actions next to each other, the boldest first."""
    count = len(loop.actions)
    size = count
    while size >= 1:
        for start in range(0, count, size):
            kept = loop.actions[:start] + loop.actions[start + size :]
            yield dataclasses.replace(loop, actions=kept)
        size //= 2


def _simpler(loop: Loop) -> Iterator[Loop]:
    """Loops with the same actions that are simpler in one thing."""
    yield from _simpler_sharding(loop)
    if (
        loop.sharding is None
        and loop.ranks > 2
        and not any(one.ranks and max(one.ranks) > 1 for one in loop.actions)
    ):
        yield dataclasses.replace(loop, ranks=2)
    if len(loop.models) == 2:
        alone = [
            one for one in loop.actions if one.model == 0 and 1 not in one.given.get("through", ())
        ]
        yield dataclasses.replace(
            loop, models=loop.models[:1], optimizers=loop.optimizers[:1], actions=tuple(alone)
        )
    for name in loop.options:
        rest = {other: value for other, value in loop.options.items() if other != name}
        yield dataclasses.replace(loop, options=rest)
    if loop.defer is not None:
        yield dataclasses.replace(loop, defer=None)
    if loop.defaults:
        yield dataclasses.replace(loop, defaults={})
    for number, action in enumerate(loop.actions):
        if action.thread:
            yield _with_action(loop, number, dataclasses.replace(action, thread=False))
        if action.given.get("via") not in (None, "parameters"):
            for via in ("parameters", "kept"):
                given = {**action.given, "via": via}
                yield _with_action(loop, number, dataclasses.replace(action, given=given))
        if action.ranks is not None:
            plain = dataclasses.replace(action, ranks=None)
            yield _with_action(loop, number, plain)
        for name in action.given:
            if name in _REMOVABLE:
                rest = {other: value for other, value in action.given.items() if other != name}
                yield _with_action(loop, number, dataclasses.replace(action, given=rest))
    yield from _smaller_models(loop)
    yield from _smaller_optimizers(loop)


def _simpler_sharding(loop: Loop) -> Iterator[Loop]:
    if loop.sharding is None:
        return
    for one in dataclasses.fields(loop.sharding):
        if one.name != "local" and getattr(loop.sharding, one.name) != one.default:
            plainer: dict[str, Any] = {one.name: one.default}
            simpler = dataclasses.replace(loop.sharding, **plainer)
            yield dataclasses.replace(loop, sharding=simpler)


def _smaller_models(loop: Loop) -> Iterator[Loop]:
    for number, model in enumerate(loop.models):
        for smaller in _smaller_model(model):
            models = (*loop.models[:number], smaller, *loop.models[number + 1 :])
            yield dataclasses.replace(loop, models=models)


def _smaller_model(model: Model) -> Iterator[Model]:
    for extra in model.extras:
        rest = tuple(one for one in model.extras if one != extra)
        yield dataclasses.replace(model, extras=rest)
    last = len(model.blocks) - 1
    if last > 0 or "scale" in model.extras:
        yield dataclasses.replace(model, blocks=model.blocks[:-1])
    for number, block in enumerate(model.blocks):
        for plainer in (
            Block("linear_no_bias"),
            Block(block.kind),
            dataclasses.replace(block, call="plain"),
            dataclasses.replace(block, norm=None),
            dataclasses.replace(block, frozen=False),
            dataclasses.replace(block, tied_to=None),
            dataclasses.replace(block, when=None),
        ):
            if plainer != block and (block.kind != "linear_no_bias" or plainer.kind == block.kind):
                blocks = (*model.blocks[:number], plainer, *model.blocks[number + 1 :])
                yield dataclasses.replace(model, blocks=blocks)
    if model.dtype != "float32":
        yield dataclasses.replace(model, dtype="float32")
    if model.classes:
        yield dataclasses.replace(model, classes=())


def _smaller_optimizers(loop: Loop) -> Iterator[Loop]:
    for number, optimizer in enumerate(loop.optimizers):
        simpler = [
            dataclasses.replace(optimizer, kind="SGD", options={"lr": 0.1}),
            dataclasses.replace(optimizer, groups=1),
            dataclasses.replace(optimizer, scheduler=None, early_scheduler=False),
            dataclasses.replace(optimizer, early_scheduler=False),
            dataclasses.replace(optimizer, wrapped=None),
            dataclasses.replace(optimizer, derived=None),
            dataclasses.replace(optimizer, counts=None),
            dataclasses.replace(optimizer, outer=None),
            *(
                dataclasses.replace(
                    optimizer,
                    options={k: v for k, v in optimizer.options.items() if k != name},
                )
                for name in optimizer.options
                if name != "lr"
            ),
        ]
        for one in simpler:
            if one != optimizer:
                optimizers = (*loop.optimizers[:number], one, *loop.optimizers[number + 1 :])
                yield dataclasses.replace(loop, optimizers=optimizers)


def _with_action(loop: Loop, number: int, action: object) -> Loop:
    actions = (*loop.actions[:number], action, *loop.actions[number + 1 :])
    return dataclasses.replace(loop, actions=actions)  # type: ignore[arg-type]


def _through(given: dict[str, object]) -> list[int]:
    through = given.get("through", [])
    assert isinstance(through, list)
    return through[1:] if given.get("detach") else through


def _is_sensible(actions: object) -> bool:
    """Whether each step of an optimizer has a gradient, and gradients are zeroed after steps."""
    fresh: dict[int, bool] = {}
    seen: dict[int, bool] = {}
    dirty: dict[int, bool] = {}
    climbed: set[int] = set()
    for action in actions:  # type: ignore[attr-defined]
        given = action.given
        if action.do in _BACKWARDS:
            for number in _through(given):
                if (dirty.get(number) or seen.get(number)) and not given.get("zero"):
                    return False
                seen[number] = False
                fresh[number], dirty[number] = True, False
        elif action.do in ("zero", "zero_by_hand"):
            fresh[action.model], dirty[action.model] = False, False
            seen[action.model] = False
        elif action.do == "climb":
            climbed.add(action.model)
        elif action.do == "descend":
            climbed.discard(action.model)
        elif action.do in _STEPS:
            if action.model in climbed:
                return False
            if not given.get("closure") and not fresh.get(action.model):
                return False
            fresh[action.model], dirty[action.model] = False, True
            seen[action.model] = False
        elif action.do == "clip" or given.get("what") == "gradients":
            if not fresh.get(action.model):
                return False
            seen[action.model] = True
    return True
