"""Typed, strict configuration: dataclass <- YAML <- key=value. Importing it imports no torch."""

from solotune.config.command_line import run_recipe
from solotune.config.component import Component
from solotune.config.loading import Loaded, Origin, load, located, origin, resolved_yaml
from solotune.config.registry import configs, find_config, find_recipe, recipe_of, recipes
from solotune.config.schema import REQUIRED, Field, Schema, read_schema
from solotune.errors import ConfigError, UsageError

__all__ = [
    "REQUIRED",
    "Component",
    "ConfigError",
    "Field",
    "Loaded",
    "Origin",
    "Schema",
    "UsageError",
    "configs",
    "find_config",
    "find_recipe",
    "load",
    "located",
    "origin",
    "read_schema",
    "recipe_of",
    "recipes",
    "resolved_yaml",
    "run_recipe",
]
