"""Which parameters are decayed: matrices; which are not: anything of one dimension."""

from typing import Any

import pytest
import torch

from solotune.optim import AdamWKahan, decay_groups
from tests.models.tiny import tiny


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, AdamWKahan])
def test_zero_gradients_decay_matrices_by_lr_times_decay_and_no_norm_or_bias(
    optimizer: Any,
) -> None:
    model = tiny(attention_bias=True, mlp_bias=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    stepping = optimizer(decay_groups(model), lr=1e-2, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    stepping.step()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            assert torch.equal(parameter, before[name]), name
        else:
            torch.testing.assert_close(parameter.detach(), 0.999 * before[name])


def test_every_trained_parameter_is_in_one_group_and_no_frozen_one() -> None:
    model = tiny()
    frozen = model.layers[0].get_parameter("mlp.up_proj.weight").requires_grad_(False)
    grouped = [p for group in decay_groups(model) for p in group["params"]]
    wanted = [p for p in model.parameters() if p is not frozen]
    assert sorted(map(id, grouped)) == sorted(map(id, wanted))


def test_a_model_without_matrices_to_train_has_one_group() -> None:
    model = tiny()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    (group,) = decay_groups(model)
    assert group["weight_decay"] == 0.0
