"""One model and one optimizer on one channel: how they are connected and taken apart again.

When `connect` returns, all ranks have rank 0's parameters and buffers, and the user's own objects
are hooked. After `close` they are plain objects again.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gradlane import addresses, optimizers
from gradlane.agreement import AgreementCheck
from gradlane.carrier import Carrier, DirectCarrier
from gradlane.core import Channel, CoreModule, Listener, translate_error
from gradlane.environment import Place
from gradlane.errors import GradlaneError, RendezvousError, UsageError
from gradlane.forward_order import ForwardOrder
from gradlane.hooks import Installation
from gradlane.options import Options
from gradlane.rendezvous import Meeting
from gradlane.steps import Phase, Steps
from gradlane.table import Entry, build_table
from gradlane.updates import DeferredUpdate


@dataclass(frozen=True)
class Surroundings:
    """What a session gives each of its models.

    Attributes:
        core: the compiled core or its double.
        options: the session's.
        place: this rank's.
        store_host: host of the rendezvous store.
        store_port: its port.
        secret: the user's own secret, or None.
    """

    core: CoreModule
    options: Options
    place: Place
    store_host: str
    store_port: int
    secret: str | None


class Prepared:
    """A connected model."""

    def __init__(
        self,
        around: Surroundings,
        meeting: Meeting,
        model: nn.Module,
        optimizer: Optimizer,
        defer: bool,
    ) -> None:
        """Agree with all ranks, connect, spread rank 0's values and hook everything.

        Args:
            around: what the session gives.
            meeting: where the ranks agree; for this model alone.
            model: the user's.
            optimizer: the user's.
            defer: whether updates may happen after `optimizer.step()` and in parts.

        Raises:
            ValueError: the model or the optimizer cannot take part.
            GradlaneError: the ranks differ, or cannot reach each other.
        """
        self._around = around
        self._optimizer = optimizer
        self._defer = defer
        self._serves = around.options.update == "server"
        self._entries = self._agree(meeting, model)
        self._trained = [entry for entry in self._entries if entry.trained]
        self._index_of = {id(entry.tensor): index for index, entry in enumerate(self._trained)}
        self._pointers: list[int] = []
        self.model = model
        self.channel = self._connect(meeting)
        self._carrier = self._make_carrier()
        try:
            self._carrier.spread(self._entries, first=around.place.rank == 0)
            self._register_parameters()
        except BaseException as error:
            self.channel.abort(f"{type(error).__name__} while spreading the model: {error}")
            self._carrier.close()
            if isinstance(error, around.core.ChannelError):
                raise translate_error(around.core, error, "spreading rank 0's values") from error
            raise
        self._agreement = AgreementCheck(meeting, self._trained, around.options.check_every)
        self.installation = Installation(model, optimizer, self._entries)
        self.steps = self._make_steps()
        self.installation.install(self.steps)

    def close(self, timeout_s: float) -> None:
        """Settle, unhook and say goodbye.

        Args:
            timeout_s: how long to wait for the other ranks' goodbyes; it is no error if they
                do not come.

        Raises:
            GradlaneError: the last step could not be brought to an end.
        """
        core = self._around.core
        try:
            self.steps.raise_failure()
            self.steps.finish()
        except GradlaneError as error:
            self.abort(f"closed after an error: {error}")
            raise
        self.installation.remove()
        self.steps.close("the session was closed")
        self._carrier.close()
        try:
            self.channel.finish(timeout_s)
        except core.ChannelTimeout:
            return
        except core.ChannelError as error:
            raise translate_error(core, error, "closing the session") from error

    def abort(self, reason: str) -> None:
        """Give up, tell all ranks why, and make the model unreadable if it is in mid-step."""
        self.steps.close(f"the session was given up: {reason}")
        with contextlib.suppress(self._around.core.ChannelError):
            self.channel.abort(reason)
        self._carrier.close()

    def forget_in_child(self) -> None:
        """Drop the connections in a forked child, where the model is a plain one."""
        self.channel.forget_in_child()
        if self.steps.phase is Phase.IDLE and self.steps.failure is None:
            self.installation.remove()
        self.steps.close("this session belongs to the parent of this forked child")

    @property
    def in_step(self) -> bool:
        """Whether gradients are under way without an `optimizer.step()`."""
        return self.steps.phase in (Phase.BACKWARD, Phase.ATTACHED)

    # ---- inside

    def _agree(self, meeting: Meeting, model: nn.Module) -> list[Entry]:
        try:
            if isinstance(model, nn.parallel.DistributedDataParallel):
                raise ValueError(
                    "the model is wrapped in DistributedDataParallel: prepare the bare one"
                )
            entries = build_table(model)
            optimizers.check_optimizer(self._optimizer, entries)
            if self._serves:
                optimizers.check_server_optimizer(self._optimizer, entries)
        except ValueError as error:
            meeting.refuse(str(error))
            raise
        options = {**self._around.options.agreed(), "world_size": self._around.place.world_size}
        meeting.agree({"options": options, "tensors": [entry.row() for entry in entries]})
        return entries

    def _connect(self, meeting: Meeting) -> Channel:
        around, options, place = self._around, self._around.options, self._around.place
        plan = around.core.plan_json(
            json.dumps([entry.plan_row() for entry in self._entries]),
            options.strategy,
            options.slice_elems,
            options.seed,
            options.update,
            place.world_size,
        )
        secret = meeting.secret(around.secret)
        listener, host = self._listen()
        try:
            peers = meeting.exchange_addresses(host, listener.port)
            return around.core.Channel(
                listener, self._channel_options(meeting.name), plan, peers, secret
            )
        except around.core.ChannelError as error:
            raise RendezvousError(
                f"rank {place.rank} could not connect: {error.args[0]}"
            ) from error
        except BaseException:
            listener.close()
            raise

    def _channel_options(self, job: str) -> str:
        options, place = self._around.options, self._around.place
        return json.dumps(
            {
                "rank": place.rank,
                "world_size": place.world_size,
                "job": job,
                "generation": place.restart,
                "frame_bytes": options.frame_bytes,
                "credit_bytes": options.frame_bytes,
                "low_water_bytes": options.low_water_bytes,
                "send_buffer_bytes": options.send_buffer_bytes,
                "receive_buffer_bytes": 0,
                "work_depth": max(2, 2 * options.work_threads),
                "work_threads": options.work_threads,
                "io_threads": 1,
                "silence_timeout_s": options.silence_timeout_s,
                "progress_timeout_s": options.progress_timeout_s,
                "connect_timeout_s": options.connect_timeout_s,
                "trace": options.trace,
            }
        )

    def _listen(self) -> tuple[Listener, str]:
        """Bind a socket; returns it and the address that others reach it at."""
        around, options = self._around, self._around.options
        low, high = options.ports or (0, 0)
        advertised = options.advertise
        interface = options.interface or os.environ.get("GRADLANE_INTERFACE")
        try:
            if interface:
                hosts = [addresses.interface_address(interface)]
            elif advertised:
                literal = addresses.resolve(advertised)
                # Behind address translation the advertised address is none of this machine's.
                hosts = [literal, "::" if ":" in literal else "0.0.0.0"]
            elif around.place.world_size == 1:
                hosts = ["127.0.0.1"]
            else:
                hosts = [addresses.address_towards(around.store_host, around.store_port)]
        except OSError as error:
            raise RendezvousError(
                f"rank {around.place.rank} finds no address to listen on ({error}): give "
                "interface= or advertise="
            ) from error
        for host in hosts:
            try:
                return around.core.Listener(host, low, high), advertised or host
            except OSError as error:
                last = error
        raise RendezvousError(
            f"rank {around.place.rank} cannot listen on {hosts[0]} (ports "
            f"{low}-{high}, 0 is any): {last}"
        ) from last

    def _make_carrier(self) -> Carrier:
        if all(entry.device.type == "cpu" for entry in self._trained):
            return DirectCarrier(self.channel, self._trained)
        from gradlane.staging import StagedCarrier

        return StagedCarrier(self.channel, self._trained, self._staging_failed)

    def _staging_failed(self, error: Exception) -> None:
        core = self._around.core
        if isinstance(error, core.ChannelError):
            self.steps.fail(translate_error(core, error, "handing a gradient over"))
        else:
            self.abort(f"staging failed: {error}")

    def _make_steps(self) -> Steps:
        around, optimizer = self._around, self._optimizer
        observes = around.place.rank == 0 and around.place.world_size > 1
        return Steps(
            core=around.core,
            channel=self.channel,
            carrier=self._carrier,
            trained=self._trained,
            update=DeferredUpdate(
                optimizer,
                self.installation.step_whole,
                [entry.tensor for entry in self._trained],
                self._index_of,
            ),
            step_whole=self.installation.step_whole,
            defers=lambda: self._defer and not optimizers.has_step_hooks(optimizer),
            check_unchanged=self.installation.check_unchanged,
            server_rows=self._server_rows if self._serves else None,
            order=ForwardOrder() if observes else None,
            announce_order=self._announce_order,
            before_step=self._before_step,
        )

    def _announce_order(self, order: ForwardOrder) -> None:
        self.channel.switch_priorities(order.priorities(len(self._entries)))

    def _before_step(self, step: int) -> None:
        if self._around.options.check_every:
            self._agreement.after_step(step - 1)
        if self._serves:
            self._register_parameters()

    def _server_rows(self) -> str:
        return optimizers.server_rows(self._optimizer, self._index_of)

    def _register_parameters(self) -> None:
        """Tell the core where parameters are that it updates in place."""
        if not self._serves:
            return
        pointers = [entry.tensor.data_ptr() for entry in self._trained]
        if pointers == self._pointers:
            return
        for index, entry in enumerate(self._trained):
            tensor = entry.tensor
            if tensor.dtype is not entry.dtype or tensor.stride() != entry.stride:
                raise UsageError(
                    f"parameter {entry.name!r} was converted after prepare(): convert the model "
                    "before prepare()"
                )
            self.channel.set_parameter(index, pointers[index], entry.nbytes)
        self._pointers = pointers


def describe(prepared: Prepared) -> dict[str, Any]:
    """Return the counters of a prepared model's channel."""
    counters: dict[str, Any] = json.loads(prepared.channel.metrics_json())
    counters["step"] = prepared.steps.step
    return counters
