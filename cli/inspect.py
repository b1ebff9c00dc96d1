"""`tune inspect`: what a run is fed with, and what it trains, before it runs."""

import argparse
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from solotune.config import located
from solotune.config.command_line import Parser, load_arguments, refuse_torchrun_flags
from solotune.errors import UsageError, UserError

from .run import import_recipe
from .validate import add_config_arguments, recipe_meant

HELP = """\
usage: tune inspect data|model CONFIG [key=value ...]

Look at what `tune run` would work on; nothing is trained and no weights are read.

  tune inspect data    rows with what is trained of them, and counts that show faulty data
  tune inspect model   parameters by module: number, dtype, bytes, which are trained

`tune inspect data --help` and `tune inspect model --help` list the flags."""

PARTS = ("data", "model")


def main(words: list[str]) -> int:
    """Call the part that the first word names."""
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if words[0] not in PARTS:
        raise UsageError(f"tune inspect {words[0]}: say what, {' or '.join(PARTS)}")
    part = importlib.import_module(f"solotune.cli.inspect_{words[0]}")
    return part.main(words[1:])


def parse(parser: Parser, words: list[str], *, what: str) -> tuple[argparse.Namespace, Path]:
    """Return the options and the recipe that is meant; the words are those of `tune validate`."""
    refuse_torchrun_flags(words)
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(words)
    return options, recipe_meant(options, verb=f"inspect {what}")


def setup(recipe: Path, options: argparse.Namespace, *, needs: str) -> tuple[ModuleType, Any]:
    """Return the recipe's module and its Config, valid; raises UserError without function `needs`.

    What is shown is made by the recipe's own functions, so that it is what a run has.
    """
    loaded = load_arguments(recipe, options)
    module = import_recipe(recipe)
    if not hasattr(module, needs):
        raise UserError(f"{recipe.stem} has no {needs}, so there is nothing to show of it")
    cfg = loaded.instance(module.Config)
    with located(cfg):
        module.validate(cfg)
    return module, cfg
