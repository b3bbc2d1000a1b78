"""What a described loop does on one rank, in the words of a user of torch.

Nothing here knows of gradients of other ranks: `ranks.py` runs it on prepared models, and
`reference.py` runs one copy a rank and averages between actions. Every value that the program sees
is noted; the notes are what is compared.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from gradlane.training.core import load_core
from gradlane.training.model.exact_norm import exact_norm
from tests.device import DEVICE
from tests.loop_fuzzing.description import Action, Loop
from tests.loop_fuzzing.look_ahead import look_ahead
from tests.loop_fuzzing.models import BATCH, TOKENS, WIDTH, Stranger, build_model
from tests.loop_fuzzing.oddities import Oddities
from tests.loop_fuzzing.optimizers import build_optimizer, build_scheduler


@dataclass(frozen=True)
class Note:
    """Observations of a program.

    Attributes:
        action: number of the action; `len(actions)` is the end.
        label: what was looked at.
        values: copies.
    """

    action: int
    label: str
    values: tuple[Tensor, ...]


class Program(Oddities):
    """One rank's run of a loop."""

    def __init__(self, loop: Loop, rank: int, values_of: int) -> None:
        """Build the models and optimizers.

        Args:
            loop: what to run.
            rank: whose batches to use.
            values_of: whose initial values to use.
        """
        self.loop = loop
        self.rank = rank
        self.at = -1
        self.notes: list[Note] = []
        self.models = [
            self.build(number, loop.seed * 1000 + number * 10 + values_of)
            for number in range(len(loop.models))
        ]
        self.optimizers = [
            build_optimizer(
                optimizer, self.models[number], functools.partial(self.around_step, number)
            )
            for number, optimizer in enumerate(loop.optimizers)
        ]
        self.schedulers: list[Any] = [
            build_scheduler(described.scheduler, optimizer) if described.early_scheduler else None
            for described, optimizer in zip(loop.optimizers, self.optimizers, strict=True)
        ]
        self.start_oddities()
        for number, optimizer in enumerate(loop.optimizers):
            if optimizer.wrapped is not None:
                how, inside = optimizer.wrapped
                self.wrap_step(number, how=how, inside=inside)
        self.prepared = list(self.optimizers)
        for number, optimizer in enumerate(loop.optimizers):
            if optimizer.outer is not None:
                how, prepared = optimizer.outer
                self.optimizers[number] = look_ahead(self.prepared[number], how)
                if prepared == "outer":
                    self.prepared[number] = self.optimizers[number]
        self.averages: dict[int, AveragedModel] = {}
        self.weights: dict[int, int | None] = {}
        self.kept: dict[int, dict[str, Tensor]] = {}
        self.scalers = [
            torch.amp.GradScaler(DEVICE.type, init_scale=8.0, growth_interval=2)
            for _ in self.models
        ]

    def build(self, number: int, seed: int) -> Any:
        """Return a model with values of a seed."""
        return build_model(self.loop.models[number], seed)

    def start(self) -> None:
        """Build what a user builds after the models are prepared."""
        for number, described in enumerate(self.loop.optimizers):
            if not described.early_scheduler:
                scheduler = build_scheduler(described.scheduler, self.optimizers[number])
                self.schedulers[number] = scheduler

    def perform(self, number: int, action: Action) -> None:
        """Do one action, if it is this rank's."""
        self.at = number
        if action.ranks is None or self.rank in action.ranks:
            with self.default_device(action.do):
                getattr(self, action.do)(action.model, **action.given)

    def default_device(self, call: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context with the device that is torch's default in a call."""
        if call not in self.loop.defaults.get("device_in", ()):
            return contextlib.nullcontext()
        return torch.device(self.loop.defaults["device"])

    def note(self, label: str, values: Iterator[Tensor] | list[Tensor]) -> None:
        """Keep copies of what was seen."""
        self.notes.append(Note(self.at, label, tuple(one.detach().clone() for one in values)))

    def called(self, number: int) -> Any:
        """Return what a forward of a model calls."""
        return self.models[number]

    def without_exchange(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which gradients stay on this rank."""
        return contextlib.nullcontext()

    # ---- gradients

    def batch(self, data: int) -> Tensor:
        """Return this rank's batch of a number."""
        generator = torch.Generator().manual_seed((self.loop.seed * 7919 + data) * 16 + self.rank)
        drawn = torch.randn(
            BATCH, TOKENS, WIDTH, generator=generator, dtype=torch.float32, device="cpu"
        )
        return drawn.to(DEVICE)

    def forward(
        self,
        through: list[int],
        data: int,
        *,
        detach: bool = False,
        autocast: bool = False,
        penalty: bool = False,
        batch: int | None = None,
    ) -> Tensor:
        """Return the loss of a batch through one model after the other."""
        hidden = self.batch(data if batch is None else batch)
        if penalty:
            hidden.requires_grad_()
        inputs = hidden
        # Autocast keeps casts of weights for all threads, and whoever leaves it clears them.
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=autocast, cache_enabled=False):
            for place, number in enumerate(through):
                model = self.models[number]
                model.moment = (data, self.rank)
                dtype = getattr(torch, self.loop.models[number].dtype)
                hidden = self.called(number)(hidden.to(dtype))
                if detach and place == 0:
                    hidden = hidden.detach()
        wide = hidden if hidden.dtype is torch.float64 else hidden.float()
        loss = wide.square().mean() + wide.sin().sum() * 0.1
        if penalty:
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            loss = loss + slope.square().sum() * 0.1
        return loss

    def backward(
        self,
        model: int,
        *,
        through: list[int],
        data: int,
        zero: str | None = None,
        losses: int = 1,
        no_sync: bool = False,
        scaled: bool = False,
        explodes: int | None = None,
        toggled: int | None = None,
        inputs: int | None = None,
        weighs: bool = False,
        **how: Any,
    ) -> float:
        """Run forward and backward.

        Args:
            model: whose step it is.
            through: models that the batch goes through.
            data: number of the batch.
            zero: who zeroes gradients between forward and backward.
            losses: in how many parts the loss is, each with a backward of its own.
            no_sync: whether this is a micro-batch whose gradients stay here for now.
            scaled: whether the loss is scaled.
            explodes: a rank whose loss is infinite.
            toggled: a block that is frozen between forward and backward.
            inputs: give gradients to every so many parameters alone.
            weighs: whether the step averages over samples.
            how: for `forward`.
        """
        with self.without_exchange() if no_sync else contextlib.nullcontext():
            loss = self.forward(through, data, **how)
            self.note("loss", [loss])
            if explodes == self.rank:
                loss = loss * torch.inf
            if zero is not None:
                self.zero(model, whose=zero)
            if weighs:
                self.weigh(model, (7 * data + 5 * self.rank) % 11 + (self.rank == 0))
            total = self.scalers[model].scale(loss) if scaled else loss
            chosen = None
            if inputs is not None:
                chosen = [one for one in self.kept_lists[model] if one.requires_grad][::inputs]
            frozen = []
            if toggled is not None:
                block = self.models[model].blocks[toggled]
                frozen = [one for one in block.parameters() if one.requires_grad]
            for one in frozen:
                one.requires_grad_(False)
            for left in reversed(range(losses)):
                (total / losses).backward(retain_graph=left > 0, inputs=chosen)  # type: ignore[no-untyped-call]
            for one in frozen:
                one.requires_grad_(True)
        return float(loss.detach())

    def weigh(self, model: int, samples: int) -> None:
        """Have the next average count so many samples of this rank."""
        self.weights[model] = samples

    def zero(self, model: int, *, whose: str, to_none: bool = True) -> None:
        """Zero the gradients of a model."""
        owner: Any = self.models[model] if whose == "model" else self.optimizers[model]
        owner.zero_grad(set_to_none=to_none)

    def clip(self, model: int, *, how: str, limit: float, scaled: bool = False) -> None:
        """Clip the averaged gradients with torch's own functions."""
        if scaled:
            self.scalers[model].unscale_(self.optimizers[model])
        parameters = self.models[model].parameters()
        if how == "value":
            # Some versions of torch fail where no parameter has a gradient.
            with_gradients = [one for one in parameters if one.grad is not None]
            if with_gradients:
                nn.utils.clip_grad_value_(with_gradients, limit)
        elif how == "session":
            self.note("norm", [self.clip_by_session(model, limit)])
        else:
            norm = nn.utils.clip_grad_norm_(parameters, limit, foreach=how == "norm-foreach")
            self.note("norm", [norm])

    def clip_by_session(self, model: int, limit: float) -> Tensor:
        """Clip as a session does: by torch's rule and the exact norm."""
        parameters = self.models[model].parameters()
        gradients = [one.grad for one in parameters if one.grad is not None]
        wide = any(one.dtype is torch.float64 for one in gradients)
        dtype = torch.float64 if wide else torch.float32
        norm = torch.tensor(exact_norm(load_core(), gradients), dtype=dtype, device=DEVICE)
        factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(factor)
        return norm

    # ---- updates

    def step(self, model: int, *, closure: dict[str, Any] | None = None) -> None:
        """Step an optimizer, with a closure if there are arguments for `backward`."""
        optimizer = self.optimizers[model]
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(lambda: self.closure(model, closure))

    def closure(self, model: int, arguments: dict[str, Any]) -> float:
        """Evaluate a step's closure."""
        self.optimizers[model].zero_grad()
        return self.backward(model, **arguments)

    def scaled_step(self, model: int) -> None:
        """Step an optimizer through the scaler."""
        self.scalers[model].step(self.optimizers[model])
        self.update_scale(model)

    def update_scale(self, model: int) -> None:
        """Let the scaler see what it found."""
        self.scalers[model].update()
        self.note("scale", [torch.tensor(self.scalers[model].get_scale())])

    def schedule(self, model: int, *, metric: float = 0.0) -> None:
        """Step a scheduler."""
        scheduler = self.schedulers[model]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(metric)
        elif scheduler is not None:
            scheduler.step()

    def hyper(self, model: int, *, factor: float) -> None:
        """Change the learning rate of the last group by hand."""
        group = self.optimizers[model].param_groups[-1]
        if isinstance(group["lr"], Tensor):
            group["lr"].mul_(factor)
        else:
            group["lr"] *= factor

    def freeze(self, model: int, *, block: int, trained: bool) -> None:
        """Freeze or thaw a block."""
        self.models[model].blocks[block].requires_grad_(trained)

    def write(self, model: int, *, factor: float) -> None:
        """Change all parameters in place, as in clipping of weights."""
        with torch.no_grad():
            for parameter in self.models[model].parameters():
                parameter.mul_(factor)

    def keep(self, model: int) -> None:
        """Keep a checkpoint."""
        state = self.models[model].state_dict()
        self.kept[model] = {name: value.clone() for name, value in state.items()}

    def load(self, model: int) -> None:
        """Go back to the last checkpoint."""
        if model in self.kept:
            self.models[model].load_state_dict(self.kept[model])

    def reload_optimizer(self, model: int) -> None:
        """Save and load the optimizer's state."""
        optimizer = self.optimizers[model]
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def reformat(self, model: int, *, channels_last: bool) -> None:
        """Lay the weights of convolutions out in another way."""
        memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.models[model].to(memory_format=memory_format)

    def synchronize(self, model: int) -> None:
        """Wait for all updates."""

    def prepare_again(self, model: int, *, grows: bool) -> None:
        """Connect a model anew, perhaps with a parameter more.

        Args:
            model: its number.
            grows: whether it gets a parameter, in a group of its own.
        """
        if grows:
            self.grow(model)
        self.connect(model)

    def grow(self, model: int) -> None:
        """Give a model a parameter more."""
        described = self.loop.models[model]
        late = nn.Parameter(
            torch.full((WIDTH,), 1.25, dtype=getattr(torch, described.dtype), device=DEVICE)
        )
        self.models[model].late = late
        self.optimizers[model].add_param_group({"params": [late]})
        # What was kept of the smaller model does not fit any more.
        self.kept.pop(model, None)
        self.averages.pop(model, None)

    def connect(self, model: int) -> None:
        """Prepare a model that was prepared before."""

    def joined(self, model: int, *, batches: list[int], data: int) -> None:
        """Train on a number of batches that differs from rank to rank."""
        with self.joining():
            for number in range(batches[self.rank]):
                self.joined_step(model, data + number)

    def joining(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context for uneven data."""
        return contextlib.nullcontext()

    def joined_step(self, model: int, data: int) -> None:
        """Take one step of such a training."""
        self.zero(model, whose="optimizer")
        self.backward(model, through=[model], data=data)
        self.optimizers[model].step()
        self.zero(model, whose="optimizer")

    # ---- reads

    def read(self, model: int, *, what: str) -> None:
        """Read in some way and note what was seen; an error of torch's own is noted, too."""
        try:
            values = READS[what](self, model)
        except (RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
            if type(error).__module__.startswith("gradlane"):
                raise
            self.note(f"{what} raised {type(error).__name__}", [])
        else:
            self.note(what, values)

    def average(self, model: int) -> None:
        """Update an average of the parameters."""
        if model not in self.averages:
            try:
                self.averages[model] = AveragedModel(self.models[model])
            except RuntimeError as error:
                if type(error).__module__.startswith("gradlane"):
                    raise
                return
        self.averages[model].update_parameters(self.models[model])
        self.note("average", list(self.averages[model].module.parameters()))


def _evaluate(program: Program, number: int) -> list[Tensor]:
    model = program.models[number]
    model.eval()
    try:
        with torch.no_grad():
            return [model(program.batch(-1).to(getattr(torch, model.described.dtype)))]
    finally:
        model.train()


def _inference(program: Program, number: int) -> list[Tensor]:
    with torch.inference_mode():
        return _evaluate(program, number)


def _attributes(model: nn.Module) -> list[Tensor]:
    found = [
        getattr(module, name) for module in model.modules() for name in list(module._parameters)
    ]
    return [one for one in found if one is not None]


def _pickled(model: Stranger) -> list[Tensor]:
    return list(pickle.loads(pickle.dumps(model)).parameters())


def _saved(model: Stranger) -> list[Tensor]:
    memory = io.BytesIO()
    torch.save(model.state_dict(), memory)
    memory.seek(0)
    return list(torch.load(memory).values())


def _twin(program: Program, number: int) -> list[Tensor]:
    """Train a copy a step: it is a plain model."""
    twin = copy.deepcopy(program.models[number])
    values = twin(program.batch(-2).to(getattr(torch, twin.described.dtype)))
    values.float().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.01).step()
    return [values, *twin.parameters()]


def _functional(program: Program, number: int) -> list[Tensor]:
    model = program.models[number]
    hidden = program.batch(-3).to(getattr(torch, model.described.dtype))
    with torch.no_grad():
        given = {name: one * 0.5 for name, one in model.named_parameters()}
        return [torch.func.functional_call(model, given, (hidden,))]


def _gradients(program: Program, number: int) -> list[Tensor]:
    parameters = list(program.models[number].parameters())
    found = [one.grad for one in parameters if one.grad is not None]
    present = torch.tensor([one.grad is not None for one in parameters])
    return [present, *found]


def _flatten(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for name in value for tensor in _flatten(value[name])]
    if isinstance(value, (list, tuple)):
        return [tensor for one in value for tensor in _flatten(one)]
    if isinstance(value, (bool, int, float)):
        return [torch.tensor(value, dtype=torch.float64)]
    return []


def _optimizer_state(program: Program, number: int) -> list[Tensor]:
    """All groups, and the state of each parameter.

    Not the order of the state's keys: on a rank that was without data in the first steps it is that
    of parameters, not of groups, and nothing depends on it.
    """
    state = program.optimizers[number].state_dict()
    names = sorted(state["state"])
    by_name = [sorted(state["state"][name].items(), key=lambda one: one[0]) for name in names]
    return [torch.tensor(names), *_flatten(by_name), *_flatten(state["param_groups"])]


READS: dict[str, Callable[[Program, int], list[Tensor]]] = {
    "state_dict": lambda program, number: list(program.models[number].state_dict().values()),
    "parameters": lambda program, number: list(program.models[number].parameters()),
    "named": lambda program, number: [one for _, one in program.models[number].named_parameters()],
    "attributes": lambda program, number: _attributes(program.models[number]),
    "buffers": lambda program, number: list(program.models[number].buffers()),
    "deepcopy": lambda program, number: list(copy.deepcopy(program.models[number]).parameters()),
    "pickle": lambda program, number: _pickled(program.models[number]),
    "save": lambda program, number: _saved(program.models[number]),
    "twin": _twin,
    "evaluate": _evaluate,
    "inference": _inference,
    "functional": _functional,
    "gradients": _gradients,
    "optimizer_state": _optimizer_state,
}
