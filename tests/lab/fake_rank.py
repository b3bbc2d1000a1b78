"""A rank program that does as each request tells it: it answers, fails, dies or stalls."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    rank = int(sys.argv[1])
    faulthandler.register(signal.SIGUSR1)
    say(kind="ready")
    for line in sys.stdin:
        request = json.loads(line)
        match request["acts"][rank]:
            case "answer":
                say(kind="progress", done_steps=3)
                say(kind="result", result={"rank": rank, "value": request["value"]})
            case "count":
                say(kind="count")
                say(kind="result", result=json.loads(sys.stdin.readline()))
            case "fail":
                say(kind="error", message="ValueError: too much", traceback="in some line")
            case "exit":
                sys.stderr.write("last words")
                sys.stderr.flush()
                os._exit(7)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stall":
                time.sleep(60)


if __name__ == "__main__":
    main()
