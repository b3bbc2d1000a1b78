"""A backend of `torch.distributed`: `init_process_group("gradlane")`.

An installed gradlane registers itself when the name is first asked for. `register()` does it
explicitly, for a package that is on the path and not installed. See `docs/backend.md`.
"""

from gradlane.distributed.options import GroupOptions
from gradlane.distributed.registration import register

__all__ = ["GroupOptions", "register"]
