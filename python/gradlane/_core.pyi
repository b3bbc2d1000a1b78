"""The compiled core: translation only.

All numbers are plain integers and pointers are addresses. Steps go from 0 (rank 0's values go
everywhere) upwards; tensors are numbered in the order of the tensor table. Misuse and bad arguments
are `ValueError`, what the system refuses is `OSError`, a session's end is `ChannelError`.
"""

from collections.abc import Callable, Sequence

class ChannelError(Exception):
    """A session that has failed, was refused, or is closed.

    `args` are the message, the last complete step or None, and the rank at fault or None.
    """

class ChannelTimeout(ChannelError):  # noqa: N818
    """Nothing happened in time; `args` as for `ChannelError`."""

class GroupError(Exception):
    """A call of a group that failed.

    `args` are the message, the kind (`timed out`, `lost`, `mismatch`, `protocol`, `closed` or
    `interrupted`) and the other ranks at fault.
    """

class Work:
    """A call of a group that has begun."""

    def is_done(self) -> bool:
        """Return whether it has ended."""

    def result(self) -> int | None:
        """Return the rank that a received message is from, else this rank; None while it runs.

        Raises:
            GroupError: it failed.
        """

    def key(self) -> int:
        """Return a number that no other work has while this one exists."""

class Group:
    """Connections between the ranks of a process group, and the collectives over them.

    Memory is given as (address, nbytes). It must stay until the work is done, and nobody else may
    write to it, nor read what is to be written, until then.
    """

    def __init__(
        self,
        listener: Listener,
        *,
        name: str,
        job: str,
        rank: int,
        peers: list[str],
        generation: int,
        secret: bytes,
        seal: bool,
        connect_timeout_s: float,
        silence_timeout_s: float,
        spin_us: int,
    ) -> None:
        """Connect to all ranks.

        Args:
            listener: bound; the group takes it.
            name: the same on every rank.
            job: the same on every rank.
            rank: this one.
            peers: `host:port` of every rank.
            generation: number of the membership, the same on every rank.
            secret: the same on every rank.
            seal: whether all that is sent is encrypted and authenticated.
            connect_timeout_s: time for all ranks to be connected.
            silence_timeout_s: a rank that sends nothing for this long is lost.
            spin_us: microseconds for which a waiting thread asks again and again before it sleeps.

        Raises:
            ChannelError: a rank did not come in time, or was refused.
            ValueError: an argument is wrong.
        """

    def begin(
        self,
        operation: str,
        element: str,
        reduction: str,
        root: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        timeout_s: float,
        is_waited_for: bool,
    ) -> Work:
        """Begin a collective.

        Args:
            operation: `all_reduce`, `reduce_scatter`, `all_gather`, `broadcast`, `reduce`,
                `gather`, `scatter`, `all_to_all`, `barrier` or `monitored_barrier`.
            element: `bytes`, `f32`, `f64`, `f16`, `bf16`, `i8`, `i16`, `i32`, `i64`, `u8`,
                or `bool`.
            reduction: `sum`, `mean`, `product`, `min`, `max`, `and`, `or` or `xor`.
            root: where there is one.
            inputs: to read, one or one a rank.
            outputs: to write, one or one a rank; of `all_reduce`, `broadcast` and `reduce` the
                input too.
            timeout_s: after which the group fails.
            is_waited_for: whether this thread calls `wait` right away.

        Raises:
            GroupError: the group has ended.
            ValueError: the call makes no sense; nothing was sent.
        """

    def send(self, to: int, tag: int, pointer: int, nbytes: int, timeout_s: float) -> Work:
        """Begin to send a message; errors as of `begin`."""

    def receive(
        self, source: int | None, tag: int, pointer: int, nbytes: int, timeout_s: float
    ) -> Work:
        """Begin to receive a message; `source` None: from any rank; errors as of `begin`."""

    def wait(self, work: Work, timeout_s: float | None) -> int:
        """Wait until a work is done, without the GIL, and return its result.

        Raises:
            GroupError: it failed, or the time is over, after which it goes on.
        """

    def poll(self, work: Work) -> bool:
        """Serve the sockets once without waiting, and return whether a work is done."""

    def watch(self, work: Work) -> None:
        """Have a work returned by `next_ended`."""

    def next_ended(self, age_s: float) -> int | None:
        """Return the key of the oldest watched work that has ended and that none took for a time.

        Args:
            age_s: for how long it was left to other threads.

        None when the group is closed.
        """

    def begun(self) -> int:
        """Return the number of collectives that this rank has begun."""

    def close(self) -> None:
        """Leave the group at once; calls that run fail, the other ranks are told."""

    def join(self) -> None:
        """Wait until the connections of a closed group have ended, two seconds at most."""

