"""`tune validate`: a config, checked without reading any weights."""

from solotune.config.command_line import (
    Parser,
    add_run_arguments,
    load_arguments,
    refuse_torchrun_flags,
)
from solotune.config.registry import find_config, find_recipe, recipe_of
from solotune.errors import ConfigError, UsageError

from .run import import_recipe

HELP = """\
Check a config, by name or path, with overrides, for the recipe that it names.

First everything that text alone tells: names, types, grammar; all faults are listed at once. Then,
if there are none, the arguments of the components and the recipe's own rules. No weights are read.

  tune validate llama3/8B_full_single_device batch_size=2 dataset=chats.jsonl"""


def main(words: list[str]) -> int:
    """Print that the config is valid, or raise ConfigError with its faults."""
    refuse_torchrun_flags(words)
    parser = Parser(prog="tune validate", description=HELP)
    parser.add_argument("positional_config", nargs="?", metavar="CONFIG", help="a name or path")
    parser.add_argument("--recipe", help="a recipe by name or path, instead of the config's own")
    add_run_arguments(parser)
    options = parser.parse_intermixed_args(words)
    if options.config is None:
        options.config = options.positional_config
    elif options.positional_config:
        options.overrides.insert(0, options.positional_config)
    if options.config is None:
        raise UsageError("name a config: tune validate CONFIG (`tune ls` lists them)")

    name = options.recipe or recipe_of(find_config(options.config))
    if name is None:
        raise ConfigError(
            f"{options.config} names no recipe: add recipe: NAME as its first key, or --recipe NAME"
        )
    recipe = find_recipe(name)
    loaded = load_arguments(recipe, options)
    loaded.check_components()
    module = import_recipe(recipe)
    module.validate(loaded.instance(module.Config))
    print(f"{options.config} is valid for {name}")
    return 0
