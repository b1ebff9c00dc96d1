"""`tune sweep`: a recipe, once for each combination of values, one process and one folder a run."""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from solotune.config import ConfigError, load, read_schema
from solotune.config.command_line import Parser, add_run_arguments, refuse_torchrun_flags
from solotune.config.nodes import Scalar, scalar_value
from solotune.config.overrides import key_of
from solotune.config.registry import find_config, find_recipe
from solotune.config.run_folder import default_folder, make_unused
from solotune.config.sweep import drawn, grid, read_axes
from solotune.errors import UsageError

from .sweep_check import check_runs, check_same
from .sweep_folder import Row, SweepFolder, compared, text_table
from .sweep_plot import draw
from .sweep_process import Signals, run_one
from .sweep_result import DONE, Rule

HELP = """\
Run a recipe once for each combination of values, one after another, and compare the losses.

  tune sweep full_finetune_single_device --config smollm2/135M_full_single_device \\
      optimizer.lr=1e-4,1e-5 batch_size=1,2 output_dir=runs/first

  optimizer.lr=1e-4,1e-5     values between commas; those in [a, b] and 'a, b' and \\, are text
  optimizer.lr=1e-5..1e-3    a range, for --random: drawn uniformly in the logarithm
  output_dir=FOLDER          the folder of the sweep; null: ./runs/sweep-<config>-<time>

All combinations are checked before the first run starts. The same words with
resume_from_checkpoint=True (or =FOLDER) go on after an interruption, also with more values. The
folder holds one folder and one .log a run, and sweep.json, .csv, .md and .png."""

_OF_THE_SWEEP = ("output_dir", "resume_from_checkpoint", "overwrite")


def main(words: list[str]) -> int:
    """Run a sweep; return 0, or 1 where a run failed, or what a signal asks for."""
    refuse_torchrun_flags(words)
    options = _parse(words)
    recipe = find_recipe(options.recipe)
    schema = read_schema(recipe)
    if "output_dir" not in schema:
        raise ConfigError(
            f"{options.recipe} has no output_dir, where a recipe writes the losses that a sweep "
            "compares: sweep a training recipe"
        )
    axes, fixed = read_axes(options.overrides)
    named, resume, fixed = _split(fixed, swept=[axis.key for axis in axes])
    if not axes:
        raise UsageError("nothing is swept: give a key several values, as optimizer.lr=1e-4,1e-5")
    count, seed = options.random, options.seed
    runs = grid(axes) if count is None else drawn(axes, count=count, seed=seed)
    about = {"recipe": options.recipe, "config": options.config, "fixed": fixed}
    path = named or default_folder(options.config, prefix="sweep-")
    folder = SweepFolder(path, about, resume=resume)
    folder.plan(axes, runs)
    overrides = {
        row.name: [*fixed, *row.words(), f"output_dir={path / row.name}"] for row in folder.rows
    }
    resolved = check_runs(recipe, options.config, overrides, trust=options.trust)
    for row in folder.rows:
        check_same(path / row.name, resolved[row.name])
    config = find_config(options.config) if options.config else None
    first = load(recipe, config, [*fixed, *folder.rows[0].words()], trust=options.trust)
    rule = Rule(options.max_loss, may_skip=first.values.get("on_nonfinite") == "skip")
    if named:
        named.mkdir(parents=True, exist_ok=True)
    else:
        folder.path = make_unused(folder.path)
    start = [options.recipe, *_flags(options), *fixed]
    again = ["tune", "sweep", *_without(words), f"resume_from_checkpoint={folder.path}"]
    can_resume = "resume_from_checkpoint" in schema
    with folder.locked() as lock, Signals() as signals:
        _print_start(folder, rule)
        for number, row in enumerate(folder.rows, start=1):
            if row.is_over:
                continue
            if signals.first is not None:
                break
            print(f"[{number}/{len(folder.rows)}] {' '.join(row.words())}", flush=True)
            _run(row, folder, start, can_resume, rule=rule, signals=signals, lock=lock)
        return _end(folder, signals, shlex.join(again))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = Parser(prog="tune sweep", description=HELP)
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe by name or path")
    add_run_arguments(parser)
    add = parser.add_argument
    add("--random", type=int, metavar="N", help="N combinations, drawn at random")
    add("--seed", type=int, default=0, help="of the draw (default: 0)")
    add("--max-loss", type=float, metavar="LOSS", help="above it a run has diverged")
    return parser.parse_intermixed_args(words)


