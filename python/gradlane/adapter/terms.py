"""What all ranks agree on before a model is connected: its tensors, its optimizer, the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from gradlane.adapter.optimizers import check_optimizer, check_server_optimizer
from gradlane.adapter.refusals import check_model
from gradlane.adapter.state_checks import check_taken_over
from gradlane.connection import Surroundings
from gradlane.factors.choice import Factored, choose_factored
from gradlane.modules.shared_storage import Clusters
from gradlane.ranks.rendezvous import Meeting
from gradlane.ranks.table import Entry, build_table, names_of


@dataclass(frozen=True)
class Terms:
    """What the ranks have agreed on.

    Attributes:
        entries: the model's table; trained parameters come first.
        factored: trained parameters that travel as factors, by tensor number.
    """

    entries: Sequence[Entry]
    factored: Mapping[int, Factored]

    @property
    def trained(self) -> list[Entry]:
        """Table entries of the trained parameters, by tensor number."""
        return [entry for entry in self.entries if entry.trained]


def agree_on_terms(
    around: Surroundings, meeting: Meeting, model: nn.Module, optimizer: Optimizer, buffers: str
) -> Terms:
    """Check a model and its optimizer, and that all ranks have the same.

    Args:
        around: what the session gives.
        meeting: where the ranks agree; one that refuses tells the others there.
        model: the user's.
        optimizer: the user's.
        buffers: how buffers are kept.

    Raises:
        ValueError: the model or the optimizer cannot take part; the message names the tensor.
        RanksDiffer: the ranks have different ones.
    """
    options = {
        **around.options.agreed(),
        "world_size": around.place.world_size,
        "buffers": buffers,
    }
    try:
        check_model(model)
        entries = build_table(model)
        check_optimizer(optimizer, entries)
        trained = [entry for entry in entries if entry.trained]
        factored = choose_factored(model, trained, around.schemes, around.options)
        if around.options.update == "server":
            check_server_optimizer(optimizer, entries)
            _check_apart(trained)
            options["optimizer_state"] = check_taken_over(optimizer, trained)
    except ValueError as error:
        meeting.refuse(str(error))
        raise
    rows = [
        {**entry.row(), "scheme": factored[index].scheme} if index in factored else entry.row()
        for index, entry in enumerate(entries)
    ]
    meeting.agree({"options": options, "tensors": rows})
    return Terms(entries, factored)


def _check_apart(trained: Sequence[Entry]) -> None:
    shared = Clusters([entry.tensor for entry in trained]).members
    if shared:
        raise ValueError(
            f"{names_of(trained[index] for index in shared)} share memory, and with "
            'update="server" each is updated by itself; use update="worker"'
        )
