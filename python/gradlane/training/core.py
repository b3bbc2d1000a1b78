"""The compiled core as the rest of the package sees it: protocols, and the one place that loads it.

Tests put an in-process double in its place; whatever satisfies `CoreModule` will do. Pointers are
plain addresses, tensors are numbers in the order of the tensor table.
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

from gradlane.errors import GradlaneError, PeerLostError, ProgressTimeoutError, SessionFailedError

CoreRow = tuple[tuple[int, int], str, str, int, int, tuple[int, int, int], int, int]
"""((begin, end) in ns, "tx", "rx" or "work", kind, peer, step, (tensor, slice, offset), bytes,
priority), as the core records frames and works."""


class Listener(Protocol):
    """A bound, listening socket."""

    @property
    def port(self) -> int:
        """The port that it listens on."""

    def close(self) -> None:
        """Stop listening."""


class Blocks(Protocol):
    """All ranks' blocks of one tensor in one step."""

    def regions(self) -> list[tuple[int, int] | None]:
        """Return (address, nbytes) by rank, None where there is none; the own address is 0."""

    def release(self) -> None:
        """Give the blocks back; their memory may not be read afterwards."""


class Channel(Protocol):
    """Connections to all ranks and an engine on its own threads, for one prepared model."""

    def step_begin(self, step: int) -> None:
        """Begin a step; the one before must be complete."""

    def step_pass(self, step: int) -> None:
        """Begin a step without a part in it (stragglers); everything is to be said absent."""

    def step_gather(self, step: int) -> None:
        """Begin a step that no rank is left out of (stragglers); all ranks have to begin it so."""

    def wait_decided(self, step: int) -> None:
        """Wait until it is known who is in a step (stragglers)."""

    def standing(self, step: int) -> tuple[bool | None, bool, int]:
        """Return whether this rank was in a step, if known; whether the others were in the next one
        when its gradients were there; and the last step whose contributors are known."""

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over a gradient; the memory is the core's until the tensor is ready."""

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Say that there is no gradient here; a result of other ranks lands in the memory."""

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over this rank's block of a tensor that has blocks, until that is ready."""

    def block_absent(self, tensor: int, step: int) -> None:
        """Say that this rank has no block of a tensor in this step."""

    def answer_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over the answer to the blocks of a tensor of scheme `answer`, for all ranks."""

    def next_questions(self, *, wait: bool = True) -> list[tuple[int, int]]:
        """Return (tensor, step) whose blocks are all here and wait for this rank's answer."""

    def take_blocks(self, tensor: int, step: int) -> Blocks | None:
        """Return all ranks' blocks of a tensor that is ready in a step, once."""

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        """Register a parameter's own memory (`update="server"`)."""

    def set_optimizer(self, step: int, rows_json: str) -> None:
        """Give every tensor's hyper-parameters for a step (`update="server"`)."""

    def read_state(self, name: str, part: int) -> None:
        """Make the step that has just begun broadcast optimizer state (`update="server"`)."""

    def send_raw(self, step: int) -> None:
        """Let this rank's contributions to a step that has just begun travel without codecs."""

    def copy_worker_residual(self, tensor: int, pointer: int, count: int) -> None:
        """Copy what this rank's own encoding has lost of a tensor to `count` f32 values."""

    def clear_state(self) -> None:
        """Forget all optimizer state on this rank (`update="server"`)."""

    def load_state(self, tensor: int, name: str, pointer: int, count: int) -> None:
        """Keep what this rank owns of a tensor's f32 optimizer state (`update="server"`)."""

    def step_end(self, step: int) -> None:
        """Say that `optimizer.step()` was called."""

    def wait(self, tensors: list[int], step: int) -> None:
        """Wait until all of these are ready."""

    def needed(self, tensor: int, step: int) -> None:
        """Say that a consumer is about to wait for a tensor."""

    def is_ready(self, tensor: int, step: int) -> bool:
        """Whether a tensor is ready; does not wait."""

    def wait_step(self, step: int) -> None:
        """Wait until the whole step is complete."""

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) for what became ready since the last call."""

    def next_ready(self, step: int) -> list[tuple[int, bool]]:
        """Wait for something that `take_ready` has not returned, and return it likewise."""

    def all_connected(self) -> None:
        """Say that all ranks have connected to all: one that says nothing is silent from now on."""

    def switch_priorities(self, priorities: list[int]) -> None:
        """Announce another order of urgency, one number a tensor (rank 0)."""

    def metrics_json(self) -> str:
        """Return counters as a JSON object."""

    def waited_ns(self) -> int:
        """Return how long threads of the program have waited so far, in nanoseconds."""

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and forget the trace."""

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        """Return and forget the trace, with begins and works, and how much of it was not kept."""

    def finish(self, timeout_s: float) -> None:
        """Close in order, with a goodbye to every rank."""

    def abort(self, reason: str) -> None:
        """Give up and tell every rank why."""

    def forget_in_child(self) -> None:
        """Close descriptors in a forked child."""


DrawKey = tuple[int, int, int, int, int]
"""Seed, step, tensor, leg (a rank, or -1 for the broadcast), first element."""
Memory = tuple[int, int]
"""An address and the number of elements there, which nobody else uses during the call."""


