"""Every family computes and learns what transformers does, and opens there again.

Shapes: B batch, S tokens, V vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from solotune.checkpoint import load_weights
from solotune.checkpoint.save import saved_config, weight_sources, write_weights
from solotune.errors import CheckpointError
from solotune.models import Decoder, auto
from solotune.models.auto import FAMILIES
from solotune.models.fields import REQUIRED
from solotune.training import set_dtype

from .families import CASES, VARIANTS, WITHOUT_EFFECT, tiny_config, tiny_family
from .oracle import check_packed_logits, logits_of, oracle, ten_losses
from .test_cache import decode
from .tiny import fill_, logits, make_batch

# Segments longer and shorter than the windows of 8 and the original lengths of 32; filler.
ROWS = ((33, 7, 56), (70, 1, 12))

each_case = pytest.mark.parametrize(("family", "name"), CASES)
each_family = pytest.mark.parametrize("family", VARIANTS)


def save(model: Decoder, folder: Path) -> None:
    named = ((model.to_hf_key(name), p) for name, p in model.named_parameters())
    write_weights(folder, weight_sources(named, dtype=torch.float32))
    config = saved_config(model.config, dtype=torch.float32, eos_ids=[2])
    (folder / "config.json").write_text(json.dumps(config))


@each_case
def test_packed_logits_equal_unpacked_ones_and_those_of_transformers(
    family: str, name: str
) -> None:
    model = tiny_family(family, name)
    check_packed_logits(model, make_batch(*ROWS), spread=(0.5, 8))


@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name)
        for family, variants in VARIANTS.items()
        for name in list(variants)[1:]
        if not name.startswith(WITHOUT_EFFECT)
    ],
)
def test_a_switch_changes_the_logits(family: str, name: str) -> None:
    # Otherwise the comparison above would show nothing about it.
    batch = make_batch(*ROWS)
    changed, first = (logits(tiny_family(family, each), batch) for each in (name, ""))
    assert (changed - first).abs().max() > 0.01


@each_family
@pytest.mark.parametrize("tied", [True, False])
def test_ten_adamw_steps_follow_the_losses_of_transformers(family: str, tied: bool) -> None:
    # The variant with the most switches on, tied and untied.
    name = max(VARIANTS[family], key=lambda name: len(VARIANTS[family][name]))
    config = tiny_config(family, name) | {"tie_word_embeddings": tied}
    model = fill_(FAMILIES[family].build(config))
    batches = [make_batch(*ROWS, seed=1), make_batch((40, 9), seed=2)]
    ours, theirs = ten_losses(model, oracle(model), batches)
    assert theirs[-1] < theirs[0] - 0.5
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@each_family
def test_bf16_is_as_near_to_fp32_as_transformers(family: str) -> None:
    # The same weights in all four: those that bf16 can hold.
    model = tiny_family(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    theirs, batch = oracle(model).bfloat16(), make_batch((70,))
    exact_SV = logits(model, batch)[0]
    ours_SV = logits(set_dtype(model, torch.bfloat16), batch)[0]
    theirs_SV = logits_of(theirs, batch.tokens_BS[0])
    ours, their = (
        float((x.float() - exact_SV).norm() / exact_SV.norm()) for x in (ours_SV, theirs_SV)
    )
    print(f"{family}: distance to fp32 {ours:.4f}, transformers {their:.4f}")
    assert 0 < ours <= 1.25 * their < 0.1


@each_case
def test_cached_decoding_equals_the_whole_forward_pass(family: str, name: str) -> None:
    model, batch = tiny_family(family, name), make_batch((50,))
    whole_BSV = logits(model, batch)
    pieces = (5, 1, 20, *(1,) * 24)
    cache = model.new_cache(1, 50)
    found = [
        decode(model, cache, tokens_BS, positions_BS)
        for tokens_BS, positions_BS in zip(
            batch.tokens_BS.split(pieces, 1), batch.positions_BS.split(pieces, 1), strict=True
        )
    ]
    torch.testing.assert_close(torch.cat(found, 1), whole_BSV, atol=1e-4, rtol=0)


@each_case
def test_a_saved_folder_opens_in_transformers_with_the_same_logits(
    family: str, name: str, tmp_path: Path
) -> None:
    model = tiny_family(family, name)
    save(model, tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    theirs, report = loaded
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert type(theirs).__name__ == FAMILIES[family].architecture
    batch = make_batch((45,))
    wanted_SV = logits_of(theirs, batch.tokens_BS[0])
    torch.testing.assert_close(logits(model, batch)[0], wanted_SV, atol=1e-4, rtol=0)


@each_case
def test_a_folder_that_transformers_saved_is_read_without_a_word(
    family: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = oracle(tiny_family(family, name))
    theirs.save_pretrained(tmp_path)
    with torch.device("meta"):
        ours = auto(tmp_path)
    load_weights(ours, tmp_path, device="cpu")
    assert not [record for record in caplog.records if record.name.startswith("solotune")]
    batch = make_batch((45,))
    wanted_SV = logits_of(theirs, batch.tokens_BS[0])
    torch.testing.assert_close(logits(ours, batch)[0], wanted_SV, atol=1e-4, rtol=0)


@each_family
def test_absent_fields_have_the_defaults_of_transformers(family: str) -> None:
    fields = FAMILIES[family].fields
    named = {f: v for f, v in tiny_config(family).items() if fields.defaults.get(f) is REQUIRED}
    config: Any = CONFIG_MAPPING[family]
    theirs = config(**named, pad_token_id=None)
    derived = {"num_key_value_heads": theirs.num_attention_heads}
    derived["head_dim"] = theirs.hidden_size // theirs.num_attention_heads
    # Rope and layer types are derived too: the logits of configs without them are compared above.
    compared = {
        field: value
        for field, value in fields.defaults.items()
        if value is not REQUIRED and "rope" not in field and field != "layer_types"
    }
    for field, ours in compared.items():
        if field in ("use_sliding_window", "sliding_window") and family.startswith("qwen"):
            continue  # made null there unless switched on
        wanted = getattr(theirs, field, getattr(theirs, f"_{field}", None))
        if ours is None and wanted is not None:
            ours = derived.get(field)
        assert ours == wanted, field


@each_family
def test_a_switch_that_no_family_follows_is_refused(family: str) -> None:
    refused: dict[str, Any] = {
        "attention_dropout": 0.1,
        "quantization_config": {"quant_method": "fp8"},
        "num_experts": 8,
    }
    for field, value in refused.items():
        with pytest.raises(CheckpointError, match=f"{field}=.* is not supported for {family}"):
            FAMILIES[family].build(tiny_config(family) | {field: value})
