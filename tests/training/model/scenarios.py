"""What rank processes run in the tests with real connections: each function is one scenario.

Arguments and results are plain data, so that they travel between processes.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket, PrefixStore, Store
from torch.utils.data import DataLoader, TensorDataset

import gradlane
from gradlane.lab.workloads import REAL_NAMES, WorkloadSpec, build
from gradlane.training.options.options import keywords_of
from tests.training.model.loops import LOOPS
from tests.training.model.models import Attention, Awkward, CharTransformer, SmallCnn, seeded

MODELS: dict[str, Callable[[], nn.Module]] = {
    "cnn": lambda: seeded(SmallCnn),
    "transformer": lambda: seeded(CharTransformer),
    "awkward": lambda: seeded(Awkward),
    "attention": lambda: seeded(Attention),
    "bf16": lambda: seeded(Attention).bfloat16(),
    "f16": lambda: seeded(Attention).half(),
    "wide": lambda: seeded(Wide),
    "digits-cnn": lambda: real_workload("digits-cnn", 0).model,
    "char-transformer": lambda: real_workload("char-transformer", 0).model,
}


@functools.cache
def _data_of(name: str, rank: int) -> Any:
    return real_workload(name, rank)


def real_workload(name: str, rank: int) -> Any:
    """Return a workload of the lab that computes for real, as fast as it can."""
    return build(WorkloadSpec(name, paced=False), rank, 4)


class Wide(nn.Module):
    """One tensor of a million elements, so that slices of every size are cut from it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(1024, 1024)
        self.last = nn.Linear(1024, 3)

    def forward(self, values: Tensor) -> Tensor:
        return self.last(self.first(values))  # type: ignore[no-any-return]


def loss_of(name: str, model: Any, rank: int, step: int) -> Tensor:
    """The loss of a rank's own batch; the same numbers in every process."""
    if name in REAL_NAMES:
        workload = _data_of(name, rank)
        real: Tensor = workload.loss(model, workload.batch(step))
        return real
    generator = torch.Generator().manual_seed(10_000 * step + rank)
    if name == "cnn":
        images = torch.randn(4, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (4,), generator=generator)
        return nn.functional.cross_entropy(model(images), labels)
    if name == "transformer":
        tokens = torch.randint(64, (4, 17), generator=generator)
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    if name == "awkward":
        model.uses_sometimes = step % 4 == 0 or (step % 4 == 1 and rank == 1)
        value: Tensor = model(torch.randn(3, 6, generator=generator)).square().mean()
        return value
    if name == "wide":
        result: Tensor = model(torch.randn(2, 1024, generator=generator)).square().mean()
        return result
    dtype = next(iter(model.parameters())).dtype
    tokens = torch.randn(3, 5, 8, generator=generator).to(dtype)
    mean: Tensor = model(tokens).float().square().mean()
    return mean


