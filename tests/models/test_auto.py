"""What `auto` builds from a folder's config.json, and what it refuses."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from solotune import models
from solotune.errors import CheckpointError
from solotune.models import Decoder, auto, check_same_model, llama
from solotune.models.auto import FAMILIES

from .families import tiny_config
from .tiny import CONFIG

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a config.json: changed fields as keywords."""

    def write(*, without: str = "", **fields: Any) -> Path:
        config = {name: value for name, value in (CONFIG | fields).items() if name != without}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    return write


def test_an_unsupported_model_type_lists_the_supported_ones(write: Write) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json.*'mamba'.*supported: llama"):
        auto(write(model_type="mamba"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_dropout", 0.1),
        ("sliding_window", 4096),
        ("quantization_config", {"quant_method": "gptq"}),
        ("final_logit_softcapping", 30.0),
        ("partial_rotary_factor", 0.5),
        ("original_max_position_embeddings", 64),
        ("pretraining_tp", 2),
    ],
)
def test_a_field_that_would_change_the_result_stops_the_run_and_is_named(
    write: Write, field: str, value: Any
) -> None:
    with pytest.raises(CheckpointError) as raised:
        auto(write(**{field: value}))
    assert f"{field}={value!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "'longrope' lacks the field 'short_factor'"),
        ({"type": "dynamic", "factor": 2.0}, "rope_type 'dynamic' is not supported"),
        ({"rope_type": "linear"}, "'linear' lacks the field 'factor'"),
        ({"rope_type": "yarn"}, "'yarn' lacks the field 'factor'"),
        ({"rope_type": "llama3", "factor": 8.0}, "'llama3' lacks the field 'low_freq_factor'"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_rope_scaling_that_cannot_be_followed_is_refused_at_build_time(
    write: Write, spelling: str, scaling: dict[str, Any], named: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        auto(write(**{spelling: scaling}))
    assert named in str(raised.value)


def test_an_unknown_field_is_kept_and_named_in_the_log(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    model = auto(write(x_note=1))
    assert model.config["x_note"] == 1
    assert "x_note" in caplog.text


def test_a_config_that_transformers_saved_needs_no_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = LlamaConfig(**CONFIG, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    with caplog.at_level(logging.DEBUG, logger="solotune"):
        auto(tmp_path)
    assert not [record for record in caplog.records if record.name.startswith("solotune")]


@pytest.mark.parametrize(
    "field",
    ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"],
)
def test_a_missing_field_is_named(write: Write, field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"config\.json lacks the field '{field}'"):
        auto(write(without=field))


def test_a_config_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        auto(tmp_path)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": ')
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        auto(tmp_path)
    config.write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        auto(tmp_path)
    config.write_text("[1]")
    with pytest.raises(CheckpointError, match="holds a list"):
        auto(tmp_path)
    with pytest.raises(CheckpointError, match="is a file"):
        auto(config)


def test_parameter_names_are_those_of_transformers_without_model(write: Write) -> None:
    names = dict(auto(write(attention_bias=True)).named_parameters())
    assert {"embed_tokens.weight", "norm.weight", "lm_head.weight"} <= names.keys()
    assert {
        f"layers.1.{part}"
        for part in (
            "input_layernorm.weight self_attn.q_proj.weight self_attn.q_proj.bias "
            "self_attn.k_proj.weight self_attn.v_proj.weight self_attn.o_proj.weight "
            "post_attention_layernorm.weight mlp.gate_proj.weight mlp.up_proj.weight "
            "mlp.down_proj.weight"
        ).split()
    } <= names.keys()
    tied = dict(auto(write(tie_word_embeddings=True)).named_parameters())
    assert "lm_head.weight" not in tied


@pytest.mark.parametrize(
    ("builder", "parameters"),
    [
        ("llama2_7b", 6_738_415_616),
        ("llama2_13b", 13_015_864_320),
        ("llama2_70b", 68_976_648_192),
        ("llama3_8b", 8_030_261_248),
        ("llama3_70b", 70_553_706_496),
        ("llama3_1_8b", 8_030_261_248),
        ("llama3_1_70b", 70_553_706_496),
        ("llama3_1_405b", 405_853_388_800),
        ("llama3_2_1b", 1_235_814_400),
        ("llama3_2_3b", 3_212_749_824),
        ("llama3_3_70b", 70_553_706_496),
        ("smollm2_135m", 134_515_008),
        ("smollm2_360m", 361_821_120),
        ("smollm2_1_7b", 1_711_376_384),
        ("mistral_7b_v0_1", 7_241_732_096),
        ("mistral_7b_v0_2", 7_241_732_096),
        ("mistral_7b_v0_3", 7_248_023_552),
        ("mistral_nemo_12b", 12_247_782_400),
        ("mistral_small_24b", 23_572_403_200),
        ("ministral_8b", 8_019_808_256),
        ("ministral3_3b", 3_429_006_336),
        ("ministral3_8b", 8_489_553_920),
        ("ministral3_14b", 13_506_073_600),
        ("qwen2_5_0_5b", 494_032_768),
        ("qwen2_5_1_5b", 1_543_714_304),
        ("qwen2_5_3b", 3_085_938_688),
        ("qwen2_5_7b", 7_615_616_512),
        ("qwen2_5_14b", 14_770_033_664),
        ("qwen2_5_32b", 32_763_876_352),
        ("qwen2_5_72b", 72_706_203_648),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_1_7b", 1_720_574_976),
        ("qwen3_4b", 4_022_468_096),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen3_32b", 32_762_123_264),
        ("gemma2_2b", 2_614_341_888),
        ("gemma2_9b", 9_241_705_984),
        ("gemma2_27b", 27_227_128_320),
        ("gemma3_270m", 268_098_176),
        ("gemma3_1b", 999_885_952),
        ("gemma3_4b", 3_880_263_168),  # the text tower, as of 12b and 27b
        ("gemma3_12b", 11_766_034_176),
        ("gemma3_27b", 27_009_346_304),
        ("phi3_mini_4k", 3_821_079_552),
        ("phi3_medium_4k", 13_960_238_080),
        ("phi4", 14_659_507_200),
        ("phi4_mini", 3_836_021_760),
        ("smollm3_3b", 3_075_098_624),
        ("olmo2_1b", 1_484_916_736),
        ("olmo2_7b", 7_298_617_344),
        ("olmo2_13b", 13_716_198_400),
        ("olmo2_32b", 32_234_279_936),
        ("olmo3_7b", 7_298_011_136),
        ("olmo3_32b", 32_233_522_176),
    ],
)
def test_a_published_size_has_its_published_number_of_parameters(
    builder: str, parameters: int
) -> None:
    with torch.device("meta"):
        model = getattr(models, builder)()
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_the_docs_name_every_family_and_what_it_reads() -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    for model_type, family in FAMILIES.items():
        assert page.count(f"| `{model_type}` |") == 2, model_type
        own = family.fields.defaults.keys() - llama.FIELDS.defaults.keys()
        assert all(f"`{field}`" in page for field in own), model_type


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("qwen3", {"layer_types": ["full_attention"]}, "for each of 4 layers"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ("qwen3", {"layer_types": "full"}, "layer_types='full' is not a list or null"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "sliding_window is null"),
        ("mistral", {"layer_types": ["full_attention"] * 4}, "layer_types=.* for mistral"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0 is not a whole number above 0"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
        ("gemma2", {"final_logit_softcapping": -1.0}, "final_logit_softcapping=-1.0 is not"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "are no object"),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "lacks the field 'short_factor'"),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [1.0] * 3}},
            "short_factor has 3 numbers where 16 rotated dimensions need 8",
        ),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop=0.1"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=True"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers=.* each of 4 layers"),
        ("olmo3", {"head_dim": 7}, "head_dim is even"),
        ("olmo2", {"rope_scaling": {"rope_type": "linear", "factor": "4"}}, "factor='4'"),
        ("ministral3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ],
)
def test_what_a_family_cannot_follow_is_refused_and_named(
    write: Write, family: str, fields: dict[str, Any], named: str
) -> None:
    config = tiny_config(family) | fields
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}"):
        auto(write(**config))


def folder_like(write: Write, builder: str, **fields: Any) -> tuple[Decoder, Path]:
    """Return a model on meta, and a folder with its config but for `fields`."""
    with torch.device("meta"):
        model = getattr(models, builder)()
    return model, write(**model.config | fields)


@pytest.mark.parametrize(
    ("builder", "fields", "named"),
    [
        ("qwen3_0_6b", {"rope_theta": 5e6}, "rope_theta is 1000000.0"),
        ("gemma3_1b", {"sliding_window": 1024}, "window_of_layer is"),
        ("gemma3_1b", {"rope_local_base_freq": 1e6}, "rope_theta is 10000.0"),
        ("gemma2_2b", {"final_logit_softcapping": None}, "logit_soft_cap is 30.0"),
        ("phi4_mini", {"partial_rotary_factor": 1.0}, "lacks|partial_rotary_factor is 0.75"),
        ("smollm3_3b", {"no_rope_layer_interval": 2, "no_rope_layers": None}, "rope_of_layer is"),
        ("mistral_7b_v0_1", {"sliding_window": None}, "window_of_layer is"),
        ("olmo3_7b", {"rope_scaling": None}, "rope_type_1 is 'yarn'"),
    ],
)
def test_a_named_builder_is_not_taken_for_another_model_of_its_family(
    write: Write, builder: str, fields: dict[str, Any], named: str
) -> None:
    model, folder = folder_like(write, builder, **fields)
    with pytest.raises(CheckpointError, match=named):
        check_same_model(model, folder)


@pytest.mark.parametrize(
    ("builder", "fields"),
    [
        ("qwen2_5_7b", {"max_position_embeddings": 131072, "sliding_window": 131072}),
        ("qwen3_0_6b", {"layer_types": ["full_attention"] * 28, "attention_bias": False}),
        ("gemma3_1b", {"sliding_window_pattern": 6, "num_attention_heads": 4, "x_note": 1}),
        (
            "gemma3_4b",
            {
                "rope_scaling": None,
                "rope_theta": None,
                "rope_local_base_freq": None,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                },
            },
        ),
        ("phi3_mini_4k", {"attention_dropout": 0.0, "eos_token_id": [32000, 32007]}),
    ],
)
def test_another_spelling_is_the_same_model(
    write: Write, builder: str, fields: dict[str, Any]
) -> None:
    check_same_model(*folder_like(write, builder, **fields))
