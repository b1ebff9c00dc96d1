"""A thread beside the main one, which reads and writes what the main one must not wait for."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from solotune.device_kind import is_planning

Result = TypeVar("Result")


class Worker:
    """One thread: what is submitted runs in order. While a run is planned the caller does it."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def submit(self, work: Callable[..., Result], *args: Any) -> "Future[Result]":
        """Return what will be the result of `work(*args)`."""
        if not is_planning():
            return self._pool.submit(work, *args)
        done: Future[Result] = Future()
        done.set_result(work(*args))
        return done

    def shutdown(self) -> None:
        """Wait for what was submitted, and end the thread."""
        self._pool.shutdown()
