"""One run of a sweep: a process of its own that is watched, and told of the signals that come."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from .sweep_result import DIVERGED, DONE, FAILED, STOPPED, Rows, Rule, read_rows

_LOOK_SECONDS = 0.5  # between two looks at metrics.jsonl
_ASKED = (signal.SIGINT, signal.SIGTERM)  # as in a run
# A closed terminal, unless nohup has it ignored; Windows has none.
_SIGNALS = [*_ASKED, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]


class Signals:
    """Passes Ctrl-C and its like on to the run that is going, while inside; the first is kept.

    The run is in a session of its own, so that a Ctrl-C reaches it once: twice would end it without
    saving.
    """

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> "Signals":
        heard = [n for n in _SIGNALS if n in _ASKED or signal.getsignal(n) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._take) for number in heard}
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, _frame: Any) -> None:
        if self.first is None:
            os.write(2, b"\nthe run saves after its step; once more ends it without saving\n")
        self.first = self.first or signal.Signals(number)
        self._pass_on(number)

    def watch(self, process: subprocess.Popen) -> None:
        """Send `process` what comes from now on, and what came while it started."""
        self._process = process
        if self.first is not None:
            self._pass_on(self.first)

    def _pass_on(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            asks = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._process.send_signal(asks)


def run_one(
    words: Sequence[str], *, folder: Path, log: Path, rule: Rule, signals: Signals, lock: int
) -> tuple[str, str | None]:
    """Run `tune run WORDS` until it ends or diverges; return its status and a sentence about it.

    What it prints is added to the file `log`. `lock` is a file that stays open as long as the run,
    and is told its process.
    """
    before = log.stat().st_size if log.exists() else 0
    command = [sys.executable, "-P", "-m", "solotune", "run", *words]  # -P: not from this folder
    with log.open("ab") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
            pass_fds=[lock] if os.name == "posix" else (),
        )
    os.ftruncate(lock, 0)
    os.write(lock, f"{process.pid}\n".encode())
    signals.watch(process)
    try:
        reason = _watch(process, folder, rule)
    finally:
        if process.poll() is None:  # an error of ours: the run saves, and nothing is left behind
            process.terminate()
            process.wait()
    if reason is not None:
        return DIVERGED, reason
    code = process.returncode
    if code == 0:
        return DONE, None
    if code in (130, 143, -signal.SIGINT, -signal.SIGTERM):
        return STOPPED, None
    if code < 0:
        return FAILED, f"ended by {signal.Signals(-code).name}; the system sends it to free memory"
    with log.open(encoding="utf-8", errors="replace") as text:
        text.seek(before)
        return FAILED, _sentence(text.read()) or f"exit code {code}, see {log}"


def _watch(process: subprocess.Popen, folder: Path, rule: Rule) -> str | None:
    """Wait for the end of a run; return why it diverged, if it did: then it is ended."""
    metrics, seen, reason = folder / "metrics.jsonl", None, None
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
        size = metrics.stat().st_size if metrics.exists() else 0
        if size != seen:
            seen, rows = size, read_rows(folder)
            reason = rule.divergence(rows)
            _show(rows)
        if reason is not None and process.returncode is None:
            _kill(process)
        if process.returncode is not None and size == seen:
            _show([])
            return reason


def _kill(process: subprocess.Popen) -> None:
    """End a run and its own processes at once: nothing of it is worth saving."""
    if os.name == "posix":
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


def _show(rows: Rows) -> None:
    """Show the last step in the terminal, in a line that is written over; no rows: clear it."""
    if not sys.stderr.isatty():
        return
    last = next((row for row in reversed(rows) if row.get("loss") is not None), None)
    text = f"  step {last['step']}  loss {last['loss']:.4f}" if last else ""
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def _sentence(output: str) -> str | None:
    """Return the error that a run ended with: its sentence, or the last line of a traceback."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    if told:
        return " ".join(lines[told[-1] :]).removeprefix("error: ")
    return lines[-1] if lines else None
