"""Which chat template a tokenizer has, and what it writes that the tokenizer has no token for."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from solotune.errors import CheckpointError, ConfigError, DataError
from solotune.tokenizers.chat_template import CHATML, ChatTemplate, Message
from solotune.tokenizers.folder import CONTROL, read_text

_CONVERSATION: tuple[Message, ...] = (
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "u"},
)


def find_template(
    folder: Path, choice: str | None, config: Mapping[str, Any], *, adds_bos: bool
) -> tuple[str, str] | None:
    """Name and source of the template that is chosen, else of the folder's own; None without one.

    `choice` is `chatml`, which opens with BOS where the tokenizer adds one, or a path; `config` is
    tokenizer_config.json.
    """
    if choice == "chatml":
        return "chatml", "{{- bos_token }}" + CHATML if adds_bos else CHATML
    if choice is not None:
        path = Path(choice).expanduser()
        if not path.is_file():
            raise ConfigError(
                f"tokenizer.chat_template={choice}: no such file; use chatml or the path of a "
                ".jinja file"
            )
        return str(path), read_text(path)
    in_folder = folder / "chat_template.jinja"
    if in_folder.is_file():
        return str(in_folder), read_text(in_folder)
    source = config.get("chat_template")
    if isinstance(source, list):  # the older form: named templates
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", next(iter(named.values()), None))
    if source is None:
        return None
    name = f"{folder}: the chat template"
    if not isinstance(source, str):
        raise CheckpointError(
            f"{name} is a {type(source).__name__} in tokenizer_config.json, not text: fetch the "
            "file again, or choose one with tokenizer.chat_template"
        )
    return name, source


def tokens_lacking(template: ChatTemplate, is_token: Callable[[str], bool]) -> tuple[str, ...]:
    """The control tokens that `template` writes into a short conversation and that are none."""
    for first, last in ((0, 4), (1, 4), (1, 2)):  # a template may refuse a role
        for asks in (True, False):
            try:
                text = template.render(_CONVERSATION[first:last], add_generation_prompt=asks)
            except DataError:
                continue
            written = dict.fromkeys(CONTROL.findall(text))
            return tuple(text for text in written if not is_token(text))
    return ()
