"""adapter_config.json, PEFT's description of an adapter: read with suspicion, written plainly.

The format is LoraConfig of https://github.com/huggingface/peft (fields of 0.21). A field that would
change a number and is not supported is refused by name and value; nothing is passed over but what
only describes.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from solotune.adapters.lora import LoRA
from solotune.checkpoint.save import read_json
from solotune.errors import CheckpointError

FILE = "adapter_config.json"
ALL_LINEAR = "all-linear"
HEAD = "lm_head"

# What only describes, or only mattered while the adapter was made.
_INERT = frozenset(
    "auto_mapping peft_version revision inference_mode megatron_core qalora_group_size "
    "runtime_config loftq_config eva_config corda_config lora_ga_config".split()
)
_READ = frozenset(
    "peft_type base_model_name_or_path r lora_alpha lora_dropout target_modules exclude_modules "
    "layers_to_transform layers_pattern rank_pattern alpha_pattern use_dora use_rslora".split()
)
# Fields that may have another value than null, False or nothing: the values that change no number.
_ALLOWED: dict[str, tuple[object, ...]] = {
    "task_type": ("CAUSAL_LM", None),
    "bias": ("none", None),
    # The others (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA) change the base weights as well.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
_REPAIRS = {
    "init_lora_weights": (
        "it changes the base weights too; save it with peft as a plain LoRA "
        "(path_initial_model_for_weight_conversion)"
    ),
    "modules_to_save": "merge it with peft, or train an adapter without it",
    "task_type": "only adapters of causal language models are",
}
_BLOCK = re.compile(r"\blayers\.(\d+)\.")
_PLAIN_KEY = re.compile(r"\^?[\w.]+")


@dataclass(frozen=True, kw_only=True)
class AdapterConfig:
    """How the tensors of an adapter folder are meant.

    Module names are Hugging Face's (`model.layers.0.self_attn.q_proj`), as the patterns want them.
    """

    folder: Path
    base: str | None  # a path or a name of the Hub
    rank: int
    alpha: float
    targets: tuple[str, ...] | str  # names, one pattern, or "all-linear"
    exclude: tuple[str, ...] | str = ()
    layers: tuple[int, ...] | None = None
    layers_pattern: tuple[str, ...] = ()
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    dropout: float = 0.0
    dora: bool = False
    rslora: bool = False

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scaling(self, module: str) -> float:
        """Return the factor of B A that is added to the module's weight."""
        rank, alpha = self.rank_of(module), _by_pattern(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    def adapts(self, module: str) -> bool:
        """Whether PEFT would adapt the linear layer or embedding with this name."""
        if _named(self.exclude, module):
            return False
        if isinstance(self.targets, str):
            if self.targets.lower() == ALL_LINEAR:
                return module.rpartition(".")[2] not in (HEAD, "embed_tokens")
            return _named(self.targets, module)
        if module in self.targets:
            return True
        return _named(self.targets, module) and self._in_layers(module)

    def _in_layers(self, module: str) -> bool:
        if not self.layers:
            return True
        for pattern in self.layers_pattern or (r"[^.]*",):
            if match := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module):
                return int(match[1]) in self.layers
        return False


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder holds an adapter rather than a model."""
    return (folder / FILE).is_file()


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Return what adapter_config.json says; raises CheckpointError for what is not supported."""
    path = folder / FILE
    if not path.is_file():
        raise CheckpointError(f"{folder} holds no {FILE}: name the folder of an adapter")
    fields = read_json(path)
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(f"{path}: peft_type {kind!r} is not supported; 'LORA' is")
    for name, value in fields.items():
        _check_supported(path, name, value)
    read = _Reader(path, fields)
    return AdapterConfig(
        folder=folder,
        base=read.text("base_model_name_or_path"),
        rank=read.count("r", 8),
        alpha=read.number("lora_alpha", 8),
        targets=read.names("target_modules") or read.refuse("target_modules", "it names nothing"),
        exclude=read.names("exclude_modules"),
        layers=read.numbers("layers_to_transform"),
        layers_pattern=read.plain_names("layers_pattern"),
        rank_pattern=read.pattern("rank_pattern", whole=True),
        alpha_pattern=read.pattern("alpha_pattern", whole=False),
        dropout=read.number("lora_dropout", 0.0),
        dora=read.flag("use_dora"),
        rslora=read.flag("use_rslora"),
    )