class Listener:
    """A bound, listening socket, made before its address is published; one for each channel."""

    def __init__(self, host: str, port_low: int, port_high: int) -> None:
        """Listen on an address and the first free port of the range.

        Args:
            host: an IPv4 or IPv6 address (no name).
            port_low: lowest port; 0 together with `port_high` 0 is any free port.
            port_high: highest port.

        Raises:
            OSError: no port of the range is free, or the address is not this machine's.
            ValueError: `host` is no address, or the range is empty.
        """

    @property
    def port(self) -> int:
        """The port that it listens on."""

    def close(self) -> None:
        """Stop listening. A listener that a channel has taken stops with the channel."""

class SquareSum:
    """An exact sum of squares: no order of additions changes a bit of it."""

    def __init__(self) -> None:
        """Nothing is added up yet."""

    def add(self, dtype: str, pointer: int, nbytes: int) -> None:
        """Add the squares of contiguous elements, without the GIL.

        Args:
            dtype: `f32`, `f64`, `f16` or `bf16`.
            pointer: address of the first element, to be read during the call.
            nbytes: whole elements.

        Raises:
            ValueError: another dtype, or an address of 0.
        """

    def root(self) -> float:
        """Return the square root of the sum: infinite or NaN where a summand is."""

class Pulse:
    """Counts up in memory, on a thread that needs no GIL, until it is stopped or collected."""

    def __init__(self, pointer: int, interval_s: float) -> None:
        """Begin to count.

        Args:
            pointer: address of 8 bytes, a multiple of 8; the memory must stay until `stop`.
            interval_s: seconds from one count to the next.

        Raises:
            OSError: there is no thread for it.
            ValueError: an argument makes no sense.
        """

    def stop(self) -> None:
        """Count no more from now on; nothing happens in a forked child."""

