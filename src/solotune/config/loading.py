"""Recipe schema <- YAML file <- key=value: typed values, or all faults at once."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from solotune.config import torchtune
from solotune.config.component import (
    ALWAYS_THERE,
    DEFAULT_PATHS,
    Component,
    Permissions,
    component_of,
    components_in,
    path_fault,
    value_node,
)
from solotune.config.fitting import Misfit, fit
from solotune.config.interpolation import interpolate
from solotune.config.nodes import (
    Mapping,
    Node,
    Scalar,
    at,
    dotted_keys,
    lines_of_keys,
    plain,
    read_file,
    scalar_value,
    write,
)
from solotune.config.overrides import apply, key_of, open_shorthands, parse_override
from solotune.config.registry import recipes
from solotune.config.schema import REQUIRED, Field, Schema, read_schema
from solotune.config.suggest import suggest
from solotune.errors import ConfigError, UserError

ConfigClass = TypeVar("ConfigClass")
_STAMP = re.compile(r"# solotune \S+ (\S+) sha256:")
_KEY_OF_A_FAULT = re.compile(r"([A-Za-z_]\w*(?:\.\w+)*)(?:=|: )")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a Config comes from: recipe by name or absolute path, config as the user called it.

    `overrides` and `trust` are the words of the command line, `lines` the file and line of each
    dotted key that the config file sets and nothing overrides.
    """

    recipe: str
    config: str | None
    overrides: tuple[str, ...] = ()
    trust: tuple[str, ...] = ()
    lines: dict[str, str] = dataclasses.field(default_factory=dict, repr=False)

    def command(self, extra: Items[str] = ()) -> str:
        """Return the `tune run` line that runs this again, quoted for a shell.

        `extra` are overrides: they take the place of those that set the same key.
        """
        changed = {key_of(word) for word in extra}
        words = ["tune", "run", self.recipe]
        words += ["--config", self.config] if self.config else []
        words += [word for name in self.trust for word in ("--trust", name)]
        words += [word for word in self.overrides if key_of(word) not in changed]
        return shlex.join([*words, *extra])

    def located(self, fault: str) -> str:
        """Return the fault with file and line of the key that it starts with, if it has them."""
        match = _KEY_OF_A_FAULT.match(fault)
        where = self.lines.get(match.group(1), "") if match else ""
        file = where.rpartition(":")[0]
        return fault if f"({file}:" in fault else f"{fault}{at(where)}"


@dataclasses.dataclass(frozen=True)
class Loaded:
    """The typed values of a config, not yet checked against the components' signatures."""

    values: dict[str, Any]
    origin: Origin

    def check_components(self) -> None:
        """Import every component and raise ConfigError with all faults of their arguments.

        Those that need no weights are built once, so that they can refuse values themselves.
        """
        faults = [f for c in components_in(self.values) for f in c.check() or c.rehearse()]
        _raise([self.origin.located(fault) for fault in faults])

    def instance(self, config_class: type[ConfigClass]) -> ConfigClass:
        """Return the recipe's own Config with these values."""
        cfg = config_class(**self.values)
        object.__setattr__(cfg, "_origin", self.origin)
        return cfg


def load(
    recipe: Path,
    config: Path | None,
    overrides: Items[str] = (),
    *,
    trust: Items[str] = (),
    config_name: str | None = None,
) -> Loaded:
    """Return the recipe's config; raises ConfigError with every fault that text alone tells.

    Nothing is imported: neither torch, nor the recipe, nor a component. `config_name` is what the
    user called the config; it names the run.
    """
    changes = [parse_override(word) for word in overrides]
    schema = read_schema(recipe)
    shipped = {path.resolve(): name for name, path in recipes().items()}
    recipe_name = shipped.get(recipe.resolve(), str(recipe.resolve()))
    permissions = Permissions(
        recipe_folder=None if recipe.resolve() in shipped else recipe.resolve().parent,
        trusted=tuple(trust),
    )

    tree, faults = read_file(config) if config else (Mapping(), [])
    named = tree.items.pop("recipe", None)
    if named is not None:
        faults += _recipe_faults(named, recipe, recipe_name, config)
    open_shorthands(tree, schema, permissions)
    # A node is replaced before its parts are set, whatever the order on the command line.
    for change in sorted(changes, key=lambda change: len(change.parts)):
        fault = apply(tree, change, schema, permissions)
        faults += [fault] if fault else []
    unresolved = interpolate(tree)
    open_shorthands(tree, schema, permissions)  # what a reference stood for
    faults += unresolved.values()
    faults += _unknown_keys(tree, schema)
    values: dict[str, Any] = {}
    broken = {key.partition(".")[0] for key in unresolved}
    for field in schema.values():
        if field.name in broken:
            continue
        try:
            values[field.name] = _value(tree.items.get(field.name), field, permissions, config)
        except (Misfit, ConfigError) as error:
            node = tree.items.get(field.name)
            faults.append(f"{field.name}: {error}{at(node.where) if node else ''}")
    for component in components_in(values, nested=True):
        fault = path_fault(component.path, permissions, key=component.key)
        faults += [f"{component.key}: {fault}{at(component.where)}"] if fault else []
    _raise(faults)
    config_name = config_name or (str(config) if config else None)
    lines = lines_of_keys(tree)
    return Loaded(values, Origin(recipe_name, config_name, tuple(overrides), tuple(trust), lines))


