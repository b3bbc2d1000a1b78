"""The options of `gradlane lab transport`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gradlane.formats.rates import parse_rate
from gradlane.lab.cluster.limits import NODES_MAX
from gradlane.training.options.option_fields import check_options, on_command_line, option
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.rendezvous.environment import own_processors

FLOAT_BYTES = 4
_SETTINGS = (
    "frame_bytes",
    "low_water_bytes",
    "send_buffer_bytes",
    "pacing",
    "work_threads",
    "lanes",
)


@dataclass(frozen=True)
class TransportOptions:
    """The options of a measurement."""

    workers: int = option(4, "Ranks, each on a node of its own.", least=2, most=NODES_MAX)
    rate_bps: int = option(
        doc="Rate of every port in each direction.", name="rate", read=parse_rate, text="500mbit"
    )
    megabytes: float = option(
        100.0,
        "Gradients that each rank hands over at once, in 10^6 bytes.",
        least=0.001,
        most=10_000,
    )
    tensors: int = option(25, least=1, most=10_000)
    """Tensors of equal size that these are."""
    repeat: int = option(3, "Turns of TCP streams, gradlane and Gloo.", least=0, most=10_000)
    steps: int = option(3, "Measured steps of a turn.", least=1, most=30)
    warmup: int = option(1, least=0, most=10)
    """Steps before them."""
    urgent_trials: int = option(
        20,
        "Urgent slices that each rank hands over, in each of the two ways.",
        name="trials",
        least=0,
        most=10_000,
    )
    urgent_megabytes: float = option(60.0, least=1, most=10_000)
    """The less urgent tensor that saturates the ports meanwhile."""
    settings: dict[str, Any] | None = None
    """Further options of the sessions by name."""

    def __post_init__(self) -> None:
        """Refuse what cannot be measured.

        Raises:
            ValueError: an option is out of its range; the message names it.
        """
        check_options(self, on_command_line)

    @property
    def effective_settings(self) -> dict[str, Any]:
        """The session's options that matter on the wire, defaults included."""
        network = Options.of(**keywords_of(**(self.settings or {}))).network
        work_threads, lanes = network.thread_counts(own_processors({}))
        chosen = {**asdict(network), "work_threads": work_threads, "lanes": lanes}
        return {name: chosen[name] for name in _SETTINGS}

    @property
    def tensor_elems(self) -> list[int]:
        """Elements of each tensor of the exchanged model."""
        return [max(1, round(self.megabytes * 1e6 / FLOAT_BYTES / self.tensors))] * self.tensors

    @property
    def sent_bytes_per_step(self) -> float:
        """Payload bytes that a rank sends in a step, with any of the two."""
        from gradlane.planning.simulation.bound import port_bytes

        return port_bytes(sum(self.tensor_elems) * FLOAT_BYTES, workers=self.workers)
