"""No read sees a parameter before its update, and fast reads stay fast."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

import gradlane
from gradlane.training.model import lazy_parameter_dict
from gradlane.training.model.kernel.gate import Gate
from tests.built import needs_core
from tests.torch_versions import in_threads, torch_release
from tests.training.model.held_core import HeldCore
from tests.training.model.models import Attention, seeded
from tests.training.model.pool import RankPool
from tests.training.model.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("each_gradient_alone")


class Probe:
    """A model with an update due that a test can let arrive when it wants."""

    def __init__(self, session: Any, core: HeldCore, model: nn.Module) -> None:
        self.model: Any = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        session.prepare(model, self.optimizer)
        self.core = core
        self.tensors = range(len(list(model.parameters())))
        self.core.held = set(self.tensors)

    def step(self, value: Tensor) -> None:
        value.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def arrives_later(self, *tensors: int) -> threading.Timer:
        timer = threading.Timer(0.05, self.core.release, tensors)
        timer.start()
        return timer

    def waited_for(self) -> list[Any]:
        return [call[3] for call in self.core.calls if call[1] == "wait"]


def on_probe(model: Callable[[], nn.Module], body: Callable[[Probe], None]) -> None:
    core = HeldCore()

    def run(session: Any) -> None:
        body(Probe(session, core, model()))

    run_ranks(1, run, core=core)


def on_the_rank_that_is_left(
    other: Callable[[Probe], object], body: Callable[[Probe, threading.Event], None]
) -> None:
    """Run a body on rank 0 while rank 1 does something else and, once the event is set, ends."""
    core, is_due = HeldCore(), threading.Event()

    def run(session: Any) -> None:
        probe = Probe(session, core, two_layers())
        if session.rank == 0:
            body(probe, is_due)
            return
        other(probe)
        assert is_due.wait(20)
        raise ArithmeticError("the loss is not a number")

    first, _ = run_ranks(2, run, core=core, expect_errors=True)
    assert isinstance(first, gradlane.PeerLostError)


def two_layers() -> Any:
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    return model


READS: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda m: m[0].weight,
    "getattr": lambda m: getattr(m[0], "weight"),  # noqa: B009
    "mapping": lambda m: m[0]._parameters["weight"],
    "mapping-get": lambda m: m[0]._parameters.get("weight"),
    "mapping-values": lambda m: next(iter(m[0]._parameters.values())),
    "mapping-dict": lambda m: dict(m[0]._parameters)["weight"],
    "mapping-unpacked": lambda m: {**m[0]._parameters}["weight"],
    "mapping-copy": lambda m: copy.copy(m[0]._parameters)["weight"],
    "parameters": lambda m: next(m.parameters()),
    "named-parameters": lambda m: dict(m.named_parameters())["0.weight"],
    "get-parameter": lambda m: m.get_parameter("0.weight"),
    "state-dict": lambda m: m.state_dict()["0.weight"],
    "submodule-state-dict": lambda m: m[0].state_dict()["weight"],
    "deepcopy": lambda m: copy.deepcopy(m)[0].weight,
    "pickle": lambda m: pickle.loads(pickle.dumps(m))[0].weight,
    "vector": lambda m: nn.utils.parameters_to_vector(m.parameters())[:4].view(2, 2),
}


@pytest.mark.parametrize("read", list(READS))
def test_reads_wait_for_the_update(read: str) -> None:
    def body(probe: Probe) -> None:
        probe.step(probe.model[0](torch.ones(1, 2)).sum() + probe.model[1].weight.sum())
        timer = probe.arrives_later(*probe.tensors)
        assert torch.equal(READS[read](probe.model).detach(), torch.zeros(2, 2))
        timer.join()

    on_probe(two_layers, body)


def test_forward_waits_only_for_what_it_uses() -> None:
    def body(probe: Probe) -> None:
        probe.step(probe.model(torch.ones(1, 2)).sum())
        timer = probe.arrives_later(0)
        probe.model[0](torch.ones(1, 2))
        timer.join()
        assert probe.waited_for() == [(0,)]
        with torch.no_grad():
            timer = probe.arrives_later(1)
            probe.model(torch.ones(1, 2))
        timer.join()
        assert probe.waited_for() == [(0,), (1,)]

    on_probe(two_layers, body)


def test_attention_reads_its_output_projection_late() -> None:
    """Its weight arrives after everything else, and attention reads it without a call."""

    def body(probe: Probe) -> None:
        tokens = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1))
        names = [name for name, _ in probe.model.named_parameters()]
        out = names.index("attention.out_proj.weight")
        before = probe.model.attention.out_proj.weight.detach().clone()
        probe.step(probe.model(tokens).pow(3).sum())
        probe.core.release(*(index for index in probe.tensors if index != out))
        timer = probe.arrives_later(out)
        probe.model(tokens)
        timer.join()
        assert (out,) in probe.waited_for()
        assert not torch.equal(before, probe.model.attention.out_proj.weight)

    on_probe(lambda: seeded(Attention), body)


def test_lstm_and_weight_norm_and_parameter_list() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(2, 2)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
            self.held = nn.ParameterList([nn.Parameter(torch.ones(2))])

        def forward(self, values: Tensor) -> Tensor:
            hidden, _ = self.lstm(values)
            return self.normed(hidden) * self.held[0]  # type: ignore[no-any-return]

    def body(probe: Probe) -> None:
        values = torch.ones(3, 1, 2)
        for _ in range(3):
            probe.core.held = set(probe.tensors)
            probe.step(probe.model(values).square().sum())
            with torch._C.DisableTorchFunctionSubclass():
                version = probe.model.lstm._flat_weights[0]._version
            timer = probe.arrives_later(*probe.tensors)
            probe.model(values)
            timer.join()
            assert probe.model.lstm._flat_weights[0]._version > version

    on_probe(lambda: seeded(Mixed), body)


def test_gradients_are_the_means_wherever_they_are_read() -> None:
    def body(probe: Probe) -> None:
        probe.core.held = set()
        model = probe.model
        held = [module.weight for module in model]
        model(torch.ones(1, 2)).sum().backward()
        attached = [parameter.grad for parameter in held]
        assert [one is not None for one in attached] == [True, True]
        assert torch.equal(attached[1], torch.full((2, 2), 2.0))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.grad.mul_(0.25)
        probe.optimizer.step()
        assert torch.equal(held[1], torch.full((2, 2), 0.5))

    on_probe(two_layers, body)


def test_hyper_parameters_are_those_of_the_step() -> None:
    def body(probe: Probe) -> None:
        group = probe.optimizer.param_groups[0]
        group["lr"] = torch.tensor(1.0)
        probe.step(probe.model[0](torch.ones(1, 2)).sum() + probe.model[1].weight.sum())
        group["lr"].fill_(100.0)
        kept = group["lr"]
        timer = probe.arrives_later(*probe.tensors)
        assert torch.equal(probe.model[0].weight.detach(), torch.zeros(2, 2))
        timer.join()
        assert probe.optimizer.param_groups[0] is group
        assert group["lr"] is kept
        assert len(group["params"]) == 2

    on_probe(two_layers, body)


def test_user_hooks_of_the_forward_see_updated_parameters() -> None:
    def body(probe: Probe) -> None:
        seen: list[Tensor] = []
        weight = probe.model[0].weight
        probe.model[0].register_forward_pre_hook(
            lambda *_: seen.append(weight.detach().clone()), prepend=False
        )
        probe.step(probe.model[0](torch.ones(1, 2)).sum() + probe.model[1].weight.sum())
        timer = probe.arrives_later(*probe.tensors)
        probe.model[0](torch.ones(1, 2))
        timer.join()
        assert torch.equal(seen[-1], torch.zeros(2, 2))

    on_probe(two_layers, body)


def test_copies_are_plain_models() -> None:
    def body(probe: Probe) -> None:
        probe.core.held = set()
        probe.step(probe.model(torch.ones(1, 2)).sum())
        twin = copy.deepcopy(probe.model)
        loaded = pickle.loads(pickle.dumps(probe.model))
        waits = probe.waited_for()
        for one in (twin, loaded):
            assert type(one[0]._parameters) is dict
            one.zero_grad()
            one(torch.ones(1, 2)).sum().backward()
            assert one[0].weight.grad is not None
            one.zero_grad()
            assert one[0].weight.grad is None
        assert probe.waited_for() == waits

    on_probe(two_layers, body)


def test_models_are_plain_again_after_close() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduled: list[Any] = []

    def body(session: Any) -> None:
        session.prepare(model, optimizer)
        scheduled.append(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run_ranks(1, body)
    assert type(model[0]._parameters) is type(nn.Module()._parameters)
    assert not model[0]._forward_pre_hooks
    assert "zero_grad" not in model.__dict__
    value = model[1].weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    assert model[1].weight.grad is not None
    optimizer.step()
    scheduled[0].step()
    assert not torch.equal(value, model[1].weight)


def test_load_state_dict_between_steps() -> None:
    def body(probe: Probe) -> None:
        saved = {name: torch.full_like(t, 5.0) for name, t in probe.model.state_dict().items()}
        probe.step(probe.model(torch.ones(1, 2)).sum())
        timer = probe.arrives_later(*probe.tensors)
        probe.model.load_state_dict(saved)
        timer.join()
        assert torch.equal(probe.model[0].weight.detach(), torch.full((2, 2), 5.0))

    on_probe(two_layers, body)


def test_optimizer_state_waits() -> None:
    core = HeldCore()

    def body(session: Any) -> None:
        model = two_layers()
        optimizer = torch.optim.Adam(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        core.held = {0, 1}
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        timer = threading.Timer(0.05, core.release, (0, 1))
        timer.start()
        state = optimizer.state_dict()["state"]
        timer.join()
        assert sorted(state) == [0, 1]
        optimizer.load_state_dict(optimizer.state_dict())

    run_ranks(1, body, core=core)


def test_reads_take_the_short_way_when_nothing_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow: list[str] = []
    for name in ("before_read", "before_list", "before_forward"):

        def note(*_: Any, name: str = name) -> None:
            slow.append(name)

        monkeypatch.setattr(Gate, name, note)

    def body(probe: Probe) -> None:
        probe.core.held = set()
        for _ in range(3):
            probe.model(torch.ones(1, 2))
            probe.model[0].weight.sum()
            list(probe.model.parameters())

    on_probe(two_layers, body)
    assert slow == []


def test_functional_call_and_reading_inside_backward() -> None:
    def body(probe: Probe) -> None:
        probe.core.held = set()
        model = probe.model
        seen: list[int] = []
        model[1].register_full_backward_hook(lambda *_: seen.append(len(list(model.parameters()))))
        swapped = {"0.weight": torch.zeros(2, 2), "1.weight": torch.zeros(2, 2)}
        assert torch.func.functional_call(model, swapped, torch.ones(1, 2)).abs().sum() == 0
        probe.step(model(torch.ones(1, 2).requires_grad_()).sum())
        assert seen == [2]
        list(model.parameters())

    on_probe(two_layers, body)


def test_after_a_failure_nothing_can_be_read() -> None:
    def body(probe: Probe, is_due: threading.Event) -> None:
        probe.step(probe.model(torch.ones(1, 2)).sum())
        is_due.set()
        model = probe.model
        for read in (model.state_dict, lambda: list(model.parameters()), probe.optimizer.step):
            with pytest.raises(
                gradlane.PeerLostError, match=r"rank 1 gave up.*1\.weight"
            ) as caught:
                read()
            assert caught.value.rank == 1
            assert caught.value.last_complete_step == 0
        with pytest.raises(gradlane.PeerLostError):
            model[0].weight  # noqa: B018
        with pytest.raises(gradlane.PeerLostError):
            model(torch.ones(1, 2))

    on_the_rank_that_is_left(lambda _: None, body)


def test_an_optimizer_that_breaks_off_leaves_nothing_readable() -> None:
    class Breaking(torch.optim.SGD):
        steps_per_parameter = True

        def step(self, closure: Any = None) -> Any:
            super().step()
            raise ArithmeticError("nan")

    def body(session: Any) -> None:
        model = two_layers()
        optimizer = Breaking(model.parameters(), lr=1.0)
        session.prepare(model, optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        for _ in range(2):
            with pytest.raises(
                gradlane.SessionFailedError, match="broke off in step 1 with Arithmetic"
            ):
                model.state_dict()

    (error,) = run_ranks(1, body, expect_errors=True)
    assert isinstance(error, gradlane.SessionFailedError)


@in_threads
def test_compiled_models_read_updated_parameters() -> None:
    """Compiled code reads parameters past Python; the eager backend needs no compiler."""

    def body(session: Any) -> list[Tensor]:
        model = two_layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        compiled = torch.compile(model, backend="eager") if session.world_size == 1 else model
        for _ in range(4):
            compiled(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    (alone,) = run_ranks(1, body)
    plain, _ = run_ranks(2, body)
    assert all(torch.equal(one, other) for one, other in zip(alone, plain, strict=True))


def test_checkpointed_forwards_count_for_the_order_and_recomputation_does_not() -> None:
    """Reentrant checkpointing runs the forward without gradients, and again inside backward."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.block, self.stem = (nn.Linear(2, 2, bias=False) for _ in range(3))

        def forward(self, values: Tensor, reentrant: bool) -> Tensor:
            hidden: Any = checkpoint(self.block, self.stem(values), use_reentrant=reentrant)
            return self.head(hidden)  # type: ignore[no-any-return]

    for reentrant in (True, False):
        core = HeldCore()

        def body(session: Any, reentrant: bool = reentrant) -> None:
            model = seeded(Blocks)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer)
            model.eval()
            model.get_submodule("head")(torch.ones(1, 2))
            model.train()
            for _ in range(2):
                model(torch.ones(1, 2), reentrant).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        run_ranks(2, body, core=core)
        assert [vector[:3] for vector in core.priorities] == [[-2, -1, 0]]


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_after_a_failure_compiled_code_reads_nothing() -> None:
    """Even of layers that it found up to date before the failure."""

    def step(probe: Probe) -> None:
        probe.step(probe.model(torch.ones(1, 2)).sum())

    def body(probe: Probe, is_due: threading.Event) -> None:
        torch._dynamo.reset()
        for layer in probe.model:
            layer.compile(backend="eager")
        step(probe)
        probe.core.release(0)
        probe.model[0](torch.ones(1, 2))
        is_due.set()
        for layer in (1, 0):
            with pytest.raises(gradlane.PeerLostError):
                probe.model[layer](torch.ones(1, 2))

    on_the_rank_that_is_left(step, body)


