"""Protocols of the compiled core, and the only place that loads it.

Tests wrap it by what satisfies `CoreModule`, too. Pointers are plain addresses;
tensors are numbers in the order of the tensor table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Protocol, cast

from gradlane.errors import (
    GradlaneError,
    PeerLostError,
    ProgressTimeoutError,
    RefusedError,
    SessionFailedError,
)
from gradlane.formats.longer_waits import with_variables

MembershipRow = tuple[str, int, list[int], int, str]
"""(kind, generation, members, step, text): see `Channel.next_changes`."""

CoreRow = tuple[tuple[int, int], str, str, int, int, tuple[int, int, int], int, int]
"""((begin, end) in ns, "tx", "rx" or "work", kind, peer, step, (tensor, slice, offset), bytes,
priority): a frame or job that the core has recorded."""

BLOCK_MOST_BYTES = 2**32 - 16
"""Bytes that a block may have: frames say its size in 32 bits."""


class Listener(Protocol):
    """A bound, listening socket."""

    @property
    def port(self) -> int:
        """The port number."""

    def close(self) -> None:
        """Stop listening."""


class Blocks(Protocol):
    """All ranks' blocks of one tensor in one step."""

    def regions(self) -> list[tuple[int, int] | None]:
        """Return (address, nbytes) by rank; None: no block. The own address is 0."""

    def release(self) -> None:
        """Release the blocks; their memory may not be read afterwards."""


class SquareSum(Protocol):
    """An exact sum of squares."""

    def add(self, dtype: str, pointer: int, nbytes: int) -> None:
        """Add the squares of contiguous elements of dtype `f32`, `f64`, `f16` or `bf16`."""

    def root(self) -> float:
        """Return the square root of the sum: infinite or NaN where a summand is."""


class SquareSumType(Protocol):
    """The constructor of sums of squares."""

    def __call__(self) -> SquareSum:
        """Make a sum of nothing."""


class Channel(Protocol):
    """Connections to all ranks and an engine on its own threads, for one prepared model."""

    def step_begin(self, step: int) -> None:
        """Begin a step; the one before must be complete."""

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Submit a gradient; the core borrows the memory until the tensor is ready."""

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Report that this rank has no gradient; the other ranks' result lands in the memory."""

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Submit this rank's block of a tensor that has blocks; borrowed until that is ready."""

    def block_absent(self, tensor: int, step: int) -> None:
        """Report that this rank has no block of a tensor in this step."""

    def take_blocks(self, tensor: int, step: int) -> Blocks | None:
        """Return all ranks' blocks of a tensor that is ready in a step, once."""

    def next_changes(self, *, wait: bool = True) -> list[MembershipRow]:
        """Return (kind, generation, members, step, text) of changes of the members: `members`:
        they go on from `step` on, the latest step that any of them was in, and the text says why;
        `claim`: half of them are left, and what the job's store holds decides: the text, unless it
        holds another one (`answer_claim`)."""

    def answer_claim(self, generation: int, text: str | None) -> None:
        """Tell what the job's store holds for a generation; None: it did not answer."""

    def read_state(self, name: str, part: int) -> None:
        """Make the step that has just begun broadcast optimizer state (`update="server"`)."""

    def send_raw(self, step: int) -> None:
        """Send this rank's contributions to a step that has just begun without codecs."""

    def has_measurable_squares(self, tensors: int) -> bool:
        """Return whether the owners of slices can add up the squares of the first tensors."""

    def measure_squares(self, tensors: int, step: int) -> None:
        """Have the owners add up the squares of the first tensors in the step that has just begun;
        all ranks call it, before their first contribution."""

    def wait_norm(self, step: int, blocks: SquareSum | None = None) -> float:
        """Wait for the norm of a step's gradients; means may be still to come.

        Args:
            step: number of the step.
            blocks: the squares of means that no rank owns, or None.
        """

    def copy_worker_residual(self, tensor: int, pointer: int, count: int) -> None:
        """Copy the residual of this rank's encoding of a tensor to `count` f32 values."""

    def residual_squares(
        self, first: int, elements_max: int
    ) -> tuple[list[tuple[int, int, float]], int]:
        """Return (tensor, slice, sum of squares) of this rank's residuals from a slice on, until
        about so many numbers are read, and the slice to go on with: 0 after the last."""

    def load_state(self, tensor: int, name: str, pointer: int, count: int) -> None:
        """Load the f32 optimizer state of a tensor, as far as this rank owns it
        (`update="server"`)."""

    def step_end(self, step: int) -> None:
        """Record that `optimizer.step()` was called."""

    def wait(self, tensors: list[int], step: int) -> None:
        """Wait until all given tensors are ready."""

    def needed(self, tensor: int, step: int) -> None:
        """Announce that a consumer is about to wait for a tensor."""

    def is_ready(self, tensor: int, step: int) -> bool:
        """Return whether a tensor is ready, without waiting."""

    def wait_step(self, step: int) -> None:
        """Wait until the whole step is complete."""

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) of each tensor that became ready since the last call."""

    def all_connected(self) -> None:
        """Start the keepalive check: all ranks are connected now."""

    def switch_priorities(self, priorities: list[int]) -> None:
        """Announce new priorities, one number a tensor (rank 0)."""

    def metrics_json(self) -> str:
        """Return counters as a JSON object."""

    def waited_ns(self) -> int:
        """Return the time that threads of the program have waited so far, in nanoseconds."""

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return and clear the trace."""

    def take_timeline(self) -> tuple[list[CoreRow], int]:
        """Return and clear the trace with begin times and jobs, and the number of rows that were
        dropped."""

    def finish(self, timeout_s: float) -> None:
        """Close in order, with a goodbye to every rank."""

    def abort(self, reason: str) -> None:
        """Abort and tell every rank the reason."""

    def forget_in_child(self) -> None:
        """Close descriptors in a forked child."""


