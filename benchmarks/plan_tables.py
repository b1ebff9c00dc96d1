"""What Llama-3.1-8B and 70B need, by `tune plan`, and which configurations fit which cards.

    python benchmarks/plan_tables.py --out docs/plan.md

Nothing is trained, and no card is needed: every figure is a plan's.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from figures import GIB, conditions, cpu_name, table, write_figures

from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]
from solotune.config import find_config, find_recipe
from solotune.config.loading import load
from solotune.memory.timeline import CATEGORIES
from solotune.models.llama import llama3_1_8b, llama3_1_70b
from solotune.plan.budget import Budget
from solotune.plan.device_profile import find_profile
from solotune.plan.needs import Planned, needs_of
from solotune.plan.search import Search, overrides
from solotune.plan.simulate import Work

FULL, LORA = "full_finetune_single_device", "lora_finetune_single_device"
CONFIG = "llama3_1/8B_full_single_device"
KAHAN = "optimizer=solotune.optim.AdamWKahan optimizer.residual=int16 optimizer.state_dtype=fp32"
ADAMW = "optimizer=torch.optim.AdamW optimizer.fused=True optimizer.lr=1e-5"
EIGHT_BIT = (
    "optimizer=solotune.optim.AdamWKahan optimizer.residual=none optimizer.state_dtype=int8 "
    "optimizer.lr=1e-5"
)
TWO_ROWS = "batch_size=2 gradient_accumulation_steps=1"
# Each rung on top of the former; the words that it changes.
LADDER = {
    "baseline": f"{TWO_ROWS} {ADAMW} enable_activation_checkpointing=False clip_grad_norm=1.0 "
    "optimizer_in_bwd=False optimizer_state=device",
    "checkpointing": "enable_activation_checkpointing=True",
    "optimizer in backward": "optimizer_in_bwd=True clip_grad_norm=None",
    "offloading": "enable_activation_offloading=True",
    "8-bit state": EIGHT_BIT,
    "state on the host": "optimizer_state=host",
    "a row at a time (layer-major)": "batch_size=1 gradient_accumulation_steps=2 "
    "enable_activation_offloading=False",
    "half of the layers streamed": "resident_layers=16",
    "all layers streamed": "resident_layers=0",
}
SEVENTY = {
    "AdamW, state in bf16": ADAMW,
    "AdamW, clipping in backward": f"{ADAMW} optimizer_in_bwd=True clip_grad_norm=1.0",
    "AdamW, in backward": f"{ADAMW} optimizer_in_bwd=True clip_grad_norm=None",
    "AdamWKahan": KAHAN,
    "AdamWKahan, in backward": f"{KAHAN} optimizer_in_bwd=True clip_grad_norm=None",
    "AdamWKahan int8, in backward": "optimizer=solotune.optim.AdamWKahan optimizer.residual=int8 "
    "optimizer.state_dtype=int8 optimizer_in_bwd=True clip_grad_norm=None",
    "LionKahan": "optimizer=solotune.optim.LionKahan",
    "LionKahan, in backward": "optimizer=solotune.optim.LionKahan optimizer_in_bwd=True "
    "clip_grad_norm=None",
    "AdamWKahan, all streamed, state on the host": f"{KAHAN} optimizer_in_bwd=True "
    "clip_grad_norm=None optimizer_state=host resident_layers=0",
}
CARDS, HOSTS = (24, 16, 12, 8), (32, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    parser.add_argument("--parts", nargs="+", default=["ladder", "cards", "70b"])
    options = parser.parse_args()
    makers = {"ladder": ladder, "cards": cards, "70b": seventy}
    parts = [conditions(cpu_name(), "torch", "torchao", "bitsandbytes")]
    for name in options.parts:
        parts.append(makers[name]())
        print(parts[-1], flush=True)
    if options.out:
        write_figures(options.out, "\n\n".join(parts), script="plan_tables.py")


@contextmanager
def planner(
    build: Callable[[], Any], tokens: int, *, config: str | None = CONFIG
) -> Iterator[Callable[[str], tuple[Any, Any, Callable[[Any], Planned]]]]:
    """Yield what returns a recipe's module, a Config and how to plan one, for words."""
    with tempfile.TemporaryDirectory() as name:
        with torch.device("meta"):
            (Path(name) / "config.json").write_text(json.dumps(build().config))
        path, module = find_recipe(FULL), import_recipe(find_recipe(FULL))

        def plan(cfg: Any) -> Planned:
            work = Work(cfg.batch_size, tokens)
            return needs_of(module, cfg, kind="cuda", folder=Path(name), work=work)

        def of(words: str) -> tuple[Any, Any, Callable[[Any], Planned]]:
            chosen = [f"checkpoint_dir={name}", "dataset=chats.jsonl", *last_of(words.split())]
            loaded = load(path, find_config(config) if config else None, chosen)
            return module, loaded.instance(module.Config), plan

        yield of