@pytest.mark.skipif(torch_release() <= (2, 4), reason="torch 2.4 ends a graph at each hook")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_compiled_layers_wait_for_themselves_only_and_are_compiled_once() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2, bias=False))

        def forward(self, values: Tensor) -> Tensor:
            return self.inner(values)  # type: ignore[no-any-return]

    def body(probe: Probe) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        for layer in probe.model:
            layer.compile(backend="eager", fullgraph=True)
        for _ in range(4):
            value = probe.model(torch.ones(1, 2)).sum()
            probe.core.held = set(probe.tensors)
            probe.step(value)
            probe.core.calls.clear()
            timer = probe.arrives_later(0)
            probe.model[0](torch.ones(1, 2))
            timer.join()
            assert probe.waited_for() == [(0,)]
            probe.core.release(1)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2

    on_probe(lambda: nn.Sequential(Layer(), Layer()), body)


@needs_core
def test_updates_during_a_compilation_round_as_all_others(pool: RankPool) -> None:
    """The compiler reads buffers, which applies updates: in another step on each rank."""
    results = pool.run("compiled_and_plain", ranks=2)
    assert len({digest for digests in results for digest in digests}) == 1, results


def test_modules_that_share_parameters_are_plain_again_after_close() -> None:
    model = two_layers()
    followers: list[Any] = []

    def body(session: Any) -> None:
        session.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
        followers.append(nn.ParameterList(model.parameters()))
        assert type(followers[0]._parameters) is not dict

    run_ranks(1, body)
    own = type(nn.Module()._parameters)
    assert type(followers[0]._parameters) is own
    assert followers[0][0] is model[0].weight
    assert type(nn.ParameterList(model.parameters())._parameters) is own


