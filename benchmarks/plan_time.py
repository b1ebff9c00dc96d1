"""How long `tune plan` takes for 8B and 70B, from the command to its last line.

    python benchmarks/plan_time.py --out docs/plan.md

The commands and `python -c "import torch"` run in turn, so that a busy moment hits all alike; the
medians are shown, in seconds and in ratio to that import.
"""

import argparse
import statistics
from pathlib import Path

from cli_startup import seconds_of
from figures import conditions, cpu_name, table, write_figures

_PLAN = [
    *("-m", "solotune", "plan", "full_finetune_single_device"),
    *("--config", "llama3_1/8B_full_single_device", "batch_size=2"),
]
_SEVENTY = "model=solotune.models.llama3_1_70b"
_SEARCH = ["gradient_accumulation_steps=4", "--vram", "12GiB", "--ram", "64GiB"]
COMMANDS = {
    "import torch": ["-c", "import torch"],
    "8B, one micro-batch": [*_PLAN, "gradient_accumulation_steps=1"],
    "8B, 8 micro-batches": [*_PLAN, "gradient_accumulation_steps=8"],
    "70B, one micro-batch": [*_PLAN, "gradient_accumulation_steps=1", _SEVENTY],
    "70B, 8 micro-batches": [*_PLAN, "gradient_accumulation_steps=8", _SEVENTY],
    "8B, the search for 12 GiB": [*_PLAN, *_SEARCH],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="Markdown page whose figures are replaced")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    seconds_of(COMMANDS["8B, one micro-batch"])  # fills the file cache
    for _ in range(options.rounds):
        for name, words in COMMANDS.items():
            seconds[name].append(seconds_of(words))
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    reference = medians["import torch"]
    rows = [[name, f"{m:.1f}", f"{m / reference:.1f}"] for name, m in medians.items()]
    found = table(["", "seconds", "of the import"], rows)
    print(found)
    if options.out:
        text = f"{conditions(cpu_name(), 'torch')}\n\n{found}"
        write_figures(options.out, text, script="plan_time.py")


if __name__ == "__main__":
    main()
