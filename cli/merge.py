"""`tune merge`: an adapter into its base model, as a model of its own."""

from pathlib import Path

from solotune.config.command_line import Parser

HELP = """\
Write a model folder with an adapter in its weights, for whatever does not know adapters, or as the
start of another training.

  tune merge models/SmolLM2-135M-Instruct runs/mine merged/mine

BASE is the model that the adapter was trained on; if that was in 4 bits, the unquantised one.
ADAPTER is a folder in PEFT's format, or the folder of a run, which stands for its latest step. OUT
is a new folder. Weights are added in fp32 and stored in the dtype that BASE has; its files keep
their names, and what the adapter leaves alone stays bit for bit. BASE and ADAPTER are only read."""


def main(words: list[str]) -> int:
    """Merge, and print what was done and, last, the folder."""
    parser = Parser(prog="tune merge", description=HELP)
    parser.add_argument("base", metavar="BASE", help="a model folder")
    parser.add_argument("adapter", metavar="ADAPTER", help="a folder with adapter_config.json")
    parser.add_argument("out", metavar="OUT", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    options = parser.parse_args(words)

    from solotune.checkpoint.merge import merge  # only here: torch is slow to import

    base, adapter, out = (
        Path(path).expanduser() for path in (options.base, options.adapter, options.out)
    )
    for line in merge(base, adapter, out).lines():
        print(line)
    print(out)
    return 0
