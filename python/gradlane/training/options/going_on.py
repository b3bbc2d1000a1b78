"""Whether training goes on when ranks are lost, and the options that exclude it.

Needs no torch and no core: options are checked where they are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradlane.training.options.codec_choice import RAW
from gradlane.training.options.option_fields import OptionGroup, option
from gradlane.training.options.stragglers import LEAVES_OUT

if TYPE_CHECKING:
    from gradlane.training.options.options import Options

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
        "With fewer ranks than these the session ends. By default it goes on to the last rank, "
        "which has all of the training; give a number where a step over few batches does harm.",
        unit="ranks",
        least=1,
        agreed=True,
    )
    collect_s: float = option(
        0.1,
        "Wait for what other ranks have lost, before new members are proposed: a broken link is "
        "seen from both of its ends.",
        unit="s",
        above=0,
        agreed=True,
    )
    answer_s: float = option(
        2.0,
        "Longest wait for a rank's answer to proposed members, which leaves it out then.",
        unit="s",
        above=0,
        agreed=True,
    )

    def core_options(self) -> dict[str, Any]:
        """Return the options as the core's channel takes them."""
        return {
            "min_ranks": self.min_ranks,
            "collect_s": self.collect_s,
            "answer_s": self.answer_s,
        }


def check_going_on(options: Options) -> None:
    """Check that other options go with training that goes on.

    Raises:
        ValueError: an option does not; the message says why, and what to do.
    """
    if options.rendezvous.join and not options.going_on.on:
        raise ValueError(
            "join without going_on: a rank joins a training that goes on when ranks come and go; "
            "open all sessions with going_on=True"
        )
    refusal = _refusal(options) if options.going_on.on else ""
    if refusal:
        raise ValueError(f"going_on with {refusal}")


def _refusal(options: Options) -> str:
    """Return the first option that excludes going on, with why and what to do; else empty."""
    strategy = options.strategy
    if options.update == "server":
        return (
            'update="server": a lost rank takes the optimizer\'s state of its slices along; use '
            'update="worker"'
        )
    if strategy.name not in LEAVES_OUT:
        return (
            f"strategy {strategy.name!r}: only sums that every rank gets from their owners can be "
            f"finished without a lost rank; use {', '.join(LEAVES_OUT)}"
        )
    if strategy.factors:
        return (
            f"scheme {strategy.factors!r}: gradients are rebuilt from the factors of all ranks; "
            "leave the scheme out"
        )
    if options.codec != RAW:
        return (
            f"codec {options.codec!r}: what a lost rank has held back would be missing; leave the "
            "codec out"
        )
    if options.stragglers.leaves_out:
        return (
            f"stragglers={options.stragglers.rule!r}: a step would be over other ranks for two "
            'reasons; use stragglers="wait"'
        )
    if options.servers is not None:
        return f"servers={options.servers}: the ranks that are left own all slices; leave it out"
    if options.workers is not None:
        return (
            f"workers={options.workers}: ranks that only serve take no part in agreeing on who is "
            "left; leave it out"
        )
    if options.check_every:
        return (
            f"check_every={options.check_every}: ranks would compare through the store, which may "
            "be lost with its rank; leave it out, and a sample is compared every 100 steps"
        )
    return ""


def check_going_on_world(options: Options, world_size: int) -> None:
    """Check the options of training that goes on against the number of ranks.

    Raises:
        ValueError: an option does not go with it.
    """
    if not options.going_on.on:
        return
    if options.going_on.min_ranks > world_size:
        raise ValueError(f"min_ranks is {options.going_on.min_ranks}, but there are {world_size}")
    elements, least = options.strategy.slice_elems, STATUS_LANES * world_size
    if elements is not None and elements < least:
        raise ValueError(
            f"going_on with slice_elems={elements} and {world_size} ranks: all ranks' statuses of "
            f"a step have to be in one slice, so it must be {least} or more"
        )


def check_plan_goes_on(options: Options, rule: str, schemes: Mapping[str, str]) -> None:
    """Check that the plan of a model goes with training that goes on.

    Args:
        options: with the plan's settings.
        rule: that finds plans while training, or empty.
        schemes: of the plan, by the name of a tensor, or of a rule that chooses it.

    Raises:
        ValueError: the plan does not.
    """
    if not options.going_on.on:
        return
    if rule:
        raise ValueError(
            f"going_on with plan={rule!r}: all ranks connect anew to follow a plan, which a lost "
            "rank would not; find one before (`gradlane plan`), and give it as plan="
        )
    for name, scheme in schemes.items():
        if scheme != "ps":
            raise ValueError(
                f"going_on with a plan that has scheme {scheme!r} for {name!r}: every rank's part "
                "is needed on the way; use a plan whose tensors all have scheme 'ps'"
            )