def _split(fixed: Sequence[str], swept: Sequence[str]) -> tuple[Path | None, bool, list[str]]:
    """Return the folder of the sweep, whether it goes on, and the words for its runs."""
    for key in swept:
        if key.partition(".")[0] in _OF_THE_SWEEP:
            raise UsageError(f"{key} cannot be swept: each run has its own folder in output_dir")
    given = {key_of(word): word.partition("=")[2] for word in fixed}
    values = {key: scalar_value(Scalar(given.get(key, ""))) for key in _OF_THE_SWEEP}
    if values["overwrite"]:
        raise UsageError("overwrite: a sweep deletes nothing: name another output_dir")
    folder, resume = values["output_dir"], values["resume_from_checkpoint"]
    if isinstance(resume, str) and folder is None:
        folder = resume
    if resume and folder is None:
        raise UsageError("resume_from_checkpoint=True needs output_dir, the folder of the sweep")
    rest = [word for word in fixed if key_of(word) not in _OF_THE_SWEEP]
    return Path(str(folder)).expanduser() if folder is not None else None, bool(resume), rest


def _flags(options: argparse.Namespace) -> list[str]:
    trusted = [word for name in options.trust for word in ("--trust", name)]
    config = ["--config", options.config] if options.config else []
    return [*config, *trusted, *(["--debug"] if options.debug else [])]


def _without(words: Sequence[str]) -> list[str]:
    return [word for word in words if word.partition("=")[0] not in _OF_THE_SWEEP]


def _print_start(folder: SweepFolder, rule: Rule) -> None:
    over = sum(row.is_over for row in folder.rows)
    went_before = f", {over} of them are over" if over else ""
    print(f"sweep: {len(folder.rows)} runs in {folder.path}{went_before}")
    print(rule, flush=True)
    folder.write()


def _run(
    row: Row,
    folder: SweepFolder,
    start: Sequence[str],
    can_resume: bool,
    *,
    rule: Rule,
    signals: Signals,
    lock: int,
) -> None:
    """Run one row to its end, and write what it came to."""
    path = folder.path / row.name
    words = [*start, *row.words(), f"output_dir={path}"]
    if can_resume and path.is_dir() and any(path.iterdir()):
        words.append("resume_from_checkpoint=True")
    log = folder.path / f"{row.name}.log"
    row.status, row.error = run_one(
        words, folder=path, log=log, rule=rule, signals=signals, lock=lock
    )
    folder.measure(row)
    folder.write()
    loss, steps = compared(row), row.numbers["steps"]
    told = f"  {row.status}: {row.error}" if row.error else f"  {row.status}"
    print(f"{told}, {steps} steps" + ("" if loss is None else f", loss {loss:.4f}"), flush=True)


def _end(folder: SweepFolder, signals: Signals, again: str) -> int:
    """Print the table, write the picture, and return the exit code."""
    hint = draw(folder.rows, folder.path / "sweep.png")
    print(f"\n{text_table(folder.table())}\n" + (f"{hint}\n" if hint else ""))
    over = sum(row.is_over for row in folder.rows)
    if signals.first is not None and over < len(folder.rows):
        told = f"stopped by {signals.first.name}, {over} of {len(folder.rows)} runs are over"
        print(f"{told}; go on with: {again}")
        return 128 + signals.first
    best = min((row for row in folder.rows if row.status == DONE), key=_loss, default=None)
    if best is not None:
        print(f"lowest loss: {folder.path / best.name}")
    if over < len(folder.rows):
        told = f"{len(folder.rows) - over} runs failed or were stopped, see the .log of each"
        print(f"{told}; try them again with: {again}")
    print(folder.path)
    return 0 if over == len(folder.rows) else 1


def _loss(row: Row) -> float:
    loss = compared(row)
    return float("inf") if loss is None else loss
