"""`tune validate`: a config, checked without reading any weights."""

import argparse
from pathlib import Path

from solotune.config import located
from solotune.config.command_line import (
    Parser,
    add_run_arguments,
    load_arguments,
    refuse_torchrun_flags,
)
from solotune.config.registry import find_config, find_recipe, find_recipe_of, recipes
from solotune.errors import UsageError

from .run import import_recipe

HELP = """\
Check a config, by name or path, with overrides, for the recipe that it names.

First everything that text alone tells: names, types, grammar; all faults are listed at once. Then,
if there are none, the arguments of the components and the recipe's own rules. No weights are read.

  tune validate llama3/8B_full_single_device batch_size=2 dataset=chats.jsonl

The words of `tune run` are understood too, so that a line can be checked before it is run:

  tune validate full_finetune_single_device --config llama3/8B_full_single_device batch_size=2"""


def main(words: list[str]) -> int:
    """Print that the config is valid, or raise ConfigError with its faults."""
    refuse_torchrun_flags(words)
    parser = Parser(prog="tune validate", description=HELP)
    add_config_arguments(parser)
    options = parser.parse_intermixed_args(words)
    recipe = recipe_meant(options, verb="validate")
    loaded = load_arguments(recipe, options)
    module = import_recipe(recipe)
    cfg = loaded.instance(module.Config)
    with located(cfg):
        module.validate(cfg)
    name = recipe.stem if recipe in recipes().values() else recipe
    print(f"{options.config or 'the command line'} is valid for {name}")
    return 0


def add_config_arguments(parser: Parser) -> None:
    """Add the words that name a config, or a recipe with one, and its overrides."""
    parser.add_argument(
        "name", nargs="?", metavar="CONFIG", help="a name or path; beside --config a recipe"
    )
    parser.add_argument("--recipe", help="a recipe by name or path, instead of the config's own")
    add_run_arguments(parser)


def recipe_meant(options: argparse.Namespace, *, verb: str) -> Path:
    """Return the recipe that the words name, or that their config names; sort the words out."""
    if options.name and ("=" in options.name or options.name.startswith("~")):
        options.overrides.insert(0, options.name)
        options.name = None
    if options.name and (options.config or _is_recipe(options.name)):
        if options.recipe:
            raise UsageError(f"{options.name} and --recipe {options.recipe}: name one recipe")
        options.recipe = options.name
    elif options.name:
        options.config = options.name
    if not (options.config or options.recipe):
        raise UsageError(f"name a config: tune {verb} CONFIG (`tune ls` lists them)")
    if options.recipe:
        return find_recipe(options.recipe)
    return find_recipe_of(find_config(options.config))


def _is_recipe(name: str) -> bool:
    return name in recipes() or name.endswith(".py")
