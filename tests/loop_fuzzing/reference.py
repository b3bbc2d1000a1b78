"""What a loop must give: one thread, one copy of the program a rank, averages between actions.

The rules are those that the documentation states, written down a second time: gradients add up on
a rank until they are needed, the mean is ((g0 + g1) + ...) / N in rank order, a rank without a
gradient counts as zeros, and a parameter without a gradient on every rank has none. They are needed
by a step, and by whoever touches `.grad` after a backward outside of `no_sync()`. Buffers become
alike when gradients do.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.loop_fuzzing.description import Action, Loop
from tests.loop_fuzzing.oddities import Counts, named_tally
from tests.loop_fuzzing.program import Note, Program
from tests.training.model.reference import in_rows_of, steps_on_sparse

_GRADIENT_ACTIONS = (
    "clip",
    "look_at_gradients",
    "change_gradients",
    "hold_gradients",
    "zero_by_hand",
    "climb",
)
"""Actions that see gradients: those of a backward outside of `no_sync()` are averages then."""
_OTHER_STEPS = ("step_by_hand", "step_other")


class SharedBuffers:
    """The buffers of one model, which each step makes alike."""

    def __init__(self, programs: list[Program], number: int, mode: str) -> None:
        """Start with nothing exchanged; `mode`: `broadcast`, `average` or `local`."""
        self._programs = programs
        self._number = number
        self.mode = mode
        self._packs: list[list[Tensor]] | None = None
        self._landed: set[int] = set()

    def land(self, rank: int) -> None:
        """Give a rank what all agreed on in this step, once."""
        if self.mode == "local" or rank in self._landed:
            return
        if self._packs is None:
            self._packs = [
                [buffer.clone() for buffer in program.models[self._number].buffers()]
                for program in self._programs
            ]
        self._landed.add(rank)
        buffers = self._programs[rank].models[self._number].buffers()
        for buffer, *packed in zip(buffers, *self._packs, strict=True):
            averages = self.mode == "average" and buffer.is_floating_point()
            if averages:
                total = packed[0].double()
                for one in packed[1:]:
                    total = total + one.double()
                _give(buffer, (total / len(packed)).to(buffer.dtype))
            else:
                _give(buffer, packed[0])

    def finish(self) -> None:
        """End the step: all ranks have the same, and the next step begins anew."""
        for rank in range(len(self._programs)):
            self.land(rank)
        self.reset()

    def reset(self) -> None:
        """Begin the next exchange."""
        self._packs = None
        self._landed.clear()


class Reference:
    """Runs a loop on plain torch."""

    def __init__(self, loop: Loop) -> None:
        """Build every rank's program with rank 0's values."""
        self.loop = loop
        self.programs = [Program(loop, rank, values_of=0) for rank in range(loop.ranks)]
        # Servers that workers pull from make dense means.
        self._sends_rows = loop.options.get("strategy") not in ("kvstore", "deferred-pull")
        self._averaged = [False] * len(loop.models)
        self._zeroed = [True] * len(loop.models)
        self._begun = [False] * len(loop.models)
        self._written = [False] * len(loop.models)
        mode = "local" if loop.ranks == 1 else loop.buffers
        self._buffers = [
            SharedBuffers(self.programs, number, mode) for number in range(len(loop.models))
        ]
        for program in self.programs:
            program.start()

    def run(self) -> list[list[Note]]:
        """Return what every rank must see."""
        for number, action in enumerate(self.loop.actions):
            self._before(number, action)
            if action.do == "step" and action.given.get("closure") is not None:
                self._step_with_closure(number, action)
                continue
            if action.do == "joined":
                self._train_uneven(number, action)
                continue
            for program in self.programs:
                with torch.no_grad():
                    self._before_rank(program.rank, action)
                program.perform(number, action)
            if action.do in ("backward", "backward_twice"):
                self._average_kept(action.given["through"])
            elif action.do in ("step", "scaled_step", *_OTHER_STEPS):
                self._end_step(action.model)
            elif action.do == "zero_by_hand":
                self._zero(action.model)
            elif action.do == "write_buffer":
                self._written[action.model] = True
            elif action.do == "prepare_again":
                self._give_values(action.model, 0)
        for program in self.programs:
            program.at = len(self.loop.actions)
            for model in program.models:
                program.note("after close", list(model.parameters()))
        return [program.notes for program in self.programs]

    def _before(self, number: int, action: Action) -> None:
        given = action.given
        if action.do in ("backward", "backward_twice"):
            self._before_backward(given)
        elif action.do == "assign_gradients":
            self._before_backward({**given, "no_sync": True})
        elif action.do in _OTHER_STEPS:
            self._average(action.model)
        elif action.do == "zero":
            self._zero(action.model)
        elif action.do in ("scaled_step", "step") or given.get("scaled"):
            # A scaler looks for infinities in averages, also where all backwards were apart.
            if given.get("closure") is None:
                self._average(action.model)
        elif (given.get("how") == "session" and action.do == "clip") or (
            self._sees_gradients(action) and self._begun[action.model]
        ):
            self._average(action.model)

    def _before_rank(self, rank: int, action: Action) -> None:
        """Make buffers right where a rank is about to see gradients in a step."""
        if not self._begun[action.model] or (action.ranks and rank not in action.ranks):
            return
        if self._sees_gradients(action):
            self._buffers[action.model].land(rank)

    def _sees_gradients(self, action: Action) -> bool:
        """Whether an action reads or writes `.grad`, which is the average from then on."""
        if action.do == "reformat":
            # `model.to(...)` takes gradients along.
            return not self.loop.serves
        return action.do in _GRADIENT_ACTIONS or action.given.get("what") == "gradients"

    def _average_kept(self, through: list[int]) -> None:
        """Average the gradients of a backward that programs keep, as DDP does in each backward."""
        for number in through:
            kept = {id(one) for program in self.programs for one in program.held.get(number, [])}
            models = [program.models[number] for program in self.programs]
            given = (id(one.grad) for model in models for one in model.parameters())
            if self._begun[number] and not kept.isdisjoint(given):
                self._average(number)

    @torch.no_grad()
    def _end_step(self, number: int) -> None:
        self._zeroed[number] = False
        self._begun[number] = False
        for program in self.programs:
            program.weights.pop(number, None)
        self._buffers[number].finish()

    @torch.no_grad()
    def _zero(self, number: int) -> None:
        self._zeroed[number] = True
        if self._begun[number]:
            for program in self.programs:
                program.weights.pop(number, None)
            self._buffers[number].finish()
        self._begun[number] = False

    def _before_backward(self, given: dict[str, Any]) -> None:
        """Begin a step's gradients; on servers they do not add up over steps."""
        through = given["through"]
        for number in through:
            self._give_tally(number)
        for number in through[1:] if given.get("detach") else through:
            if self.loop.serves and not self._zeroed[number] and given.get("zero") is None:
                for program in self.programs:
                    program.optimizers[number].zero_grad()
            if given.get("zero") is not None:
                self._zero(number)
            if self._averaged[number]:
                self._buffers[number].reset()
            self._zeroed[number] = True
            self._averaged[number] = False
            self._begun[number] = self._begun[number] or not given.get("no_sync")

    def _step_with_closure(self, number: int, action: Action) -> None:
        closure = action.given["closure"]
        self._give_tally(action.model)
        self._zero(action.model)
        self._averaged[action.model] = False
        for program in self.programs:
            program.at = number
            with torch.enable_grad():
                program.closure(action.model, closure)
        self._average(action.model)
        for program in self.programs:
            program.optimizers[action.model].step()
        self._end_step(action.model)

    def _train_uneven(self, at: int, action: Action) -> None:
        """Ranks that have run out of batches count as zeros; at the end all are like the last."""
        number, batches, data = action.model, action.given["batches"], action.given["data"]
        for program in self.programs:
            program.at = at
            program.optimizers[number].zero_grad()
        last = self.programs
        for turn in range(max(batches)):
            last = [one for one in self.programs if turn < batches[one.rank]]
            for program in last:
                program.backward(number, through=[number], data=data + turn)
            self._averaged[number] = False
            self._average(number)
            for program in last:
                program.optimizers[number].step()
            for program in self.programs:
                program.optimizers[number].zero_grad()
        self._zeroed[number], self._begun[number], self._averaged[number] = True, False, False
        if len(last) < len(self.programs):
            self._give_values(number, last[0].rank)
            for program in self.programs:
                if program is not last[0]:
                    _take_state(program.optimizers[number], last[0].optimizers[number])

    @torch.no_grad()
    def _give_values(self, number: int, source: int) -> None:
        """Give all ranks the parameters and buffers of one."""
        given = self.programs[source].models[number]
        for program in self.programs:
            model = program.models[number]
            mine = [*model.parameters(), *model.buffers()]
            for one, value in zip(mine, [*given.parameters(), *given.buffers()], strict=True):
                _give(one, value)

    @torch.no_grad()
    def _give_tally(self, number: int) -> None:
        """Give all ranks what rank 0 wrote into a buffer by hand, before its next forward."""
        if not self._written[number]:
            return
        self._written[number] = False
        if self._buffers[number].mode == "broadcast":
            first, *others = [program.models[number] for program in self.programs]
            for model in others:
                for mine, its in zip(named_tally(model), named_tally(first), strict=True):
                    mine.copy_(its)

    def _average(self, number: int) -> None:
        if self._averaged[number]:
            return
        self._averaged[number] = True
        everywhere = [program.models[number].parameters() for program in self.programs]
        weights = [program.weights.get(number) for program in self.programs]
        optimizer = self.programs[0].optimizers[number]
        for copies in zip(*everywhere, strict=True):
            own = [one.grad for one in copies]
            summed = [one.coalesce() if one is not None and one.is_sparse else one for one in own]
            gradients = [
                one if one is None or weight is None else one * weight
                for one, weight in zip(summed, weights, strict=True)
            ]
            known = next((one for one in gradients if one is not None), None)
            if known is None or known.numel() == 0:
                continue
            mean = _mean_in_rank_order(gradients, known)
            total = sum(weight or 0 for weight in weights)
            if total:
                mean.mul_(len(weights) / total)
            given = [one for one in gradients if one is not None]
            is_sparse = all(one.is_sparse for one in given)
            if is_sparse and self._sends_rows and steps_on_sparse(optimizer, copies[0]):
                mean = in_rows_of(mean, given)
            for one in copies:
                # Fused optimizers take gradients and parameters for memory in the same order.
                own = known if one.grad is None else one.grad
                layout = mean if own.is_sparse else own
                if one.grad is not None and not is_sparse and not own.is_sparse:
                    # As with DDP, also for programs that keep it.
                    one.grad.copy_(mean)
                else:
                    one.grad = mean.clone() if is_sparse else torch.empty_like(layout).copy_(mean)


