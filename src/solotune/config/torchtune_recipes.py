"""Which recipe of torchtune a config is for, told by its keys, else by the command in its head."""

import re
from collections.abc import Iterator

from solotune.config.nodes import Mapping, Node, Scalar, Sequence
from solotune.config.registry import recipes

FULL = "full_finetune_single_device"  # torchtune's name and ours
LORA = "lora_finetune_single_device"  # and this

_LATER = "solotune has no such recipe yet"
_DISTRIBUTED = "solotune trains on one: convert the single-device config of the model"
# Kind, its recipe in torchtune, what to do; told by keys or by words in a component's path.
_KINDS: list[tuple[str, str, str, tuple[str, ...], tuple[str, ...]]] = [
    ("PPO", "ppo_full_finetune_single_device", _LATER, ("policy_model", "ppo_epochs"), ()),
    ("distillation", "knowledge_distillation", _LATER, ("kd_loss", "teacher_model"), ()),
    (
        "preference training (DPO)",
        "lora_dpo",
        _LATER,
        ("ref_checkpointer",),
        (".rlhf.", "preference_dataset", "stack_exchange_paired", "hh_rlhf"),
    ),
    ("evaluation", "eleuther_eval", "evaluate final/ with lm-eval", ("tasks",), ()),
    (
        "generation",
        "generate",
        "use `tune run generate checkpoint_dir=... prompt=...`",
        ("prompt", "max_new_tokens"),
        (),
    ),
    ("multimodal training", "full_finetune", "only text models are trained", (), ("vision",)),
    ("quantization", "quantize", _LATER, ("quantizer",), ()),
    (
        "several devices",
        "full_finetune_distributed",
        _DISTRIBUTED,
        (
            *("fsdp", "fsdp_cpu_offload", "tensor_parallel_dim", "tensor_parallel_plan"),
            *("custom_sharded_layers", "memory_efficient_fsdp_wrap", "data_parallel_shard_dim"),
        ),
        (),
    ),
]
_COMMAND = re.compile(r"tune run\s+(?:--?\S+[ =]\S+\s+)*([\w/.-]+)\s+--config")


def recipe_kind(tree: Mapping, text: str) -> str | None:
    """Return what a config is for and what to do, None where we have its recipe.

    That is full training or an adapter, on one device.
    """
    if "recipe" in tree.items:
        return "it names a recipe, so it is a config of solotune already"
    model = tree.items.get("model")
    keys = {*tree.items, *(model.items if isinstance(model, Mapping) else ())}
    paths = list(_paths(tree))
    command = next(iter(_COMMAND.findall(text)), FULL)
    for kind, recipe, repair, told_by_keys, told_by_words in _KINDS:
        words = any(word in path for word in told_by_words for path in paths)
        if keys & set(told_by_keys) or words:
            recipe = command if command != FULL and recipe in command else recipe
            return f"a config of {kind} (torchtune's {recipe}): {repair}"
    if not {"model", "optimizer", "dataset"} <= tree.items.keys():
        return "no training config of torchtune: it needs model, optimizer and dataset"
    if command.endswith("_distributed"):
        return f"a config of several devices (torchtune's {command}): {_DISTRIBUTED}"
    if command not in (FULL, LORA) and command not in recipes() and not command.endswith(".py"):
        return f"a config of torchtune's {command}: {_LATER}"
    return None


def _paths(node: Node) -> Iterator[str]:
    """Yield the dotted paths that `_component_` names at every depth."""
    if isinstance(node, Mapping):
        named = node.items.get("_component_")
        if isinstance(named, Scalar):
            yield named.text
        for child in node.items.values():
            yield from _paths(child)
    elif isinstance(node, Sequence):
        for child in node.items:
            yield from _paths(child)
