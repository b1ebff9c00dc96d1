"""A tokenizer.json with its special tokens and chat template; which tokens are trained.

Control tokens in a text are plain text unless a template wrote them. So the tokenizer that encodes
is a copy of the file whose special tokens are spelled with noncharacters: what a template wrote is
respelled before encoding, and what a user typed then matches nothing.
"""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tokenizers

from solotune.config.fitting import Minimum
from solotune.errors import CheckpointError, ConfigError, DataError, UserError
from solotune.tokenizers.chat_template import (
    CHATML,
    RESERVED,
    ChatTemplate,
    Message,
    Rendering,
    number_mark,
)

_GUARD = "\ufde5"  # opens the respelling of a special token
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
)


class Tokenizer:
    """Encodes and decodes with one tokenizer.json.

    `bos_id` and `eos_id` are None where the model has none; `adds_bos` says whether the file itself
    puts BOS before a text; `max_seq_len` is in tokens; `template` is None for a base model without
    one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_seq_len: int = 2048,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.max_seq_len = max_seq_len
        self.made_with = {
            "max_seq_len": max_seq_len,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
        }
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} holds no tokenizer.json: set checkpoint_dir or tokenizer.path to a "
                "folder that does"
            )
        definition = {"added_tokens": [], **_read_json(folder / "tokenizer.json")}
        config = _read_json(folder / "special_tokens_map.json") | _read_json(
            folder / "tokenizer_config.json"
        )
        generation = _read_json(folder / "config.json") | _read_json(
            folder / "generation_config.json"
        )
        self._tokenizer = _build(definition, folder)
        self._specials = {
            token["content"]: token["id"]
            for token in definition["added_tokens"]
            if token["special"]
        }
        self._guards = {
            text: number_mark(_GUARD, token_id) for text, token_id in self._specials.items()
        }
        self._guarded = _build(_respell(definition, self._guards), folder)
        self._control_pattern = re.compile(
            "|".join(map(re.escape, sorted(self._specials, key=len, reverse=True)))
        )

        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        texts = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
        self._variables: dict[str, Any] = {
            key: text for key, text in texts.items() if isinstance(text, str)
        }
        self.bos_id = self._id_of("bos", generation)
        self.eos_id = self._id_of("eos", generation)
        self._eos_ids = set(_token_ids("eos", generation))
        first = self._tokenizer.encode("", add_special_tokens=True).ids[:1]
        self.adds_bos = (
            config.get("add_bos_token", True) and self.bos_id is not None and first == [self.bos_id]
        )
        if config.get("add_bos_token") is True and self.bos_id is not None:
            self.adds_bos = True
        self._template_is_chosen = chat_template is not None
        self.template = self._load_template(chat_template, config, chat_template_kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Made again from its files where it is unpickled: in a process that tokenizes rows."""
        return partial(type(self), self.folder, **self.made_with), ()

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        add_eos: bool = False,
        allow_special: bool = False,
    ) -> list[int]:
        """Token ids of `text`. Control tokens in it are plain text unless `allow_special`."""
        rendering = Rendering(text, plain=() if allow_special else self.spelled_controls(text))
        ids = self.encode_renderings([rendering])[0].ids
        bos = (
            [self.bos_id]
            if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]
            else []
        )
        eos = (
            [self.eos_id]
            if add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]
            else []
        )
        return bos + ids + eos

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of `ids`; `skip_special` leaves out special tokens."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a rendered conversation, by default as a prompt for an assistant turn."""
        rendering = self.require_template().render_turns(
            messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        return self.encode_renderings([rendering])[0].ids

    def encode_renderings(self, renderings: Sequence[Rendering]) -> list["EncodedText"]:
        """Encode many renderings at once; control tokens outside their `plain` spans become ids."""
        guarded = [self._guard(rendering) for rendering in renderings]
        encodings = self._guarded.encode_batch(
            [text for text, _ in guarded], add_special_tokens=False
        )
        return [
            EncodedText(encoding, text, edits)
            for encoding, (text, edits) in zip(encodings, guarded, strict=True)
        ]

    def stop_ids(self) -> list[int]:
        """Ids that end a turn: the template's terminator, EOS, those of generation_config.json."""
        ids = set(self._eos_ids)
        if self.eos_id is not None:
            ids.add(self.eos_id)
        if self.template is not None and self.template.terminator is not None:
            ids.add(self._specials[self.template.terminator])
        return sorted(ids)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text, or None."""
        return self._tokenizer.token_to_id(text)

    def token_text(self, token_id: int | None) -> str | None:
        """The exact text of a token as the vocabulary spells it, or None."""
        return None if token_id is None else self._tokenizer.id_to_token(token_id)

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError with the repair where the model has none."""
        if self.template is None:
            raise ConfigError(
                f"{self.folder} has no chat template (a base model): set tokenizer.chat_template "
                "to chatml or to the path of a .jinja file"
            )
        return self.template

    def save(self, folder: Path) -> None:
        """Copy the tokenizer files to `folder`, with the chat template that was used."""
        for name in _FILES:
            if (self.folder / name).is_file():
                shutil.copyfile(self.folder / name, folder / name)
        if self._template_is_chosen and self.template is not None:
            (folder / "chat_template.jinja").write_text(
                self.template.source, encoding="utf-8", newline=""
            )
            config = _read_json(folder / "tokenizer_config.json")
            if (
                config.pop("chat_template", None) is not None
            ):  # two templates in one folder would contradict
                text = json.dumps(config, indent=2, ensure_ascii=False)
                (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")

    def check_text(self, text: str) -> None:
        """Raises DataError where `text` holds code points that cannot be encoded."""
        if RESERVED.search(text):
            raise DataError(
                "the text holds a code point of U+FDD0..U+FDEF, which Unicode reserves: remove it"
            )
        if not text.isascii() and (lone := re.search("[\ud800-\udfff]", text)):
            raise DataError(
                f"the text holds half a surrogate pair (U+{ord(lone[0]):04X}): remove it"
            )

    def _guard(self, rendering: Rendering) -> tuple[str, list[tuple[int, int]]]:
        """The text with the template's control tokens respelled; (old end, growth) of each."""
        self.check_text(rendering.text)
        plain, edits = set(rendering.plain), []

        def respell(match: re.Match) -> str:
            if match.span() in plain:
                return match[0]
            edits.append((match.end(), len(self._guards[match[0]]) - len(match[0])))
            return self._guards[match[0]]

        text = (
            self._control_pattern.sub(respell, rendering.text) if self._specials else rendering.text
        )
        return text, edits

    def spelled_controls(self, text: str) -> tuple[tuple[int, int], ...]:
        """Where `text` spells special tokens, as character spans."""
        return (
            tuple(match.span() for match in self._control_pattern.finditer(text))
            if self._specials
            else ()
        )

    def _id_of(self, which: str, generation: Mapping[str, Any]) -> int | None:
        """The id of BOS or EOS, by its text in tokenizer_config.json, else by config.json's ids."""
        text = self._variables.get(f"{which}_token")
        if text is not None:
            token_id = self.token_id(text)
            if token_id is None:
                raise CheckpointError(
                    f"{self.folder}: {which}_token {text!r} is not in tokenizer.json"
                )
            return token_id
        token_id = next(iter(_token_ids(which, generation)), None)
        if (text := self.token_text(token_id)) is not None:
            self._variables[f"{which}_token"] = text
        return token_id

    def _load_template(
        self, choice: str | None, config: Mapping[str, Any], kwargs: Mapping[str, Any] | None
    ) -> ChatTemplate | None:
        name = f"{self.folder}: the chat template"
        in_folder = self.folder / "chat_template.jinja"
        if choice == "chatml":
            missing = [
                text for text in ("<|im_start|>", "<|im_end|>") if text not in self._specials
            ]
            if missing:
                raise ConfigError(
                    f"tokenizer.chat_template=chatml needs {' and '.join(missing)} among "
                    f"the special tokens of {self.folder}/tokenizer.json: choose a .jinja file "
                    "written for them"
                )
            source = "{{- bos_token }}" + CHATML if self.adds_bos else CHATML
        elif choice is not None:
            path = Path(choice).expanduser()
            if not path.is_file():
                raise ConfigError(
                    f"tokenizer.chat_template={choice}: no such file; use chatml or the path of a "
                    ".jinja file"
                )
            name, source = str(path), _read_text(path)
        elif in_folder.is_file():
            name, source = str(in_folder), _read_text(in_folder)
        else:
            source = config.get("chat_template")
            if isinstance(source, list):  # the older form: named templates
                named = {entry["name"]: entry["template"] for entry in source}
                source = named.get("default", next(iter(named.values()), None))
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointError(
                f"{name} is a {type(source).__name__} in tokenizer_config.json, not text: fetch "
                "the file again, or choose one with tokenizer.chat_template"
            )
        enders = {self.token_text(token_id) for token_id in {self.eos_id, *self._eos_ids}} - {None}
        return ChatTemplate(
            source,
            name=name,
            variables=self._variables,
            control_tokens=tuple(self._specials),
            turn_enders=tuple(text for text in enders if text is not None),
            kwargs=kwargs,
        )


class EncodedText:
    """The tokens of one rendering: `ids`, and which of them overlap given character spans."""

    def __init__(
        self, encoding: tokenizers.Encoding, text: str, edits: list[tuple[int, int]]
    ) -> None:
        self.ids: list[int] = encoding.ids
        self._encoding = encoding
        self._length = len(text)
        self._edits = edits

    def mask(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """uint8, 1 for each token that overlaps one of `spans` (ascending character spans)."""
        trained = np.zeros(len(self.ids), np.uint8)
        growth, passed = 0, 0
        for span in spans:
            guarded = []
            for position in span:
                while passed < len(self._edits) and self._edits[passed][0] <= position:
                    growth += self._edits[passed][1]
                    passed += 1
                guarded.append(position + growth)
            first, stop = self._token_at(guarded[0]), self._token_at(guarded[1])
            chars = self._encoding.token_to_chars(stop) if stop < len(self.ids) else None
            if chars is not None and chars[0] < guarded[1]:
                stop += 1  # this token also holds the last characters of the span
            trained[first:stop] = 1
        return trained

    def _token_at(self, position: int) -> int:
        """The first token that holds the character at `position` or one after it."""
        for char in range(position, self._length):
            if (token := self._encoding.char_to_token(char)) is not None:
                return token
        return len(self.ids)


def auto(
    checkpoint_dir: str | Path,
    *,
    path: str | None = None,
    max_seq_len: Annotated[int, Minimum(2)] = 2048,  # a shorter row would have no target
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> Tokenizer:
    """The tokenizer of a model folder; `path` names another folder.

    `max_seq_len` in tokens; `chat_template` is `chatml` or the path of a .jinja file and replaces
    the folder's own; `chat_template_kwargs` are offered to the template (`enable_thinking: False`).
    Raises CheckpointError where a file is missing or unreadable.
    """
    folder = Path(path or checkpoint_dir).expanduser()
    if not folder.is_dir():
        key = "tokenizer.path" if path else "checkpoint_dir"
        raise CheckpointError(
            f"{key}={folder}: no such folder; point it at a Hugging Face model folder"
        )
    return Tokenizer(
        folder,
        max_seq_len=max_seq_len,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
    )


def check_vocabulary(largest_id: int, vocab_size: int) -> None:
    """Raise ConfigError where a token id has no row in the model's embedding."""
    if largest_id >= vocab_size:
        raise ConfigError(
            f"token {largest_id} is outside the model's vocabulary of {vocab_size}: the tokenizer "
            "belongs to another model, or was given tokens that the model never got; set "
            "tokenizer.path"
        )


def _respell(definition: dict[str, Any], guards: Mapping[str, str]) -> dict[str, Any]:
    """A tokenizer.json whose special tokens are spelled as `guards` says, without post-processor.

    Without the post-processor nothing is added to a text, and offsets keep the white space that
    opens a token.
    """
    model = dict(definition["model"])
    if isinstance(model["vocab"], dict):
        model["vocab"] = {
            guards.get(text, text): token_id for text, token_id in model["vocab"].items()
        }
    else:  # Unigram: [text, score] pairs
        model["vocab"] = [[guards.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = guards.get(model["unk_token"], model["unk_token"])
    added = [
        token | {"content": guards.get(token["content"], token["content"])}
        for token in definition["added_tokens"]
    ]
    return definition | {"model": model, "added_tokens": added, "post_processor": None}


def _build(definition: dict[str, Any], folder: Path) -> tokenizers.Tokenizer:
    try:
        built = tokenizers.Tokenizer.from_str(json.dumps(definition))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(
            f"{folder}/tokenizer.json cannot be used: {error}; fetch the file again"
        ) from None
    built.no_truncation()
    built.no_padding()
    return built


def _token_text(value: Any) -> str | None:
    """Special tokens stand as text or as {"content": text, ...}."""
    return value.get("content") if isinstance(value, dict) else value


def _token_ids(which: str, generation: Mapping[str, Any]) -> list[int]:
    """The BOS or EOS ids that config.json or generation_config.json name: one, several or none."""
    value = generation.get(f"{which}_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise CheckpointError(
            f"{which}_token_id={value!r} in config.json or generation_config.json of the model "
            "folder: it is one token id or a list of them"
        )
    return ids


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON ({error}): fetch the file again") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object: fetch the file again")
    return content