def written_config(
    layers: Mapping[str, tuple[int, float]],
    *,
    candidates: Iterable[str],
    base: str,
    lora: LoRA,
) -> dict[str, Any]:
    """Return the content of adapter_config.json for adapted `layers`: rank and scaling by name.

    `candidates` are the names of all that could be adapted. `target_modules` are short names where
    these mean exactly the adapted layers in PEFT, else full names: patterns are not understood by
    every reader.
    """
    ranks = {name: rank for name, (rank, _) in layers.items() if rank != lora.rank}
    alphas = {
        name: round(scaling * (math.sqrt(rank) if lora.rslora else rank), 9)
        for name, (rank, scaling) in layers.items()
        if (rank, scaling) != (lora.rank, lora.scaling)
    }
    config: dict[str, Any] = {
        "alpha_pattern": alphas,
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_to_transform": None,
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": lora.rank,
        "rank_pattern": ranks,
        "target_modules": sorted(layers),
        "task_type": "CAUSAL_LM",
        "use_dora": lora.dora,
        "use_rslora": lora.rslora,
    }
    short = sorted({name.rpartition(".")[2] for name in layers})
    blocks = sorted({int(match[1]) for name in layers if (match := _BLOCK.search(name))})
    names = list(candidates)
    for chosen in (None, blocks):
        meant = AdapterConfig(
            folder=Path(),
            base=base,
            rank=lora.rank,
            alpha=lora.alpha,
            targets=tuple(short),
            layers=tuple(chosen) if chosen else None,
        )
        if {name for name in names if meant.adapts(name)} == set(layers):
            return config | {"target_modules": short, "layers_to_transform": chosen}
    return config


def _check_supported(path: Path, name: str, value: Any) -> None:
    if name in _INERT or name in _READ:
        return
    if name in _ALLOWED:
        # 1 == True, so by type too
        if any(type(value) is type(known) and value == known for known in _ALLOWED[name]):
            return
    elif value in (None, False, "", [], {}):
        return
    repair = _REPAIRS.get(name, "make the adapter without it")
    raise CheckpointError(f"{path}: {name}={_shown(value)} is not supported: {repair}")


class _Reader:
    """The fields of the file, each with its type checked."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self.path, self.fields = path, fields

    def refuse(self, name: str, what: str) -> Any:
        raise CheckpointError(
            f"{self.path}: {name}={_shown(self.fields.get(name))}: {what}; the file is damaged or "
            "was edited, copy it again"
        )

    def text(self, name: str) -> str | None:
        value = self.fields.get(name)
        if value is not None and (not isinstance(value, str) or "\0" in value):
            self.refuse(name, "a text is needed")
        return value or None

    def flag(self, name: str) -> bool:
        value = self.fields.get(name) or False
        return value if isinstance(value, bool) else self.refuse(name, "true or false is needed")

    def count(self, name: str, default: int) -> int:
        value = self.fields.get(name, default)
        ok = type(value) is int and value > 0
        return value if ok else self.refuse(name, "a whole number above 0 is needed")

    def number(self, name: str, default: float) -> float:
        value = self.fields.get(name, default)
        return value if _is_number(value) else self.refuse(name, "a number is needed")

    def numbers(self, name: str) -> tuple[int, ...] | None:
        value = self.fields.get(name)
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if not all(type(number) is int and number >= 0 for number in values):
            self.refuse(name, "the numbers of layers are needed")
        return tuple(values) or None

    def names(self, name: str) -> tuple[str, ...] | str:
        """A list of names, or one pattern as text."""
        value = self.fields.get(name)
        if isinstance(value, str):
            try:
                re.compile(value)
            except re.error as error:
                self.refuse(name, f"no regular expression ({error})")
            return value
        values = [] if value is None else value
        if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
            self.refuse(name, "a list of names is needed")
        return tuple(values)

    def plain_names(self, name: str) -> tuple[str, ...]:
        value = self.fields.get(name) or []
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str) and _PLAIN_KEY.fullmatch(item) for item in values):
            self.refuse(name, "only plain names are supported")
        return tuple(values)

    def pattern(self, name: str, *, whole: bool) -> dict[str, Any]:
        value = self.fields.get(name) or {}
        if not isinstance(value, dict):
            self.refuse(name, "numbers by module name are needed")
        for key, number in value.items():
            if not _PLAIN_KEY.fullmatch(key):
                raise CheckpointError(
                    f"{self.path}: the pattern {key!r} in {name} is not supported: use plain names "
                    "of modules"
                )
            if not (type(number) is int and number > 0 if whole else _is_number(number)):
                self.refuse(name, f"{key} is no {'rank' if whole else 'number'}")
        return value


def _by_pattern(pattern: Mapping[str, Any], module: str, default: Any) -> Any:
    """Return the value of the first key that is the module's name or ends it, as PEFT has it."""
    for key, value in pattern.items():
        if key.startswith("^"):
            if module == key[1:]:
                return value
        elif module == key or module.endswith(f".{key}"):
            return value
    return default


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(names) and re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
