"""`ddp_hook`: a communication hook for DDP that sends gradients encoded, and its state.

The hook submits a bucket to two threads and returns at once; DDP waits for the futures at the end
of backward, as always. All ranks get the same bits.
"""

# Annotations are evaluated here: DDP compares those of a communication hook with its own types.
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gradlane.codecs import Codec
from gradlane.ddp.layout import BucketParameter
from gradlane.ddp.parameters import UNNAMED, BucketParameters
from gradlane.ddp.pipeline import Pipeline
from gradlane.ddp.residuals import OwnerKey, Residuals
from gradlane.ddp.routes import BucketExchange, GatherRoute, Peers, Route, ShardCodec, ShardRoute
from gradlane.errors import RefusedError
from gradlane.training.model.optimizers import gradlane_hook
from gradlane.training.model.stages.local_clipping import clip_together
from gradlane.training.options.codec_choice import (
    check_codecs,
    is_sparse,
    local_clip,
    local_limit,
    unused_codec_option,
    without_clip,
)
from gradlane.training.options.codec_options import CodecOptions, codec_text
from gradlane.training.options.momentum import check_momentum, keeps_momentum

FORMAT = 1
"""Format version of a state dict."""
ROUTES = ("auto", "gather", "shards")

Hook = Callable[
    ["HookState", dist.GradBucket],  # type: ignore[name-defined]
    torch.futures.Future[torch.Tensor],
]


