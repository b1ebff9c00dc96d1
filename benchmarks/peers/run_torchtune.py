"""torchtune's own single-device recipe: `python run_torchtune.py PACKS MODEL OUT [--compile]`.

What a config cannot say is written here as components: the SmolLM2 model of torchtune's modules,
packs in the form of its PackedDataset, and a tokenizer, which the recipe asks for and does not use
on packed rows. The recipe is subclassed only to watch each batch and to leave out the save at the
end, which is not part of the work.
"""
# pyright: reportMissingImports=false, reportMissingModuleSource=false
# torchtune lives in an environment of its own.

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from omegaconf import OmegaConf
from packs import Packs, StepLog, digest
from torch import Tensor, nn
from torchtune.models.llama3._component_builders import llama3_mlp
from torchtune.modules import (
    MultiHeadAttention,
    RMSNorm,
    RotaryPositionalEmbeddings,
    TiedLinear,
    TransformerDecoder,
    TransformerSelfAttentionLayer,
)
from torchtune.training.metric_logging import MetricLoggerInterface


def published_recipe() -> Any:
    """Return the recipe's class from its file: the wheel's recipes refuse to be imported."""
    path = Path(sysconfig.get_path("purelib"), "recipes", "full_finetune_single_device.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec, path  # a .py file always has a loader
    assert spec.loader, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FullFinetuneRecipeSingleDevice


def decoder(*, folder: str, max_seq_len: int) -> TransformerDecoder:
    """Return the tied Llama decoder of `folder`/config.json; torchtune has no SmolLM2 builder."""
    config = json.loads((Path(folder) / "config.json").read_text())
    width, num_heads = config["hidden_size"], config["num_attention_heads"]
    num_kv_heads, head_width = config["num_key_value_heads"], width // num_heads
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    rope = RotaryPositionalEmbeddings(head_width, max_seq_len=max_seq_len, base=int(theta))

    def norm() -> RMSNorm:
        return RMSNorm(width, eps=config["rms_norm_eps"])

    def block() -> TransformerSelfAttentionLayer:
        attention = MultiHeadAttention(
            embed_dim=width,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_width,
            q_proj=nn.Linear(width, num_heads * head_width, bias=False),
            k_proj=nn.Linear(width, num_kv_heads * head_width, bias=False),
            v_proj=nn.Linear(width, num_kv_heads * head_width, bias=False),
            output_proj=nn.Linear(num_heads * head_width, width, bias=False),
            pos_embeddings=rope,
            max_seq_len=max_seq_len,
        )
        mlp = llama3_mlp(dim=width, hidden_dim=config["intermediate_size"])
        return TransformerSelfAttentionLayer(attention, mlp, sa_norm=norm(), mlp_norm=norm())

    embeddings = nn.Embedding(config["vocab_size"], width)
    return TransformerDecoder(
        tok_embeddings=embeddings,
        layers=nn.ModuleList([block() for _ in range(config["num_hidden_layers"])]),
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        head_dim=head_width,
        norm=norm(),
        output=TiedLinear(embeddings),
    )


def no_tokenizer() -> SimpleNamespace:
    """Return the least that the recipe accepts as a tokenizer: the packs are tokens already."""
    return SimpleNamespace(pad_id=0)


def packed_rows(tokenizer: SimpleNamespace, *, path: str, packed: bool) -> list[dict[str, Tensor]]:
    """Return the packs row by row as torchtune's PackedDataset holds them.

    `packed` is for the recipe, which reads it from the config. Filler closes a row as one more
    sequence.
    """
    packs = Packs.load(Path(path))
    row_length, max_segments = packs.tokens_NBS.shape[-1], packs.segments_NBM.shape[-1]
    columns = {
        "tokens": packs.tokens_NBS,
        "labels": packs.labels_in_place(),
        "input_pos": packs.positions_NBS,
    }
    flat = {name: torch.from_numpy(array).view(-1, row_length) for name, array in columns.items()}
    rows = []
    for i, segments_M in enumerate(packs.segments_NBM.reshape(-1, max_segments)):
        lengths_M1 = torch.tensor([*segments_M, row_length - segments_M.sum()])
        row = {name: rows_PS[i] for name, rows_PS in flat.items()}
        rows.append(row | {"seq_lens": lengths_M1[lengths_M1 > 0]})
    return rows


class Watched(published_recipe()):
    """The recipe as published; each batch is noted before the recipe sees it."""

    batch_digest = ""
    batch_targets = 0

    def _loss_step(self, batch: dict[str, Tensor]) -> Tensor:
        Watched.batch_digest = digest(batch["tokens"].numpy())
        Watched.batch_targets = int((batch["labels"] != self._loss_fn.ignore_index).sum())
        return super()._loss_step(batch)

    def save_checkpoint(self, epoch: int) -> None:
        pass


class StepLogger(MetricLoggerInterface):
    """torchtune's logger interface over StepLog.

    The recipe logs target tokens a second; its step time follows from them.
    """

    def __init__(self, path: str) -> None:
        self.steps = StepLog(Path(path))

    def log_config(self, config: object) -> None:
        pass

    def log(self, name: str, data: object, step: int) -> None:
        pass

    def log_dict(self, payload: Mapping[str, Any], step: int) -> None:
        self.steps.step(
            step,
            loss=float(payload["loss"]),
            seconds=Watched.batch_targets / float(payload["tokens_per_second_per_gpu"]),
            tokens=Watched.batch_digest,
            num_targets=Watched.batch_targets,
        )

    def close(self) -> None:
        self.steps.file.close()


def main(packs: str, model: str, out: str, *flags: str) -> None:
    """Train once over the packs in their order and leave steps.jsonl in `out`."""
    _, batch_size, row_length = Packs.load(Path(packs)).tokens_NBS.shape
    here = Path(__file__).stem
    config = {
        "model": {
            "_component_": f"{here}.decoder",
            "folder": model,
            "max_seq_len": row_length,
        },
        "tokenizer": {"_component_": f"{here}.no_tokenizer"},
        "dataset": {"_component_": f"{here}.packed_rows", "path": packs, "packed": True},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": model,
            "checkpoint_files": ["model.safetensors"],
            "output_dir": f"{out}/checkpoints",
            "model_type": "LLAMA3",
        },
        "optimizer": {
            "_component_": "torch.optim.AdamW",
            "fused": True,
            "lr": 2e-5,
            "weight_decay": 0.0,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": f"{here}.StepLogger", "path": f"{out}/steps.jsonl"},
        "output_dir": out,
        "resume_from_checkpoint": False,
        "seed": 42,
        "shuffle": False,
        "batch_size": batch_size,
        "epochs": 1,
        "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 1,
        "optimizer_in_bwd": False,
        "clip_grad_norm": None,
        "compile": "--compile" in flags,
        "enable_activation_checkpointing": True,
        "enable_activation_offloading": False,
        "device": "cpu",
        "dtype": "bf16",
        "log_every_n_steps": 1,
    }
    cfg = OmegaConf.create(config)
    recipe = Watched(cfg)
    recipe.setup(cfg)
    recipe.train()
    recipe.cleanup()


if __name__ == "__main__":
    # under its own name too: the config's paths shall find these classes, not a second copy
    sys.modules[Path(__file__).stem] = sys.modules["__main__"]
    main(*sys.argv[1:])
