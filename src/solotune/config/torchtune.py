"""What torchtune's keys and components are called here: the one table.

Error messages read it, and so does the conversion of whole configs.
"""

import fnmatch
from typing import NamedTuple


class Here(NamedTuple):
    """What a key or component of torchtune is here: a name, or None with the reason."""

    name: str | None
    why: str = ""

    @property
    def repair(self) -> str:
        """What to do with the key, for an error message."""
        if self.name is None:
            return f"remove it: {self.why}"
        return f"the key is {self.name}{f': {self.why}' if self.why else ''}"


def _gone(why: str) -> Here:
    return Here(None, why)


_ONE_DEVICE = _gone("there is one device")
_FROM_CONFIG_JSON = _gone("the model is read from checkpoint_dir/config.json")
_WITH_THE_MODEL = _gone("the tokenizer is read from checkpoint_dir, or the folder tokenizer.path")
_NO_PPO = _gone("there is no recipe for PPO yet")
_NO_DISTILLATION = _gone("there is no recipe for distillation yet")
_NO_PREFERENCE = _gone("there is no recipe for preference training yet")
_TARGETS = Here("adapter.targets", "names of layers, as [q_proj, o_proj, lm_head], or all-linear")
_NO_EVALUATION = _gone("evaluate the saved folder, final/, with lm-eval")

