"""The step folders of one run: written whole, pruned, found again."""

import os
import re
import shutil
from collections.abc import Callable, Container, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from solotune.adapters import LoRA, initialize
from solotune.checkpoint import training_state
from solotune.checkpoint.adapter import (
    adapter_settings,
    adapter_sources,
    is_multimodal,
    load_adapter,
    write_adapter,
)
from solotune.checkpoint.base_model import base_name, fingerprint
from solotune.checkpoint.folders import (
    clean_up,
    model_folder,
    new_folder,
    pointed_folder,
    remove,
    write_text,
)
from solotune.checkpoint.load import LoadReport, load_weights
from solotune.checkpoint.safetensors_file import SourceTensor
from solotune.checkpoint.save import (
    read_json,
    saved_config,
    weight_sources,
    with_terminators,
    write_json,
    write_weights,
)
from solotune.checkpoint.stored_adapter import check_base, read_adapter
from solotune.checkpoint.training_state import TrainingState
from solotune.errors import CheckpointError
from solotune.models.auto import read_config
from solotune.models.decoder import Decoder
from solotune.tokenizers import Tokenizer

SMALL_FILES_BYTES = 32 * 2**20  # room left for tokenizer and JSON files
GIB = 2**30


class Checkpointer:
    """Reads the model to start from, and keeps the step folders of `output_dir`.

    Creating one finishes or undoes what a killed run left in `output_dir`. `keep_last` counts step
    folders; the best one is kept besides.
    """

    def __init__(
        self, checkpoint_dir: str | Path, output_dir: str | Path, *, keep_last: int = 2
    ) -> None:
        assert keep_last >= 1
        self.checkpoint_dir = model_folder(checkpoint_dir)
        self.output_dir = Path(output_dir)
        self.keep_last = keep_last
        self._check_apart(checkpoint_dir)
        if self.output_dir.is_dir():
            try:
                clean_up(self.output_dir)
            except OSError as error:
                raise CheckpointError(
                    f"cannot clean up after an earlier run in {self.output_dir}: {error}"
                ) from error

    def load_weights(
        self,
        model: Decoder,
        *,
        device: torch.device | str,
        on_host: Container[object] | None = None,
        resume: Path | None = None,
    ) -> LoadReport:
        """Fill a model built on meta from `checkpoint_dir`, or from the step folder `resume`.

        Parameters in `on_host` are loaded to host memory.
        """
        folder, fill = resume or self.checkpoint_dir, resume is None
        return load_weights(model, folder, device=device, on_host=on_host, fill_new_rows=fill)

    def fill_adapter(
        self, model: Decoder, adapter: LoRA, *, seed: int, resume: Path | None = None
    ) -> LoRA:
        """Give an adapter its values: of the step folder `resume`, of its source, or first ones.

        Returns the settings that it really has. The base weights must be loaded. Raises
        CheckpointError where the values were trained over another base.
        """
        source = resume or (None if adapter.source is None else Path(adapter.source))
        if source is None:
            initialize(model, seed)
            return adapter
        stored = read_adapter(model_folder(source, key="adapter.source"))
        check_base(stored, self.checkpoint_dir, found=self._base_fingerprint, exact=bool(resume))
        load_adapter(model, stored)
        return adapter_settings(adapter)

    def find_resume(self, resume_from_checkpoint: bool | str | Path | None) -> Path | None:
        """Return the step folder to go on from: the newest of `output_dir` for True, or as named.

        None for False, and for True where no step was saved yet: the run starts at the beginning.
        """
        if resume_from_checkpoint in (False, None):
            return None
        if resume_from_checkpoint is not True:
            folder = model_folder(str(resume_from_checkpoint), key="resume_from_checkpoint")
        elif (self.output_dir / "latest").is_file():
            folder = pointed_folder(self.output_dir / "latest")
        else:
            return None
        training_state.check_readable(folder)
        return folder

    def load_training_state(
        self,
        folder: Path,
        model: Decoder,
        optimizer: Optimizer,
        *,
        keep: Callable[[nn.Parameter], None] = lambda parameter: None,
    ) -> dict[str, Any]:
        """Restore optimizer, exact weights and generators of a step folder; return its progress.

        `keep` is called with each parameter whose state is restored: it may move the state on.
        """
        return training_state.load_training_state(
            folder, model=model, optimizer=optimizer, keep=keep
        )

    def save(
        self,
        step: int,
        *,
        model: Decoder,
        optimizer: Optimizer,
        progress: dict[str, Any],
        dtype: torch.dtype,
        tokenizer: Tokenizer,
        best: bool = False,
        adapter: LoRA | None = None,
    ) -> Path:
        """Write step_<step>, make it `latest` (and `best`), and remove what is no longer kept.

        `dtype` is that of the saved weights; the tokenizer's terminators, which were trained, end
        a generation. Of an adapted model, whose settings are `adapter`, the adapter alone is saved,
        in its own dtype. At every moment `latest` names a complete folder: killed or out of space,
        the run can go on from it. Raises CheckpointError, with the folders of earlier steps
        untouched.
        """
        eos_ids = tokenizer.stop_ids()
        if adapter is not None:
            weights = adapter_sources(model, multimodal=self._multimodal)
        else:
            named = ((model.to_hf_key(name), tensor) for name, tensor in model.named_parameters())
            weights = weight_sources(named, dtype=dtype)
        state = TrainingState(
            model=model,
            optimizer=optimizer,
            progress=progress,
            dtype=dtype if adapter is None else None,
        )
        self._check_space(step, sum(source.num_bytes for source in weights) + state.num_bytes)

        target = self.output_dir / f"step_{step}"
        with new_folder(target) as folder:
            config = read_config(self.checkpoint_dir)
            if adapter is not None:
                self._write_adapter(folder, model, adapter, weights)
            else:
                write_weights(folder, weights)
                if "vocab_size" in model.config:  # added tokens may have raised it
                    config["vocab_size"] = model.config["vocab_size"]
                config = saved_config(config, dtype=dtype, eos_ids=eos_ids)
                write_json(folder / "config.json", config)
            state.write(folder)
            generation = self._generation_config(config)
            write_json(folder / "generation_config.json", with_terminators(generation, eos_ids))
            tokenizer.save(folder)
        # First `best`: killed in between, the run repeats this step and finds the same again.
        if best:
            write_text(self.output_dir / "best", target.name + "\n")
        write_text(self.output_dir / "latest", target.name + "\n")
        self._prune(step)
        return target

    def finish(self) -> Path:
        """Make `final` a folder with the model of the latest step, and return its path.

        Weight files are hard links where the file system has them. Raises CheckpointError where no
        step was saved here.
        """
        final, pointer = self.output_dir / "final", self.output_dir / "latest"
        if not pointer.is_file():
            raise CheckpointError(
                f"no step was left to save in {self.output_dir}: the run that was to be resumed is "
                "complete; raise epochs to train on"
            )
        latest = pointed_folder(pointer)
        with new_folder(final) as folder:
            shutil.copytree(
                latest,
                folder,
                ignore=shutil.ignore_patterns(training_state.FOLDER),
                copy_function=_link_weights,
                dirs_exist_ok=True,
            )
        return final

    @cached_property
    def _base_fingerprint(self) -> str:
        return fingerprint(self.checkpoint_dir)

    @cached_property
    def _multimodal(self) -> bool:
        return is_multimodal(self.checkpoint_dir)

    def _write_adapter(
        self, folder: Path, model: Decoder, adapter: LoRA, weights: Sequence[SourceTensor]
    ) -> None:
        write_adapter(
            folder,
            model,
            weights,
            lora=adapter,
            base=base_name(self.checkpoint_dir),
            base_fingerprint=self._base_fingerprint,
            multimodal=self._multimodal,
        )

    def _check_apart(self, checkpoint_dir: str | Path) -> None:
        """Refuse to read the model from folders that this run removes or writes as it goes."""
        source, output = self.checkpoint_dir.resolve(), self.output_dir.resolve()
        of_run = source.parent == output and re.fullmatch(r"final|step_\d+", source.name)
        if source == output or of_run:
            raise CheckpointError(
                f"checkpoint_dir={checkpoint_dir} belongs to output_dir={self.output_dir}, where "
                "the run removes old steps: name another output_dir, or to resume, the "
                "checkpoint_dir that the run began with"
            )

    def _check_space(self, step: int, num_bytes: int) -> None:
        needed = num_bytes + SMALL_FILES_BYTES
        try:
            self.output_dir.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.output_dir).free
        except OSError as error:
            raise CheckpointError(f"cannot write to {self.output_dir}: {error.strerror}") from error
        if needed > free:
            raise CheckpointError(
                f"saving step {step} needs {needed / GIB:.2f} GiB and {self.output_dir} has "
                f"{free / GIB:.2f} GiB free: make room, or resume with another output_dir"
            )

    def _generation_config(self, config: dict[str, Any]) -> dict[str, Any]:
        path = self.checkpoint_dir / "generation_config.json"
        if path.is_file():
            return read_json(path)
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {key: config[key] for key in keys if config.get(key) is not None}

    def _prune(self, step: int) -> None:
        """Remove old step folders, and the training state of all but `step`.

        Later steps belong to a run that was gone back on; they stay until they are written again.
        """
        names = [path.name for path in self.output_dir.glob("step_*")]
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step_\d+", name))
        earlier = [number for number in steps if number < step]
        newest = earlier[max(0, len(earlier) - self.keep_last + 1) :]  # `step` itself is one more
        kept = {self.output_dir / f"step_{number}" for number in newest}
        best = self.output_dir / "best"
        if best.is_file():
            # Only its name: a best folder that someone moved away is no reason to stop.
            kept.add(self.output_dir / best.read_text(encoding="utf-8").strip())
        for number in earlier:
            folder = self.output_dir / f"step_{number}"
            unwanted = folder / training_state.FOLDER if folder in kept else folder
            try:
                remove(unwanted, parent=self.output_dir)
            except OSError as error:
                raise CheckpointError(
                    f"step {step} is saved, but {unwanted} cannot be removed: {error.strerror}"
                ) from error


def _link_weights(source: str, target: str) -> None:
    """Link a weight file; copy the small ones, which people edit."""
    if source.endswith(".safetensors"):
        try:
            os.link(source, target)
            return
        except OSError:  # no hard links here (FAT, some network file systems)
            pass
    shutil.copyfile(source, target)
