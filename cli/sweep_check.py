"""Every run of a sweep is checked before the first one starts, and beside what was run earlier.

It happens in a process of its own: what checking imports, and what a library takes of a card when
it is imported, is gone when the runs begin.
"""

import multiprocessing
import signal
from collections.abc import Mapping as MappingOf
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from solotune.config import ConfigError, load, located, resolved_yaml
from solotune.config.exit_code import silence_imports
from solotune.config.nodes import Mapping, Node, Scalar, read_file, read_flow
from solotune.config.registry import find_config
from solotune.errors import UserError

from .run import import_recipe

_OF_THE_START = ("output_dir", "resume_from_checkpoint", "overwrite")


def check_runs(
    recipe: Path, config: str | None, runs: MappingOf[str, Sequence[str]], *, trust: Sequence[str]
) -> dict[str, str]:
    """Return the resolved config of each run, by name; `runs` holds the overrides.

    Raises ConfigError with the faults of all of them.
    """
    file = find_config(config) if config else None
    faults = {}
    for name, words in runs.items():  # what text alone tells needs no import
        try:
            load(recipe, file, words, trust=trust, config_name=config)
        except UserError as error:
            faults[name] = str(error)
    _raise(faults)
    with ProcessPoolExecutor(
        1, multiprocessing.get_context("spawn"), initializer=_quiet
    ) as process:
        found = process.submit(_check, recipe, config, file, dict(runs), list(trust)).result()
    _raise({name: fault for name, (fault, _) in found.items() if fault})
    return {name: resolved for name, (_, resolved) in found.items()}


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to report
    silence_imports()


def _check(
    recipe: Path,
    config: str | None,
    file: Path | None,
    runs: dict[str, Sequence[str]],
    trust: list[str],
) -> dict[str, tuple[str, str]]:
    """Return the fault of each run, or "", and its resolved config."""
    module = import_recipe(recipe)
    found = {}
    for name, words in runs.items():
        resolved, fault = "", ""
        try:
            loaded = load(recipe, file, words, trust=trust, config_name=config)
            loaded.check_components()
            cfg = loaded.instance(module.Config)
            with located(cfg):
                module.validate(cfg)
            resolved = resolved_yaml(cfg)
        except UserError as error:
            fault = str(error)
        found[name] = (fault, resolved)
    return found


def _raise(faults: MappingOf[str, str]) -> None:
    """Raise one error for all runs; what is wrong with all of them is told once."""
    if not faults:
        return
    by_fault: dict[str, list[str]] = {}
    for name, fault in faults.items():
        by_fault.setdefault(fault, []).append(name)
    lines = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {fault}"
        for fault, names in by_fault.items()
    ]
    raise ConfigError("\n".join(["no run was started", *lines]).replace("\n", "\n  "))


def check_same(folder: Path, resolved: str) -> None:
    """Raise ConfigError where a run's folder was written with other values than it would be now."""
    written = folder / "config.yaml"
    if not written.is_file():
        return
    before, now = (_values(tree) for tree in (read_file(written)[0], read_flow(resolved)))
    for key in [*now, *before]:
        if before.get(key) != now.get(key) and key not in _OF_THE_START:
            raise ConfigError(
                f"{folder}: {key} was {before.get(key, 'not set')} when this run was made, and is "
                f"{now.get(key, 'not set')} now: start another sweep, or remove that folder"
            )


def _values(node: Node, key: str = "") -> dict[str, str]:
    """Return the text of every scalar, by its dotted key."""
    if isinstance(node, Scalar):
        return {key: node.text}
    children = node.items.items() if isinstance(node, Mapping) else enumerate(node.items)
    prefix = f"{key}." if key else ""
    return {k: v for name, child in children for k, v in _values(child, f"{prefix}{name}").items()}
