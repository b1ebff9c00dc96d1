"""What every file in recipes/ must hold, found by listing."""

import ast
import itertools
import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from solotune import models as families
from solotune.checkpoint import add_adapter
from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]
from solotune.config import configs, load, read_schema, recipe_of
from solotune.memory import MEMORY_KEYS, HostMemory
from solotune.models import read_config

from .conftest import (
    RECIPES,
    ROOT,
    TRAINING,
    basics,
    change_distance,
    differing,
    metrics,
    names,
    stop_after_step,
    tune,
    weights,
)

each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=names(RECIPES))
each_training = pytest.mark.parametrize("recipe", TRAINING, ids=names(TRAINING))

# Every switch that saves memory: the override that turns it on, and its label.
SWITCHES = {
    "checkpointing": (["enable_activation_checkpointing=True"], "bit-exact"),
    "offloading": (
        ["enable_activation_checkpointing=True", "enable_activation_offloading=True"],
        "bit-exact",
    ),
    "offloading all": (["enable_activation_offloading=True"], "bit-exact"),
    "offloading to disk": (
        ["enable_activation_offloading=True", "activation_offload_to=disk"],
        "bit-exact",
    ),
    "every second block": (
        ["enable_activation_checkpointing=True", "ac_mode=selective", "ac_option=2"],
        "bit-exact",
    ),
    "keep attention": (
        ["enable_activation_checkpointing=True", "ac_mode=selective", "ac_option=op"],
        "bit-exact",
    ),
    "optimizer in backward": (["optimizer_in_bwd=True"], "bit-exact"),
    "state on host": (["optimizer_state=host"], "bit-exact"),
    "state on disk": (["optimizer_state=disk"], "bit-exact"),
    "streamed layers": (["optimizer_in_bwd=True", "resident_layers=0"], "bit-exact"),
    "chunks": (["loss.chunk_tokens=7"], "reordered"),
    "compile": (["compile=True"], "reordered"),
}
PLAIN = {"enable_activation_checkpointing": False}
# Layer-major recomputes whole blocks: there is nothing to select.
EXCLUDED = [{"streamed layers", "every second block"}, {"streamed layers", "keep attention"}]
PAIRS = [p for p in itertools.combinations(SWITCHES, 2) if set(p) not in EXCLUDED]


