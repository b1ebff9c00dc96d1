"""What a run writes beside its weights: config.yaml, run.json, metrics.jsonl, and the terminal."""

import atexit
import json
import math
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from solotune.checkpoint.folders import write_text
from solotune.checkpoint.training_state import package_version
from solotune.config.run_folder import default_folder, make_unused
from solotune.data import Batch
from solotune.errors import ConfigError
from solotune.training.device import describe_device
from solotune.training.metric_loggers import MetricLogger
from solotune.training.profiling import StepProfiler

_PACKAGES = ("solotune", "torch", "torchao", "bitsandbytes", "tokenizers", "safetensors")


def pick_output_dir(
    output_dir: str | None, *, config: str | None, resume: bool | str, overwrite: bool
) -> Path:
    """Return the folder of a run, made and writable; the default is a new ./runs/<config>-<time>.

    A run that goes on from a named folder writes beside it unless told otherwise. Raises
    ConfigError for a folder that holds something, unless the run resumes or may overwrite: then
    RunLog deletes the earlier one when nothing can go wrong any more.
    """
    if output_dir is not None:
        folder = Path(output_dir)
    elif isinstance(resume, str):
        given = Path(resume)
        folder = given.parent if given.name.startswith("step_") else given
    elif resume:
        raise ConfigError(
            "resume_from_checkpoint=True needs output_dir: name the run's folder, or set "
            "resume_from_checkpoint to it"
        )
    else:
        folder = default_folder(config)
    new = [path.absolute() for path in folder.parents if not path.exists()]
    is_new = not folder.exists()
    try:
        if output_dir is None and not resume:
            folder, is_new = make_unused(folder), True
        elif folder.is_dir() and any(folder.iterdir()) and not (resume or overwrite):
            raise ConfigError(
                f"output_dir={folder} is not empty: name another, resume with "
                "resume_from_checkpoint=True, or set overwrite=True"
            )
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            f"output_dir={folder} cannot be written ({error.strerror}): name another folder"
        ) from None
    atexit.register(_remove_empty, [folder.absolute(), *new] if is_new else [])
    return folder


def _remove_empty(folders: Sequence[Path]) -> None:
    """Remove the folders of a run that wrote nothing, from the inside out."""
    with suppress(OSError):  # the first one that holds something ends it
        for folder in folders:
            folder.rmdir()


def remove_run(folder: Path) -> None:
    """Delete what runs write; a stranger's file in the folder stays."""
    files = (
        "config.yaml run.json metrics.jsonl metrics.csv latest best memory.png "
        "memory_snapshot.pickle save_now wandb_run_id"
    )
    for name in files.split():
        (folder / name).unlink(missing_ok=True)
    for path in list(folder.iterdir()):
        if path.is_dir() and re.fullmatch(r"final|step_\d+|tensorboard|profile", path.name):
            shutil.rmtree(path)


class Plan(Protocol):
    """What a run was expected to need."""

    @property
    def predicted_bytes(self) -> int: ...
    def lines(self) -> list[str]: ...


