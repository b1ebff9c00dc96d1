"""A config of torchtune as one of ours: the same training, every change with its reason."""

import copy
import re
from collections.abc import Mapping as Dict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from solotune.config.comments import Comments, read_comments, with_comments
from solotune.config.interpolation import interpolate
from solotune.config.nodes import Mapping, Node, Scalar, at, read_file, scalar_value
from solotune.config.registry import find_recipe
from solotune.config.schema import Schema, read_schema
from solotune.config.torchtune import Here, component_here, key_here
from solotune.config.torchtune_adapter import adapts, converted_adapter
from solotune.config.torchtune_data import converted_dataset
from solotune.config.torchtune_recipes import FULL, LORA, recipe_kind
from solotune.errors import ConfigError

_OLD_TORCHAO = "torchao.prototype.low_bit_optim."  # where its optimizers were
_KEPT = ("tokenizer.max_seq_len", "lr_scheduler.num_warmup_steps")  # of what is replaced
What = Literal["kept", "renamed", "replaced", "dropped", "added", "lost"]


@dataclass(frozen=True)
class Change:
    """What became of one key; `lost` is a key whose effect has no equivalent here."""

    what: What
    key: str
    note: str = ""


@dataclass
class Conversion:
    """The new config while it is made: `items` by key, comments by dotted key."""

    items: dict[str, Node] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    comments: Comments = field(default_factory=Comments)

    def note(self, what: What, key: str, note: str = "") -> None:
        self.changes.append(Change(what, key, note))

    def add(self, key: str, value: Node, why: str) -> None:
        """Set a key that torchtune's config leaves out, since our default differs."""
        self.items[key] = value
        self.comments.beside[key] = why
        self.note("added", key, why)

    def to_yaml(self) -> str:
        """Return the text of the new config."""
        return with_comments(Mapping(self.items), self.comments)

    @property
    def lost(self) -> list[Change]:
        """The changes that alter the training."""
        return [change for change in self.changes if change.what == "lost"]


def convert(path: Path) -> Conversion:
    """Return the config of ours that trains as torchtune's at `path` does.

    Raises ConfigError, which names the kind of recipe, for a config that is not of full fine-tuning
    or an adapter on one device, and for a component without an equivalent.
    """
    tree, faults = read_file(path)
    if faults:
        raise ConfigError("\n  ".join(faults))
    source = path.read_text(encoding="utf-8-sig")
    kind = recipe_kind(tree, source)
    if kind is not None:
        raise ConfigError(f"{path}: {kind}")
    resolved = copy.deepcopy(tree)
    unresolved = interpolate(resolved)
    found = Conversion(comments=read_comments(source))
    model = resolved.items.get("model")
    recipe = LORA if adapts(model) else FULL
    found.items["recipe"] = Scalar(recipe)
    schema = read_schema(find_recipe(recipe))
    if recipe == LORA and isinstance(model, Mapping):
        found.items["adapter"], quantize_base = converted_adapter(found.note, model)
        if quantize_base is not None:
            found.add("quantize_base", quantize_base, "the blocks' matrices in 4 bits")
    for key, node in resolved.items.items():
        if key not in ("metric_logger", "profiler"):  # mostly dropped, with the faults in them
            faults += [why for place, why in unresolved.items() if place.split(".")[0] == key]
        _convert(found, key, node, schema)
    if faults:
        raise ConfigError("\n  ".join(faults))
    if "checkpoint_dir" not in found.items:
        raise ConfigError(f"{path}: checkpointer.checkpoint_dir is not set: add the model's folder")
    _tokenizer_path(found)
    if "clip_grad_norm" not in found.items:
        found.add("clip_grad_norm", Scalar("null"), "torchtune clips only where it is told to")
    if not {"val_fraction", "dataset_val"} & found.items.keys():
        found.add("val_fraction", Scalar("0"), "torchtune holds no rows out")
    return found


