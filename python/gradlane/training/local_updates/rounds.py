"""The turns of fragments: what each holds, which one is exchanged after which step, and what moved
since.

All ranks count alike: a round has `steps` steps of each rank's own optimizer, spread over the
fragments, and begins anew at every point that all ranks meet at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradlane.errors import RefusedError
from gradlane.training.options.local_updates import Local


def balance(layer_bytes: Sequence[int], fragments: int) -> list[list[int]]:
    """Divide layers into fragments of about equal bytes, equal layers interleaved.

    In the order of the model each layer joins the fragment with the fewest bytes.

    Args:
        layer_bytes: of each layer.
        fragments: number of them.

    Returns:
        Numbers of layers, by fragment.

    Raises:
        ValueError: there are fewer layers.
    """
    if len(layer_bytes) < fragments:
        raise RefusedError(
            f"fragments is {fragments}, but the model has {len(layer_bytes)} layers with trained "
            f"parameters, and a fragment holds whole layers: give {len(layer_bytes)} or fewer"
        )
    held: list[list[int]] = [[] for _ in range(fragments)]
    nbytes = [0] * fragments
    for layer, own in enumerate(layer_bytes):
        least = min(range(fragments), key=lambda number: (nbytes[number], number))
        held[least].append(layer)
        nbytes[least] += own
    return held


@dataclass
class FragmentProgress:
    """Steps of this rank that no exchange of a fragment holds yet.

    Attributes:
        steps: their number.
        weighed: number of them whose samples are known.
        samples: behind these.
        differs: whether the parameters may differ from the common values.
    """

    steps: int = 0
    weighed: int = 0
    samples: int = 0
    differs: bool = False


class Rounds:
    """Counts a rank's steps, and tells which fragment's turn it is."""

    def __init__(self, local: Local) -> None:
        """Begin the first round.

        Args:
            local: steps and fragments.
        """
        self._local = local
        self.begin()

    def begin(self) -> None:
        """Begin a round at a point that all ranks have in common."""
        self.position = 0
        """Steps of the current round, 0 to `steps` - 1 between two steps."""
        self.progress = [FragmentProgress() for _ in range(self._local.fragments)]

    def advance(self, samples: int | None) -> int | None:
        """Count a step, and return the fragment whose turn it is after it, or None.

        Args:
            samples: behind this rank's gradients of the step; None: it has not said.
        """
        for one in self.progress:
            one.steps += 1
            one.differs = True
            if samples is not None:
                one.weighed += 1
                one.samples += samples
        self.position += 1
        steps, count = self._local.steps, self._local.fragments
        turns = {steps * (number + 1) // count: number for number in range(count)}
        due = turns.get(self.position)
        self.position %= steps
        return due

    def sent(self, fragment: int) -> None:
        """Note that an exchange holds all steps so far of a fragment."""
        self.progress[fragment] = FragmentProgress(differs=True)

    def mixed(self, fragment: int, share: float) -> None:
        """Note that a fragment has a share of its new common value."""
        one = self.progress[fragment]
        one.differs = share < 1 or one.steps > 0

    def moved(self) -> list[int]:
        """Return the fragments with steps that no exchange holds."""
        return [number for number, one in enumerate(self.progress) if one.steps > 0]

    def state_dict(self) -> dict[str, Any]:
        """Return where this rank stands."""
        return {"position": self.position, "progress": [asdict(one) for one in self.progress]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand where `state_dict` was taken."""
        self.position = int(state["position"])
        self.progress = [FragmentProgress(**one) for one in state["progress"]]