class RunLog:
    """Terminal and files of one run.

    `every` is the number of optimizer steps between two that are written and shown; what is written
    goes to `logger` too, and `profiler` is told of each step. On resume, the lines of metrics.jsonl
    after `first_step` are dropped: they are made again. `replace` deletes an earlier run's files.
    """

    def __init__(
        self,
        output_dir: Path,
        *,
        replace: bool = False,
        config_yaml: str,
        device: torch.device,
        first_step: int = 0,
        every: int = 1,
        logger: MetricLogger | None = None,
        profiler: StepProfiler | None = None,
        plan: Plan | None = None,
    ) -> None:
        self.output_dir = output_dir
        self._device, self._every = device, every
        self._logger, self._profiler = logger, profiler
        if replace:
            remove_run(output_dir)
        write_text(output_dir / "config.yaml", config_yaml)
        self._metrics = output_dir / "metrics.jsonl"
        kept = [line for line in self._lines() if json.loads(line)["step"] <= first_step]
        # Nothing is saved of step 0: a run that begins again validates again.
        write_text(self._metrics, "".join(kept if first_step else []))
        if logger is not None:
            logger.start(output_dir, first_step=first_step)
        self._plan = plan
        self.facts(f"output: {output_dir}", f"device: {describe_device(device)}")
        self.facts(*(plan.lines() if plan else []))

    def _lines(self) -> list[str]:
        """Return the whole lines of an earlier part of the run; a kill may have cut the last."""
        if not self._metrics.is_file():
            return []
        text = self._metrics.read_text(encoding="utf-8")
        return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def facts(self, *lines: str) -> None:
        """Print lines that stay above the progress bar."""
        for line in lines:
            tqdm.write(line)

    def write_run(self, **facts: Any) -> None:
        """Write run.json: versions, device, and `facts`."""
        device = self._device
        run = {
            "versions": {name: package_version(name) for name in _PACKAGES},
            "python": platform.python_version(),
            "platform": platform.platform(),
            "device": str(device),
            "threads": torch.get_num_threads(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }
        if device.type == "cuda":
            run["device_name"] = torch.cuda.get_device_name(device)
            run["cuda"] = torch.version.cuda
        text = json.dumps(run | facts, indent=2)
        write_text(self.output_dir / "run.json", text + "\n")

    @contextmanager
    def running(self, total_steps: int, *, first_step: int) -> Iterator[None]:
        """Show the progress bar while inside, where stderr is a terminal; start the clock."""
        terminal = sys.stderr.isatty()
        self._total = total_steps
        self._since, self._tokens, self._steps, self._steps_made = time.perf_counter(), 0, 0, 0
        bar = tqdm(
            total=total_steps,
            initial=first_step,
            unit="step",
            disable=not terminal,
            dynamic_ncols=True,
        )
        profiled = self._profiler.running(self.output_dir) if self._profiler else nullcontext()
        with bar as self._bar, profiled:
            yield
        self._compare_plan(first_step + self._steps_made)
        if self._logger is not None:
            self._logger.close()

    def _compare_plan(self, step: int) -> None:
        """Tell what was planned beside what was measured."""
        if self._plan is None or not self._steps_made:
            return
        planned, measured = self._plan.predicted_bytes, peak_bytes(self._device)
        self.facts(
            f"memory: planned {planned / 2**30:.2f} GiB, measured {measured / 2**30:.2f} GiB "
            f"({100 * (planned / measured - 1):+.1f} %)"
        )
        sizes = {"planned_peak_gib": planned, "measured_peak_gib": measured}
        self.write({"step": step} | {key: round(size / 2**30, 3) for key, size in sizes.items()})

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Leave the time inside out of tokens per second: a validation, a save."""
        begin = time.perf_counter()
        yield
        self._since += time.perf_counter() - begin

    def step(self, step: int, group: Sequence[Batch], **metrics: Any) -> None:
        """Count a step over `group`, and write and show its metrics where it is due.

        The last step always is, and one whose loss is not finite.
        """
        num_targets = sum(batch.num_targets for batch in group)
        if not num_targets:
            self.facts(f"warning: step {step} has no target and changed nothing")
        self._tokens += sum(batch.num_tokens for batch in group)
        self._steps += 1
        self._steps_made += 1
        self._bar.update()
        if self._profiler is not None:
            self._profiler.step()
        if step % self._every and step != self._total and math.isfinite(metrics["loss"]):
            return
        seconds = max(time.perf_counter() - self._since, 1e-9)
        row = {
            "step": step,
            **metrics,
            "num_targets": num_targets,
            "tokens_per_second": round(self._tokens / seconds, 1),
            "seconds_per_step": round(seconds / self._steps, 4),
            "peak_memory_gib": round(peak_bytes(self._device) / 2**30, 3),
        }
        if self._device.type == "cuda":  # what the allocator took from the card, holes among it
            reserved = torch.cuda.max_memory_reserved(self._device)
            row["peak_reserved_gib"] = round(reserved / 2**30, 3)
        self._since, self._tokens, self._steps = time.perf_counter(), 0, 0
        self.write(row)
        shown = f"loss {row['loss']:.4f}  lr {row['lr']:.2e}  {row['tokens_per_second']:.0f} tok/s"
        shown += f"  peak {row['peak_memory_gib']:.2f} GiB"
        if self._bar.disable:
            minutes = (self._total - step) * row["seconds_per_step"] / 60
            self.facts(f"step {step}/{self._total}  {shown}  {minutes:.1f} min left")
        else:
            self._bar.set_postfix_str(shown)

    def write(self, row: dict[str, Any]) -> None:
        """Append one object to metrics.jsonl, and hand it to the logger.

        A number that is not finite is written as null.
        """
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in row.items()
            if value is not None
        }
        with self._metrics.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean) + "\n")
        if self._logger is not None:
            self._logger.log(clean)

    def save_is_wanted(self) -> bool:
        """Whether somebody has made the file `save_now` in the run's folder; it is removed."""
        wish = self.output_dir / "save_now"
        if not wish.exists():
            return False
        wish.unlink(missing_ok=True)
        return True


def peak_bytes(device: torch.device) -> int:
    """Return the run-wide peak: of the allocator on a card, of resident memory on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
