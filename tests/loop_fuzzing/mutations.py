"""Proves that the search finds what it is for: breaks gradlane in known ways and looks.

`python -m tests.loop_fuzzing.mutations` prints, for each way, how many loops it took.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from gradlane.training import carrier
from gradlane.training.model import deferred_update as updates
from gradlane.training.model import hooks
from gradlane.training.model import joined_gradients as joined
from gradlane.training.model import lazy_list as waiting
from gradlane.training.model import lazy_parameter_dict as guard
from gradlane.training.model.kernel.gate import Gate
from gradlane.training.model.kernel.intake import Intake
from gradlane.training.model.kernel.update import StepUpdate
from gradlane.training.modules import gradient_intake as gradients
from tests.loop_fuzzing.generate import generate
from tests.loop_fuzzing.verdict import Verdict, judge
from tests.training.model.held_core import Copy, HeldChannel


@dataclass(frozen=True)
class Mutation:
    """A way to break gradlane, or the core below it.

    Attributes:
        name: what is wrong then.
        breaks: makes it so while its context lasts.
        seed: a loop shortly after this one shows it.
        joins: small gradients travel together in its loops; else each travels alone.
    """

    name: str
    breaks: Callable[[], AbstractContextManager[Any]]
    seed: int = 0
    joins: bool = True


def _no_wait_before_forward() -> AbstractContextManager[Any]:
    return mock.patch.object(hooks.ForwardWait, "__call__", lambda *_: None)


@contextlib.contextmanager
def _no_wait_in_attributes() -> Iterator[None]:
    with (
        mock.patch.object(guard.LazyParameterDict, "__getitem__", dict.__getitem__),
        mock.patch.object(Gate, "before_operation", lambda *_: None),
    ):
        yield


@contextlib.contextmanager
def _no_wait_in_lists() -> Iterator[None]:
    with (
        mock.patch.object(guard.LazyParameterDict, "_before_list", lambda _: None),
        mock.patch.object(Gate, "before_operation", lambda *_: None),
    ):
        yield


def _no_wait_for_gradients() -> AbstractContextManager[Any]:
    return mock.patch.object(Gate, "before_grad", lambda *_, **__: None)


@contextlib.contextmanager
def _late_hyper_parameters() -> Iterator[None]:
    apply = updates.DeferredUpdate.apply

    def late(self: Any, arrived: Any) -> None:
        self.record()
        apply(self, arrived)

    with mock.patch.object(updates.DeferredUpdate, "apply", late):
        yield


def _gradients_left_behind() -> AbstractContextManager[Any]:
    return mock.patch.object(updates.DeferredUpdate, "leave_none", lambda _: None)


def _gradients_lent_though_shared() -> AbstractContextManager[Any]:
    return mock.patch.object(gradients, "is_alone", lambda _: True)


@contextlib.contextmanager
def _means_left_in_groups() -> Iterator[None]:
    take = joined.JoinedGradients.take_means

    def left(self: Any, numbers: Any, wait: Any, *, lends: bool) -> Any:
        return take(self, numbers, wait, lends=True)

    with mock.patch.object(joined.JoinedGradients, "take_means", left):
        yield


def _layouts_ignored() -> AbstractContextManager[Any]:
    return mock.patch.object(gradients, "same_layout", lambda *_: True)


@contextlib.contextmanager
def _state_read_early() -> Iterator[None]:
    with (
        mock.patch.object(Gate, "before_optimizer_state", lambda *_: None),
        mock.patch.object(waiting.LazyParameterList, "_wait", lambda _: None),
    ):
        yield


def _updates_under_the_readers_modes() -> AbstractContextManager[Any]:
    return mock.patch.multiple(updates, undisturbed=contextlib.ExitStack)


def _no_mean_without_gradient() -> AbstractContextManager[Any]:
    absent = HeldChannel.tensor_absent

    def lands_nowhere(self: Any, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        absent(self, tensor, step, pointer, nbytes)
        if tensor in self.lent:
            self.lent[tensor].own = self.lent[tensor].pointer

    return mock.patch.object(HeldChannel, "tensor_absent", lands_nowhere)


def _after_the_first_mean(spoil: Callable[[Any, Copy], None]) -> AbstractContextManager[Any]:
    """Do something with the first tensor's mean once it has landed."""
    land = HeldChannel.land

    def spoiled(self: Any, tensors: list[int]) -> None:
        first = self.lent.get(self.members[0]) if self.members[0] in tensors else None
        land(self, tensors)
        if first is not None and self.step >= 2:
            spoil(self, first)

    return mock.patch.object(HeldChannel, "land", spoiled)


def _wrong_last_bit() -> AbstractContextManager[Any]:
    def spoil(_: Any, mean: Copy) -> None:
        ctypes.c_uint8.from_address(mean.own).value ^= 1

    return _after_the_first_mean(spoil)


