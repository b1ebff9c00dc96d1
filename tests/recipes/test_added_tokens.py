"""A base model without a chat template gets one, and rows for its tokens."""

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from solotune.checkpoint import load_weights
from solotune.models import auto
from solotune.tokenizers import auto as load_tokenizer
from tests.recipes.conftest import CONFIG, ROOT, basics, differing, tune, write_model
from tests.recipes.test_contract import stop_after_step

RECIPE = ROOT / "recipes/full_finetune_single_device.py"
ADDED = (
    "tokenizer.added_tokens=[<|im_start|>, <|im_end|>]",
    "tokenizer.chat_template=chatml",
)


@pytest.fixture(scope="module", params=["tied", "untied"])
def base(
    request: pytest.FixtureRequest,
    write_tokenizer: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A base model: 258 tokens with as many rows, no template."""
    folder = tmp_path_factory.mktemp(request.param)
    specials = ("<s>", "</s>")
    tokenizer = write_tokenizer(folder / "tokenizer", template=None, specials=specials)
    model = write_model(folder / "model", tokenizer, tied=request.param == "tied")
    return shrink(model, rows=258)


def shrink(model: Path, *, rows: int) -> Path:
    """Leave the first `rows` rows of the embedding and of the output weight."""
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": rows}
    (model / "config.json").write_text(json.dumps(config))
    kept = {
        name: t[:rows].contiguous() if len(t) == CONFIG["vocab_size"] else t
        for name, t in load_file(model / "model.safetensors").items()
    }
    save_file(kept, model / "model.safetensors", metadata={"format": "pt"})
    return model


def test_a_base_model_learns_chatml_and_goes_on_exactly(
    base: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    words = [*basics(base, chats, max_steps_per_epoch=2), *ADDED]
    whole, part = tmp_path / "whole", tmp_path / "part"
    assert tune("run", RECIPE, *words, f"output_dir={whole}") == 0
    with monkeypatch.context() as patch:
        stop_after_step(patch, 1)
        assert tune("run", RECIPE, *words, f"output_dir={part}") == 128 + signal.SIGTERM
    assert tune("run", RECIPE, *words, f"output_dir={part}", "resume_from_checkpoint=True") == 0
    final = whole / "final"
    assert not differing(final, part / "final")
    assert json.loads((final / "config.json").read_text())["vocab_size"] == 260

    with torch.device("meta"):
        ours = auto(final)
    tokenizer = load_tokenizer(final)
    load_weights(ours, final, device="cpu")
    chat = [{"role": "user", "content": "say 3"}]
    ids = transformers.AutoTokenizer.from_pretrained(final).apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert ids == tokenizer.encode_chat(chat)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final)
    assert theirs.generation_config.eos_token_id == [257, 259]
    tokens_BS = torch.tensor([ids])
    with torch.no_grad():
        context = ours.context(torch.arange(len(ids)).unsqueeze(0), None)
        logits = ours.logits(ours.hidden_states(ours.embed(tokens_BS), context))
        torch.testing.assert_close(logits, theirs(tokens_BS).logits, atol=1e-4, rtol=1e-4)


def test_the_saved_model_is_trained_on_without_new_rows(
    base: Path, chats: Path, tmp_path: Path
) -> None:
    """A second run with the same words begins with the rows that the first one trained."""
    words = [*ADDED, "max_steps_per_epoch=1"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert tune("run", RECIPE, *basics(base, chats), *words, f"output_dir={first}") == 0
    again = basics(first / "final", chats, **{"optimizer.lr": 0.0})
    assert tune("run", RECIPE, *again, *words, f"output_dir={second}") == 0
    assert not differing(first / "final", second / "final")


def test_without_added_tokens_the_run_stops_before_weights_are_read(
    base: Path, chats: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = [*basics(base, chats), "tokenizer.chat_template=chatml", f"output_dir={tmp_path / 'a'}"]
    assert tune("run", RECIPE, *words) == 1
    error = capsys.readouterr().err
    assert "add them with tokenizer.added_tokens=[<|im_start|>, <|im_end|>]" in error
