"""The backend: torch's calls become calls of the compiled group."""

from __future__ import annotations

import atexit
import itertools
import os
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import DistBackendError

from gradlane.distributed.sparse_entries import SparseEntries
from gradlane.distributed.work import Futures, GradlaneWork
from gradlane.training.torch_internals import c10d

if TYPE_CHECKING:
    from gradlane.distributed.core import CoreGroup

_ELEMENTS = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "bool",
}
"""Types that can be reduced; others are moved as bytes."""
_PARTS_OF_COMPLEX: dict[torch.dtype | None, torch.dtype] = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
"""Sums and means of complex numbers are those of their parts."""
_OPERATOR: Any = c10d.ReduceOp.RedOpType
_REDUCTIONS = {
    _OPERATOR.SUM: "sum",
    _OPERATOR.AVG: "mean",
    _OPERATOR.PRODUCT: "product",
    _OPERATOR.MIN: "min",
    _OPERATOR.MAX: "max",
    _OPERATOR.BAND: "and",
    _OPERATOR.BOR: "or",
    _OPERATOR.BXOR: "xor",
}
_NO_TIME = "Rank 0 timed out in monitoredBarrier after"
_TAG_MASK = 0xFFFFFFFF

_open: set[GradlaneBackend] = set()
"""Groups that were not left. Torch keeps a backend and loses its Python object, and with it all
that the class overrides, so this keeps it."""
_left: deque[CoreGroup] = deque(maxlen=64)
"""Groups whose last bytes may be on their way at the end of the process."""


