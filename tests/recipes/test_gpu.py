"""What only a CUDA card can show: no wait inside a step, and the same weights by every path."""

import pytest
import torch

from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]
from solotune.memory import HostMemory

from .conftest import TRAINING, change_distance, differing, names

pytestmark = pytest.mark.gpu
each_training = pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))

PATHS = {
    "plain": {},
    "clipped": {"clip_grad_norm": 1.0},
    "offloading": {"enable_activation_offloading": True},
    "hooks": {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1},
    "layer-major": {"optimizer_in_bwd": True},
    "state on host": {"optimizer_state": "host"},
    "state on disk": {"optimizer_state": "disk", "optimizer_in_bwd": True},
}


@each_training
@pytest.mark.parametrize("path", PATHS)
def test_a_step_waits_for_the_card_once(recipe, path, train, monkeypatch) -> None:
    module = import_recipe(recipe)
    original, read = module.train_step, HostMemory.read
    reads: list[int] = []

    def strict_step(*args, **kwargs):
        reads.append(0)
        if len(reads) == 1:  # the first step makes the optimizer's state
            return original(*args, **kwargs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return original(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def allowed_read(*args):
        reads[-1] += 1
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("default")
        try:
            return read(*args)
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    monkeypatch.setattr(module, "train_step", strict_step)
    monkeypatch.setattr("solotune.cli.run.import_recipe", lambda path: module)
    monkeypatch.setattr(HostMemory, "read", allowed_read)
    keys = {"device": "cuda", "dtype": "bf16", "gradient_accumulation_steps": 2} | PATHS[path]
    train(recipe, optimizer="torch.optim.AdamW", **{"optimizer.fused": True}, **keys)
    assert set(reads) == {1}


@each_training
@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("plain", "clipped")])
def test_each_path_gives_the_same_weights_on_the_card(recipe, path, train, models) -> None:
    keys = {"device": "cuda", "dtype": "bf16", "deterministic": True}
    keys |= {"optimizer": "solotune.optim.AdamWKahan"}
    accumulation = PATHS[path].get("gradient_accumulation_steps", 2)
    plain = train(recipe, "plain", gradient_accumulation_steps=accumulation, **keys)
    changed = keys | {"gradient_accumulation_steps": accumulation} | PATHS[path]
    other = train(recipe, "other", **changed)
    assert differing(plain, other) == []
    assert change_distance(models["untied"], plain, other) == 0.0


@each_training
def test_the_card_agrees_with_the_cpu_in_fp32(recipe, train, models) -> None:
    on_cpu = train(recipe, "cpu", device="cpu", dtype="fp32")
    on_card = train(recipe, "card", device="cuda", dtype="fp32")
    assert change_distance(models["untied"], on_cpu, on_card) < 1e-3
