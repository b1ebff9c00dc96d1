"""PEFT's model with the base, the adapter and the settings of ours, and the same steps for both."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    set_peft_model_state_dict,
)
from torch import Tensor

from solotune.adapters import LoRA, adapter_parameters, initialize, inject
from solotune.data.batch import Batch
from solotune.models import Decoder
from tests.models.oracle import oracle, step_ten_times


def adapted(model: Decoder, adapter: LoRA, *, spread: float = 0.0) -> tuple[Decoder, PeftModel]:
    """Return the model with a new adapter, and PEFT's of the same numbers.

    With `spread` the matrices that begin as zeros get that much noise.
    """
    theirs = oracle(model)
    inject(model, adapter)
    initialize(model, seed=1)
    generator = torch.Generator().manual_seed(2)
    for parameter in adapter_parameters(model).values():
        if spread and not parameter.any():
            parameter.data.normal_(std=spread, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a tied layer is adapted alone, and names of transformers 6
        wrapped = get_peft_model(theirs, peft_config(adapter))
    assert isinstance(wrapped, PeftModel)
    numbers = {
        f"base_model.model.{model.to_hf_key(name)}": p.detach().clone()
        for name, p in adapter_parameters(model).items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert (
            get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys() == numbers.keys()
        )
    found = set_peft_model_state_dict(wrapped, numbers)
    assert not found.unexpected_keys
    return model, wrapped


def peft_config(adapter: LoRA) -> LoraConfig:
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,  # pyright: ignore[reportArgumentType]
        target_modules=adapter.targets,
        layers_to_transform=adapter.layers_to_transform,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        use_rslora=adapter.rslora,
        task_type="CAUSAL_LM",
    )


def ten_losses(ours: Decoder, theirs: PeftModel, batches: Sequence[Batch]) -> tuple[Tensor, Tensor]:
    """Step both adapters ten times with AdamW over all batches; return their losses."""
    options: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}
    our_optimizer = torch.optim.AdamW(adapter_parameters(ours).values(), **options)
    trained = [p for p in theirs.parameters() if p.requires_grad]
    their_optimizer = torch.optim.AdamW(trained, **options)
    return step_ten_times(ours, our_optimizer, theirs, their_optimizer, batches)
