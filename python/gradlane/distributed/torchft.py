"""A process group of torchft over gradlane, in place of `torchft.ProcessGroupGloo`.

torchft's `Manager` configures it for each quorum, and the group opens new connections then. A
torchft newer than 0.2 needs no class of ours: `Manager(pg=dist.group.WORLD)` after
`init_process_group("gradlane", enable_reconfigure=True)`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

try:
    from torchft.process_group import ProcessGroupWrapper
except ImportError as error:
    raise ImportError(
        f"gradlane.distributed.torchft needs torchft ({error}): pip install torchft"
    ) from error

from gradlane.distributed.options import GroupOptions
from gradlane.distributed.registration import register
from gradlane.training.torch_internals import c10d


class ProcessGroupGradlane(ProcessGroupWrapper):  # type: ignore[misc]
    """A process group for `torchft.Manager(pg=...)`, for CPU tensors.

    Args:
        timeout: for connections, and of calls that give none.
        options: addresses, ports, secret, sealing and time-outs.
    """

    def __init__(
        self, timeout: timedelta = timedelta(seconds=60), options: GroupOptions | None = None
    ) -> None:
        register()
        super().__init__(timeout)
        self._options = options if options is not None else GroupOptions()

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name of the group's kind."""
        return "torchft-gradlane"

    def shutdown(self) -> None:
        """Leave the group."""
        self.abort(errored=False)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        from gradlane.distributed.connecting import connect

        # torchft 0.2 numbers its quorums, newer ones the communicators.
        number = self._quorum_id if hasattr(self, "_quorum_id") else self._uuid
        name = f"torchft quorum {number}"
        backend = connect(store, rank, world_size, name, self._timeout, self._options)
        group = c10d.ProcessGroup(store, rank, world_size)
        kind = c10d.ProcessGroup.BackendType.CUSTOM
        group._set_default_backend(kind)
        group._register_backend(torch.device("cpu"), kind, backend)
        return group
