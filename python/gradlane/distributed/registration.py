"""Registration with torch, by the entry point group `torch.distributed.backends` or explicitly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

NAME = "gradlane"
"""The backend's name."""
_NEEDED = "2.14"
"""The first torch whose backends can be written in Python."""
NEEDED_METHODS = (
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "monitored_barrier",
)
"""Methods that a torch which dispatches to Python has on its `Backend`."""


def register() -> None:
    """Register the backend `gradlane`, once.

    Raises:
        RuntimeError: torch was built without `torch.distributed`, or dispatches no collectives to
            backends in Python: it is too old.
    """
    if not torch.distributed.is_available():
        raise RuntimeError(
            "the backend gradlane needs a torch that was built with torch.distributed"
        )
    from gradlane.training.torch_internals import c10d

    if not all(hasattr(c10d.Backend, name) for name in NEEDED_METHODS):
        raise RuntimeError(
            f"the backend gradlane needs torch {_NEEDED} or newer, and this is "
            f"{torch.__version__}: "
            'install a newer torch, or call init_process_group("gloo")'
        )
    from gradlane.distributed.forwarding import forward_methods

    forward_methods()
    if NAME not in torch.distributed.Backend.backend_list:
        torch.distributed.Backend.register_backend(
            NAME, _create, extended_api=True, devices=["cpu", "cuda"]
        )


def _create(settings: Any, options: Any) -> Any:
    from gradlane.distributed.connecting import create

    return create(settings, options)