class Codec(Protocol):
    """An encoding of f32 values of one tensor."""

    @property
    def spec(self) -> str:
        """The canonical text."""

    @property
    def granule(self) -> int:
        """Parts of a tensor begin at multiples of so many elements."""

    @property
    def is_fixed_size(self) -> bool:
        """Whether the length of an encoding depends on the number of elements alone."""

    @property
    def is_unbiased(self) -> bool:
        """Whether the expectation of what is decoded is the value."""

    @property
    def residual_width(self) -> int:
        """How many f32 numbers a residual has for each value; 0 where none is kept."""

    def max_wire_bytes(self, at: DrawKey, elements: int) -> int:
        """Return the most bytes that so many values take in a place."""

    def encode(self, at: DrawKey, source: Memory, residual: Memory, wire: Memory) -> int:
        """Encode f32 values to the front of a buffer; returns the number of bytes."""

    def decode(self, wire: Memory, out: Memory) -> None:
        """Decode bytes into f32 values."""

    def decode_add(self, wire: Memory, sum: Memory) -> None:
        """Decode bytes and add them to f32 values."""


class CodecType(Protocol):
    """How a codec is made."""

    def __call__(self, spec: str, sizes: list[int]) -> Codec:
        """Build the codec of a spec for a tensor of these sizes; `ValueError` if there is none."""


class ListenerType(Protocol):
    """How a listener is made."""

    def __call__(self, host: str, port_low: int, port_high: int) -> Listener:
        """Bind to the first free port of the range; 0, 0 is any."""


class ChannelType(Protocol):
    """How a channel is made."""

    def __call__(
        self,
        listener: Listener,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
    ) -> Channel:
        """Connect to all ranks; blocks until they are there."""


class Pulse(Protocol):
    """A count in memory that goes on while this process runs."""

    def stop(self) -> None:
        """Count no more from now on."""


class PulseType(Protocol):
    """How a pulse is made."""

    def __call__(self, pointer: int, interval_s: float) -> Pulse:
        """Begin to count in 8 bytes, once an interval."""


class PlanBuilder(Protocol):
    """How a plan is made."""

    def __call__(
        self,
        tensors_json: str,
        strategy: str,
        slice_elems: int | None,
        seed: int,
        update: str,
        world_size: int,
        *,
        stragglers_json: str | None = None,
        servers: int | None = None,
        workers: int | None = None,
    ) -> str:
        """Return the plan as JSON; `ValueError` when the arguments make none."""


class CoreModule(Protocol):
    """What `gradlane._core` offers."""

    @property
    def Listener(self) -> ListenerType:  # noqa: N802
        """The class of listeners."""

    @property
    def Channel(self) -> ChannelType:  # noqa: N802
        """The class of channels."""

    @property
    def Pulse(self) -> PulseType:  # noqa: N802
        """The class of signs of life."""

    @property
    def ChannelError(self) -> type[Exception]:  # noqa: N802
        """Raised when a channel has failed: (message, last complete step, rank at fault)."""

    @property
    def ChannelTimeout(self) -> type[Exception]:  # noqa: N802
        """Raised when there was no progress in time."""

    @property
    def plan_json(self) -> PlanBuilder:
        """The builder of plans."""


class CodecModule(Protocol):
    """What `gradlane._core` offers beside sessions: it needs no rank and no channel."""

    @property
    def Codec(self) -> CodecType:  # noqa: N802
        """The class of codecs."""

    def codec_json(
        self, text: str, dtype: str, sizes: list[int], ring_ranks: int | None = None
    ) -> str:
        """Say what a codec does to a tensor, as JSON; `ValueError` when it is no codec."""


def load_codecs() -> CodecModule:
    """Load the part of the compiled core that encodes.

    Raises:
        GradlaneError: it is not there, or was built for another platform.
    """
    return cast(CodecModule, load_core())


def load_core() -> CoreModule:
    """Load the compiled core.

    Raises:
        GradlaneError: it is not there, or was built for another platform.
    """
    try:
        return cast(CoreModule, importlib.import_module("gradlane._core"))
    except ImportError as error:
        raise GradlaneError(
            f"the compiled part of gradlane cannot be loaded ({error}); "
            "install gradlane from its wheel, or build it with `maturin develop --release`"
        ) from error


def translate_error(core: CoreModule, error: Exception, where: str) -> SessionFailedError:
    """Turn a channel's error into one of the package's.

    Args:
        core: the module that the error came from.
        error: a `ChannelError` of that module.
        where: what this rank was doing, for the message.
    """
    arguments = error.args
    message = str(arguments[0]) if arguments else str(error)
    last_complete_step = arguments[1] if len(arguments) > 1 else None
    rank = arguments[2] if len(arguments) > 2 else None
    text = f"{message} (noticed while {where}); restart from the last checkpoint"
    if isinstance(error, core.ChannelTimeout):
        return ProgressTimeoutError(text, last_complete_step)
    if rank is not None:
        return PeerLostError(text, rank, last_complete_step)
    return SessionFailedError(text, last_complete_step)