def _released_early() -> AbstractContextManager[Any]:
    def spoil(channel: Any, mean: Copy) -> None:
        if channel.rank != 0:
            # What lies there from when it was lent.
            ctypes.memset(mean.own, 0xFF, mean.bytes.size)

    return _after_the_first_mean(spoil)


@contextlib.contextmanager
def _absent_as_zeros() -> Iterator[None]:
    def zeros(self: Any, index: int, step: int) -> torch.Tensor:
        entry = self._trained[index]
        landing = torch.empty_strided(entry.shape, entry.stride, dtype=entry.dtype).zero_()
        self._channel.gradient_ready(index, step, landing.data_ptr(), entry.nbytes)
        return landing

    def none_absent(self: Any, _: Any) -> list[float]:
        return [0.0] * len(self._slot)

    with (
        mock.patch.object(carrier.DirectCarrier, "submit_absent", zeros),
        mock.patch.object(joined.JoinedGradients, "_wait_for_absences", none_absent),
    ):
        yield


@contextlib.contextmanager
def _last_parameter_never_updated() -> Iterator[None]:
    apply = updates.DeferredUpdate.apply

    def forget(self: Any, arrived: Any) -> None:
        kept = list(arrived)
        apply(self, kept[:-1] if len(kept) > 2 else kept)

    with mock.patch.object(updates.DeferredUpdate, "apply", forget):
        yield


@contextlib.contextmanager
def _later_parts_dropped() -> Iterator[None]:
    take = Intake.take_gradient
    end = StepUpdate.end
    first: dict[tuple[int, int], torch.Tensor] = {}

    def drop(self: Any, index: int, parameter: Any) -> None:
        gradient = gradients.raw_grad(parameter)
        if gradient is not None:
            key = (threading.get_ident(), index)
            gradients.set_raw_grad(parameter, first.setdefault(key, gradient.clone()).clone())
        take(self, index, parameter)

    def forget(self: Any, *arguments: Any, **options: Any) -> None:
        for key in list(first):
            if key[0] == threading.get_ident():
                first.pop(key)
        end(self, *arguments, **options)

    with (
        mock.patch.object(Intake, "take_gradient", drop),
        mock.patch.object(StepUpdate, "end", forget),
    ):
        yield


MUTATIONS = (
    Mutation("no wait before a module's forward", _no_wait_before_forward, seed=129),
    Mutation("no wait when a parameter is read as an attribute", _no_wait_in_attributes, seed=67),
    Mutation("no wait when parameters are listed", _no_wait_in_lists, seed=3),
    Mutation("no wait when a gradient is touched", _no_wait_for_gradients, seed=1),
    Mutation("hyper-parameters of a later moment", _late_hyper_parameters, seed=1),
    Mutation("gradients left behind after the update", _gradients_left_behind, seed=21),
    Mutation(
        "gradients lent though others read them",
        _gradients_lent_though_shared,
        seed=10,
        joins=False,
    ),
    Mutation("memory layouts of gradients ignored", _layouts_ignored, seed=6139, joins=False),
    Mutation("means left where the next step's gradients go", _means_left_in_groups, seed=0),
    Mutation("the optimizer's state read early", _state_read_early, seed=55),
    Mutation(
        "updates under the reader's inference mode", _updates_under_the_readers_modes, seed=37
    ),
    Mutation("no mean for ranks without a gradient", _no_mean_without_gradient, seed=7),
    Mutation("the last bit of a mean is wrong", _wrong_last_bit),
    Mutation("released before it has landed", _released_early),
    Mutation("absent gradients taken for zeros", _absent_as_zeros, seed=8),
    Mutation("a parameter left out of an update", _last_parameter_never_updated, seed=1),
    Mutation("a step's later gradients dropped", _later_parts_dropped, seed=4),
)


def loops_to_find(mutation: Mutation, first_seed: int, most: int) -> tuple[int, Verdict] | None:
    """Run loops until one shows a mutation.

    Args:
        mutation: how to break gradlane.
        first_seed: of the loops.
        most: how many to run.

    Returns:
        How many it took and the verdict, or None. Loops that fail by themselves do not count.
    """
    most_joined = joined.MEMBER_BYTES_MAX if mutation.joins else 0
    with mock.patch.object(joined, "MEMBER_BYTES_MAX", most_joined):
        for count in range(1, most + 1):
            loop = generate(first_seed + count - 1, odd=False)
            with mutation.breaks():
                verdict = judge(loop)
            if not verdict.is_right and judge(loop).is_right:
                return count, verdict
    return None


def main(arguments: list[str] | None = None) -> int:
    """Look for every mutation; returns 0 if all were found."""
    parser = argparse.ArgumentParser(prog="python -m tests.loop_fuzzing.mutations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--loops", type=int, default=300, help="how many at most, a mutation")
    options = parser.parse_args(arguments)
    missed = 0
    for mutation in MUTATIONS:
        found = loops_to_find(mutation, options.seed, options.loops)
        missed += found is None
        text = f"after {found[0]:>3}: {found[1].kind[:60]}" if found else "NOT FOUND"
        print(f"{mutation.name:<50} {text}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
