"""`tune run`: a recipe with a config."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from solotune.collector import collector_off
from solotune.config import located
from solotune.config.command_line import (
    Parser,
    add_run_arguments,
    load_arguments,
    torchrun_flags,
)
from solotune.config.component import ALWAYS_THERE, DEFAULT_PATHS
from solotune.config.registry import find_recipe
from solotune.config.schema import REQUIRED, read_schema
from solotune.errors import UsageError

HELP = """\
Run a recipe, by name or path, with a config, by name or path.

A config key is changed by key=value:

  batch_size=2            a value by the type of its key; None or null is no value
  optimizer.lr=1e-5       a part of a node
  dataset=chats.jsonl     a data set by its file; optimizer=torch.optim.SGD another component
  'names=[a, b]'          a list (quoted, for the shell)
  ~clip_grad_norm         deletes the key: its default counts

Faults in names, values and types are all listed before torch is imported, faults in the arguments
of components before any weight is read. `tune run RECIPE --help` lists the keys of the recipe."""


def main(words: list[str]) -> int:
    """Run a recipe's `main` with the config that the words ask for."""
    if torchrun_flags(words):
        from .launch import launch

        return launch(words)
    parser = Parser(prog="tune run", description=HELP, add_help=False)
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="a recipe by name or path")
    add_run_arguments(parser)
    parser.add_argument("-h", "--help", action="store_true", help="show this help")
    options = parser.parse_intermixed_args(words)
    if options.help:
        parser.print_help()
        if options.recipe:
            print(f"\nkeys of {options.recipe}:\n{keys_of(find_recipe(options.recipe))}")
        return 0
    if options.recipe is None or "=" in options.recipe:
        raise UsageError("name a recipe: tune run RECIPE --config CONFIG (`tune ls` lists them)")
    recipe = find_recipe(options.recipe)
    loaded = load_arguments(recipe, options)
    module = import_recipe(recipe)
    cfg = loaded.instance(module.Config)
    with located(cfg):
        return module.main(cfg) or 0  # an exit code, or nothing


def import_recipe(recipe: Path) -> ModuleType:
    """Import a recipe file from wherever it lies; a copy finds the modules beside it."""
    folder = str(recipe.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # last, so that it hides no installed module
    name = f"solotune_recipe_{recipe.stem}"
    spec = importlib.util.spec_from_file_location(name, recipe)
    assert spec, recipe  # a .py file always has a loader
    assert spec.loader, recipe
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    with collector_off():
        spec.loader.exec_module(module)
    return module


def keys_of(recipe: Path) -> str:
    """Return one line a key: name, type, default and comment."""
    lines = []
    for field in read_schema(recipe).values():
        default = f" = {field.default!r}"
        if field.default is REQUIRED:
            always = field.takes_component and field.name in ALWAYS_THERE
            default = f" = {DEFAULT_PATHS[field.name]}" if always else " (required)"
        comment = f"  # {field.comment}" if field.comment else ""
        lines.append(f"  {field.name}: {field.annotation_text}{default}{comment}")
    return "\n".join(lines)
