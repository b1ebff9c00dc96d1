"""A recipe of a few keys, and a loader of YAML text for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from solotune.config import Loaded, load

RECIPE = '''"""A recipe that trains nothing."""

from dataclasses import dataclass
from typing import Literal

from solotune.config import Component, resolved_yaml, run_recipe


@dataclass(kw_only=True)
class Config:
    """Keys of every type."""

    optimizer: Component
    dataset: Component
    dataset_val: Component | None = None
    loss: Component | None = None
    lr_scheduler: Component | None = None
    tokenizer: Component | None = None
    output_dir: str  # a folder
    run_name: str | None = None
    lr: float = 1e-3  # of the optimizer
    steps: int = 1
    shuffle: bool = True
    ac_mode: Literal["full", "selective"] = "full"
    clip_grad_norm: float | None = 1.0
    resume_from_checkpoint: bool | str = False
    names: list[str] | None = None
    grid: list[list[str | int]] | None = None
    extra: dict | None = None


def validate(cfg):
    pass


def main(cfg):
    print(resolved_yaml(cfg), end="")


if __name__ == "__main__":
    run_recipe(main, Config)
'''

YAML = """\
recipe: tiny.py
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
  weight_decay: 0.1
dataset: chats.jsonl
output_dir: out
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def load_yaml(recipe: Path) -> Callable[..., Loaded]:
    def load_text(
        *overrides: str, more: str = "", change: tuple[str, str] = ("", ""), trust: tuple = ()
    ) -> Loaded:
        config = recipe.with_name("tiny.yaml")
        config.write_text(YAML.replace(*change) + more, encoding="utf-8")
        return load(recipe, config, overrides, trust=trust)

    return load_text
