"""The command lines of every page are what their programs take, and the cheap ones run."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from gradlane.training.monitoring.summary import LateRank, summary_line
from tests.command_line import run
from tests.documents.blocks import LANGUAGES, PAGES, all_blocks, blocks_of, shell_lines, spans_of
from tests.documents.command_check import refusal_of
from tests.paths import ROOT

LINES = [(block.place, line) for block in all_blocks("sh") for line in shell_lines(block)]
SPANS = sorted(
    {(page.relative_to(ROOT).as_posix(), span) for page in PAGES for span in spans_of(page)}
)


def test_there_are_lines_and_spans() -> None:
    assert len(LINES) > 50 and len(SPANS) > 50


@pytest.mark.parametrize(("place", "line"), LINES)
def test_a_line_is_taken_by_its_program(place: str, line: str) -> None:
    assert (found := refusal_of(line)) is None, f"{place}: {line}: {found}"


def test_blocks_are_shell() -> None:
    if (bash := shutil.which("bash")) is None:
        pytest.skip("needs bash")
    for block in all_blocks("sh"):
        text = block.text.replace("…", "...")
        done = subprocess.run([bash, "-n"], input=text, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"


def test_commands_within_sentences_are_taken() -> None:
    found = [(page, span, refusal_of(span)) for page, span in SPANS]
    # A sentence may leave out what follows, such as the script.
    wrong = [one for one in found if one[2] and not re.search("required|expected one", one[2])]
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("gradlane lab nothing", "no command 'nothing'"),
        ("gradlane lab run --wokload resnet50", "--wokload"),
        ("gradlane lab run --workers two", "valid integer"),
        ("gradlane version now", "extra argument"),
        ("make dmo", "Makefile has no target dmo"),
        ("make test SEEDS=1", "SEEDS"),
        ("torchrun --nnode-count 4 train.py", "--nnode-count"),
        ("torchrun --nproc-per-node 2 examples/plain.py", "no examples/plain.py"),
        ("torchrun --nnodes 4 -m gradlane prob", "no command 'prob'"),
        ("python benchmarks/resume_loss.py --sed 7", "--sed"),
        ("python -m gradlane.options > a.md", "no module gradlane.options"),
        ("pip install 'gradlane[labs]'", "no extra labs"),
        ("cargo test -p gradlane-nets", "no package gradlane-nets"),
        ("gradlane doctor && make dmo", "Makefile has no target dmo"),
        ("nano README.md", "nano is not known"),
    ],
)
def test_wrong_lines_are_found(line: str, words: str) -> None:
    assert words in (refusal_of(line) or "")


def test_questions_about_a_profile_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page of the format has the profile; it is small, so these lines are cheap to run."""
    (profile,) = [block.text for block in all_blocks("json") if "gradlane-profile" in block.text]
    (tmp_path / "profile.json").write_text(profile)
    monkeypatch.chdir(tmp_path)
    asked = [line for _, line in LINES if re.match(r"gradlane (whatif|plan) profile\.json", line)]
    assert len(asked) >= 5
    for line in asked:
        words = shlex.split(line)
        status, _, errors = run(monkeypatch, capsys, *words[1:])
        assert status == 0, f"{line}: {errors}"
        for option, path in pairwise(words):
            assert option not in ("--json", "--html") or Path(path).is_file(), line


def test_every_block_has_a_language_that_is_tested() -> None:
    """`text` is what a program prints, or a drawing."""
    blocks = [block for page in PAGES for block in blocks_of(page)]
    assert not [one.place for one in blocks if one.language not in LANGUAGES]


def test_the_line_at_the_end_is_as_printed() -> None:
    wait = {"name": "layers.0", "wait_s": 18.3, "whole_step_s": 0.0}
    wait |= {"wait_s_max": 0.31, "max_step": 88, "wait_share": 0.61}
    steps = {"median_s": 0.213, "mean_s": 0.21, "wait_share": 0.12}
    metrics: Any = {
        "step": 1200,
        "world_size": 4,
        "steps": steps,
        "left_out": [],
        "lost": [],
        "joined": [],
        "clip_steps": 0,
    }
    metrics["layer_waits"] = [wait]
    line = f"gradlane: {summary_line(metrics, [LateRank(2, 0.71, 0.0041)])}"
    printed = [block for block in all_blocks("text") if block.text.startswith("gradlane: ")]
    assert len(printed) >= 2
    for block in printed:
        assert " ".join(block.text.split()) == line, block.place
