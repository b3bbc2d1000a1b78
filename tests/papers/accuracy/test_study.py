"""The accuracy study: emulated workers, its rows, what is said of them, and going on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from gradlane.cli.main import app
from gradlane_papers.accuracy import findings, study
from gradlane_papers.accuracy.curve import evaluation_steps
from gradlane_papers.accuracy.exchange import ALL, EmulatedExchange
from gradlane_papers.accuracy.markdown import (
    bytes_in_words,
    losses_in_words,
    main_table,
    page_text,
    points,
)
from gradlane_papers.accuracy.run import Run, parse_scheme
from gradlane_papers.accuracy.tasks import CIFAR10, TASKS, task_of
from gradlane_papers.accuracy.timing import step_s, timings
from gradlane_papers.accuracy.training import train
from tests.built import needs_core

pytestmark = needs_core


def gradients(model: nn.Module, workers: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        [torch.randn(one.shape, generator=generator) for one in model.parameters()]
        for _ in range(workers)
    ]


def test_full_precision_is_the_mean_in_rank_order() -> None:
    model = nn.Linear(300, 200)
    given = gradients(model, 3)
    exchange = EmulatedExchange(model, "f32", workers=3, seed=0)
    for number, mean in enumerate(exchange.average(given, 0)):
        expected = (given[0][number] + given[1][number] + given[2][number]) / 3
        assert torch.equal(mean, expected)
    assert exchange.push_bytes == exchange.broadcast_bytes == 4 * 60_200


def test_residuals_of_workers_and_owner_keep_everything() -> None:
    model = nn.Linear(300, 200, bias=False)
    exchange = EmulatedExchange(model, "topk:ratio=0.01", workers=2, seed=0, small_elems=0)
    sent = torch.zeros(200, 300)
    for step in range(5):
        sent += exchange.average(gradients(model, 2), step)[0]
    one, other = gradients(model, 2)
    given = 5 * (one[0] + other[0]) / 2
    slices = exchange.slices[0]
    assert [part.numel for part in slices] == [50_000, 10_000], "as the engine cuts"
    kept = torch.cat([(part.worker[0] + part.worker[1]) / 2 for part in slices])
    owned = torch.cat([part.owner for part in slices if part.owner is not None])
    torch.testing.assert_close(sent.flatten() + kept + owned, given.flatten(), rtol=0, atol=1e-4)


def test_only_convolutions_are_encoded_where_asked() -> None:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.Flatten(), nn.Linear(64, 500))
    exchange = EmulatedExchange(
        model, "qsgd:bits=8", workers=2, seed=0, layers="convolutions", small_elems=0
    )
    names = [slices[0].codec.name for slices in exchange.slices]
    assert names == ["qsgd", "f32", "f32", "f32"]


def test_schemes_are_read_and_wrong_ones_refused() -> None:
    assert parse_scheme("p3", 4).codec == "f32"
    scheme = parse_scheme("asgd:order=random,lr=mean", 4)
    assert (scheme.is_asynchronous, scheme.order, scheme.lr_share) == (True, "random", 0.25)
    dgc = parse_scheme("dgc:ratio=0.01", 4)
    assert "momentum=0.9" in dgc.codec_for("sgd", 80, 0.9)
    assert "momentum=0.8" in dgc.codec_for("sgd", 80, 0.8)
    assert "warmup=20" in dgc.codec_for("sgd", 80, 0.9)
    assert "momentum=0," in dgc.codec_for("adamw", 80, 0.9)
    for text in ("asgd:order=worst", "zip", "qsgd:bits=3"):
        with pytest.raises(ValueError, match=r"asgd|no codec|bits"):
            parse_scheme(text, 4)


def test_tasks_take_other_hyperparameters_by_name() -> None:
    task = task_of("resnet/lr=0.1/momentum=0.8")
    assert (task.lr, task.momentum, task.name) == (0.1, 0.8, "resnet/lr=0.1/momentum=0.8")
    assert task_of("resnet") == TASKS["resnet"]
    for text, words in (
        ("chess", "no task 'chess'"),
        ("resnet/rate=1", "'rate=1' is no setting"),
        ("resnet/lr=fast", "'lr=fast' is no setting"),
        ("resnet/lr=0", "'lr=0' is no setting"),
        ("transformer/momentum=0.5", "adamw has no momentum"),
    ):
        with pytest.raises(ValueError, match=words):
            task_of(text)


def test_the_papers_runs_have_several_settings_and_real_processes() -> None:
    runs = study.paper_runs(2)
    assert len(runs) == len(set(runs))
    assert len({run.task for run in runs if run.scheme == study.PAPERS_DGC}) == 5
    # As many samples on every number of workers.
    assert {run.workers * run.steps for run in runs} == {1760}
    assert {run.seed for run in runs if "order=real" in run.scheme} == {0, 1}
    # Servers apply gradients as they come.
    with pytest.raises(ValueError, match="task lstm clips gradients"):
        study.runs_of(quick=True, tasks=["lstm"], schemes=["asgd:order=real"])


def test_asynchronous_processes_learn_and_say_how_old_gradients_were() -> None:
    """Real processes over loopback, with a worker's share of the learning rate."""
    steps: list[int] = []
    curve = train(Run("mlp", "asgd:order=real,lr=mean", ALL, 0, 2, 66), steps.append)
    assert sum(steps) == 66 and curve.evaluated == evaluation_steps(66)
    # How old gradients are, and so how much is learned, is for the processes' timing to say.
    assert curve.accuracy[-1] > 0.4 > curve.accuracy[0]
    assert curve.stale is not None and 0.0 < curve.stale < 66.0
    assert len(curve.wire_bytes) == 66


