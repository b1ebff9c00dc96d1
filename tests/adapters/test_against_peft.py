"""An adapter computes and learns what PEFT's does, from the same first numbers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from solotune.adapters import LoRA, lora_dropout
from solotune.data.batch import Batch
from tests.models.families import tiny_family
from tests.models.tiny import make_batch, tiny

from .peft_model import adapted, ten_losses

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"rslora": True, "alpha": 4.0},
    "dora": {"dora": True},
    "dora and rslora": {"dora": True, "rslora": True, "alpha": 4.0},
}
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS: dict[str, dict[str, Any]] = {
    "all linear": {"targets": "all-linear"},
    "head": {"targets": ["lm_head", "down_proj"]},
    "embedding": {"targets": ["embed_tokens", "up_proj"]},
    "all": {"targets": [*EVERYTHING, "embed_tokens", "lm_head"]},
    "one block": {"targets": EVERYTHING, "layers_to_transform": [1]},
    "a pattern": {"targets": r"model\.layers\.0\..*(q_proj|gate_proj)"},
}


def make_adapter(**settings: Any) -> LoRA:
    return LoRA(**({"rank": 4, "alpha": 8.0} | settings))


def batches(*, vocab: int = 256) -> Sequence[Batch]:
    return [
        make_batch((9, 5), (14,), seed=1, vocab=vocab),
        make_batch((7, 6), seed=2, vocab=vocab),
    ]


def check_equal(losses: tuple[Tensor, Tensor]) -> None:
    ours, theirs = losses
    assert ours[0] - ours[-1] > 0.02
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", TARGETS)
def test_ten_steps_have_the_losses_of_peft(kind: str, targets: str) -> None:
    adapter = make_adapter(**KINDS[kind] | TARGETS[targets])
    check_equal(ten_losses(*adapted(tiny(), adapter), batches()))


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("targets", ["head", "embedding", "all"])
def test_tied_layers_are_adapted_each_for_itself_as_in_peft(kind: str, targets: str) -> None:
    adapter = make_adapter(**KINDS[kind] | TARGETS[targets])
    check_equal(ten_losses(*adapted(tiny(tie_word_embeddings=True), adapter), batches()))


@pytest.mark.parametrize(
    ("family", "settings"),
    {
        "fused projections": ("phi3", {"targets": ["qkv_proj", "gate_up_proj"], "dora": True}),
        "biases": ("qwen2", {"dora": True}),
        "a scaled embedding": ("gemma3_text", {"targets": [*EVERYTHING, "embed_tokens"]}),
        "a soft cap": ("gemma2", {"targets": ["o_proj", "lm_head"], "dora": True}),
    }.values(),
)
def test_families_have_the_losses_of_peft(family: str, settings: dict[str, Any]) -> None:
    adapter = make_adapter(**settings)
    check_equal(ten_losses(*adapted(tiny_family(family), adapter), batches()))


@pytest.mark.parametrize("dora", [False, True])
def test_what_dropout_leaves_goes_where_peft_has_it(
    monkeypatch: pytest.MonkeyPatch, dora: bool
) -> None:
    """Every third column is dropped in both, whatever the batch."""

    def drop(x: Tensor, *_: object) -> Tensor:
        kept = (torch.arange(x.size(-1)) % 3 != 0).to(x.dtype)
        return x * kept / 0.75

    monkeypatch.setattr(lora_dropout, "_dropped", drop)
    monkeypatch.setattr(torch.nn.Dropout, "forward", lambda self, x: drop(x))
    adapter = make_adapter(targets=["q_proj", "down_proj", "k_proj"], dropout=0.25, dora=dora)
    ours, theirs = adapted(tiny(), adapter, spread=0.1)
    keyed = [replace(batch, key=index) for index, batch in enumerate(batches())]
    check_equal(ten_losses(ours, theirs, keyed))