class RankChannel(Channel, Protocol):
    """A channel whose ranks take part one by one, and not as the nodes that they are on."""

    def step_pass(self, step: int) -> None:
        """Begin a step without contributing to it (stragglers); report all tensors as absent."""

    def step_barrier(self, step: int) -> None:
        """Begin a step that no rank is left out of (stragglers); all ranks have to begin it so."""

    def wait_decided(self, step: int) -> None:
        """Wait until the contributors of a step are known (stragglers)."""

    def participation(self, step: int) -> tuple[bool | None, bool, int]:
        """Return whether this rank contributed to a step, or None if unknown; whether the others
        were in the next step when its gradients were there; and the last step whose contributors
        are known."""

    def root_result_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Submit, for all ranks, the result of the blocks of a tensor of scheme `answer`."""

    def next_root_requests(self, *, wait: bool = True) -> list[tuple[int, int]]:
        """Return (tensor, step) whose blocks are all here and wait for this rank's result."""

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        """Register a parameter's own memory (`update="server"`)."""

    def set_optimizer(self, step: int, rows_json: str) -> None:
        """Set every tensor's hyper-parameters for a step (`update="server"`)."""

    def write_state(self, name: str, part: int, clear: bool) -> None:
        """Make the step that has just begun hand optimizer state to dedicated servers."""

    def write_parameters(self, tensors: list[int]) -> None:
        """Make the step that has just begun hand parameters to dedicated servers, and so to all."""

    def clear_state(self) -> None:
        """Delete all optimizer state on this rank (`update="server"`)."""


def rank_channel(channel: Channel, wanted: str) -> RankChannel:
    """Return a channel as one of single ranks.

    Args:
        channel: of single ranks, or a node's.
        wanted: what needs single ranks, for the message.

    Raises:
        ValueError: it is a node's.
    """
    if not hasattr(channel, RankChannel.participation.__name__):
        raise RefusedError(f'{wanted} does not go with sums on nodes: use local="off"')
    return cast(RankChannel, channel)


class CoreChannel(RankChannel, Protocol):
    """A channel of the core itself, which the leader of a node takes results from."""

    def next_ready(self, step: int) -> list[tuple[int, bool]]:
        """Wait until `take_ready` has something to return, or the session ends; return it."""


DrawKey = tuple[int, int, int, int, int]
"""Seed, step, tensor, leg (a rank, or -1 for the broadcast), first element: the key of a codec's
draws."""
Memory = tuple[int, int]
"""An address and the number of elements there; the call has it to itself."""


