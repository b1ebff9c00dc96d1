"""What a plan is made from: a recipe's config, and of its model the sizes alone."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from solotune import models
from solotune.checkpoint import model_folder
from solotune.config import find_config
from solotune.errors import CheckpointError, ConfigError, UserError
from solotune.plan.device_profile import DeviceProfile
from solotune.plan.needs import Planned
from solotune.plan.simulate import Work

_NEEDED = ("setup_model", "setup_host", "setup_optimizer", "train_step")
_SIZES = re.compile(r"# model: (\w+)\s*")
_CONFIGS = ("config.json", "adapter_config.json")
_MAX_SEQ_LEN = 2048  # tokens of a row, where a tokenizer node does not say


def check_recipe(recipe: ModuleType, name: str) -> None:
    """Raise UserError for a recipe without the functions that a plan calls."""
    if missing := [function for function in _NEEDED if not hasattr(recipe, function)]:
        raise UserError(
            f"{name} cannot be planned: it has no {' and no '.join(missing)}, which a training "
            "recipe has (see docs/plan.md)"
        )


def work_of(cfg: Any) -> tuple[Work, list[str]]:
    """Return the micro-batch of a config, and what is assumed of it."""
    tokens = cfg.tokenizer.arguments.get("max_seq_len") or _MAX_SEQ_LEN
    facts = [
        f"a step of {cfg.batch_size} x {cfg.gradient_accumulation_steps} rows of {tokens} tokens, "
        "each full and one sample, every position a target"
    ]
    return Work(cfg.batch_size, tokens), facts


def kind_of(cfg: Any, profile: DeviceProfile | None) -> tuple[str, list[str]]:
    """Return what a config's device is planned as, cuda or cpu, and what is assumed of it.

    Raises ConfigError where `device` names none.
    """
    name = cfg.device.partition(":")[0]
    if name not in ("auto", "cuda", "cpu", "mps", "xpu"):
        raise ConfigError(f"device={cfg.device}: use auto, cuda, cpu, mps or xpu")
    if name == "auto" and profile is not None:
        return profile.kind, [f"the device is {profile.name}"]
    if profile is not None and (profile.kind == "cpu") != (name == "cpu"):
        raise ConfigError(
            f"device={cfg.device} is not what --device-profile {profile.name} tells of"
        )
    if name in ("mps", "xpu"):
        return "cuda", [f"memory of {name} as that of a CUDA card"]
    return ("cpu", []) if name == "cpu" else ("cuda", [] if name == "cuda" else ["a CUDA card"])


def facts_of(planned: Planned) -> list[str]:
    """Return what is assumed of a plan's optimizer."""
    if not planned.simulated.is_paged:
        return []
    return ["paged optimizer state is the host's, of which a card takes what a step touches"]


@contextmanager
def sizes_of(cfg: Any, config_name: str | None) -> Iterator[tuple[Path, list[str]]]:
    """Yield a folder with the model's config.json, and what is assumed of it.

    Where checkpoint_dir is not there yet, the sizes are those that the config file names
    (`# model: llama3_1_8b`), or those of a builder that has them itself. Raises CheckpointError
    where nothing tells them.
    """
    try:
        folder = model_folder(cfg.checkpoint_dir)
        fault = f"checkpoint_dir={folder} has no config.json"
    except CheckpointError as error:
        folder, fault = None, str(error).partition(":")[0]
    if folder and any((folder / name).is_file() for name in _CONFIGS):
        yield folder, []
        return
    if cfg.model.path != "solotune.models.auto":
        yield Path(cfg.checkpoint_dir), [f"the sizes of {cfg.model.path}, as {fault}"]
        return
    name = named_sizes(config_name)
    if name is None:
        raise CheckpointError(
            f"{fault}, and nothing else tells the model's sizes: fetch the model, or name a "
            "builder, model=solotune.models.llama3_1_8b"
        )
    with torch.device("meta"):
        config = getattr(models, name)().config
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(folder), [f"the sizes of {name}, which the config names, as {fault}"]


def named_sizes(config_name: str | None) -> str | None:
    """Return the builder that the head of a config file names."""
    if config_name is None:
        return None
    for line in find_config(config_name).read_text(encoding="utf-8-sig").splitlines():
        match = _SIZES.fullmatch(line)
        if match and hasattr(models, match[1]):
            return match[1]
    return None
