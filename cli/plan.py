"""`tune plan`: what a run needs before it starts, and which configuration fits."""

import argparse
import dataclasses
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from solotune.config import configs, find_config, load, located, resolved_yaml
from solotune.config.command_line import Parser, load_arguments, refuse_torchrun_flags
from solotune.config.registry import find_recipe_of
from solotune.errors import UsageError, UserError

from .run import import_recipe
from .validate import add_config_arguments, recipe_meant

if TYPE_CHECKING:  # torch is slow to import, and --help needs none
    from solotune.plan.budget import Budget
    from solotune.plan.device_profile import DeviceProfile
    from solotune.plan.needs import Needs, Planned
    from solotune.plan.search import Found

_PICTURES = (".png", ".pdf", ".svg")

HELP = """\
Say what a run needs: memory of device and host, disk, and where a device is named its time. Nothing
is downloaded or read but the model's config.json, and no card is needed: the recipe's own step runs
on tensors without memory.

  tune plan full_finetune_single_device --config llama3_1/8B_full_single_device
  tune plan llama3_1/8B_full_single_device batch_size=2 --device-profile 4090 --plot plan.png

With --vram, --ram or --disk it says whether that is enough, and where it is not it looks for the
fastest configuration that fits:

  tune plan llama3_1/8B_full_single_device --vram 16GiB --ram 64GiB --write mine.yaml
  tune plan --measure    # writes the speeds of this machine, for --device-profile measured"""


def main(words: list[str]) -> int:
    """Print a plan; return 0, or 1 where nothing fits."""
    refuse_torchrun_flags(words)
    parser = Parser(prog="tune plan", description=HELP)
    add_plan_arguments(parser)
    options = parser.parse_intermixed_args(words)
    if options.measure:
        return _measure()
    _check_files(options)
    recipe = recipe_meant(options, verb="plan")
    loaded = load_arguments(recipe, options)
    module = import_recipe(recipe)
    cfg = loaded.instance(module.Config)
    with located(cfg):
        module.validate(cfg)
    return _plan(module, cfg, recipe, options)


def add_plan_arguments(parser: Parser) -> None:
    add_config_arguments(parser)
    add = parser.add_argument
    add("--device-profile", metavar="NAME|FILE", help="its speeds: measured, 4090, h100, a YAML")
    add("--vram", metavar="SIZE", help="device memory: 12GiB, or auto: what is free here")
    add("--ram", metavar="SIZE", help="host memory: 32GiB, or auto")
    add("--disk", metavar="SIZE", help="disk: 100GiB, or auto")
    add("--json", action="store_true", help="one object; sizes in bytes")
    add("--plot", metavar="FILE", type=Path, help="a picture of the peak against --vram")
    add("--write", metavar="FILE", type=Path, help="the configuration that was found, as YAML")
    add("--measure", action="store_true", help="measure this machine, under a minute")


def _plan(module: ModuleType, cfg: Any, recipe: Path, options: argparse.Namespace) -> int:
    from solotune.plan import inputs, show
    from solotune.plan.needs import needs_of
    from solotune.plan.search import Search

    inputs.check_recipe(module, recipe.stem)
    profile = _profile(options)
    kind, stand_in = inputs.kind_of(cfg, profile)
    budget = _budget(options, kind)
    with inputs.sizes_of(cfg, options.config) as (folder, facts):
        facts += stand_in

        def plan(cfg: Any) -> "Planned":
            return needs_of(module, cfg, kind=kind, folder=folder, work=inputs.work_of(cfg)[0])

        planned = plan(cfg)
        facts += inputs.work_of(cfg)[1] + inputs.facts_of(planned)
        found = None
        if budget.is_set:
            print("looking for the fastest that fits:", file=sys.stderr)
            found = Search(
                cfg,
                plan=plan,
                validate=module.validate,
                budget=budget,
                profile=profile,
                given=planned,
                tell=lambda line: print(line, file=sys.stderr, flush=True),
            ).run()
    shown = budget
    if profile is not None and kind == "cuda" and not budget.is_set:
        shown = dataclasses.replace(budget, device=profile.memory_bytes)
    if options.json:
        one = show.as_json(planned, shown, profile, assumed=facts)
        found_json = {"found": show.found_as_json(found, cfg)} if found else {}
        print(json.dumps(one | found_json))
    else:
        print("\n".join(show.lines(planned, shown, profile, assumed=facts)))
        if found:
            print("\n".join(["", *show.found_lines(found, cfg, budget)]))
            if not found.best.fits:
                print("\n".join(_offers(options, cfg, kind, budget)))
    plans = {options.config or recipe.stem: planned.needs}
    if found and found.best.fits:
        plans["the fastest that fits"] = found.best.planned.needs
    if options.plot:
        _draw(plans, shown, options)
    if options.write:
        _write(cfg, found, options)
    return 0 if found is None or found.best.fits else 1


