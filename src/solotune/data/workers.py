"""Rows tokenized by several processes, in the order of the rows.

A worker is a new Python of its own, not a fork: after the threads of torch, of a card's driver or
of the tokenizer have started, a fork may wait for a lock forever. Unlike `multiprocessing` it does
not run the user's main script again either, which would import torch in each worker.
"""

import contextlib
import gc
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, islice
from types import TracebackType
from typing import IO, Any, cast

from solotune.data.files import Row
from solotune.data.tokenizing import Rules, Tokenized, tokenize_rows
from solotune.errors import DataError
from solotune.tokenizers import Tokenizer

_START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from solotune.data.workers import serve; serve()"
)
CHUNK = 256  # rows that are tokenized together
_CHUNK_CHARACTERS = 1 << 19  # or fewer rows: encoding takes about 270 bytes a character
ROWS_ALONE = 4096  # before workers start: they take about half a second to
_MOST_WORKERS = 8  # one process reads for all of them


def default_workers() -> int:
    """The cores that this process may use, at most 8."""
    if hasattr(os, "sched_getaffinity"):
        return min(len(os.sched_getaffinity(0)), _MOST_WORKERS)
    return min(os.cpu_count() or 1, _MOST_WORKERS)


def tokenized(
    tokenizer: Tokenizer, rows: Iterator[Row], rules: Rules, *, num_workers: int | None = None
) -> Iterator[Tokenized]:
    """The samples of `rows` a chunk at a time, in order: what `num_workers` is changes nothing."""
    num_workers = default_workers() if num_workers is None else num_workers

    def alone(chunked: Iterator[Sequence[Row]]) -> Iterator[Tokenized]:
        nonlocal rules
        for chunk in chunked:
            part = tokenize_rows(tokenizer, chunk, rules)
            rules = replace(rules, layout=part.layout)  # of the first row that can be read
            yield part

    chunked = _chunked(rows)
    if num_workers < 2:
        yield from alone(chunked)
        return
    yield from alone(islice(chunked, ROWS_ALONE // CHUNK))
    for chunk in chunked:
        if rules.layout is None:
            yield from alone(iter([chunk]))
            continue
        rest = chain([chunk], chunked)
        yield from tokenize_in_workers(tokenizer, rest, rules, num_workers=num_workers)


def _chunked(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Lists of `CHUNK` rows, or of fewer long ones."""
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        chunk.append(row)
        characters += _characters(row.columns)
        if len(chunk) == CHUNK or characters >= _CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


def _characters(value: Any) -> int:
    """The characters of all texts in a value of a row."""
    if type(value) is str:
        return len(value)
    if type(value) is dict:
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if type(value) is list else 0


def tokenize_in_workers(
    tokenizer: Tokenizer, chunks: Iterator[Sequence[Row]], rules: Rules, *, num_workers: int
) -> Iterator[Tokenized]:
    """What `tokenize_rows` gives for each chunk, in order, from `num_workers` processes.

    At most two chunks a worker are under way, whatever is read. Raises what `tokenize_rows` raises,
    at the first chunk that does, and DataError where a worker ends.
    """
    with _Workers(tokenizer, rules, num_workers) as workers:
        under_way: deque[Future[Tokenized]] = deque()
        for chunk in chunks:
            under_way.append(workers.submit(chunk))
            if len(under_way) > 2 * num_workers:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()


class _Workers:
    """Processes, each with a thread here that waits for its answers."""

    def __init__(self, tokenizer: Tokenizer, rules: Rules, num_workers: int) -> None:
        self._opening = pickle.dumps(list(sys.path)) + pickle.dumps((tokenizer, rules))
        self._count = num_workers
        self._all: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(num_workers, "tokenizing")

    def __enter__(self) -> "_Workers":
        for _ in range(self._count):
            worker = _Worker()
            self._all.append(worker)
            self._free.put(worker)
        for worker in self._all:  # all are starting by now
            worker.send(self._opening)
        return self

    def submit(self, rows: Sequence[Row]) -> "Future[Tokenized]":
        return self._threads.submit(self._ask, rows)

    def _ask(self, rows: Sequence[Row]) -> Tokenized:
        worker = self._free.get()
        try:
            return worker.ask(rows)
        finally:
            self._free.put(worker)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._all:
            worker.end()  # a thread that waits for it goes on
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._all:
            worker.close()


class _Worker:
    """One process, asked over a pair of pipes."""

    def __init__(self) -> None:
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # a core each is taken
        with _without_interrupts():
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                close_fds=False,  # posix_spawn; our descriptors are not inheritable anyway
            )
        self._to = cast(IO[bytes], self._process.stdin)
        self._from = cast(IO[bytes], self._process.stdout)

    def send(self, data: bytes) -> None:
        try:
            self._to.write(data)
            self._to.flush()
        except OSError:
            raise self._death() from None

    def ask(self, rows: Sequence[Row]) -> Tokenized:
        self.send(pickle.dumps(rows, pickle.HIGHEST_PROTOCOL))
        try:
            answer: Any = pickle.load(self._from)
        except (EOFError, pickle.UnpicklingError):
            raise self._death() from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _death(self) -> DataError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        if code is not None and code < 0:
            how = f"by signal {-code}"
            with contextlib.suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        else:
            how = f"with exit code {code}"
        return DataError(
            f"a process that tokenizes rows ended {how}, perhaps for want of memory: set "
            "dataset.num_workers to fewer, or to 1 to tokenize in the process of the run"
        )

    def end(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.wait()
        for pipe in (self._to, self._from):
            with contextlib.suppress(OSError):  # what was still to be written
                pipe.close()


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ctrl-C reaches every process of the terminal; workers are ended by the one that runs them."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # a child inherits it
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def serve() -> None:
    """Be a worker: read chunks of rows from stdin and write their samples, until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked, answers = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a template or a tokenizer prints is no answer
    try:
        tokenizer, rules = pickle.load(asked)
    except EOFError:
        return
    gc.freeze()  # what is loaded stays; and looking for cycles among rows is 5 % of the time
    gc.set_threshold(50_000, 20, 100)
    while True:
        try:
            rows = pickle.load(asked)
        except EOFError:
            return
        try:
            answer: Any = tokenize_rows(tokenizer, rows, rules)
        except Exception as error:
            answer = error
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            return
