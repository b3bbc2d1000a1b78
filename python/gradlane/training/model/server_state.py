"""Optimizer state on the servers: moved there, and brought back in torch's own format.

With `update="server"` each slice's owner alone keeps the optimizer's state of that slice. Every
rank knows how many steps each tensor has taken, since all ranks see the same tensors become ready.
State goes to the owners from tensors that lie whole on every rank, such as those of a loaded
checkpoint, without a byte on the network; to dedicated servers rank 0 sends it, in steps of their
own, once all ranks have loaded the same. It comes back in `state_dict()`, which is therefore a
collective call: the owners broadcast it in steps of their own. Both are by tensor, so that neither
the world size nor the slices matter to a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from gradlane.errors import PeerLostError, RanksDifferError, RendezvousError, SessionFailedError
from gradlane.training.core import RankChannel
from gradlane.training.model.barrier import Barrier
from gradlane.training.model.lazy_state import plain_state
from gradlane.training.model.served_parameters import ServedParameters
from gradlane.training.model.server_updates import ServerUpdates
from gradlane.training.model.state_checks import (
    MEANS,
    MOMENTUM,
    check_states,
    digest_of,
    mark_incomplete,
    state_names,
    states_by_parameter,
)
from gradlane.training.rendezvous.bounded_store import StoreLostError
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.signatures import StoreValueRefusedError
from gradlane.training.rendezvous.tensor_table import TensorEntry, in_layout


@dataclass(frozen=True)
class AsyncContext:
    """The parts that asynchronous training adds.

    Attributes:
        barrier: where all ranks meet.
        settle: waits for this rank's own step.
        pushes: how many gradients of each tensor this rank has handed over, kept up to date.
    """

    barrier: Barrier
    settle: Callable[[], None]
    pushes: Sequence[int]


class ServerState:
    """The state of one optimizer that runs on the servers, seen from one rank."""

    def __init__(
        self,
        *,
        channel: RankChannel,
        scope: RendezvousScope,
        optimizer: Optimizer,
        trained: Sequence[TensorEntry],
        updates: ServerUpdates,
        parameters: ServedParameters,
        spend_step: Callable[[Callable[[int], None]], None],
        translating: Callable[[str], AbstractContextManager[None]],
        asynchronous: AsyncContext | None = None,
    ) -> None:
        """Take over whatever state the optimizer has.

        Args:
            channel: between steps.
            scope: where the ranks agree.
            optimizer: the user's, checked by `check_server_optimizer`.
            trained: table entries of the trained parameters, by tensor number.
            updates: count the tensors' steps.
            parameters: their memory.
            spend_step: runs a function with the number of a channel's step that is no training.
            translating: a context that turns errors of the channel into the package's own.
            asynchronous: given where each rank's push is a step of the optimizer.
        """
        self._channel = channel
        self._scope = scope
        self._optimizer = optimizer
        self._trained = trained
        self._updates = updates
        self._parameters = parameters
        self._spend_step = spend_step
        self._translating = translating
        self._asynchronous = asynchronous
        self._pushes_before = [0] * len(trained)
        self._loaded: dict[int, dict[str, Any]] = {}
        self._unagreed: str | None = None
        self._agreements = 0
        self._lent: list[Tensor] = []
        self._due: Sequence[dict[str, Any]] | None = None
        """State by tensor number that dedicated servers have not got yet."""
        self._take_over({})
        # `prepare` has compared it.
        self._unagreed = None
        if self._due is not None and self._updates.buffered:
            self._hand_over(self._due)
        self._due = None
        self._handles: list[Any] = [
            optimizer.register_state_dict_pre_hook(self._before_save),
            optimizer.register_state_dict_post_hook(self._after_save),
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def agree(self) -> None:
        """Check that all ranks have loaded the same state since the last step.

        Raises:
            RanksDifferError: they have not; raised on every rank.
            RendezvousError: a rank has loaded nothing.
        """
        if self._unagreed is None or self._asynchronous is not None:
            return
        mine, self._unagreed = self._unagreed, None
        for rank, theirs in self._exchange("load_state_dict", mine):
            if theirs != mine:
                raise RanksDifferError(
                    f"rank {self._scope.rank_info.rank} and rank {rank} have loaded different "
                    "optimizer states: load the same checkpoint on every rank"
                )
        if self._due is not None:
            due, self._due = self._due, None
            with self._translating("handing the optimizer's state to the servers"):
                self._hand_over(due)

    def bring_home(self) -> None:
        """Put all state into the optimizer on every rank; a collective call.

        Raises:
            RanksDifferError: the ranks have state of different tensors.
        """
        self._before_save(self._optimizer)
        self._updates.steps[:] = [0] * len(self._trained)
        self._updates.buffered.clear()

    def release(self) -> None:
        """Remove the hooks; an optimizer whose state stays behind refuses to go on without it."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        taken = self._updates.steps
        if self._asynchronous is not None:
            pushes = self._own_pushes()
            taken = [have + more for have, more in zip(taken, pushes, strict=True)]
            updates = self._updates
            updates.buffered |= {index for index in updates.with_momentum if pushes[index] > 0}
        if self._stored(taken):
            mark_incomplete(self._optimizer)

    # ---- out

    def _stored(self, steps: Sequence[int]) -> dict[str, list[int]]:
        """Return the tensors that have state, by its name; the same on every rank."""
        if isinstance(self._optimizer, SGD):
            return {MOMENTUM: sorted(self._updates.buffered)} if self._updates.buffered else {}
        indices = [index for index, taken in enumerate(steps) if taken > 0]
        return dict.fromkeys(MEANS, indices) if indices else {}

    def _before_save(self, optimizer: Optimizer) -> None:
        if self._asynchronous is not None:
            with self._translating("collecting the optimizer's state"):
                self._save_asynchronous(self._asynchronous)
            return
        stored = self._stored(self._updates.steps)
        if not stored:
            return
        self.agree()
        for rank, theirs in self._exchange("state_dict", json.dumps(stored)):
            if json.loads(theirs) != stored:
                raise RanksDifferError(
                    f"rank {rank} has optimizer state of other tensors than this one"
                )
        self._bring(stored, self._updates.steps)

    def _bring(self, stored: dict[str, list[int]], steps: Sequence[int]) -> None:
        for name, indices in stored.items():
            for index, value in self._gather(name, indices).items():
                state = plain_state(self._optimizer)[self._trained[index].tensor]
                if not isinstance(self._optimizer, SGD):
                    state["step"] = torch.tensor(
                        float(steps[index]), dtype=torch.float32, device="cpu"
                    )
                state[name] = value

    def _own_pushes(self) -> list[int]:
        assert self._asynchronous is not None
        counts = zip(self._asynchronous.pushes, self._pushes_before, strict=True)
        return [pushes - before for pushes, before in counts]

    def _save_asynchronous(self, asynchronous: AsyncContext) -> None:
        """Put all state into the optimizer while every rank stands still."""
        updates = self._updates
        if isinstance(self._optimizer, SGD) and not (updates.with_momentum or updates.buffered):
            return
        asynchronous.settle()
        told = asynchronous.barrier.all_here(
            "optimizer.state_dict()", json.dumps(self._own_pushes())
        )
        # Nothing is under way now: every slice was updated with all pushes of all ranks.
        steps = list(self._updates.steps)
        for word in told:
            steps = [have + more for have, more in zip(steps, json.loads(word), strict=True)]
        if isinstance(self._optimizer, SGD):
            fresh = {index for index in self._updates.with_momentum if steps[index] > 0}
            self._updates.buffered |= fresh
        self._bring(self._stored(steps), steps)
        self._channel.set_optimizer(0, self._updates.rows())
        asynchronous.barrier.all_here("optimizer.state_dict(), with all state")

    def _after_save(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._forget_local()

    def _forget_local(self) -> None:
        for entry in self._trained:
            plain_state(self._optimizer).pop(entry.tensor, None)

    def _gather(self, name: str, indices: list[int]) -> dict[int, Tensor]:
        """Return the f32 state of tensors, laid out like them."""
        halves = [index for index in indices if self._is_short(index)]
        values = self._read(name, 0, indices)
        uppers = self._read(name, 1, halves) if halves else {}
        for index, upper in uppers.items():
            lower = values[index].view(torch.int16).to(torch.int32) & 0xFFFF
            words = (upper.view(torch.int16).to(torch.int32) << 16) | lower
            values[index] = in_layout(words.view(torch.float32), self._trained[index].stride)
        return values

    def _read(self, name: str, part: int, indices: list[int]) -> dict[int, Tensor]:
        """Have the owners broadcast one kind of state, or half of it, where parameters land."""
        rank_info, channel = self._scope.rank_info, self._channel
        self._parameters.check_unconverted()
        landings = {index: self._trained[index].host_memory() for index in indices}
        # If this breaks off, the core may still write there.
        self._lent = list(landings.values())
        asynchronous = self._asynchronous
        if asynchronous is not None:
            # With asynchronous training each rank asks alone, and owners have to know what for.
            channel.read_state(name, part)
            asynchronous.barrier.all_here(f"optimizer.state_dict(), reading {name}")

        def run(step: int) -> None:
            channel.step_begin(step)
            if asynchronous is None:
                channel.read_state(name, part)
            for index, entry in enumerate(self._trained):
                landing = landings.get(index)
                if landing is not None:
                    channel.set_parameter(index, landing.data_ptr(), entry.nbytes)
                # One rank submits a gradient that is not looked at: no owner answers without.
                gives = landing is not None and (
                    asynchronous is not None or index % rank_info.world_size == rank_info.rank
                )
                broadcast_state = channel.gradient_ready if gives else channel.tensor_absent
                broadcast_state(index, step, entry.tensor.data_ptr(), entry.nbytes)
            self._parameters.leave_out_others(step)
            channel.step_end(step)
            channel.wait_step(step)
            channel.take_ready(step)
            for index in landings:
                entry = self._trained[index]
                channel.set_parameter(index, entry.tensor.data_ptr(), entry.nbytes)

        self._spend_step(run)
        self._lent = []
        if asynchronous is not None:
            asynchronous.barrier.all_here(f"optimizer.state_dict(), with {name}")
        return landings

    # ---- in

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        self._loaded = states_by_parameter(optimizer, state_dict)
        # A state that does not fit is refused before torch changes anything.
        check_states(optimizer, self._trained, self._loaded)

    def _after_load(self, optimizer: Optimizer) -> None:
        loaded, self._loaded = self._loaded, {}
        short = {id(entry.tensor) for entry in self._trained if entry.dtype is not torch.float32}
        exact = {key: state for key, state in loaded.items() if key in short}
        if self._asynchronous is None:
            self._take_over(exact)
            return
        with self._translating("handing the optimizer's state to the servers"):
            self._take_over_asynchronous(self._asynchronous, exact)

    def _take_over_asynchronous(
        self, asynchronous: AsyncContext, exact: dict[int, dict[str, Any]]
    ) -> None:
        asynchronous.settle()
        asynchronous.barrier.all_here("optimizer.load_state_dict()")
        self._take_over(exact)
        self._pushes_before = list(asynchronous.pushes)
        self._channel.set_optimizer(0, self._updates.rows())
        told = asynchronous.barrier.all_here(
            "optimizer.load_state_dict(), with it", self._unagreed or ""
        )
        if len(set(told)) > 1:
            raise RanksDifferError(
                "the ranks have loaded different optimizer states: load the same checkpoint on "
                "every rank"
            )

    def _take_over(self, exact: dict[int, dict[str, Any]]) -> None:
        """Move the optimizer's state to the owners.

        Args:
            exact: state as it was before torch rounded it to the parameters' dtypes, by `id`.
        """
        states = [
            {
                **plain_state(self._optimizer).get(entry.tensor, {}),
                **exact.get(id(entry.tensor), {}),
            }
            for entry in self._trained
        ]
        names = state_names(self._optimizer)
        with self._translating("handing the optimizer's state to the servers"):
            self._load(states, names)
        self._unagreed = digest_of(states, names)
        self._forget_local()

    def _load(self, states: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
        goes_later = self._parameters.has_dedicated_servers
        if goes_later:
            self._due = states
        else:
            self._channel.clear_state()
        self._updates.buffered.clear()
        for index, (entry, state) in enumerate(zip(self._trained, states, strict=True)):
            self._updates.steps[index] = int(state.get("step", 0))
            for name in names:
                value = state.get(name)
                if value is not None:
                    if not goes_later:
                        values = _plain_values(value, entry)
                        self._channel.load_state(index, name, values.data_ptr(), values.numel())
                    self._updates.buffered.add(index)

    def _hand_over(self, states: Sequence[dict[str, Any]]) -> None:
        """Give dedicated servers all state, in place of what they have; a collective call."""
        # Results of these steps are the servers' parameters.
        self._parameters.hand_over_changes(self._spend_step)
        clear = True
        for name in state_names(self._optimizer):
            values = {
                index: _plain_values(state[name], entry)
                for index, (entry, state) in enumerate(zip(self._trained, states, strict=True))
                if state.get(name) is not None
            }
            halves = {index: one for index, one in values.items() if self._is_short(index)}
            for part, given in enumerate((values, halves)):
                if given or clear:
                    self._write(name, part, clear, given)
                    clear = False

    def _write(self, name: str, part: int, clear: bool, values: dict[int, Tensor]) -> None:
        """Hand over one kind of state, or half of it; values are f32, as in `_gather`."""
        contributed = {
            index: _half(one, part) if self._is_short(index) else one
            for index, one in values.items()
        }

        def run(step: int) -> None:
            self._channel.step_begin(step)
            self._channel.write_state(name, part, clear)
            self._parameters.give(step, contributed)

        self._spend_step(run)

    def _is_short(self, index: int) -> bool:
        """Return whether a parameter has two-byte elements, so that its state travels in halves."""
        return self._trained[index].dtype.itemsize == 2

    def _exchange(self, call: str, mine: str) -> list[tuple[int, str]]:
        """Tell all ranks something and return what each of them says."""
        rank_info = self._scope.rank_info
        self._agreements += 1
        key = f"state/{self._agreements}"
        self._scope.put(f"{key}/{rank_info.rank}", f"{call} {mine}")
        said = []
        for rank in range(rank_info.world_size):
            try:
                theirs = self._scope.get(f"{key}/{rank}", rank).decode()
            except (StoreLostError, StoreValueRefusedError):
                raise
            except (RendezvousError, SessionFailedError) as error:
                # Where this rank is the one at fault, others have waited for it in a step.
                if isinstance(error, PeerLostError) and error.rank != rank_info.rank:
                    raise
                text = (
                    f'optimizer.{call}() with update="server" is a collective call, which rank '
                    f"{rank} has not made: call it on every rank, also where the result is not "
                    f"saved ({error})"
                )
                if isinstance(error, SessionFailedError):
                    raise SessionFailedError(text, error.last_complete_step) from error
                raise RendezvousError(text) from error
            if not theirs.startswith(f"{call} "):
                raise RanksDifferError(
                    f"rank {rank_info.rank} called optimizer.{call}(), and rank {rank} "
                    f'optimizer.{theirs.split()[0]}(): with update="server" both are collective'
                )
            said.append((rank, theirs.removeprefix(f"{call} ")))
        self._scope.delete(f"state/{self._agreements - 1}/{rank_info.rank}")
        return said


def _plain_values(value: Tensor, entry: TensorEntry) -> Tensor:
    """Return a state as f32 on the CPU, laid out like its parameter."""
    return in_layout(value.detach().to("cpu", torch.float32), entry.stride)


def _half(values: Tensor, part: int) -> Tensor:
    """Return the lower (0) or upper (1) 16 bits of f32 values, in the order of their storage."""
    words = values.as_strided((values.numel(),), (1,)).view(torch.int16)
    return words[part::2].contiguous()
