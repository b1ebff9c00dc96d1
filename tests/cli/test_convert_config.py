"""`tune convert-config` on every config of torchtune 0.6.1, and on pieces that it does not hold."""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from solotune.cli.main import main  # pyright: ignore[reportMissingImports]
from solotune.config import Component, ConfigError, find_recipe, load, read_schema, torchtune
from solotune.config.conversion import convert
from solotune.config.torchtune_recipes import FULL, LORA

SPEC = importlib.util.find_spec("torchtune")  # nothing of it is imported
SITE = Path(SPEC.origin).parents[1] if SPEC and SPEC.origin else Path("torchtune-is-not-installed")
CONFIGS = SITE / "recipes/configs"


def registry() -> dict[str, str]:
    """torchtune's recipe by the path of a config, as its registry lists them."""
    file = SITE / "torchtune/_recipe_registry.py"
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
    found = {}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "Recipe":
            named = {word.arg: word.value for word in call.keywords}
            for config in ast.walk(named["configs"]):
                if isinstance(config, ast.Call):
                    path = {word.arg: ast.literal_eval(word.value) for word in config.keywords}
                    if (CONFIGS / path["file_path"]).is_file():  # one is not in the wheel
                        found[path["file_path"]] = ast.literal_eval(named["name"])
    return found


REGISTRY = registry()
OURS = sorted(
    config
    for config, recipe in REGISTRY.items()
    if recipe in (FULL, LORA) and "vision" not in config and not config.startswith("gemma/")
)
OTHERS = sorted(set(REGISTRY) - set(OURS))
ONE_DEVICE = sorted(
    config
    for config, recipe in REGISTRY.items()
    if recipe.endswith("_single_device") or recipe in ("generate", "eleuther_eval", "quantize")
)


def test_torchtune_is_there_to_be_converted():
    assert (len(OURS), len(OTHERS)) == (51, 104), "pip install torchtune==0.6.1"


