"""Starts daemons by forking: a process that has imported everything, so that a restart takes no seconds of imports.

What runs in the child is the command line itself, ``cachesvc serve …``. One command a line on standard input, one
answer a line on standard output: ``["spawn", LOG, ARGUMENT, …]`` → process id; ``["poll"]`` → exit code or null;
``["wait"]`` → exit code.
"""

from __future__ import annotations

import json
import os
import sys

import cachesvc.cli.serve  # noqa: F401  so that the child finds it loaded
from cachesvc.cli.main import main as cachesvc_main


def _run(log: str, arguments: list[str]) -> None:
    """In the child; does not return."""
    code = 1
    try:
        target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(target, 1)
        os.dup2(target, 2)
        sys.argv = ["cachesvc", *arguments]
        cachesvc_main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    child, code = 0, None
    for line in iter(sys.stdin.readline, ""):
        command, *arguments = json.loads(line)
        answer: int | None
        if command == "spawn":
            child, code = os.fork(), None
            if not child:
                _run(arguments[0], arguments[1:])
            answer = child
        else:
            if code is None:
                pid, status = os.waitpid(child, os.WNOHANG if command == "poll" else 0)
                code = os.waitstatus_to_exitcode(status) if pid else None
            answer = code
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
