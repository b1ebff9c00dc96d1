"""Renderings, token ids and masks equal those of transformers, which is only an oracle here."""

from collections.abc import Callable
from typing import Any

import pytest

from solotune.tokenizers import CHATML, Tokenizer

transformers = pytest.importorskip("transformers")

LOOPS = (  # block trimming, loop controls, filters and functions that templates use
    "{{ bos_token }}\n{%- for m in messages %}\n"
    "    {%- if m.role == 'system' %}{% continue %}{% endif %}\n    <|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}{{ {'k': m.role, 'é': '<b>'} | tojson }}<|im_end|>\n"
    "{% endfor %}\n{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BLOCKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüß Gott, 世界! \n"},
    {"role": "assistant", "content": "  Hello 🌍"},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "No."},
]


@pytest.mark.parametrize("template", [CHATML, LOOPS, BLOCKS])
@pytest.mark.parametrize("add_generation_prompt", [False, True])
def test_rendering_and_ids_equal_those_of_transformers(
    template: str, add_generation_prompt: bool, make_tokenizer: Callable[..., Tokenizer]
) -> None:
    ours = make_tokenizer(template, merges=(("i", "m"), ("l", "l"), ("ll", "o"), ("Ġ", "Ġ")))
    theirs = transformers.AutoTokenizer.from_pretrained(ours.folder)
    messages = MESSAGES[:-1] if add_generation_prompt else MESSAGES
    options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
    text = theirs.apply_chat_template(messages, tokenize=False, **options)
    assert ours.require_template().render(messages, **options) == text
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, **options)
    assert ours.encode_chat(messages, **options) == ids["input_ids"]


def test_masks_of_generation_blocks_equal_those_of_transformers(
    make_tokenizer: Callable[..., Tokenizer],
) -> None:
    ours = make_tokenizer(BLOCKS)
    theirs = transformers.AutoTokenizer.from_pretrained(ours.folder)
    encoded = theirs.apply_chat_template(
        MESSAGES, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    rendering = ours.require_template().render_turns(MESSAGES)
    spans = [(turn.start, turn.end) for turn in rendering.turns]
    mask = ours.encode_renderings([rendering])[0].mask(spans)
    assert mask.tolist() == encoded["assistant_masks"]