# Keys that torchtune's configs hold and ours do not. A pattern covers all keys below a node.
KEYS = {
    "checkpointer": Here("checkpoint_dir", "a model folder; results go to output_dir"),
    "checkpointer._component_": _gone("a Hugging Face folder is read whatever its files"),
    "checkpointer.checkpoint_dir": Here("checkpoint_dir"),
    "checkpointer.output_dir": Here("output_dir"),
    "checkpointer.checkpoint_files": _gone("the files are found in checkpoint_dir"),
    "checkpointer.checkpoint_files.*": _gone("the files are found in checkpoint_dir"),
    "checkpointer.model_type": _FROM_CONFIG_JSON,
    "checkpointer.recipe_checkpoint": Here("resume_from_checkpoint"),
    "checkpointer.adapter_checkpoint": Here("resume_from_checkpoint"),
    "checkpointer.keep_last_n_checkpoints": Here("keep_last_n_checkpoints"),
    "checkpointer.safe_serialization": _gone("files are always safetensors"),
    "collate_fn": _gone("batches are made by the loader"),
    "cudnn_deterministic_mode": Here("deterministic"),
    "custom_sharded_layers": _ONE_DEVICE,
    "data_parallel_*": _ONE_DEVICE,
    "tensor_parallel_*": _ONE_DEVICE,
    "context_parallel_*": _ONE_DEVICE,
    "fsdp*": _ONE_DEVICE,
    "memory_efficient_fsdp_wrap": _ONE_DEVICE,
    "dataloader": _gone("batches are made by the loader, from dataset"),
    "dataset*.add_eos": _gone("a text ends with one EOS, always"),
    "dataset*.column": Here("dataset.column_map.text"),
    "dataset*.conversation_column": Here("dataset.column_map"),
    "dataset*.conversation_style": Here("dataset.format"),
    "dataset*.data_files": Here("dataset.source"),
    "dataset*.filter_fn": _gone("leave the rows out of the file"),
    "dataset*.name": Here("dataset.config"),
    "dataset*.new_system_prompt": _gone("write the system message into the rows"),
    "dataset*.subset": Here("dataset.config"),
    "datasets": Here("dataset", "a list of data sets mixes them"),
    "enable_async_checkpointing": _gone("a save is atomic and synchronous"),
    "epochs_to_train": Here("epochs"),
    "instruct_template": Here("tokenizer.chat_template"),
    "chat_format": Here("tokenizer.chat_template"),
    "log_level": _gone("facts are always printed"),
    "log_peak_memory_stats": _gone("the peak is always logged"),
    "loss.ignore_index": _gone("what is not trained is known to the loader"),
    "loss.num_output_chunks": Here("loss.chunk_tokens"),
    "num_output_chunks": Here("loss.chunk_tokens"),
    "low_cpu_ram": _gone("weights are streamed tensor by tensor"),
    "lora_alpha": Here("adapter.alpha"),
    "lora_attn_modules": _TARGETS,
    "lora_dropout": Here("adapter.dropout"),
    "lora_rank": Here("adapter.rank"),
    "apply_lora_to_*": _TARGETS,
    "model.apply_lora_to_*": _TARGETS,
    "model.lora_alpha": Here("adapter.alpha"),
    "model.lora_attn_modules": _TARGETS,
    "model.lora_dropout": Here("adapter.dropout"),
    "model.lora_rank": Here("adapter.rank"),
    "model.quantize_base": Here("quantize_base", "nf4"),
    "model.use_dora": Here("adapter.dora"),
    "use_dora": Here("adapter.dora"),
    "model.image_size": _gone("images are not trained on"),
    "model.*_trainable": Here("trainable", "a pattern of parameter names"),
    "metric_logger.filename": _gone("the file is metrics.jsonl"),
    "metric_logger.log_dir": _gone("files stand in output_dir"),
    "optimizer_cpu_offload": Here("optimizer_state"),
    "profiler.cpu": _gone("every device that is there is profiled"),
    "profiler.cuda": _gone("every device that is there is profiled"),
    "profiler.enabled": _gone("a profiler that is named is enabled"),
    "profiler.num_cycles": _gone("there is one cycle"),
    "profiler.output_dir": _gone("files stand in output_dir/profile"),
    "profiler.with_flops": _gone("the table holds times"),
    "save_adapter_weights_only": _gone("an adapter is saved alone; `tune merge` makes it a model"),
    "tokenizer.image_size": _gone("images are not trained on"),
    "tokenizer.merges_*": _WITH_THE_MODEL,
    "tokenizer.prompt_template": Here("tokenizer.chat_template"),
    "tokenizer.special_tokens_path": _WITH_THE_MODEL,
    "tokenizer.truncation_type": _gone("a long row keeps its beginning"),
    "tokenizer.vocab_path": _WITH_THE_MODEL,
    # of other recipes
    "enable_kv_cache": _gone("`tune run generate` always has one"),
    "quantizer": _gone("there is no recipe for quantization yet"),
    "tasks": _NO_EVALUATION,
    "limit": _NO_EVALUATION,
    "max_seq_length": _NO_EVALUATION,
    "kd_loss": _NO_DISTILLATION,
    "kd_ratio": _NO_DISTILLATION,
    "teacher_*": _NO_DISTILLATION,
    "loss.beta": _NO_PREFERENCE,
    "loss.label_smoothing": _NO_PREFERENCE,
    "ref_checkpointer": _NO_PREFERENCE,
    "policy_model": _NO_PPO,
    "reward_and_value_model": _NO_PPO,
    "ref_policy_checkpointer": _NO_PPO,
    "reward_checkpointer": _NO_PPO,
    "value_checkpointer": _NO_PPO,
    **dict.fromkeys(
        (
            "forward_batch_size gamma kl_coeff lmbda loss.epsilon loss.value_clip_range "
            "loss.value_coeff max_generated_tokens min_response_length num_steps penalise_no_eos "
            "ppo_batch_size ppo_epochs reward_penalty stop_token_ids whiten_rewards"
        ).split(),
        _NO_PPO,
    ),
}

# Names that other trainers use for what torchtune and we call the same.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "*.learning_rate": "optimizer.lr",
}

