"""Misuse is an error that says what is wrong and what to do; nothing silently differs from DDP."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.utils import parametrizations, prune

import gradlane
from gradlane.training.options.options import Options, keywords_of
from gradlane.training.session.init import open_session
from tests.training.model.held_core import HeldCore
from tests.training.model.late_core import LateCore
from tests.training.model.ranks import run_ranks


class Eighths(nn.Module):
    """A parameter of a dtype that cannot be added up."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn))


def prepared(session: Any, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.prepare(model, optimizer, **options)
    return model, optimizer


def loss(model: nn.Module) -> Tensor:
    value: Tensor = model(torch.ones(2, 3)).square().sum()
    return value


def backward(model: nn.Module) -> None:
    loss(model).backward()  # type: ignore[no-untyped-call]


def run_alone(body: Callable[[Any], Any], **options: Any) -> Any:
    return run_ranks(1, body, **options)[0]


def test_a_gradient_after_the_last_one_that_was_expected() -> None:
    """Nothing that was sent can be taken back, so every rank learns of it."""

    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        if session.rank == 0:
            backward(model)
        # Everything of step 2 has reached rank 1, but step 3 cannot begin.
        for _ in range(2):
            optimizer.step()
            optimizer.zero_grad()
            backward(model)
            list(model.parameters())

    first, second = run_ranks(2, body, expect_errors=True)
    assert isinstance(first, gradlane.UsageError)
    assert re.search(r"'[01]\.(weight|bias)' got another gradient in step 2", str(first))
    assert "session.no_sync()" in str(first)
    assert isinstance(second, gradlane.PeerLostError)
    assert "rank 0 gave up" in str(second) and "another gradient in step 2" in str(second)


def test_fully_shard_of_a_prepared_model_is_refused_where_it_happens() -> None:
    fsdp: Any = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("an older torch has it elsewhere")
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:

        def body(session: Any) -> None:
            model, optimizer = prepared(session)
            with pytest.raises(
                gradlane.UsageError, match=r"'weight' .* fully_shard\(\) keeps a part"
            ):
                fsdp.fully_shard(model)
            # Nothing has changed.
            backward(model)
            optimizer.step()

        run_alone(body)
    finally:
        dist.destroy_process_group()


def test_step_without_any_gradient() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        with pytest.raises(gradlane.UsageError, match="without any gradient since step 0"):
            optimizer.step()
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(gradlane.UsageError, match="without any gradient since step 1"):
            optimizer.step()

    run_alone(body)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: setattr(m, "extra", nn.Linear(2, 2)), "added 'extra.weight', 'extra.bias'"),
        (lambda m: m.__delitem__(1), "removed '1.weight', '1.bias'"),
        (
            lambda m: setattr(m[0], "weight", nn.Parameter(torch.ones(3, 3))),
            "replaced '0.weight'",
        ),
        (lambda m: setattr(m[0], "bias", None), "removed '0.bias'"),
        (lambda m: m[0].register_parameter("own", nn.Parameter(torch.ones(1))), "added '0.own'"),
    ],
)
def test_module_changed_after_prepare(change: Callable[[Any], None], words: str) -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        change(model)
        with pytest.raises(gradlane.UsageError, match=words):
            optimizer.step()

    run_alone(body)


def test_frozen_parameter_that_is_trained_later() -> None:
    def body(session: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session.prepare(model, optimizer)
        model[0].requires_grad_(True)
        # Before anything is read or stepped, by hand or otherwise.
        with pytest.raises(gradlane.UsageError, match=r"'0\.weight' was frozen"):
            backward(model)
        with pytest.raises(gradlane.UsageError, match=r"'0\.weight' was frozen"):
            optimizer.step()

    run_alone(body)


def replace_all(model: Any) -> None:
    """Replace all parameters, as pruning and densifying do."""
    for layer in model:
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        layer.bias = nn.Parameter(layer.bias.detach().clone())


def turn(model: Any) -> None:
    """Freeze what was trained, and train another layer."""
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)


def clips(session: Any, model: nn.Module, optimizer: Any) -> None:
    session.clip_grad_norm_(1.0)


def scales(session: Any, model: nn.Module, optimizer: Any) -> None:
    torch.amp.GradScaler("cpu").scale(loss(model)).backward()  # type: ignore[no-untyped-call]
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)


def steps(session: Any, model: nn.Module, optimizer: Any) -> None:
    optimizer.step()


