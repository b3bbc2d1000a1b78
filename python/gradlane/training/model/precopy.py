"""A rank that joins gets the state while the others train on.

As a virtual machine moves (Clark et al., "Live Migration of Virtual Machines", NSDI 2005): up to
four members, the donors, copy a share of the state each between two steps and send it while
training goes on. Then they send in rounds what updates have used meanwhile, and the rank that joins
repeats these updates with its own optimizer. Each round is shorter, until it is about a step long.

Nothing depends on it: when the members let the rank in, everything in which it differs from them is
sent again (`model/joining.py`). A donor or a rank that is lost, or an optimizer that updates
otherwise there, costs the members a longer pause and no bit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradlane.errors import GradlaneError, SessionClosedError, UsageError
from gradlane.formats.serialization.pieces import pack, unpack
from gradlane.training.connection import SessionContext, open_channel
from gradlane.training.log import log
from gradlane.training.model.broadcast_state import (
    adopt_hyperparameters,
    adopt_state,
    broadcast_and_finish,
    state_entries,
)
from gradlane.training.model.deferred_update import DeferredUpdate
from gradlane.training.model.optimizers import is_known, step_of_class
from gradlane.training.model.update_log import LoggedStep, UpdateLog
from gradlane.training.options.going_on import GoingOn
from gradlane.training.rendezvous.bounded_store import BoundedStore
from gradlane.training.rendezvous.environment import RankInfo
from gradlane.training.rendezvous.incarnation import agree_on_incarnation
from gradlane.training.rendezvous.rendezvous import RendezvousScope
from gradlane.training.rendezvous.tensor_table import TensorEntry, build_table

DONORS_MAX = 4
"""Ranks that share in sending the state; more fill no port that these leave empty."""
_LOG_SHARES = 4
_LOG_BYTES_LEAST = 1 << 26
"""A donor keeps gradients of so many times its share of the state, or of so many bytes."""
_ROUND_STEPS = 3
"""A rank has nearly caught up with a round of so many steps: to let it in takes two or three."""
CONNECT_S = 15.0
"""Longest wait for ranks to connect to one that joins."""
_DIGEST_BYTES = 16
_GOODBYE_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True)
class PrecopyPlan:
    """Who gives the state, and where the pairs meet.

    Attributes:
        job: name in the store.
        donors: the first so many members.
        rank: that the rank which joins is going to have.
    """

    job: str
    donors: int
    rank: int


def donors_of(members: int, trained: int) -> int:
    """Return how many members give the state: each gives a trained tensor at least.

    Args:
        members: number of ranks that train.
        trained: number of trained tensors.
    """
    return min(members, DONORS_MAX, trained)


def shares_of(
    entries: Sequence[TensorEntry], state: Sequence[TensorEntry], donors: int
) -> list[list[TensorEntry]]:
    """Share tensors out among donors.

    Args:
        entries: the model's; those that are not trained, such as buffers that can be each rank's
            own, are rank 0's.
        state: the optimizer's.
        donors: how many there are.
    """
    shares: list[list[TensorEntry]] = [[] for _ in range(donors)]
    loads = [0] * donors
    shares[0] += [entry for entry in entries if not entry.trained]
    loads[0] = sum(entry.nbytes for entry in shares[0])
    others = [*(entry for entry in entries if entry.trained), *state]
    for entry in sorted(others, key=lambda entry: entry.nbytes, reverse=True):
        donor = loads.index(min(loads))
        shares[donor].append(entry)
        loads[donor] += entry.nbytes
    return shares


def pair_context(ctx: SessionContext, job: str, *, joins: bool) -> SessionContext:
    """Return the context of a world of two: a donor, and the rank that joins."""
    rank_info = RankInfo(int(joins), world_size=2, job=job, restart=0)
    # What is lost meanwhile ends the transfer.
    rendezvous = dataclasses.replace(ctx.options.rendezvous, join=False)
    connect_s = min(ctx.options.network.connect_timeout_s, CONNECT_S)
    network = dataclasses.replace(ctx.options.network, connect_timeout_s=connect_s)
    options = dataclasses.replace(
        ctx.options, going_on=GoingOn(on=False), rendezvous=rendezvous, network=network
    )
    return dataclasses.replace(ctx, rank_info=rank_info, options=options)


def transfer(
    ctx: SessionContext,
    scope: RendezvousScope,
    entries: Sequence[TensorEntry],
    ranks: Sequence[int],
) -> None:
    """Give the values of tensors to the rank that joins; a call of both ranks of a pair.

    Args:
        ctx: of `pair_context`.
        scope: of the pair, for this alone.
        entries: the tensors; where there are none, nothing is done.
        ranks: the numbers of both ranks in errors.

    Raises:
        GradlaneError: the other rank is lost.
    """
    if not entries:
        return
    rows = [entry.bytes_row() for entry in entries]
    channel = open_channel(ctx, scope, rows, None, update="worker")
    gives = ctx.rank_info.rank == 0
    doing = "handing over the state"
    broadcast_and_finish(ctx, channel, entries, gives, ranks, doing, _GOODBYE_S)


class _Pair:
    """A donor and the rank that joins, which meet for one round after the other."""

    def __init__(
        self,
        ctx: SessionContext,
        store: BoundedStore,
        plan: PrecopyPlan,
        donor: int,
        joins: bool,
        look: Callable[[], object],
    ) -> None:
        self.ctx = pair_context(ctx, f"{plan.job}/{donor}", joins=joins)
        self._store = store.as_rank(self.ctx.rank_info.rank)
        self._look = look
        network = self.ctx.options.network
        # The rank that joins waits for steps, a donor for the answer alone.
        self._limit_s = network.progress_timeout_s if joins else network.connect_timeout_s
        self._incarnation = agree_on_incarnation(
            self._store, self.ctx.rank_info, network.connect_timeout_s, look
        )
        self._rounds = 0
        self.ranks = [donor, plan.rank]

    def meet(self) -> RendezvousScope:
        """Open the scope of the next round."""
        self._rounds += 1
        return RendezvousScope(
            self._store,
            self.ctx.rank_info,
            f"round-{self._rounds}",
            self._limit_s,
            self._incarnation,
            self._look,
        )


def digest_of(entry: TensorEntry) -> bytes:
    """Return a digest of the bits of a tensor."""
    with torch.no_grad():
        flat = entry.tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=_DIGEST_BYTES).digest()


def _digests_of(entries: Sequence[TensorEntry]) -> dict[int, bytes]:
    """Return digests of tensors by the `id` of each."""
    with ThreadPoolExecutor(DONORS_MAX) as pool:
        digests = pool.map(digest_of, entries)
        return dict(zip((id(entry.tensor) for entry in entries), digests, strict=True))


def _gradients(steps: Sequence[LoggedStep], trained: Sequence[TensorEntry]) -> list[TensorEntry]:
    """Return the gradients of some steps as tensors that can be sent."""
    return [
        dataclasses.replace(trained[index], name=f"{place}/{index}", tensor=gradient)
        for place, step in enumerate(steps)
        for index, gradient in step.gradients.items()
    ]


def _wait_for(thread: threading.Thread, look: Callable[[], object]) -> None:
    """Wait until a thread has ended.

    Args:
        thread: of a pre-copy.
        look: called while waiting; raises where waiting is in vain.
    """
    while thread.is_alive():
        look()
        thread.join(_POLL_S)


class PrecopySource:
    """A donor's side, in a thread of its own."""

    def __init__(
        self,
        ctx: SessionContext,
        store: BoundedStore,
        plan: PrecopyPlan,
        entries: Sequence[TensorEntry],
        optimizer: Optimizer,
        described: bytes,
        look: Callable[[], object],
    ) -> None:
        """Copy this rank's share, between two steps; all parameters have their updates.

        Args:
            ctx: of the session.
            store: the rendezvous store.
            plan: who gives.
            entries: the model's table, with the buffers that it has now.
            optimizer: of the model.
            described: what `describe_state` returns now on rank 0, and empty on the others.
            look: called while waiting; raises when the session has failed.
        """
        self._ctx, self._store, self._plan = ctx, store, plan
        self._donor = ctx.membership.rank
        self._described = described
        self._look_at_session = look
        self._trained = [entry for entry in entries if entry.trained]
        self._own = shares_of(entries, state_entries(optimizer), plan.donors)[self._donor]
        self._digests: dict[int, bytes] = {}
        with torch.no_grad():
            self._share = [
                dataclasses.replace(entry, tensor=entry.host_memory().copy_(entry.tensor))
                for entry in self._own
            ]
        numbers = {entry.name: index for index, entry in enumerate(self._trained)}
        own = shares_of(self._trained, [], plan.donors)[self._donor]
        share_bytes = sum(entry.nbytes for entry in self._own)
        self.log = UpdateLog(
            [numbers[entry.name] for entry in own], max(_LOG_SHARES * share_bytes, _LOG_BYTES_LEAST)
        )
        """Notes what updates use from now on."""
        self._scope: RendezvousScope | None = None
        """Of the round that is under way; None: none is."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="gradlane-precopy", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        self._thread.start()

    def end(self) -> None:
        """Send what is there as the last round: the rank that joins is let in now.

        All parameters have their updates, and nothing trains before `finish` has returned.
        """
        self.log.close()

    def finish(self, look: Callable[[], object]) -> dict[int, bytes]:
        """Wait until all is sent; return digests of this rank's share by the `id` of each tensor.

        Args:
            look: called while waiting; raises where waiting is in vain.
        """
        _wait_for(self._thread, look)
        return self._digests

    def close(self, wait_s: float = 0.0) -> None:
        """Give up, and wait so long for the thread."""
        self._is_closing = True
        self.log.close()
        self._thread.join(wait_s)

    def _look(self) -> None:
        if self._is_closing:
            raise SessionClosedError("the session has ended")
        self._look_at_session()

    def _run(self) -> None:
        try:
            self._send()
        except Exception as error:
            # Whatever it is, this rank trains on.
            log.info(
                "rank %d: a rank that joins gets the rest of the state while the others wait: "
                "%s: %s",
                self._donor,
                type(error).__name__,
                error,
            )
            self._tell_failure(f"{type(error).__name__}: {error}")
        finally:
            self.log.drop()
            self._share = []

    def _tell_failure(self, failure: str) -> None:
        # The rank that joins waits for the next round, in vain.
        if self._scope is not None:
            with contextlib.suppress(GradlaneError):
                self._scope.put("steps", pack({"failure": failure}))

    def _send(self) -> None:
        pair = _Pair(self._ctx, self._store, self._plan, self._donor, False, self._look)
        scope = self._scope = pair.meet()
        rows = [entry.row() for entry in self._share]
        scope.put("share", pack({"rows": rows, "state": self._described}))
        transfer(pair.ctx, scope, self._share, pair.ranks)
        scope.delete_keys()
        self._share = []
        is_last = False
        while not is_last:
            scope = self._scope = pair.meet()
            steps, is_last = self.log.wait_for_steps(self._look)
            if self.log.is_full:
                raise UsageError(
                    f"rank {self._donor} had no room left for the gradients of its updates: they "
                    "come faster than the connection sends them, or memory is short"
                )
            rows = [{"groups": step.groups, "tensors": list(step.gradients)} for step in steps]
            told = {"steps": rows, "is_last": is_last, "failure": ""}
            scope.put("steps", pack(told))
            # Also where there is no gradient: no round begins before the last one was taken.
            scope.get("taken", 1)
            transfer(pair.ctx, scope, _gradients(steps, self._trained), pair.ranks)
            scope.delete_keys()
        self._digests = _digests_of(self._own)


class PrecopyTarget:
    """The side of the rank that joins, in threads of its own."""

    def __init__(
        self,
        ctx: SessionContext,
        store: BoundedStore,
        plan: PrecopyPlan,
        model: nn.Module,
        optimizer: Optimizer,
    ) -> None:
        """Begin to take the state over.

        Args:
            ctx: of the session.
            store: the rendezvous store.
            plan: who gives.
            model: the user's.
            optimizer: the user's.
        """
        self._ctx, self._store, self._plan = ctx, store, plan
        self._model, self._optimizer = model, optimizer
        self._arrived: list[list[LoggedStep]] = [[] for _ in range(plan.donors)]
        self._rounds: list[list[int]] = [[] for _ in range(plan.donors)]
        """How many steps each round of a donor has had."""
        self._ended: set[int] = set()
        """Donors that have nothing more to give."""
        self._changed = threading.Condition()
        self._failure = ""
        self._digests: dict[int, bytes] = {}
        self._thread = threading.Thread(target=self._run, name="gradlane-precopy", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether this rank is nearly where the members are, or will not come nearer."""
        with self._changed:
            is_near = all(map(self._is_near, range(self._plan.donors)))
        return is_near or not self._thread.is_alive()

    def _is_near(self, donor: int) -> bool:
        rounds = self._rounds[donor]
        no_shorter = len(rounds) > 1 and rounds[-1] >= rounds[-2]
        return donor in self._ended or bool(rounds and rounds[-1] <= _ROUND_STEPS) or no_shorter

    def finish(self, look: Callable[[], object]) -> dict[int, bytes]:
        """Wait until all that the donors give is here.

        Args:
            look: called while waiting; raises where waiting is in vain.

        Returns:
            Digests of the state by the `id` of each tensor; none where it is not all here.
        """
        _wait_for(self._thread, look)
        return self._digests

    def close(self, reason: str) -> None:
        """Give up; no tensor is written any more when it returns."""
        self._fail(reason)
        self._thread.join()

    def _fail(self, reason: str) -> None:
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify()

    def _look(self) -> None:
        if self._failure:
            raise SessionClosedError(self._failure)

    def _run(self) -> None:
        begun_s = time.monotonic()
        try:
            steps = self._take_over()
        except Exception as error:
            # Whatever it is, the members send again what differs, or refuse this rank by name.
            self._fail(f"{type(error).__name__}: {error}")
            log.info("this rank gets its state while the others wait: %s", self._failure)
            return
        log.info(
            "the state came in %.1f s while the others trained %d steps, which this rank repeated",
            time.monotonic() - begun_s,
            steps,
        )

    def _take_over(self) -> int:
        """Take over all that the donors give; returns how many steps were repeated."""
        optimizer, donors = self._optimizer, self._plan.donors
        if not is_known(optimizer):
            raise UsageError(f"updates of {type(optimizer).__name__} cannot be repeated")
        entries = build_table(self._model)
        trained = [entry for entry in entries if entry.trained]
        with ThreadPoolExecutor(donors) as pool:
            pairs = list(pool.map(self._pair, range(donors)))
            scopes = [pair.meet() for pair in pairs]
            told = [unpack(scope.get("share", 0), torch.device("cpu")) for scope in scopes]
            adopt_state(optimizer, told[0]["state"], 1, 0)
            shares = shares_of(entries, state_entries(optimizer), donors)
            if [one["rows"] for one in told] != [[one.row() for one in share] for share in shares]:
                raise UsageError("the members have another model or optimizer's state")
            for donor in range(donors):
                pool.submit(
                    self._receive, donor, pairs[donor], scopes[donor], shares[donor], trained
                )
            count = self._repeat(trained)
        self._digests = _digests_of([*entries, *state_entries(optimizer)])
        return count

    def _pair(self, donor: int) -> _Pair:
        return _Pair(self._ctx, self._store, self._plan, donor, True, self._look)

    def _receive(
        self,
        donor: int,
        pair: _Pair,
        scope: RendezvousScope,
        share: Sequence[TensorEntry],
        trained: Sequence[TensorEntry],
    ) -> None:
        """Receive all that one donor gives, in a thread of its own."""
        try:
            transfer(pair.ctx, scope, share, pair.ranks)
            is_last = False
            while not is_last:
                last, scope = scope, pair.meet()
                told = unpack(scope.get("steps", 0), torch.device("cpu"))
                last.delete_keys()
                if told["failure"]:
                    raise UsageError(f"rank {donor} gives no more: {told['failure']}")
                steps = [_empty_step(one, trained) for one in told["steps"]]
                with self._changed:
                    self._rounds[donor].append(len(steps))
                scope.put("taken", "")
                transfer(pair.ctx, scope, _gradients(steps, trained), pair.ranks)
                is_last = told["is_last"]
                with self._changed:
                    self._arrived[donor] += steps
                    if is_last:
                        self._ended.add(donor)
                    self._changed.notify()
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    def _repeat(self, trained: Sequence[TensorEntry]) -> int:
        """Repeat the members' updates until the last one; returns how many there were."""
        repeated = RepeatedUpdates(self._optimizer, trained)
        count = 0
        while True:
            with self._changed:
                while not all(self._arrived):
                    self._look()
                    if len(self._ended) == self._plan.donors:
                        return count
                    self._changed.wait(_POLL_S)
                parts = [arrived.pop(0) for arrived in self._arrived]
            repeated.repeat(parts)
            count += 1


