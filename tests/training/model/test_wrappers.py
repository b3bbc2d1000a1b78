"""The examples run, and learn what the same program learns with torch's own DDP.

At two ranks the two sum in the same order, so that it is the same bit for bit; but for those that
clip: torch rounds the norm of all gradients several times, gradlane once. One whose framework
is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import gradlane
from tests.built import needs_core
from tests.forked_programs import ForkedPrograms
from tests.paths import ROOT
from tests.ports import reserve_port

pytestmark = needs_core


def learned(programs: ForkedPrograms, folder: Path, example: str, engine: str) -> list[str]:
    """Run an example on two ranks, as torchrun starts them; returns what each has learned."""
    common = {
        **{"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(reserve_port())},
    }
    environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    path = str(ROOT / "examples" / example)
    printed = programs.run_all(folder, path, ["--engine", engine], environments, timeout_s=250)
    lines = [line for output in printed for line in output.splitlines()]
    return [line for line in lines if line.startswith("learned")]


@pytest.mark.parametrize(
    ("example", "needs", "clips"),
    [
        ("plain_loop.py", "torch", False),
        ("accelerate_loop.py", "accelerate", True),
        ("transformers_trainer.py", "transformers", True),
        ("lightning_module.py", "lightning", True),
    ],
)
def test_examples_learn_what_ddp_learns(
    programs: ForkedPrograms, tmp_path: Path, example: str, needs: str, clips: bool
) -> None:
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed")
    ours = learned(programs, tmp_path, example, "gradlane")
    assert len(ours) == 2
    assert len(set(ours)) == 1
    theirs = set(learned(programs, tmp_path, example, "ddp"))
    if clips:
        assert {line.split()[-1] for line in ours} == {line.split()[-1] for line in theirs}
    else:
        assert set(ours) == theirs


def test_an_accelerator_of_several_processes_is_refused_with_going_on() -> None:
    pytest.importorskip("accelerate")
    attach = importlib.import_module("gradlane.integrations.accelerate").attach
    with pytest.raises(ValueError, match="with going_on: random states, losses and counts"):
        attach(SimpleNamespace(num_processes=2), SimpleNamespace(goes_on=True))


@pytest.mark.parametrize("going_on", [True, gradlane.GoingOn(min_ranks=2)])
def test_lightnings_strategy_is_refused_with_going_on(going_on: Any) -> None:
    pytest.importorskip("lightning")
    strategy = importlib.import_module("gradlane.integrations.lightning").GradlaneStrategy
    with pytest.raises(
        ValueError, match="GradlaneStrategy with going_on: Lightning's barriers and metrics"
    ):
        strategy(options={"going_on": going_on})


@pytest.mark.parametrize(
    ("optimizers", "words"),
    [(2, "it prepares the module with its one optimizer"), (1, "it takes the steps of automatic")],
)
def test_modules_that_lightnings_strategy_does_not_step_are_refused(
    optimizers: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    module = importlib.import_module("gradlane.integrations.lightning")
    base = module.GradlaneStrategy.__mro__[1]
    monkeypatch.setattr(base, "setup", lambda *_: None)
    strategy = module.GradlaneStrategy()
    strategy.optimizers = [object()] * optimizers
    manual = SimpleNamespace(automatic_optimization=False)
    monkeypatch.setattr(module.GradlaneStrategy, "lightning_module", manual)
    fitting = SimpleNamespace(state=SimpleNamespace(fn=module.TrainerFn.FITTING))
    with pytest.raises(ValueError, match=words):
        strategy.setup(fitting)


def test_wrappers_that_shard_models_are_refused() -> None:
    pytest.importorskip("accelerate")
    attach = importlib.import_module("gradlane.integrations.accelerate").attach
    sharding = SimpleNamespace(num_processes=1, distributed_type="DistributedType.FSDP")
    with pytest.raises(ValueError, match=r"FSDP.*: gradlane keeps whole parameters on every rank"):
        attach(sharding, SimpleNamespace(goes_on=False))
    pytest.importorskip("transformers")
    attach = importlib.import_module("gradlane.integrations.transformers").attach
    trainer = SimpleNamespace(is_fsdp_enabled=False, is_deepspeed_enabled=True)
    with pytest.raises(ValueError, match=r"DeepSpeed.*: gradlane keeps whole parameters"):
        attach(trainer, None)
