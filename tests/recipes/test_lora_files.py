"""What a LoRA run leaves behind: merged it is the trained model, and its base is untouched."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from .conftest import ROOT, tune, weights

RECIPE = ROOT / "recipes" / "lora_finetune_single_device.py"


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_trained_adapter_merged_is_the_trained_model(
    train: Callable[..., Path], models, tmp_path: Path, capsys: pytest.CaptureFixture, model: str
) -> None:
    """Field case 18: merging must not write the base weights unchanged."""
    base = models[model]
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    final = train(
        RECIPE,
        "run",
        "adapter.targets=[q_proj,down_proj,lm_head]",
        model=model,
        max_steps_per_epoch=5,
        **{"optimizer.lr": 1e-2, "adapter.dora": True},
    )
    assert tune("merge", base, final.parent, tmp_path / "merged") == 0
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    merged, original = weights(tmp_path / "merged"), weights(base)
    changed = {n for n in original if not torch.equal(original[n], merged[n])}
    linears = {n for n in original if n.endswith(("q_proj.weight", "down_proj.weight"))}
    assert changed == linears | ({"lm_head.weight"} & original.keys())
    assert merged.keys() == original.keys() | {"lm_head.weight"}, "a tied head is one no more"

    def answers(folder: Path) -> str:
        capsys.readouterr()
        words = ["prompt=say 3", "dtype=fp32", "device=cpu", "max_new_tokens=12"]
        assert tune("run", "generate", f"checkpoint_dir={folder}", *words) == 0
        return capsys.readouterr().out

    assert answers(tmp_path / "merged") == answers(final) != answers(base)
