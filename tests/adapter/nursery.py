"""A process that has torch loaded and forks programs, since loading torch takes many seconds.

Requests are JSON lines on standard input, answers JSON lines on standard output. A forked program
ends as the interpreter would end it: excepthook, exit functions, exit status.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from typing import Any


def main() -> None:
    """Serve requests until standard input ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch._dynamo

    from tests.adapter import failing_rank

    del torch
    answers = threading.Lock()
    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(failing_rank.main, request)
        _answer(answers, {"name": request["name"], "pid": pid})
        threading.Thread(target=_report, args=(answers, request["name"], pid), daemon=True).start()


def _report(answers: threading.Lock, name: str, pid: int) -> None:
    _, status = os.waitpid(pid, 0)
    _answer(answers, {"name": name, "code": os.waitstatus_to_exitcode(status)})


def _answer(answers: threading.Lock, answer: dict[str, Any]) -> None:
    with answers:
        print(json.dumps(answer), flush=True)


def _run(program: Any, request: dict[str, Any]) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    for path, descriptor in ((request["output"], 1), (request["errors"], 2)):
        os.dup2(os.open(path, flags), descriptor)
    os.environ.update(request["environment"])
    code = 0
    try:
        program(*request["arguments"])
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
