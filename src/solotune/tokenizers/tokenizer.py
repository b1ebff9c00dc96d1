"""A tokenizer with its special tokens and chat template; which tokens are trained.

Control tokens in a text are plain text unless a template wrote them: the tokenizer that encodes
spells its special tokens otherwise (backend.py), and what a template wrote is respelled before
encoding.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from solotune.config.fitting import Minimum
from solotune.errors import CheckpointError, ConfigError, DataError
from solotune.tokenizers.backend import build, first_ids
from solotune.tokenizers.chat_template import (
    RESERVED,
    ChatTemplate,
    Message,
    Rendering,
    number_mark,
)
from solotune.tokenizers.encoded import EncodedText
from solotune.tokenizers.folder import Definition, read_definition, read_json, tokenizer_file
from solotune.tokenizers.saving import write_folder
from solotune.tokenizers.splitting import splits_at_controls
from solotune.tokenizers.template_source import find_template, tokens_lacking

_GUARD = "\ufde5"  # opens the respelling of a special token
_GUARDED = re.compile(_GUARD + "[^\ufde2]*\ufde2")


class Tokenizer:
    """Encodes and decodes with the tokenizer in one folder.

    `bos_id` and `eos_id` are None where the model has none; `adds_bos` says whether the tokenizer
    itself puts BOS before a text; `max_seq_len` is in tokens; `template` is None for a base model
    without one; `source` is the file that is read. `new_ids` are those of `added_tokens` that the
    files lack; `rows_wanted` is how many rows `added_tokens` need in an embedding, 0 without them.
    `notes` are facts to print.
    """

    def __init__(
        self,
        folder: Path,
        *,
        file: str | None = None,
        max_seq_len: int = 2048,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.max_seq_len = max_seq_len
        self.made_with = {
            "file": file,
            "max_seq_len": max_seq_len,
            "chat_template": chat_template,
            "chat_template_kwargs": chat_template_kwargs,
            "added_tokens": tuple(added_tokens),
        }
        self.source = folder / file if file else tokenizer_file(folder)
        config = _tokenizer_config(folder)
        generation = read_json(folder / "config.json") | read_json(
            folder / "generation_config.json"
        )
        definition, self.new_ids = self._define(config)
        self._is_converted = definition.is_converted
        # transformers 5 builds this class anew, with a space before the whole text only
        self._is_rebuilt_otherwise = str(config.get("tokenizer_class")).startswith(
            "LlamaTokenizer"
        ) and '"Prepend"' in json.dumps(definition.content.get("normalizer"))
        self.splits_at_controls = splits_at_controls(definition.content)
        self._specials = definition.specials()
        self.rows_wanted = 1 + max((self._specials[text] for text in added_tokens), default=-1)
        self.vocab_size = 1 + max(definition.ids())
        self._guards = {
            text: number_mark(_GUARD, token_id) for text, token_id in self._specials.items()
        }
        self._unguarded = {guard: text for text, guard in self._guards.items()}
        self._guarded = build(definition.content, self._guards, self.source)
        self._control_pattern = re.compile(
            "|".join(map(re.escape, sorted(self._specials, key=len, reverse=True)))
        )

        texts = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
        self._variables: dict[str, Any] = {
            key: text for key, text in texts.items() if isinstance(text, str)
        }
        self.bos_id = self._id_of("bos", generation, definition.bos)
        self.eos_id = self._id_of("eos", generation, definition.eos)
        self._eos_ids = set(_token_ids("eos", generation))
        self.adds_bos = self.bos_id is not None and (
            config.get("add_bos_token") is True
            or (
                config.get("add_bos_token", True)
                and first_ids(definition.content)[:1] == [self.bos_id]
            )
        )
        self.notes: list[str] = []
        self.template = self._load_template(chat_template, config, chat_template_kwargs)
        self._chosen_template = self.template.source if self.template and chat_template else None

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
        text = self._guarded.decode(list(ids), skip_special_tokens=skip_special)
        return _GUARDED.sub(lambda mark: self._unguarded.get(mark[0], mark[0]), text)

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

    def encode_renderings(self, renderings: Sequence[Rendering]) -> list[EncodedText]:
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
        """Ids that end a turn: the template's terminators, EOS, those of generation_config.json."""
        ids = set(self._eos_ids)
        if self.eos_id is not None:
            ids.add(self.eos_id)
        if self.template is not None:
            ids |= {self._specials[text] for text in self.template.terminators}
        return sorted(ids)

    def token_id(self, text: str) -> int | None:
        """The id of a token by its exact text, or None."""
        return self._guarded.token_to_id(self._guards.get(text, text))

    def token_text(self, token_id: int | None) -> str | None:
        """The exact text of a token as the vocabulary spells it, or None."""
        text = None if token_id is None else self._guarded.id_to_token(token_id)
        return None if text is None else self._unguarded.get(text, text)

    def require_template(self) -> ChatTemplate:
        """The chat template. Raises ConfigError with the repair where the model has none."""
        if self.template is None:
            raise ConfigError(
                f"{self.folder} has no chat template (a base model): set tokenizer.chat_template "
                "to chatml or to the path of a .jinja file"
            )
        return self.template

    def save(self, folder: Path) -> None:
        """Write the tokenizer to `folder`, with its added tokens and the template that was used.

        Files are copied where they say it all, and transformers reads them as they are.
        """
        content, settings = None, None
        if self._is_converted or self.new_ids:
            content = self._define(_tokenizer_config(self.folder))[0].content
        if self._is_converted or self._is_rebuilt_otherwise:
            settings = {**self._variables, "add_bos_token": self.adds_bos}
        write_folder(
            folder,
            source=self.folder,
            content=content,
            settings=settings,
            template=self._chosen_template,
        )

    def check_text(self, text: str) -> None:
        """Raises DataError where `text` holds code points that cannot be encoded."""
        if text.isascii():
            return
        if RESERVED.search(text):
            raise DataError(
                "the text holds a code point of U+FDD0..U+FDEF, which Unicode reserves: remove it"
            )
        if lone := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"the text holds half a surrogate pair (U+{ord(lone[0]):04X}): remove it"
            )

    def _guard(self, rendering: Rendering) -> tuple[str, list[tuple[int, int]]]:
        """The text with the template's control tokens respelled; (old end, growth) of each."""
        text, controls = rendering.text, rendering.controls
        self.check_text(text)
        if controls is None:
            plain = set(rendering.plain)
            controls = [span for span in self.spelled_controls(text) if span not in plain]
        parts, edits, done = [], [], 0
        for start, end in controls:
            guard = self._guards[text[start:end]]
            parts += (text[done:start], guard)
            edits.append((end, len(guard) - (end - start)))
            done = end
        return "".join(parts) + text[done:], edits

    def spelled_controls(self, text: str) -> tuple[tuple[int, int], ...]:
        """Where `text` spells special tokens, as character spans."""
        return (
            tuple(match.span() for match in self._control_pattern.finditer(text))
            if self._specials
            else ()
        )

    def _define(self, config: Mapping[str, Any]) -> tuple[Definition, tuple[int, ...]]:
        """What the files say with the added tokens; the ids of those that the files lack.

        Read again for `save`, rather than kept: it is some 100 MB.
        """
        definition = read_definition(self.source, config)
        added_tokens: Sequence[str] = self.made_with["added_tokens"]
        if not added_tokens:
            return definition, ()
        if not all(added_tokens):
            raise ConfigError("tokenizer.added_tokens holds an empty text: remove it")
        known = set(definition.ids())
        definition = definition.with_added(added_tokens)
        ids = (definition.specials()[text] for text in dict.fromkeys(added_tokens))
        return definition, tuple(token_id for token_id in ids if token_id not in known)

    def _id_of(
        self, which: str, generation: Mapping[str, Any], published: str | None
    ) -> int | None:
        """The id of BOS or EOS.

        By its text in tokenizer_config.json, else by config.json's ids, else as published.
        """
        ids = _token_ids(which, generation)
        text = self._variables.get(f"{which}_token", None if ids else published)
        if text is not None:
            token_id = self.token_id(text)
            if token_id is None:
                raise CheckpointError(
                    f"{self.folder}: {which}_token {text!r} is not in {self.source.name}"
                )
            self._variables[f"{which}_token"] = text
            return token_id
        token_id = next(iter(ids), None)
        if (text := self.token_text(token_id)) is not None:
            self._variables[f"{which}_token"] = text
        return token_id

    def _is_token(self, text: str) -> bool:
        """Whether `text` from a template becomes one token, and not only a vocabulary's entry."""
        return self.token_id(text) in self.encode(text, allow_special=True)

    def _load_template(
        self, choice: str | None, config: Mapping[str, Any], kwargs: Mapping[str, Any] | None
    ) -> ChatTemplate | None:
        found = find_template(self.folder, choice, config, adds_bos=self.adds_bos)
        if found is None:
            return None
        name, source = found
        enders = {self.token_text(token_id) for token_id in {self.eos_id, *self._eos_ids}} - {None}
        template = ChatTemplate(
            source,
            name=name,
            variables=self._variables,
            control_tokens=tuple(self._specials),
            turn_enders=tuple(text for text in enders if text is not None),
            kwargs=kwargs,
        )
        if lacking := tokens_lacking(template, self._is_token):
            repair = f"tokenizer.added_tokens=[{', '.join(lacking)}]"
            if choice is not None:
                raise ConfigError(
                    f"tokenizer.chat_template={choice} writes {' and '.join(lacking)}, for which "
                    f"{self.source} has no token: add {'it' if len(lacking) == 1 else 'them'} with "
                    f"{repair}, or choose another template"
                )
            self.notes.append(
                f"the chat template writes {' and '.join(lacking)}, which the tokenizer splits "
                f"into ordinary tokens; {repair} makes tokens of their own"
            )
        return template


