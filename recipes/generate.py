"""Answers of a model to prompts, with a key/value cache, in batches.

Run:     tune run generate checkpoint_dir=runs/mine/final prompt="What is a decorator?"
         tune run generate checkpoint_dir=models/mine prompts_file=prompts.txt output_file=out.jsonl
         tune run generate checkpoint_dir=runs/my_lora quantize_base=nf4 prompt="..."

Memory is decided by lines marked [mem]; lines marked [num] decide the arithmetic.

Shapes: B prompts of a batch, S tokens of the longest prompt, D width, V vocabulary, K candidates.
"""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import torch
from torch import Tensor

from solotune.adapters import quantize_linears
from solotune.checkpoint import (
    inject_stored,
    load_adapter,
    load_weights,
    model_folder,
    open_adapter,
    stored_four_bit,
)
from solotune.config import Component, ConfigError, run_recipe
from solotune.data import Prompt, read_prompts
from solotune.models import Decoder
from solotune.tokenizers import Tokenizer, check_vocabulary
from solotune.training import pick_device, pick_dtype, set_dtype


@dataclass(kw_only=True)
class Config:
    """Every key that the YAML or the command line may hold, with its unit and default."""

    model: Component  # solotune.models.auto reads config.json of checkpoint_dir
    tokenizer: Component
    checkpoint_dir: str  # a folder of a model, of an adapter in PEFT's format, or of a run
    base_dir: str | None = None  # an adapter's base model; null: the one that the adapter names
    device: str = "auto"  # auto: cuda, xpu, mps, cpu, the first that is there
    dtype: Literal["bf16", "fp32"] = "bf16"
    quantize_base: Literal["nf4"] | None = None  # weights of the blocks in 4 bits

    prompt: str | None = None  # one prompt
    prompts_file: str | None = None  # .txt: one a line; json, jsonl, csv: prompt or messages
    system: str | None = None  # a system message before each prompt
    chat: bool = True  # whether prompts are rendered by the chat template
    output_file: str | None = None  # .jsonl, one object a prompt; null: the terminal

    max_new_tokens: int = 256
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int | None = None  # sample among the k likeliest
    top_p: float | None = None  # sample among the likeliest that hold this probability together
    seed: int = 42  # each prompt draws from (seed, its number), whatever the batch_size
    batch_size: int = 8  # prompts


def validate(cfg: Config) -> None:
    """Refuse what would be wrong or silently useless; each message names the key to change."""
    if (cfg.prompt is None) == (cfg.prompts_file is None):
        raise ConfigError("set one of prompt and prompts_file")
    if cfg.temperature < 0:
        raise ConfigError(f"temperature={cfg.temperature}: use 0 or more")
    if cfg.temperature == 0 and (cfg.top_k is not None or cfg.top_p is not None):
        raise ConfigError("top_k and top_p have no effect at temperature=0: set temperature")
    if cfg.top_p is not None and not 0 < cfg.top_p <= 1:
        raise ConfigError(f"top_p={cfg.top_p}: use a number above 0, at most 1")
    for key in ("top_k", "max_new_tokens", "batch_size"):
        value = getattr(cfg, key)
        if value is not None and value < 1:
            raise ConfigError(f"{key}={value}: use 1 or more")
    if not 0 <= cfg.seed < 2**32:
        raise ConfigError(f"seed={cfg.seed}: use 0 or more, and less than 2**32")
    if cfg.system is not None and not cfg.chat:
        raise ConfigError("system has no place without the chat template: set chat=True")


def encode(cfg: Config, tokenizer: Tokenizer, prompt: Prompt) -> list[int]:
    """Return the tokens of a prompt, as training would have them before an answer."""
    if not cfg.chat:
        if not isinstance(prompt.asked, str):
            raise ConfigError(f"{prompt.place}: chat=False takes text, not messages")
        tokens = tokenizer.encode(prompt.asked, add_bos=tokenizer.adds_bos)
        if not tokens:
            raise ConfigError(f"{prompt.place}: an empty text gives the model nothing to go on")
        return tokens
    asked = prompt.asked
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if cfg.system is not None:
        if messages[0]["role"] == "system":
            raise ConfigError(f"{prompt.place}: it has its own system message: remove system")
        messages = [{"role": "system", "content": cfg.system}, *messages]
    return tokenizer.encode_chat(messages, tools=prompt.tools)


def check_prompt(cfg: Config, model: Decoder, prompt: Prompt, tokens: list[int]) -> None:
    """Raise ConfigError where the model cannot take a prompt, or not its answer."""
    check_vocabulary(max(tokens), len(model.output_weight))
    known = model.config.get("max_position_embeddings")
    if known is not None and len(tokens) + cfg.max_new_tokens > known:
        raise ConfigError(
            f"{prompt.place}: {len(tokens)} tokens and max_new_tokens={cfg.max_new_tokens} are "
            f"more than the {known} positions of the model: shorten one of them"
        )


