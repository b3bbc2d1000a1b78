"""Scripts that know nothing of the profiler: their model is found, their steps are recorded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

import gradlane
from gradlane.cli import main as cli
from gradlane.formats.profile import Profile, ProfileError
from gradlane.planning.profiler.options import RecordingOptions
from gradlane.planning.profiler.script import LAUNCHER_VARIABLES, RecordedScript, run_script
from tests.built import needs_core
from tests.paths import ROOT

PLAIN = """
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)
    def forward(self, values, *, scale):
        return self.second(self.first(values).relu()) * scale
def main():
    model, loss = Net(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        loss(model(torch.ones(5, 6), scale=2.0), torch.zeros(5).long()).backward()
        optimizer.step()
    print("trained to the end")
if __name__ == "__main__":
    main()
"""


def record(tmp_path: Path, text: str, *arguments: str, **options: Any) -> RecordedScript:
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    settings: dict[str, Any] = {"steps": 4, "warmup": 2, **options}
    more = {name: settings.pop(name) for name in ("is_module", "on_step") if name in settings}
    return run_script(str(script), arguments, RecordingOptions(**settings), **more)


def run_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[Any, str, str]:
    monkeypatch.setattr(sys, "argv", ["gradlane", *arguments])
    status: Any = 0
    try:
        cli.main()
    except SystemExit as ended:
        status = ended.code
    output = capsys.readouterr()
    return status, " ".join(output.out.split()), " ".join(output.err.split())


def test_a_plain_script_is_recorded_and_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told: list[int] = []
    before = sys.argv, sys.path
    found = record(tmp_path, PLAIN, "1000000", on_step=told.append)
    assert (sys.argv, sys.path) == before
    assert told == [1, 2, 3, 4]
    assert "trained" not in capsys.readouterr().out
    profile = found.recorder.profile(found.name)
    assert (profile.model, profile.batch_size) == ("Net", 5)
    names = ["first.weight", "first.bias", "second.weight", "second.bias"]
    assert [tensor.name for tensor in profile.tensors] == names
    assert {module.name for module in profile.modules} == {"", "first", "second"}
    assert found.notes == []
    # One step's calls were kept, with what they were called with.
    ((module, arguments, keywords),) = found.calls
    assert module is found.model and arguments[0].shape == (5, 6) and keywords == {"scale": 2.0}
    # Nothing global is left.
    assert not torch_module._global_forward_hooks and not torch_module._global_forward_pre_hooks
    assert _foreign_hooks() == []


def _foreign_hooks() -> list[Any]:
    """Hooks on all optimizers, but for those that sessions of other tests in this process left."""
    hooks = torch_optimizer._global_optimizer_post_hooks.values()
    return [one for one in hooks if one.__module__ != "gradlane.training.model.other_optimizers"]


def test_a_script_may_go_on_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = record(tmp_path, PLAIN, "20", run_to_end=True)
    assert found.recorder.recorded_steps == 4
    assert "trained to the end" in capsys.readouterr().out
    found = record(tmp_path, PLAIN, "5")
    assert found.recorder.recorded_steps == 3


def test_accumulation_closures_and_evaluation(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    def closure():
        optimizer.zero_grad()
        for part in range(3):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
        return loss
    optimizer.step(closure)
    if step == 4:
        model.eval()
        with torch.no_grad():
            model(torch.ones(9, 4))
        model.train()
""",
    )
    profile = found.recorder.profile(found.name)
    assert profile.batch_size == 6
    assert [tensor.gradients for tensor in profile.tensors] == [3] * 4
    assert profile.batch is not None and profile.batch.steps == 3


def test_sparse_gradients_are_noted(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        """
import torch
from torch import nn
model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.tensor([1, 2, 2])).sum().backward()
    optimizer.step()
""",
    )
    assert "sparse gradients travel as rows" in found.notes[-1] and "0.weight" in found.notes[-1]
    profile = found.recorder.profile(found.name)
    assert [(one.rows, one.sparse_rows) for one in profile.tensors[:2]] == [(None, 2), (3, None)]