def steps_rebuilt(session: Any, model: nn.Module, optimizer: Any) -> None:
    """Step an optimizer over the new parameters, which nothing has prepared."""
    torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]).step()


@pytest.mark.parametrize("call", [steps, clips, scales, steps_rebuilt])
@pytest.mark.parametrize(
    ("change", "words"),
    [(replace_all, "replaced '0.weight', '0.bias'"), (turn, r"'1\.weight' was frozen when")],
)
@pytest.mark.parametrize("ended_steps", [0, 1])
def test_no_parameter_that_was_prepared_has_a_gradient(
    call: Any, change: Callable[[Any], None], words: str, ended_steps: int
) -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[1].requires_grad_(change is replace_all)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        session.prepare(model, optimizer)
        for _ in range(ended_steps):
            backward(model)
            optimizer.step()
            optimizer.zero_grad()
        change(model)
        backward(model)
        with pytest.raises(gradlane.UsageError, match=words):
            call(session, model, optimizer)

    run_alone(body)


def test_an_optimizer_whose_parameters_were_all_replaced() -> None:
    def body(session: Any) -> None:
        _, optimizer = prepared(session)
        adapter = nn.Parameter(torch.ones(5))
        optimizer.param_groups[0]["params"] = [adapter]
        adapter.sum().backward()  # type: ignore[no-untyped-call]
        with pytest.raises(gradlane.UsageError, match=r"shape \(5,\) that was not trained"):
            optimizer.step()

    run_alone(body)


@pytest.mark.parametrize("of", ["all", "one"])
def test_a_model_that_is_called_with_the_parameters_of_another_one(of: str) -> None:
    """Their update comes inside the call, while the first model has them in place of its own."""

    def train(session: Any) -> list[Tensor]:
        torch.manual_seed(0)
        models: list[Any] = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in models]
        if session is not None:
            for model, optimizer in zip(models, optimizers, strict=True):
                session.prepare(model, optimizer)
        kept = dict(models[1].named_parameters())
        if of == "one":
            del kept["bias"]
        seen = []
        for _ in range(3):
            (loss(models[0]) + loss(models[1])).backward()  # type: ignore[no-untyped-call]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            found: Tensor = torch.func.functional_call(models[0], kept, (torch.ones(1, 3),))
            seen.append(found.detach())
        return [*seen, *(one.detach() for model in models for one in model.parameters())]

    (found,) = run_ranks(1, train, core=LateCore())
    for one, expected in zip(found, train(None), strict=True):
        assert torch.equal(one, expected)


def test_a_session_that_has_failed_hides_no_mistake_of_a_later_one() -> None:
    kept: list[Any] = []

    def fail(session: Any) -> None:
        kept.append(session)
        _, optimizer = prepared(session)
        kept.append(optimizer)
        raise ArithmeticError("nan")

    run_ranks(1, fail, expect_errors=True)

    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        replace_all(model)
        backward(model)
        with pytest.raises(gradlane.UsageError, match=r"replaced '0\.weight', '0\.bias'"):
            steps_rebuilt(session, model, optimizer)

    run_alone(body)


def pruned_for_good(layer: nn.Module) -> None:
    prune.l1_unstructured(layer, "weight", 0.5)  # type: ignore[no-untyped-call]
    prune.remove(layer, "weight")  # type: ignore[no-untyped-call]


def as_buffer(layer: nn.Module) -> None:
    weight = layer.weight.detach().clone()  # type: ignore[operator]
    del layer.weight
    layer.register_buffer("weight", weight)


def with_factors(layer: nn.Module) -> None:
    """Train two factors in place of the weight, as adapters do."""
    layer.weight.requires_grad_(False)
    layer.down, layer.up = nn.Linear(3, 1), nn.Linear(1, 2)


REPARAMETRIZED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "weight norm": (parametrizations.weight_norm, "removed '1.weight'"),
    "orthogonal": (parametrizations.orthogonal, "removed '1.weight'"),
    "pruned": (
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),  # type: ignore[no-untyped-call]
        "added '1.weight_orig'",
    ),
    "pruned for good": (pruned_for_good, "its modules were changed"),
    "a buffer": (as_buffer, "its modules were changed"),
    "factors": (with_factors, "added '1.down.weight'"),
}


@pytest.mark.parametrize("call", [steps, clips])
@pytest.mark.parametrize("how", REPARAMETRIZED)
def test_weights_that_become_something_else_while_training(
    how: str, call: Callable[..., None]
) -> None:
    change, words = REPARAMETRIZED[how]

    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        change(model[1])
        backward(model)
        with pytest.raises(gradlane.UsageError, match=rf"changed after prepare\(\): .*{words}"):
            call(session, model, optimizer)
            steps(session, model, optimizer)

    run_alone(body)


