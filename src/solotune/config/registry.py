"""Recipes and configs by name: the listing of their folders is the registry."""

import re
from importlib.resources import files
from pathlib import Path

from solotune.config.suggest import suggest
from solotune.errors import ConfigError

_RECIPE_LINE = re.compile(r"""recipe:\s*(?:"([^"]+)"|'([^']+)'|([^\s#].*?))\s*(?:\s#.*)?$""")


def _folder(package: str) -> Path:
    return Path(str(files(package)))


def recipes() -> dict[str, Path]:
    """Return the recipes that come with solotune, by name."""
    found = sorted(_folder("solotune.recipes").glob("*.py"))
    return {path.stem: path for path in found if not path.stem.startswith("_")}


def configs() -> dict[str, Path]:
    """Return the configs that come with solotune, by `family/name`."""
    folder = _folder("solotune.recipe_configs")
    found = sorted(folder.rglob("*.yaml"))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in found}


def recipe_of(config: Path) -> str | None:
    """Return the recipe that a config names, from its text alone."""
    for line in config.read_text(encoding="utf-8-sig").splitlines():
        match = _RECIPE_LINE.match(line)
        if match:
            return next(group for group in match.groups() if group)
    return None


def find_recipe_of(config: Path) -> Path:
    """Return the recipe that a config names; a path in it may start at the config's own folder."""
    name = recipe_of(config)
    if name is None:
        raise ConfigError(
            f"{config} names no recipe: add recipe: NAME as its first key, or --recipe NAME"
        )
    beside = config.parent / name
    return beside if name.endswith(".py") and beside.is_file() else find_recipe(name)


def find_recipe(name: str) -> Path:
    """Return the recipe of that name or path; raises ConfigError that names the nearest one."""
    return _find(name, recipes(), ("py",), "recipe")


def find_config(name: str) -> Path:
    """Return the config of that name or path; raises ConfigError that names the nearest one."""
    return _find(name, configs(), ("yaml", "yml"), "config")


def find_either(name: str) -> Path:
    """Return the recipe or config of that name or path."""
    both = {**recipes(), **configs()}
    return _find(name, both, ("py", "yaml", "yml"), "recipe or config")


def _find(name: str, registry: dict[str, Path], suffixes: tuple[str, ...], kind: str) -> Path:
    if name in registry:
        return registry[name]
    path = Path(name).expanduser()
    if path.suffix.lstrip(".") in suffixes:
        if path.is_file():
            return path
        stem = path.with_suffix("").as_posix()
        guess = f"; did you mean {stem}?" if stem in registry else suggest(stem, registry)
        fault = "is a folder" if path.is_dir() else "there is no such file"
        raise ConfigError(f"{kind} {name}: {fault}{guess}")
    guess = suggest(name, registry)
    raise ConfigError(
        f"{kind} {name}: no {kind} has that name{guess or '; `tune ls` lists them'}"
        f" (a path ends in .{suffixes[0]})"
    )
