"""Resume state: three steps, save, load into fresh objects, one step = four steps."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from solotune.checkpoint import Checkpointer, environment_changes
from solotune.errors import CheckpointError
from solotune.models.decoder import Decoder
from solotune.optim import AdamWKahan, LionKahan
from solotune.tokenizers import auto as auto_tokenizer

from .conftest import build

Make = Callable[..., Path]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


def torchao_optimizer(name: str, **options: Any) -> MakeOptimizer:
    def make(parameters: list[Tensor]) -> Optimizer:
        import torchao.optim

        # One quantised matrix and one norm: each shape is compiled on its own, for seconds.
        return getattr(torchao.optim, name)([parameters[0], parameters[-2]], lr=1e-2, **options)

    return make


def bitsandbytes_optimizer(name: str) -> MakeOptimizer:
    def make(parameters: list[Tensor]) -> Optimizer:
        import bitsandbytes.optim

        return getattr(bitsandbytes.optim, name)(parameters, lr=1e-2)

    return make


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "AdamWKahan": lambda p: AdamWKahan(p, lr=1e-2),
    "AdamWKahan int8": lambda p: AdamWKahan(p, lr=1e-2, residual="int8", state_dtype="int8"),
    "LionKahan rounded": lambda p: LionKahan(p, lr=1e-2, residual="none", state_dtype="bf16"),
    "bitsandbytes AdamW8bit": bitsandbytes_optimizer("AdamW8bit"),
    "bitsandbytes PagedAdamW8bit": bitsandbytes_optimizer("PagedAdamW8bit"),
    "bitsandbytes Lion8bit": bitsandbytes_optimizer("Lion8bit"),
}
COMPILED_OPTIMIZERS: dict[str, MakeOptimizer] = {
    "torchao AdamW8bit": torchao_optimizer("AdamW8bit"),
    "torchao AdamW4bit": torchao_optimizer("AdamW4bit"),
    "torchao AdamWFp8": torchao_optimizer("AdamWFp8"),
    "torchao AdamW8bit stochastic": torchao_optimizer("AdamW8bit", bf16_stochastic_round=True),
}
FILTERS = [
    "ignore:Paged optimizers are not supported on CPU",
    "ignore::UserWarning:torch._inductor",
    "ignore::DeprecationWarning",
]


class Run:
    """A model, its optimizer and its checkpointer; gradients come from torch's generator."""

    def __init__(
        self, folder: Path, output_dir: Path, make: MakeOptimizer, device: str = "cpu"
    ) -> None:
        self.folder, self.device = folder, device
        self.checkpointer = Checkpointer(folder, output_dir)
        resume = self.checkpointer.find_resume(True)
        self.model: Decoder = build(folder)
        self.checkpointer.load_weights(self.model, device=device, resume=resume)
        self.optimizer = make(list(self.model.parameters()))
        self.progress: dict[str, Any] = {}
        if resume is not None:
            self.progress = self.checkpointer.load_training_state(
                resume, self.model, self.optimizer
            )

    def step(self, times: int) -> None:
        for _ in range(times):
            for parameter in self.model.parameters():
                parameter.grad = torch.randn_like(parameter)
            self.optimizer.step()

    def save(self, step: int, **progress: Any) -> Path:
        return self.checkpointer.save(
            step,
            model=self.model,
            optimizer=self.optimizer,
            progress={"step": step, **progress},
            dtype=torch.bfloat16,
            tokenizer=auto_tokenizer(self.folder),
        )


def flat_state(optimizer: Optimizer) -> list[Any]:
    """Return every number and tensor in the state, subclasses taken apart, in parameter order."""

    def parts(value: Any) -> list[Any]:
        if not hasattr(value, "__tensor_flatten__"):
            return [value]
        names, _ = value.__tensor_flatten__()
        return [part for name in names for part in parts(getattr(value, name))]

    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p] for p in parameters]
    return [part for state in states for key in sorted(state) for part in parts(state[key])]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert type(a) is type(b)
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
        else:
            assert a == b


def check_resume(folder: Path, tmp_path: Path, make: MakeOptimizer, device: str = "cpu") -> None:
    torch.manual_seed(1)
    whole = Run(folder, tmp_path / "whole", make, device)
    whole.step(4)
    state_after = torch.get_rng_state()

    torch.manual_seed(1)
    first = Run(folder, tmp_path / "run", make, device)
    first.step(3)
    first.save(3)
    kept_state = flat_state(first.optimizer)
    torch.manual_seed(99)
    second = Run(folder, tmp_path / "run", make, device)
    assert second.progress == {"step": 3}
    assert_same(flat_state(second.optimizer), kept_state)
    second.step(1)

    for (name, a), b in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert_same(flat_state(whole.optimizer), flat_state(second.optimizer))
    assert torch.equal(torch.get_rng_state(), state_after)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings(*FILTERS)
def test_resumed_step_equals_the_uninterrupted_one(
    make_folder: Make, tmp_path: Path, name: str
) -> None:
    check_resume(make_folder(), tmp_path, OPTIMIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED_OPTIMIZERS)
