"""`tune inspect model`: the parameters of a run by module, without any weights."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from solotune.config import located
from solotune.config.command_line import Parser

from .inspect import parse, setup

if TYPE_CHECKING:  # torch is slow to import, and --help needs none
    import torch
    from torch import nn

HELP = """\
Show the parameters that `tune run` would have: by module, with number, dtype, bytes, device, and
which of them are trained. The model is built from config.json without memory; equal blocks are one
line.

  tune inspect model llama3/8B_full_single_device checkpoint_dir=models/Meta-Llama-3-8B-Instruct"""

_NUMBER = re.compile(r"\.(\d+)\.")


@dataclass
class Entry:
    """One parameter, or the same one of several equal blocks: their numbers are `blocks`."""

    name: str  # with {} for the number of the block
    shape: tuple[int, ...]
    dtype: str
    device: str
    trainable: bool
    num_parameters: int = 0  # of all blocks together
    num_bytes: int = 0
    blocks: list[int] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The name with the numbers of its blocks, as `layers.{0-9,12}.input_layernorm.weight`."""
        runs: list[list[int]] = []
        for block in self.blocks:
            if runs and runs[-1][-1] == block - 1:
                runs[-1].append(block)
            else:
                runs.append([block])
        spans = [f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
        numbers = ",".join(spans)
        return self.name.replace("{}", numbers if len(self.blocks) == 1 else f"{{{numbers}}}")


def main(words: list[str]) -> int:
    """Print the parameters, or with `--json` one object."""
    parser = Parser(prog="tune inspect model", description=HELP)
    parser.add_argument("--json", action="store_true", help="one object: entries and totals")
    options, recipe = parse(parser, words, what="model")
    module, cfg = setup(recipe, options, needs="setup_model")

    from solotune.checkpoint import model_folder
    from solotune.training import pick_device, pick_dtype

    with located(cfg):
        device = pick_device(cfg.device)
        folder = model_folder(cfg.checkpoint_dir)
        built = module.setup_model(cfg, folder, pick_dtype(cfg.dtype, device))
        model = built[0] if isinstance(built, tuple) else built  # an adapter comes with its model
        if "added_tokens" in cfg.tokenizer.arguments:  # a recipe does so with its data
            tokenizer = cfg.tokenizer.build(checkpoint_dir=folder)
            model.add_tokens(tokenizer.new_ids, rows=tokenizer.rows_wanted)
    entries = by_module(model, device)
    totals = total(entries)
    if options.json:
        print(json.dumps({"entries": [asdict(entry) for entry in entries], **totals}))
        return 0
    width = max(len(entry.title) for entry in entries)
    for entry in entries:
        shape = " x ".join(map(str, entry.shape))
        size = f"{entry.num_bytes / 2**20:>10,.1f} MiB"
        trained = "trained" if entry.trainable else "frozen"
        print(
            f"{entry.title:<{width}}  {shape:<16} {entry.num_parameters:>15,}  {entry.dtype:<8}"
            f" {size}  {entry.device}  {trained}"
        )
    print(
        f"\n{totals['num_parameters']:,} parameters, {totals['num_trainable']:,} of them trained;"
        f" {totals['num_bytes'] / 2**30:.2f} GiB of weights on {device}"
    )
    return 0


def by_module(model: "nn.Module", device: "torch.device") -> list[Entry]:
    """Return the parameters in their order, equal ones of several blocks together.

    A parameter that two names share counts once. `device` is where a run would hold them.
    """
    entries: dict[tuple, Entry] = {}
    for name, parameter in model.named_parameters():
        number = _NUMBER.search(name)
        entry = Entry(
            _NUMBER.sub(".{}.", name, count=1),
            tuple(parameter.shape),
            str(parameter.dtype).removeprefix("torch."),
            str(device),
            parameter.requires_grad,
        )
        key = (entry.name, entry.shape, entry.dtype, entry.trainable)
        entry = entries.setdefault(key, entry)
        entry.num_parameters += parameter.numel()
        entry.num_bytes += parameter.nbytes
        entry.blocks += [int(number[1])] if number else []
    return list(entries.values())


def total(entries: list[Entry]) -> dict[str, int]:
    """Return the sums: parameters, those trained, bytes."""
    return {
        "num_parameters": sum(entry.num_parameters for entry in entries),
        "num_trainable": sum(entry.num_parameters for entry in entries if entry.trainable),
        "num_bytes": sum(entry.num_bytes for entry in entries),
    }
