"""Bytes that PyTorch's CPU allocator handed out while a function ran."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile


class Allocated(NamedTuple):
    """Bytes above those at the start: the most at any moment, and those left at the end."""

    peak: int
    left: int
    result: Any


def allocated(run: Callable[[], Any]) -> Allocated:
    """Call `run` and return what it allocated; temporaries inside operators count."""
    gc.collect()  # or what an earlier test has left is freed inside
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = run()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events: list[Any] = profiler.profiler.kineto_results.events()
    events = [event for event in events if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    totals = list(accumulate((event.nbytes() for event in events), initial=0))
    return Allocated(max(totals), totals[-1], result)