def test_a_quick_study_of_all_schemes_has_those_of_the_full_one() -> None:
    full = study.runs_of(quick=False, seeds=2)
    quick = study.runs_of(quick=True, schemes=["all"], seeds=2)
    assert [(run.task, run.scheme, run.layers, run.seed) for run in quick] == [
        (run.task, run.scheme, run.layers, run.seed) for run in full
    ]
    assert {run.steps for run in quick} == {TASKS[run.task].quick_steps for run in full}
    with pytest.raises(ValueError, match="all"):
        study.runs_of(quick=True, schemes=["all", "p3"])


@pytest.mark.parametrize("task", [name for name in TASKS if name != CIFAR10])
def test_networks_have_the_parameters_that_they_say(task: str) -> None:
    model = TASKS[task].build(0)
    sizes = [one.numel() for one in model.parameters()]
    assert f"{sum(sizes):,} parameters" in (type(model).__doc__ or "")
    assert sum(timing.numel for timing in timings(task)) == sum(sizes)
    inputs, targets = TASKS[task].batch(0, 1, 4, 3)
    again, _ = TASKS[task].batch(0, 1, 4, 3)
    other, _ = TASKS[task].batch(0, 2, 4, 3)
    assert torch.equal(inputs, again) and not torch.equal(inputs, other)
    assert model(inputs).flatten(0, -2).shape[0] == targets.numel()