@each_recipe
def test_a_misspelt_key_stops_before_any_weight_is_read_and_names_the_nearest(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    code = tune("run", recipe, "checkpoint_dirr=/nowhere", f"checkpoint_dir={tmp_path}")
    error = capsys.readouterr().err
    assert code == 1
    assert "checkpoint_dirr" in error
    assert "checkpoint_dir?" in error
    assert "config.json" not in error


@each_training
@pytest.mark.parametrize("packed", [True, False])
def test_a_batch_of_four_equals_four_accumulated(train, models, recipe, packed) -> None:
    common = {"dataset.packed": packed, "epochs": 3, "max_steps_per_epoch": None, "shuffle": False}
    if not packed:  # one step an epoch, so that both see the same rows in it
        common |= {"dataset.max_rows": 4}
    one = train(recipe, "one", batch_size=4, gradient_accumulation_steps=1, **common)
    four = train(recipe, "four", batch_size=1, gradient_accumulation_steps=4, **common)
    assert change_distance(models["untied"], one, four) < 1e-4
    targets = {row["num_targets"] for row in metrics(one.parent)}
    assert packed is False or len(targets) > 1, "the steps of this test should differ in targets"


@each_training
@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_memory_switch_keeps_the_weights_within_its_label(
    train, models, recipe, model, accumulation, switch
) -> None:
    overrides, label = SWITCHES[switch]
    steps = {"gradient_accumulation_steps": accumulation, "epochs": 2, "max_steps_per_epoch": None}
    steps |= {"dataset.max_rows": 9} if accumulation == 1 else {}
    off = train(recipe, "off", model=model, **steps, **PLAIN)
    changes = PLAIN | dict(override.split("=") for override in overrides)
    on = train(recipe, "on", model=model, **steps, **changes)
    if label == "bit-exact":
        assert differing(off, on) == []
    else:
        assert change_distance(models[model], off, on) < 1e-4


@pytest.mark.parametrize(("model", "accumulation"), [("tied", 1), ("untied", 4)])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_pair_of_switches_equals_the_first_within_the_label_of_the_second(
    train, models, pair, model, accumulation
) -> None:
    recipe = ROOT / "recipes" / "full_finetune_single_device.py"
    first, second = (dict(o.split("=") for o in SWITCHES[name][0]) for name in pair)
    if "optimizer in backward" in pair and {"every second block", "keep attention"} & set(pair):
        accumulation = 1  # with more it is layer-major, where there is nothing to select
    keys = {"model": model, "gradient_accumulation_steps": accumulation, "max_steps_per_epoch": 2}
    alone = train(recipe, "alone", **keys, **PLAIN | first)
    both = train(recipe, "both", **keys, **PLAIN | first | second)
    exact = SWITCHES[pair[1]][1] == "bit-exact"
    assert differing(alone, both) == [] if exact else True
    assert change_distance(models[model], alone, both) < 1e-4


@each_training
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_stopped_and_resumed_run_is_bit_equal_to_the_uninterrupted(
    train, models, chats, recipe, dtype, tmp_path, monkeypatch
) -> None:
    """Stopped by SIGTERM in the middle of the first epoch and again in the second."""
    keys = {
        "dtype": dtype,
        "optimizer": "solotune.optim.AdamWKahan",
        "epochs": 2,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 3,
        "val_fraction": 0.2,
        "clip_grad_norm": 1.0,
    }
    whole = train(recipe, "whole", **keys)
    steps = max(row["step"] for row in metrics(whole.parent))
    assert steps >= 4

    output = tmp_path / "stopped"
    words = [*basics(models["untied"], chats, recipe=recipe, **keys), f"output_dir={output}"]
    for stop_at in (1, steps - 1):
        with monkeypatch.context() as patch:
            stop_after_step(patch, stop_at)
            assert tune("run", recipe, *words, "resume_from_checkpoint=True") == 143
        assert not (output / "final").exists()
        assert (output / "latest").read_text().strip() == f"step_{stop_at}"
    assert tune("run", recipe, *words, "resume_from_checkpoint=True") == 0
    assert differing(whole, output / "final") == []
    strip = ("tokens_per_second", "seconds_per_step", "peak_memory_gib", "updates_lost")
    lines = [
        [{k: v for k, v in row.items() if k not in strip} for row in metrics(folder)]
        for folder in (whole.parent, output)
    ]
    assert lines[0] == lines[1]


MODES = {
    "hooks": {"optimizer_in_bwd": True, "gradient_accumulation_steps": 1, "clip_grad_norm": None},
    "layer-major": {"optimizer_in_bwd": True, "clip_grad_norm": None},
    "layer-major, clipped": {"optimizer_in_bwd": True, "clip_grad_norm": 1.0},
    "host": {"optimizer_state": "host"},
    "disk": {"optimizer_state": "disk"},
    "disk, layer-major": {"optimizer_state": "disk", "optimizer_in_bwd": True},
    "offloading": {"enable_activation_offloading": True},
    "disk for all": {
        "enable_activation_offloading": True,
        "activation_offload_to": "disk",
        "optimizer_state": "disk",
    },
    "frozen": {"trainable": "layers.1|lm_head", "optimizer_in_bwd": True},
    "streamed": {"resident_layers": 0, "optimizer_in_bwd": True, "gradient_accumulation_steps": 1},
    "streamed, clipped": {"resident_layers": 1, "optimizer_in_bwd": True, "clip_grad_norm": 1.0},
    "streamed, state on disk": {
        "resident_layers": 0,
        "optimizer_in_bwd": True,
        "optimizer_state": "disk",
    },
}


@each_training
@pytest.mark.parametrize("mode", MODES)
def test_a_run_resumes_bit_equal_inside_each_memory_mode(
    train, models, chats, recipe, mode, tmp_path, monkeypatch
) -> None:
    keys = {"dtype": "bf16", "optimizer": "solotune.optim.AdamWKahan", "epochs": 2}
    keys |= {"max_steps_per_epoch": None, "gradient_accumulation_steps": 2} | MODES[mode]
    if "trainable" in keys and "trainable" not in read_schema(recipe):
        del keys["trainable"]
        keys |= {"adapter.layers_to_transform": 1, "adapter.targets": "[all-linear, lm_head]"}
    whole = train(recipe, "whole", model="tied", **keys)
    output = tmp_path / "stopped"
    words = [*basics(models["tied"], chats, recipe=recipe, **keys), f"output_dir={output}"]
    with monkeypatch.context() as patch:
        stop_after_step(patch, 3)
        assert tune("run", recipe, *words) == 143
    assert (output / "latest").read_text().strip() == "step_3"
    assert tune("run", recipe, *words, "resume_from_checkpoint=True") == 0
    assert differing(whole, output / "final") == []
    assert not (output / "optimizer_state").exists()


@each_training
@pytest.mark.parametrize("model", ["tied", "untied"])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_layer_major_schedule_is_plain_accumulation(
    train, models, recipe, model, accumulation, dtype
) -> None:
    keys = {"gradient_accumulation_steps": accumulation, "max_steps_per_epoch": 2, "epochs": 3}
    keys |= {"dtype": dtype, "optimizer": "solotune.optim.AdamWKahan"}
    plain = train(recipe, "plain", model=model, **keys)
    fused = train(recipe, "fused", model=model, optimizer_in_bwd=True, **keys)
    assert differing(plain, fused) == []
    if dtype == "fp32":
        plain = train(recipe, "plain2", model=model, clip_grad_norm=0.5, **keys)
        fused = train(
            recipe, "fused2", model=model, clip_grad_norm=0.5, optimizer_in_bwd=True, **keys
        )
        assert change_distance(models[model], plain, fused) <= 1e-6


@each_training
def test_epochs_may_be_raised_on_resume(train, recipe) -> None:
    keys = {"max_steps_per_epoch": 2, "lr_scheduler": None}
    whole = train(recipe, "whole", epochs=2, **keys)
    train(recipe, "part", epochs=1, **keys)
    raised = train(recipe, "part", "resume_from_checkpoint=True", epochs=2, **keys)
    assert differing(whole, raised) == []


@each_training
def test_a_rate_of_zero_leaves_the_weights_unchanged(train, models, recipe) -> None:
    schedule = "solotune.training.cosine"
    keys = {"lr_scheduler": schedule, "lr_scheduler.final_lr_ratio": 0.0}
    keys |= {"max_steps_per_epoch": 1, "optimizer.lr": 0.0, "optimizer.weight_decay": 0.1}
    for optimizer in ("torch.optim.AdamW", "solotune.optim.AdamWKahan", "torch.optim.SGD"):
        final = train(recipe, optimizer, optimizer=optimizer, **keys)
        assert differing(models["untied"], final) == []


@each_training
def test_a_schedule_that_returns_zero_leaves_the_weights_unchanged(
    train, models, recipe, tmp_path
) -> None:
    """The schedule is the user's own, in a file beside a copied recipe."""
    copy = tmp_path / "mine" / recipe.name
    assert tune("cp", recipe.stem, copy) == 0
    schedule = "def zero(total_steps):\n    return lambda step: 0.0\n"
    (copy.parent / "my_schedules.py").write_text(schedule)
    final = train(copy, lr_scheduler="my_schedules.zero")
    assert differing(models["untied"], final) == []


@each_recipe
@pytest.mark.parametrize("relative", [True, False])
def test_a_copy_runs_from_another_folder(
    recipe, relative, tmp_path, monkeypatch, models, chats, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    copy = Path("mine/copy.py") if relative else tmp_path / "mine" / "copy.py"
    assert tune("cp", recipe.stem, copy) == 0
    if recipe in TRAINING:
        words = [
            *basics(models["tied"], chats, recipe=recipe, max_steps_per_epoch=1),
            "output_dir=out",
        ]
    else:
        words = [f"checkpoint_dir={models['tied']}", "prompt=hi", "max_new_tokens=2", "device=cpu"]
    assert tune("run", copy, *words) == 0
    if recipe in TRAINING:
        assert capsys.readouterr().out.splitlines()[-1] == "out/final"
        saved = (tmp_path / "out" / "config.yaml").read_text()
        assert str(tmp_path / "mine" / "copy.py") in saved


@each_recipe
def test_a_recipe_has_at_most_350_lines_and_imports_solotune_torch_and_the_standard_library(
    recipe,
) -> None:
    source = recipe.read_text()
    tree = ast.parse(source)
    config = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config")
    assert config.end_lineno
    lines = len(source.splitlines()) - (config.end_lineno - config.lineno + 1)
    assert lines <= 350
    allowed = {"solotune", "torch"} | sys.stdlib_module_names
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [str(node.module)]
        else:
            continue
        assert {module.split(".")[0] for module in modules} <= allowed


@pytest.mark.parametrize("config", sorted(configs()))
def test_a_config_fits_its_recipe_and_its_model_builds_on_meta(config, tmp_path) -> None:
    path = configs()[config]
    recipe = next(r for r in RECIPES if r.stem == recipe_of(path))
    loaded = load(recipe, path, [])
    loaded.check_components()
    cfg = loaded.instance(import_recipe(recipe).Config)
    import_recipe(recipe).validate(cfg)
    size = next(line for line in path.read_text().splitlines() if line.startswith("# model: "))
    builder = getattr(families, size.removeprefix("# model: ").strip())
    with torch.device("meta"):
        published = builder()
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    with torch.device("meta"):
        model = cfg.model.build(checkpoint_dir=tmp_path)
    if hasattr(cfg, "adapter"):
        with torch.device("meta"):
            adapted = cfg.model.build(checkpoint_dir=tmp_path)
        add_adapter(adapted, cfg.adapter.build())
    assert read_config(tmp_path) == model.config
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in published.named_parameters()
    }


@each_training
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_step_reads_the_device_once(
    recipe, accumulation, clip, in_backward, train, monkeypatch
) -> None:
    """Counted by a dispatch mode: one `HostMemory.read`, and no other operator that must wait."""
    module = import_recipe(recipe)
    steps: list[Counter] = []
    inside_read = False

    class CountReads(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.overloadpacket.__name__
            if not inside_read and name in WAITING:
                steps[-1][name] += 1
            return func(*args, **(kwargs or {}))

    original, read = module.train_step, HostMemory.read

    def counted_step(*args, **kwargs):
        steps.append(Counter())
        with CountReads():
            return original(*args, **kwargs)

    def counted_read(*args):
        nonlocal inside_read
        steps[-1]["read"] += 1
        inside_read = True
        try:
            return read(*args)
        finally:
            inside_read = False

    monkeypatch.setattr(module, "train_step", counted_step)
    monkeypatch.setattr("solotune.cli.run.import_recipe", lambda path: module)
    monkeypatch.setattr(HostMemory, "read", counted_read)
    keys = {"gradient_accumulation_steps": accumulation, "clip_grad_norm": clip}
    keys |= {"optimizer_in_bwd": in_backward, "optimizer": "solotune.optim.AdamWKahan"}
    train(recipe, **keys)
    assert len(steps) >= 2
    for step in steps:
        assert step == {"read": 1}


WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "item", "unique", "_unique2")


@each_training
def test_every_key_has_a_reader(recipe) -> None:
    source = recipe.read_text()
    for key in set(read_schema(recipe)) - set(MEMORY_KEYS):  # these are read together
        assert f"cfg.{key}" in source or f'"{key}"' in source or f" {key} " in source, key


@each_training
def test_the_saved_config_runs_again_to_the_same_weights(train, recipe, tmp_path) -> None:
    first = train(recipe, "first")
    words = ["--config", first.parent / "config.yaml", f"output_dir={tmp_path / 'again'}"]
    assert tune("run", recipe, *words) == 0
    assert differing(first, tmp_path / "again" / "final") == []
    assert weights(first)
