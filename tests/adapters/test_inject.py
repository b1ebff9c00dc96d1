"""Which layers an adapter goes to, what it begins with, and what is refused."""

import re

import pytest
import torch

from solotune.adapters import (
    LoRA,
    adapted_layers,
    adapter_parameters,
    initialize,
    inject,
    merged_weight,
    target_names,
)
from solotune.errors import ConfigError
from tests.models.families import tiny_family
from tests.models.tiny import logits, make_batch, tiny

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (["q_proj"], r"layers\.\d\.self_attn\.q_proj"),
        (["self_attn.v_proj", "mlp.up_proj"], r"layers\.\d\.(self_attn\.v|mlp\.up)_proj"),
        (["layers.1.mlp.up_proj"], r"layers\.1\.mlp\.up_proj"),
        (["model.layers.1.mlp.up_proj"], r"layers\.1\.mlp\.up_proj"),
        (["embed_tokens", "lm_head"], r"embed_tokens|lm_head"),
        ("all-linear", r"layers\.\d\.\w+\.\w+_proj"),
        (["all-linear", "lm_head"], r"layers\.\d\.\w+\.\w+_proj|lm_head"),
        (r".*\.[01]\..*(q|v)_proj", r"layers\.[01]\.self_attn\.(q|v)_proj"),
        (r"model\.layers\.0\..*", r"layers\.0\.\w+\.\w+_proj"),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_targets_are_names_or_one_pattern_as_in_peft(targets, wanted, tied) -> None:
    model = tiny(tie_word_embeddings=tied)
    named = {name for name, _ in model.named_modules()} | {"lm_head"}
    found = inject(model, LoRA(rank=2, targets=targets))
    assert set(found) == {name for name in named if re.fullmatch(wanted, name)}
    assert list(adapted_layers(model)) == found


def test_blocks_are_chosen_by_number_and_what_lies_outside_them_by_name() -> None:
    adapter = LoRA(rank=2, targets=["q_proj", "lm_head"], layers_to_transform=[1])
    assert target_names(tiny(), adapter) == ["layers.1.self_attn.q_proj", "lm_head"]


@pytest.mark.parametrize("family", ["phi3", "qwen2", "gemma3_text", "olmo2", "smollm3"])
def test_all_linear_is_every_projection_of_every_family(family: str) -> None:
    model = tiny_family(family)
    matrices = {
        name.removesuffix(".weight")
        for name, p in model.named_parameters()
        if p.dim() == 2 and name.startswith("layers.")
    }
    assert set(inject(model, LoRA(rank=2))) == matrices


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": 0}, r"adapter\.rank=0: use 1 or more"),
        ({"alpha": 0}, r"adapter\.alpha=0: use a number above 0"),
        ({"alpha": float("nan")}, r"adapter\.alpha=nan"),
        ({"dropout": 1.0}, r"adapter\.dropout=1\.0: use 0 or more, and less than 1"),
        ({"dtype": "fp16"}, r"adapter\.dtype=fp16: use fp32 or bf16"),
        ({"targets": []}, r"adapter\.targets is empty: name layers, or use all-linear"),
        ({"layers_to_transform": []}, r"adapter\.layers_to_transform=\[\]"),
        (
            {"rank": 33},
            r"rank=33 exceeds the width 32 of layers\.0\.self_attn\.k_proj: use at most",
        ),
        ({"targets": ["o_prj"]}, r"targets: o_prj fits no linear layer; did you mean o_proj\?"),
        (
            {"targets": ["qkv"]},
            r"targets: qkv fits no linear layer; there are embed_tokens, q_proj",
        ),
        ({"targets": ["input_layernorm"]}, r"input_layernorm fits no linear layer"),
        (
            {"targets": "q_proj"},
            r"a text is a pattern of whole names: use adapter\.targets=\[q_proj\]",
        ),
        ({"targets": "layers.(0"}, r"targets=layers\.\(0: no regular expression"),
        ({"layers_to_transform": 2}, r"layers_to_transform: there is no block 2: use .* 0 to 1"),
        (
            {"targets": ["layers.0.mlp.up_proj"], "layers_to_transform": [1]},
            r"layers\.0\.mlp\.up_proj fits no linear layer",
        ),
        (
            {"targets": ["lm_head"], "dora": True, "dropout": 0.1},
            r"adapter\.dropout with adapter\.dora cannot adapt lm_head",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_its_repair(settings, said) -> None:
    with pytest.raises(ConfigError, match=said):
        inject(tiny(), LoRA(**settings))


@pytest.mark.parametrize("dora", [False, True])
def test_a_new_adapter_changes_nothing_and_freezes_the_base(dora: bool) -> None:
    batch = make_batch((9, 5))
    model = tiny(tie_word_embeddings=True)
    before, names = logits(model, batch), {name for name, _ in model.named_parameters()}
    inject(model, LoRA(rank=4, targets=["all-linear", "embed_tokens", "lm_head"], dora=dora))
    initialize(model, seed=3)
    torch.testing.assert_close(logits(model, batch), before, atol=2e-5, rtol=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == adapter_parameters(model).keys()
    assert {name for name, _ in model.named_parameters()} - trained == names


def test_first_values_depend_on_the_seed_and_the_name_alone() -> None:
    def values(seed: int, targets: list[str]) -> dict[str, torch.Tensor]:
        model = tiny()
        inject(model, LoRA(rank=4, targets=targets))
        initialize(model, seed)
        return {name: p.detach() for name, p in adapter_parameters(model).items()}

    few, many, other = values(0, ["k_proj"]), values(0, ["q_proj", "k_proj"]), values(1, ["k_proj"])
    for name in few:
        assert torch.equal(few[name], many[name])
        assert torch.equal(few[name], other[name]) == name.endswith("lora_B.weight")
    down, second = (few[f"layers.{n}.self_attn.k_proj.lora_A.weight"] for n in (0, 1))
    assert not torch.equal(down, second)
    assert down.abs().max() <= 64**-0.5 < 1.1 * down.abs().max()


@pytest.mark.parametrize("dora", [False, True])
def test_a_merged_weight_gives_the_adapters_logits(dora: bool) -> None:
    batch, model = make_batch((9, 5)), tiny()
    inject(model, LoRA(rank=4, targets=["all-linear", "embed_tokens", "lm_head"], dora=dora))
    initialize(model, seed=3)
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(model).values():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    plain = tiny()
    for name, layer in adapted_layers(model).items():
        plain.get_submodule(name).weight = torch.nn.Parameter(merged_weight(layer))
    assert (logits(model, batch) - logits(tiny(), batch)).abs().max() > 0.1
    torch.testing.assert_close(logits(model, batch), logits(plain, batch), atol=2e-5, rtol=0)
