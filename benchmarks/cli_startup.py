"""How long `tune ls` and a failing `tune validate` take, against `python -c "import torch"`.

    python benchmarks/cli_startup.py [rounds]

The three run in turn, so that a busy moment hits all of them alike; the medians are compared.
"""

import statistics
import subprocess
import sys
import time

COMMANDS = {
    "import torch": ["-c", "import torch"],
    "tune ls": ["-m", "solotune", "ls"],
    "tune validate, failing": [
        "-m",
        "solotune",
        "validate",
        "smollm2/135M_full_single_device",
        "batch_sise=2",
    ],
}


def seconds_of(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], capture_output=True)
    return time.perf_counter() - start


def main(rounds: int = 11) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for words in COMMANDS.values():
        seconds_of(words)  # fills the file cache
    for _ in range(rounds):
        for name, words in COMMANDS.items():
            seconds[name].append(seconds_of(words))
    reference = statistics.median(seconds["import torch"])
    print(f"medians of {rounds} rounds")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(f"{name:<24} {median:6.3f} s   {median / reference:5.2f} of import torch")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
