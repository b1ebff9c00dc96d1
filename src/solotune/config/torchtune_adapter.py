"""The adapter of a torchtune config, which it writes into the model's node, as one of ours."""

from collections.abc import Callable

from solotune.config.nodes import Mapping, Node, Scalar, Sequence, scalar_value

_SETTINGS = {  # theirs -> ours, with what leaving it out means to them
    "lora_rank": ("rank", "8"),
    "lora_alpha": ("alpha", "16"),
    "lora_dropout": ("dropout", None),
    "use_dora": ("dora", None),
}
_TARGETS = ("lora_attn_modules", "apply_lora_to_mlp", "apply_lora_to_output")
_MLP = ("gate_proj", "up_proj", "down_proj")
# Phi's projections are fused here, as in its checkpoint.
_FUSED: dict[str, str] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}


def adapts(model: Node | None) -> bool:
    """Whether the node of a model asks for an adapter."""
    items = model.items if isinstance(model, Mapping) else {}
    return "lora_" in _text(items.get("_component_")) or any(key in items for key in _SETTINGS)


def converted_adapter(note: Callable[..., None], model: Mapping) -> tuple[Mapping, Scalar | None]:
    """Return the node `adapter` and the value of quantize_base, taking them out of `model`.

    `note` is told what became of each key: what, key, where to.
    """
    path = _text(model.items.get("_component_"))
    found: dict[str, Node] = {}
    for theirs, (ours, default) in _SETTINGS.items():
        node = model.items.pop(theirs, None)
        if node is not None:
            found[ours] = node
            note("renamed", f"model.{theirs}", f"adapter.{ours}")
        elif default is not None:
            found[ours] = Scalar(default)
            note("added", f"adapter.{ours}", f"{default}: torchtune's default")
    parts = {name: model.items.pop(name, None) for name in _TARGETS}
    for name in parts:
        if parts[name] is not None:
            note("renamed", f"model.{name}", "adapter.targets")
    named = parts["lora_attn_modules"]
    names = [_text(item) for item in named.items] if isinstance(named, Sequence) else []
    names = ["o_proj" if name == "output_proj" else name for name in names]
    names += _MLP if _is_true(parts["apply_lora_to_mlp"]) else []
    names += ["lm_head"] if _is_true(parts["apply_lora_to_output"]) else []
    if ".phi" in path:
        names = [_FUSED.get(name, name) for name in names]
    found["targets"] = Sequence([Scalar(name, quoted=True) for name in dict.fromkeys(names)])
    is_quantized = _is_true(model.items.pop("quantize_base", None)) or "qlora_" in path
    return Mapping(found), Scalar("nf4", quoted=True) if is_quantized else None


def _is_true(node: Node | None) -> bool:
    return isinstance(node, Scalar) and scalar_value(node) is True


def _text(node: Node | None) -> str:
    return node.text if isinstance(node, Scalar) else ""
