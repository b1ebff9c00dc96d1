"""A data set of torchtune as one of ours: source, columns, what is trained."""

from collections.abc import Callable

from solotune.config.nodes import Mapping, Node, Scalar, Sequence, at, scalar_value
from solotune.config.torchtune import component_here, key_here
from solotune.errors import ConfigError

# What each builder means by leaving an argument out, in our words.
_BUILDERS: dict[str, dict[str, str]] = {
    "alpaca_dataset": {"source": "tatsu-lab/alpaca", "train_on_input": "True"},
    "alpaca_cleaned_dataset": {"source": "yahma/alpaca-cleaned", "train_on_input": "True"},
    "chat_dataset": {},
    "instruct_dataset": {"prompt": "input", "completion": "output"},
    "slimorca_dataset": {"source": "Open-Orca/SlimOrca-Dedup"},
    "grammar_dataset": {"source": "liweili/c4_200m", "prompt": "input", "completion": "output"},
    "samsum_dataset": {"source": "Samsung/samsum", "prompt": "dialogue", "completion": "summary"},
    "text_completion_dataset": {"text": "text"},
    "wikitext_dataset": {
        "source": "EleutherAI/wikitext_document_level",
        "config": "wikitext-103-v1",
        "text": "page",
    },
    "cnn_dailymail_articles_dataset": {"source": "ccdv/cnn_dailymail", "text": "article"},
}
_COLUMNS = ("prompt", "completion", "text")
_THEIR_COLUMNS = {"input": "prompt", "output": "completion"}  # of all but Alpaca
_STYLES = {"sharegpt": "conversations", "openai": "messages"}
_FILE_KINDS = ("json", "csv", "parquet", "text")  # as the `datasets` library calls them

Note = Callable[..., None]


def converted_dataset(note: Note, key: str, node: Node) -> Node:
    """Return the node of our data set; `note(what, key, why)` is told of each argument.

    Raises ConfigError for a builder that has no equivalent.
    """
    if isinstance(node, Sequence):
        sets = [converted_dataset(note, f"{key}.{k}", item) for k, item in enumerate(node.items)]
        return Sequence(sets)
    named = node.items.get("_component_") if isinstance(node, Mapping) else None
    path = named.text if isinstance(named, Scalar) else ""
    if not isinstance(node, Mapping) or not path.startswith("torchtune."):
        note("kept", key)
        return node
    builder, here = path.rpartition(".")[2], component_here(path)
    if here is None or here.name is None or builder not in _BUILDERS:
        why = here.why if here and here.name is None else "it has no equivalent here"
        raise ConfigError(f"{key}._component_: {path}: {why}{at(node.where)}")
    note("replaced", f"{key}._component_", here.name)
    given = {name: child for name, child in node.items.items() if name != "_component_"}
    return Mapping({"_component_": Scalar(here.name), **_arguments(note, key, builder, given)})


def _arguments(note: Note, key: str, builder: str, given: dict[str, Node]) -> dict[str, Node]:
    """Return our arguments, what the builder's defaults mean among them."""
    values = dict(_BUILDERS[builder])
    columns = {name: values.pop(name) for name in _COLUMNS if name in values}
    new: dict[str, Node] = {name: Scalar(value) for name, value in values.items()}
    for name, child in given.items():
        here = key_here(f"{key}.{name}")
        value = scalar_value(child) if isinstance(child, Scalar) else child
        if name in ("source", "packed", "train_on_input", "split", "revision"):
            new[name] = child
            note("kept", f"{key}.{name}")
        elif name == "split_across_pack":
            new[name] = child
        elif name == "column_map" and isinstance(child, Mapping):
            names = {} if builder.startswith("alpaca") else _THEIR_COLUMNS
            columns |= {
                names.get(ours, ours): _text(column) for ours, column in child.items.items()
            }
            note("kept", f"{key}.{name}")
        elif name == "column" and value is not None:
            columns["text"] = str(value)
            note("renamed", f"{key}.{name}", "column_map.text")
        elif name == "conversation_column":
            style = _STYLES.get(_text(given.get("conversation_style")), "conversations")
            columns[style] = str(value)
            note("renamed", f"{key}.{name}", f"column_map.{style}")
        elif name == "conversation_style" and value in _STYLES:
            new["format"] = Scalar(_STYLES[str(value)])
            note("renamed", f"{key}.{name}", "format")
        elif name in ("name", "subset"):
            new["config"] = child
            note("renamed", f"{key}.{name}", "config")
        elif name == "data_files":
            new["source"] = _one_file(child, f"{key}.{name}")
            note("renamed", f"{key}.{name}", "source")
        elif value is None or name == "add_eos":
            note("dropped", f"{key}.{name}", here.why if here else "it was not set")
        else:
            note("lost", f"{key}.{name}", here.why if here else "it has no equivalent here")
    if "data_files" in given or _text(new.get("source")) in _FILE_KINDS:
        new.pop("split", None)  # a file has none
    if columns:
        new.setdefault("format", Scalar(_format_of(columns)))
        new["column_map"] = Mapping({name: Scalar(text) for name, text in columns.items()})
    if "packed" not in new:
        new["packed"] = Scalar("False")
        note("added", f"{key}.packed", "False: torchtune packs only where it is told to")
    _split_packs(note, key, builder, new)
    if "train_on_input" in new and "train_on_input" not in given:
        note("added", f"{key}.train_on_input", "True: torchtune trains Alpaca's questions too")
    return {"source": new.pop("source", Scalar("null")), **new}


def _split_packs(note: Note, key: str, builder: str, new: dict[str, Node]) -> None:
    """Keep `split_across_pack` where rows are packed; for texts torchtune's default is True."""
    is_packed = _text(new["packed"]).lower() == "true"
    if not is_packed:
        new.pop("split_across_pack", None)
    elif builder == "text_completion_dataset" and "split_across_pack" not in new:
        new["split_across_pack"] = Scalar("True")
        note("added", f"{key}.split_across_pack", "True: torchtune's default for texts")


def _format_of(columns: dict[str, str]) -> str:
    """Return the format whose columns these are."""
    if "instruction" in columns:
        return "instruction"
    formats = {"text": "text", "messages": "messages", "conversations": "conversations"}
    return next((formats[name] for name in columns if name in formats), "prompt")


def _one_file(node: Node, key: str) -> Node:
    if isinstance(node, Sequence) and len(node.items) == 1:
        return node.items[0]
    if isinstance(node, Scalar):
        return node
    raise ConfigError(f"{key}: several files: put them into one folder, or name them by a glob")


def _text(node: Node | None) -> str:
    return node.text if isinstance(node, Scalar) else ""
