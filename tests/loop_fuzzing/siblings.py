"""Every oddity by itself, in the smallest loop: `python -m tests.loop_fuzzing.siblings`.

Random loops find what comes of several things together; here nothing has to be made small, and
nothing is left out. Prints what is wrong, and with `--all` also what is right or refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.loop_fuzzing import oddities
from tests.loop_fuzzing.description import Action, Block, Loop, Model, Optimizer
from tests.loop_fuzzing.look_ahead import OUTERS
from tests.loop_fuzzing.models import ODD_BUFFERS
from tests.loop_fuzzing.verdict import judge

_SGD = Optimizer("SGD", {"lr": 0.1, "momentum": 0.5})
_MODEL = Model((Block("linear"), Block("linear_no_bias")))
_NORMS = Model((Block("linear"), Block("batch_norm")))


def _backward(data: int, **given: Any) -> Action:
    return Action("backward", 0, None, {"through": [0], "data": data, **given})


def _zero(whose: str = "optimizer") -> Action:
    return Action("zero", 0, None, {"whose": whose, "to_none": True})


_STEP = Action("step")
_ENDS = (
    Action("read", 0, None, {"what": "state_dict"}),
    Action("read", 0, None, {"what": "optimizer_state"}),
)


def _loop(
    *actions: Action, model: Model = _MODEL, optimizer: Optimizer = _SGD, **rest: Any
) -> Loop:
    # Where updates run on servers, reading the optimizer's state lends the parameters' memory.
    ends = _ENDS[:1] if rest.get("options") else _ENDS
    return Loop(7, 2, (model,), (optimizer,), (*actions, *ends), **rest)


def _around(
    *, first: Action | None = None, inside: Action | None = None, after: Action | None = None
) -> tuple[Action, ...]:
    """Three steps, with an action before backward, before the step or after it in each."""
    actions: list[Action] = []
    for data in range(1, 4):
        actions += [one for one in (first,) if one is not None]
        actions.append(_backward(data))
        actions += [one for one in (inside,) if one is not None]
        actions.append(_STEP)
        actions += [one for one in (after,) if one is not None]
        actions.append(_zero())
    return tuple(actions)


def _do(name: str, ranks: tuple[int, ...] | None = None, **given: Any) -> Action:
    return Action(name, 0, ranks, given)


def siblings() -> Iterator[tuple[str, Loop]]:
    """Yield a name and a loop of each oddity."""
    yield from _of_gradients()
    yield from _of_no_sync()
    yield from _of_parameters()
    yield from _of_optimizers()
    yield from _of_hooks_and_threads()
    yield from _of_buffers_and_defaults()
    yield from _of_what_is_kept()


def _of_what_is_kept() -> Iterator[tuple[str, Loop]]:
    frozen = Model((Block("linear"), Block("linear_no_bias", frozen=True)))
    for how in oddities.MEETINGS:
        for kinds in ((), ("own",), ("asked",), ("own", "asked")):
            model = dataclasses.replace(_MODEL, classes=kinds)
            meet = _do("meet", how=how)
            yield f"one operation: {how} of {kinds}", _loop(*_around(after=meet), model=model)
    look = _do("look_at_cache")
    for options in ({}, {"update": "server"}):
        yield f"cache by version {options}", _loop(look, *_around(after=look), options=options)
        drift = _do("drift", via="kept", factor=0.5)
        yield f"drift {options}", _loop(*_around(after=drift), model=frozen, options=options)
    for how in OUTERS:
        for prepared in ("outer", "base") if how != "bare" else ("base",):
            outer = dataclasses.replace(_SGD, outer=(how, prepared))
            yield f"look-ahead {how}, {prepared} prepared", _loop(*_around(), optimizer=outer)


def _of_gradients() -> Iterator[tuple[str, Loop]]:
    for via in oddities.VIAS:
        for how in oddities.LOOKS:
            look = _do("look_at_gradients", via=via, how=how)
            yield f"gradients {how} via {via}", _loop(*_around(inside=look))
        for how in (*oddities.CHANGES, *oddities.WHOLE_CHANGES):
            change = _do("change_gradients", via=via, how=how)
            yield f"gradients changed: {how} via {via}", _loop(*_around(inside=change))
        one = _do("change_gradients", via=via, how="assign", only=1)
        yield f"one gradient assigned via {via}", _loop(*_around(inside=one))
        none = _do("change_gradients", via=via, how="none", only=1)
        yield f"one gradient None via {via}", _loop(*_around(inside=none))
        early = _do("change_gradients", via=via, how="assign")
        yield f"gradients assigned before backward via {via}", _loop(*_around(first=early))
        some = _do("look_at_gradients", (0,), via=via, how="clone")
        yield f"gradients on rank 0 via {via}", _loop(*_around(inside=some))
        late = _do("look_at_gradients", via=via, how="clone")
        yield f"gradients after step via {via}", _loop(*_around(after=late))
        hold, look = _do("hold_gradients", via=via), _do("look_at_held")
        yield f"gradients held beyond step via {via}", _loop(*_around(inside=hold, after=look))
        held = [_backward(1), hold, _STEP, _zero(), _backward(2), look, _STEP, _zero()]
        yield f"gradients held into the next step via {via}", _loop(*held)
        skipped = [_backward(1), _do("zero_by_hand", via=via, how="none"), _backward(2), _STEP]
        yield f"gradients forgotten by hand via {via}", _loop(*_around()[:3], *skipped)
        zeros = [_backward(1), _do("zero_by_hand", via=via, how="zero"), _backward(2), _STEP]
        yield f"gradients zeroed by hand via {via}", _loop(*_around()[:3], *zeros)
        for how in ("none", "zero"):
            steps: list[Action] = []
            for data in range(1, 4):
                steps += [_backward(data), _STEP, _do("zero_by_hand", via=via, how=how)]
            yield f"zeroed after step by hand: {how} via {via}", _loop(*steps)
        assigned = _do("assign_gradients", through=[0], data=1, via=via)
        yield f"gradients of autograd.grad via {via}", _loop(assigned, _STEP, _zero(), *_around())
        yield f"the same in a later step via {via}", _loop(*_around(), assigned, _STEP)
        for how in ("data", "sub", "foreach"):
            step = _do("step_by_hand", via=via, how=how)
            yield f"stepped by hand: {how} via {via}", _loop(*_around()[:3], _backward(2), step)
        for made in ("new", "copy", "zeroes"):
            other = _do("step_other", via=via, made=made)
            steps = [one for data in (1, 2, 3) for one in (_backward(data), other, _zero())]
            yield f"another optimizer: {made} via {via}", _loop(*steps)
    yield "backward(inputs=...)", _loop(_backward(1, inputs=2), _STEP, _zero(), *_around())


def _of_no_sync() -> Iterator[tuple[str, Loop]]:
    for via in oddities.VIAS:
        look = _do("look_at_gradients", via=via, how="clone")
        apart = _backward(1, no_sync=True)
        yield f"own gradients, then step via {via}", _loop(apart, look, _STEP, _zero(), *_around())
        goes_on = [apart, look, _backward(2), _STEP, _zero()]
        yield f"own gradients, then another backward via {via}", _loop(*goes_on, *goes_on)
        some = _do("look_at_gradients", (0,), via=via, how="clone")
        yield f"own gradients on rank 0 via {via}", _loop(apart, some, _backward(2), _STEP)
        climb, descend = _do("climb", via=via), _do("descend", via=via)
        sam = [apart, climb, _zero(), _backward(1), descend, _STEP, _zero()]
        yield f"SAM via {via}", _loop(*sam, *sam)
        for how in ("mul", "assign", "none", "half", "data", "clamp"):
            change = _do("change_gradients", via=via, how=how)
            changed = [apart, change, _backward(2), _STEP, _zero()]
            yield f"own gradients changed: {how} via {via}", _loop(*changed, *changed)
            yield f"own gradients changed, then step: {how} via {via}", _loop(apart, change, _STEP)


def _of_parameters() -> Iterator[tuple[str, Loop]]:
    for via in oddities.VIAS:
        for how in oddities.LOOKS:
            look = _do("look_at_kept", via=via, how=how)
            yield f"parameters {how} via {via}", _loop(*_around(after=look))
        for how in ("foreach", "lerp", "data", "copy", "norms", "group_lists"):
            follow = _do("follow_kept", via=via, how=how)
            yield f"average: {how} via {via}", _loop(*_around(after=follow))
        for how in (
            *("mul", "data", "clamp", "copy", "numpy", "detached", "init", "foreach", "swap"),
        ):
            write = _do("write_kept", via=via, how=how)
            yield f"parameters written: {how} via {via}", _loop(*_around(after=write))
            yield f"the same before step: {how} via {via}", _loop(*_around(inside=write))


def _of_optimizers() -> Iterator[tuple[str, Loop]]:
    for kind, options in (("SGD", _SGD.options), ("Adam", {"lr": 0.02})):
        optimizer = Optimizer(kind, options)
        for how in oddities.STATE_READS:
            look = _do("look_at_state", how=how)
            yield f"state of {kind}: {how}", _loop(*_around(after=look), optimizer=optimizer)
        for how in oddities.STATE_CHANGES:
            change = _do("change_state", how=how)
            yield (
                f"state of {kind} changed: {how}",
                _loop(*_around(after=change), optimizer=optimizer),
            )
            yield (
                f"state of {kind} changed before step: {how}",
                _loop(*_around(inside=change), optimizer=optimizer),
            )
    clip = _do("change_gradients", via="groups", how="clip")
    follow = _do("follow_kept", via="groups", how="foreach")
    for how in (
        *("pop_add", "list", "comprehension", "slice", "split", "reverse", "kept", "setstate"),
    ):
        regroup = _do("regroup", how=how)
        yield f"groups: {how}, then clipping", _loop(regroup, *_around(inside=clip))
        yield f"groups: {how}, then an average", _loop(regroup, *_around(after=follow))
        later = [*_around()[:3], regroup, *_around(inside=clip)]
        yield f"groups in mid-training: {how}, then clipping", _loop(*later)
    calls = _do("look_at_calls")
    for inside in oddities.INSIDES:
        for how in oddities.WRAPS:
            wrapped = Optimizer(_SGD.kind, _SGD.options, wrapped=(how, inside))
            yield f"step wrapped: {how}, {inside}", _loop(*_around(), calls, optimizer=wrapped)
            wrap = _do("wrap_step", how=how, inside=inside)
            yield f"step wrapped later: {how}, {inside}", _loop(wrap, *_around(), calls)
        for how in oddities.SUBCLASSES:
            derived = Optimizer(_SGD.kind, _SGD.options, derived=(how, inside))
            yield f"step derived: {how}, {inside}", _loop(*_around(), calls, optimizer=derived)
            scheduled = Optimizer(_SGD.kind, _SGD.options, 1, "step", True, derived=(how, inside))
            if how != "getattr":
                yield (
                    f"step derived, scheduled: {how}, {inside}",
                    _loop(*_around(), calls, optimizer=scheduled),
                )
    for where in oddities.COUNTS:
        counts = Optimizer("SGD", {"lr": 0.1}, counts=where)
        yield f"counts in {where}", _loop(*_around(), optimizer=counts)
    server = {"update": "server"}
    for how in ("clear", "replace", "zero", "pop"):
        change = _do("change_state", how=how)
        yield f"state on servers: {how}", _loop(*_around(after=change), options=server)
    for how in ("by_parameter", "deepcopy"):
        look = _do("look_at_state", how=how)
        yield f"state on servers: {how}", _loop(*_around(after=look), options=server)
    for how in ("wraps", "plain", "like_scheduler"):
        wrapped = Optimizer(_SGD.kind, _SGD.options, wrapped=(how, "decay"))
        yield (
            f"step on servers wrapped: {how}",
            _loop(*_around(), optimizer=wrapped, options=server),
        )
    for via in ("kept", "parameters"):
        look = _do("look_at_gradients", via=via, how="clone")
        yield f"gradients on servers via {via}", _loop(*_around(inside=look), options=server)
        change = _do("change_gradients", via=via, how="mul")
        yield (
            f"gradients on servers changed via {via}",
            _loop(*_around(inside=change), options=server),
        )
        kept = _do("look_at_kept", via=via, how="clone")
        yield f"parameters on servers via {via}", _loop(*_around(after=kept), options=server)
        write = _do("write_kept", via=via, how="mul")
        yield (
            f"parameters on servers written via {via}",
            _loop(*_around(after=write), options=server),
        )


def _of_hooks_and_threads() -> Iterator[tuple[str, Loop]]:
    for how in (
        *("tensor", "tensor_clamp", "tensor_in_place", "accumulated", "accumulated_anew"),
        *("all_accumulated", "node", "node_before", "step_before", "step_after"),
    ):
        hook = _do("hook", how=how, only=1)
        yield f"hook: {how}", _loop(hook, *_around())
        yield f"hook in mid-training: {how}", _loop(*_around(), hook, *_around())
        unhooked = [hook, *_around()[:3], _do("unhook"), *_around()]
        yield f"hook taken away: {how}", _loop(*unhooked)
    for block in (0, 1):
        toggled = [_backward(1), _STEP, _zero(), _backward(2, toggled=block), _STEP, _zero()]
        yield f"block {block} frozen before backward", _loop(*toggled, *_around())
        first = [_backward(2, toggled=block), _STEP, _zero()]
        yield f"block {block} frozen before the first backward", _loop(*first, *_around())
    ends = _do("wait_aside")
    for how in oddities.ASIDES:
        aside = _do("look_aside", how=how, times=3)
        yield f"another thread at {how} after step", _loop(*_around(after=aside), ends)
        yield f"another thread at {how} before step", _loop(*_around(inside=aside), ends)
        yield f"another thread at {how} before backward", _loop(*_around(first=aside), ends)
    for do in ("backward", "step", "zero"):
        actions = [
            Action(one.do, one.model, None, one.given, thread=one.do == do) for one in _around()
        ]
        yield f"{do} in a thread", _loop(*actions)
    twice = _do("backward_twice", through=[0], data=1)
    yield "two threads in forward and backward", _loop(*(twice, _STEP, _zero()) * 3)


def _of_buffers_and_defaults() -> Iterator[tuple[str, Loop]]:
    for mode in ("broadcast", "average", "local"):
        for extra in ODD_BUFFERS:
            model = Model(_NORMS.blocks, (extra,))
            yield f"buffer {extra}, {mode}", _loop(*_around(), model=model, buffers=mode)
        for how in oddities.BUFFER_WRITES:
            for ranks in (None, (0,), (1,)):
                model = Model(_MODEL.blocks, ("tally",))
                write = _do("write_buffer", ranks, how=how, value=0.25)
                who = "all ranks" if ranks is None else f"rank {ranks[0]}"
                after = _loop(*_around(after=write), model=model, buffers=mode)
                yield f"buffer written after step: {how} on {who}, {mode}", after
                inside = _loop(*_around(inside=write), model=model, buffers=mode)
                yield f"buffer written before step: {how} on {who}, {mode}", inside
    wide = {"dtype": "float64"}
    yield "default dtype float64", _loop(*_around(), model=_NORMS, defaults=wide)
    adam = Optimizer("Adam", {"lr": 0.02})
    yield "default dtype float64, Adam", _loop(*_around(), optimizer=adam, defaults=wide)
    apart = Model((Block("linear"), Block("linear", when=(2, 0, True))))
    look = _do("look_at_kept", via="parameters", how="clone")
    reads = {"device": "meta", "device_in": ["look_at_kept"]}
    yield "default device meta in a read", _loop(*_around(after=look), defaults=reads)
    for calls in (["prepare"], ["backward", "step"], ["step"], ["zero"], ["synchronize"]):
        defaults = {"device": "meta", "device_in": calls}
        name = f"default device meta in {', '.join(calls)}"
        waits = Action("synchronize")
        yield name, _loop(*_around(after=waits), model=_NORMS, defaults=defaults)
        yield f"{name}, absent gradients", _loop(*_around(), model=apart, defaults=defaults)


def main(arguments: list[str] | None = None) -> int:
    """Judge every sibling; returns the exit status."""
    os.environ.setdefault("GRADLANE_SUMMARY", "0")
    parser = argparse.ArgumentParser(prog="python -m tests.loop_fuzzing.siblings")
    parser.add_argument("--all", action="store_true", help="print also what is right or refused")
    parser.add_argument("--only", default="", help="those whose name holds this")
    parser.add_argument("--show", action="store_true", help="print loops and whole errors")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    wrong = count = 0
    for name, loop in siblings():
        if options.only not in name:
            continue
        count += 1
        verdict = judge(loop)
        wrong += not verdict.is_right
        if options.all or not verdict.is_right:
            lines = verdict.text.strip().splitlines() or [""]
            text = verdict.text if options.show else lines[0 if verdict.is_right else -1][:150]
            print(f"{name}: {verdict.kind}: {text}", flush=True)
        if options.show:
            print(loop.to_json())
    print(f"{count} oddities in {time.monotonic() - began:.0f} s: {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