def _raise(faults: list[str]) -> None:
    if faults:
        count = [] if len(faults) == 1 else [f"{len(faults)} faults in the config"]
        raise ConfigError("\n  ".join(count + faults))


def _recipe_faults(named: Node, recipe: Path, recipe_name: str, config: Path | None) -> list[str]:
    """A config runs with the recipe that it names, or with a copy of it."""
    wanted = scalar_value(named) if isinstance(named, Scalar) else None
    if not isinstance(wanted, str):
        return [f"recipe: the name of a recipe is needed{at(named.where)}"]
    folders = [Path(), config.parent if config else Path()]
    is_same_file = any((folder / wanted).resolve() == recipe.resolve() for folder in folders)
    stamp = _STAMP.match(recipe.read_text(encoding="utf-8"))
    if wanted == recipe_name or is_same_file or (stamp and stamp.group(1) == wanted):
        return []
    return [
        f"recipe: the config is for {wanted}, not for {recipe_name}: `tune run {wanted}`,"
        f" or write recipe: {recipe_name} into the config{at(named.where)}"
    ]


def _unknown_keys(tree: Mapping, schema: Schema) -> list[str]:
    # keys one level down too, so that `lr` finds optimizer.lr
    known = [*schema, *(key for key in dotted_keys(tree) if key.partition(".")[0] in schema)]
    faults = []
    for name, node in tree.items.items():
        if name in schema:
            continue
        below = dotted_keys(node, name)
        repairs = {key: torchtune.equivalent_key(key) for key in [name, *below]}
        repair = repairs.pop(name)
        fault = f"unknown key{repair or suggest(name, known)}"
        faults.append(f"{name}: {fault}{at(node.where)}")
        faults += [
            f"{key}: unknown key{why}" for key, why in repairs.items() if why not in ("", repair)
        ]
    return faults


def _value(node: Node | None, field: Field, permissions: Permissions, config: Path | None) -> Any:
    if node is None and field.default is not REQUIRED:
        return field.default
    if node is None and field.takes_component and field.name in ALWAYS_THERE:
        return Component(DEFAULT_PATHS[field.name], key=field.name, permissions=permissions)
    if node is None:
        place = f"add it to {config}, or give" if config else "give"
        raise Misfit(f"not set: {place} {field.name}=...")
    if field.takes_component:
        return fit(node, field.annotation, lambda n: component_of(n, field.name, permissions))
    return fit(node, field.annotation, plain)


def origin(cfg: Any) -> Origin:
    """Return where a loaded Config comes from."""
    return cfg._origin


@contextmanager
def located(cfg: Any) -> Iterator[None]:
    """Add file and line to a user's error whose message starts with a key, as `seed=-1: ...`."""
    try:
        yield
    except UserError as error:
        error.args = (origin(cfg).located(str(error)),)
        raise


def resolved_yaml(cfg: Any) -> str:
    """Return the YAML that runs `cfg` again, its recipe first."""
    items: dict[str, Node] = {"recipe": Scalar(origin(cfg).recipe, quoted=True)}
    for field in dataclasses.fields(cfg):
        items[field.name] = value_node(getattr(cfg, field.name))
    return write(Mapping(items))