def _check_files(options: argparse.Namespace) -> None:
    """Refuse what cannot be written before anything is planned."""
    if options.write and not (options.vram or options.ram or options.disk):
        raise UsageError("--write: say what there is, --vram 16GiB --ram 32GiB")
    if options.write and options.write.exists():
        raise UserError(f"--write {options.write} exists: name another file")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"--plot {options.plot} needs matplotlib: pip install 'solotune[plot]'")
    if options.plot and options.plot.suffix.lower() not in _PICTURES:
        raise UsageError(f"--plot {options.plot}: end it in {', '.join(_PICTURES)}")
    for flag, path in (("--write", options.write), ("--plot", options.plot)):
        if path and not path.absolute().parent.is_dir():
            raise UserError(f"{flag} {path}: there is no folder {path.parent}: make it first")


def _write(cfg: Any, found: "Found | None", options: argparse.Namespace) -> None:
    """Write the configuration that was found as a YAML file of its own."""
    from solotune.plan.inputs import named_sizes
    from solotune.plan.search import changed

    assert found is not None  # a size was named
    if not found.best.fits:
        raise UserError(f"--write {options.write}: nothing fits, so nothing was written")
    text = resolved_yaml(changed(cfg, found.best.values))
    if sizes := named_sizes(options.config):  # it may be planned before the model is there
        text = f"# model: {sizes}\n{text}"
    options.write.write_text(text, encoding="utf-8")
    print(f"{options.write}: use it with --config {options.write}", file=sys.stderr)


def _offers(options: argparse.Namespace, cfg: Any, kind: str, budget: "Budget") -> Iterator[str]:
    """Yield what adapters of the same model would need, by the configs that there are for them."""
    from solotune.plan import inputs
    from solotune.plan.needs import needs_of
    from solotune.plan.show import sizes

    for method in ("lora", "qlora"):
        name = (options.config or "").replace("_full_", f"_{method}_")
        if name == options.config or name not in configs():
            continue
        recipe = find_recipe_of(find_config(name))
        module = import_recipe(recipe)
        same = f"tokenizer.max_seq_len={inputs.work_of(cfg)[0].tokens}"
        words = [f"checkpoint_dir={cfg.checkpoint_dir}", same]
        if cfg.model.path != "solotune.models.auto":
            words.append(f"model={cfg.model.path}")
        other = load(recipe, find_config(name), words)
        adapted = other.instance(module.Config)
        with inputs.sizes_of(adapted, name) as (folder, _):
            work = inputs.work_of(adapted)[0]
            needs = needs_of(module, adapted, kind=kind, folder=folder, work=work).needs
        verdict = "does not fit either" if budget.faults(needs) else "fits"
        command = f"tune run {recipe.stem} --config {name} {' '.join(words)}"
        yield f"an adapter: {verdict}, {sizes(needs)}\n  {command}"


def _profile(options: argparse.Namespace) -> "DeviceProfile | None":
    from solotune.plan.device_profile import find_profile

    return find_profile(options.device_profile) if options.device_profile else None


def _budget(options: argparse.Namespace, kind: str) -> "Budget":
    """Return what the flags name; `auto` is what is free here."""
    import torch

    from solotune.plan import budget

    def size(flag: str, free: Callable[[], int]) -> int | None:
        text = getattr(options, flag)
        if text == "auto":
            return free()
        return None if text is None else budget.parse_size(text, flag=f"--{flag}")

    device = torch.device(kind)
    if options.vram and kind == "cpu":
        raise UsageError("--vram: a CPU has one memory: name it with --ram")
    if options.vram == "auto" and kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("--vram auto: there is no CUDA card here: name a size, --vram 24GiB")
    return budget.Budget(
        device=size("vram", lambda: budget.free_of_device(device)),
        host=size("ram", budget.free_of_host),
        disk=size("disk", lambda: budget.free_of_disk(Path.cwd())),
    )


def _draw(plans: "dict[str, Needs]", budget: "Budget", options: argparse.Namespace) -> None:
    from solotune.plan import show

    show.draw(plans, options.plot, budget=budget, title="Predicted peak of device memory")
    print(f"{options.plot}", file=sys.stderr)


def _measure() -> int:
    from solotune.plan.device_profile import measure_profile, measured_path, write_profile
    from solotune.training import pick_device

    profile, path = measure_profile(pick_device("auto"), Path.cwd()), measured_path()
    write_profile(profile, path)
    print(path.read_text(encoding="utf-8"), end="")
    print(f"{path}: use it with --device-profile measured")
    return 0
