"""An accelerator that does not know of a session is named; one that does saves its models."""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from tests.training.model.ranks import run_ranks


class Accelerator:
    """What `attach` uses of Accelerate's, and how that saves models."""

    num_processes = 1
    distributed_type = "NO"

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.saves: list[Any] = []
        self.loads: list[Any] = []

    def prepare_model(self, model: nn.Module, **_: Any) -> nn.Module:
        self.models.append(model)
        return model

    def clip_grad_norm_(self, *_: Any) -> None: ...

    def unwrap_model(self, model: nn.Module) -> nn.Module:
        return model

    def register_save_state_pre_hook(self, hook: Any) -> None:
        self.saves.append(hook)

    def register_load_state_pre_hook(self, hook: Any) -> None:
        self.loads.append(hook)

    def save_state(self) -> list[Any]:
        weights = [model.state_dict() for model in self.models]
        for hook in self.saves:
            hook(self.models, weights, "folder")
        return weights

    def models_to_load(self) -> list[nn.Module]:
        models = list(self.models)
        for hook in self.loads:
            hook(models, "folder")
        return models


@pytest.fixture
def accelerate(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have Accelerate imported, with an accelerator made."""
    package, state = types.ModuleType("accelerate"), types.ModuleType("accelerate.state")
    package.Accelerator = Accelerator  # type: ignore[attr-defined]
    state.AcceleratorState = types.SimpleNamespace(_shared_state={"mode": 1})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "accelerate", package)
    monkeypatch.setitem(sys.modules, "accelerate.state", state)
    monkeypatch.delitem(sys.modules, "gradlane.integrations.accelerate", raising=False)
    yield state
    sys.modules.pop("gradlane.integrations.accelerate", None)


def prepare(session: Any) -> nn.Module:
    model = nn.Linear(2, 1)
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def test_an_accelerator_without_attach_is_named(accelerate: Any) -> None:
    def body(session: Any) -> None:
        with pytest.warns(UserWarning, match="leave out models that only session.prepare"):
            prepare(session)

    run_ranks(1, body)


def test_accelerate_without_an_accelerator_is_fine(accelerate: Any) -> None:
    accelerate.AcceleratorState._shared_state.clear()

    def body(session: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            prepare(session)

    run_ranks(1, body)


@pytest.mark.parametrize("knows_it", [False, True])
def test_an_attached_one_saves_and_loads_each_model_once(accelerate: Any, knows_it: bool) -> None:
    def body(session: Any) -> None:
        from gradlane.integrations.accelerate import attach

        accelerator: Any = Accelerator()
        attach(accelerator, session)
        model = prepare(session)
        other = nn.Linear(3, 3)
        accelerator.prepare_model(other)
        if knows_it:
            accelerator.prepare_model(model)
        saved = accelerator.save_state()
        assert [one["weight"].shape for one in saved] == [(3, 3), (1, 2)]
        assert accelerator.models_to_load() == [other, model]

    run_ranks(1, body)
