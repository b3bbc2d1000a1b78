"""The steps of all optimizers of one model.

The first of them to step ends the step of the model. Until the others step, or until their
gradients are reset, they are *open*: their means stay in `.grad`, as DDP leaves them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from gradlane.errors import UsageError
from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.modules.gradient_intake import raw_grad


class UpdateSet:
    """Gives each mean to the optimizer that steps its parameter."""

    def __init__(
        self, updates: Sequence[DeferredUpdate], owners: Sequence[int], parameters: Sequence[Tensor]
    ) -> None:
        """Drive optimizers.

        Args:
            updates: one for each, by the optimizer's number.
            owners: number of the optimizer that holds each trained parameter.
            parameters: trained parameters by tensor number.
        """
        self._updates = updates
        self._owners = owners
        self._parameters = parameters
        self._open: set[int] = set()
        self._stepped: set[int] = set()
        """Optimizers that have stepped in the step that has ended."""

    @property
    def is_single(self) -> bool:
        """Whether there is one optimizer."""
        return len(self._updates) == 1

    @property
    def is_known(self) -> bool:
        """Whether all optimizers are torch's own."""
        return all(update.is_known for update in self._updates)

    @property
    def has_open(self) -> bool:
        """Whether an optimizer may still step in the step that has ended."""
        return bool(self._open)

    @property
    def stepped(self) -> tuple[int, ...]:
        """The optimizers that have stepped in the step that has ended; empty if there is one."""
        return () if self.is_single else tuple(sorted(self._stepped))

    def is_open(self, number: int) -> bool:
        """Return whether an optimizer may still step in the step that has ended."""
        return number in self._open

    def is_held(self, index: int) -> bool:
        """Return whether the mean of a parameter stays in `.grad`, for an optimizer to step."""
        return self._owners[index] in self._open

    def indices_of(self, number: int) -> list[int]:
        """Return the trained parameters of an optimizer."""
        return [index for index, owner in enumerate(self._owners) if owner == number]

    def have_gradients(self, *, but: int) -> bool:
        """Return whether parameters of other optimizers than one have a gradient in `.grad`."""
        return any(
            raw_grad(parameter) is not None
            for parameter, owner in zip(self._parameters, self._owners, strict=True)
            if owner != but
        )

    @property
    def drops_means(self) -> bool:
        """Whether nothing has a mean any more once it was applied."""
        return self.is_single and self._updates[0].drops_means

    def begin(self) -> None:
        """Begin another step: what is in `.grad` goes on adding up there."""
        self._open.clear()

    def record(self, number: int) -> None:
        """Keep the hyper-parameters of an optimizer that steps now.

        Raises:
            UsageError: it was given a parameter that it did not have.
        """
        self._updates[number].record()
        if self.is_single:
            return
        for index, owner in enumerate(self._owners):
            if owner != number and self._updates[number].holds(index):
                raise UsageError(
                    f"optimizer {number} was given a parameter of shape "
                    f"{tuple(self._parameters[index].shape)} that optimizer {owner} had when the "
                    "model was prepared: call session.prepare(model, optimizers) again, on all "
                    "ranks"
                )
        self._open.discard(number)
        self._stepped.add(number)

    def record_first(self, number: int) -> None:
        """Record the step that ends a step of the model; the other optimizers are open then."""
        self._stepped.clear()
        self.record(number)
        self._open = set(range(len(self._updates))) - {number}
        for other in self._open:
            self._updates[other].expect_step()

    def record_all(self) -> None:
        """Record the optimizers as they are, without a step.

        Raises:
            UsageError: one was given a parameter that the model did not have.
        """
        for update in self._updates:
            update.record()

    def defers(self, number: int | None = None) -> bool:
        """Return whether the next update of an optimizer, or all, may happen later, in parts."""
        if number is not None:
            return self._updates[number].defers()
        return all(update.defers() for update in self._updates)

    @property
    def may_defer(self) -> bool:
        """Whether updates may happen later than the program's call, wherever they happen."""
        return all(update.may_defer for update in self._updates)

    @property
    def is_guarded(self) -> bool:
        """Whether looks at all optimizers' groups are noticed, and these have all parameters."""
        guarded = all(update.is_guarded for update in self._updates)
        return guarded and sum(update.count for update in self._updates) == len(self._parameters)

    def is_scaled(self, number: int) -> bool:
        """Return whether a scaler has an optimizer unscale gradients itself, in `step`."""
        return self._updates[number].is_scaled

    def check_unscaled(self, number: int, step: int) -> None:
        """Check that no scaler has judged gradients before they are averaged."""
        self._updates[number].check_unscaled(step)

    def reset(self, number: int | None, set_to_none: bool) -> None:
        """Do what `zero_grad()` means for gradients that are not in `.grad` yet.

        Args:
            number: the optimizer whose `zero_grad` it is; None: the model's.
            set_to_none: as the program gave it.
        """
        for one, update in enumerate(self._updates):
            if number is None or one == number:
                self._open.discard(one)
                if set_to_none:
                    update.leave_none()
                else:
                    update.zero_in_place()

    def note_written(self, index: int) -> None:
        """Note that the program has set `.grad` since the step: it stays there."""
        self._updates[self._owners[index]].note_written(index)

    def stepped_elsewhere(self, index: int) -> None:
        """Note that a server has stepped a parameter."""
        self._updates[self._owners[index]].stepped_elsewhere(index)

    def step_whole(self, number: int) -> None:
        """Step an optimizer on `.grad`, as the program would."""
        self._updates[number].step_whole()

    def step_evaluating(self, number: int, closure: Callable[[], Any]) -> Any:
        """Step an optimizer that calls a closure as often as it likes; returns its result."""
        return self._updates[number].step_evaluating(closure)

    def take_notice(self, number: int) -> str:
        """Return the warning for the program after a step once; empty if there is none."""
        update = self._updates[number]
        notice, update.notice = update.notice, ""
        return notice

    def apply(self, arrived: Iterable[tuple[int, Tensor]]) -> None:
        """Step the parameters whose means are given, each optimizer's in one call."""
        if self.is_single:
            self._updates[0].apply(arrived)
            return
        parts: dict[int, list[tuple[int, Tensor]]] = {}
        for index, mean in arrived:
            parts.setdefault(self._owners[index], []).append((index, mean))
        for number in sorted(parts):
            if number in self._stepped:
                self._updates[number].apply(parts[number])
            else:
                self._updates[number].hold(parts[number])

    def apply_held(self, number: int, indices: Iterable[int]) -> None:
        """Step the parameters of an optimizer whose means are in `.grad` already."""
        self._updates[number].apply_held(indices)

    def end_parts(self) -> None:
        """End a step that was done in parts."""
        for number in sorted(self._stepped or {0}):
            self._updates[number].end_parts()