def test_steps_take_the_bound_for_the_bytes_sent() -> None:
    plain_bytes = 2 * sum(timing.size_bytes for timing in timings("mlp"))
    slow = step_s("mlp", plain_bytes, 1e8, 4)
    assert slow == pytest.approx(8 * 0.75 * plain_bytes / 0.956e8, rel=0.05)
    assert step_s("mlp", plain_bytes // 4, 1e8, 4) == pytest.approx(slow / 4, rel=0.1)
    assert step_s("mlp", plain_bytes, 1e12, 4) == pytest.approx(TASKS["mlp"].compute_s, rel=0.01)


@pytest.mark.parametrize("text", ["p3", "asgd:lr=mean", "onebit"])
def test_training_learns_and_repeats_bit_for_bit(text: str) -> None:
    curves = [train(Run("mlp", text, ALL, 1, 2, 24)) for _ in range(2)]
    assert curves[0] == curves[1]
    assert curves[0].evaluated == evaluation_steps(24) and len(curves[0].wire_bytes) == 24
    assert curves[0].loss[-1] < curves[0].loss[0] - 0.2


def row(scheme: str, seed: int, accuracy: list[float], step_time_s: float) -> study.Result:
    evaluated = [0, 10, 20]
    content: dict[str, Any] = {
        **{"task": "mlp", "scheme": scheme, "layers": "all", "seed": seed},
        **{"workers": 4, "steps": 20, "codec": scheme, "parameters": 10, "compute_s": 0.1},
        **{"wire_bytes_per_step": 8.0, "wire_ratio": 1.0, "evaluated": evaluated},
        **{"final_loss": 1.0, "final_accuracy": accuracy[-1], "diverged": False, "cpu_s": 0.0},
        "loss": [2.0, 1.5, 1.0],
        "accuracy": accuracy,
        "time_s": {str(rate): [step_time_s * n for n in evaluated] for rate in study.RATES_BPS},
    }
    return study.Result(**content)


def test_findings_compare_seed_with_seed_and_time_with_time() -> None:
    rows = [row("p3", seed, [0.1, 0.5, 0.9 + seed / 100], 1.0) for seed in range(3)]
    rows += [row("fast", seed, [0.1, 0.5, 0.9 + seed / 100], 0.25) for seed in range(3)]
    rows += [row("lossy", seed, [0.1, 0.4, 0.8 + seed / 100], 0.25) for seed in range(3)]
    full, fast = (findings.select(rows, scheme=name) for name in ("p3", "fast"))
    assert findings.difference(fast, full).mean == 0.0
    assert points(findings.difference(fast, full)) == "+0.0 ± 0.0 (noise)"
    assert points(findings.difference(fast[:1], full[:1])) == "+0.0 (one seed)"
    alone = [row for row in rows if row.seed == rows[0].seed]
    for text in (page_text(alone, "made"), json.dumps(main_table(alone, "mlp").rows)):
        assert "±" not in text and "noise" not in text
    assert "±" in page_text(rows, "made") and "One seed" in page_text(alone, "made")
    assert [(task, scheme) for task, scheme, _ in findings.loses(rows)] == [("mlp", "lossy")]
    assert "lossy" in losses_in_words(rows) and "-10.0" in losses_in_words(rows)
    # A quarter of p3's 20 s: it has taken 5 steps, the fast one all 20.
    assert findings.equal_time_s(rows, "mlp", study.RATES_BPS[0]) == 5.0
    assert findings.accuracy_at(rows[0], study.RATES_BPS[0], 5.0) == pytest.approx(0.3)
    assert findings.accuracy_at(rows[3], study.RATES_BPS[0], 5.0) == pytest.approx(0.9)
    goal = findings.target(rows, "mlp")
    assert goal == pytest.approx(0.89)
    assert findings.speedup_to(fast, full, study.RATES_BPS[0], 0.89) == pytest.approx(4.0)
    lossy = findings.select(rows, scheme="lossy")
    assert findings.speedup_to(lossy, full, study.RATES_BPS[0], 0.89) is None
    table = main_table(rows, "mlp")
    assert [line[0] for line in table.rows] == ["p3", "fast", "lossy"]
    assert "made by me" in page_text(rows, "made by me")
    assert bytes_in_words(rows) == ""
    rows.append(replace(row("fast", 0, [0.1, 0.5, 0.9], 0.25), task="lstm", wire_ratio=9.0))
    assert "saves few bytes on mlp: 1.0 times fewer, where lstm has 9.0" in bytes_in_words(rows)


def test_the_command_goes_on_where_it_stopped(tmp_path: Path) -> None:
    arguments = ["lab", "accuracy", "--quick", "--task", "mlp", "--seeds", "1", "--workers", "2"]
    arguments += ["--scheme", "p3", "--scheme", "qsgd:bits=8", "--output", str(tmp_path / "study")]
    first = CliRunner().invoke(app, [*arguments, "--budget-s", "0.001"])
    assert first.exit_code == 0, first.output
    assert "1 of 2 runs is missing" in first.output
    page = tmp_path / "accuracy.md"
    summary = tmp_path / "trained.json"
    arguments += ["--summary", str(summary)]
    second = CliRunner().invoke(app, [*arguments, "--markdown", str(page)])
    assert second.exit_code == 0, second.output
    rows = json.loads((tmp_path / "study" / "results.json").read_text())
    assert [one["scheme"] for one in rows] == ["p3", "qsgd:bits=8"]
    assert rows[0]["final_accuracy"] > 0.8
    told = json.loads(summary.read_text())["rows"]
    assert [one["scheme"] for one in told] == ["p3", "qsgd:bits=8"]
    for one, made in zip(told, rows, strict=True):
        assert one["accuracy"][0][-1] == pytest.approx(made["final_accuracy"], abs=1e-4)
    assert "qsgd:bits=8" in page.read_text() and (tmp_path / "study" / "results.csv").exists()
    html = (tmp_path / "study" / "report.html").read_text(encoding="utf-8")
    assert "Accuracy against time at 100 Mbit/s" in html
    results = str(tmp_path / "study" / "results.json")
    again = CliRunner().invoke(app, ["report", results, "--html", str(tmp_path / "again.html")])
    assert again.exit_code == 0 and "Accuracy against time" in (tmp_path / "again.html").read_text()
    both = CliRunner().invoke(app, ["lab", "accuracy", "--papers", "--quick"])
    assert isinstance(both.exception, ValueError) and "--papers names" in str(both.exception)
    wrong = CliRunner().invoke(app, ["lab", "accuracy", "--task", "chess"])
    assert isinstance(wrong.exception, ValueError) and "chess" in str(wrong.exception)
