"""The state of a running session, as its live page and `gradlane watch` read it over HTTP.

`GET /state.json` answers with a `LiveState` in JSON. Numbers are this rank's, summed over its
models; names carry units as in `Session.metrics()`. A change that a reader has to know raises
`STATE_VERSION`; new keys alone do not.
"""

from __future__ import annotations

import types
from typing import Any, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

from gradlane.formats.serialization.strict_json import FormatError, loads

STATE_FORMAT = "gradlane-live"
STATE_VERSION = 1
STATE_PATH = "/state.json"
NEXT_QUERY = "next"
"""`/state.json?next` is answered about a second later, or with the last state at the end."""


class StepRow(TypedDict):
    """Steps that followed one another.

    `last` is the number of timed steps up to its end, `end_s` the time of that since the session
    began; the other times are of `steps` steps.
    """

    last: int
    steps: int
    end_s: float
    mean_s: float
    max_s: float
    wait_mean_s: float


class StepTimes(TypedDict):
    """Step times, from first gradient to first gradient; `steps` of `Session.metrics()`, too.

    Evaluation and saving between two steps are part of the first of them, so that the medians, of
    the last 128 steps, say more than the means. `wait_share` is the share of all steps' time that
    this rank's program waited for results of other ranks.
    """

    count: int
    last_s: float
    mean_s: float
    median_s: float
    max_s: float
    wait_last_s: float
    wait_median_s: float
    wait_share: float


class Window(TypedDict):
    """The last seconds, over which rates and recent shares are taken: `steps` steps in `length_s`.

    It is the whole run so far for the first reader.
    """

    length_s: float
    steps: int
    step_s: float
    wait_share: float


class WaitNow(TypedDict):
    """A wait of this rank's program for gradients that has not ended.

    `tensors` has the first names of `tensor_count`; none: for the whole step.
    """

    step: int
    tensors: list[str]
    tensor_count: int


class LayerRow(TypedDict):
    """Waits of this rank's program for a layer's results, whole-step waits included.

    `recent_wait_s` is a step's in the window.
    """

    model: int
    name: str
    wait_s: float
    wait_share: float
    wait_s_max: float
    max_step: int
    recent_wait_s: float
    recent_share: float


class RankRow(TypedDict):
    """One rank as this one sees it.

    `role` is `self`, `trains` or `serves`. `last_*` and `late_*` are of its contributions to slices
    that this rank owns, `recent_*` of those in the window; `left_out_steps` went on without it.
    """

    rank: int
    role: str
    tx_bytes: int
    rx_bytes: int
    tx_bytes_per_s: float
    rx_bytes_per_s: float
    queued_bytes: int
    in_flight_bytes: int
    owned_bytes: int
    last_share: float
    late_s_mean: float
    recent_last_share: float
    recent_late_s_mean: float
    left_out_steps: int


class CodecRow(TypedDict):
    """A codec and its tensors.

    `residual_norm` is the 2-norm of what this rank has not sent yet of their gradients; None where
    no residual is kept or none was read.
    """

    codec: str
    tensors: int
    residual_norm: float | None


class ResidualRow(TypedDict):
    """The 2-norm of the residual of this rank's contributions to a tensor."""

    model: int
    name: str
    norm: float


class Event(TypedDict):
    """Something that happened `at_s` seconds after the session began.

    `level` is `info`, `warning` or `error`.
    """

    at_s: float
    level: str
    text: str


class LiveState(TypedDict):
    """All that a page shows.

    `ending` is empty until the session ends; then `closed`, or why it was given up. `quiet_s` is
    the time since the last step began, and `is_stalled` whether that is long. `layers` and
    `residuals` have the largest rows, of `layer_count` and `residual_count`.
    """

    format: str
    version: int
    gradlane: str
    job: str
    restart: int
    rank: int
    world_size: int
    serving: int
    strategy: str
    update: str
    stragglers: str
    uptime_s: float
    ending: str
    step: int
    quiet_s: float
    is_stalled: bool
    wait: WaitNow | None
    steps: StepTimes
    window: Window
    recent: list[StepRow]
    history: list[StepRow]
    layers: list[LayerRow]
    layer_count: int
    ranks: list[RankRow]
    codecs: list[CodecRow]
    codec_ratio: float
    raw_bytes: int
    encoded_bytes: int
    residuals: list[ResidualRow]
    residual_count: int
    clip_steps: int
    clipped_steps: int
    clip_factor: float
    queued_bytes: int
    queued_jobs: int
    scratch_bytes: int
    io_cpu_s: float
    work_cpu_s: float
    plan_version: int
    refused_connections: int
    events: list[Event]


def read_state(content: bytes) -> LiveState:
    """Parse a state.

    Raises:
        FormatError: the bytes are no state, or one of another version.
    """
    value = loads(content)
    if not isinstance(value, dict) or value.get("format") != STATE_FORMAT:
        raise FormatError(f"it is no state of a session: its format is not {STATE_FORMAT!r}")
    if value.get("version") != STATE_VERSION:
        raise FormatError(
            f"it is a state of version {str(value.get('version'))[:20]}, and this gradlane reads "
            f"version {STATE_VERSION}: use the gradlane of the training"
        )
    _check(value, LiveState, "state")
    return cast(LiveState, value)


def _check(value: Any, kind: Any, place: str) -> None:
    """Check a value against a type of this module; keys that it does not have are allowed."""
    if is_typeddict(kind):
        if not isinstance(value, dict):
            raise FormatError(f"{place} is no object")
        for key, member in get_type_hints(kind).items():
            if key not in value:
                raise FormatError(f"{place} lacks {key!r}")
            _check(value[key], member, f"{place}.{key}")
    elif get_origin(kind) is list:
        if not isinstance(value, list):
            raise FormatError(f"{place} is no list")
        for index, one in enumerate(value):
            _check(one, get_args(kind)[0], f"{place}[{index}]")
    elif isinstance(kind, types.UnionType):
        if value is not None:
            _check(value, get_args(kind)[0], place)
    elif isinstance(value, bool) != (kind is bool) or not isinstance(
        value, (int, float) if kind is float else kind
    ):
        raise FormatError(f"{place} is no {kind.__name__}")
