"""`python -m solotune` is `tune`: other projects install a command of that name too."""

import sys

# pyright cannot follow the mapping of cli/ in pyproject.toml
from solotune.cli.main import main  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    sys.exit(main())