def auto(
    checkpoint_dir: str | Path,
    *,
    path: str | None = None,
    max_seq_len: Annotated[int, Minimum(2)] = 2048,  # a shorter row would have no target
    chat_template: str | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    added_tokens: list[str] | None = None,
) -> Tokenizer:
    """The tokenizer of a model folder; `path` names another folder, or the file to read.

    `max_seq_len` in tokens; `chat_template` is `chatml` or the path of a .jinja file and replaces
    the folder's own; `chat_template_kwargs` are offered to the template (`enable_thinking: False`);
    `added_tokens` are special tokens that the model shall have. Raises CheckpointError where a file
    is missing or unreadable.
    """
    folder, file = Path(path or checkpoint_dir).expanduser(), None
    if path and folder.is_file():
        folder, file = folder.parent, folder.name
    if not folder.is_dir():
        key = "tokenizer.path" if path else "checkpoint_dir"
        raise CheckpointError(
            f"{key}={folder}: no such folder; point it at a Hugging Face model folder"
        )
    return Tokenizer(
        folder,
        file=file,
        max_seq_len=max_seq_len,
        chat_template=chat_template,
        chat_template_kwargs=chat_template_kwargs,
        added_tokens=added_tokens or (),
    )


def check_vocabulary(largest_id: int, vocab_size: int) -> None:
    """Raise ConfigError where a token id has no row in the model's embedding."""
    if largest_id >= vocab_size:
        raise ConfigError(
            f"token {largest_id} is outside the model's vocabulary of {vocab_size}: the tokenizer "
            "belongs to another model, or was given tokens that the model never got; set "
            "tokenizer.path, or train them with tokenizer.added_tokens"
        )


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder / "special_tokens_map.json") | read_json(
        folder / "tokenizer_config.json"
    )


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
