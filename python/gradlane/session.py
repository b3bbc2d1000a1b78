"""Sessions: how a training program gets its ranks connected and its model hooked.

The loop stays the user's own::

    session = gradlane.init()
    model, optimizer = session.prepare(model, optimizer)
    for x, y in loader:
        loss_fn(model(x), y).backward()     # gradients leave as soon as they are ready
        optimizer.step()                    # returns at once
        optimizer.zero_grad()
    session.close()

`optimizer.step()` records the hyper-parameters of the moment; each parameter is updated when its
averaged gradient has arrived, at the latest when something reads it. References to parameters that
the program already holds (such as a list made before `step()`) are not guarded: call
`session.synchronize()` before reading through them.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from torch import nn
from torch._C._distributed_c10d import Store
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from gradlane import lifecycle
from gradlane.arrays.exchange import ArrayExchange
from gradlane.arrays.surface import SessionArrays
from gradlane.buffers import MODES
from gradlane.checkpoints.keeper import make_checkpoints
from gradlane.codec_choice import CodecChoice
from gradlane.connection import Surroundings
from gradlane.core import CoreModule
from gradlane.environment import Place
from gradlane.errors import GradlaneError, SessionClosed, UsageError
from gradlane.join import Join
from gradlane.observability.observer import make_observer
from gradlane.observability.reports import SessionReports
from gradlane.optimizers import steps_per_parameter
from gradlane.options import Options
from gradlane.pace import SessionPace
from gradlane.planner.in_force import PlanInForce
from gradlane.planner.plan import Plan
from gradlane.planner.sharing import PlanArgument, agree_on_plan
from gradlane.prepared import CLOSE_TIMEOUT_S, Prepared
from gradlane.rendezvous import Meeting, store_address
from gradlane.session_state import SessionState
from gradlane.staleness import Tally
from gradlane.standstill import Standstill
from gradlane.timeline.recorder import make_recorder

if TYPE_CHECKING:
    from gradlane.planner.links import LinkReport

ModelType = TypeVar("ModelType", bound=nn.Module)
OptimizerType = TypeVar("OptimizerType", bound=Optimizer)

_channels: dict[tuple[str, int, int], int] = {}
"""Channels made so far by (job, restart, rank): ranks that make the same calls count the same."""


class Session(SessionArrays, SessionState, SessionReports, SessionPace):
    """A rank's part in a training job; made by `gradlane.init`."""

    def __init__(
        self, core: CoreModule, options: Options, place: Place, store: Store, secret: str | None
    ) -> None:
        """Open a session; use `gradlane.init` instead."""
        host, port = store_address(store, os.environ)
        self._recorder = make_recorder(options, place)
        self._observer = make_observer(options, place)
        self._checkpoints = make_checkpoints(
            options.checkpoint,
            options.checkpoint_every,
            options.checkpoint_keep,
            place,
            options.connect_timeout_s,
        )
        self._standstill = Standstill(store, place)
        self._around = Surroundings(
            core,
            options,
            place,
            host,
            port,
            secret,
            self._standstill,
            self._observer,
            self._checkpoints,
            self._recorder,
        )
        self._store = store
        self._prepared: list[Prepared] = []
        self._start_arrays()
        self._plans = PlanInForce(options, self._meet, self._prepared, self.abort)
        self._ended: str | None = None
        lifecycle.watch(self)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._around.place.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._around.place.world_size

    def prepare(
        self,
        model: ModelType,
        optimizer: OptimizerType,
        *,
        defer: bool | None = None,
        buffers: str = "broadcast",
        plan: PlanArgument = None,
    ) -> tuple[ModelType, OptimizerType]:
        """Connect a model and its optimizer to all ranks; a collective call.

        Afterwards every rank has rank 0's parameters and buffers. In each step a parameter's
        gradient is the mean of what all ranks have in `.grad`, summed in rank order; none counts as
        zeros, and none on any rank stays none. The optimizer must hold exactly the trained
        parameters. Its state is not sent: load checkpoints on every rank, before or after.

        Between `backward()` and `optimizer.step()`, `.grad` is None or this rank's own, except that
        `model.parameters()` and `optimizer.param_groups` wait for the averaged gradients and put
        them there, so that `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)` and
        `GradScaler` are right; the update then waits for all gradients. After `step()` whatever
        reads a parameter waits for its update.

        A model may get several gradients in a step, from several losses or backward calls: gradlane
        learns how many come and sends their sum with the last. In the first step everything is
        sent at `step()`. Where the number grows later, use `no_sync`.

        Call it again, on all ranks between two steps, when parameters are frozen, unfrozen, added
        or removed: it connects the model anew.

        Args:
            model: on CPU or CUDA; parameters f32, f16, bf16, f64 or complex. Frozen parameters are
                sent once, as they are. Sparse gradients are made dense.
            optimizer: any of `torch.optim` except LBFGS and SparseAdam; others step whole, see
                `defer`. With `update="server"` its `state_dict()` and `load_state_dict()` are
                collective calls, too.
            defer: True: update parameters as their gradients arrive, which asks for an optimizer
                that treats each parameter by itself; False: `step()` waits for all gradients and
                updates there; None: True for optimizers that are known to allow it (those of
                `torch.optim`, and classes with an attribute `steps_per_parameter = True`).
            buffers: what happens to buffers, such as the statistics of batch norm, in each step:
                `"broadcast"`: every rank gets rank 0's; `"average"`: floating-point ones are
                averaged over the ranks, others are rank 0's; `"local"`: nothing. With
                `update="server"` nothing happens to them either.
            plan: settings for this model in place of the session's: a plan or the path of a plan
                file, which only rank 0 needs to have; `"auto"`: measure the links, record some
                steps of this training, simulate, and switch to what is fastest, if anything is
                (see `docs/planning.md`); `"poseidon"`: record some steps, and from then on send
                factors of the linear layers where they are fewer numbers (see `docs/factors.md`);
                None: the session's. Results are the same bits, but of tensors with another scheme.

        Returns:
            The same two objects.

        Raises:
            UsageError: the model was prepared before and is in the middle of a step.
            ValueError: the model or the optimizer cannot take part; the message names the tensor.
            RanksDiffer: the ranks' models, options or plans differ; raised on every rank.
            RendezvousError: a rank did not appear or cannot be reached.
        """
        self._check_open()
        if buffers not in MODES:
            raise ValueError(f"unknown buffers {buffers!r}; known are {', '.join(MODES)}")
        before, unable = None, None
        try:
            before = self._prepared_before(model)
        except GradlaneError as error:
            unable = error
        if plan is not None and self._around.options.is_asynchronous:
            raise ValueError(
                'plan= with strategy="asgd": plans choose among settings that give the same '
                "results; asynchronous training is none of them"
            )
        if plan is not None and self._around.options.leaves_out:
            raise ValueError(
                f"plan= with stragglers={self._around.options.stragglers!r}: plans are "
                "simulated, and switched to, with all ranks in every step; give the settings "
                "to gradlane.init"
            )
        agreed = agree_on_plan(self._meet(), plan, _trained_sizes(model), unable)
        residuals = None
        if before is not None:
            try:
                residuals = before.residuals.state_dict()
                self._part_with(before)
            except GradlaneError as error:
                # The others are on their way to the next meeting, and would wait there.
                self._meet().refuse(str(error))
                raise
        around = self._around
        if agreed.plan is not None:
            options = agreed.plan.settings.applied_to(around.options)
            around = replace(around, options=options, schemes=agreed.plan.schemes)
            self._plans.plan = agreed.plan
        learns = agreed.rule != "" and self.world_size > 1
        links = self.probe(directions=False) if learns else None
        deferred = steps_per_parameter(optimizer) if defer is None else defer
        prepared = Prepared(around, self._meet, model, optimizer, deferred, buffers)
        if residuals is not None:
            prepared.residuals.load_state_dict(prepared.residuals.fitting(residuals))
        self._prepared.append(prepared)
        if links is not None:
            self._plans.learn(prepared, links, agreed.rule)
        if defer is None and not deferred and self._around.options.update == "worker":
            warnings.warn(
                f"{type(optimizer).__name__} is not known to treat each parameter by itself, "
                "so step() waits for all gradients; pass defer=True to prepare(), or give the "
                "class an attribute steps_per_parameter = True, if it does",
                UserWarning,
                stacklevel=2,
            )
        return model, optimizer

    @property
    def codecs(self) -> list[CodecChoice]:
        """Which codec each trained tensor of the models, and each array, travels in, and why."""
        return [choice for part in self._parts() for choice in part.codecs]

    @property
    def schemes(self) -> dict[str, str]:
        """How each trained tensor of the models is aggregated: `ps`, `ring` or `sfb`, by name."""
        found: dict[str, str] = {}
        for prepared in self._prepared:
            found.update(prepared.schemes)
        return found

    @property
    def plan(self) -> Plan | None:
        """The plan in force: the last one that was given, or found; None before."""
        return self._plans.plan

    def probe(
        self,
        *,
        window_s: float = 1.0,
        directions: bool = True,
        on_phase: Callable[[str], None] = lambda text: None,
    ) -> LinkReport:
        """Measure bandwidth and latency between all ranks; a collective call.

        Args:
            window_s: seconds that each stream is measured for.
            directions: whether ports are also measured in one direction at a time.
            on_phase: told what is measured next.

        Returns:
            The same report on every rank.

        Raises:
            ValueError: the window is not 0.05 to 60 seconds.
            RendezvousError: two ranks cannot reach each other; raised on every rank.
        """
        from gradlane.planner.links import probe

        self._check_open()
        return probe(
            self._around,
            self._meet(),
            window_s=window_s,
            directions=directions,
            on_phase=on_phase,
        )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up in `.grad` without sending them, for accumulation over batches.

        As with DDP: run all backward calls of a step but the last inside, and the last outside,
        which sends the sums. Where all were inside, `optimizer.step()` sends them. It holds for all
        models of the session. What is sent are sums over batches: divide each loss by their number.
        """
        self._check_open()
        before = [(prepared.steps, prepared.steps.accumulates) for prepared in self._prepared]
        for steps, _ in before:
            steps.accumulates = True
        try:
            yield
        finally:
            for steps, accumulates in before:
                steps.accumulates = accumulates

    def join(self, *, throw_on_early_termination: bool = False) -> Join:
        """Return a context for loops over uneven data; all ranks run theirs inside.

        A rank that leaves the block goes on taking part in the others' steps without gradients,
        which count as zeros: means still divide by the number of all ranks, as with DDP. When the
        last rank leaves, all get its parameters, buffers, optimizer state and hyper-parameters.
        Nothing is sent for that where the data was even. Schedulers are the user's own: those that
        count batches must count alike, for example by epochs.

        Args:
            throw_on_early_termination: raise `UnevenData` on all ranks as soon as one has run out,
                in the same step, which is not taken.

        Raises:
            UsageError: on entry: with `update="server"`, or inside another one; at the end: a
                backward without `optimizer.step()` or `zero_grad()`.
        """
        self._check_open()
        if self._around.options.leaves_out:
            raise UsageError(
                "session.join() where stragglers are left out: a rank without data would be one, "
                'and the others would not wait for it; use stragglers="wait"'
            )
        return Join(list(self._prepared), self.rank, throw_on_early_termination)

    def synchronize(self) -> None:
        """Wait until every parameter of every model has its update.

        With `strategy="asgd"` it is a collective call: it waits until all ranks have made it, and
        then gives all of them the servers' parameters, so that they are the same everywhere.

        Raises:
            GradlaneError: the session has failed or was closed.
        """
        self._check_open()
        for prepared in self._prepared:
            prepared.synchronize()

    def staleness(self) -> list[dict[str, Any]]:
        """Return how stale gradients were, with `strategy="asgd"`; empty with all others.

        The staleness of a gradient is the number of updates that its slice had had since this
        gradient's rank received it. Every rank counts what it applied as an owner of slices, which
        is an even part of the whole.

        Returns:
            For each rank whose gradients were applied here: `rank`, `pushes`, `mean`, `max` and
            `histogram` (pushes by staleness from 0 on; entry 64 counts that and all above).
        """
        total: dict[int, Tally] = {}
        for prepared in self._prepared:
            for rank, reading in enumerate(prepared.staleness()):
                total.setdefault(rank, Tally()).add(reading)
        return [{"rank": rank, **tally.to_json()} for rank, tally in sorted(total.items())]

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Bring the last step to an end, unhook the models and part from the other ranks.

        Gradients without an `optimizer.step()` are forgotten. Closing twice is allowed.

        Args:
            timeout_s: how long to wait for the other ranks to close, in seconds.

        Raises:
            GradlaneError: the session has failed, or the last step could not be finished.
        """
        if self._ended is not None:
            return
        self._ended = "closed"
        lifecycle.unwatch(self)
        self._plans.stop()
        errors: list[GradlaneError] = []
        for part in self._parts():
            try:
                part.close(timeout_s)
            except GradlaneError as error:
                errors.append(error)
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._standstill.close()
        self._write_reports()
        if errors:
            raise errors[0]

    def abort(self, reason: str) -> None:
        """Give up at once and tell every other rank why; their next call raises it.

        Args:
            reason: one line.
        """
        if self._ended is not None:
            return
        self._ended = f"given up: {reason}"
        lifecycle.unwatch(self)
        self._plans.stop()
        if self._checkpoints is not None:
            self._checkpoints.stop()
        for part in self._parts():
            part.abort(reason)
        self._standstill.close()
        self._write_reports()

    def __enter__(self) -> Session:
        """Return the session itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close, or, if an exception comes through, give up with its text."""
        if error is None:
            self.close()
        else:
            self.abort(lifecycle.describe_exception(error))

    def close_at_exit(self) -> None:
        """Close while the interpreter ends: what goes wrong is printed, not raised."""
        try:
            if any(part.in_step for part in self._parts()):
                self.abort("the program ended between backward() and optimizer.step()")
            else:
                self.close()
        except GradlaneError as error:
            print(f"gradlane: rank {self.rank}: {error}", file=sys.stderr)

    def forget_in_child(self) -> None:
        """Drop the session in a forked child, where it cannot be used."""
        self._ended = "left behind in the parent of this forked child"
        self._observer.forget_in_child()
        for part in self._parts():
            part.forget_in_child()

    def _parts(self) -> list[Prepared | ArrayExchange]:
        """Return what has a channel of its own: models, and the arrays if there are some."""
        return [*self._prepared, *([self._exchange] if self._exchange is not None else [])]

    def _meet(self) -> Meeting:
        """Open the next place for ranks to meet; all ranks open the same ones in the same order."""
        place = self._around.place
        key = (place.job, place.restart, place.rank)
        number = _channels.get(key, 0)
        _channels[key] = number + 1
        return Meeting(self._store, place, number, self._around.options.connect_timeout_s)

    def _prepared_before(self, model: nn.Module) -> Prepared | None:
        """Find a model that is to be prepared again; refuse what is in another one's hands."""
        again = next((one for one in self._prepared if one.model is model), None)
        for other in self._prepared:
            if other is not again and other.shares_with(model):
                raise ValueError(
                    "this model and one that is prepared already have trained parameters in "
                    "common: prepare one module that holds both, such as nn.ModuleList"
                )
        if again is not None:
            again.check_between_steps()
        return again

    def _part_with(self, prepared: Prepared) -> None:
        self._plans.forget(prepared)
        prepared.close(CLOSE_TIMEOUT_S)
        self._prepared.remove(prepared)

    def _write_reports(self) -> None:
        self._observer.close()
        if self._recorder is not None:
            self._recorder.write()

    def _check_open(self) -> None:
        if self._ended is not None:
            raise SessionClosed(f"the session was {self._ended}; open a new one with gradlane.init")


def _trained_sizes(model: nn.Module) -> dict[str, int]:
    """Numbers of elements that are averaged, by name; complex numbers are pairs."""
    return {
        name: parameter.numel() * (2 if parameter.is_complex() else 1)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not is_lazy(parameter) and parameter.numel() > 0
    }
