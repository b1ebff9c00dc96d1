"""The words after a recipe: `--config FILE`, `--trust NAME`, `--debug` and overrides."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from solotune.collector import collector_off
from solotune.config.exit_code import exit_code
from solotune.config.loading import Loaded, load, located
from solotune.config.registry import find_config
from solotune.errors import UsageError

ConfigClass = TypeVar("ConfigClass")

_TORCHRUN_FLAGS = (
    "--nproc", "--nnodes", "--node-rank", "--rdzv", "--master-addr", "--master-port",
    "--standalone", "--max-restarts", "--local-addr", "--monitor-interval", "--start-method",
    "--event-log-handler", "--role", "--no-python", "--run-path", "--log-dir", "--redirects",
    "--tee", "--local-ranks-filter", "--duplicate-std", "--logs-specs", "--numa-binding",
    "--signals-to-handle", "--shutdown-timeout", "--virtual-local-rank",
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of ending the process."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **settings
        )

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}: `{self.prog} --help` shows the usage")


def add_run_arguments(parser: Parser) -> None:
    """Add what `tune run` and a recipe run as a script have in common."""
    parser.add_argument("--config", metavar="NAME|FILE", help="a config by name or path")
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help="let the config name components under NAME, a dotted path outside the usual libraries",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="change a key; ~key deletes it"
    )


def torchrun_flags(words: list[str]) -> list[str]:
    """Return the flags among the words that torchrun would take, in either spelling."""
    flags = (word.partition("=")[0] for word in words)
    return [flag for flag in flags if flag.replace("_", "-").startswith(_TORCHRUN_FLAGS)]


def refuse_torchrun_flags(words: list[str]) -> None:
    """Raise UsageError at the first flag that torchrun would take."""
    for flag in torchrun_flags(words):
        raise UsageError(
            f"{flag} is a flag of torchrun: this recipe uses one device, and copies of it on one"
            " device help nobody: remove it"
        )


def load_arguments(recipe: Path, options: argparse.Namespace) -> Loaded:
    """Return the config that parsed arguments ask for, components checked."""
    config = find_config(options.config) if options.config else None
    loaded = load(
        recipe, config, options.overrides, trust=options.trust, config_name=options.config
    )
    with collector_off():  # imports torch and its compiler
        loaded.check_components()
    return loaded


def run_recipe(
    main: Callable[[ConfigClass], int | None], config_class: type[ConfigClass]
) -> NoReturn:
    """Run a recipe file as a script: call `main` with the Config that the command line asks for.

    Ends the process as `tune run` does: a user's mistake is one sentence and an exit code.
    """
    recipe = Path(sys.modules[config_class.__module__].__file__ or "")
    words = sys.argv[1:]

    def run() -> int:
        refuse_torchrun_flags(words)
        parser = Parser(prog=recipe.name)
        add_run_arguments(parser)
        options = parser.parse_intermixed_args(words)
        cfg = load_arguments(recipe, options).instance(config_class)
        with located(cfg):
            return main(cfg) or 0

    sys.exit(exit_code(run, words))