_DATASET = "solotune.data.dataset"
_AUTO = Here("solotune.models.auto", "it reads checkpoint_dir/config.json")
# The first pattern that fits counts; small letters, since patterns are compared so.
COMPONENTS = {
    "torchtune.data.*collate*": _gone("batches are made by the loader"),
    "torchtune.data.*template*": _gone("set tokenizer.chat_template"),
    "torchtune.datasets.alpaca_dataset": Here(_DATASET, "with source=tatsu-lab/alpaca"),
    "torchtune.datasets.alpaca_cleaned_dataset": Here(_DATASET, "with source=yahma/alpaca-cleaned"),
    "torchtune.datasets.multimodal.*": _gone("images are not trained on"),
    "torchtune.datasets.preference_dataset": _NO_PREFERENCE,
    "torchtune.datasets.hh_rlhf_helpful_dataset": _NO_PREFERENCE,
    "torchtune.datasets.stack_exchange_paired_dataset": _NO_PREFERENCE,
    "torchtune.datasets.*": Here(_DATASET, "with source=<file>"),
    "torchtune.models.*_vision*": _gone("only text models are trained"),
    "torchtune.models.clip.*": _gone("only text models are trained"),
    "torchtune.models.*tokenizer": Here("solotune.tokenizers.auto"),
    "torchtune.models.gemma.*": _gone("Gemma 1 is not supported"),
    "torchtune.models.t5.*": _gone("only decoders are trained"),
    "torchtune.models.*lora_*": Here(
        "solotune.models.auto", "with recipe lora_finetune_single_device, whose node is adapter"
    ),
    "torchtune.models.*": _AUTO,
    "torchtune.modules.loss.*kl*": _NO_DISTILLATION,
    "torchtune.modules.loss.*kd*": _NO_DISTILLATION,
    "torchtune.modules.loss.*": Here("solotune.losses.LinearCrossEntropy"),
    "torchtune.modules.optim.*": _gone("name the optimizer itself, as torch.optim.AdamW"),
    "torchtune.modules.transforms.tokenizers.*": Here("solotune.tokenizers.auto"),
    "torchtune.rlhf.loss.ppoloss": _NO_PPO,
    "torchtune.rlhf.*": _NO_PREFERENCE,
    "torchtune.training.*checkpointer": _gone("name the model folder with checkpoint_dir"),
    "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup": Here(
        "solotune.training.cosine", "with final_lr_ratio=0"
    ),
    "torchtune.training.lr_schedulers.*": _gone("name a schedule of solotune.training"),
    "torchtune.training.metric_logging.wandblogger": Here("solotune.training.WandBLogger"),
    "torchtune.training.metric_logging.tensorboardlogger": Here(
        "solotune.training.TensorBoardLogger"
    ),
    "torchtune.training.metric_logging.*": _gone("metrics.jsonl is always written"),
    "torchtune.training.quantization.*": _gone("there is no recipe for quantization yet"),
    "torchtune.training.setup_torch_profiler": Here("solotune.training.StepProfiler"),
    "torchtune.*.base_llama_tp_plan": _ONE_DEVICE,
}


def key_here(key: str) -> Here | None:
    """Return what a dotted key of torchtune is here, None for one that is not of the table."""
    if key in KEYS:
        return KEYS[key]
    for pattern, here in KEYS.items():
        if "*" in pattern and fnmatch.fnmatchcase(key, pattern):
            return here
    return KEYS.get(key.partition(".")[0])


def component_here(path: str) -> Here | None:
    """Return what a component of torchtune is here, None for one that is not of the table."""
    for pattern, here in COMPONENTS.items():
        if fnmatch.fnmatchcase(path.lower(), pattern):
            return here
    return None


def equivalent_key(key: str) -> str:
    """Return `; it is torchtune's: <repair>`, or an empty text for a key not of the table."""
    for pattern, ours in _OTHER_NAMES.items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"; the key is {ours}"
    here = key_here(key)
    return f"; it is torchtune's: {here.repair}" if here else ""


def equivalent_component(path: str) -> str:
    """Return what to write instead of a torchtune component."""
    here = component_here(path)
    if here is None:
        return "a component of torchtune, which has no equivalent here"
    if here.name is None:
        return f"a component of torchtune: {here.why}"
    return f"a component of torchtune: use {here.name}{f', {here.why}' if here.why else ''}"