class GradlaneBackend(c10d.Backend):  # type: ignore[misc]
    """One rank's end of a group of `torch.distributed`, for CPU tensors.

    Each call is one call of the compiled group, which runs it without the interpreter. Ranks are
    those of the group.

    Args:
        group: connected.
        rank: this rank.
        size: number of ranks.
        name: of the group, for errors.
        timeout: of calls that give none.
    """

    # What torch may ask for; its own answers to these call themselves without end.
    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def __init__(
        self, group: CoreGroup, rank: int, size: int, name: str, timeout: timedelta
    ) -> None:
        super().__init__(rank, size)
        self._group, self._own, self._ranks, self._group_name = group, rank, size, name
        self._timeout_s = timeout.total_seconds()
        self._futures = Futures(group)
        self._process_id = os.getpid()
        self._coalesced: list[GradlaneWork] | None = None
        _open.add(self)

    def replace(self, group: CoreGroup, rank: int, size: int) -> None:
        """Leave the group, and go on with other connections.

        Args:
            group: connected, or one that refuses all calls.
            rank: this rank in it.
            size: number of its ranks.
        """
        self.shutdown()
        self._group, self._own, self._ranks = group, rank, size
        self._futures = Futures(group)
        _open.add(self)

    # What the group is

    def rank(self) -> int:
        """Return this rank."""
        return self._own

    def size(self) -> int:
        """Return the number of ranks."""
        return self._ranks

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend's name."""
        return "gradlane"

    def name(self) -> str:
        """Return the backend's name."""
        return "gradlane"

    @property
    def options(self) -> Any:
        """The options that torch reads: name and time-out."""
        return c10d.Backend.Options("gradlane", timedelta(seconds=self._timeout_s))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of calls that give none."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def _get_sequence_number_for_group(self) -> int:
        return self._group.begun()

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: numbers begin at 0 on every rank."""

    def shutdown(self) -> None:
        """Leave the group; calls that run fail here, and the other ranks are told."""
        if os.getpid() == self._process_id and self in _open:
            _open.discard(self)
            self._group.close()
            _left.append(self._group)

    abort = shutdown

    # Collectives

    def allreduce(self, tensors: list[torch.Tensor], opts: Any) -> GradlaneWork:
        """Reduce a tensor of all ranks, in place; a sparse one is summed or averaged."""
        tensor = self._one("all_reduce", tensors)
        if tensor.layout is torch.sparse_coo:
            return self._reduce_sparse(tensor, opts)
        return self._run(
            "all_reduce", [], [tensor], opts, reduction=self._reduction("all_reduce", opts)
        )

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any) -> GradlaneWork:
        """Reduce several tensors of all ranks, in place."""
        reduction = self._reduction("all_reduce", opts)
        return self._join(
            [self._run("all_reduce", [], [it], opts, reduction=reduction) for it in tensors]
        )

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> GradlaneWork:
        """Give all ranks the root's tensor."""
        tensor = self._one("broadcast", tensors)
        return self._run("broadcast", [], [tensor], opts, root=opts.rootRank)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> GradlaneWork:
        """Reduce a tensor of all ranks on the root."""
        tensor = self._one("reduce", tensors)
        reduction = self._reduction("reduce", opts)
        return self._run("reduce", [], [tensor], opts, root=opts.rootRank, reduction=reduction)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give all ranks the tensors of all ranks, which may differ in their last sizes nowhere."""
        tensor, gathered = self._one("all_gather", inputs), self._one_list("all_gather", outputs)
        self._check_count("all_gather", gathered)
        return self._run("all_gather", [tensor], gathered, opts)

    def all_gather_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> GradlaneWork:
        """Give all ranks the tensors of all ranks, one after the other."""
        return self._run("all_gather", [tensor], [output], opts, cut_outputs=True)

    def allgather_coalesced(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give all ranks several tensors of all ranks; `outputs[r][i]` is `inputs[i]` of rank r."""
        self._check_count("all_gather", outputs)
        if any(len(gathered) != len(inputs) for gathered in outputs):
            raise ValueError(
                f"all_gather of {len(inputs)} tensors: give as many outputs for each rank"
            )
        calls = zip(inputs, zip(*outputs, strict=True), strict=True)
        return self._join([self._run("all_gather", [it], out, opts) for it, out in calls])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give all ranks several tensors of all ranks, one after the other."""
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.all_gather_single(out, it, opts) for out, it in pairs])

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> GradlaneWork:
        """Give each rank the reduction of all ranks' tensors for it."""
        output, given = (
            self._one("reduce_scatter", outputs),
            self._one_list("reduce_scatter", inputs),
        )
        self._check_count("reduce_scatter", given)
        reduction = self._reduction("reduce_scatter", opts)
        return self._run("reduce_scatter", given, [output], opts, reduction=reduction)

    def reduce_scatter_single(
        self, output: torch.Tensor, tensor: torch.Tensor, opts: Any
    ) -> GradlaneWork:
        """Give each rank the reduction of its part of all ranks' tensors."""
        reduction = self._reduction("reduce_scatter", opts)
        return self._run(
            "reduce_scatter", [tensor], [output], opts, reduction=reduction, cut_inputs=True
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give each rank the reductions of its parts of several tensors."""
        pairs = zip(outputs, inputs, strict=True)
        return self._join([self.reduce_scatter_single(out, it, opts) for out, it in pairs])

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give the root the tensors of all ranks."""
        tensor, gathered = self._one("gather", inputs), []
        if self._own == opts.rootRank:
            gathered = self._one_list("gather", outputs)
            self._check_count("gather", gathered)
        return self._run("gather", [tensor], gathered, opts, root=opts.rootRank)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any
    ) -> GradlaneWork:
        """Give each rank the root's tensor for it."""
        output, given = self._one("scatter", outputs), []
        if self._own == opts.rootRank:
            given = self._one_list("scatter", inputs)
            self._check_count("scatter", given)
        return self._run("scatter", given, [output], opts, root=opts.rootRank)

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any
    ) -> GradlaneWork:
        """Give each rank the tensors of all ranks for it."""
        self._check_count("all_to_all", outputs)
        self._check_count("all_to_all", inputs)
        return self._run("all_to_all", inputs, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any,
    ) -> GradlaneWork:
        """Give each rank its part of all ranks' tensors; splits count rows, none: equal parts."""
        if not (output.is_contiguous() and tensor.is_contiguous()):
            # As torch's other backends, and in their words.
            raise ValueError("Tensors must be contiguous: all_to_all_single cuts them by rows")
        into, given = (
            self._splits("output", output, output_splits),
            self._splits("input", tensor, input_splits),
        )
        return self._run(
            "all_to_all", [tensor], [output], opts, input_parts=given, output_parts=into
        )

    def barrier(self, opts: Any) -> GradlaneWork:
        """Wait until all ranks have come."""
        return self._run("barrier", [], [], opts)

    def monitored_barrier(self, opts: Any, wait_all_ranks: bool = False) -> None:
        """Wait until all ranks have come; the error names all that have not, whatever the flag."""
        if self._own:
            # Rank 0 says who is missing, also where it has begun after the others.
            given_s = opts.timeout.total_seconds()
            opts.timeout = timedelta(seconds=2 * (given_s if given_s >= 0 else self._timeout_s))
        work = self._run("monitored_barrier", [], [], opts)
        try:
            work.wait()
        except DistBackendError as error:
            missing = work.missing_ranks()
            # Gloo's words, which programs look for.
            if self._own:
                came = (
                    f"Rank {self._own} successfully reached monitoredBarrier, but received errors"
                )
                raise DistBackendError(
                    f"{came} while waiting for send/recv from rank 0: {error}"
                ) from None
            if not missing:
                raise
            names = ", ".join(map(str, missing))
            failed = f"{'Rank' if len(missing) == 1 else 'Ranks'} {names} failed to pass"
            what = f"{failed} monitoredBarrier in" if opts.timeout else _NO_TIME
            time_ms = opts.timeout // timedelta(milliseconds=1)
            raise DistBackendError(f"[Rank 0]: {what} {time_ms} ms: {error}") from None

    # Messages

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> GradlaneWork:
        """Send a tensor to a rank."""
        tensor = self._one("send", tensors)
        check_tensor("send", tensor)
        source = _plain(tensor)
        try:
            work = self._group.send(
                to, tag & _TAG_MASK, source.data_ptr(), source.nbytes, self._timeout_s
            )
        except Exception as error:
            raise self.failure(error) from None
        return self._work([work], [source], [], None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> GradlaneWork:
        """Receive a tensor from a rank."""
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> GradlaneWork:
        """Receive a tensor from any rank."""
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: list[torch.Tensor], source: int | None, tag: int) -> GradlaneWork:
        tensor = self._one("recv", tensors)
        check_tensor("recv", tensor)
        into = _place_for(tensor)
        try:
            work = self._group.receive(
                source, tag & _TAG_MASK, into.data_ptr(), into.nbytes, self._timeout_s
            )
        except Exception as error:
            raise self.failure(error) from None
        return self._work([work], [into], [tensor], _copy_back([(tensor, into)]))

    # Several calls that end together

    def start_coalescing(self) -> None:
        """Begin to collect the works of all calls."""
        self._coalesced = []

    def end_coalescing(self) -> GradlaneWork:
        """Return one work for the calls since `start_coalescing`."""
        works, self._coalesced = self._coalesced or [], None
        return self._join(works)

    # How calls are made

    def _run(
        self,
        operation: str,
        inputs: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        opts: Any,
        *,
        root: int = 0,
        reduction: str = "",
        cut_inputs: bool = False,
        cut_outputs: bool = False,
        input_parts: list[tuple[int, int]] | None = None,
        output_parts: list[tuple[int, int]] | None = None,
    ) -> GradlaneWork:
        dtype = None
        for tensor in (*inputs, *outputs):
            check_tensor(operation, tensor)
            if dtype is not None and tensor.dtype is not dtype:
                raise ValueError(
                    f"{operation} of tensors of {dtype} and {tensor.dtype}: give one type"
                )
            dtype = tensor.dtype
        parts = _PARTS_OF_COMPLEX.get(dtype) if reduction in ("sum", "mean") else None
        element = "bytes" if dtype is None else _ELEMENTS.get(parts or dtype, "bytes")
        if reduction and element == "bytes":
            raise ValueError(
                f"{operation} cannot reduce {dtype}; the backend gradlane reduces "
                f"{', '.join(str(it).removeprefix('torch.') for it in _ELEMENTS)}"
            )
        given = [_plain(it) for it in inputs]
        in_place = operation in ("all_reduce", "broadcast", "reduce")
        into = [_plain(it) if in_place else _place_for(it) for it in outputs]
        copied = [(it, place) for it, place in zip(outputs, into, strict=True) if it is not place]
        places = [_range(it) for it in given]
        results = [_range(it) for it in into]
        if cut_inputs:
            places = self._cut(operation, given[0], into[0].nbytes)
        if cut_outputs:
            results = self._cut(operation, into[0], given[0].nbytes)
        if input_parts is not None and output_parts is not None:
            places = _ranges(given[0], input_parts)
            results = _ranges(into[0], output_parts)
        timeout_s = opts.timeout.total_seconds()
        is_waited_for = not getattr(opts, "asyncOp", True)
        try:
            work = self._group.begin(
                operation,
                element,
                reduction or "sum",
                root,
                places,
                results,
                timeout_s if timeout_s >= 0 else self._timeout_s,
                is_waited_for,
            )
        except Exception as error:
            raise self.failure(error) from None
        finish = _copy_back(copied) if copied else None
        return self._work([work], [*given, *into], list(outputs), finish)

    def _work(
        self,
        works: Sequence[Any],
        tensors: list[torch.Tensor],
        outputs: list[torch.Tensor],
        finish: Any,
    ) -> GradlaneWork:
        number = self._group.begun()
        work = GradlaneWork(
            self._futures, self._group, works, tensors, outputs, self.failure, finish, number
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _join(self, works: Sequence[GradlaneWork], **also: Any) -> GradlaneWork:
        """Return one work for several; see `GradlaneWork.joined` for what else."""
        work = GradlaneWork.joined(works, self._futures, self._group, self.failure, **also)
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduce_sparse(self, tensor: torch.Tensor, opts: Any) -> GradlaneWork:
        """Sum or average a sparse tensor of all ranks, in place, in the order of the ranks."""
        reduction = self._reduction("all_reduce of a sparse tensor", opts)
        entries = SparseEntries(tensor, self._ranks, reduction)
        options = c10d.AllgatherOptions()
        options.timeout, options.asyncOp = opts.timeout, False
        shapes = [torch.empty_like(entries.shape) for _ in range(self._ranks)]
        # How much each rank has must be known before there is room for it.
        self.allgather([shapes], [entries.shape], options).wait()
        indices, values = entries.places(shapes)
        every = range(self._ranks)
        works = [
            self._run("all_to_all", [own for _ in every], places, opts)
            for own, places in ((entries.indices, indices), (entries.values, values))
        ]
        return self._join(works, outputs=[tensor], then=lambda: entries.add(indices, values))

    def failure(self, error: Exception) -> Exception:
        """Return the exception of torch for one of the core."""
        if type(error).__name__ != "GroupError":
            return error
        message, kind, _ = error.args
        if kind == "timed out" and "after a wait" in message:
            message = f"rank {self._own}, group {self._group_name!r}: {message}"
        return DistBackendError(message)

    def _one(self, operation: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(tensors) != 1:
            raise ValueError(f"{operation} takes one tensor, and has {len(tensors)}")
        return tensors[0]

    def _one_list(
        self, operation: str, tensors: Sequence[list[torch.Tensor]]
    ) -> list[torch.Tensor]:
        if len(tensors) != 1:
            raise ValueError(f"{operation} takes one list of tensors, and has {len(tensors)}")
        return tensors[0]

    def _check_count(self, operation: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._ranks:
            raise ValueError(
                f"{operation} takes a tensor for each of {self._ranks} ranks, and has "
                f"{len(tensors)}"
            )

    def _reduction(self, operation: str, opts: Any) -> str:
        operator = opts.reduceOp
        operator = getattr(operator, "op", operator)
        found = _REDUCTIONS.get(operator)
        if found is None:
            raise ValueError(
                f"{operation} with {operator}: the backend gradlane has "
                f"{', '.join(it.name for it in _REDUCTIONS)}"
            )
        return found

    def _cut(self, operation: str, whole: torch.Tensor, part: int) -> list[tuple[int, int]]:
        if part * self._ranks != whole.nbytes:
            raise ValueError(
                f"{operation} of {self._ranks} parts of {part} bytes and a tensor of "
                f"{whole.nbytes} bytes: it must be {self._ranks} times as large"
            )
        start = whole.data_ptr()
        return [(start + rank * part, part) for rank in range(self._ranks)]

    def _splits(
        self, what: str, tensor: torch.Tensor, splits: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Return offset and length of each rank's rows, in bytes."""
        rows = tensor.shape[0] if tensor.dim() else 1
        if not splits:
            if rows % self._ranks:
                raise ValueError(
                    f"all_to_all_single of {rows} {what} rows among {self._ranks} ranks: give "
                    f"{what}_split_sizes"
                )
            splits = [rows // self._ranks] * self._ranks
        if len(splits) != self._ranks or sum(splits) != rows:
            raise ValueError(
                f"all_to_all_single: {what}_split_sizes {list(splits)} of a tensor with {rows} "
                f"rows on {self._ranks} ranks: give one size a rank, {rows} together"
            )
        row = tensor.nbytes // rows if rows else 0
        ends = [0]
        for count in splits:
            ends.append(ends[-1] + count * row)
        return [(start, end - start) for start, end in itertools.pairwise(ends)]


def check_tensor(operation: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that the backend cannot move.

    Raises:
        ValueError: it is not on the CPU, or not dense.
    """
    if not tensor.is_cpu:
        raise ValueError(
            f"{operation} of a tensor on {tensor.device}: the backend gradlane moves CPU "
            "tensors; for others give them a backend of their own, as in "
            'init_process_group("cpu:gradlane,cuda:nccl")'
        )
    if tensor.layout is not torch.strided:
        raise ValueError(
            f"{operation} of a tensor of layout {tensor.layout}: the backend gradlane moves "
            "dense tensors; call to_dense() first"
        )


def _place(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's values are the bytes at its address."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy whose values are the bytes at its address."""
    if _is_plain(tensor):
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def _place_for(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _is_plain(tensor) else _place(tensor)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.nbytes


def _ranges(tensor: torch.Tensor, parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    start = tensor.data_ptr()
    return [(start + offset, length) for offset, length in parts]


def _copy_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Return a function that copies results to tensors that are not contiguous."""
    different = [(tensor, place) for tensor, place in pairs if tensor is not place]
    if not different:
        return None

    def copy() -> None:
        with torch.no_grad():
            for tensor, place in different:
                tensor.copy_(place)

    return copy


@atexit.register
def _leave_groups() -> None:
    """Leave all groups, and wait until what was sent is read, two seconds at most."""
    for group in list(_open):
        group.shutdown()
    for left in _left:
        left.join()
