"""Answers of adapters and 4-bit models: what the merged model says, from any folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.checkpoint import load_weights
from solotune.checkpoint.adapter import adapter_sources, write_adapter
from solotune.checkpoint.base_model import fingerprint
from solotune.checkpoint.merge import merge
from solotune.models import auto

from .conftest import ROOT, tune

RECIPE = ROOT / "recipes" / "generate.py"
Answer = Callable[..., str]


@pytest.fixture
def answer(tmp_path: Path, capsys: pytest.CaptureFixture) -> Answer:
    """Return a function that runs the recipe on a folder and returns what it printed."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("hi\nWhat is a decorator?\nsay 7\n")

    def run(folder: Path, *, fails: bool = False, **keys: object) -> str:
        keys = {"device": "cpu", "dtype": "fp32", "max_new_tokens": 12} | keys
        words = [f"{name}={value}" for name, value in keys.items()]
        code = tune("run", RECIPE, f"checkpoint_dir={folder}", f"prompts_file={prompts}", *words)
        captured = capsys.readouterr()
        assert code == int(fails), captured.err
        return captured.err.removeprefix("error: ").strip() if fails else captured.out

    return run


def write(base: Path, folder: Path, *, named: str | None = None, **settings) -> Path:
    """Write an adapter of `base` that changes much, without a tokenizer."""
    lora = LoRA(rank=4, alpha=8, **settings)
    with torch.device("meta"):
        model = auto(base)
    inject(model, lora)
    load_weights(model, base, device="cpu")
    initialize(model, 0)
    generator = torch.Generator().manual_seed(1)
    for parameter in adapter_parameters(model).values():
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    folder.mkdir(parents=True)
    write_adapter(
        folder,
        model,
        adapter_sources(model, multimodal=False),
        lora=lora,
        base=named or str(base),
        base_fingerprint=fingerprint(base),
        multimodal=False,
    )
    return folder


@pytest.mark.parametrize("name", ["tied", "untied"])
@pytest.mark.parametrize(
    "settings", [{}, {"targets": ["embed_tokens", "lm_head", "v_proj"], "dora": True}]
)
def test_an_adapter_answers_as_the_merged_model(
    answer: Answer, models, tmp_path: Path, name: str, settings: dict
) -> None:
    adapter = write(models[name], tmp_path / "adapter", **settings)
    merge(models[name], adapter, tmp_path / "merged")
    wanted = answer(tmp_path / "merged")
    assert answer(adapter) == wanted != answer(models[name])


def test_a_run_folder_answers_with_its_latest_adapter(
    answer: Answer, models, tmp_path: Path
) -> None:
    adapter = write(models["untied"], tmp_path / "run" / "step_3")
    (tmp_path / "run" / "latest").write_text("step_3\n")
    assert answer(tmp_path / "run") == answer(adapter)


def test_the_base_is_found_or_named(
    answer: Answer, models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, hub = models["untied"], "someone/Tiny-1B"
    adapter = write(base, tmp_path / "adapter", named=hub)
    wanted = answer(adapter, base_dir=base)
    assert answer(adapter, fails=True) == (
        f"{adapter} is an adapter of {hub}, which is not on this machine: `tune download {hub}`, "
        "or set base_dir to its folder"
    )
    monkeypatch.chdir(tmp_path)
    downloaded = shutil.copytree(base, tmp_path / "models" / "Tiny-1B")
    (downloaded / ".downloaded_from").write_text(f"{hub}\n")
    assert answer(adapter) == wanted
    gone = write(base, tmp_path / "gone", named="/nowhere/model")
    assert answer(gone, fails=True).endswith(
        "/nowhere/model, which does not exist here: set base_dir to the folder of that model"
    )
    assert "trained on other weights" in answer(adapter, base_dir=models["tied"], fails=True)


def test_the_tokenizer_of_the_adapter_comes_first(
    answer: Answer, models, tmp_path: Path, write_tokenizer
) -> None:
    adapter = write(models["untied"], tmp_path / "adapter")
    plain = answer(adapter)
    write_tokenizer(adapter, template="{% for m in messages %}{{ m.content }}?{% endfor %}")
    assert answer(adapter) != plain


def test_base_dir_without_an_adapter_is_refused(answer: Answer, models) -> None:
    assert answer(models["tied"], base_dir=models["tied"], fails=True) == (
        f"base_dir has no effect: {models['tied']} holds a model, not an adapter"
    )


def test_four_bit_weights_answer_with_and_without_an_adapter(
    answer: Answer, models, tmp_path: Path
) -> None:
    base = models["untied"]
    adapter = write(base, tmp_path / "adapter")
    exact = answer(base)
    coarse = answer(base, quantize_base="nf4")
    assert coarse != exact, "a random model is not robust against 4 bits"
    assert answer(adapter, quantize_base="nf4") not in (coarse, exact)


def test_another_verb_says_what_an_adapter_folder_is(models, tmp_path: Path, capsys) -> None:
    adapter = write(models["untied"], tmp_path / "adapter")
    config = "smollm2/135M_full_single_device"
    assert tune("inspect", "model", config, f"checkpoint_dir={adapter}") == 1
    assert capsys.readouterr().err == (
        f"error: {adapter} holds an adapter, not a model: `tune merge` makes it one; to train the "
        "adapter on, name its base as checkpoint_dir and it as adapter.source\n"
    )


def test_a_damaged_adapter_is_one_sentence(answer: Answer, models, tmp_path: Path) -> None:
    adapter = write(models["untied"], tmp_path / "adapter")
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    assert answer(adapter, fails=True).endswith(
        "lacks model.layers.0.self_attn.q_proj.lora_magnitude_vector: the file is damaged, copy "
        "it again"
    )
