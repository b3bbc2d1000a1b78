"""Whether training goes on when ranks are lost, and the worlds that it goes with.

Needs no torch and no core: options are checked where they are given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradlane.errors import RefusedError
from gradlane.training.options.option_fields import OptionGroup, option

STATUS_LANES_LEAST = 4
"""Numbers of a rank in each step's statuses."""
STATUS_LANES = 16
"""The same where training goes on; all ranks' have to be in one slice. The others carry what
`session.gather_integers` gathers."""


@dataclass(frozen=True, repr=False)
class GoingOn(OptionGroup):
    """Whether and how training goes on when ranks are lost; see `docs/going-on.md`."""

    on: bool = option(
        True,
        "`True` in an object, so that `GoingOn(min_ranks=2)` switches it on: a lost rank costs a "
        "moment, and the others train on; `False`: it ends the session on all ranks.",
        name="going_on",
        agreed=True,
    )
    min_ranks: int = option(
        1,
        "The session ends when fewer ranks than this are left. By default it goes on to the last "
        "rank, which has all of the training; set it where steps over few batches do harm.",
        unit="ranks",
        least=1,
        agreed=True,
    )
    collect_s: float = option(
        0.1,
        "Wait for the losses that other ranks report, before new members are proposed: both ends "
        "of a broken link report one.",
        unit="s",
        above=0,
        agreed=True,
    )
    answer_s: float = option(
        2.0,
        "Longest wait for a rank's answer to proposed members; then the rank is left out.",
        unit="s",
        above=0,
        agreed=True,
    )

    def core_options(self, ranks_each: int = 1) -> dict[str, Any]:
        """Return the options as the core's channel takes them.

        Args:
            ranks_each: ranks that each rank of the channel stands for.
        """
        return {
            "min_ranks": -(-self.min_ranks // ranks_each),
            "collect_s": self.collect_s,
            "answer_s": self.answer_s,
        }


def check_going_on_world(going_on: GoingOn, slice_elems: int | None, world_size: int) -> None:
    """Check the options of training that goes on against the number of ranks.

    Args:
        going_on: the options.
        slice_elems: elements in a slice at most; None: the strategy's own.
        world_size: number of ranks.

    Raises:
        ValueError: an option does not go with it.
    """
    if not going_on.on:
        return
    if going_on.min_ranks > world_size:
        raise RefusedError(
            f"min_ranks is {going_on.min_ranks}, but there are {world_size} ranks: give "
            f"{world_size} or fewer"
        )
    least = STATUS_LANES * world_size
    if slice_elems is not None and slice_elems < least:
        raise RefusedError(
            f"going_on with slice_elems={slice_elems} and {world_size} ranks: one slice has to "
            f"hold all ranks' statuses of a step, so it must be {least} or more"
        )