def _convert(found: Conversion, key: str, node: Node, schema: Schema) -> None:
    """Put one top-level key where it belongs."""
    if key == "checkpointer":
        _checkpointer(found, node)
    elif key in ("dataset", "dataset_val"):
        found.items[key] = converted_dataset(found.note, key, node)
    elif key in ("model", "tokenizer", "optimizer", "lr_scheduler", "loss"):
        _component(found, key, node)
    elif key in ("metric_logger", "profiler"):
        _switched(found, key, node, is_known=key in schema)
    elif key == "seed" and _value(node) is None:
        found.note("dropped", key, "null was another seed each time; here a run repeats: 42")
    elif key == "resume_from_checkpoint" and _value(node) is True:
        found.note("lost", key, "torchtune's training state is not read: start from the weights")
    elif key in schema:
        found.items[key] = node
        found.note("kept", key)
    else:
        _elsewhere(found, key, node, key_here(key))


def _elsewhere(found: Conversion, key: str, node: Node, here: Here | None) -> None:
    """Rename or drop a key that is not one of ours."""
    if here is None:
        found.note("lost", key, f"neither torchtune nor solotune knows it{at(node.where)}")
    elif here.name is None:
        found.note("dropped", key, here.why)
    elif "." in here.name:
        found.note("lost", key, f"set {here.name}")
    else:
        found.items.setdefault(here.name, node)
        found.note("renamed", key, here.name)


def _checkpointer(found: Conversion, node: Node) -> None:
    items = node.items if isinstance(node, Mapping) else {}
    for name, child in items.items():
        key, value = f"checkpointer.{name}", _value(child)
        here = key_here(key)
        if name == "checkpoint_dir" and isinstance(value, str):
            folder = re.sub(r"/original/?$", "", value)
            found.items[name] = Scalar(folder, quoted=True)
            found.comments.move(key, name)
            why = "" if folder == value else ": the folder of the .safetensors, above Meta's own"
            found.note("renamed", key, f"{name}{why}")
        elif name in ("recipe_checkpoint", "adapter_checkpoint"):
            unset = "nothing was to be resumed"
            lost = "torchtune's training state is not read: start from the weights"
            found.note(*(("dropped", key, unset) if value is None else ("lost", key, lost)))
        elif name == "output_dir" and value is not None:
            taken = "output_dir" in found.items
            found.items.setdefault(name, child)
            found.note(*(("dropped", key, "it is output_dir") if taken else ("renamed", key, name)))
        elif here and here.name and here.name != "checkpoint_dir":
            _elsewhere(found, key, child, here)
        else:
            found.note("dropped", key, here.why if here else "it has no effect here")


def _component(found: Conversion, key: str, node: Node) -> None:
    """Convert a node that names a component."""
    if not isinstance(node, Mapping):
        found.items[key] = node
        found.note("kept", key)
        return
    path = _value(node.items.get("_component_"))
    new: dict[str, Node] = {}
    if isinstance(path, str) and _is_replaced(path):
        name = _component_name(path, f"{key}._component_{at(node.where)}")
        found.note("replaced", f"{key}._component_", name)
        new["_component_"] = Scalar(name)
    elif path is not None:
        found.note("kept", f"{key}._component_")
        new["_component_"] = Scalar(str(path))
    for name, child in node.items.items():
        if name != "_component_":
            _argument(found, f"{key}.{name}", child, new, is_ours=not _is_replaced(str(path)))
    if path == "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup":
        new["final_lr_ratio"] = Scalar("0.0")
        found.comments.beside[f"{key}.final_lr_ratio"] = "as torchtune's; our default is 0.1"
        found.note("added", f"{key}.final_lr_ratio", "0.0: torchtune's cosine ends at 0")
    found.items[key] = Mapping(new)


