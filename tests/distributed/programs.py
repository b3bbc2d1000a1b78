"""Programs of ranks for the tests of the backend: the same calls over Gloo and over gradlane."""

from __future__ import annotations

import datetime
import functools
import gc
import hashlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ReduceOp
from torch.distributed import distributed_c10d as registry
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradlane.distributed

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
SIZES = (0, 1, 5, 4096, 100_003)
OPERATORS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)


@contextmanager
def world(
    backend: str, store: Any, rank: int, size: int, job: str, timeout_s: float = 60.0
) -> Iterator[None]:
    """Open a world of a backend for a block."""
    gradlane.distributed.register()
    dist.init_process_group(
        backend,
        store=PrefixStore(f"{job}/{backend}", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


@functools.lru_cache(maxsize=64)
def values(dtype: torch.dtype, size: int, rank: int, *, exact: bool) -> torch.Tensor:
    """Return a rank's values; sums and products of exact ones do not depend on their order."""
    generator = torch.Generator().manual_seed(1_000 * rank + size)
    if dtype.is_floating_point and not exact:
        return torch.randn(size, generator=generator).to(dtype)
    return torch.randint(0, 3, (size,), generator=generator).to(dtype)


def each_call(rank: int, ranks: int, size: int, dtype: torch.dtype, group: Any) -> dict[str, Any]:
    """Call every operation in a group, many at once, and return its results by name."""
    found: dict[str, Any] = {}
    works: list[Any] = []
    kept: list[torch.Tensor] = []
    exact = ranks > 2
    options: Any = {"group": group, "async_op": True}

    def own(seed: int = 0) -> torch.Tensor:
        kept.append(values(dtype, size, rank + 10 * seed, exact=exact).clone())
        return kept[-1]

    def whole() -> torch.Tensor:
        kept.append(torch.cat([own(it) for it in range(ranks)]))
        return kept[-1]

    operators = OPERATORS + (() if dtype.is_floating_point else BITS)
    for operator in operators:
        tensor = own()
        works.append(dist.all_reduce(tensor, operator, **options))
        found[f"all_reduce {operator}"] = tensor
        tensor = own()
        works.append(dist.reduce(tensor, ranks - 1, operator, **options))
        # What a root alone gets is undefined elsewhere under Gloo.
        found[f"reduce {operator}"] = tensor if rank == ranks - 1 else None
        output = torch.empty(size, dtype=dtype)
        given = [own(it) for it in range(ranks)]
        works.append(dist.reduce_scatter(output, given, operator, **options))
        found[f"reduce_scatter {operator}"] = output
        output = torch.empty(size, dtype=dtype)
        works.append(dist.reduce_scatter_tensor(output, whole(), operator, **options))
        found[f"reduce_scatter_tensor {operator}"] = output
    for root in range(ranks):
        tensor = own()
        works.append(dist.broadcast(tensor, root, **options))
        found[f"broadcast {root}"] = tensor
    gathered = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
    works.append(dist.all_gather(gathered, own(), **options))
    found["all_gather"] = gathered
    output = torch.empty(size * ranks, dtype=dtype)
    works.append(dist.all_gather_into_tensor(output, own(), **options))
    found["all_gather_into_tensor"] = output
    gathered = [torch.empty(size, dtype=dtype) for _ in range(ranks)]
    works.append(dist.gather(own(), gathered if rank == 1 else None, 1, **options))
    found["gather"] = gathered if rank == 1 else None
    output = torch.empty(size, dtype=dtype)
    scattered = [own(it) for it in range(ranks)] if rank == 1 else None
    works.append(dist.scatter(output, scattered, 1, **options))
    found["scatter"] = output
    output = torch.empty(size * ranks, dtype=dtype)
    works.append(dist.all_to_all_single(output, whole(), **options))
    found["all_to_all_single"] = output
    # Rank `a` gives rank `b` a + b rows.
    rows = [rank + it for it in range(ranks)]
    source = torch.arange(2 * sum(rows)).reshape(-1, 2).to(dtype)
    output = torch.empty_like(source)
    works.append(dist.all_to_all_single(output, source, rows, rows, **options))
    found["all_to_all_single with splits"] = output
    for work in works:
        if work is not None:
            work.wait()
    if rank == 0:
        dist.send(own(), 1, group=group, tag=3)
    if rank == 1:
        output = torch.empty(size, dtype=dtype)
        dist.recv(output, 0, group=group, tag=3)
        found["recv"] = output
    peers = (rank + 1) % ranks, (rank - 1) % ranks
    output = torch.empty(size, dtype=dtype)
    sent = own()
    batch = [
        dist.P2POp(dist.isend, sent, peers[0], group),
        dist.P2POp(dist.irecv, output, peers[1], group),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    found["batch_isend_irecv"] = output
    dist.barrier(group=group)
    return found


def compare_with_gloo(
    store: Any, rank: int, world_size: int, job: str, *, dtypes: Sequence[str]
) -> list[str]:
    """Call every operation over both backends; return the names of those whose bits differ."""
    different = []
    with world("gradlane", store, rank, world_size, job):
        gloo = dist.new_group(backend="gloo")
        for name in dtypes:
            dtype = getattr(torch, name)
            for size in SIZES:
                expected = each_call(rank, world_size, size, dtype, gloo)
                found = each_call(rank, world_size, size, dtype, None)
                for what, result in found.items():
                    if not _same(result, expected[what]):
                        different.append(f"{what} of {size} {dtype}")
    return different


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return all(_same(a, b) for a, b in zip(first, second, strict=True))
    if first is None:
        return second is None
    return bool(torch.equal(first.view(torch.uint8), second.view(torch.uint8)))


def calls_of_gradlane_alone(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Call what Gloo has not, and what is about memory; return results."""
    found: list[Any] = []
    with world("gradlane", store, rank, world_size, job):
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor, ReduceOp.AVG)
        found.append(tensor.tolist())
        flags = torch.tensor([rank == 0, True, False])
        dist.all_reduce(flags, ReduceOp.SUM)
        found.append(flags.tolist())
        columns = torch.arange(6.0).reshape(2, 3).t()
        dist.all_reduce(columns)
        found.append(columns.tolist())
        every = torch.zeros(2, 4)[:, ::2]
        dist.broadcast(every.copy_(torch.full((2, 2), float(rank))), 1)
        found.append(every.tolist())
        numbers = torch.tensor([rank + 1j])
        gathered = [torch.empty_like(numbers) for _ in range(world_size)]
        dist.all_gather(gathered, numbers)
        found.append(torch.cat(gathered).imag.tolist())
        objects: list[Any] = [None] * world_size
        dist.all_gather_object(objects, {"rank": rank})
        found.append([it["rank"] for it in objects])
        future = dist.all_reduce(torch.ones(100_000), async_op=True).get_future()
        found.append(future.then(lambda it: it.value()[0].sum().item()).wait())
        polled: Any = dist.all_reduce(torch.ones(2), async_op=True)
        while not polled.is_completed():
            time.sleep(0.001)
        found.append((polled.is_success(), polled.exception(), polled.result()[0].tolist()))
        late: Any = dist.irecv(torch.ones(2), (rank + 1) % world_size)
        found.append(late.is_completed())
        dist.barrier()
        dist.send(torch.ones(2), (rank - 1) % world_size)
        late.wait()
        found.append(late.is_completed())
        if rank == 0:
            ranks = [dist.recv(torch.ones(2), tag=4) for _ in range(world_size - 1)]
            found.append(sorted(ranks))
        else:
            dist.send(torch.ones(2), 0, tag=4)
            found.append([1, 2])
        pairs = [torch.ones(4), torch.ones(5)]
        with _coalescing_manager(async_ops=True) as manager:
            for pair in pairs:
                dist.all_reduce(pair)
        manager.wait()
        found.append([it.tolist() for it in pairs])
    return found


def compare_rare_calls(store: Any, rank: int, world_size: int, job: str) -> list[str]:
    """Reduce complex, conjugated and sparse tensors over both backends; return what differs."""
    different = []
    with world("gradlane", store, rank, world_size, job):
        gloo: Any = dist.new_group(backend="gloo")
        for dtype in (torch.complex64, torch.complex128):
            own = torch.view_as_complex(values(torch.float64, 40, rank, exact=False).view(20, 2))
            own = own.to(dtype)
            for operator in (ReduceOp.SUM, ReduceOp.AVG):
                found = []
                for group in (gloo, None):
                    reduced, whole = own.clone(), own.repeat(world_size)
                    part, one = torch.empty_like(own), own.clone()
                    dist.reduce(reduced, 1, operator, group=group)
                    dist.reduce_scatter_tensor(part, whole, operator, group=group)
                    dist.all_reduce(one, operator, group=group)
                    found += [[reduced if rank == 1 else part, part, one]]
                if not all(torch.equal(a, b) for a, b in zip(*found, strict=True)):
                    different.append(f"{operator} of {dtype}")
        # The bytes of a conjugated tensor are those of the tensor.
        each = [torch.empty_like(own) for _ in range(world_size)]
        dist.gather(own.conj(), each if rank == 0 else None)
        if rank == 0 and not torch.equal(each[0], own.conj().resolve_conj()):
            different.append("a conjugated tensor, gathered")
        # No entries on rank 0; the same entry twice, and rows, on the others.
        for dtype, dense in ((torch.float32, (3,)), (torch.float64, ()), (torch.int64, (2, 2))):
            count = 4 * rank
            indices = torch.arange(2 * count).reshape(2, count) % 3
            rows = values(dtype, count * math.prod(dense), rank, exact=False).view(count, *dense)
            sums = []
            for group in (gloo, None):
                tensor = torch.sparse_coo_tensor(indices, rows.clone(), (5, 4, *dense))
                work: Any = dist.all_reduce(tensor, group=group, async_op=True)
                work.wait()
                sums.append(tensor.to_dense())
            if not torch.equal(*sums):
                different.append(f"sparse {dtype}")
            if dtype.is_floating_point:
                mean = torch.sparse_coo_tensor(indices, rows, (5, 4, *dense))
                dist.all_reduce(mean, ReduceOp.AVG)
                if not torch.equal(mean.to_dense(), sums[0] / world_size):
                    different.append(f"mean of sparse {dtype}")
    return different


def torch_asks(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Return what torch reads of works and groups."""
    found: list[Any] = []
    with world("gradlane", store, rank, world_size, job):
        numbers = []
        for _ in range(3):
            work: Any = dist.all_reduce(torch.ones(1), async_op=True)
            numbers.append(work._get_sequence_number())
            work.wait()
        found.append(numbers)
        with allow_inflight_collective_as_graph_input_ctx():
            work = dist.all_reduce(torch.ones(1), async_op=True)
            listed = _distributed_c10d._get_work_registry_size()
            work.wait()
            found.append((listed, _distributed_c10d._get_work_registry_size()))
        tensors = [torch.ones(3), torch.ones(4)]
        with _coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.all_reduce(tensors[0])
            dist.all_reduce(tensors[1])
        manager.wait()
        found.append([it[-1].item() for it in tensors])
        columns = torch.ones(world_size, 2)[:, :1]
        try:
            dist.all_to_all_single(torch.empty(world_size, 1), torch.ones(2, world_size)[:, :1].t())
        except ValueError as error:
            found.append(str(error))
        try:
            dist.all_to_all_single(columns, torch.ones(world_size, 1))
        except ValueError as error:
            found.append(str(error))
    return found


def subgroups(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Call in groups of the even and the odd ranks, overlapping with calls of all."""
    with world("gradlane", store, rank, world_size, job):
        groups: list[Any] = [
            dist.new_group(list(range(first, world_size, 2))) for first in range(2)
        ]
        own = groups[rank % 2]
        everybody, few = torch.ones(100_000), torch.full((10,), float(rank))
        first = dist.all_reduce(everybody, async_op=True)
        second = dist.all_reduce(few, group=own, async_op=True)
        for work in (second, first):
            assert work is not None
            work.wait()
        dist.monitored_barrier(own)
        return [everybody[0].item(), few[0].item()]


class Small(nn.Module):
    """Layers of several sizes, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(30, 300),
            nn.BatchNorm1d(300),
            nn.ReLU(),
            nn.Linear(300, 200),
            nn.Linear(200, 2),
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the outputs."""
        outputs: torch.Tensor = self.layers(inputs)
        return outputs


def train(
    store: Any, rank: int, world_size: int, job: str, *, way: str
) -> dict[str, tuple[str, list[float]]]:
    """Train in a way over each backend; return digests and losses by backend."""
    wraps: dict[str, Callable[[nn.Module], nn.Module]] = {
        "ddp": lambda model: DistributedDataParallel(model, bucket_cap_mb=0.1),
        "powersgd": _with_powersgd,
        "fsdp2": _sharded,
    }
    found = {}
    for backend in ("gloo", "gradlane"):
        with world(backend, store, rank, world_size, job), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            model = wraps[way](Small())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            losses = []
            for step in range(5):
                torch.manual_seed(100 * step + rank)
                inputs = torch.randn(16, 30)
                optimizer.zero_grad()
                loss = (model(inputs) - inputs[:, :2]).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            digest = hashlib.sha256()
            for parameter in model.parameters():
                whole: Any = parameter
                if way == "fsdp2":
                    whole = whole.full_tensor()
                digest.update(whole.detach().numpy().tobytes())
            found[backend] = (digest.hexdigest(), losses)
    return found


def _with_powersgd(model: nn.Module) -> nn.Module:
    """Return DDP whose hook waits for a sum in the callback of another one, in one bucket."""
    ddp = DistributedDataParallel(model)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def _sharded(model: nn.Module) -> nn.Module:
    for layer in model.get_submodule("layers").children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def mistakes(store: Any, rank: int, world_size: int, job: str) -> list[str]:
    """Make mistakes on this rank alone; return what each says. The group goes on."""
    said = []

    def note(call: Callable[[], Any]) -> None:
        try:
            call()
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    with world("gradlane", store, rank, world_size, job):
        note(lambda: dist.all_reduce(torch.ones(2).to_sparse(), ReduceOp.MAX))
        note(lambda: dist.all_reduce(torch.ones(2).long().to_sparse(), ReduceOp.AVG))
        note(lambda: dist.all_reduce(torch.ones(2).to(torch.uint16), ReduceOp.SUM))
        note(lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG))
        note(lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND))
        note(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 1]))
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        said.append(str(tensor[0].item()))
    return said


def other_calls(store: Any, rank: int, world_size: int, job: str) -> str:
    """Call another operation on rank 1 than elsewhere; return what this rank is told."""
    with world("gradlane", store, rank, world_size, job):
        try:
            if rank == 1:
                dist.broadcast(torch.ones(4), 0)
            else:
                dist.all_reduce(torch.ones(4))
            dist.barrier()
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def other_splits(store: Any, rank: int, world_size: int, job: str, *, rows: list[int]) -> str:
    """Exchange rows of which the ranks give each other different numbers; return what is said."""
    with world("gradlane", store, rank, world_size, job, timeout_s=20.0):
        mine, theirs = rows[rank], rows[rank]
        tensor, output = torch.ones(mine), torch.ones(theirs)
        splits = [mine, 0] if rank else [0, mine]
        try:
            dist.all_to_all_single(output, tensor, splits, splits)
            dist.barrier()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def missing_rank(store: Any, rank: int, world_size: int, job: str) -> str:
    """Let rank 1 come too late to a call; return what this rank is told."""
    with world("gradlane", store, rank, world_size, job, timeout_s=2.0):
        if rank == 1:
            store.wait([f"{job}/told"], datetime.timedelta(seconds=60))
            return "nothing"
        if rank == 0:
            # The other one's time is over first.
            store.wait([f"{job}/begins"], datetime.timedelta(seconds=60))
            time.sleep(0.5)
        store.set(f"{job}/begins", "yes")
        try:
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=1))
        except RuntimeError as error:
            return str(error)
        finally:
            store.set(f"{job}/told", "yes")
    return "nothing"


def lost_references(store: Any, rank: int, world_size: int, job: str) -> list[float]:
    """Call in groups whose Python objects nobody holds, after a collection."""
    found = []
    with world("gradlane", store, rank, world_size, job):
        group: Any = dist.new_group(list(range(world_size)))
        gc.collect()
        for one in (group, None):
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=one)
            output = torch.empty(world_size)
            dist.all_gather_into_tensor(output, tensor, group=one)
            found.append(output.sum().item())
        lists = [[torch.empty(2), torch.empty(3)] for _ in range(world_size)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_gather_coalesced(lists, [torch.full((2,), 1.0), torch.full((3,), 2.0)])
        found.append(sum(tensor.sum().item() for row in lists for tensor in row))
    return found


def dropped_works(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Call, and keep neither works nor tensors; return what arrives, and what is polled for."""
    found: list[Any] = []
    size = 3_000_000
    with world("gradlane", store, rank, world_size, job):
        if rank == 0:
            dist.isend(torch.full((size,), 7.0), 1)
            others = [torch.full((size,), -1.0) for _ in range(4)]
            store.set(f"{job}/dropped", "yes")
            found.append(int((others[0] != -1).sum()))
        else:
            store.wait([f"{job}/dropped"], datetime.timedelta(seconds=60))
            tensor = torch.empty(size)
            dist.recv(tensor, 0)
            found.append(int((tensor != 7).sum()))
        columns = torch.arange(6.0).reshape(2, 3).t()
        polled: Any = dist.all_reduce(columns, async_op=True)
        while not polled.is_completed():
            time.sleep(0.001)
        found.append(columns.tolist())
        columns = torch.arange(6.0).reshape(2, 3).t()
        dist.all_reduce(columns, async_op=True)
        gc.collect()
        dist.barrier()
        until = time.monotonic() + 30
        while columns[0, 1] != 6 and time.monotonic() < until:
            time.sleep(0.001)
        found.append(columns.tolist())
        sparse = torch.ones(3).to_sparse()
        dist.all_reduce(sparse, async_op=True)
        gc.collect()
        dist.barrier()
        until = time.monotonic() + 30
        while sparse.to_dense()[0] != 2 and time.monotonic() < until:
            time.sleep(0.001)
        found.append(sparse.to_dense().tolist())
        # Many works with and without futures: none is taken for another one.
        sums = []
        for number in range(300):
            tensor = torch.full((1 + number % 7,), float(number))
            work: Any = dist.all_reduce(tensor, async_op=True)
            if number % 3:
                sums.append(work.get_future().then(lambda it: it.value()[0][0].item()))
            del work, tensor
        found.append(sum(it.wait() for it in sums) == 2 * sum(it for it in range(300) if it % 3))
    return found


def reconfigured(store: Any, rank: int, world_size: int, job: str) -> list[Any]:
    """Shrink, grow and order a group anew; return sums, ranks, sizes and what is said."""
    said: list[Any] = []
    count = 0

    def note(call: Callable[[], Any]) -> None:
        try:
            said.append(call())
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    def total() -> tuple[float, int, int]:
        tensor = torch.full((50_000,), float(10**rank))
        dist.all_reduce(tensor)
        return tensor[-1].item(), dist.get_rank(), dist.get_world_size()

    def handles(members: Sequence[int]) -> list[str]:
        nonlocal count
        count += 1
        if rank in members:
            store.set(f"{job}/{count}/{rank}", registry._get_reconfigure_handle())
        return [store.get(f"{job}/{count}/{it}").decode() for it in members]

    def configure(number: int, given: Any, timeout_s: float = 60) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        registry._reconfigure(number, given, timeout=timeout).wait()

    gradlane.distributed.register()
    dist.init_process_group(
        "gradlane",
        store=PrefixStore(f"{job}/group", store),
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=60),
        enable_reconfigure=True,
    )
    try:
        members = dist.get_backend_impl(device=torch.device("cpu"))
        said.append(registry._supports_reconfigure() and members.supports_reconfigure)
        note(total)
        configure(1, handles([0, 1, 2]))
        note(total)
        # Two of them, in another order; the third one waits for ranks that have left.
        few = handles([1, 0])
        if rank < 2:
            configure(2, few)
        note(total)
        # Mistakes, after which the group goes on.
        every = handles([0, 1, 2])
        note(lambda: configure(1, every))
        note(lambda: configure(3, [every[0]] * 2))
        note(lambda: configure(3, []))
        note(lambda: configure(3, [it for it in every if it != every[rank]]))
        note(lambda: configure(3, [*every, "gradlane"]))
        note(lambda: configure(3, [*every, every[0].replace("127.0.0.1", "127.0.0.2", 1)]))
        # A call of one rank alone runs while all leave; the others leave once it has begun.
        alone: Any = dist.all_reduce(torch.ones(100_000), async_op=True) if rank == 0 else None
        if rank == 0:
            store.set(f"{job}/begun", "")
        store.wait([f"{job}/begun"])
        configure(4, set(every))
        note(alone.wait if rank == 0 else lambda: "closed here")
        note(total)
        # One rank calls with another number.
        every = handles([0, 1, 2])
        note(lambda: configure(5 + (rank == 2), every, timeout_s=2))
        note(total)
        every = handles([2, 1, 0])
        configure(7, every)
        note(total)
        registry._abort_process_group()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return said
