"""Step folders of an adapter: PEFT's files and a training state, and nothing of the base model."""

import json
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from solotune.adapters import LoRA, adapter_parameters, quantize_linears
from solotune.checkpoint import Checkpointer, add_adapter
from solotune.errors import CheckpointError, ConfigError
from solotune.models.llama import llama3_2_1b
from solotune.tokenizers import auto as auto_tokenizer
from solotune.training import set_dtype

from .conftest import build

Make = Callable[..., Path]
LORA = LoRA(rank=4, alpha=8, targets=["q_proj", "embed_tokens"], dora=True)


class Run:
    """A short training of an adapter whose gradients depend on the step and the weights."""

    def __init__(
        self, base: Path, output_dir: Path, lora: LoRA = LORA, *, optimizer: str = "AdamW"
    ) -> None:
        self.checkpointer = Checkpointer(base, output_dir)
        self.model = build(base)
        self.lora = add_adapter(self.model, lora)
        self.checkpointer.load_weights(self.model, device="cpu")
        self.tokenizer = auto_tokenizer(base)
        self.kind = optimizer
        self.step = 0

    def begin(self, resume: bool = False) -> "Run":
        folder = self.checkpointer.find_resume(resume)
        self.checkpointer.fill_adapter(self.model, self.lora, seed=1, resume=folder)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = getattr(torch.optim, self.kind)(parameters, lr=0.05)
        if folder:
            loaded = self.checkpointer.load_training_state(folder, self.model, self.optimizer)
            self.step = loaded["step"]
        return self

    def train(self, steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            self.step += 1
            for parameter in adapter_parameters(self.model).values():
                noise = torch.randn(parameter.shape).to(parameter.dtype)
                parameter.grad = noise * parameter.detach().cos() * self.step
            self.optimizer.step()
        return {name: p.detach().clone() for name, p in adapter_parameters(self.model).items()}

    def save(self, *, best: bool = False) -> Path:
        return self.checkpointer.save(
            self.step,
            model=self.model,
            optimizer=self.optimizer,
            progress={"step": self.step},
            dtype=torch.bfloat16,
            tokenizer=self.tokenizer,
            best=best,
            adapter=self.lora,
        )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adafactor"])
def test_a_resumed_adapter_goes_on_as_if_it_had_not_stopped(
    make_folder: Make, tmp_path: Path, dtype: str, optimizer: str
) -> None:
    lora = LoRA(rank=4, targets=["q_proj", "lm_head"], dora=True, dtype=dtype)  # pyright: ignore[reportArgumentType]
    base = make_folder()
    torch.manual_seed(5)
    through = Run(base, tmp_path / "a", lora, optimizer=optimizer).begin()
    through.train(2)
    through.save()
    wanted = through.train(2)
    torch.manual_seed(99)
    found = Run(base, tmp_path / "a", lora, optimizer=optimizer).begin(resume=True).train(2)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype
        assert torch.equal(found[name], wanted[name]), name


def test_a_step_folder_holds_the_adapter_and_nothing_of_the_base(
    make_folder: Make, tmp_path: Path
) -> None:
    base = make_folder()
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    run = Run(base, tmp_path / "run").begin()
    run.train(1)
    folder = run.save(best=True)
    assert {path.name for path in folder.iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_state",
    }
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(".lora_" in name for name in tensors)
    assert {t.dtype for t in tensors.values()} == {torch.float32}
    state = load_file(folder / "training_state/optimizer.safetensors")
    assert all(".lora_" in name for name in state), "no frozen weight"
    assert sum(t.nbytes for t in tensors.values()) < 0.1 * len(before["model.safetensors"])
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base)
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    run.train(1)
    run.save()
    final = run.checkpointer.finish()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "best",
        "final",
        "latest",
        "step_1",
        "step_2",
    ]
    assert not (final / "training_state").exists()
    weights = "adapter_model.safetensors"
    assert (final / weights).samefile(tmp_path / "run/step_2" / weights)


