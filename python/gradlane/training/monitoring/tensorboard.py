"""Scalars for the program's own logger: a function, or a writer of TensorBoard's.

Any object with the `add_scalar` of `torch.utils.tensorboard.SummaryWriter` works, and any function
of a dictionary and a step, so gradlane depends on no logger.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from gradlane.errors import RefusedError
from gradlane.training.monitoring.metrics import Metrics, waited_s

LAYERS_SHOWN = 5


class ScalarWriter(Protocol):
    """The method of a writer that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Store a value of a step."""


ScalarFunction = Callable[[dict[str, float], int], object]
"""Takes values by tag, and the training step that they are of."""


class ScalarLog:
    """Writes changes of the metrics every so many steps."""

    def __init__(
        self, writer: ScalarWriter | ScalarFunction, every: int, metrics: Callable[[], Metrics]
    ) -> None:
        """Start from the current metrics.

        Args:
            writer: the user's; its `add_scalar` is used if it has one.
            every: training steps between writes, 1 or more.
            metrics: returns the session's numbers.

        Raises:
            ValueError: `every` is below 1.
            TypeError: the writer is no function and has no `add_scalar`.
        """
        if every < 1:
            raise RefusedError(f"every is {every}; it must be 1 step or more")
        add_scalar = getattr(writer, "add_scalar", None)
        if callable(add_scalar):
            self._write: ScalarFunction = partial(_add_scalars, add_scalar)
        elif callable(writer):
            self._write = writer
        else:
            raise TypeError(
                f"{type(writer).__name__} has no add_scalar(tag, value, step), as "
                "torch.utils.tensorboard.SummaryWriter has, and is no function of (values, step)"
            )
        self._every = every
        self._metrics = metrics
        self._before = metrics()

    def after_step(self, step: int) -> None:
        """Write, if due, under the number of the finished step."""
        if step % self._every == 0:
            now = self._metrics()
            values = scalars(self._before, now)
            if values:
                self._write({f"gradlane/{tag}": value for tag, value in values.items()}, step)
            self._before = now


def _add_scalars(
    add_scalar: Callable[[str, float, int], object], values: dict[str, float], step: int
) -> None:
    for tag, value in values.items():
        add_scalar(tag, value, step)


def scalars(before: Metrics, now: Metrics) -> dict[str, float]:
    """Return the changes between two readings, by tag.

    `step_s` and `wait_s` are means of a step in between, `wait_share` their ratio, `tx_bytes` and
    `rx_bytes` a step's; `clip_factor` is the mean of the steps with a limit of the norm, if there
    are any, and `clipped_share` the share of those below 1; `late_s/rank1` is how late rank 1 was
    in the mean where it came last, `last_share/rank1` for which share of slices; `wait_s/LAYER` is
    a step's, of the five layers that were waited for most.
    """
    steps = now["steps"]["count"] - before["steps"]["count"]
    if steps < 1:
        return {}
    elapsed_s = _elapsed_s(now) - _elapsed_s(before)
    wait_s = now["steps"]["wait_share"] * _elapsed_s(now)
    wait_s -= before["steps"]["wait_share"] * _elapsed_s(before)
    found = {
        "step_s": elapsed_s / steps,
        "wait_s": wait_s / steps,
        "wait_share": wait_s / elapsed_s if elapsed_s > 0 else 0.0,
        "tx_bytes": (now["tx_bytes"] - before["tx_bytes"]) / steps,
        "rx_bytes": (now["rx_bytes"] - before["rx_bytes"]) / steps,
        "codec_ratio": now["codec_ratio"],
    }
    clips = now["clip_steps"] - before["clip_steps"]
    if clips > 0:
        found["clip_factor"] = (now["clip_factor_sum"] - before["clip_factor_sum"]) / clips
        found["clipped_share"] = (now["clipped_steps"] - before["clipped_steps"]) / clips
    found.update(_lateness(before, now))
    earlier = {(one["model"], one["name"]): waited_s(one) for one in before["layer_waits"]}
    layers = {
        (one["model"], one["name"]): waited_s(one) - earlier.get((one["model"], one["name"]), 0.0)
        for one in now["layer_waits"]
    }
    most = sorted(layers, key=lambda layer: layers[layer], reverse=True)[:LAYERS_SHOWN]
    several = len({model for model, _ in layers}) > 1
    for model, name in most:
        tag = f"wait_s/{model}.{name}" if several else f"wait_s/{name}"
        found[tag] = layers[(model, name)] / steps
    return found


def _lateness(before: Metrics, now: Metrics) -> dict[str, float]:
    found = {}
    gathered = now["gathered_slices"] - before["gathered_slices"]
    earlier = {row["rank"]: row for row in before["stragglers"]}
    for row in now["stragglers"]:
        past = earlier.get(row["rank"])
        count = row["last_count"] - (past["last_count"] if past else 0)
        late_s = row["late_s"] - (past["late_s"] if past else 0.0)
        if gathered > 0:
            found[f"last_share/rank{row['rank']}"] = count / gathered
            found[f"late_s/rank{row['rank']}"] = late_s / count if count else 0.0
    return found


def _elapsed_s(metrics: Metrics) -> float:
    return metrics["steps"]["mean_s"] * metrics["steps"]["count"]
