"""The shared work, made by solotune's own data path.

`python make_packs.py MODEL PACKS STEPS BATCH_SIZE ROW_LENGTH SEED` writes the first batches of the
epoch that the recipe itself runs with the same seed.
"""

import sys
from itertools import islice
from pathlib import Path

import numpy as np
from packs import Packs

from solotune import tokenizers
from solotune.data import make_loader, pydoc_dataset


def main(model: str, path: str, *numbers: str) -> None:
    """Write the first `steps` batches of epoch 0 to `path`."""
    steps, batch_size, row_length, seed = map(int, numbers)
    samples = pydoc_dataset(tokenizers.auto(model, max_seq_len=row_length), packed=True)
    loader = make_loader(samples, batch_size=batch_size, max_seq_len=row_length, seed=seed)
    batches = list(islice(loader.epoch(0), steps))
    if len(batches) < steps:
        sys.exit(f"error: the data holds {len(batches)} steps: use --steps {len(batches)} or fewer")
    Packs(
        tokens_NBS=np.stack([batch.tokens_BS.numpy() for batch in batches]),
        labels_NBS=np.stack([batch.labels_BS.numpy() for batch in batches]),
        positions_NBS=np.stack([batch.positions_BS.numpy() for batch in batches]),
        segments_NBM=np.stack([batch.segments_BM.numpy() for batch in batches]),
    ).write(Path(path))


if __name__ == "__main__":
    main(*sys.argv[1:])
