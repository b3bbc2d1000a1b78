"""The command `gradlane profile`: records a script, prints what was found, writes the profile."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from gradlane.formats.profile import BatchTime, Profile
from gradlane.planning.profiler.operations import count_operations, synthetic_step, with_operations
from gradlane.planning.profiler.options import RecordingOptions
from gradlane.planning.profiler.preserving import preserved
from gradlane.planning.profiler.script import (
    LauncherMissingError,
    RecordedScript,
    replay,
    run_script,
)

_UNSTEADY = 1.5
"""Ratio of the quartiles of steps above which their median says little."""


def run_profile(
    target: str,
    arguments: Sequence[str],
    *,
    console: Console,
    path: Path,
    options: RecordingOptions,
    is_module: bool = False,
    batch_time_s: float | None = None,
    operations: bool = True,
) -> Profile:
    """Record a script; on rank 0, print a summary and write the profile.

    A script for a launcher that none has started runs once more, in this process's place, with
    the environment of a world of one.

    Args:
        target: path of the script, or the name of a module.
        arguments: the script's own.
        console: where the summary goes; the script prints where it always does.
        path: where the profile goes.
        options: which steps are recorded.
        is_module: whether `target` is a module.
        batch_time_s: time of a batch on another accelerator: times are then made from operation
            counts, not taken from this machine.
        operations: whether operations are counted, in one more forward and backward.

    Raises:
        ProfileError: nothing could be recorded; the text says why.
        ValueError: an argument is out of range.
    """
    is_first = os.environ.get("RANK", "0") == "0"
    folder = Path.cwd()

    def tell(text: str) -> None:
        if is_first:
            console.print(text, style="dim", highlight=False)

    tell(
        f"running {target}; recording {options.steps} steps at most, after {options.warmup} of "
        "warm-up"
    )
    try:
        with _hard_exit_ends_script():
            found = run_script(target, arguments, options, is_module=is_module)
    except LauncherMissingError as error:
        tell(f"{error}\nrunning it again as the only rank, as torchrun --nproc-per-node 1 would")
        os.chdir(folder)
        _run_again_as_only_rank()
    if batch_time_s is None:
        profile = found.recorder.profile(found.name)
        if operations:
            profile = _counted(found, profile)
    else:
        profile = synthetic_step(
            found.model,
            replay(found),
            batch_time_s,
            batch_size=found.recorder.batch_size,
            name=found.name,
        )
    if found.recorder.batch_size is None:
        found.notes.append(
            "the batch size is unknown and counts as 1: give --batch-size for samples a second"
        )
    if is_first:
        _print(console, profile, found, options.steps)
        profile.save(path)
        console.print(f"wrote {path}; ask it:", highlight=False, soft_wrap=True)
        console.print(
            f"gradlane whatif {path} --workers 4 --rate 10gbit --strategy ddp,p3,ring",
            highlight=False,
            soft_wrap=True,
        )
    return profile


@contextlib.contextmanager
def _hard_exit_ends_script() -> Iterator[None]:
    """Return a context in which `os._exit` ends the script, and not the recording with it.

    Scripts with DDP on Gloo leave that way, past threads that torch keeps.
    """
    process, leave = os.getpid(), os._exit

    def end_script(status: int) -> NoReturn:
        # A forked child, such as a loader's worker, ends as it wants to.
        if os.getpid() != process:
            leave(status)
        sys.exit(status)

    os._exit = end_script
    try:
        yield
    finally:
        os._exit = leave


def _run_again_as_only_rank() -> NoReturn:
    """Replace this process by the same command in a world of one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, sys.orig_argv, {**os.environ, **world})


def _counted(found: RecordedScript, profile: Profile) -> Profile:
    """Count operations after the script; a model that needs its script for that is left alone."""
    try:
        with preserved(found.model):
            counts = count_operations(found.model, replay(found))
    except Exception as error:
        found.notes.append(
            "operations were not counted: the model cannot be called with the inputs of its last "
            f"step once more ({type(error).__name__}: {error})"
        )
        return profile
    return with_operations(profile, counts)


def unsteady(batch: BatchTime | None) -> str | None:
    """Return a warning where steps took so different times that their median says little."""
    if batch is None or batch.upper_quartile_s <= _UNSTEADY * batch.lower_quartile_s:
        return None
    return (
        f"a quarter of the steps took {batch.lower_quartile_s * 1e3:.4g} ms or less and a quarter "
        f"{batch.upper_quartile_s * 1e3:.4g} ms or more, so {batch.median_s * 1e3:.4g} ms is a "
        "rough figure: profile on a quiet machine, or more --steps"
    )


def _print(console: Console, profile: Profile, found: RecordedScript, steps: int) -> None:
    """Print what matters of a profile."""

    def say(text: str) -> None:
        console.print(text, highlight=False)

    say(
        f"{profile.model}: {profile.size_bytes / 1e6:.1f} MB of gradients in "
        f"{len(profile.tensors)} tensors, {profile.batch_size} samples a step, on {profile.device}"
    )
    spread = ""
    if profile.batch is not None:
        batch = profile.batch
        spread = (
            f" (quartiles {batch.lower_quartile_s * 1e3:.2f} and "
            f"{batch.upper_quartile_s * 1e3:.2f}, {batch.steps} steps)"
        )
    counted = "" if profile.flops is None else f", {profile.flops / 1e9:.3g} GFLOP forward"
    say(
        f"step {profile.compute_s * 1e3:.2f} ms{spread}, forward {profile.forward_s * 1e3:.2f} ms"
        f"{counted}"
    )
    if (note := unsteady(profile.batch)) is not None:
        found.notes.insert(0, note)
    unused = [tensor.name for tensor in profile.tensors if tensor.gradients == 0]
    if unused:
        say(f"without a gradient: {', '.join(unused[:5])}{', …' if len(unused) > 5 else ''}")
    for note in (
        *notes_on_steps(profile.batch, found.recorder.recorded_steps, steps),
        *found.notes,
    ):
        say(f"note: {note}")


def notes_on_steps(batch: BatchTime | None, recorded: int, steps: int) -> list[str]:
    """Return how many steps the times are of, where that is not the number asked for."""
    if batch is None:
        return []
    notes = []
    if batch.steps < steps:
        reasons = [f"the script ended after {recorded}"] if recorded < steps else []
        if batch.steps < recorded:
            reasons.append(f"{recorded - batch.steps} evaluated as well, or had no gradient")
        notes.append(f"times are of {batch.steps} steps in place of {steps}: {', '.join(reasons)}")
    return notes
