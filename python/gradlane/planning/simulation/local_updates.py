"""Steps with rare exchanges: local updates, of which every so many steps a fragment's turn comes.

An exchange is simulated by itself: all differences of a fragment leave at once, while nothing is
computed, and what is measured is the time until every rank has their mean. A step then takes its
compute, and its share of what the turns of a round wait for: an exchange that is not over
`overlap_steps` steps later. Exchanges do not slow computing down, and what ranks tell each other
with an exchange is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradlane.planning.simulation.profiles import Profile
from gradlane.training.local_updates.rounds import balance
from gradlane.training.options.codec_choice import CodecChoice
from gradlane.training.options.codec_options import RAW, parse_codec
from gradlane.training.options.local_updates import AVERAGE, Local

INSTANT_S = 1e-9
"""Compute of a step that does nothing but exchange; the simulator wants some."""


def fragment_tensors(
    names: Sequence[str], sizes_bytes: Sequence[int], local: Local
) -> list[list[int]]:
    """Return the numbers of the tensors of each fragment.

    Args:
        names: of the model's tensors; those of a layer begin alike.
        sizes_bytes: of each.
        local: its fragments.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    layers: dict[str, list[int]] = {}
    for index, name in enumerate(names):
        layers.setdefault(name.rpartition(".")[0] or name, []).append(index)
    members = list(layers.values())
    sizes = [sum(sizes_bytes[index] for index in layer) for layer in members]
    return [
        sorted(index for layer in held for index in members[layer])
        for held in balance(sizes, local.fragments)
    ]


def fragment_profiles(profile: Profile, local: Local) -> list[Profile]:
    """Return a profile of each fragment's exchange.

    Args:
        profile: of a step.
        local: its fragments.

    Raises:
        ValueError: there are fewer layers than fragments.
    """
    return [
        replace(
            profile,
            forward_s=INSTANT_S / 2,
            compute_s=INSTANT_S,
            modules=(),
            tensors=tuple(
                replace(profile.tensors[index], need_s=0.0, ready_s=INSTANT_S, sparse_rows=None)
                for index in held
            ),
        )
        for held in fragment_tensors(
            [one.name for one in profile.tensors],
            [one.size_bytes for one in profile.tensors],
            local,
        )
    ]


def local_step_s(compute_s: float, exchanges_s: Sequence[float], local: Local) -> float:
    """Return the mean time of a step.

    Args:
        compute_s: of a step.
        exchanges_s: of each fragment, from the end of a step until all ranks have the mean.
        local: how often each has its turn, and when its result is used.
    """
    covered_s = local.overlap_steps * compute_s
    waits_s = sum(max(0.0, exchange_s - covered_s) for exchange_s in exchanges_s)
    return compute_s + waits_s / local.steps


def outer_state_bytes(
    profile: Profile, local: Local, choices: Sequence[CodecChoice], workers: int
) -> int:
    """Return the memory that local updates take on a rank, beside exact training's.

    Common values, the outer momentum, a fragment's differences while they are under way, and the
    residuals of codecs: a rank's own, and those of the means that it owns.

    Args:
        profile: of a step; its gradients are as large as its parameters.
        local: the outer optimizer and the fragments.
        choices: the codec of each tensor.
        workers: ranks, each of which owns a share.
    """
    values = profile.size_bytes
    has_momentum = local.outer != AVERAGE and local.outer_momentum > 0
    under_way = max(part.size_bytes for part in fragment_profiles(profile, local))
    kept = 0.0
    for choice, tensor in zip(choices, profile.tensors, strict=True):
        options = None if choice.codec == RAW else parse_codec(choice.codec)
        if getattr(options, "residual", False):
            kept += 4 * tensor.numel * (1 + 1 / workers)
    return round(values * (2 if has_momentum else 1) + under_way + kept)