class CoreCodec(Protocol):
    """An encoding of f32 values of one tensor."""

    @property
    def spec(self) -> str:
        """The canonical text."""

    @property
    def granule(self) -> int:
        """Number of elements whose multiples may begin a part of a tensor."""

    @property
    def is_fixed_size(self) -> bool:
        """True if the length of an encoding depends on the number of elements alone."""

    @property
    def is_unbiased(self) -> bool:
        """True if the expectation of a decoded value is the value."""

    @property
    def residual_width(self) -> int:
        """f32 numbers of a residual for each value; 0: the codec keeps none."""

    def max_wire_bytes(self, at: DrawKey, elements: int) -> int:
        """Return the largest encoded size of so many values."""

    def encode(self, at: DrawKey, source: Memory, residual: Memory, wire: Memory) -> int:
        """Encode f32 values to the front of a buffer; return the number of bytes."""

    def decode(self, wire: Memory, out: Memory) -> None:
        """Decode bytes into f32 values."""

    def decode_add(self, wire: Memory, sum: Memory) -> None:
        """Decode bytes and add them to f32 values."""


class CodecType(Protocol):
    """The constructor of codecs."""

    def __call__(self, spec: str, sizes: list[int]) -> CoreCodec:
        """Build the codec of a spec for a tensor of these sizes; `ValueError` if the spec is
        invalid."""


class ListenerType(Protocol):
    """The constructor of listeners."""

    def __call__(self, host: str, port_low: int, port_high: int) -> Listener:
        """Bind to the first free port of the range; 0, 0 is any."""


class ChannelType(Protocol):
    """The constructor of channels."""

    def __call__(
        self,
        listener: Listener,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
        watch: Callable[[], object] | None = None,
    ) -> CoreChannel:
        """Connect to all ranks; blocks until all are connected or `watch` raises."""


class Pulse(Protocol):
    """A counter in memory that rises while this process runs."""

    def stop(self) -> None:
        """Stop counting."""


class PulseType(Protocol):
    """The constructor of pulses."""

    def __call__(self, pointer: int, interval_s: float) -> Pulse:
        """Start to count in 8 bytes, once an interval."""


class PlanBuilder(Protocol):
    """The builder of the engine's plan."""

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
        """Return the plan as JSON; `ValueError` if the arguments are invalid."""


class CoreModule(Protocol):
    """The interface of `gradlane._core`."""

    @property
    def Listener(self) -> ListenerType:  # noqa: N802
        """The class of listeners."""

    @property
    def Channel(self) -> ChannelType:  # noqa: N802
        """The class of channels."""

    @property
    def Pulse(self) -> PulseType:  # noqa: N802
        """The class of heartbeat counters."""

    @property
    def ChannelError(self) -> type[Exception]:  # noqa: N802
        """Raised when a channel has failed: (message, last complete step, rank at fault)."""

    @property
    def ChannelTimeout(self) -> type[Exception]:  # noqa: N802
        """Raised when there was no progress in time; arguments as for `ChannelError`."""

    @property
    def SquareSum(self) -> SquareSumType:  # noqa: N802
        """The class of sums of squares."""

    @property
    def plan_json(self) -> PlanBuilder:
        """The builder of plans."""


class CodecModule(Protocol):
    """The part of `gradlane._core` that needs no rank and no channel."""

    @property
    def Codec(self) -> CodecType:  # noqa: N802
        """The class of codecs."""

    def codec_json(
        self, text: str, dtype: str, sizes: list[int], ring_ranks: int | None = None
    ) -> str:
        """Describe a codec for a tensor as JSON; `ValueError` if the text names no codec."""


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


def check_connected(core: CoreModule, channel: Channel) -> None:
    """Check, while waiting for other ranks elsewhere, that a channel has not failed.

    Raises:
        SessionFailedError: it has.
    """
    try:
        channel.is_ready(0, 0)
    except core.ChannelError as error:
        raise translate_error(core, error, "waiting for other ranks") from error


def translate_error(core: CoreModule, error: Exception, where: str) -> SessionFailedError:
    """Convert a channel's error into an error of this package.

    Args:
        core: defines the error.
        error: a `ChannelError` of that module.
        where: the activity of this rank, for the message.
    """
    arguments = error.args
    message = str(arguments[0]) if arguments else str(error)
    last_complete_step = arguments[1] if len(arguments) > 1 else None
    rank = arguments[2] if len(arguments) > 2 else None
    message = with_variables(message)
    text = f"{message} (noticed while {where}); restart from the last checkpoint"
    if isinstance(error, core.ChannelTimeout):
        return ProgressTimeoutError(text, last_complete_step)
    if rank is not None:
        return PeerLostError(text, rank, last_complete_step)
    return SessionFailedError(text, last_complete_step)
