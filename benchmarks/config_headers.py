"""Write what `tune plan` says of each config into its header: the card, host memory, and the peak.

    python benchmarks/config_headers.py            # all of recipe_configs
    python benchmarks/config_headers.py llama3_1   # those whose name holds it

A model's sizes come from the builder that a header names (`# model:`), so nothing is downloaded.
"""

import contextlib
import io
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from figures import GIB, ROOT

from solotune.cli.main import main as tune  # pyright: ignore[reportMissingImports]

CARDS_GB = (4, 6, 8, 12, 16, 24, 32, 48, 80, 96, 141, 192)
HOSTS_GB = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
# What a desktop or another process takes of a card, and a system of the host.
CARD_SPARE, HOST_SPARE = 0.5 * GIB, 2 * GIB
CARD_LINES = re.compile(r"Card: .*? measured on a card\)\.")


def main() -> None:
    folder = ROOT / "recipe_configs"
    for path in sorted(folder.rglob("*.yaml")):
        name = str(path.relative_to(folder).with_suffix(""))
        if any(word not in name for word in sys.argv[1:]):
            continue
        plan = planned(path)
        path.write_text(with_header(path.read_text(), plan))
        print(
            f"{name}: {plan['peak'] / GIB:.2f} GiB, {plan['reserved'] / GIB:.2f} reserved",
            flush=True,
        )


def planned(config: Path) -> dict[str, Any]:
    """Return what `tune plan` says of a config, on a card."""
    recipe = config.read_text().partition("\n")[0].removeprefix("recipe: ")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = tune(["plan", recipe, "--config", str(config), "--json"])
    if code:
        sys.exit(f"error: {config} cannot be planned")
    return json.loads(printed.getvalue())


def with_header(text: str, plan: dict[str, Any]) -> str:
    """Return a config whose header has the card and the peak of a plan."""
    head, _, rest = text.partition("\n#\n")
    fixed, _, described = head.partition("# Card: ")
    words = " ".join(line.lstrip("# ") for line in f"Card: {described}".splitlines())
    words = CARD_LINES.sub(sentence(plan), words, count=1)
    lines = textwrap.wrap(words, 98, break_long_words=False, break_on_hyphens=False)
    return fixed + "\n".join(f"# {line}" for line in lines) + "\n#\n" + rest


def sentence(plan: dict[str, Any]) -> str:
    """Return the card that is enough, and what its peak is made of."""
    card = smallest(CARDS_GB, plan["reserved"] + CARD_SPARE)
    host = smallest(HOSTS_GB, plan["host_total"] + HOST_SPARE)
    sizes = plan["device"] | {"logits": plan["device"]["logits"] + plan["device"]["workspace"]}
    named = ("weights", "optimizer state", "gradients", "activations", "logits")
    shown = [f"{gib(sizes[name])} of {name}" for name in named if sizes[name] >= 0.05 * GIB]
    return (
        f"Card: {card} GB, with {host} GB of host memory. Peak: about {gib(plan['peak'])} GiB: "
        f"{', '.join(shown)} (by tune plan; neither the peak nor tokens/s were measured on a card)."
    )


def smallest(sizes: tuple[int, ...], num_bytes: float) -> int:
    """Return the first of `sizes`, in GB as they are sold, that holds so many bytes."""
    return next(size for size in sizes if size * GIB >= num_bytes)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f}" if num_bytes < 100 * GIB else f"{num_bytes / GIB:.0f}"


if __name__ == "__main__":
    main()