def optimizer_of(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer by name; by a workload's name, that workload's own."""
    if name in REAL_NAMES:
        own: torch.optim.Optimizer = real_workload(name, 0).make_optimizer(model)
        return own
    if name == "adamw":
        decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=3e-3,
        )
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def digest(model: nn.Module) -> str:
    """Hash of all parameters' bits."""
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def open_session(store: Store, rank: int, world_size: int, job: str, **options: Any) -> Any:
    """Open a session over loopback."""
    settings = {"connect_timeout_s": 60.0, **options}
    return gradlane.init(
        **keywords_of(
            store=store,
            rank=rank,
            world_size=world_size,
            job=job,
            advertise="127.0.0.1",
            **settings,
        )
    )


def train(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model_name: str,
    steps: int,
    optimizer_name: str = "sgd",
    cosine: bool = False,
    clip_norm: float | None = None,
    defer: bool | None = None,
    digest_every: int = 0,
    **options: Any,
) -> dict[str, Any]:
    """Train with gradlane; returns digests, losses and the parameters."""
    with open_session(store, rank, world_size, job, **options) as session:
        model = MODELS[model_name]()
        if rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        optimizer = optimizer_of(optimizer_name, model)
        session.prepare(model, optimizer, defer=defer)
        losses, digests = _loop(
            model, optimizer, model_name, rank, steps, cosine, clip_norm, digest_every
        )
        session.synchronize()
        metrics = session.metrics()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        digests.append(digest(model))
    return {"digests": digests, "losses": losses, "metrics": metrics, "state": state}


def train_ddp(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model_name: str,
    steps: int,
    optimizer_name: str = "sgd",
    cosine: bool = False,
    gather: bool = True,
    clip_norm: float | None = None,
    begun: tuple[int, bytes] | None = None,
) -> dict[str, Any]:
    """Train with torch's DDP: stock, or with a hook that gathers and sums in rank order.

    `begun` has the steps that are done and what was saved after them.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=world_size)
    try:
        model = MODELS[model_name]()
        optimizer = optimizer_of(optimizer_name, model)
        done = 0
        if begun is not None:
            done, saved = begun
            state = torch.load(io.BytesIO(saved))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        wrapped = nn.parallel.DistributedDataParallel(
            model, find_unused_parameters=model_name == "awkward"
        )
        if gather:
            wrapped.register_comm_hook(dist.group.WORLD, _mean_in_rank_order)
        losses, digests = _loop(
            wrapped, optimizer, model_name, rank, steps, cosine, clip_norm, 0, done
        )
        digests.append(digest(model))
        return {"digests": digests, "losses": losses}
    finally:
        dist.destroy_process_group()


def _loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    model_name: str,
    rank: int,
    steps: int,
    cosine: bool,
    clip_norm: float | None,
    digest_every: int,
    done: int = 0,
) -> tuple[list[float], list[str]]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps) if cosine else None
    losses: list[float] = []
    digests: list[str] = []
    for step in range(done + 1, steps + 1):
        value = loss_of(model_name, model, rank, step)
        value.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
        losses.append(value.item())
        if digest_every and step % digest_every == 0:
            digests.append(digest(model))
    return losses, digests


def _mean_in_rank_order(group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    own = bucket.buffer()
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    future = dist.all_gather(gathered, own, group=group, async_op=True).get_future()

    def mean(_: Any) -> Tensor:
        total = gathered[0].clone()
        for term in gathered[1:]:
            total += term
        return total.div_(len(gathered))

    result: torch.futures.Future[Tensor] = future.then(mean)
    return result


# DDP compares annotations with types, and deferred ones are strings.
_mean_in_rank_order.__annotations__.update(
    {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}
)


def compare_with_ddp(
    store: Store, rank: int, world_size: int, job: str, runs: list[dict[str, Any]], **common: Any
) -> list[str]:
    """Train once with DDP and once with gradlane for each set of options; returns last digests."""
    gather = common.pop("gather", True)
    result = [
        train_ddp(store, rank, world_size, f"{job}-ddp", gather=gather, **common)["digests"][-1]
    ]
    for number, options in enumerate(runs):
        run = train(store, rank, world_size, f"{job}-{number}", **common, **options)
        result.append(run["digests"][-1])
    return result


def back_to_ddp(
    store: Store, rank: int, world_size: int, job: str, model_name: str, optimizer_name: str
) -> list[str]:
    """Train with stock DDP, and half with gradlane and the rest with DDP; returns last digests."""
    whole = train_ddp(store, rank, world_size, job, model_name, 6, optimizer_name, gather=False)
    with open_session(store, rank, world_size, f"{job}-first") as session:
        model = MODELS[model_name]()
        optimizer = optimizer_of(optimizer_name, model)
        session.prepare(model, optimizer)
        _loop(model, optimizer, model_name, rank, 3, False, None, 0)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    begun = (3, file.getvalue())
    rest = train_ddp(
        store,
        rank,
        world_size,
        f"{job}-rest",
        model_name,
        6,
        optimizer_name,
        False,
        False,
        None,
        begun,
    )
    return [whole["digests"][-1], rest["digests"][-1]]


def mismatch(store: Store, rank: int, world_size: int, job: str, how: str) -> str:
    """Prepare models or options that differ on the last rank; returns the error."""
    last = rank == world_size - 1
    options = {"strategy": "slicing"} if how == "strategy" and last else {}
    session = open_session(store, rank, world_size, job, **options)
    model: Any = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    if last and how == "shape":
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    if last and how == "extra":
        model.append(nn.Linear(2, 2))
    if last and how == "dtype":
        model[1].double()
    if last and how == "refused":
        model[1].weight = nn.Parameter(model[1].weight.to(torch.float8_e4m3fn))
    try:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        session.abort("the test is over")
    return "no error"


def forked_workers(store: Store, rank: int, world_size: int, job: str) -> list[str]:
    """Train with DataLoader workers that are forked in the middle of the session."""
    with open_session(store, rank, world_size, job) as session:
        model = seeded(Attention)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        session.prepare(model, optimizer)
        items = torch.randn(24, 5, 8, generator=torch.Generator().manual_seed(rank))
        digests = []
        for _ in range(2):
            loader = DataLoader(
                TensorDataset(items), 4, num_workers=2, multiprocessing_context="fork"
            )
            for (tokens,) in loader:
                model(tokens).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            digests.append(digest(model))
    return digests


def evaluate_on_one_rank(store: Store, rank: int, world_size: int, job: str) -> str:
    """Rank 0 evaluates and saves for a while between steps; nobody else does."""
    with open_session(store, rank, world_size, job, silence_timeout_s=2.0) as session:
        model = seeded(CharTransformer)
        optimizer = optimizer_of("adamw", model)
        session.prepare(model, optimizer)
        for step in range(1, 5):
            loss_of("transformer", model, rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            if rank == 0 and step == 2:
                model.eval()
                with torch.inference_mode():
                    loss_of("transformer", model, 0, 99)
                model.state_dict()
                optimizer.state_dict()
                model.train()
                time.sleep(4.5)
        return digest(model)


def server_update(
    store: Store, rank: int, world_size: int, job: str, settings: dict[str, Any], steps: int
) -> dict[str, Any]:
    """Train with updates on the servers; the learning rate changes between steps."""
    with open_session(store, rank, world_size, job, update="server") as session:
        model = seeded(Attention)
        kind = getattr(torch.optim, settings.pop("kind", "SGD"))
        optimizer = kind(model.parameters(), **{"lr": 0.05, **settings})
        session.prepare(model, optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        for step in range(1, steps + 1):
            loss_of("attention", model, rank, step).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return {
            "digest": digest(model),
            "state": {name: value.clone() for name, value in model.state_dict().items()},
        }


def server_checkpoint(
    store: Store,
    rank: int,
    world_size: int,
    job: str,
    model_name: str,
    kind: str,
    first: int,
    last: int,
    load: str = "",
    save: str = "",
    load_late: bool = False,
    killed: bool = False,
    same_batches: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Train some steps between two checkpoints, saved the way that torch's users save them."""
    session = open_session(store, rank, world_size, job, **options)
    model = MODELS[model_name]()
    settings = {"momentum": 0.9} if kind == "SGD" else {"weight_decay": 0.1}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=1e-3, **settings)
    loaded = again = ""
    if load and load_late:
        session.prepare(model, optimizer)
    if load:
        saved = torch.load(load)
        loaded = state_digest(saved["optimizer"])
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    if not (load and load_late):
        session.prepare(model, optimizer)
    if load:
        again = state_digest(optimizer.state_dict())
    for step in range(first, last + 1):
        loss_of(model_name, model, 0 if same_batches else rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    if save and rank == 0:
        torch.save(state, save)
    result = {
        "model": digest(model),
        "state": state_digest(state["optimizer"]),
        "loaded": loaded,
        "again": again,
        "step": session.metrics()["step"],
    }
    if killed:
        store.set(f"{job}/done/{rank}", "")
        store.wait([f"{job}/done/{other}" for other in range(world_size)])
        session.abort("the test plays a crash")
    else:
        session.close()
    return result


def state_digest(state_dict: dict[str, Any]) -> str:
    """Hash of all tensors of an optimizer's state."""
    state = hashlib.sha256()
    for key, values in sorted(state_dict.get("state", {}).items()):
        for name, value in sorted(values.items()):
            state.update(f"{key} {name} {value.dtype} {tuple(value.shape)}".encode())
            state.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()


def default_store(store: Store, rank: int, world_size: int, job: str) -> str:
    """Open a session without a store while torch.distributed is initialized."""
    dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=world_size)
    try:
        with gradlane.init(
            rendezvous=gradlane.Rendezvous(rank=rank, world_size=world_size, job=job)
        ) as session:
            model = seeded(SmallCnn)
            optimizer = optimizer_of("sgd", model)
            session.prepare(model, optimizer)
            loss_of("cnn", model, rank, 1).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            return digest(model)
    finally:
        dist.destroy_process_group()


