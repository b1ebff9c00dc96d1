"""`tune convert-config`: a config of torchtune as one of ours."""

from pathlib import Path

from solotune.config.command_line import Parser
from solotune.config.conversion import Change, Conversion, convert
from solotune.errors import UserError

HELP = """\
Write a config of torchtune's full fine-tuning, LoRA or QLoRA on one device as one of solotune's.

  tune convert-config theirs.yaml mine.yaml
  tune validate mine.yaml

Each key is listed with what became of it: kept, renamed, replaced, dropped or added, and why. A key
that is lost (it changed the training, and has no equivalent) makes the exit code 1; the file is
written all the same. Configs of other recipes are refused, each with its name."""


def main(words: list[str]) -> int:
    """Convert, write and list the changes; return 1 where a key is lost."""
    parser = Parser(prog="tune convert-config", description=HELP)
    parser.add_argument("source", type=Path, help="torchtune's YAML file")
    parser.add_argument("target", type=Path, help="the file to write")
    parser.add_argument("--force", action="store_true", help="overwrite the target")
    options = parser.parse_args(words)
    source, target = options.source.expanduser(), options.target.expanduser()
    if target.suffix not in (".yaml", ".yml"):
        raise UserError(f"{target}: a config is a .yaml file: end the target so")
    if target.exists() and not options.force:
        raise UserError(f"{target} exists: choose another name, or --force overwrites it")
    found = convert(source)
    found.comments.head = [f"# Converted from torchtune's {source.name} by `tune convert-config`."]
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(found.to_yaml(), encoding="utf-8", newline="\n")
    print("\n".join(lines(found)))
    print(f"\n{target}: check it with `tune validate {target}`")
    if found.lost:
        keys = ", ".join(change.key for change in found.lost)
        raise UserError(f"{len(found.lost)} keys have no equivalent, see `lost` above: {keys}")
    return 0


def lines(found: Conversion) -> list[str]:
    """Return one line a key, those that are kept as they are together on the last."""

    def line(change: Change) -> str:
        arrow = "-> " if change.what in ("renamed", "replaced") else ""
        return f"{change.what:<9} {change.key:<{width}}  {arrow}{change.note}".rstrip()

    told = [change for change in found.changes if change.what != "kept" or change.note]
    width = max((len(change.key) for change in told), default=0)
    order = ("renamed", "replaced", "added", "dropped", "kept", "lost")
    told.sort(key=lambda change: order.index(change.what))
    kept = [change.key for change in found.changes if change.what == "kept" and not change.note]
    return [*map(line, told), f"kept      {', '.join(kept)}"]