@pytest.mark.filterwarnings(*FILTERS)
def test_resumed_step_of_a_compiled_optimizer_equals_the_uninterrupted_one(
    make_folder: Make, tmp_path: Path, name: str
) -> None:
    check_resume(make_folder(), tmp_path, COMPILED_OPTIMIZERS[name])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("name", OPTIMIZERS | COMPILED_OPTIMIZERS)
@pytest.mark.filterwarnings(*FILTERS)
def test_resume_on_a_card_equals_the_uninterrupted_run(
    make_folder: Make, tmp_path: Path, name: str
) -> None:
    """A feed-forward of 1e5 weights and more, from where bitsandbytes pages its state."""
    folder = make_folder(intermediate_size=2048)
    check_resume(folder, tmp_path, (OPTIMIZERS | COMPILED_OPTIMIZERS)[name], "cuda")


def adamw(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def test_fp32_norms_resume_exactly_from_bf16_weights(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    run.save(1)
    norm = run.model.get_parameter("norm.weight")
    assert not torch.equal(norm, norm.bfloat16().float())
    resumed = Run(folder, tmp_path / "run", adamw)
    assert torch.equal(resumed.model.get_parameter("norm.weight"), norm)


def test_progress_and_generators_come_back(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    progress = {"epoch": 2, "best": float("inf"), "loss": 0.1 + 0.2, "nested": {"a": [1, None]}}
    run.save(1, **progress)
    expected = random.random(), random.gauss(0, 1), torch.rand(3)
    random.seed(5)
    torch.manual_seed(5)
    resumed = Run(folder, tmp_path / "run", adamw)
    assert resumed.progress == {"step": 1, **progress}
    assert (random.random(), random.gauss(0, 1)) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])


def test_parameters_without_state_yet_resume_without_it(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.model.embed_tokens.weight.grad = torch.ones_like(run.model.embed_tokens.weight)
    run.optimizer.step()
    run.save(1)
    resumed = Run(folder, tmp_path / "run", adamw)
    assert list(resumed.optimizer.state) == [resumed.model.embed_tokens.weight]


def test_options_of_the_optimizer_come_from_the_resumed_run(
    make_folder: Make, tmp_path: Path
) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    run.save(1)
    resumed = Run(folder, tmp_path / "run", lambda p: torch.optim.AdamW(p, weight_decay=0.5))
    assert resumed.optimizer.param_groups[0]["weight_decay"] == 0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), r"optimizer=torch\.optim\.adamw\.AdamW.*sgd\.SGD"),
        (lambda p: adamw(p[1:]), r"embed_tokens\.weight is trained only in the saved run"),
    ],
)
def test_another_optimizer_is_refused(
    make_folder: Make, tmp_path: Path, make: MakeOptimizer, message: str
) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    run.save(1)
    with pytest.raises(CheckpointError, match=message):
        Run(folder, tmp_path / "run", make)


def test_another_training_dtype_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    saved = run.save(1)
    model = build(folder, dtype=torch.float32)
    run.checkpointer.load_weights(model, device="cpu", resume=saved)
    with pytest.raises(CheckpointError, match=r"embed_tokens\.weight was bfloat16 .* is float32"):
        run.checkpointer.load_training_state(saved, model, adamw(list(model.parameters())))


def edit_state(saved: Path, edit: Callable[[dict], None]) -> None:
    path = saved / "training_state" / "state.json"
    state = json.loads(path.read_text())
    edit(state)
    path.write_text(json.dumps(state))


def test_tensor_class_from_elsewhere_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    saved = run.save(1)

    def name_a_class(state: dict) -> None:
        state["state"]["norm.weight"]["exp_avg"] = {
            "class": "subprocess.Popen", "context": [], "shape": [64], "stride": [1], "inner": {}
        }  # fmt: skip

    edit_state(saved, name_a_class)
    with pytest.raises(CheckpointError, match=r"tensor class subprocess\.Popen, which is refused"):
        Run(folder, tmp_path / "run", adamw)


def test_damaged_state_is_refused(make_folder: Make, tmp_path: Path) -> None:
    folder = make_folder()
    run = Run(folder, tmp_path / "run", adamw)
    run.step(1)
    saved = run.save(1)
    path = saved / "training_state" / "state.json"
    text = path.read_text()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(CheckpointError, match=r"state\.json is damaged"):
        run.checkpointer.find_resume(True)
    path.write_text(text)
    tensors = saved / "training_state" / "optimizer.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"optimizer\.safetensors is truncated"):
        run.checkpointer.find_resume(True)


def test_state_that_cannot_be_saved_is_refused_before_anything_is_written(
    make_folder: Make, tmp_path: Path
) -> None:
    run = Run(make_folder(), tmp_path / "run", adamw)
    run.optimizer.state[run.model.get_parameter("norm.weight")]["history"] = [1, 2]
    with pytest.raises(CheckpointError, match=r"keeps a list as norm\.weight\.history"):
        run.save(1)
    assert not (tmp_path / "run").exists()


def test_changed_environment_is_named(make_folder: Make, tmp_path: Path) -> None:
    run = Run(make_folder(), tmp_path / "run", adamw)
    saved = run.save(1)
    cpu = torch.device("cpu")
    assert environment_changes(saved, device=cpu) == []
    edit_state(saved, lambda state: state["environment"].update(threads=999))
    (line,) = environment_changes(saved, device=cpu)
    assert line == f"threads: 999 when saved, {torch.get_num_threads()} now"
