"""Data: rows of files to samples with label masks, samples to batches in a reproducible order."""

from solotune.data.batch import IGNORED, Batch, Segment, accumulation_groups, collate
from solotune.data.dataset import build_samples, dataset
from solotune.data.files import Row
from solotune.data.inspection import Counts, FedRow, count_samples, fed_rows
from solotune.data.loader import Loader, make_loader
from solotune.data.mixing import mixed
from solotune.data.packing import best_fit
from solotune.data.prompts import Prompt, read_prompts
from solotune.data.pydoc import pydoc_dataset
from solotune.data.report import Report
from solotune.data.samples import Batching, SampleSet, split_validation
from solotune.data.sources import read_rows

__all__ = [
    "IGNORED",
    "Batch",
    "Batching",
    "Counts",
    "FedRow",
    "Loader",
    "Prompt",
    "Report",
    "Row",
    "SampleSet",
    "Segment",
    "accumulation_groups",
    "best_fit",
    "build_samples",
    "collate",
    "count_samples",
    "dataset",
    "fed_rows",
    "make_loader",
    "mixed",
    "pydoc_dataset",
    "read_prompts",
    "read_rows",
    "split_validation",
]
