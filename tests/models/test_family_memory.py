"""Memory features know no family: blocks of other kinds step as without them.

Gemma 2 has sliding and full layers, soft caps, an embedding scale and tied weights; Gemma 3 two
rotary bases; SmolLM3 layers that do not turn.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from solotune.checkpoint import Checkpointer
from solotune.losses import LinearCrossEntropy
from solotune.memory import HostMemory, checkpoint_blocks, compile_blocks
from solotune.models import Decoder
from solotune.models.auto import FAMILIES
from solotune.tokenizers import auto as load_tokenizer
from solotune.training import set_dtype
from tests.memory import one_step

from .families import tiny_config, tiny_family
from .tiny import accumulate_gradients, fill_, make_batch, take_gradients

EXOTIC = ["gemma2", "gemma3_text", "smollm3", "phi3"]


def stepped(
    family: str, monkeypatch: pytest.MonkeyPatch, *, dtype: torch.dtype, **on: Any
) -> dict[str, Tensor]:
    """Return the weights after three steps under the keys `on`."""

    def make(**fields: Any) -> Decoder:
        return fill_(FAMILIES[family].build(tiny_config(family) | fields))

    monkeypatch.setattr(one_step, "tiny", make)
    step = one_step.OneStep(dtype=dtype, **on)
    step.loss_fn = LinearCrossEntropy(chunk_tokens=64, soft_cap=step.model.logit_soft_cap)
    for _ in range(3):
        step()
    return dict(step.model.named_parameters())


@pytest.mark.parametrize("family", EXOTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("off", "on"),
    [
        ({}, one_step.CHECKPOINTING),
        ({}, one_step.OFFLOADING),
        ({}, one_step.CHECKPOINTING | {"ac_mode": "selective", "ac_option": "op"}),
        ({"clip_grad_norm": None}, one_step.IN_BACKWARD),
        ({"clip_grad_norm": None, "gradient_accumulation_steps": 3}, one_step.LAYER_MAJOR),
    ],
    ids=["checkpointing", "offloading", "selective", "in backward", "layer-major"],
)
def test_a_memory_feature_does_not_change_a_bit(
    family: str,
    dtype: torch.dtype,
    off: dict[str, Any],
    on: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wanted = stepped(family, monkeypatch, dtype=dtype, **off)
    found = stepped(family, monkeypatch, dtype=dtype, **on)
    for name, parameter in wanted.items():
        assert torch.equal(parameter, found[name]), name


# torch's compiler looks at .grad of a hidden state, and hides the warning unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "graphs"), [("gemma2", 2), ("gemma3_text", 2), ("smollm3", 2), ("phi3", 1)]
)
def test_each_kind_of_layer_compiles_once(family: str, graphs: int) -> None:
    torch._dynamo.reset()
    plain, compiled = tiny_family(family), tiny_family(family)
    for model in (plain, compiled):
        checkpoint_blocks(model)
    compile_blocks(compiled)
    batches = [
        make_batch(*rows, row_length=40, seed=seed)
        for seed, rows in enumerate([((20, 9, 4), (33,)), ((38,), (1, 2, 37)), ((5,), (6, 7, 8))])
    ]
    torch._dynamo.utils.counters.clear()
    for number, batch in enumerate(batches):
        accumulate_gradients(plain, [batch])
        wanted = take_gradients(plain)
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            accumulate_gradients(compiled, [batch])
        found = take_gradients(compiled)
        ours, theirs = (torch.cat([g[n].flatten() for n in wanted]) for g in (found, wanted))
        assert (ours - theirs).norm() <= 1e-4 * theirs.norm()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_embedding_is_scaled_in_the_weights_dtype_and_so_is_its_gradient(
    dtype: torch.dtype,
) -> None:
    # The root of 64 is exact; of 80 it is 8.944, in bf16 8.9375.
    config = tiny_config("gemma2", "untied, biases") | {"hidden_size": 80, "head_dim": 20}
    model = set_dtype(fill_(FAMILIES["gemma2"].build(config)), dtype)
    tokens_BS = torch.tensor([[3, 5, 3]])
    scale = float(torch.tensor(80**0.5, dtype=dtype))
    x_BSD = model.embed(tokens_BS)
    exact = model.embed_tokens.weight[tokens_BS].double() * scale
    torch.testing.assert_close(x_BSD.double(), exact, rtol=2**-8, atol=0)

    grad_BSD = torch.full((1, 3, 80), 0.5, dtype=dtype)
    model.add_embedding_gradient([(tokens_BS, grad_BSD)])
    gradient_VD = model.embed_tokens.weight.grad
    assert gradient_VD is not None
    assert torch.equal(gradient_VD[3], torch.full((80,), scale, dtype=dtype))
    assert torch.equal(gradient_VD[5], torch.full((80,), scale / 2, dtype=dtype))


def test_a_resumed_gemma_takes_the_same_step(tiny_tokenizer_dir: Path, tmp_path: Path) -> None:
    """Three steps, a save and two more, against a fresh model that goes on from the save."""
    source = tmp_path / "model"
    source.mkdir()
    config = tiny_config("gemma2") | {"vocab_size": 260}
    (source / "config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tiny_tokenizer_dir)
    checkpointer = Checkpointer(source, tmp_path / "run")
    batches = [make_batch((40, 9), vocab=260, seed=seed) for seed in range(2)]

    def fresh() -> tuple[Decoder, torch.optim.Optimizer]:
        with torch.device("meta"):
            model = set_dtype(FAMILIES["gemma2"].build(config), torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(model: Decoder, optimizer: torch.optim.Optimizer, times: int) -> None:
        for _ in range(times):
            accumulate_gradients(model, batches, host=HostMemory(torch.device("cpu")))
            optimizer.step()
            optimizer.zero_grad()

    model = set_dtype(fill_(FAMILIES["gemma2"].build(config)), torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step(model, optimizer, 3)
    folder = checkpointer.save(
        3,
        model=model,
        optimizer=optimizer,
        progress={},
        dtype=torch.bfloat16,
        tokenizer=tokenizer,
    )
    step(model, optimizer, 2)

    resumed, its_optimizer = fresh()
    checkpointer.load_weights(resumed, device="cpu", resume=folder)
    checkpointer.load_training_state(folder, resumed, its_optimizer)
    step(resumed, its_optimizer, 2)
    for (name, ours), theirs in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