def test_a_session_that_was_given_up_disturbs_no_registration() -> None:
    """It may be collected while torch goes through its hooks on registration, in any thread."""
    given_up = [lazy_parameter_dict.SharedParameterTracker(cast(Any, None), [])]
    handle = register_module_parameter_registration_hook(lambda *_: given_up.clear())
    try:
        nn.Linear(1, 1)
    finally:
        handle.remove()
    assert not given_up


class SlowSGD(torch.optim.Optimizer):
    """Tells when it is in the middle of a step, and stays there for a while."""

    steps_per_parameter = True

    def __init__(self, parameters: Any, entered: threading.Event) -> None:
        super().__init__(parameters, {"lr": 1.0})
        self.entered = entered

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.entered.set()
        time.sleep(0.2)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad)


@pytest.mark.parametrize("of_model", [True, False])
def test_no_thread_forgets_gradients_in_the_middle_of_another_ones_update(
    of_model: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update begins when `zero_grad()` has been noted, and gradients are still there."""
    bypass = Gate.bypass

    def body(session: Any) -> float:
        model: Any = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(5.0)
        entered = threading.Event()
        optimizer = SlowSGD(model.parameters(), entered)
        session.prepare(model, optimizer)

        def saved_first(steps: Gate, call: Callable[[], None]) -> None:
            entered.clear()
            saving = threading.Thread(target=model.state_dict)
            saving.start()
            # In the first step there is nothing to wait for.
            entered.wait(0.5)
            bypass(steps, call)
            saving.join(20)

        monkeypatch.setattr(Gate, "bypass", saved_first)
        for _ in range(3):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            (model if of_model else optimizer).zero_grad()
        return float(model.weight.item())

    assert run_ranks(1, body) == [2.0]
