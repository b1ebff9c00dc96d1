"""Recipes know no family: another one trains, is saved, and answers as transformers lets it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from solotune.models.auto import FAMILIES
from solotune.tokenizers import auto as load_tokenizer
from tests.models.families import tiny_config
from tests.models.tiny import fill_

from .conftest import TRAINING, basics, differing, names, tune

each_training = pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))
Write = Callable[..., Path]


@pytest.fixture
def write(tiny_tokenizer_dir: Path, tmp_path: Path) -> Write:
    """Return a function that writes the folder of a tiny random model of a family."""

    def write(family: str, **fields: Any) -> Path:
        folder = tmp_path / family
        shutil.copytree(tiny_tokenizer_dir, folder)
        ids = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257}
        config = tiny_config(family) | ids | {"vocab_size": 260, "dtype": "float32"} | fields
        (folder / "config.json").write_text(json.dumps(config))
        model = fill_(FAMILIES[family].build(config))
        weights = {model.to_hf_key(name): p.detach() for name, p in model.named_parameters()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return write


# PEFT's, where both the embedding and the head it is tied to have an adapter of their own.
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@each_training
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])
def test_a_family_trains_is_saved_and_answers_as_transformers_lets_it(
    recipe: Path, family: str, write: Write, chats: Path, tmp_path: Path
) -> None:
    folder, run, answers = write(family), tmp_path / "run", tmp_path / "answers.jsonl"
    steps = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2}
    assert (
        tune("run", recipe, *basics(folder, chats, recipe=recipe, **steps), f"output_dir={run}")
        == 0
    )
    final = run / "final"
    assert differing(folder, final)

    prompt = "a prompt that is longer than the window"
    words = [f"checkpoint_dir={final}", f"prompt={prompt}", "chat=False", f"output_file={answers}"]
    words += ["max_new_tokens=12", "dtype=fp32", "device=cpu"]
    assert tune("run", "generate", *words) == 0
    tokenizer = load_tokenizer(final)
    tokens_1S = torch.tensor([tokenizer.encode(prompt, add_bos=tokenizer.adds_bos)])
    theirs: Any = AutoModelForCausalLM.from_pretrained(final)
    limits: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    if (final / "adapter_config.json").exists():  # transformers goes by its base's own config
        limits["eos_token_id"] = tokenizer.stop_ids()
    theirs_1S = theirs.generate(tokens_1S, **limits)
    answer = tokenizer.decode(theirs_1S[0, tokens_1S.size(1) :].tolist(), skip_special=True)
    assert json.loads(answers.read_text())["answer"] == answer


@each_training
@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_loss_has_the_models_soft_cap(
    recipe: Path, accumulation: int, write: Write, chats: Path, tmp_path: Path
) -> None:
    folder = write("gemma2", final_logit_softcapping=2.0)
    finals = {}
    for name, words in {
        "as the model": [],
        "said": ["loss.soft_cap=2.0"],
        "another": ["loss.soft_cap=100.0"],
    }.items():
        output = tmp_path / name
        keys = basics(folder, chats, recipe=recipe, gradient_accumulation_steps=accumulation)
        assert tune("run", recipe, *keys, f"output_dir={output}", *words) == 0
        finals[name] = output / "final"
    assert differing(finals["as the model"], finals["said"]) == []
    assert differing(finals["as the model"], finals["another"])