def plan_json(
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
    """Cut tensors into slices, place them, and return the plan as JSON.

    Args:
        tensors_json: a list of `{"name", "numel", "dtype", "role"}`, where dtype is one of `f32`,
            `f16`, `bf16`, `f64`, `u8` and role is `parameter` or `initial`; with `"scheme"`, `ps`,
            `ring` or `gather`, where it is another one than the strategy's. Those that are to be
            encoded also have `"codec"`, and `"sizes"`: of their dimensions in the order of storage.
        strategy: `p3`, `slicing`, `wfbp`, `kvstore`, `deferred-pull`, `ring` or `asgd`.
        slice_elems: elements in a slice at most; None is the strategy's own choice.
        seed: places whole tensors on servers where the strategy draws them.
        update: `worker` or `server`.
        world_size: number of ranks.
        stragglers_json: the rule for steps that go on without late ranks, if there is one.
        servers: the first so many ranks own slices; None: all do.
        workers: the first so many ranks train, and the others own all slices; None: all train.

    Raises:
        ValueError: the arguments make no plan; the message says why.
    """

def codec_json(text: str, dtype: str, sizes: list[int], ring_ranks: int | None = None) -> str:
    """Say what a codec does to a tensor, as a JSON object; `null` where it would change nothing.

    Args:
        text: a codec such as `qsgd:bits=4`.
        dtype: the tensor's.
        sizes: of its dimensions in the order of storage.
        ring_ranks: bytes are those of a ring of so many ranks: half of what goes round in all laps.

    Returns:
        `{"codec", "granule_elems", "fixed_size", "residual_width", "unbiased", "wire_bytes_max"}`.

    Raises:
        ValueError: the text is no codec; the message says what is wrong.
    """

def simulate(scenario_json: str) -> str:
    """Simulate a scenario and return `{"report": ..., "trace": ...}` as JSON.

    Args:
        scenario_json: `{"model": "cluster", ...}`, a cluster of engines in virtual time, or
            `{"model": "ring-fused", ...}`, a model of fused buffers and rings.

    Raises:
        ValueError: the scenario makes no sense; the message names the field.
        RuntimeError: the simulation came to no end.
    """

def keep_awake(parent: int) -> None:
    """Spin, without the GIL, until this process has another parent than `parent`."""

class Blocks:
    """All ranks' blocks of a tensor in a step, until `release` or the end of the object.

    They stay readable when the channel ends.
    """

    def regions(self) -> list[tuple[int, int] | None]:
        """Return (address, nbytes) of each rank's block, in rank order; None where it had none.

        That of this rank is where it was given; its address is 0 here. Empty after `release`.
        """

    def release(self) -> None:
        """Give the blocks back: no address of `regions` may be read afterwards."""

class Channel:
    """Connections to all ranks and the engine on its own threads, for one prepared model.

    Who passes a pointer promises that the memory stays allocated and untouched until the tensor is
    ready in that step, or the channel has ended (a call raised `ChannelError`, or `finish` or
    `abort` returned).
    """

    def __init__(
        self,
        listener: Listener,
        options_json: str,
        plan_json: str,
        peers: list[str],
        secret: bytes,
        watch: Callable[[], object] | None = None,
    ) -> None:
        """Connect to all ranks; blocks without the GIL, signals are handled.

        Args:
            listener: this rank's; it belongs to the channel from now on.
            options_json: an object with `rank` and `world_size` and any of `job`, `generation`,
                `frame_bytes`, `credit_bytes`, `low_water_bytes`, `send_buffer_bytes` (0: fitted to
                the path), `pacing`, `receive_buffer_bytes` (0: the kernel's choice), `work_depth`,
                `work_threads` (0: on the I/O threads), `lanes`, `silence_timeout_s`,
                `progress_timeout_s`, `connect_timeout_s`, `trace`, `seed` (of codecs),
                `encoded_ahead`.
            plan_json: what `plan_json` returned, the same on every rank.
            peers: `host:port` (`[v6]:port`) of every rank.
            secret: what all ranks of the job know.
            watch: called every 50 ms while it waits; what it raises ends the call.

        Raises:
            ValueError: options or plan make no sense.
            ChannelError: a rank refused another; the message says why.
            ChannelTimeout: not all ranks are connected in time.
        """

    def step_begin(self, step: int) -> None:
        """Begin a step: 0 first, then 1, 2, …; the one before must be complete."""

    def step_pass(self, step: int) -> None:
        """Begin a step without a part in it: for a rank that was left out of the one before.

        All tensors are to be given by `tensor_absent`; the results land there.
        """

    def step_barrier(self, step: int) -> None:
        """Begin a step that no rank is left out of; all ranks have to begin it so.

        Where all wait for all it is a step like any other.
        """

    def wait_decided(self, step: int) -> None:
        """Wait for the contributors of the current step, where stragglers are left out."""

    def participation(self, step: int) -> tuple[bool | None, bool, int]:
        """Return this rank's part in a step, where stragglers are left out.

        Returns:
            Whether the step counted it, None where that is not known; whether the others were in
            the next one when its gradients were there; the last step whose contributors are known.
        """

    def gradient_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over a gradient (in step 0: the tensor itself); it will hold the result.

        Args:
            tensor: number in the tensor table.
            step: the current step.
            pointer: address of the elements, contiguous.
            nbytes: size of the whole tensor.

        Raises:
            ValueError: unknown tensor, another size, a second gradient in the step.
        """

    def tensor_absent(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Say that there is no gradient here; the mean of other ranks' lands in the memory."""

    def block_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over this rank's block of a tensor that has blocks, up to the plan's size.

        It is not written, and the caller's again when the tensor is ready in this step.

        Raises:
            ValueError: another scheme, a size that the plan does not allow, or a second block.
            ChannelError: the channel has failed.
        """

    def block_absent(self, tensor: int, step: int) -> None:
        """Say that this rank has no block of a tensor in this step."""

    def root_result_ready(self, tensor: int, step: int, pointer: int, nbytes: int) -> None:
        """Hand over the root's result for the blocks of a tensor, which all ranks get.

        It is not written, and the caller's again when the tensor is ready in this step.

        Raises:
            ValueError: another scheme, or a size that the plan does not allow; a result that no
                rank waits for is an error of the next call.
            ChannelError: the channel has failed.
        """

    def next_changes(self, *, wait: bool = True) -> list[tuple[str, int, list[int], int, str]]:
        """Return (kind, generation, members, step, text) of changes of the members, once each.

        Kind `members`: they go on from the step on, for the reason in the text. Kind `claim`: the
        text is for the store's register of the generation (`answer_claim`).

        Args:
            wait: wait for one, without the GIL; otherwise there may be none.

        Raises:
            ChannelError: the channel has ended.
        """

    def answer_claim(self, generation: int, text: str | None) -> None:
        """Tell what the job's store holds for a generation; None: it did not answer.

        Raises:
            ValueError: it is no text of `next_changes`.
        """

    def next_root_requests(self, *, wait: bool = True) -> list[tuple[int, int]]:
        """Return (tensor, step) whose blocks are all here and wait for this rank, their root, once.

        Args:
            wait: wait for one, without the GIL; otherwise there may be none.

        Raises:
            ChannelError: the channel has ended.
        """

    def take_blocks(self, tensor: int, step: int) -> Blocks | None:
        """Return a tensor's blocks in a step, once: when it is ready, or waits for its root.

        Where its root has given a result, that is the only block; the root itself gets None.
        """

    def set_parameter(self, tensor: int, pointer: int, nbytes: int) -> None:
        """Register a parameter's own memory (update=server)."""

    def set_optimizer(self, step: int, rows_json: str) -> None:
        """Give hyper-parameters before the first gradient of a step (update=server).

        Args:
            step: the step from which on they are in force, until the next call.
            rows_json: a list of objects, each with `tensors`, the numbers of the tensors that it is
                for, and `kind`. `"sgd"`: `lr` and any of `momentum`, `dampening`, `weight_decay`,
                `nesterov`, `maximize`. `"adam"`: `steps` (taken before, a number a tensor), `lr`,
                `beta1`, `beta2`, `eps` and any of `weight_decay`, `decoupled_weight_decay`,
                `maximize`.

        Raises:
            ValueError: a row makes no sense, or a tensor is unknown.
        """

    def read_state(self, name: str, part: int) -> None:
        """Make the step that has just begun one that broadcasts optimizer state (update=server).

        Every rank does so; tensors with a gradient are then not updated, and their state lands
        where `set_parameter` says. State has four bytes an element: a tensor of two-byte elements
        gets the lower half in part 0 and the upper half in part 1. It ends with `set_optimizer`.

        Args:
            name: `momentum_buffer`, `exp_avg` or `exp_avg_sq`.
            part: 0 or 1.
        """

    def write_state(self, name: str, part: int, clear: bool) -> None:
        """Make the step that has just begun one that hands optimizer state to dedicated servers.

        Every rank does so, once a step, before its first gradient. The gradients, of rank 0 alone,
        are state in the parts of `read_state`; parameters stay as they are.

        Args:
            name: as in `read_state`.
            part: 0 or 1.
            clear: forget all state before.

        Raises:
            ValueError: no dedicated servers update parameters.
        """

    def write_parameters(self, tensors: list[int]) -> None:
        """Make the step that has just begun one that hands parameters to dedicated servers.

        Every rank does so, once a step, before its first gradient. The gradients, of rank 0 alone,
        are the values of these tensors, which all ranks get.

        Args:
            tensors: numbers in the tensor table, the same on every rank.

        Raises:
            ValueError: no dedicated servers update parameters, or a tensor is unknown.
        """

    def send_raw(self, step: int) -> None:
        """Let this rank's contributions travel as they are in a step that has just begun.

        Every rank has to say so before its first contribution; a session whose ranks do not fails.
        """

    def has_measurable_squares(self, tensors: int) -> bool:
        """Return whether owners can add up the squares of the first so many tensors."""

    def measure_squares(self, tensors: int, step: int) -> None:
        """Have the owners add up squares of the first tensors in a step that has just begun.

        Every rank calls it, before its first contribution; a session whose ranks do not fails.

        Raises:
            ValueError: the plan's owners cannot do it, or the call comes too late.
        """

    def wait_norm(self, step: int, blocks: SquareSum | None = None) -> float:
        """Wait, without the GIL, for the norm of a step's gradients: infinite or NaN where one is.

        Means may be still to come. The norm is there until that of the next step is.

        Args:
            step: number of the step.
            blocks: the squares of means that no rank owns, or None.

        Raises:
            ValueError: no squares are added up in this step.
            ChannelError: the channel has failed.
        """

    def copy_worker_residual(self, tensor: int, pointer: int, count: int) -> None:
        """Copy what this rank's own encoding has lost of a tensor so far, between steps.

        Args:
            tensor: number in the tensor table.
            pointer: address of `count` contiguous f32 values in the order of the tensor's storage,
                to be written during the call.
            count: the tensor's number of elements times the codec's `residual_width`.
        """

    def residual_squares(
        self, first: int, elements_max: int
    ) -> tuple[list[tuple[int, int, float]], int]:
        """Sum up the squares of what this rank's own encoding has lost so far; at any time.

        Args:
            first: number of the slice to begin with.
            elements_max: about how many numbers are read; an I/O thread does.

        Returns:
            (tensor, slice, squares) of slices that have a residual and are not being encoded, and
            the slice to go on with; 0 after the last.

        Raises:
            ChannelError: the channel has ended.
        """

    def clear_state(self) -> None:
        """Forget all optimizer state on this rank, between steps (update=server)."""

    def load_state(self, tensor: int, name: str, pointer: int, count: int) -> None:
        """Keep what this rank owns of a tensor's optimizer state (update=server), between steps.

        Args:
            tensor: number in the tensor table.
            name: as in `read_state`.
            pointer: address of contiguous f32 values in the order of the tensor's storage; they are
                read during the call.
            count: their number, which is the tensor's number of elements.

        Raises:
            ValueError: unknown tensor or name, or another number of values.
        """

    def step_end(self, step: int) -> None:
        """Say that `optimizer.step()` was called: parameters may be written (update=server)."""

    def needed(self, tensor: int, step: int) -> None:
        """Say that a consumer waits for a tensor (`wait` does so itself)."""

    def wait(self, tensors: list[int], step: int) -> None:
        """Wait until all of these are ready; without the GIL, signals are handled.

        Raises:
            ChannelError: the session has failed; no memory is touched any more.
            ChannelTimeout: it has failed because nothing happened in time.
        """

    def wait_step(self, step: int) -> None:
        """Wait until the whole step is complete on this rank; as `wait`."""

    def is_ready(self, tensor: int, step: int) -> bool:
        """Whether a tensor is ready; raises `ChannelError` when the session is over."""

    def take_ready(self, step: int) -> list[tuple[int, bool]]:
        """Return (tensor, absent) for what became ready in the step since the last call."""

    def next_ready(self, step: int) -> list[tuple[int, bool]]:
        """Wait for something that was not taken, and return it as `take_ready` does.

        It counts as no wait of the program.
        """

    def all_connected(self) -> None:
        """Say that all other ranks have connected to all.

        Until then a rank may be silent for the connect timeout longer, before its first byte.
        """

    def switch_priorities(self, priorities: list[int]) -> None:
        """Announce another order of urgency, one number a tensor; rank 0 only.

        It is in force on all ranks two steps later. Larger goes first.
        """

    def metrics_json(self) -> str:
        """Return counters as a JSON object.

        `tx_bytes`, `rx_bytes` (headers included), `tx_payload_bytes`, `rx_payload_bytes`,
        `tx_frames`, `rx_frames`, `queued_messages`, `queued_bytes` (all also in `peers`, a list by
        rank, with `in_flight_bytes`), `queued_jobs`, `raw_bytes` and `encoded_bytes` (slices that
        were sent whole), `io_cpu_s`, `work_cpu_s`, `acceptor_cpu_s`, `wait_s`, `waits` (rows of
        `name`, `count`, `wait_s`, `wait_s_max`, `wait_step_max`, `wait_step_last`,
        `last_of_step_count`, `last_of_step_wait_s`), `stragglers` (rows by rank of `last_count`,
        `late_s`, `late_s_max`, `late_step_max`), `gathered_slices`, `tied_slices`,
        `decided_steps`, `left_out` (rows by rank of `left_out_steps`, `late_count`,
        `left_out_late_s`, `late_s_max`, `late_step_max`),
        `plan_version`, `outgoing_frames`, `jobs_in_flight`, `scratch_bytes`, `turns`,
        `refused_connections`, `refusals` (`address` and `reason` of the last ones). Depths of
        queues are asked of the I/O thread, without the GIL; it answers within 100 ms or not at all.
        """

    def waited_ns(self) -> int:
        """Return how long threads of the program have waited so far, in nanoseconds."""

    def take_trace(self) -> list[tuple[int, str, int, int, int, int, int, int]]:
        """Return frames since the last call, when the option `trace` is set.

        Each is (time in ns as `time.monotonic_ns`, "tx" or "rx", kind, peer, step, tensor, slice,
        priority); kinds are those of the wire: 1 push, 2 broadcast, 3 notify, 4 pull, …
        """

    def take_timeline(
        self,
    ) -> tuple[
        list[tuple[tuple[int, int], str, str, int, int, tuple[int, int, int], int, int]], int
    ]:
        """Return what was recorded since the last call of this or of `take_trace`.

        Rows are ((begin, end) in ns as `time.monotonic_ns`, "tx", "rx" or "work", kind by name,
        peer, step, (tensor, slice, offset in bytes), bytes with headers, priority). A frame begins
        when it is chosen, or when its header has arrived. The number says how many rows fell out
        since the start before they were taken; the last 262,144 frames and works are kept.
        """

    def failure(self) -> str | None:
        """Return why the session has failed, or None."""

    def finish(self, timeout_s: float) -> None:
        """Close in order: send what is owed, say goodbye, wait for everybody's goodbye.

        Afterwards all threads are joined.

        Raises:
            ChannelTimeout: not every rank said goodbye in time.
            ChannelError: the session failed before.
        """

    def abort(self, reason: str) -> None:
        """Give up and tell every rank why; takes about a second at most.

        Afterwards all threads are joined and no memory is touched.
        """

    def forget_in_child(self) -> None:
        """In a forked child: close all descriptors; the parent's session goes on untouched."""

class Codec:
    """An encoding of f32 values of one tensor; keeps no state.

    A place is (seed, step, tensor, leg, first element); the leg is a worker's rank, or -1 for what
    an owner sends. Memory is an address and a number of elements, which the caller keeps alive and
    untouched during the call; the GIL is released while kernels run.
    """

    def __init__(self, spec: str, sizes: list[int]) -> None:
        """Build a codec.

        Args:
            spec: name and options, such as `qsgd:bits=4`.
            sizes: of the tensor, in the order of its storage, slowest first.

        Raises:
            ValueError: the text names no codec.
        """

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

    def max_wire_bytes(self, at: tuple[int, int, int, int, int], elements: int) -> int:
        """Return the most bytes that so many values take in a place."""

    def encode(
        self,
        at: tuple[int, int, int, int, int],
        source: tuple[int, int],
        residual: tuple[int, int],
        wire: tuple[int, int],
    ) -> int:
        """Encode f32 values to the front of a buffer.

        Args:
            at: the place of the values.
            source: the values.
            residual: what was not sent before, which becomes what is not sent now; (0, 0) is none.
            wire: bytes, at least `max_wire_bytes`.

        Returns:
            How many bytes were written.

        Raises:
            ValueError: an address, a length or the place makes no sense.
        """

    def decode(self, wire: tuple[int, int], out: tuple[int, int]) -> None:
        """Decode bytes into f32 values.

        Raises:
            ValueError: the bytes are no encoding of so many values.
        """

    def decode_add(self, wire: tuple[int, int], sum: tuple[int, int]) -> None:
        """Decode bytes and add them to f32 values; `ValueError` as for `decode`."""
