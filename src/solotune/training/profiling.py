"""torch.profiler over a few steps, by a key of the config."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule
from tqdm import tqdm

from solotune.config.fitting import Minimum

# torch 2.13 prints a line of its own at each start and end; read when profiling first begins.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

_ROWS = 20  # operators of the table


class StepProfiler:
    """Profiles `active_steps` steps after `wait_steps` and `warmup_steps`, once.

    Leaves `profile/trace.json`, which chrome://tracing and Perfetto open, and `profile/table.txt`,
    the operators by their time. `with_stack` adds source lines, `record_shapes` the shapes.
    """

    def __init__(
        self,
        *,
        wait_steps: Annotated[int, Minimum(0)] = 2,
        warmup_steps: Annotated[int, Minimum(0)] = 1,
        active_steps: Annotated[int, Minimum(1)] = 2,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        self._steps = {"wait": wait_steps, "warmup": warmup_steps, "active": active_steps}
        self._details: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }
        self._is_done = False

    @contextmanager
    def running(self, output_dir: Path) -> Iterator[None]:
        """Profile what is stepped inside."""
        folder = output_dir / "profile"

        def write(profiler: profile) -> None:
            folder.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(folder / "trace.json"))
            device = "cuda" if torch.cuda.is_available() else "cpu"
            table = profiler.key_averages().table(f"self_{device}_time_total", row_limit=_ROWS)
            (folder / "table.txt").write_text(table, encoding="utf-8")
            tqdm.write(f"profile: {folder / 'trace.json'} and table.txt")
            self._is_done = True

        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profiler = profile(
            activities=activities,
            schedule=schedule(**self._steps, repeat=1),
            on_trace_ready=write,
            **self._details,
        )
        with self._profiler:
            yield
        if not self._is_done:
            needed = sum(self._steps.values())
            tqdm.write(f"warning: profiler: no trace, as it needs {needed} steps in one run")

    def step(self) -> None:
        """Say that a step is over."""
        self._profiler.step()
