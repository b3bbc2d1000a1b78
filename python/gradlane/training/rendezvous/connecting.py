"""Connection of a core channel between ranks that have met; errors name the rank that is
unreachable."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from gradlane.errors import RendezvousError
from gradlane.formats.longer_waits import CONNECT
from gradlane.training.core import Channel, CoreChannel, CoreModule, Listener
from gradlane.training.rendezvous.bounded_store import StoreLostError
from gradlane.training.rendezvous.rendezvous import RendezvousScope

_SAME_LOSS_S = 1.0
_RANK = re.compile(r"\brank (\d+)")


def to_world_ranks(error: Exception, ranks: Sequence[int]) -> tuple[str, int | None]:
    """Return the message and the rank at fault of a channel's error, in ranks of the world.

    Args:
        error: a `ChannelError`, which numbers ranks as the channel does.
        ranks: of the channel, in its order.
    """
    message = str(error.args[0]) if error.args else str(error)
    at_fault = error.args[2] if len(error.args) > 2 else None
    message = _RANK.sub(lambda found: f"rank {ranks[int(found.group(1))]}", message)
    return message, None if at_fault is None else ranks[at_fault]


def connect_channel(
    core: CoreModule,
    scope: RendezvousScope,
    listener: Listener,
    host: str,
    settings: Mapping[str, Any],
    plan: str,
    secret: bytes,
    ranks: Sequence[int],
) -> CoreChannel:
    """Exchange addresses and connect to all ranks of a channel.

    Args:
        core: the compiled core.
        scope: of the channel.
        listener: bound; closed if connecting fails.
        host: its address for other ranks.
        settings: the core's options.
        plan: the same text on every rank.
        secret: the same on every rank.
        ranks: of the channel, in its order.

    Raises:
        RendezvousError: a rank, or the link between two, cannot be reached, or another rank gave up
            meanwhile; the same text on all.
        SessionFailedError: the session has failed meanwhile, as other channels tell.
    """
    try:
        addresses = scope.exchange_addresses(host, listener.port, ranks, lanes=settings["lanes"])
        settings = {**settings, "published": addresses.published, "lanes": addresses.lanes}
        with scope.watching_for_abort() as watch:
            called = addresses.called
            return core.Channel(listener, json.dumps(settings), plan, called, secret, watch)
    except core.ChannelError as error:
        message, missing = to_world_ranks(error, ranks)
        text = f"rank {scope.rank_info.rank} could not connect: {message}"
        if isinstance(error, core.ChannelTimeout):
            text += f" (longer waits: {CONNECT})"
        if missing is None or not isinstance(error, core.ChannelTimeout):
            raise scope.abort(text) from error
        raise scope.abort_unreachable(missing, text) from error
    except BaseException:
        listener.close()
        raise


def wait_until_all_are_connected(
    core: CoreModule, channel: Channel, scope: RendezvousScope
) -> None:
    """Wait until every rank of a scope has opened its channel.

    A rank that went on alone would see a failure elsewhere as the loss of a rank that has noticed
    it.

    Args:
        core: the compiled core.
        channel: this rank's; aborted if another rank cannot open its own.
        scope: of the channel.

    Raises:
        RendezvousError: a rank could not; the same text on all.
    """

    def on_poll() -> None:
        try:
            channel.is_ready(0, 0)
        except core.ChannelError as error:
            raise scope.abort_on_loss(f"{error.args[0]} (while the ranks connected)") from error

    try:
        scope.wait_until_opened(on_poll)
    except RendezvousError as error:
        if isinstance(error, StoreLostError):
            # All ranks lose it at about the same time: none may take it for the loss of this rank.
            time.sleep(_SAME_LOSS_S)
        with contextlib.suppress(core.ChannelError):
            channel.abort(str(error))
        raise
    channel.all_connected()