def test_several_models_and_optimizers_are_one_profile(tmp_path: Path) -> None:
    found = record(
        tmp_path,
        """
import torch
from torch import nn
maker, judge = nn.Sequential(nn.Linear(2, 4)), nn.Linear(4, 1)
loose = nn.Parameter(torch.ones(4))
of_judge = torch.optim.SGD(judge.parameters(), lr=0.1)
of_maker = torch.optim.SGD([*maker.parameters(), loose], lr=0.1)
while True:
    of_judge.zero_grad()
    judge(maker(torch.ones(3, 2)).detach() * loose.detach()).sum().backward()
    of_judge.step()
    of_maker.zero_grad()
    judge(maker(torch.ones(3, 2)) * loose).sum().backward()
    of_maker.step()
""",
    )
    assert found.name == "Sequential+Linear"
    notes = " | ".join(found.notes)
    assert "1 of the optimizer's 5 parameters" in notes
    assert "2 optimizers" in notes and "2 models" in notes
    profile = found.recorder.profile(found.name)
    assert [tensor.name for tensor in profile.tensors] == [
        "Sequential0.0.weight",
        "Sequential0.0.bias",
        "Linear1.weight",
        "Linear1.bias",
    ]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("print('no training')", "took no two steps"),
        (PLAIN.replace("int(sys.argv[1])", "1"), "1 optimizer took one step"),
        (PLAIN.replace("int(sys.argv[1])", "2"), "ended after 2 steps"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        (
            "import torch\n"
            "weight = torch.ones(2, requires_grad=True)\n"
            "optimizer = torch.optim.SGD([weight], lr=0.1)\n"
            "for step in range(9):\n"
            "    weight.sum().backward()\n"
            "    optimizer.step()\n",
            "no module that the script calls",
        ),
    ],
)
def test_unseen_parts_of_a_script_are_noted(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(ProfileError, match=named):
        record(tmp_path, text, "9")
    assert _foreign_hooks() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="it takes all CUDA devices, the script none")
def test_a_wrapper_for_data_parallelism_is_looked_into(tmp_path: Path) -> None:
    text = PLAIN.replace("model, loss = Net(),", "model, loss = nn.DataParallel(Net()),")
    found = record(tmp_path, text, "100")
    assert found.name == "Net"
    assert next(iter(found.recorder.profile("x").tensors)).name == "first.weight"


def test_arguments_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="no script"):
        run_script("no such file.py", [], RecordingOptions(steps=1, warmup=2))
    with pytest.raises(ValueError, match="steps is 0"):
        record(tmp_path, PLAIN, steps=0)
    with pytest.raises(ValueError, match="warmup is 1"):
        record(tmp_path, PLAIN, warmup=1)


def test_the_command_writes_a_profile_that_whatif_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, path = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(PLAIN, encoding="utf-8")
    settings = ["--steps", "3", "--warmup", "2", "--json", str(path)]
    status, out, _ = run_command(monkeypatch, capsys, "profile", *settings, str(script), "50")
    assert status == 0
    assert "Net: 0.0 MB of gradients in 4 tensors, 5 samples a step, on cpu" in out
    assert "3 steps" in out
    profile = Profile.load(path)
    assert profile.flops == 2 * 5 * (6 * 8 + 8 * 3)
    rows = tmp_path / "rows.json"
    status, out, _ = run_command(
        monkeypatch, capsys, "whatif", str(path), "--workers", "2", "--json", str(rows)
    )
    assert status == 0 and "Net" in out
    assert len(json.loads(rows.read_text())["rows"]) > 0
    # Of several ranks, the first one writes.
    for rank, batch_time_s in (("1", "0.5"), ("0", "0.25"), ("1", "0.5")):
        monkeypatch.setenv("RANK", rank)
        status, out, _ = run_command(
            monkeypatch,
            capsys,
            "profile",
            "--batch-time-s",
            batch_time_s,
            *settings,
            str(script),
            "50",
        )
        assert status == 0 and ("synthetic" in out) is (rank == "0")
    assert Profile.load(path).compute_s == 0.25


def test_the_command_fails_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run_command(monkeypatch, capsys, "profile", "none.py")
    assert status == 2 and "there is no script 'none.py'" in err
    script = tmp_path / "fails.py"
    script.write_text("raise RuntimeError('my own mistake')", encoding="utf-8")
    status, _, err = run_command(
        monkeypatch, capsys, "profile", "--json", str(tmp_path / "x.json"), str(script)
    )
    assert status == 2 and "fails.py failed: RuntimeError: my own mistake" in err
    assert "Traceback" in err


@needs_core
def test_the_refusal_of_a_prepared_model_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Though the session has failed with the optimizer's step, and says so."""
    text = PLAIN.replace("import sys", "import sys\nimport gradlane").replace(
        "    for step in", "    gradlane.init().prepare(model, optimizer)\n    for step in"
    )
    script = tmp_path / "train.py"
    script.write_text(text, encoding="utf-8")
    status, _, err = run_command(monkeypatch, capsys, "profile", str(script), "50")
    assert status == 2 and "SessionFailedError" not in err and "Traceback" not in err
    assert err.splitlines()[-1].startswith("gradlane: the script prepares its model with gradlane")


