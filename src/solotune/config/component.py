"""A config node that names a class or a builder, and the rules for which ones it may name."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import typing
from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from solotune.config import torchtune
from solotune.config.fitting import Misfit, fit
from solotune.config.nodes import (
    Mapping,
    Node,
    Scalar,
    Sequence,
    at,
    plain,
    scalar_value,
    to_node,
)
from solotune.config.suggest import suggest
from solotune.errors import ConfigError, UserError

_OTHERS_OPTIMIZERS = ("torch.optim", "torchao.optim", "bitsandbytes.optim")

# A config is data that people pass around: it reaches these libraries and nothing else of Python.
ROOTS = (
    "solotune.adapters",
    "solotune.data",
    "solotune.losses",
    "solotune.models",
    "solotune.optim",
    "solotune.tokenizers",
    "solotune.training",
    *_OTHERS_OPTIMIZERS,
)

_ROOTS_IN_WORDS = "the parts of solotune, torch.optim, torchao.optim, bitsandbytes.optim"

MIXED = "solotune.data.mixed"  # what a list of data sets stands for

# What a node without `_component_` stands for, by its key.
DEFAULT_PATHS = {
    "adapter": "solotune.adapters.LoRA",
    "dataset": "solotune.data.dataset",
    "dataset_val": "solotune.data.dataset",
    "loss": "solotune.losses.LinearCrossEntropy",
    "model": "solotune.models.auto",
    "tokenizer": "solotune.tokenizers.auto",
}


@dataclass(frozen=True)
class Kind:
    """What one of our keys takes: in a word, from which ROOTS, and the type it is or returns."""

    word: str
    roots: tuple[str, ...]
    type_path: str


# A key that only a copied recipe has may name anything of the ROOTS.
_KINDS = {
    "adapter": Kind("adapter", ("solotune.adapters",), "solotune.adapters.LoRA"),
    "dataset": Kind("data set", ("solotune.data",), "solotune.data.SampleSet"),
    "dataset_val": Kind("data set", ("solotune.data",), "solotune.data.SampleSet"),
    "loss": Kind("loss", ("solotune.losses",), "torch.nn.Module"),
    "lr_scheduler": Kind("schedule", ("solotune.training",), "solotune.training.schedule.Schedule"),
    "model": Kind("model", ("solotune.models",), "solotune.models.Decoder"),
    "optimizer": Kind(
        "optimizer", ("solotune.optim", *_OTHERS_OPTIMIZERS), "torch.optim.Optimizer"
    ),
    "tokenizer": Kind("tokenizer", ("solotune.tokenizers",), "solotune.tokenizers.Tokenizer"),
}
_MANY_STEPS = 10**9  # of a run that is not known yet: more than any warmup
# Of these a recipe always has one: a config that leaves the node out means the default.
ALWAYS_THERE = ("loss", "model", "tokenizer")


@dataclass(frozen=True)
class Permissions:
    """What a config may name beyond ROOTS: modules beside a copied recipe, and `--trust NAME`."""

    recipe_folder: Path | None = None
    trusted: tuple[str, ...] = ()

    def trusts(self, path: str) -> bool:
        return any(_is_under(path, name) for name in self.trusted)

    def beside_recipe(self, path: str) -> bool:
        """Whether the first name of `path` is a module in the folder of a copied recipe."""
        if self.recipe_folder is None:
            return False
        module = self.recipe_folder / path.partition(".")[0]
        return module.with_suffix(".py").is_file() or (module / "__init__.py").is_file()

    def holds(self, module: ModuleType | None) -> bool:
        """Whether a module comes from a file in the folder of a copied recipe."""
        file = getattr(module, "__file__", None)
        if not file or self.recipe_folder is None:
            return False
        return Path(file).resolve().is_relative_to(self.recipe_folder)

    def allows(self, path: str) -> bool:
        in_roots = any(_is_under(path, root) for root in ROOTS)
        return in_roots or self.trusts(path) or self.beside_recipe(path)


def _is_under(path: str, root: str) -> bool:
    return path == root or path.startswith(f"{root}.")


@dataclass
class Component:
    """A class or builder by its dotted path, with the arguments that the config sets.

    `key` is the node's config key, `where` its file and line; both are for messages.
    """

    path: str
    arguments: dict[str, Any] = field(default_factory=dict)
    key: str = ""
    where: str = ""
    permissions: Permissions = Permissions()
    # the words as written: `007` is text or a number by the type of the parameter
    written: dict[str, Node] = field(default_factory=dict, repr=False, compare=False)

    @property
    def target(self) -> Any:
        """The class or builder, imported; raises ConfigError where it is missing or not allowed."""
        fault = path_fault(self.path, self.permissions, key=self.key)
        if fault:
            raise ConfigError(self._message(fault))
        module_name, _, name = self.path.rpartition(".")
        if self.permissions.beside_recipe(self.path):
            folder = str(self.permissions.recipe_folder)
            if folder not in sys.path:
                sys.path.append(folder)  # last, so that it hides no installed module
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            missing = error.name or ""
            if not _is_under(module_name, missing):
                raise ConfigError(
                    self._message(f"{module_name} needs {missing}: pip install {missing}")
                ) from error
            raise ConfigError(self._message(f"there is no module {missing}")) from error
        except Exception as error:  # a module beside the recipe is the user's own
            fault = f"importing {module_name} failed: {type(error).__name__}: {error}"
            raise ConfigError(self._message(fault)) from error
        hidden = self._hidden_by(module)
        if hidden:
            raise ConfigError(self._message(hidden))
        if not hasattr(module, name):
            public = [n for n, o in vars(module).items() if self._fault(n, o) is None]
            guess = suggest(name, public, prefix=f"{module_name}.")
            raise ConfigError(self._message(f"{module_name} has no {name}{guess}"))
        target = getattr(module, name)
        fault = self._fault(name, target)
        if fault:
            raise ConfigError(self._message(fault))
        return target

    def _hidden_by(self, module: ModuleType) -> str | None:
        """Say which module came instead of the one beside the recipe, whose name it has."""
        within = self.permissions
        if within.trusts(self.path) or not within.beside_recipe(self.path):
            return None
        if any(_is_under(self.path, root) for root in ROOTS):
            return None
        if within.holds(module):
            return None
        file = getattr(module, "__file__", None) or "a part of Python"
        other = f"{module.__name__} is {file}, not the one beside the recipe"
        return f"{other}: give yours another name"

    def _fault(self, name: str, target: Any) -> str | None:
        """Judge the object itself, not the name it was found under: an import makes an alias."""
        if self.permissions.trusts(self.path):
            return None if callable(target) else f"{self.path} cannot be called"
        if name.startswith("_"):
            return f"{self.path} is private"
        if not (inspect.isclass(target) or inspect.isfunction(target)):
            fault = "is no class and no builder of these libraries"
            return f"{self.path} {fault}: --trust {self.path} allows it"
        home = target.__module__
        at_home = any(_is_under(home, root) for root in ROOTS)
        if not at_home and self.permissions.beside_recipe(home):
            at_home = self.permissions.holds(sys.modules.get(home))
        if not (at_home and target.__qualname__.isidentifier()):
            really = f"{home}.{target.__qualname__}"
            return f"{self.path} is really {really}: --trust {self.path} allows it"
        kind = _kind_of(self.key)
        if kind is None or _is_of(kind, target, unsaid=self.permissions.beside_recipe(self.path)):
            return None
        return _no_such_kind(self.path, kind)

    def check(self) -> list[str]:
        """Return the faults of the arguments, nested components included, by the signatures."""
        faults: list[str] = []
        try:
            parameters = _signature(self.target).parameters
        except ConfigError as error:
            return [str(error), *self._nested_faults()]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        known = {
            n: p for n, p in parameters.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        }
        for name in self.arguments:
            place = at(self.written[name].where if name in self.written else self.where)
            if name in known:
                if name == _given_by_recipe(known):
                    faults.append(f"{self.key}.{name}: the recipe gives it: remove it{place}")
                    continue
                try:
                    self._typed(name, known[name])
                except (Misfit, ConfigError) as error:
                    faults.append(f"{self.key}.{name}: {error}{place}")
            elif not takes_any:
                elsewhere = torchtune.equivalent_key(f"{self.key}.{name}")
                guess = elsewhere or suggest(name, known, prefix=f"{self.key}.")
                faults.append(f"{self.key}.{name}: {self.path} takes no {name}{guess}{place}")
        for name, parameter in known.items():
            is_missing = parameter.default is parameter.empty and name not in self.arguments
            if is_missing and parameter.kind is parameter.KEYWORD_ONLY:
                repair = f"{self.path} needs it: set {self.key}.{name}=..."
                faults.append(f"{self.key}.{name}: {repair}{at(self.where)}")
        return faults + self._nested_faults()

    def rehearse(self) -> list[str]:
        """Build what needs no weights, for nothing; return what it refuses of its values.

        What lies beside a copied recipe is left alone: that recipe may build it in its own way.
        """
        if self.permissions.beside_recipe(self.path) or self.permissions.trusts(self.path):
            return []
        try:
            match self.key:
                case "loss" | "adapter":
                    self.build()
                case "lr_scheduler":
                    self.build(_MANY_STEPS)
                case "optimizer":
                    import torch  # the optimizer has imported it

                    for name in ("lr", "weight_decay"):  # torchao takes any
                        if isinstance(rate := self.arguments.get(name), int | float) and rate < 0:
                            return [f"{self.key}.{name}={rate}: use 0 or more"]
                    # bf16: an option for bf16 weights may be refused on others
                    self.build([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.bfloat16))])
        except ConfigError as error:
            return [str(error)]
        return []

    def build(self, *args: Any, **offered: Any) -> Any:
        """Call the target with `args` and the config's arguments.

        An offered keyword is passed where the target has a parameter of that name and the config
        leaves it open. A component in the arguments that begins with the same parameter as this one
        (the tokenizer, of a mixture's data sets) is given the same. Raises ConfigError where a loss
        does not take what a model asks of it (a soft cap of its logits).
        """
        target = self.target
        signature = _signature(target)
        keywords: dict[str, Any] = {}
        leading = _given_by_recipe(signature.parameters)
        first = {leading: args[0]} if leading and args else {}
        for name in self.arguments:
            try:
                keywords[name] = _built(self._typed(name, signature.parameters.get(name)), first)
            except Misfit as error:
                raise ConfigError(f"{self.key}.{name}: {error}{at(self.where)}") from None
        for name, value in offered.items():
            if name in signature.parameters:
                keywords.setdefault(name, value)
            elif self.key == "loss" and value is not None:
                raise ConfigError(
                    f"loss: the model needs {name}={value}, which {self.path} does not take: give "
                    f"it a parameter {name}, or use solotune.losses.LinearCrossEntropy"
                )
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            raise ConfigError(self._message(f"{self.path}: {error}")) from None
        try:
            return target(*args, **keywords)
        except UserError:
            raise
        except Exception as error:
            # A ValueError is about a value. Other libraries' optimizers also refuse one, or a
            # combination, with whatever their code comes to.
            theirs = any(_is_under(self.path, root) for root in _OTHERS_OPTIMIZERS)
            if not (isinstance(error, ValueError) or theirs):
                raise
            if str(error).startswith(f"{self.key}."):
                raise ConfigError(str(error)) from error
            raise ConfigError(self._message(f"{self.path}: {error}")) from error

    def _typed(self, name: str, parameter: inspect.Parameter | None) -> Any:
        """Return the argument as the parameter's annotation, or its default's type, wants it."""
        value = self.arguments[name]
        node = self.written.get(name)
        if node is None or read_argument(node, f"{self.key}.{name}", self.permissions) != value:
            node = to_node(value) if _is_plain(value) else None  # the recipe has set it
        if parameter is None or node is None or isinstance(value, Component):
            return value
        annotation: Any = parameter.annotation
        if annotation is parameter.empty or isinstance(annotation, str):
            annotation = _type_of_default(parameter.default)

        def by_grammar(inner: Node) -> Any:
            return read_argument(inner, f"{self.key}.{name}", self.permissions)

        return fit(node, annotation, by_grammar)

    def _nested_faults(self) -> list[str]:
        return [fault for component in components_in(self.arguments) for fault in component.check()]

    def _message(self, fault: str) -> str:
        return f"{self.key or self.path}: {fault}{at(self.where)}"


def component_of(node: Node, key: str, permissions: Permissions) -> Component:
    """Return the component of a mapping node; raises Misfit where it names none."""
    default = DEFAULT_PATHS.get(key)
    node = _with_sets(node, key)
    if not isinstance(node, Mapping):
        raise Misfit("a component is needed: _component_ with its arguments, or a dotted path")
    named = node.items.get("_component_")
    if named is None and default is None:
        raise Misfit("_component_ is not set: name a class or builder by its dotted path")
    path = default if named is None else scalar_value(named) if isinstance(named, Scalar) else None
    if not isinstance(path, str):
        raise Misfit("_component_ is one dotted path, as torch.optim.AdamW")
    written = {name: child for name, child in node.items.items() if name != "_component_"}
    arguments = {
        name: read_argument(child, f"{key}.{name}", permissions) for name, child in written.items()
    }
    where = (named or node).where
    return Component(path, arguments, key, where, permissions, written)


def _with_sets(node: Node, key: str) -> Node:
    """Return the node of a data set, a list of them as their mixture.

    An item of the list is a component, the arguments of `solotune.data.dataset`, or a file.
    """
    default = DEFAULT_PATHS.get(key)
    if key not in ("dataset", "dataset_val") or default is None:
        return node
    if isinstance(node, Sequence):
        named = Scalar(MIXED, quoted=True, where=node.where)
        node = Mapping({"_component_": named, "datasets": node}, where=node.where)
    sets = node.items.get("datasets") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or not isinstance(sets, Sequence):
        return node
    opened: list[Node] = []
    for item in sets.items:
        if isinstance(item, Scalar):
            item = Mapping({"source": replace(item, quoted=True)}, where=item.where)
        if isinstance(item, Mapping) and "_component_" not in item.items:
            named = Scalar(default, quoted=True, where=item.where)
            item = Mapping({"_component_": named, **item.items}, where=item.where)
        opened.append(item)
    return Mapping({**node.items, "datasets": Sequence(opened, where=sets.where)}, where=node.where)


def read_argument(node: Node, key: str, permissions: Permissions) -> Any:
    """Return an argument by the grammar, with a Component wherever a mapping names one."""
    match node:
        case Mapping() if "_component_" in node.items:
            return component_of(node, key, permissions)
        case Mapping():
            return {n: read_argument(c, f"{key}.{n}", permissions) for n, c in node.items.items()}
        case Sequence():
            return [
                read_argument(c, f"{key}.{index}", permissions)
                for index, c in enumerate(node.items)
            ]
        case Scalar():
            return plain(node)


def component_node(component: Component) -> Mapping:
    """Return the node that reads back as the component."""
    items: dict[str, Node] = {"_component_": Scalar(component.path, quoted=True)}
    for name, value in component.arguments.items():
        node = component.written.get(name)
        same = node is not None and (
            read_argument(node, f"{component.key}.{name}", component.permissions) == value
        )
        items[name] = node if node is not None and same else value_node(value)
    return Mapping(items)


def value_node(value: Any) -> Node:
    """Return the node that reads back as a config value."""
    if isinstance(value, Component):
        return component_node(value)
    if isinstance(value, dict):
        return Mapping({str(name): value_node(item) for name, item in value.items()})
    if isinstance(value, list | tuple):
        return Sequence([value_node(item) for item in value])
    return to_node(value)


def path_fault(path: str, permissions: Permissions, *, key: str = "") -> str | None:
    """Return what is wrong with a component's path as far as the text tells, without an import."""
    parts = path.split(".")
    kind = _kind_of(key)
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        offered = [f"{r}.{name}" for r in (kind.roots if kind else ()) for name in _exported(r)]
        return f"{path} is no dotted path{suggest(path, offered) or ', as torch.optim.AdamW is'}"
    if permissions.allows(path):
        free = permissions.trusts(path) or permissions.beside_recipe(path)
        if kind is None or free or any(_is_under(path, root) for root in kind.roots):
            return None
        return _no_such_kind(path, kind)
    if parts[0] == "torchtune":
        return f"{path}: {torchtune.equivalent_component(path)}"
    return (
        f"{path} is outside what a config may name ({_ROOTS_IN_WORDS}):"
        f" --trust {path} allows it if you know its code"
    )


def _kind_of(key: str) -> Kind | None:
    """Return what a key takes; an item of a mixture's list is what the mixture is."""
    return _KINDS.get(re.sub(r"\.datasets(\.\d+)?$", "", key))


def _no_such_kind(path: str, kind: Kind) -> str:
    return f"{path} is no {kind.word}: name one of {', '.join(kind.roots)}"


def _is_of(kind: Kind, target: Any, *, unsaid: bool) -> bool:
    """Whether a class is of the kind or a builder says that it returns one.

    `unsaid` is the answer for a builder without a return annotation.
    """
    module, _, name = kind.type_path.rpartition(".")
    wanted = getattr(importlib.import_module(module), name)
    given = target if inspect.isclass(target) else _signature(target).return_annotation
    wanted, given = (typing.get_origin(each) or each for each in (wanted, given))
    if given is inspect.Signature.empty or not inspect.isclass(given):
        return unsaid
    return issubclass(given, wanted)


def _exported(package: str) -> list[str]:
    """Return the names that a package's __init__ imports, by its text: torch is slow to import."""
    top, *inner = package.split(".")
    spec = importlib.util.find_spec(top)  # of a top-level name, so that nothing is imported
    folders = spec.submodule_search_locations if spec else None
    file = Path(folders[0], *inner, "__init__.py") if folders else Path()
    if not file.is_file():
        return []
    imports = [n for n in ast.parse(file.read_text("utf-8")).body if isinstance(n, ast.ImportFrom)]
    return [alias.asname or alias.name for node in imports for alias in node.names]


def _signature(target: Any) -> inspect.Signature:
    for eval_str in (True, False):  # some annotations only a type checker can resolve
        try:
            return inspect.signature(target, eval_str=eval_str)
        except (NameError, TypeError, AttributeError):
            continue
        except ValueError:  # written in C
            break
    return inspect.signature(lambda *args, **keywords: None)


def _given_by_recipe(parameters: abc.Mapping[str, inspect.Parameter]) -> str | None:
    """Return the leading parameter without a default: params of an optimizer, say."""
    first = next(iter(parameters.values()), None)
    if first is None or first.kind is first.KEYWORD_ONLY or first.default is not first.empty:
        return None
    return first.name


def _type_of_default(default: Any) -> Any:
    """Return the type that an argument without an annotation probably has."""
    if default is inspect.Parameter.empty or default is None:
        return Any
    if type(default) is int:
        return int | float
    return type(default) if isinstance(default, bool | float | str | list | tuple | dict) else Any


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(item) for item in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def components_in(value: Any, *, nested: bool = False) -> Iterator[Component]:
    """Yield the components in a config value, on request those in their arguments too."""
    if isinstance(value, Component):
        yield value
        if nested:
            yield from components_in(value.arguments, nested=True)
    elif isinstance(value, dict):
        for item in value.values():
            yield from components_in(item, nested=nested)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from components_in(item, nested=nested)


def _built(value: Any, first: dict[str, Any]) -> Any:
    """Return the value with every component in it built; `first` are leading arguments by name."""
    if isinstance(value, Component):
        leading = _given_by_recipe(_signature(value.target).parameters)
        return value.build(first[leading]) if leading in first else value.build()
    if isinstance(value, dict):
        return {name: _built(item, first) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_built(item, first) for item in value)
    return value
