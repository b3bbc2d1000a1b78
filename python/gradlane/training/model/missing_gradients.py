"""The refusal of calls for which there are no gradients, with its cause."""

from __future__ import annotations

from collections.abc import Sequence

from gradlane.errors import UsageError
from gradlane.training.rendezvous.tensor_table import TensorEntry, names_of


def without_gradients(call: str, step: int, trained: Sequence[TensorEntry]) -> UsageError:
    """Return the refusal of a call for which there are no gradients.

    Args:
        call: of the program.
        step: number of the last step.
        trained: table entries of the trained parameters.
    """
    frozen = [entry for entry in trained if not entry.tensor.requires_grad]
    if frozen:
        cause = (
            f"{names_of(frozen)} {'was' if len(frozen) == 1 else 'were'} trained when the model "
            "was prepared, and frozen since: after freezing or unfreezing call "
            "session.prepare(model, optimizer) again, on all ranks"
        )
    else:
        cause = (
            "every rank must run backward() on at least one trained parameter in each step, or put "
            "gradients into .grad"
        )
    return UsageError(f"{call} without any gradient since step {step}: {cause}")
