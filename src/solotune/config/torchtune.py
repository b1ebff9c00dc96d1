"""What torchtune's keys and components are called here: the one table, read for error messages.

A key that comes with a later version is marked so: nobody is sent to a key that is refused.
"""

import fnmatch

# Keys that torchtune's configs hold and ours do not. A pattern covers all keys below a node.
_KEYS = {
    "checkpointer": "name the model folder with checkpoint_dir; results go to output_dir",
    "checkpointer.checkpoint_dir": "the key is checkpoint_dir",
    "checkpointer.output_dir": "the key is output_dir",
    "checkpointer.checkpoint_files": "remove it: the shards are found in checkpoint_dir",
    "checkpointer.model_type": "remove it: the model is read from checkpoint_dir/config.json",
    "checkpointer.recipe_checkpoint": "the key is resume_from_checkpoint",
    "checkpointer.adapter_checkpoint": "the key is resume_from_checkpoint",
    "checkpointer.keep_last_n_checkpoints": "the key is keep_last_n_checkpoints",
    "*.num_output_chunks": "the key is loss.chunk_tokens",
    "num_output_chunks": "the key is loss.chunk_tokens",
    "cudnn_deterministic_mode": "the key is deterministic",
    "custom_sharded_layers": "remove it: there is one device",
    "data_parallel_*": "remove it: there is one device",
    "tensor_parallel_*": "remove it: there is one device",
    "context_parallel_*": "remove it: there is one device",
    "fsdp_*": "remove it: there is one device",
    "dataset*.conversation_column": "the key is dataset.column_map",
    "dataset*.conversation_style": "the key is dataset.format",
    "dataset*.data_files": "the key is dataset.source",
    "dataset*.split_across_pack": "remove it: packs are best-fit and never split a sample",
    "dataset*.new_system_prompt": "write the system message into the rows",
    "enable_async_checkpointing": "remove it: a save is atomic and synchronous",
    "epochs_to_train": "the key is epochs",
    "instruct_template": "the key is tokenizer.chat_template",
    "chat_format": "the key is tokenizer.chat_template",
    "log_level": "remove it: facts are always printed",
    "log_peak_memory_stats": "remove it: the peak is always logged",
    "low_cpu_ram": "remove it: weights are streamed tensor by tensor",
    "lora_alpha": "the key is adapter.alpha (in a later version)",
    "lora_rank": "the key is adapter.rank (in a later version)",
    "model.apply_lora_to_*": "the key is adapter.targets (in a later version)",
    "model.lora_alpha": "the key is adapter.alpha (in a later version)",
    "model.lora_attn_modules": "the key is adapter.targets (in a later version)",
    "model.lora_dropout": "the key is adapter.dropout (in a later version)",
    "model.lora_rank": "the key is adapter.rank (in a later version)",
    "model.quantize_base": "the key is adapter.quantize_base (in a later version)",
    "model.use_dora": "the key is adapter.dora (in a later version)",
    "optimizer_cpu_offload": "the key is optimizer_state",
    "save_adapter_weights_only": "remove it: adapters come in a later version",
    "tokenizer.merges_file": "remove it: tokenizer.path names the folder",
    "tokenizer.prompt_template": "the key is tokenizer.chat_template",
    "tokenizer.special_tokens_path": "remove it: tokenizer.path names the folder",
}

# Names that other trainers use for what torchtune and we call the same.
_OTHER_NAMES = {
    "learning_rate": "optimizer.lr",
    "*.learning_rate": "optimizer.lr",
}

_COMPONENTS = {
    "torchtune.data.*template*": "set tokenizer.chat_template",
    "torchtune.datasets.*": "use solotune.data.dataset with source=<file>",
    "torchtune.models.*_tokenizer": "use solotune.tokenizers.auto",
    "torchtune.models.*": "use solotune.models.auto, which reads checkpoint_dir/config.json",
    "torchtune.modules.loss.*": "use solotune.losses.LinearCrossEntropy",
    "torchtune.modules.optim.*": "name the optimizer itself, as torch.optim.AdamW",
    "torchtune.modules.transforms.tokenizers.*": "use solotune.tokenizers.auto",
    "torchtune.training.*checkpoint*": "name the model folder with checkpoint_dir",
    "torchtune.training.lr_schedulers.*": "use a schedule of solotune.training",
    "torchtune.training.metric_logging.*": "remove it: metrics.jsonl is always written",
}


def equivalent_key(key: str) -> str:
    """Return `; it is torchtune's: <repair>`, or an empty text for a key not of the table."""
    for pattern, ours in _OTHER_NAMES.items():
        if fnmatch.fnmatchcase(key, pattern):
            return f"; the key is {ours}"
    for pattern in (key, *(p for p in _KEYS if "*" in p)):
        if pattern in _KEYS and fnmatch.fnmatchcase(key, pattern):
            return f"; it is torchtune's: {_KEYS[pattern]}"
    node = key.partition(".")[0]
    return f"; it is torchtune's: {_KEYS[node]}" if node in _KEYS else ""


def equivalent_component(path: str) -> str:
    """Return what to write instead of a torchtune component."""
    for pattern, repair in _COMPONENTS.items():
        if fnmatch.fnmatchcase(path.lower(), pattern.lower()):
            return f"a component of torchtune: {repair}"
    return "a component of torchtune, which has no equivalent here"