class RepeatedUpdates:
    """Repeats updates of an optimizer with the same bits, from what they have used elsewhere."""

    def __init__(self, optimizer: Optimizer, trained: Sequence[TensorEntry]) -> None:
        """Repeat nothing yet.

        Args:
            optimizer: in the state of before the first one; one that `is_known`.
            trained: the trained parameters, by tensor number.
        """
        parameters = [entry.tensor for entry in trained]
        self._optimizer, self._parameters = optimizer, parameters
        self._update = DeferredUpdate(
            optimizer,
            optimizer.step,
            step_of_class(optimizer),
            parameters,
            is_known=True,
        )

    def repeat(self, parts: Sequence[LoggedStep]) -> None:
        """Repeat the update of one step.

        Args:
            parts: of the step, each with other gradients and the same groups.
        """
        adopt_hyperparameters(self._optimizer, parts[0].groups)
        self._update.record()
        self._update.leave_none()
        self._update.apply(
            (index, gradient.to(self._parameters[index].device))
            for part in parts
            for index, gradient in part.gradients.items()
        )
        self._update.end_parts()


def _empty_step(told: dict[str, Any], trained: Sequence[TensorEntry]) -> LoggedStep:
    """Return a step with memory for its gradients."""
    gradients = {index: trained[index].host_memory() for index in told["tensors"]}
    return LoggedStep(told["groups"], gradients)