def profile_of_ddp(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Profile a script with DDP around its model, without a launcher's variables."""
    text = text.replace(
        "model, loss = Net()", "model, loss = nn.parallel.DistributedDataParallel(Net())"
    )
    (folder / "train.py").write_text(text, encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES
    }
    done = subprocess.run(
        [sys.executable, "-m", "gradlane", "profile", "--steps", "3", "train.py", "50"],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_a_script_that_leaves_by_a_hard_exit_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its forked child ends alone; the script's own exit ends neither recording nor command."""
    monkeypatch.chdir(tmp_path)
    child = "import os\nif not (pid := os.fork()):\n    os._exit(3)\n"
    Path("train.py").write_text(
        f"{PLAIN}    {child.replace(chr(10), chr(10) + '    ')}"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\n    os._exit(0)\n"
    )
    leave = os._exit
    status, out, _ = run_command(monkeypatch, capsys, "profile", "train.py", "12")
    assert status == 0 and os._exit is leave
    assert "times are of 7 steps in place of" in out and "the script ended after 7" in out
    assert Profile.load(Path("profile.json")).batch is not None


@pytest.mark.parametrize(
    "reads",
    [
        "os.environ['LOCAL_RANK']",
        "os.environ['LOCAL_WORLD_SIZE'] and 0",
    ],
)
def test_a_script_for_a_launcher_runs_as_the_only_rank(reads: str, tmp_path: Path) -> None:
    begin = "    os.environ.setdefault('MASTER_PORT', '0')\n    os.chdir('/')\n"
    begin += f"    print('rank', {reads})\n    dist.init_process_group('gloo')\n"
    text = PLAIN.replace("import sys, torch", "import os, sys, torch, torch.distributed as dist")
    text = text.replace("def main():\n", f"def main():\n{begin}")
    done = profile_of_ddp(text, tmp_path)
    assert "running it again as the only rank" in done.stdout and "rank 0" in done.stdout
    assert "counts as compute" not in done.stdout and "Traceback" not in done.stderr
    assert Profile.load(tmp_path / "profile.json").model == "Net"


def test_a_script_that_starts_its_ranks_notes_how_to_record_one(tmp_path: Path) -> None:
    begin = """
    rank = int(os.environ.get("RANK", 0))
    if rank == 0:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        environment = {**os.environ, "RANK": "1"}
        subprocess.Popen([sys.executable, __file__, "50"], env=environment, **quiet)
    dist.init_process_group("gloo", store=dist.FileStore("store", 2), rank=rank, world_size=2)
"""
    imports = "import os, subprocess, sys, torch, torch.distributed as dist"
    text = PLAIN.replace("import sys, torch", imports).replace("def main():", f"def main():{begin}")
    done = profile_of_ddp(text, tmp_path)
    words = " ".join(done.stdout.split())
    assert "communication counts as compute here" in words and "devices=1" in words


def test_a_launcher_that_sets_too_little_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ProfileError, match="failed: KeyError: 'LOCAL_RANK'") as failure:
        record(tmp_path, "import os\nos.environ['LOCAL_RANK']")
    assert type(failure.value) is ProfileError
    assert "Traceback" in capsys.readouterr().err


def test_a_model_that_cannot_be_called_again_has_no_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = PLAIN.replace("return self.second(", "values.resize_(0, 0)\n        return self.second(")
    text = text.replace("self.first(values)", "self.first(torch.ones(5, 6))")
    text = text.replace("values.resize_(0, 0)", "assert values.numel(); values.resize_(0, 0)")
    script, path = tmp_path / "train.py", tmp_path / "out.json"
    script.write_text(text, encoding="utf-8")
    status, out, _ = run_command(
        monkeypatch, capsys, "profile", "--steps", "2", "--json", str(path), str(script), "50"
    )
    assert status == 0 and "operations were not counted" in out
    assert Profile.load(path).flops is None


def test_importing_the_format_does_not_import_torch() -> None:
    code = (
        "import sys; import gradlane.planning.profiler; import gradlane.formats.profile; "
        "sys.exit('torch' in sys.modules)"
    )
    source = str(Path(gradlane.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": source}, check=False, timeout=60
    )
    assert done.returncode == 0