def test_all_parameters_frozen_later() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        model.requires_grad_(False)
        with pytest.raises(gradlane.UsageError, match=r"'0\.weight', .* were trained .* frozen"):
            optimizer.step()

    run_alone(body)


@pytest.mark.parametrize("build", [nn.Embedding, nn.EmbeddingBag])
def test_an_embedding_that_rescales_its_rows_in_forward(build: Any) -> None:
    def body(session: Any) -> None:
        model: Any = nn.Sequential(build(4, 2, max_norm=1.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        words = r"'0' .* max_norm=1, .* its weight's renorm_\(2, 0, 1\)"
        if session.world_size > 1:
            with pytest.raises(ValueError, match=words):
                session.prepare(model, optimizer)
        else:
            session.prepare(model, optimizer)

    run_alone(body)
    run_ranks(2, body)


def test_rows_rescaled_after_each_step_are_alike_on_all_ranks() -> None:
    """The remedy for `max_norm`."""

    def body(session: Any) -> Tensor:
        model: Any = nn.Embedding(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        session.prepare(model, optimizer)
        for _ in range(3):
            model(torch.tensor([session.rank, 3])).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                model.weight.renorm_(2, 0, 0.1)
            optimizer.zero_grad()
        return model.weight.detach().clone()  # type: ignore[no-any-return]

    first, second = run_ranks(2, body, check_every=1)
    assert torch.equal(first, second)
    assert first.norm(dim=1).max() < 0.1001


def test_a_scaler_that_judges_own_gradients_of_a_fused_optimizer() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        session.prepare(model, optimizer)
        # A plain list: nothing sees who looks at its gradients.
        group = optimizer.param_groups[0]
        group["params"] = group["params"][:]
        scaler = torch.amp.GradScaler("cpu")
        with session.no_sync():
            scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        with pytest.raises(gradlane.UsageError, match="GradScaler has looked at this rank's own"):
            scaler.step(optimizer)

    run_alone(body)


def test_trained_parameter_that_is_frozen_later() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        before = model[0].weight.detach().clone()
        model[0].requires_grad_(False)
        backward(model)
        optimizer.step()
        assert torch.equal(model[0].weight, before)

    run_alone(body)


def test_parameter_group_added_later() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(5))]})
        backward(model)
        with pytest.raises(gradlane.UsageError, match=r"shape \(5,\) that was not trained"):
            optimizer.step()

    run_alone(body)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: Eighths(), "'weight' has dtype torch.float8_e4m3fn"),
        (lambda: nn.Linear(2, 2, device="meta"), "'weight' is on device meta"),
        (lambda: nn.LazyLinear(2), "'weight' has no shape yet"),
        (lambda: nn.ReLU(), "no trained parameter"),
    ],
)
def test_models_that_cannot_take_part(build: Callable[[], nn.Module], words: str) -> None:
    def body(session: Any) -> None:
        model = build()
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ValueError, match=words):
            session.prepare(model, optimizer)

    run_alone(body)


def test_optimizers_that_cannot_take_part() -> None:
    def body(session: Any) -> None:
        model = nn.Linear(2, 2)
        parts: list[Any] = [
            torch.optim.LBFGS([model.weight]),
            torch.optim.SGD([model.bias], lr=0.1),
        ]
        with pytest.raises(
            gradlane.UsageError, match="LBFGS, which calls its closure itself, with"
        ):
            session.prepare(model, parts)
        with pytest.raises(ValueError, match="does not hold 'bias', which are trained"):
            session.prepare(model, torch.optim.SGD([model.weight], lr=0.1))
        stranger = nn.Parameter(torch.ones(7))
        with pytest.raises(ValueError, match=r"group 1 of the optimizer holds .* \(7,\)"):
            groups: list[Any] = [{"params": model.parameters()}, {"params": [stranger]}]
            session.prepare(model, torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(ValueError, match="differentiable"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, differentiable=True))

    run_alone(body)


def test_models_that_share_parameters() -> None:
    def body(session: Any) -> None:
        model, _ = prepared(session)
        both = nn.Sequential(model, nn.Linear(2, 2))
        with pytest.raises(ValueError, match="trained parameters in common"):
            session.prepare(both, torch.optim.SGD(both.parameters(), lr=0.1))

    run_alone(body)


