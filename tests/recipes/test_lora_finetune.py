"""What lora_finetune_single_device promises beyond the contract of all recipes."""

from pathlib import Path

import pytest
import torch

from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]

from .conftest import ROOT, basics, differing, metrics, stop_after_step, tune, weights

RECIPE = ROOT / "recipes" / "lora_finetune_single_device.py"
DROPOUT = {"adapter.dropout": 0.2, "dtype": "bf16", "gradient_accumulation_steps": 2}

SCHEDULES = {
    "checkpointing": {"enable_activation_checkpointing": True},
    "keep attention": {"ac_mode": "selective", "ac_option": "op"},
    "offloading all": {
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": True,
    },
    "layer-major": {"optimizer_in_bwd": True},
    "streamed layers": {"optimizer_in_bwd": True, "resident_layers": 1},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout_drops_the_same_in_every_schedule(train, schedule: str) -> None:
    off = {"enable_activation_checkpointing": False}
    plain = train(RECIPE, "plain", model="tied", **DROPOUT | off)
    other = train(RECIPE, "other", model="tied", **DROPOUT | SCHEDULES[schedule])
    assert differing(plain, other) == []
    without = train(RECIPE, "without", model="tied", **DROPOUT | off | {"adapter.dropout": 0.0})
    assert differing(plain, without)


def test_dropout_drops_the_same_after_a_resume(train, models, chats, tmp_path, monkeypatch) -> None:
    keys = DROPOUT | {"epochs": 2, "max_steps_per_epoch": None, "val_fraction": 0.2}
    whole = train(RECIPE, "whole", **keys)
    output = tmp_path / "stopped"
    words = [*basics(models["untied"], chats, recipe=RECIPE, **keys), f"output_dir={output}"]
    with monkeypatch.context() as patch:
        stop_after_step(patch, 1)
        tune("run", RECIPE, *words)
    assert (output / "latest").read_text().strip() == "step_1"
    assert tune("run", RECIPE, *words, "resume_from_checkpoint=True") == 0
    assert differing(whole, output / "final") == []
    first = [
        [row["val_loss"] for row in metrics(f) if "val_loss" in row] for f in (whole.parent, output)
    ]
    assert first[0] == first[1]


@pytest.mark.parametrize("mode", ["plain", "layer-major", "streamed layers", "4 bits"])
def test_the_base_is_bit_for_bit_what_it_was(train, models, monkeypatch, mode: str) -> None:
    """In memory, after training and saving, and in its folder."""
    keys = {"dtype": "bf16"} | SCHEDULES.get(mode, {})
    keys |= {"quantize_base": "nf4"} if mode == "4 bits" else {}
    module = import_recipe(RECIPE)
    before: dict[str, torch.Tensor] = {}
    kept = []
    make = module.setup_optimizer

    def remember(cfg, model, host, output_dir):
        kept.append(model)
        before.update({n: p.detach().clone() for n, p in model.named_parameters()})
        return make(cfg, model, host, output_dir)

    monkeypatch.setattr(module, "setup_optimizer", remember)
    monkeypatch.setattr("solotune.cli.run.import_recipe", lambda path: module)
    stored = {path.name: path.read_bytes() for path in models["untied"].iterdir()}
    final = train(RECIPE, **keys)
    changed = {n for n, p in kept[0].named_parameters() if not torch.equal(p.detach(), before[n])}
    assert changed
    assert all(".lora_" in name for name in changed)
    assert {path.name: path.read_bytes() for path in models["untied"].iterdir()} == stored
    assert all(".lora_" in name for name in weights(final))


@pytest.mark.parametrize("optimizer", ["solotune.optim.AdamWKahan", "torchao.optim.AdamW8bit"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_optimizer_trains_an_adapter_of_either_dtype(train, optimizer, dtype) -> None:
    keys = {"optimizer": optimizer, "adapter.dtype": dtype, "dtype": "bf16"}
    final = train(RECIPE, **keys | {"optimizer.lr": 1e-2, "max_steps_per_epoch": 5})
    losses = [row["loss"] for row in metrics(final.parent)]
    assert losses[-1] < losses[0] - 0.2
    wanted = torch.bfloat16 if dtype == "bf16" else torch.float32
    assert {tensor.dtype for tensor in weights(final).values()} == {wanted}


def test_the_adapter_and_its_share_are_printed(train, capsys) -> None:
    train(RECIPE, model="tied", **{"adapter.targets": "[q_proj, lm_head]"})
    line = next(row for row in capsys.readouterr().out.splitlines() if "are trained" in row)
    assert line == (
        "LoRA of rank 4: 2,320 parameters are trained, 2.96% of the base's 78,400; "
        "on q_proj x 2, lm_head"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["adapter.rank=99"], "adapter.rank=99 exceeds the width 32 of layers.0.self_attn.k_proj"),
        (["adapter.targets=[q_prj]"], "q_prj fits no linear layer; did you mean q_proj?"),
        (["adapter.rnk=4"], "adapter.rnk: solotune.adapters.LoRA takes no rnk; did you mean"),
        (["adapter.dropout=1"], "adapter.dropout=1.0: use 0 or more, and less than 1"),
        (["adapter.rank=0"], "adapter.rank=0: use 1 or more"),
        (["~adapter"], "adapter: not set: give adapter=..."),
        (
            ["tokenizer.added_tokens=[<new>]"],
            "tokenizer.added_tokens: an adapter cannot train rows",
        ),
        (["quantize_base=int4"], "quantize_base: nf4"),
        (["lora_rank=4"], "lora_rank: unknown key; it is torchtune's: the key is adapter.rank"),
    ],
)
def test_a_mistake_is_one_sentence_with_its_repair(
    models, chats, tmp_path: Path, capsys, words: list[str], said: str
) -> None:
    keys = basics(models["untied"], chats, recipe=RECIPE, output_dir=tmp_path / "run")
    if words == ["~adapter"]:
        keys, words = [key for key in keys if not key.startswith("adapter.")], []
    assert tune("run", RECIPE, *keys, *words) == 1
    error = capsys.readouterr().err
    assert said in error
    assert not any(tmp_path.glob("run/*")), "the empty folder goes when the process ends"
