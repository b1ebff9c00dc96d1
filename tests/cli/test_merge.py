"""`tune merge`: what it prints, and how it ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.models import auto

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
}
LAYER = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with torch.device("meta"):
        model = auto(folder)
    weights = {
        model.to_hf_key(name): torch.ones(p.shape, dtype=torch.bfloat16)
        for name, p in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    """A run folder with an adapter that adds 2 * 0.5 * 3 to each number of a weight."""
    folder = tmp_path / "run" / "step_1"
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text("step_1\n")
    tensors = {"lora_A.weight": torch.full((1, 16), 0.5), "lora_B.weight": torch.full((16, 1), 3.0)}
    named = {f"base_model.model.{LAYER}.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]}
    config["base_model_name_or_path"] = str(base)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder.parent


def test_a_run_is_merged_and_the_folder_is_the_last_line(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "merged"
    assert main(["merge", str(base), str(adapter), str(out)]) == 0
    assert capsys.readouterr().out == (
        "1 adapted layers merged; 12 tensors, 0.00 GiB\n"
        "note: the adapter does not tell which weights it was trained on; its names and shapes fit "
        f"these\n{out}\n"
    )
    weights = load_file(out / "model.safetensors")
    changed = {name for name, weight in weights.items() if not bool((weight == 1).all())}
    assert changed == {f"{LAYER}.weight"}
    assert bool((weights[f"{LAYER}.weight"] == 1 + 2 * 0.5 * 3).all())


def test_a_refusal_is_one_sentence(
    base: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["merge", str(base), str(base), str(tmp_path / "merged")]) == 1
    assert capsys.readouterr().err == (
        f"error: {base} holds no adapter_config.json: name the folder of an adapter\n"
    )
    assert main(["merge", str(adapter), str(adapter), str(tmp_path / "merged")]) == 1
    assert "step_1 holds an adapter, not a model" in capsys.readouterr().err
    assert main(["merge", str(base), str(adapter)]) == 2


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from solotune.cli.main import main\n"
        "try: main(['merge', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "tune merge models/SmolLM2-135M-Instruct runs/mine merged/mine" in result.stdout
