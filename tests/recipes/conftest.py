"""A tiny model folder, a tiny data set, and `tune` in this process."""

import json
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from solotune.adapters import adapter_parameters, initialize
from solotune.checkpoint import inject_stored, load_weights
from solotune.checkpoint.adapter_config import is_adapter_folder
from solotune.checkpoint.stored_adapter import read_adapter
from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.config import read_schema
from solotune.models import auto
from solotune.training import RunLog

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p for p in (ROOT / "recipes").glob("*.py") if p.name != "__init__.py")
TRAINING = [recipe for recipe in RECIPES if "optimizer" in read_schema(recipe)]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 260,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "torch_dtype": "float32",
}


def write_model(folder: Path, tokenizer: Path, *, tied: bool) -> Path:
    """Write a random two-layer Llama in Hugging Face layout."""
    shutil.copytree(tokenizer, folder)
    config = CONFIG | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = auto(folder)
    weights = {
        model.to_hf_key(name): torch.ones_like(p) if p.dim() == 1 else 0.1 * torch.randn_like(p)
        for name, p in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def models(tiny_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders by name: `tied` and `untied`."""
    base = tmp_path_factory.mktemp("models")
    return {
        name: write_model(base / name, tiny_tokenizer_dir, tied=name == "tied")
        for name in ("tied", "untied")
    }


@pytest.fixture(scope="session")
def bf16_model(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untied model in bf16, with a field in config.json that nobody knows."""
    folder = tmp_path_factory.mktemp("bf16") / "model"
    shutil.copytree(models["untied"], folder)
    tensors = {name: tensor.bfloat16() for name, tensor in weights(folder).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"torch_dtype": "bfloat16", "x_note": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of chats whose answers differ much in length; 12 rows fill 8 packs of 96 tokens."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    rows = [
        {"prompt": f"say {number}", "completion": "yes " * (1 + number * 5 % 13)}
        for number in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# What a recipe of adapters needs besides: every kind of layer is adapted.
ADAPTER = {"adapter.rank": 4, "adapter.targets": "[all-linear, embed_tokens, lm_head]"}


def basics(model: Path, chats: Path, *, recipe: Any = None, **changes: object) -> list[str]:
    """Return the overrides of a short fp32 training run on CPU; `changes` win."""
    needs_adapter = recipe is not None and "adapter" in read_schema(recipe)
    values = {
        **(ADAPTER if needs_adapter else {}),
        "checkpoint_dir": model,
        "dataset": chats,
        "tokenizer.max_seq_len": 96,
        "device": "cpu",
        "dtype": "fp32",
        "optimizer": "torch.optim.AdamW",
        "optimizer.lr": 1e-3,
        "clip_grad_norm": None,
        "val_fraction": 0,
        "epochs": 1,
        "max_steps_per_epoch": 3,
        "batch_size": 1,
        "plan": False,  # costs a second; tests of it are in tests/plan
        **changes,
    }
    return [f"{key}={value}" for key, value in values.items()]


def tune(*words: str | Path) -> int:
    return main([str(word) for word in words])


@pytest.fixture
def train(models: dict[str, Path], chats: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that runs a recipe (changed keys as keywords) and returns its final/."""

    def run(
        recipe: Path, name: str = "run", *extra: str, model: str = "untied", **changes: object
    ) -> Path:
        output = tmp_path / name
        words = basics(models[model], chats, recipe=recipe, **changes)
        assert tune("run", recipe, *words, f"output_dir={output}", *extra) == 0
        return output / "final"

    return run


def weights(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a model folder, or all of an adapter's."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, folder
    return {name: t for file in files for name, t in load_file(file).items()}


def first_weights(start: Path, *, of: Path) -> dict[str, Tensor]:
    """Return what a run from the model `start` that left the folder `of` began with.

    A run of adapters began with first values of the adapter: they depend on seed and name alone.
    """
    if is_adapter_folder(start) or not is_adapter_folder(of):
        return weights(start)
    with torch.device("meta"):
        model = auto(start)
    stored = read_adapter(of)
    inject_stored(model, stored, dtype=next(iter(weights(of).values())).dtype)
    load_weights(model, start, device="cpu")
    initialize(model, seed=42)
    return {
        f"base_model.model.{model.to_hf_key(name)}": parameter.detach()
        for name, parameter in adapter_parameters(model).items()
    }


def differing(first: Path, second: Path) -> list[str]:
    """Return the names of the weights that are not bit-equal; `first` may be the model to begin."""
    a, b = first_weights(first, of=second), weights(second)
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def change_distance(start: Path, first: Path, second: Path) -> float:
    """Return the relative L2 distance between two runs' weight changes since `start`."""
    s, a, b = first_weights(start, of=first), weights(first), weights(second)
    difference = sum((a[n].double() - b[n].double()).square().sum() for n in s)
    change = sum((a[n].double() - s[n].double()).square().sum() for n in s)
    assert change > 0
    return float(difference / change) ** 0.5


def stop_after_step(patch: pytest.MonkeyPatch, step: int) -> None:
    """Send SIGTERM to this process when the run's step `step` is logged."""
    logged = RunLog.step

    def log_and_stop(self, number: int, *args, **values) -> None:
        logged(self, number, *args, **values)
        if number == step:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(RunLog, "step", log_and_stop)


def metrics(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl of a run folder."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names(paths: Sequence[Path]) -> list[str]:
    return [path.stem for path in paths]
