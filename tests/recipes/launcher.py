"""A process with torch imported that forks a `tune run` for each line of JSON on stdin.

A line holds `words`, the `log` file, and optionally `die`: [place, count] kills the child at the
count-th time it comes by that place, or after `count` seconds. Answers with the wait status of the
child. Forking saves the seconds that importing torch takes, twenty times.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable

from solotune.checkpoint import folders, safetensors_file
from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.memory import HostMemory
from solotune.optim import AdamWKahan

PLACES: dict[str, tuple[object, str]] = {
    "optimizer": (AdamWKahan, "_step_one"),  # between two parameters of one step
    "read": (HostMemory, "read"),  # after backward, before the step
    "tensor": (safetensors_file, "_write"),  # between two tensors of a save
    "rename": (os, "rename"),
    "replace": (os, "replace"),
    "fsync": (os, "fsync"),
    "folder": (folders, "remove"),
}


def die_at(place: str, count: float) -> None:
    """Let the `count`-th call at `place`, or that many seconds, kill this process with SIGKILL."""
    if place == "seconds":
        threading.Timer(count, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    owner, name = PLACES[place]
    original: Callable = getattr(owner, name)
    calls = 0

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if job.get("die"):
            die_at(*job["die"])
        code = main(job["words"])
        sys.stdout.flush()
        os._exit(code)
    print(os.waitpid(pid, 0)[1], flush=True)
