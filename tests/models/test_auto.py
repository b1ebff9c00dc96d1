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
from solotune.models import auto

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
    ],
)
def test_a_published_size_has_its_published_number_of_parameters(
    builder: str, parameters: int
) -> None:
    with torch.device("meta"):
        model = getattr(models, builder)()
    assert sum(p.numel() for p in model.parameters()) == parameters