def test_saving_reads_no_weight_of_the_base(make_folder: Make, tmp_path: Path) -> None:
    """Frozen weights on meta would raise if a number of theirs was asked for."""
    run = Run(make_folder(), tmp_path / "run").begin()
    run.train(1)
    for name, parameter in list(run.model.named_parameters()):
        if ".lora_" not in name and name != "embed_tokens.weight":  # which tells the device
            on_meta = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
            torch.utils.swap_tensors(parameter, on_meta)
    assert run.save().is_dir()


def test_another_base_is_refused(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    run = Run(base, tmp_path / "run").begin()
    run.train(1)
    run.save()
    copy = shutil.copytree(base, tmp_path / "copy")
    Run(copy, tmp_path / "run").begin(resume=True)  # the same weights in another place
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    other = Run(copy, tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"step_1 was trained on other weights .*copy: name"):
        other.begin(resume=True)


def test_other_settings_are_refused_at_resume(make_folder: Make, tmp_path: Path) -> None:
    base = make_folder()
    run = Run(base, tmp_path / "run").begin()
    run.train(1)
    run.save()
    for changed, what in (
        (
            LoRA(rank=8, alpha=16, targets=["q_proj", "embed_tokens"], dora=True),
            r"shape \[4, 320\]",
        ),
        (LoRA(rank=4, alpha=9, targets=["q_proj", "embed_tokens"], dora=True), "adapter.alpha"),
        (LoRA(rank=4, alpha=8, targets=["q_proj"], dora=True), "only in the folder"),
        (LoRA(rank=4, alpha=8, targets=["q_proj", "embed_tokens"]), "magnitude_vector is only in"),
    ):
        with pytest.raises(CheckpointError, match=what):
            Run(base, tmp_path / "run", changed).begin(resume=True)


def test_training_goes_on_from_an_adapter_in_another_folder(
    make_folder: Make, tmp_path: Path
) -> None:
    base = make_folder()
    run = Run(base, tmp_path / "first").begin()
    trained = run.train(2)
    run.save()
    again = Run(
        base, tmp_path / "second", LoRA(source=str(tmp_path / "first"), dtype="bf16")
    ).begin()
    assert (again.lora.rank, again.lora.alpha, again.lora.dora) == (4, 8, True)
    for name, parameter in adapter_parameters(again.model).items():
        assert torch.equal(parameter, trained[name].to(parameter.dtype)), name
    with pytest.raises(ConfigError, match=r"adapter.rank=5 has no effect beside adapter.source"):
        Run(base, tmp_path / "third", LoRA(source=str(tmp_path / "first"), rank=5))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_saving_an_adapter_of_a_4_bit_1b_model_takes_under_100_mb(
    make_folder: Make, tmp_path: Path
) -> None:
    """The model is Llama 3.2 1B's; only its files for the fingerprint are a small model's."""
    base = make_folder()
    with torch.device("meta"):
        model = llama3_2_1b()
    set_dtype(model, torch.bfloat16)
    quantize_linears(model)
    lora = add_adapter(model, LoRA(rank=16))
    for parameter in list(model.parameters()):  # pages that nothing touches take no memory
        values = torch.empty(parameter.shape, dtype=parameter.dtype)
        held = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, held)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    for parameter in trained:
        parameter.data.fill_(0.5)
        optimizer.state[parameter] = {"exp_avg": parameter * 2, "exp_avg_sq": parameter * 3}
    assert sum(p.numel() for p in trained) > 11e6

    run = {"model": model, "optimizer": optimizer, "dtype": torch.bfloat16, "adapter": lora}
    checkpointer, tokenizer = Checkpointer(base, tmp_path / "run"), auto_tokenizer(base)
    with peak_rise() as rise:
        checkpointer.save(1, progress={"step": 1}, tokenizer=tokenizer, **run)
    assert rise() < 100e6
    assert (tmp_path / "run/step_1/adapter_model.safetensors").stat().st_size > 45e6


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.findall(r"RssAnon:\s+(\d+)", status)[0])


@contextmanager
def peak_rise() -> Iterator[Callable[[], int]]:
    """Yield a function that returns by how much memory rose in the block, at its peak, in bytes."""
    before = peak = anonymous_bytes()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.002):
            peak = max(peak, anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: peak - before
    finally:
        done.set()
        thread.join()