def two_models_and_trace(store: Store, rank: int, world_size: int, job: str) -> dict[str, Any]:
    """Train two models in one session with a trace; the bias of the last layer is needed first."""
    with open_session(store, rank, world_size, job, frame_trace=True, check_every=2) as session:
        models = [seeded(SmallCnn), seeded(Attention)]
        optimizers = [optimizer_of("sgd", model) for model in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            session.prepare(model, optimizer)
        for step in range(1, 6):
            for name, model, optimizer in zip(
                ("cnn", "attention"), models, optimizers, strict=True
            ):
                loss_of(name, model, rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
        session.synchronize()
        trace = session.monitoring.take_trace()
        return {"digests": [digest(model) for model in models], "trace": trace}


def loop(store: Store, rank: int, world_size: int, job: str, name: str, **options: Any) -> Any:
    """Run one of `tests.training.model.loops`."""
    with open_session(store, rank, world_size, job, **options) as session:
        return LOOPS[name](session)


def lost_in_join(store: Store, rank: int, world_size: int, job: str) -> str:
    """Rank 1 gives up while the others go along; returns each rank's error."""
    session = open_session(store, rank, world_size, job)
    model = seeded(Attention)
    optimizer = optimizer_of("sgd", model)
    session.prepare(model, optimizer)
    try:
        with session.join():
            for step in range(1, 4 if rank == 1 else 2):
                if step == 3:
                    session.abort("the test says so")
                loss_of("attention", model, rank, step).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
    except gradlane.GradlaneError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def synchronized_batch_norm(store: Store, rank: int, world_size: int, job: str) -> str:
    """What torch says to SyncBatchNorm on the CPU; its process group lives beside the session."""
    dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=world_size)
    try:
        with gradlane.init(
            rendezvous=gradlane.Rendezvous(rank=rank, world_size=world_size, job=job)
        ) as session:
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model: Any = convert(seeded(SmallCnn))
            optimizer = optimizer_of("sgd", model)
            session.prepare(model, optimizer)
            try:
                loss_of("cnn", model, rank, 1)
            except ValueError as error:
                return str(error)
            return "it ran"
    finally:
        dist.destroy_process_group()


def synchronized_batch_norm_on_cuda(store: Store, rank: int, world_size: int, job: str) -> str:
    """Train with SyncBatchNorm, all ranks on one device; returns the hash of the state.

    Gloo carries its statistics there; gradlane leaves buffers alone.
    """
    dist.init_process_group("gloo", store=PrefixStore(job, store), rank=rank, world_size=world_size)
    try:
        with gradlane.init(
            rendezvous=gradlane.Rendezvous(rank=rank, world_size=world_size, job=job)
        ) as session:
            convert: Any = nn.SyncBatchNorm.convert_sync_batchnorm
            model: Any = convert(seeded(SmallCnn)).cuda()
            optimizer = optimizer_of("sgd", model)
            session.prepare(model, optimizer, buffers="local")
            for step in range(1, 4):
                generator = torch.Generator().manual_seed(10 * step + rank)
                images = torch.randn(4, 1, 8, 8, generator=generator).cuda()
                model(images).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        means = [float(one.double().sum()) for one in model.buffers()]
        return f"{digest(model.cpu())} {means}"
    finally:
        dist.destroy_process_group()


def compiled_and_plain(store: Any, rank: int, world_size: int, job: str) -> list[str]:
    """Train a model with batch statistics, compiled and not; returns the hashes of both."""
    found = []
    for is_compiled in (True, False):
        torch._dynamo.reset()
        with open_session(store, rank, world_size, f"{job}-{is_compiled}") as session:
            model: Any = seeded(batch_statistics)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            session.prepare(model, optimizer)
            module: Any = torch.compile(model, backend="eager") if is_compiled else model
            for step in range(1, 7):
                generator = torch.Generator().manual_seed(10 * step + rank)
                module(torch.randn(8, 32, generator=generator)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append(digest(model))
    return found


def versions(
    store: Any, rank: int, world_size: int, job: str, update: str
) -> tuple[bool, list[bool]]:
    """Return whether torch counts writes to a kept weight: in `prepare`, and in each step."""
    model = nn.Linear(2, 2)
    weight: Any = model.weight
    before = weight._version
    with open_session(store, rank, world_size, job, update=update) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        counts = [weight._version]
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            counts.append(weight._version)
    moved = [one < other for one, other in itertools.pairwise(counts)]
    return rank == 0 or counts[0] > before, moved


def batch_statistics() -> nn.Module:
    """Return layers with batch statistics; inputs (N, 32)."""
    return nn.Sequential(nn.Linear(32, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