def pick(cfg: Config, logits_BV: Tensor, generators: list[torch.Generator]) -> Tensor:
    """Return the next token of each row, (B,)."""
    if cfg.temperature == 0:
        return logits_BV.argmax(-1)
    logits_BK = logits_BV.float() / cfg.temperature  # [num] probabilities in fp32
    vocab_size = logits_BK.size(-1)
    # The K likeliest in order, which a cut needs; exactly K, also where some are as likely.
    logits_BK, tokens_BK = logits_BK.topk(min(cfg.top_k or vocab_size, vocab_size))
    if cfg.top_p is not None:
        p_BK = logits_BK.softmax(-1)
        logits_BK = logits_BK.masked_fill(p_BK.cumsum(-1) - p_BK >= cfg.top_p, -torch.inf)
    p_BK = logits_BK.softmax(-1)
    drawn = [torch.multinomial(p, 1, generator=g) for p, g in zip(p_BK, generators, strict=True)]
    return tokens_BK.gather(1, torch.stack(drawn)).squeeze(1)


@torch.inference_mode()
def answer(
    cfg: Config, model: Decoder, prompts: list[list[int]], stop_ids: list[int], first: int
) -> list[list[int]]:
    """Return the new tokens of each prompt of a batch, without the stop token.

    `first` is the number of the batch's first prompt, for the random draws.
    """
    device = model.device
    lengths_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    longest = max(len(prompt) for prompt in prompts)
    tokens_BS = torch.tensor([p + [0] * (longest - len(p)) for p in prompts], device=device)
    cache = model.new_cache(len(prompts), longest + cfg.max_new_tokens)  # [mem] cache
    generators = [
        torch.Generator(device).manual_seed(cfg.seed * 1_000_003 + first + row)
        for row in range(len(prompts))
    ]

    def hidden(tokens_BS: Tensor, positions_BS: Tensor, segments_BM: Tensor | None) -> Tensor:
        context = model.context(positions_BS, segments_BM, cache)
        return model.hidden_states(model.embed(tokens_BS), context)

    positions_BS = torch.arange(longest, device=device).expand(len(prompts), -1)
    rows_B = torch.arange(len(prompts), device=device)
    segments_B1 = lengths_B.to(torch.int32).unsqueeze(1)  # [mem] no scores of a whole prompt
    last_BD = hidden(tokens_BS, positions_BS, segments_B1)[rows_B, lengths_B - 1]
    stops = torch.tensor(stop_ids, device=device)
    done_B = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    picked: list[Tensor] = []
    for number in range(cfg.max_new_tokens):
        token_B = pick(cfg, model.logits(last_BD), generators)  # [mem] B rows of logits
        picked.append(token_B)
        done_B |= torch.isin(token_B, stops)
        if number % 8 == 7 and done_B.all():  # a host read, so not at each token
            break
        last_BD = hidden(token_B.unsqueeze(1), (lengths_B + number).unsqueeze(1), None)[:, 0]
    answers = torch.stack(picked, 1).tolist()
    return [_until_stop(tokens, set(stop_ids)) for tokens in answers]


def _until_stop(tokens: list[int], stop_ids: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[:end]


def open_answers(path: str | None) -> AbstractContextManager[TextIO | None]:
    """Return the file for the answers, which keeps what it holds; None for the terminal."""
    return nullcontext() if path is None else Path(path).open("a", encoding="utf-8")


def main(cfg: Config) -> None:
    """Everything in the order in which it happens."""
    validate(cfg)
    device = pick_device(cfg.device)
    dtype = pick_dtype(cfg.dtype, device)
    folder = model_folder(cfg.checkpoint_dir)
    adapter = open_adapter(folder)
    if cfg.base_dir is not None and adapter is None:
        raise ConfigError(f"base_dir has no effect: {folder} holds a model, not an adapter")
    base = adapter.base_folder(cfg.base_dir) if adapter else folder
    with torch.device("meta"):
        model = cfg.model.build(checkpoint_dir=base)
    set_dtype(model, dtype).eval()
    quantize_linears(model, cfg.quantize_base, stored=stored_four_bit(base))  # [mem] weights
    if adapter:
        inject_stored(model, adapter, dtype=torch.float32)
    tokenizer = cfg.tokenizer.build(
        checkpoint_dir=adapter.tokenizer_folder(base) if adapter else base
    )
    prompts = read_prompts(cfg.prompts_file) if cfg.prompts_file else [Prompt(cfg.prompt or "")]
    encoded = [encode(cfg, tokenizer, prompt) for prompt in prompts]
    for prompt, tokens in zip(prompts, encoded, strict=True):
        check_prompt(cfg, model, prompt, tokens)

    with open_answers(cfg.output_file) as output:  # a wrong path costs no reading of weights
        load_weights(model, base, device=device)  # [mem] weights
        if adapter:
            load_adapter(model, adapter)
        if output is not None:
            output.truncate(0)
        for first in range(0, len(encoded), cfg.batch_size):
            batch = slice(first, first + cfg.batch_size)
            answers = answer(cfg, model, encoded[batch], tokenizer.stop_ids(), first)
            for prompt, tokens in zip(prompts[batch], answers, strict=True):
                text = tokenizer.decode(tokens, skip_special=True)
                asked = prompt.asked
                if output is not None:
                    output.write(json.dumps({"prompt": asked, "answer": text}) + "\n")
                else:
                    last = asked if isinstance(asked, str) else asked[-1]["content"]
                    print(f"> {last}\n{text}\n", flush=True)
    if cfg.output_file is not None:
        print(cfg.output_file)


if __name__ == "__main__":
    run_recipe(main, Config)
