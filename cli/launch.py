"""Flags of torchrun in `tune run`: handed to torch's launcher, for recipes made for it."""

import ast
from pathlib import Path

from solotune.config.command_line import (
    Parser,
    add_run_arguments,
    load_arguments,
    refuse_torchrun_flags,
    torchrun_flags,
)
from solotune.config.registry import find_recipe, recipes
from solotune.config.schema import read_schema
from solotune.errors import UsageError, UserError


def launch(words: list[str]) -> int:
    """Run the recipe among the words in several processes: `FLAGS RECIPE --config CONFIG ...`.

    Raises UsageError for a recipe that does not say `DISTRIBUTED = True`.
    """
    is_recipe = [word in recipes() or word.endswith(".py") for word in words]
    recipe = find_recipe(words[is_recipe.index(True)]) if any(is_recipe) else None
    if recipe is None or not is_distributed(recipe):
        refuse_torchrun_flags(words)
    assert recipe  # or the flags were refused
    place = is_recipe.index(True)
    flags, rest = words[:place], words[place + 1 :]
    if late := torchrun_flags(rest):
        raise UsageError(f"{late[0]}: flags of torchrun stand before the recipe")
    parser = Parser(prog="tune run")
    add_run_arguments(parser)
    load_arguments(recipe, parser.parse_intermixed_args(rest))  # a fault is told once, not by each

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.get_args_parser().parse_args([*flags, str(recipe), *rest]))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise UserError(
            f"the process of rank {rank} ended with exit code {failure.exitcode}: its own message"
            " stands above"
        ) from None
    return 0


def is_distributed(recipe: Path) -> bool:
    """Whether a recipe says by a line `DISTRIBUTED = True` that it runs in several processes."""
    read_schema(recipe)  # a file that is no recipe is refused with the reason
    tree = ast.parse(recipe.read_text(encoding="utf-8"))
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(t, ast.Name) and t.id == "DISTRIBUTED" for t in node.targets)
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for node in tree.body
    )