def last_of(words: list[str]) -> list[str]:
    """Return the last word of each key; another optimizer drops what the former was given."""
    kept: dict[str, str] = {}
    for word in words:
        key = word.partition("=")[0]
        if key == "optimizer":
            kept = {k: w for k, w in kept.items() if not k.startswith("optimizer.")}
        kept[key] = word
    return list(kept.values())


def ladder() -> str:
    rows, words = [], ""
    with planner(llama3_1_8b, 2048) as of:
        for rung, more in LADDER.items():
            words = f"{words} {more}"
            _, cfg, plan = of(words)
            needs = plan(cfg).needs
            cells = [f"{needs.device.get(name, 0) / GIB:.2f}" for name in CATEGORIES]
            cells += [f"**{needs.peak / GIB:.2f}**", f"{needs.reserved / GIB:.2f}"]
            rows.append([rung, *cells, f"{needs.host_total / GIB:.1f}"])
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["+", *CATEGORIES, "**peak**", "reserved, context", "host"]
    return (
        "**Llama-3.1-8B, 2 rows of 2048 tokens**, bf16, GiB at the peak; each rung on "
        f"top of the former.\n\n{table(header, rows)}"
    )


def cards() -> str:
    """Return what a search finds for each card and host; equal plans are made once."""
    rows, known = [], {}
    profile = find_profile("4090")
    with planner(llama3_1_8b, 2048) as of:
        module, cfg, plan = of("")

        def once(one: Any) -> Planned:
            key = repr(one)
            if key not in known:
                known[key] = plan(one)
                print(len(known), known[key].needs.reserved / GIB, file=sys.stderr, flush=True)
            return known[key]

        for card in CARDS:
            for host in HOSTS:
                budget = Budget(device=card * GIB, host=host * GIB)
                found = Search(
                    cfg,
                    plan=once,
                    validate=module.validate,
                    budget=budget,
                    profile=profile,
                    given=once(cfg),
                ).run()
                needs = found.best.planned.needs
                words = " ".join(f"`{word}`" for word in overrides(cfg, found.best.values))
                verdict = "" if found.best.fits else "nothing fits; the closest: "
                speed = needs.tokens / (found.best.seconds or 1)
                rows.append(
                    [
                        f"{card} GiB",
                        f"{host} GiB",
                        f"{needs.reserved / GIB:.1f}",
                        f"{needs.host_total / GIB:.1f}",
                        f"{speed:,.0f}",
                        verdict + (words or "as it is"),
                    ]
                )
                print(rows[-1], file=sys.stderr, flush=True)
    header = ["card", "host", "device GiB", "host GiB", "tokens/s", "overrides"]
    return (
        f"**`{CONFIG}` on other cards**: 8 rows of 2048 tokens a step, every weight trained, what "
        "`tune plan --vram ... --ram ...` finds. tokens/s at best, by the data sheet of a 4090 "
        f"whatever the card.\n\n{table(header, rows)}"
    )


def seventy() -> str:
    rows = []
    with planner(llama3_1_70b, 2048) as of:
        for name, words in SEVENTY.items():
            lr = "" if "optimizer.lr" in words else "optimizer.lr=1e-5"
            plain = "optimizer_in_bwd=False" if "in_bwd" not in words else ""
            state = "" if "optimizer_state" in words else "optimizer_state=device"
            clip = "" if "clip" in words else "clip_grad_norm=1.0"
            _, cfg, plan = of(f"batch_size=1 gradient_accumulation_steps=1 {words} {lr} {plain} "
                              f"{state} {clip}")  # fmt: skip
            needs = plan(cfg).needs
            each = needs.state / needs.trained
            cells = [f"{needs.device.get(n, 0) / GIB:,.0f}" for n in CATEGORIES[:3]]
            cells += [f"**{needs.peak / GIB:,.0f}**", f"{needs.host_total / GIB:,.0f}"]
            rows.append([name, f"{each:.1f}", *cells])
            print(rows[-1], file=sys.stderr, flush=True)
    header = ["optimizer", "state, bytes a parameter", *CATEGORIES[:3], "**peak**", "host"]
    return (
        "**Llama-3.1-70B**, 70.6 B parameters, every weight trained, 1 row of 2048 tokens, block "
        f"inputs kept; GiB.\n\n{table(header, rows)}"
    )


if __name__ == "__main__":
    main()
