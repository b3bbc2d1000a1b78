"""A rank of a start that one of them fails, at a moment; prints the error that ends it.

Argument: a JSON object with `moment`, `rank` that fails, and `folder`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import nn

import gradlane
from gradlane.training.session import models

FAR_S = 300.0
"""Beyond what any test takes."""


def fail_to_agree(*arguments: Any) -> Any:
    """Stand for what `prepare` does where the ranks would agree."""
    raise KeyError("meeting")


def main() -> None:
    job = json.loads(sys.argv[1])
    rank, moment = int(os.environ["RANK"]), job.get("moment", "")
    fails = rank == job.get("rank")
    options: dict[str, Any] = {"network": gradlane.Network(connect_timeout_s=FAR_S)}
    if fails:
        taken = job["port"]
        wrong: dict[str, dict[str, Any]] = {
            "prometheus": {"monitoring": gradlane.Monitoring(prometheus=f"127.0.0.1:{taken}")},
            "page": {"monitoring": gradlane.Monitoring(dashboard=f"127.0.0.1:{taken}")},
            "folder": {"checkpoints": gradlane.Checkpoints(f"{job['folder']}/file/folder")},
            "keyword": {"stratgy": "p3"},
            "value": {"strategy": "p4"},
            "codec": {"codec": "qsgd:bits=77"},
            "world": {"servers": 9},
        }
        options.update(wrong.get(moment, {}))
        if moment == "variable":
            os.environ["GRADLANE_LANES"] = "many"
        if moment == "secret file":
            os.environ["GRADLANE_SECRET_FILE"] = f"{job['folder']}/nothing"
    elif moment == "busy":
        time.sleep(0.5)
    with gradlane.init(**options) as session:
        if fails and moment == "before prepare":
            raise FileNotFoundError("data.bin")
        if fails and moment == "exit":
            sys.exit(3)
        if not fails and moment == "busy":
            # It reads its data, and hears of it meanwhile.
            time.sleep(3.0)
        if fails and moment == "busy":
            raise FileNotFoundError("data.bin")
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if fails and moment == "in prepare":
            setattr(models, "agree_on_plan", fail_to_agree)  # noqa: B010
        session.prepare(model, optimizer)
        print(f"rank {rank} is connected")


if __name__ == "__main__":
    begun_s = time.monotonic()
    try:
        main()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}")
    print(f"took {time.monotonic() - begun_s:.1f} s", file=sys.stderr)
