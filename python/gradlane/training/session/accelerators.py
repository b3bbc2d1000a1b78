"""Notice a Hugging Face accelerator that does not know of the session."""

from __future__ import annotations

import sys
import warnings


def warn_of_accelerator() -> None:
    """Warn where the program has made an accelerator and attached none to the session.

    It saves and loads the models that `accelerator.prepare()` was given, and no others.
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    if getattr(state, "_shared_state", None):
        warnings.warn(
            "the program has an Accelerator that does not know of this session: its save_state() "
            "and load_state() leave out models that only session.prepare() was given, and it wraps "
            "in DDP those that it is given; call gradlane.integrations.accelerate.attach("
            "accelerator, session) before session.prepare()",
            UserWarning,
            stacklevel=3,
        )