@pytest.mark.parametrize("name", OURS)
def test_a_config_of_training_on_one_device_becomes_one_of_ours(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.chdir(tmp_path)
    assert main(["convert-config", str(CONFIGS / name), "mine.yaml"]) == 0
    assert "mine.yaml: check it with `tune validate mine.yaml`" in capsys.readouterr().out
    assert main(["validate", "mine.yaml"]) == 0, capsys.readouterr().err

    theirs = yaml.safe_load((CONFIGS / name).read_text("utf-8"))
    values = load(find_recipe(REGISTRY[name]), Path("mine.yaml")).values
    for key in (
        "output_dir batch_size epochs max_steps_per_epoch gradient_accumulation_steps "
        "optimizer_in_bwd compile dtype device shuffle enable_activation_checkpointing"
    ).split():
        assert key not in theirs or values[key] == theirs[key], key
    assert values["clip_grad_norm"] == theirs.get("clip_grad_norm")
    assert values["enable_activation_offloading"] == theirs.get(
        "enable_activation_offloading", False
    )
    optimizer = values["optimizer"]
    assert optimizer.path == theirs["optimizer"]["_component_"]
    assert optimizer.arguments["lr"] == float(theirs["optimizer"]["lr"])
    folder = theirs["checkpointer"]["checkpoint_dir"].removesuffix("/original/")
    assert values["checkpoint_dir"] == folder
    assert values["dataset"].arguments["packed"] == theirs["dataset"].get("packed", False)
    assert values["dataset"].arguments["train_on_input"] is True
    assert values["dataset"].arguments["source"] in ("tatsu-lab/alpaca", "yahma/alpaca-cleaned")
    assert values["val_fraction"] == 0
    assert "path" not in values["tokenizer"].arguments
    length = theirs["tokenizer"].get("max_seq_len")  # some leave the length open
    assert length is None or values["tokenizer"].arguments["max_seq_len"] == length
    if REGISTRY[name] == LORA:
        check_adapter(values, theirs["model"])
    if "lr_scheduler" in theirs:
        assert values["lr_scheduler"] == Component(
            "solotune.training.cosine",
            {
                "num_warmup_steps": theirs["lr_scheduler"]["num_warmup_steps"],
                "final_lr_ratio": 0.0,
            },
            "lr_scheduler",
            values["lr_scheduler"].where,
        )


def check_adapter(values: dict, model: dict) -> None:
    path = model["_component_"]
    adapter = values["adapter"].arguments
    assert adapter["rank"] == model["lora_rank"]
    assert adapter["alpha"] == model["lora_alpha"]
    assert adapter.get("dora", False) == model.get("use_dora", False)
    is_quantized = "qlora_" in path or model.get("quantize_base", False)
    assert values["quantize_base"] == ("nf4" if is_quantized else None)
    fused = ".phi" in path
    wanted = {"o_proj", *(["qkv_proj"] if fused else ["q_proj", "v_proj"])}
    if model["apply_lora_to_mlp"]:
        wanted |= {"down_proj"} | ({"gate_up_proj"} if fused else {"gate_proj", "up_proj"})
    if model.get("apply_lora_to_output"):
        wanted.add("lm_head")
    assert set(adapter["targets"]) >= wanted - {"o_proj"}
    assert set(adapter["targets"]) <= wanted | {"k_proj"}


WORDS = {
    "lora_finetune_single_device": "Gemma 1",
    "lora_finetune_distributed": "several devices",
    "lora_dpo_single_device": "DPO",
    "lora_dpo_distributed": "DPO",
    "full_dpo_distributed": "DPO",
    "ppo_full_finetune_single_device": "PPO",
    "knowledge_distillation_single_device": "distillation",
    "knowledge_distillation_distributed": "distillation",
    "full_finetune_distributed": "several devices",
    "generate": "tune run generate",
    "eleuther_eval": "evaluation",
    "quantize": "quantization",
    "qat_distributed": "quantization",
    "qat_lora_finetune_distributed": "quantization",
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_config_of_another_recipe_is_refused_by_its_kind(name: str):
    with pytest.raises(ConfigError) as error:
        convert(CONFIGS / name)
    word = WORDS.get(REGISTRY[name], "")
    if "gemma/" in name and REGISTRY[name] in (FULL, LORA):
        word = "Gemma 1"
    if "vision" in name and "generation" not in name:
        word = "evaluation" if "evaluation" in name else "multimodal training"
    assert word.lower() in str(error.value).lower(), error.value
    assert "\n" not in str(error.value)


def dotted(tree: dict, key: str = "") -> Iterator[tuple[str, object]]:
    for name, value in tree.items():
        yield f"{key}{name}", value
        if isinstance(value, dict):
            yield from dotted(value, f"{key}{name}.")


@pytest.mark.parametrize("name", ONE_DEVICE)
def test_each_key_and_component_of_torchtune_has_a_word_for_it(name: str):
    recipes = [find_recipe(recipe) for recipe in (FULL, LORA, "generate")]
    schemas = {key: field for recipe in recipes for key, field in read_schema(recipe).items()}
    ours = (
        *("_component_", "lr", "weight_decay", "fused", "source", "packed", "train_on_input"),
        *("split", "num_warmup_steps", "max_seq_len", "path", "wait_steps", "warmup_steps"),
        *("active_steps", "profile_memory", "with_stack", "record_shapes"),
    )
    for key, value in dotted(yaml.safe_load((CONFIGS / name).read_text("utf-8"))):
        node, _, part = key.partition(".")
        is_same = (node in schemas and part in ("", *ours)) or torchtune.key_here(node) is not None
        assert is_same or torchtune.equivalent_key(key) or node in ("prompt", "temperature"), key
        if part == "_component_" and str(value).startswith("torchtune."):
            assert torchtune.component_here(str(value)) is not None, value


def test_the_page_has_every_line_of_the_table():
    page = (Path(__file__).parents[2] / "docs/from_torchtune.md").read_text("utf-8")
    for name in (*torchtune.KEYS, *torchtune.COMPONENTS):
        assert f"`{name}`" in page, name


THEIRS = """\
# Full fine-tuning; tune run full_finetune_single_device --config mine
name: exp7
output_dir: /tmp/${name}

# what to train
model:
  _component_: torchtune.models.qwen2_5.qwen2_5_3b
tokenizer:
  _component_: torchtune.models.qwen2_5.qwen2_5_tokenizer
  path: ${checkpointer.checkpoint_dir}/vocab.json
  max_seq_len: 1024 # tokens
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: /models/qwen # fetched
  checkpoint_files: [a.safetensors, b.safetensors]
  output_dir: ${output_dir}
dataset: {_component_: torchtune.datasets.chat_dataset, source: json, data_files: c.json, \
conversation_column: talk, conversation_style: sharegpt, split: train, packed: True} # rows
optimizer:
  _component_: torch.optim.AdamW
  lr: 2e-5
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
  num_output_chunks: 16
batch_size: 3 # rows
epochs: 2
"""


def converted(tmp_path: Path, theirs: str, code: int = 0) -> dict:
    (tmp_path / "theirs.yaml").write_text(theirs)
    words = [str(tmp_path / "theirs.yaml"), str(tmp_path / "mine.yaml"), "--force"]
    assert main(["convert-config", *words]) == code
    return yaml.safe_load((tmp_path / "mine.yaml").read_text())


def test_references_are_resolved_comments_stay_and_what_is_lost_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    mine = converted(tmp_path, THEIRS, code=1)
    out, err = capsys.readouterr()
    assert "lost      name" in out
    assert err == "error: 1 keys have no equivalent, see `lost` above: name\n"
    assert mine["output_dir"] == "/tmp/exp7"
    assert mine["tokenizer"] == {"_component_": "solotune.tokenizers.auto", "max_seq_len": 1024}
    assert mine["dataset"] == {
        "_component_": "solotune.data.dataset",
        "source": "c.json",
        "format": "conversations",
        "packed": True,
        "column_map": {"conversations": "talk"},
    }
    assert mine["loss"] == {"_component_": "solotune.losses.LinearCrossEntropy"}
    assert (mine["clip_grad_norm"], mine["val_fraction"]) == (None, 0)
    text = (tmp_path / "mine.yaml").read_text()
    assert text.startswith(
        "recipe: full_finetune_single_device\n"
        "# Converted from torchtune's theirs.yaml by `tune convert-config`.\n"
    )
    for line in (
        "# what to train\nmodel:",
        "  max_seq_len: 1024  # tokens\n",
        "checkpoint_dir: /models/qwen  # fetched\n",
        "batch_size: 3  # rows\n",
    ):
        assert line in text
    assert "tune run" not in text


def dataset_of(tmp_path: Path, node: str) -> dict:
    start, end = THEIRS.index("dataset:"), THEIRS.index("optimizer:")
    theirs = THEIRS[:start] + f"dataset: {node}\n" + THEIRS[end:]
    return converted(tmp_path, theirs.replace("name: exp7", "").replace("${name}", "x"))["dataset"]


@pytest.mark.parametrize(
    ("node", "arguments"),
    [
        (
            "{_component_: torchtune.datasets.instruct_dataset, source: me/mine, split: test}",
            {
                "source": "me/mine",
                "split": "test",
                "format": "prompt",
                "column_map": {"prompt": "input", "completion": "output"},
                "packed": False,
            },
        ),
        (
            "{_component_: torchtune.datasets.instruct_dataset, source: csv, data_files: [r.csv],"
            " column_map: {input: q, output: a}}",
            {
                "source": "r.csv",
                "format": "prompt",
                "column_map": {"prompt": "q", "completion": "a"},
                "packed": False,
            },
        ),
        (
            "{_component_: torchtune.datasets.alpaca_dataset, train_on_input: False,"
            " column_map: {instruction: q, output: a}, packed: True}",
            {
                "source": "tatsu-lab/alpaca",
                "train_on_input": False,
                "format": "instruction",
                "column_map": {"instruction": "q", "output": "a"},
                "packed": True,
            },
        ),
        (
            "{_component_: torchtune.datasets.text_completion_dataset, source: text,"
            " data_files: b.txt, packed: True}",
            {
                "source": "b.txt",
                "format": "text",
                "column_map": {"text": "text"},
                "packed": True,
                "split_across_pack": True,
            },
        ),
        (
            "{_component_: torchtune.datasets.wikitext_dataset}",
            {
                "source": "EleutherAI/wikitext_document_level",
                "config": "wikitext-103-v1",
                "format": "text",
                "column_map": {"text": "page"},
                "packed": False,
            },
        ),
    ],
)
def test_data_sets_keep_what_torchtune_means_by_its_defaults(
    tmp_path: Path, node: str, arguments: dict
):
    assert dataset_of(tmp_path, node) == {"_component_": "solotune.data.dataset", **arguments}
    overrides = ["tokenizer.max_seq_len=64"]
    load(find_recipe(FULL), tmp_path / "mine.yaml", overrides).check_components()


def test_several_data_sets_become_a_mixture(tmp_path: Path):
    one = "{_component_: torchtune.datasets.chat_dataset, source: me/a, conversation_style: openai}"
    found = dataset_of(tmp_path, f"[{one}, {one.replace('me/a', 'me/b')}]")
    assert [part["source"] for part in found] == ["me/a", "me/b"]
    load(find_recipe(FULL), tmp_path / "mine.yaml").check_components()


@pytest.mark.parametrize(
    ("change", "code", "told"),
    [
        (("epochs: 2", "epochs: 2\nseed: null"), 1, "dropped   seed"),
        (("epochs: 2", "epochs: 2\nresume_from_checkpoint: True"), 1, "lost      resume_from"),
        (("epochs: 2", "epochs: 2\nlog_level: INFO"), 1, "facts are always printed"),
        (("split: train", "filter_fn: f"), 1, "lost      dataset.filter_fn"),
        (("max_seq_len: 1024", "prompt_template: x"), 1, "lost      tokenizer.prompt_template"),
        (("qwen2_5.qwen2_5_3b", "gemma.gemma_2b"), 1, "Gemma 1 is not supported"),
        (("chat_dataset", "preference_dataset"), 1, "a config of preference training (DPO)"),
        (("c.json", "[a.json, b.json]"), 1, "dataset.data_files: several files"),
        (("checkpoint_dir: /models/qwen", "checkpoint_dir: null"), 1, "checkpoint_dir is not set"),
        (("name: exp7", "recipe: mine"), 1, "a config of solotune already"),
        (("name: exp7", "name: [a"), 1, "not YAML"),
        (("${name}", "${oc.env:HOME}"), 1, "resolvers are refused"),
        (("optimizer:", "optim:"), 1, "no training config of torchtune"),
    ],
)
def test_what_changes_or_stops_is_said(
    tmp_path: Path, change: tuple[str, str], code: int, told: str, capsys: pytest.CaptureFixture
):
    assert change[0] in THEIRS
    (tmp_path / "theirs.yaml").write_text(THEIRS.replace(*change))
    words = [str(tmp_path / "theirs.yaml"), str(tmp_path / "mine.yaml")]
    assert main(["convert-config", *words]) == code
    out, err = capsys.readouterr()
    assert told in out + err


def test_profilers_and_loggers_that_are_on_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture):
    nodes = """
metric_logger: {_component_: torchtune.training.metric_logging.WandBLogger, project: p, log_dir: x}
profiler: {_component_: torchtune.training.setup_torch_profiler, enabled: True, wait_steps: 5,
  num_cycles: 1}
"""
    mine = converted(tmp_path, THEIRS.replace("name: exp7", "").replace("${name}", "x") + nodes)
    assert mine["metric_logger"] == {"_component_": "solotune.training.WandBLogger", "project": "p"}
    assert mine["profiler"] == {"_component_": "solotune.training.StepProfiler", "wait_steps": 5}
    load(find_recipe(FULL), tmp_path / "mine.yaml").check_components()


def test_optimizers_of_torchao_are_found_where_they_are_now(
    tmp_path: Path, capsys: pytest.CaptureFixture
):
    theirs = THEIRS.replace("torch.optim.AdamW", "torchao.prototype.low_bit_optim.AdamW8bit")
    mine = converted(tmp_path, theirs.replace("name: exp7", "").replace("${name}", "x"))
    assert mine["optimizer"] == {"_component_": "torchao.optim.AdamW8bit", "lr": "2e-5"}
    load(find_recipe(FULL), tmp_path / "mine.yaml").check_components()


def test_a_file_is_not_overwritten_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture):
    (tmp_path / "theirs.yaml").write_text(THEIRS)
    (tmp_path / "mine.yaml").write_text("mine")
    words = ["convert-config", str(tmp_path / "theirs.yaml")]
    assert main([*words, str(tmp_path / "mine.yaml")]) == 1
    assert "--force overwrites it" in capsys.readouterr().err
    assert (tmp_path / "mine.yaml").read_text() == "mine"
    assert main([*words, str(tmp_path / "mine.txt")]) == 1
    assert main(words) == 2