@torch.no_grad()
def _give(tensor: Tensor, value: Tensor) -> None:
    """Copy a value, also where an equal one cannot be written over."""
    if tensor.shape != value.shape or not torch.equal(tensor, value):
        tensor.copy_(value)


def _take_state(mine: torch.optim.Optimizer, given: torch.optim.Optimizer) -> None:
    """Take another optimizer's state, settings and count, without torch's change of dtypes."""
    if isinstance(mine, Counts) and isinstance(given, Counts):
        mine.k = given.k
    for group, its in zip(mine.param_groups, given.param_groups, strict=True):
        for name, value in its.items():
            if isinstance(value, Tensor):
                group[name].copy_(value)
            elif name != "params":
                group[name] = copy.deepcopy(value)
    kept = [
        [one for group in each.param_groups for one in group["params"]] for each in (given, mine)
    ]
    own = dict(zip(*kept, strict=True))
    state = {own[one]: copy.deepcopy(found) for one, found in given.state.items()}
    for one in own.values():
        mine.state.pop(one, None)
    mine.state.update(state)


def _mean_in_rank_order(gradients: list[Tensor | None], like: Tensor) -> Tensor:
    """Return the mean, added up in f32, or in f64 for f64, on the host as a session does."""
    if like.is_complex():
        parts = [None if one is None else torch.view_as_real(one) for one in gradients]
        return torch.view_as_complex(_mean_in_rank_order(parts, torch.view_as_real(like)))
    wide = torch.float64 if like.dtype is torch.float64 else torch.float32
    total: Tensor | None = None
    for gradient in gradients:
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()
        term = (
            torch.zeros(like.shape, dtype=wide, device="cpu")
            if gradient is None
            else gradient.cpu().to(wide)
        )
        total = term if total is None else total + term
    assert total is not None
    return (total / len(gradients)).to(like.device, like.dtype)