def _argument(
    found: Conversion, key: str, node: Node, new: dict[str, Node], *, is_ours: bool
) -> None:
    """Put one argument of a component into `new`, or say why not."""
    node_key, _, name = key.partition(".")
    value, here = _value(node), key_here(key)
    kept = (
        is_ours
        or node_key == "optimizer"
        or key in ("tokenizer.max_seq_len", "lr_scheduler.num_warmup_steps")
    )
    if key == "tokenizer.max_seq_len" and value is None:
        found.note("dropped", key, "null was no limit; here it is 2048, and rows cut are counted")
    elif key == "tokenizer.path" and isinstance(value, str):
        new["path"] = Scalar(re.sub(r"(/original)?/[^/]+$", "", value), quoted=True)
    elif key == "tokenizer.prompt_template" and value is not None:
        found.note("lost", key, "set tokenizer.chat_template: chatml, or the path of a .jinja file")
    elif key == "lr_scheduler.num_cycles":
        what: What = "dropped" if value in (None, 0.5) else "lost"
        found.note(what, key, "the schedule is half a cosine")
    elif node_key == "model":
        what = "lost" if name.endswith("_trainable") else "dropped"
        found.note(what, key, here.why if here else "the model is read from config.json")
    elif kept:
        new[name] = node
        found.note("kept", key)
    elif here is not None and here.name is None:
        found.note("dropped", key, here.why)
    elif here is not None and key == "loss.num_output_chunks":
        found.note("dropped", key, "chunks are loss.chunk_tokens tokens, of a size that it chooses")
    else:
        found.note("lost", key, f"{node_key} takes no {name}")


def _switched(found: Conversion, key: str, node: Node, *, is_known: bool) -> None:
    """Convert a metric logger or profiler, where it is on and there is one."""
    items: Dict[str, Node] = node.items if isinstance(node, Mapping) else {}
    path = str(_value(items.get("_component_")))
    here = component_here(path) if path.startswith("torchtune.") else Here(path)
    is_off = key == "profiler" and _value(items.get("enabled")) is False
    if is_off or here is None or here.name is None or not is_known:
        why = "it was switched off" if is_off else here.why if here else "it has no equivalent here"
        is_lost = not is_off and (here is None or not is_known)
        found.note("lost" if is_lost else "dropped", key, why)
        return
    found.note("replaced", f"{key}._component_", here.name)
    new: dict[str, Node] = {"_component_": Scalar(here.name)}
    takes = {
        "solotune.training.StepProfiler": "wait_steps warmup_steps active_steps record_shapes "
        "profile_memory with_stack",
        "solotune.training.WandBLogger": "project entity name mode",
    }
    for name, child in items.items():
        if name in takes.get(here.name, "").split():
            new[name] = child
            found.note("kept", f"{key}.{name}")
        elif name != "_component_":
            rule = key_here(f"{key}.{name}")
            found.note("dropped", f"{key}.{name}", rule.why if rule else "it has no equivalent")
    found.items[key] = Mapping(new)


def _tokenizer_path(found: Conversion) -> None:
    """Drop tokenizer.path where it is the model's folder, as nearly always."""
    node = found.items.get("tokenizer")
    path = node.items.get("path") if isinstance(node, Mapping) else None
    if not isinstance(node, Mapping) or path is None:
        return
    model = found.items["checkpoint_dir"]
    if str(_value(path)).rstrip("/") == str(_value(model)).rstrip("/"):
        del node.items["path"]
        found.note("dropped", "tokenizer.path", "the tokenizer is read from checkpoint_dir")
    else:
        found.note("kept", "tokenizer.path", "the folder instead of the file")


def _is_replaced(path: str) -> bool:
    return path.startswith(("torchtune.", _OLD_TORCHAO)) or path == "torch.nn.CrossEntropyLoss"


def _component_name(path: str, place: str) -> str:
    if path.startswith(_OLD_TORCHAO):
        return f"torchao.optim.{path.removeprefix(_OLD_TORCHAO)}"
    if path == "torch.nn.CrossEntropyLoss":
        return "solotune.losses.LinearCrossEntropy"
    here = component_here(path)
    if here is None or here.name is None:
        why = here.why if here else "it has no equivalent here"
        raise ConfigError(f"{place}: {path}: {why}")
    return here.name


def _value(node: Node | None) -> object:
    """Return the value of a scalar, None for anything else."""
    return scalar_value(node) if isinstance(node, Scalar) else None
