"""Fewer bits and fewer exchanges in the study: local updates, PowerSGD, their times and page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from typer.testing import CliRunner

from gradlane.cli.main import app
from gradlane.lab.runs.run import LabProgress
from gradlane.training.options.local_updates import Local
from gradlane_papers.accuracy import study
from gradlane_papers.accuracy.between import page_text
from gradlane_papers.accuracy.exchange import ALL
from gradlane_papers.accuracy.local_training import LocalWorkers
from gradlane_papers.accuracy.power_sgd import EXACT_STEPS, PowerSgdExchange
from gradlane_papers.accuracy.run import Run, parse_scheme
from gradlane_papers.accuracy.tasks import task_of
from gradlane_papers.accuracy.timing import GOODPUT_SHARE, local_steps_s
from tests.built import needs_core
from tests.training.model.ranks import run_ranks

pytestmark = needs_core

SPARSE = "topk:ratio=0.05,broadcast_ratio=0.1,bits=2,bucket=64,decay=0.95"


@pytest.mark.parametrize(
    ("local", "codec"),
    [
        (Local(steps=4), "raw"),
        (Local(steps=4, fragments=2, overlap_steps=1, mix=0.5), "raw"),
        (Local(steps=4, outer="average"), SPARSE),
    ],
)
def test_emulated_local_updates_have_the_bits_of_sessions(local: Local, codec: str) -> None:
    steps, task = 10, task_of("mlp")
    given = local.text + ("" if codec == "raw" else f" + {codec}")
    run = Run("mlp", given, ALL, 3, 2, steps)

    # Ranks are threads here, and networks draw from torch's one generator.
    models = [task.build(run.seed) for _ in range(2)]

    def body(session: Any) -> list[torch.Tensor]:
        model = models[session.rank]
        optimizer = task.make_optimizer(model)
        session.prepare(model, optimizer)
        for step in range(steps):
            optimizer.zero_grad()
            loss: Any = task.loss(model, task.batch(run.seed, session.rank, 2, step))
            loss.backward()
            optimizer.step()
        session.close()
        return [one.detach().clone() for one in model.parameters()]

    found = run_ranks(2, body, update=local, codec=codec, local="off")
    scheme = parse_scheme(given, 2)
    assert scheme.local is not None
    workers = LocalWorkers(run, scheme.local, scheme.codec)
    for _ in range(steps):
        workers.take_step()
    workers.end_round()
    for model, parameters in zip(workers.models, found, strict=True):
        for one, other in zip(model.parameters(), parameters, strict=True):
            assert torch.equal(one, other)


def test_power_sgd_is_ddps_hook(tmp_path: Path) -> None:
    """Torch's hook on one rank, and one worker that goes on from its factor and its error."""
    model = nn.Linear(40, 30, bias=False)
    exchange = PowerSgdExchange(model, 2, workers=1, seed=0)
    generator = torch.Generator().manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(model)
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=EXACT_STEPS
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for step in range(8):
            gradient = torch.randn(30, 40, generator=generator)
            wrapped.zero_grad()
            (wrapped(torch.eye(40)) * gradient.T).sum().backward()
            if state.q_memory_dict and step > EXACT_STEPS:
                (mean,) = exchange.average([[gradient]], step)
                torch.testing.assert_close(mean, model.weight.grad, rtol=1e-4, atol=1e-5)
            if state.q_memory_dict:
                ((factor,), (error,)) = state.q_memory_dict.values(), state.error_dict.values()
                exchange.factors[0] = factor.view(40, 2).clone()
                exchange.errors[0, 0] = error.view(30, 40).clone()
        assert state.q_memory_dict
    finally:
        dist.destroy_process_group()


def test_power_sgd_sends_thin_factors_and_keeps_what_they_leave() -> None:
    model = nn.Linear(200, 100)
    exchange = PowerSgdExchange(model, 4, workers=2, seed=0)
    generator = torch.Generator().manual_seed(1)
    given = [[torch.randn(100, 200, generator=generator), torch.randn(100)] for _ in range(2)]
    sent = torch.zeros(100, 200)
    for step in range(200):
        mean = exchange.average(given, step)
        sent += mean[0]
        torch.testing.assert_close(mean[1], (given[0][1] + given[1][1]) / 2)
        full = step < EXACT_STEPS
        assert exchange.push_bytes == 4 * (100 + (100 * 200 if full else 4 * (100 + 200)))
    # What a product leaves is sent later: nothing is lost for good.
    expected = (given[0][0] + given[1][0]) / 2
    assert (sent / 200 - expected).norm() < 0.3 * expected.norm()


def test_schemes_of_local_updates_and_power_sgd_are_read() -> None:
    scheme = parse_scheme("local:steps=8,outer=average + qsgd:bits=8", 4)
    assert scheme.local == Local(steps=8, outer="average") and "bits=8" in scheme.codec
    assert parse_scheme("local", 4).codec == "f32"
    assert parse_scheme("powersgd", 4).power_sgd_rank == 4
    for text, words in (
        ("local:steps=0", "steps"), ("local:depth=2", "no option"), ("local + zip", "no codec"),
        ("powersgd:rank=0", "rank"), ("powersgd:columns=2", "rank"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            parse_scheme(text, 4)


def test_a_step_waits_for_an_exchange_that_is_not_over_in_time() -> None:
    compute_s = task_of("mlp").compute_s
    # With two workers half of these bytes leave a port, in three steps' time.
    sent = round(2 * 3 * compute_s * GOODPUT_SHARE * 1e8 / 8)
    at_once = local_steps_s("mlp", [0, sent, 0], [False, True, False], 1e8, 2)
    assert at_once == pytest.approx([compute_s, 4 * compute_s, compute_s], rel=1e-4)
    later = local_steps_s("mlp", [sent, 0, 0, 0], [False, False, True, False], 1e8, 2)
    assert later == pytest.approx([compute_s, compute_s, 2 * compute_s, compute_s], rel=1e-4)
    hidden = local_steps_s("mlp", [sent] + 5 * [0], 4 * [False] + [True, False], 1e8, 2)
    assert hidden == pytest.approx(6 * [compute_s])
    last = local_steps_s("mlp", [sent, sent], [False, True], 1e8, 2)
    assert sum(last) == pytest.approx(7 * compute_s, rel=1e-4)


def test_the_comparison_has_its_runs_and_its_page() -> None:
    runs = study.between_runs(quick=False)
    assert {run.seed for run in runs} == set(range(5)) and {run.task for run in runs} == {
        "language"
    }
    sparse = [run.scheme for run in runs if "bits=2" in run.scheme]
    assert len(sparse) == 10 and all("broadcast_ratio=0.08" in scheme for scheme in sparse)
    chosen = ("p3", "qsgd:bits=8", "local:steps=8,outer=average")
    rows = [
        study.make_run(replace(run, task="mlp", steps=16), LabProgress())
        for run in runs
        if run.seed == 0 and run.scheme in chosen
    ]
    assert [row.wire_ratio for row in rows] == [1.0, pytest.approx(3.9, abs=0.1), 8.0]
    text = page_text(rows, "gradlane lab accuracy --between")
    assert all(f"`{scheme}`" in text for scheme in chosen) and "{" not in text
    given = ["lab", "accuracy", "--between", "--scheme", "p3"]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, ValueError) and "leave out --scheme" in str(done.exception)
