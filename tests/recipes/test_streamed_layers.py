"""Runs whose layers are streamed: a base in 4 bits under adapters, and validation."""

import pytest

from .conftest import ROOT, differing, metrics

LORA = ROOT / "recipes" / "lora_finetune_single_device.py"
FULL = ROOT / "recipes" / "full_finetune_single_device.py"
IN_BACKWARD = {"optimizer_in_bwd": True, "gradient_accumulation_steps": 2, "max_steps_per_epoch": 2}


@pytest.mark.parametrize("dora", [False, True])
def test_an_adapter_over_a_streamed_base_in_4_bits_is_the_same(train, dora: bool) -> None:
    keys = IN_BACKWARD | {"quantize_base": "nf4", "adapter.dora": dora, "dtype": "bf16"}
    resident = train(LORA, "resident", **keys)
    streamed = train(LORA, "streamed", resident_layers=0, **keys)
    assert differing(resident, streamed) == []


def test_validation_of_streamed_layers_is_the_same(train) -> None:
    keys = IN_BACKWARD | {"val_fraction": 0.2, "run_val_every_n_steps": 1}
    losses = []
    for name, resident in (("resident", None), ("streamed", 0)):
        final = train(FULL, name, resident_layers=resident, **keys)
        losses.append([row["val_loss"] for row in metrics(final.parent) if "val_loss" in row])
    assert len(losses[0]) == 3
    assert losses[0] == losses[1]


def test_too_many_resident_layers_are_refused_before_weights_are_read(
    train, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(AssertionError):  # of the exit code
        train(FULL, resident_layers=2, **IN_BACKWARD)
    assert (
        "resident_layers=2 streams no block of this model, which has 2" in capsys.readouterr().err
    )
