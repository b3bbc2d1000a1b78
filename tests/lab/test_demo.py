"""The demonstration: what it runs, and what it says in words."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gradlane.lab.runs import demo
from gradlane.lab.runs.options import LabOptions
from gradlane.lab.runs.rows import Row
from tests.documents.command_check import refusal_of
from tests.lab.fake_runs import fake_row

TIMES_S = {"none": 0.3, "ddp-gloo:25": 0.5, "ddp-gloo:1": 0.6, "p3": 0.35}


def rows_of(options: LabOptions, **times_s: float) -> list[Row]:
    """Return a row for each strategy of a part."""
    step_s = {**TIMES_S, **{name.replace("_", "-"): time_s for name, time_s in times_s.items()}}
    return [
        fake_row(options, one.text, step_s=step_s.get(one.text, step_s.get(one.family)))
        for one in options.strategies
    ]


def test_without_a_choice_both_parts_run() -> None:
    assert demo.parts_of(None, None) == (demo.REAL, demo.REPLAY)


def test_a_workload_gets_the_rate_at_which_its_bytes_take_as_long_as_its_compute() -> None:
    (part,) = demo.parts_of("resnet50", None)
    assert part.rates_bps[0] == pytest.approx(demo.REPLAY.rates_bps[0], rel=0.05)
    assert part.rates_bps[0] / part.dilation == 400_000_000
    (part,) = demo.parts_of("gpt2_small", 1_000_000_000)
    assert (part.workload, part.rates_bps, part.dilation) == ("gpt2_small", [10**9], 2.5)
    assert [one.text for one in part.strategies] == [one.text for one in demo.REPLAY.strategies]
    (part,) = demo.parts_of(None, 100_000_000)
    assert (part.workload, part.dilation) == ("resnet50", 1.0)
    (part,) = demo.parts_of("char-transformer", None)
    assert part == demo.REAL


@pytest.mark.parametrize("workload", ["resnet5", "llama_1b"])
def test_a_workload_that_cannot_run_is_refused_by_name(workload: str) -> None:
    with pytest.raises(ValueError, match=workload):
        demo.parts_of(workload, None)


@pytest.mark.parametrize(
    ("times_s", "bound_s", "words"),
    [
        ({}, 0.34, "computes 300.0 ms. DDP waits 200.0 ms more for gradients; gradlane hides 75%"),
        ({"p3": 0.52}, 0.34, "gradlane hides nothing of that here."),
        ({"ddp_gloo:25": 0.31}, 0.3, "nothing to gain here, stay with DDP"),
        ({"ddp_gloo:25": 2.0, "p3": 1.9}, 1.8, "hides 6%"),
        ({"ddp_gloo:25": 2.0, "p3": 1.9}, 1.8, "less than 1.800 s: fewer bytes would"),
    ],
)
def test_rows_are_said_in_words(times_s: dict[str, float], bound_s: float, words: str) -> None:
    rows = [replace(row, bound_step_s=bound_s) for row in rows_of(demo.REPLAY, **times_s)]
    assert words in demo.in_words(rows)


def test_the_demo_ends_with_commands_for_the_users_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_lab(options: LabOptions, *, progress: Any, on_rows: Callable[[list[Row]], None]) -> Any:
        return rows_of(options)

    monkeypatch.setattr(demo, "run_lab", run_lab)
    monkeypatch.setattr(demo, "print_tables", lambda console, rows: None)
    printed = io.StringIO()
    console = Console(file=printed, width=200)
    demo.run_demo(console, json_path=tmp_path / "rows.json", html_path=None)
    text = printed.getvalue()
    assert text.count("In words: a step computes") == 2
    end = text[text.index("Next, for your own script:") :]
    for command, question in demo.NEXT_COMMANDS:
        assert f"  {command}\n    {question}\n" in end
        assert refusal_of(command) is None
    assert len(demo.NEXT_COMMANDS) == 3
    assert (tmp_path / "rows.json").is_file()
