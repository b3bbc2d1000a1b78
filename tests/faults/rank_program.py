"""One rank of a training with checkpoints: `python -m tests.faults.rank_program JOB.json`.

Environment as torchrun sets it. Writes a JSON line an event to `rank-R` in the job's folder:
what it restored, digests of the model, and how it ended.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gradlane
from gradlane.training.carrier import DirectCarrier
from gradlane.training.options.options import keywords_of
from tests.faults.isolation import isolate
from tests.faults.trigger import Trigger

_STEP_S = 0.01
_PAUSE_S = 4.0
"""For which a rank is busy in one step where its scenario says so."""
WIDTH = 96


class Log:
    """A rank's file of events; threads may share it."""

    def __init__(self, path: Path) -> None:
        """Begin the file."""
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, event: str, **fields: Any) -> None:
        """Add an event."""
        with self._lock:
            self._file.write(json.dumps({"event": event, **fields}) + "\n")
            self._file.flush()


class Model(nn.Module):
    """Three layers, between which the moments of forward and backward are."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.middle = middle
        self.second = nn.Linear(2 * WIDTH, 2 * WIDTH)
        self.third = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Return a value for each input."""
        hidden = self.middle(torch.relu(self.first(values)))
        result: Tensor = self.third(torch.relu(self.second(hidden)))
        return result


def digest(session: gradlane.Session, model: nn.Module) -> str:
    """Return a digest of all parameters."""
    session.synchronize()
    state = hashlib.sha256()
    for parameter in model.parameters():
        state.update(parameter.detach().numpy().tobytes())
    return state.hexdigest()[:16]


def reach_in_core(trigger: Trigger) -> None:
    """Reach the moments of rendezvous and connecting where the session calls the core."""
    core: Any = importlib.import_module("gradlane._core")

    def before(moment: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            trigger.reach(moment)
            return function(*arguments, **options)

        return call

    core.Listener = before("rendezvous", core.Listener)
    core.Channel = before("connecting", core.Channel)


def reach_in_preparing(trigger: Trigger) -> None:
    """Reach the moments of `prepare()` where it compares the ranks and spreads rank 0's values."""
    setup: Any = importlib.import_module("gradlane.training.model.channel_setup")
    reach_before(setup, "verify_model_across_ranks", trigger, "checking")
    reach_before(DirectCarrier, "broadcast_initial", trigger, "spreading")


def reach_before(owner: Any, name: str, trigger: Trigger, moment: str) -> None:
    """Reach a moment at each call of a function."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        trigger.reach(moment)
        return function(*arguments, **options)

    setattr(owner, name, call)


def train(job: dict[str, Any], rank: int, log: Log) -> None:
    """Train from the last checkpoint to the job's last step."""
    trigger = Trigger(Path(job["folder"]), job, rank)
    reach_in_core(trigger)
    reach_in_preparing(trigger)
    trigger.reach("start")
    options = {**job["options"], **job["own"].get(str(rank), {})}
    of_prepare = {name: options.pop(name) for name in ("buffers",) if name in options}
    session = gradlane.init(**keywords_of(**options, advertise=os.environ["ADVERTISE"]))
    if job["scenario"] is not None and job["scenario"]["call"] % 2:
        # Half of the time the program stands between its two calls, half of it in the engine's.
        trigger.reach("rendezvous")
    if session.serves:
        session.serve(on_tick=lambda served: None)
        return
    torch.manual_seed(1)
    model: nn.Module = Model(trigger.module())
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trigger.reach("prepare")
    model, optimizer = session.prepare(model, optimizer, **of_prepare)
    trigger.reach("restore")
    begun = session.restore()
    log.write("restored", step=begun)
    if job["digests"]:
        log.write("digest", step=begun, digest=digest(session, model))
    trigger.watch()
    for step in range(begun + 1, job["last_step"] + 1):
        trigger.step = step
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = (model(torch.randn(4, WIDTH, generator=generator)) - 1.0).square().mean()
        if (job["scenario"] or {}).get("pauses") and rank == job["scenario"]["announcer"]:
            time.sleep(_PAUSE_S if step == job["scenario"]["step"] else 0.0)
        loss.backward()
        trigger.reach("pushing")
        if job["options"].get("update") == "server":
            trigger.reach("update")
        optimizer.step()
        optimizer.zero_grad()
        if (job["scenario"] or {}).get("fault") == "raise":
            trigger.reach("checkpoint")
        trigger.pass_by()
        if trigger.is_drawn:
            # Steps of a millisecond would be over before a fault that comes a little later.
            time.sleep(_STEP_S)
        log.write("step", step=step)
        if job["digests"]:
            log.write("digest", step=step, digest=digest(session, model))
    trigger.reach("close")
    session.close(job["close_timeout_s"])


@contextlib.contextmanager
def write_error(log: Log) -> Iterator[None]:
    """Write down what is raised meanwhile, which then goes on its way."""
    try:
        yield
    except BaseException as error:
        log.write(
            "error",
            type=type(error).__name__,
            ours=isinstance(error, gradlane.GradlaneError),
            culprit=getattr(error, "rank", None),
            text=str(error),
            thread=threading.current_thread().name,
        )
        raise


def run_rank(train: Callable[[dict[str, Any], int, Log], None]) -> None:
    """Run a rank; whatever is raised is written down and goes on its way.

    Args:
        train: with the job, the rank and its log.
    """
    job = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    isolate(job, job["nodes"][rank])
    torch.set_num_threads(1)
    log = Log(Path(job["folder"]) / f"rank-{rank}")
    with write_error(log):
        train(job, rank, log)
    log.write("done")


if __name__ == "__main__":
    run_rank(train)