def test_converted_model() -> None:
    def body(session: Any) -> None:
        other, _ = prepared(session)
        other.double()
        with pytest.raises(gradlane.UsageError, match=r"was prepared as .* torch\.float32"):
            other(torch.ones(2, 3, dtype=torch.float64)).sum().backward()

    run_alone(body)


def test_gradient_with_a_graph() -> None:
    def body(session: Any) -> None:
        model, _ = prepared(session)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(gradlane.UsageError, match="create_graph=True"):
                loss(model).backward(create_graph=True)  # type: ignore[no-untyped-call]

    run_alone(body)


def test_two_losses_over_different_parameters_are_one_step() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        model[0](torch.ones(2, 3)).sum().backward()
        model[1](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        for one, parameter in zip(before, model.parameters(), strict=True):
            assert not torch.equal(one, parameter)

    run_alone(body)


def test_forgetting_to_zero_gradients_on_servers_warns() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        backward(model)
        optimizer.step()
        backward(model)
        with pytest.warns(UserWarning, match=r"zero_grad\(\) was not called"):
            optimizer.step()

    run_alone(body, update="server")


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_between_backward_and_step_forgets_the_gradients(whose: str) -> None:
    def body(session: Any) -> list[Tensor]:
        model, optimizer = prepared(session)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.5)
        backward(model)
        (model if whose == "model" else optimizer).zero_grad()
        assert all(torch.all(parameter == 0.5) for parameter in model.parameters())
        with pytest.raises(gradlane.UsageError, match="without any gradient"):
            optimizer.step()
        backward(model)
        optimizer.step()
        assert all(not torch.all(parameter == 0.5) for parameter in model.parameters())
        return [parameter.detach() for parameter in model.parameters()]

    first, second = run_ranks(2, body)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("each_gradient_alone")
def test_zero_grad_never_waits() -> None:
    core = HeldCore()

    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        core.held = {0, 1, 2, 3}
        backward(model)
        optimizer.step()
        waits = [call for call in core.calls if call[1].startswith("wait")]
        model.zero_grad()
        optimizer.zero_grad()
        optimizer.zero_grad(set_to_none=False)
        assert [call for call in core.calls if call[1].startswith("wait")] == waits
        core.release(0, 1, 2, 3)

    run_alone(body, core=core)


def test_unknown_optimizer_steps_whole_and_says_so() -> None:
    calls: list[int] = []

    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            calls.append(sum(p.grad is not None for g in self.param_groups for p in g["params"]))
            return super().step(closure)

    def body(session: Any) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = Own(model.parameters(), lr=0.1)
        with pytest.warns(UserWarning, match="Own is not known to treat each parameter by itself"):
            session.prepare(model, optimizer)
        backward(model)
        optimizer.step()
        assert calls == [4]

    run_alone(body)


def test_step_hooks_see_one_whole_step() -> None:
    seen: list[int] = []

    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        optimizer.register_step_post_hook(
            lambda o, *_: seen.append(
                sum(p.grad is not None for g in o.param_groups for p in g["params"])
            )
        )
        backward(model)
        optimizer.step()
        list(model.parameters())

    run_alone(body)
    assert seen == [4]


def test_closure_is_evaluated_once_with_gradients() -> None:
    def body(session: Any) -> None:
        model, optimizer = prepared(session)
        calls: list[float] = []

        def closure() -> float:
            optimizer.zero_grad()
            value = loss(model)
            value.backward()  # type: ignore[no-untyped-call]
            calls.append(value.item())
            return value.item()

        with torch.no_grad():
            assert optimizer.step(closure) == calls[0]
        assert len(calls) == 1

    run_alone(body)


def test_options_are_checked() -> None:
    core = HeldCore()
    for options, words in [
        ({"strategy": "p4"}, "unknown strategy 'p4'; known are p3, slicing"),
        ({"update": "both"}, "unknown update 'both'"),
        ({"slice_elems": 0}, "slice_elems is 0"),
        ({"ports": (9, 5)}, r"ports is \(9, 5\)"),
        ({"silence_timeout_s": 0}, "silence_timeout_s is 0"),
        ({"rank": 0}, "give both"),
        ({"rank": 2, "world_size": 2}, "rank 2 is not in a world of 2"),
    ]:
        settings: dict[str, Any] = options  # type: ignore[assignment]
        with pytest.raises(ValueError, match=words):
            open_session(core, Options.of(**keywords_of(**settings)))