class HookState:
    """State of `ddp_hook` between buckets and steps; the first argument of `register_comm_hook`.

    Attributes:
        spec: canonical text of the codec.
        seed: of the draws of stochastic codecs.
        route: `"gather"` or `"shards"`.
        step: number of the step whose buckets come next.
    """

    def __init__(
        self,
        spec: str,
        *,
        seed: int,
        error_feedback: bool | None,
        route: str,
        small_elems: int | None,
        codecs: Mapping[str, str],
        model: nn.Module | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """See `ddp_hook`."""
        if route not in ROUTES:
            raise RefusedError(f"there is no route {route!r}; there are: {', '.join(ROUTES)}")
        if small_elems is not None and small_elems < 0:
            raise RefusedError(f"small_elems is {small_elems}, but must be at least 0")
        if not 0 <= seed < 2**64:
            raise RefusedError(f"seed is {seed}, but must be a number of 64 bits")
        spec = _with_feedback(spec, error_feedback)
        overrides = {name: _with_feedback(text, error_feedback) for name, text in codecs.items()}
        check_codecs((*overrides.items(), ("*", spec)))
        codec = Codec(without_clip(spec))
        self.spec = codec.spec.replace("clip=0,", f"clip={local_clip(spec):g},")
        self.seed = seed
        self.step = 0
        self._parameters = BucketParameters(
            codec.spec,
            names=() if model is None else _unwrap(model).named_parameters(),
            overrides={name: without_clip(text) for name, text in overrides.items()},
            small_elems=small_elems,
        )
        peers = _peers(group)
        self.route = _choose_route(route, codec, peers.world_size)
        _check_used((*overrides.values(), spec), self.route)
        self._residuals = Residuals(peers.world_size)
        self._shard_codec = ShardCodec(peers, self._residuals, seed)
        self._routes: dict[tuple[int, ...], Route] = {}
        self._pipeline = Pipeline()
        texts = [spec, *overrides.values()]
        self._local_limit = local_limit(texts, peers.world_size)
        self._held: list[tuple[Route, BucketExchange]] = []
        """Buckets of this step that wait for the norm of all."""
        keeps = any(keeps_momentum(Codec(without_clip(text)).spec) for text in texts)
        self._watch = _watch_momentum(self._parameters) if keeps else None

    @property
    def codecs(self) -> dict[str, str]:
        """Canonical text of each known parameter's codec."""
        return self._parameters.codecs()

    @property
    def sent_bytes(self) -> int:
        """Bytes of encoded gradients that this rank has sent so far."""
        return self._pipeline.sent_bytes

    @property
    def failure(self) -> BaseException | None:
        """The error of a failed bucket, with its traceback; DDP's error has its text only."""
        return self._pipeline.failure

    def exchange(
        self,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Begin to average a bucket over all ranks."""
        route = self._route_of(self._parameters.parts(bucket.parameters()))
        target = bucket.buffer()
        values = target
        if target.dtype != torch.float32 or target.device.type != "cpu":
            if target.is_complex():
                raise TypeError("codecs encode real gradients; leave complex parameters to DDP")
            values = target.to("cpu", torch.float32)
        exchange = BucketExchange(values, target, self.step)
        if bucket.is_last():
            self.step += 1
        if not self._local_limit:
            return self._pipeline.submit(route, exchange)
        if bucket.index() == 0:
            # A backward that was broken off has left some.
            self._held.clear()
        self._held.append((route, exchange))
        if bucket.is_last():
            held, self._held = self._held, []
            clip_together([one.values for _, one in held], self._local_limit)
            for held_route, one in held:
                self._pipeline.submit(held_route, one)
        return exchange.done

    def _route_of(self, parts: tuple[BucketParameter, ...]) -> Route:
        """Return the route of a bucket; buckets that it replaces are dropped."""
        numbers = tuple(part.number for part in parts)
        known = self._routes.get(numbers)
        if known is not None:
            return known
        for old in [old for old in self._routes if not set(old).isdisjoint(numbers)]:
            del self._routes[old]
        route = (GatherRoute if self.route == "gather" else ShardRoute)(parts, self._shard_codec)
        self._residuals.release_unowned(parts, route.owned())
        self._routes[numbers] = route
        return route

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's state, for `torch.save`: every rank keeps its own.

        Call it between steps. Residuals are f32 on the CPU, by the parameter's name.
        """
        names = self._parameters.names
        return {
            "format": FORMAT,
            "spec": self.spec,
            "seed": self.seed,
            "step": self.step,
            "world_size": self._residuals.world_size,
            "names": list(names),
            "worker": {number: kept.clone() for number, kept in self._residuals.worker.items()},
            "owner": {key: kept.clone() for key, kept in self._residuals.owner.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned on this rank.

        With another number of ranks, new ranks begin without residuals, and the residuals of
        removed ranks are lost. Residuals of means return to gradients.

        Raises:
            ValueError: the state is of another codec or another model.
        """
        if state.get("format") != FORMAT:
            raise RefusedError(f"a state of format {state.get('format')!r}; this reads {FORMAT}")
        if state["spec"] != self.spec:
            raise RefusedError(f"the state is of {state['spec']}, this hook is of {self.spec}")
        known = self._parameters.names
        saved = list(state["names"])
        if saved and not known and not saved[0].startswith(UNNAMED):
            raise RefusedError(
                "the state knows its parameters by name: give this hook the model, too"
            )
        if any(one != other for one, other in zip(known, saved, strict=False)):
            raise RefusedError(
                "the state is of a model whose parameters have other names or another order"
            )
        worker: dict[int, torch.Tensor] = state["worker"]
        owner: dict[OwnerKey, torch.Tensor] = state["owner"]
        for part in self._parameters.by_number():
            kept = worker.get(part.number)
            if kept is not None and kept.numel() != part.numel * part.codec.residual_width:
                raise RefusedError(
                    f"the state's residual of {known[part.number]} has {kept.numel()} numbers, "
                    f"{part.numel * part.codec.residual_width} belong to its {part.numel} elements"
                )
        self.step = int(state["step"])
        self.seed = int(state["seed"])
        self._shard_codec.seed = self.seed
        self._residuals.worker = {number: kept.clone() for number, kept in worker.items()}
        # Residuals of a mean scale with the number of ranks.
        scale = int(state["world_size"]) / self._residuals.world_size
        self._residuals.owner = {key: kept * scale for key, kept in owner.items()}
        self._routes.clear()

    def close(self) -> None:
        """End the threads; not needed at the end of a process."""
        if self._watch is not None:
            self._watch.remove()
        self._pipeline.close()


def _exchange(
    state: HookState,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a DDP bucket over ranks, encoded."""
    return state.exchange(bucket)


def ddp_hook(
    spec: str | CodecOptions = "qsgd:bits=4",
    *,
    seed: int = 0,
    error_feedback: bool | None = None,
    route: str = "auto",
    small_elems: int | None = None,
    codecs: Mapping[str, str | CodecOptions] | None = None,
    model: nn.Module | None = None,
    group: dist.ProcessGroup | None = None,
) -> tuple[HookState, Hook]:
    """Return state and function for `DistributedDataParallel.register_comm_hook`.

    Every rank calls this after `init_process_group`, with the same arguments::

        ddp = torch.nn.parallel.DistributedDataParallel(model)
        ddp.register_comm_hook(*gradlane.ddp.ddp_hook("qsgd:bits=4"))

    Gradients are encoded on the CPU and travel over Gloo, also where DDP itself uses another
    backend. After the exchange all ranks hold the same bits.

    Args:
        spec: the codec, such as `qsgd:bits=4`, `onebit`, `topk:ratio=0.001`, `bf16`; or an object
            such as `gradlane.codecs.Qsgd(bits=4)`.
        seed: of the draws of stochastic codecs.
        error_feedback: whether the unsent part is added to the next step's gradient; None: the
            codec's default, on for biased codecs.
        route: `"gather"`: every rank sends its encoded gradient to all; `"shards"`: each rank sums
            up a part and sends the mean encoded again, which is fewer bytes from three ranks on;
            `"auto"`: `gather` for two ranks and for sparse codecs, else `shards`.
        small_elems: parameters with fewer elements stay f32. None: if the model is given, as many
            as leave more than 99 % of all elements encoded, or, of `topk` and `dgc`, those of a
            single value; else none.
        codecs: codecs by patterns of parameter names, such as `{"*.bias": "f32"}`; needs `model`.
        model: the model, wrapped or not, for the names of parameters.
        group: the process group that DDP averages over; None: the default one.

    Raises:
        ValueError: an argument is invalid; the message lists valid values.
        RuntimeError: there is no process group.
    """
    state = HookState(
        codec_text(spec),
        seed=seed,
        error_feedback=error_feedback,
        route=route,
        small_elems=small_elems,
        codecs={name: codec_text(one) for name, one in (codecs or {}).items()},
        model=model,
        group=group,
    )
    return state, _exchange


def _watch_momentum(parameters: BucketParameters) -> Any:
    """Check each optimizer in the process before it steps: DDP does not tell a hook its optimizer.

    Returns:
        A handle whose `remove` ends it.
    """
    watched = weakref.ref(parameters)

    def check(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        current = watched()
        if current is not None:
            check_momentum(optimizer, current.momentum_codecs)

    return register_optimizer_step_pre_hook(gradlane_hook(check))


def _with_feedback(spec: str, error_feedback: bool | None) -> str:
    """Return the codec's text with the requested error feedback."""
    if error_feedback is None or Codec(spec).name == "f32":
        return spec
    wanted = f"residual={'on' if error_feedback else 'off'}"
    if "residual=" in spec:
        if wanted in spec.replace(" ", ""):
            return spec
        raise RefusedError(f"error_feedback={error_feedback} contradicts {spec!r}; say it once")
    return f"{spec}{',' if ':' in spec else ':'}{wanted}"


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the model that DDP wraps."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def _peers(group: dist.ProcessGroup | None) -> Peers:
    """Open a process group for each leg, on the ranks of `group`."""
    if not dist.is_initialized():
        raise RuntimeError("call torch.distributed.init_process_group before ddp_hook")
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)

    def open_leg() -> dist.ProcessGroup:
        leg = dist.new_group(ranks, backend="gloo", use_local_synchronization=group is not None)
        # A rank outside of the group gets a number in place of one.
        assert isinstance(leg, dist.ProcessGroup), "this rank averages gradients with the group"
        return leg

    return Peers(dist.get_rank(group), len(ranks), open_leg(), open_leg())


def _check_used(codecs: Iterable[str], route: str) -> None:
    """Check that no codec has an option that means nothing here.

    Raises:
        ValueError: one has.
    """
    for codec in codecs:
        unused = unused_codec_option(codec, has_ring=False, encodes_means=route != "gather")
        if unused:
            raise RefusedError(unused)


def _choose_route(route: str, codec: Codec, world_size: int) -> str:
    sparse = is_sparse(codec.spec)
    if route == "auto":
        # The sum of sparse gradients is less sparse: a second leg would save nothing or lose more.
        return "gather" if sparse or world_size <= 2 else "shards"
    if route == "shards" and sparse:
        warnings.warn(
            f"{codec.name} over shards drops again from the mean what does not fit its ratio",
            stacklevel=4,
        )
    return route
