"""`tune cat`: print a recipe or a config."""

from solotune.config.command_line import Parser
from solotune.config.registry import find_either

HELP = """\
Print a recipe or a config, by name or path.

  tune cat full_finetune_single_device
  tune cat llama3_2/1B_full_single_device"""


def main(words: list[str]) -> int:
    """Print the file of that name."""
    parser = Parser(prog="tune cat", description=HELP)
    parser.add_argument("name", help="a recipe or a config, by name or path")
    options = parser.parse_args(words)
    print(find_either(options.name).read_text(encoding="utf-8"), end="")
    return 0
