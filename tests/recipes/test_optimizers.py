"""Each optimizer by name, in every schedule of a run in bf16, stopped and resumed."""

import signal
from pathlib import Path

import pytest

from .conftest import ROOT, basics, differing, metrics, tune, weights
from .test_full_finetune import signal_at

RECIPE = ROOT / "recipes" / "full_finetune_single_device.py"
INT8: dict[str, object] = {"optimizer.residual": "int8", "optimizer.state_dtype": "int8"}
ROUNDED: dict[str, object] = {"optimizer.residual": "none", "optimizer.state_dtype": "bf16"}

# Optimizer and its arguments, by the name that a test shows.
OPTIMIZERS: dict[str, dict[str, object]] = {
    "torch.optim.AdamW": {"optimizer.fused": True, "optimizer.weight_decay": 0.1},
    "torch.optim.SGD": {"optimizer.momentum": 0.9, "optimizer.lr": 1.0},
    "torch.optim.Adafactor": {},
    "bitsandbytes.optim.AdamW8bit": {"optimizer.weight_decay": 0.1},
    "bitsandbytes.optim.PagedAdamW8bit": {},
    "bitsandbytes.optim.Lion8bit": {},
    "solotune.optim.AdamWKahan": {"optimizer.weight_decay": 0.1},
    "solotune.optim.AdamWKahan int8": INT8,
    "solotune.optim.AdamWKahan rounded": ROUNDED,
    "solotune.optim.LionKahan int8": INT8,
    "solotune.optim.LionKahan rounded": ROUNDED,
    "solotune.optim.AdamWKahan compiled": INT8 | {"optimizer.compile": True},
    "torchao.optim.AdamW8bit": {"optimizer.bf16_stochastic_round": True},
    "torchao.optim.AdamW4bit": {},
    "torchao.optim.AdamWFp8": {},
}
# These compile for 5 to 30 seconds.
SLOW = [name for name in OPTIMIZERS if "torchao" in name or "compiled" in name]
each_optimizer = pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in OPTIMIZERS]
)
pytestmark = pytest.mark.filterwarnings(
    "ignore:Paged optimizers are not supported on CPU",
    "ignore::UserWarning:torch._inductor",
    "ignore::DeprecationWarning",
)


@pytest.fixture
def train(bf16_model: Path, chats: Path, tmp_path: Path):
    """Return a function that runs the recipe with an optimizer, and returns the run's folder."""

    def run(folder: str, name: str, code: int = 0, **changes: object) -> Path:
        output = tmp_path / folder
        keys = {
            "dtype": "bf16",
            "optimizer": name.split()[0],
            "optimizer.lr": 1e-2,
            "max_steps_per_epoch": 2,
            **OPTIMIZERS[name],
            **changes,
        }
        assert tune("run", RECIPE, *basics(bf16_model, chats, output_dir=output, **keys)) == code
        return output

    return run


@each_optimizer
def test_an_optimizer_by_name_trains_in_bf16_stops_and_resumes(
    train, bf16_model, monkeypatch, name: str
) -> None:
    whole = train("whole", name, clip_grad_norm=1.0)
    losses = [row["loss"] for row in metrics(whole)]
    assert losses[1] < losses[0]
    moved = differing(bf16_model, whole / "final")
    assert set(moved) == set(weights(bf16_model)), "every tensor, the norms too"

    with monkeypatch.context() as patch:
        signal_at(patch, 1, signal.SIGTERM)
        stopped = train("stopped", name, 128 + signal.SIGTERM, clip_grad_norm=1.0)
    train("stopped", name, clip_grad_norm=1.0, resume_from_checkpoint=True)
    assert differing(whole / "final", stopped / "final") == []

    zero = {"optimizer.lr": 0.0, "max_steps_per_epoch": 1}
    still = train("still", name, clip_grad_norm=1.0, **zero)
    assert differing(bf16_model, still / "final") == []


@each_optimizer
def test_an_optimizer_steps_alike_in_every_schedule(
    train, bf16_model, chats, tmp_path, capsys, name: str
) -> None:
    plain = train("plain", name)
    in_backward = train("in_backward", name, optimizer_in_bwd=True)
    accumulated = train("accumulated", name, gradient_accumulation_steps=2)
    layer_major = train("layer_major", name, gradient_accumulation_steps=2, optimizer_in_bwd=True)
    clipped = {"gradient_accumulation_steps": 2, "clip_grad_norm": 1.0}
    train("clipped", name, **clipped, optimizer_in_bwd=True)
    printed = capsys.readouterr().out
    if "optimizer.bf16_stochastic_round" in OPTIMIZERS[name]:
        assert "in the order in which parameters step" in printed
    else:
        assert "in the order in which parameters step" not in printed
        assert differing(plain / "final", in_backward / "final") == []
        assert differing(accumulated / "final", layer_major / "final") == []
    if "Paged" in name:
        words = basics(bf16_model, chats, output_dir=tmp_path / "host", optimizer=name)
        assert tune("run", RECIPE, *words, "optimizer_state=host") == 1
        assert "optimizer_state=device" in capsys.readouterr().err
        return
    on_host = train("host", name, gradient_accumulation_steps=2, optimizer_state="host")
    if "optimizer.bf16_stochastic_round" not in OPTIMIZERS[name]:
        assert differing(accumulated / "final", on_host / "final") == []
