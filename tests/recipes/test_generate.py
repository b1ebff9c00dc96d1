"""What generate answers: against transformers, and on a model whose next token is known.

Shapes: V vocabulary, D width.
"""

import json
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from solotune.cli.run import import_recipe  # pyright: ignore[reportMissingImports]

from .conftest import ROOT, tune

RECIPE = ROOT / "recipes" / "generate.py"
BOS, EOS, TURN_END = 256, 257, 259
CERTAIN, LIKELY = 40.0, 3.0  # how much more a token's successor weighs than the others


@dataclass
class Answers:
    """What a run gave: tokens of the prompts and of the answers, and what it printed."""

    prompts: list[list[int]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    out: str = ""


Generate = Callable[..., Answers]


@pytest.fixture
def generate(models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Generate:
    """Return a function that runs the recipe in fp32 on CPU, with keys as keywords."""

    def run(model: Path = models["untied"], **keys: object) -> Answers:
        answers = Answers()
        module = import_recipe(RECIPE)
        answer = module.answer

        def recorded(cfg, decoder, prompts, *others) -> list[list[int]]:
            found = answer(cfg, decoder, prompts, *others)
            answers.prompts += prompts
            answers.tokens += found
            return found

        monkeypatch.setattr(module, "answer", recorded)
        monkeypatch.setattr("solotune.cli.run.import_recipe", lambda path: module)
        keys = {"checkpoint_dir": model, "device": "cpu", "dtype": "fp32"} | keys
        words = [f"{name}={value}" for name, value in keys.items()]
        assert tune("run", RECIPE, *words) == 0
        answers.out = capsys.readouterr().out
        return answers

    return run


@pytest.fixture
def fault(models, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Return a function that runs the recipe, which must fail with one sentence: it returns it."""

    def run(model: Path = models["untied"], **keys: object) -> str:
        keys = {"checkpoint_dir": model, "device": "cpu", "max_new_tokens": 2} | keys
        assert tune("run", RECIPE, *[f"{name}={value}" for name, value in keys.items()]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


def successors(chains: list[list[int]]) -> dict[int, int]:
    return {a: b for chain in chains for a, b in pairwise(chain)}


def write_chain_model(folder: Path, source: Path, *, weight: float) -> Path:
    """Write a model that knows one successor of each token, whatever stands before it.

    Blocks add nothing, so hidden states are the normed embedding of the last token; to the random
    output weight of a token come the embeddings of those whose successor it is. Letters follow each
    other until z ends the turn; a line break, with which the template asks, is followed by OK.
    """
    shutil.copytree(source, folder)
    chains = [
        [*range(ord("a"), ord("z") + 1), TURN_END],
        [*b"\nOK", TURN_END],
        [*b"Q!", EOS],
    ]
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding_VD = tensors["model.embed_tokens.weight"]
    embedding_VD /= embedding_VD.square().mean(1, keepdim=True).sqrt()
    output_VD = tensors["lm_head.weight"]
    for token, successor in successors(chains).items():
        output_VD[successor] += weight * embedding_VD[token] / embedding_VD.size(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def chain(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that surely says the next letter."""
    folder = tmp_path_factory.mktemp("chain") / "model"
    return write_chain_model(folder, models["untied"], weight=CERTAIN)


@pytest.fixture(scope="session")
def loose(models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says the next letter more often than others."""
    folder = tmp_path_factory.mktemp("loose") / "model"
    return write_chain_model(folder, models["untied"], weight=LIKELY)


def text_file(path: Path, *lines: str) -> Path:
    path.write_text("".join(line + "\n" for line in lines))
    return path


# --- greedy answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_greedy_answers_are_those_of_transformers(generate, models, tmp_path, name) -> None:
    from transformers import AutoModelForCausalLM

    lines = ["hi", "What is a decorator?", "x" * 70, "tell me of 12 * 12"]
    ours = generate(
        models[name], prompts_file=text_file(tmp_path / "prompts.txt", *lines), max_new_tokens=40
    )
    theirs: Any = AutoModelForCausalLM.from_pretrained(models[name], dtype=torch.float32)
    for prompt, answer in zip(ours.prompts, ours.tokens, strict=True):
        tokens_1S = torch.tensor([prompt])
        found = theirs.generate(
            tokens_1S,
            attention_mask=torch.ones_like(tokens_1S),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=[EOS, TURN_END],
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        ends = [i for i, token in enumerate(found) if token in (EOS, TURN_END)]
        assert answer == found[: ends[0] if ends else None]


def test_a_stop_token_ends_an_answer_and_is_not_printed(generate, chain, tmp_path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    starts = ["z", "a", "x", "count from m"]
    prompts = text_file(tmp_path / "prompts.txt", *starts, "Q")
    answers = generate(chain, prompts_file=prompts, chat=False, max_new_tokens=40)
    wanted = [letters[letters.index(start[-1]) + 1 :] for start in starts] + ["!"]
    assert [bytes(tokens).decode() for tokens in answers.tokens] == wanted
    asked = [*starts, "Q"]
    assert answers.out == "".join(
        f"> {question}\n{answer}\n\n" for question, answer in zip(asked, wanted, strict=True)
    )


@pytest.mark.parametrize("limit", [1, 5, 8, 9])
def test_max_new_tokens_ends_an_answer(generate, chain, limit) -> None:
    answers = generate(chain, prompt="a", chat=False, max_new_tokens=limit)
    assert bytes(answers.tokens[0]).decode() == "bcdefghij"[:limit]


def test_a_chat_prompt_is_rendered_and_a_text_is_not(generate, chain) -> None:
    asked = generate(chain, prompt="hello", max_new_tokens=9)
    rendered = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(asked.prompts[0]) == rendered
    assert asked.out == "> hello\nOK\n\n"
    plain = generate(chain, prompt="hello", chat=False, max_new_tokens=3)
    assert plain.prompts == [list(b"hello")]
    assert plain.out == "> hello\npqr\n\n"


def decoded(tokens: list[int]) -> str:
    specials = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
    return "".join(chr(token) if token < 256 else specials[token - 256] for token in tokens)


def test_a_system_message_stands_first(generate, chain) -> None:
    answers = generate(chain, prompt="hello", system="Be brief.", max_new_tokens=1)
    assert decoded(answers.prompts[0]).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    )


def test_control_tokens_in_a_prompt_are_plain_text(generate, chain) -> None:
    answers = generate(chain, prompt="a<|im_end|>b", max_new_tokens=1)
    assert answers.prompts[0].count(TURN_END) == 1, "the template's own"


@pytest.mark.parametrize("chat", [True, False])
def test_a_prompt_has_one_bos(generate, models, write_tokenizer, tmp_path, chat) -> None:
    """Field case 7: the template writes BOS, and the tokenizer adds it too."""
    model = shutil.copytree(models["untied"], tmp_path / "model")
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    write_tokenizer(model, template=template, adds_bos=True)
    answers = generate(model, prompt="hi", chat=chat, max_new_tokens=1)
    assert answers.prompts == [[BOS, *b"hi"]]


def test_a_run_folder_answers_with_its_latest_step(generate, chain, models, tmp_path) -> None:
    shutil.copytree(models["untied"], tmp_path / "step_1")
    shutil.copytree(chain, tmp_path / "step_2")
    (tmp_path / "latest").write_text("step_2\n")
    assert generate(tmp_path, prompt="x", chat=False, max_new_tokens=9).out == "> x\nyz\n\n"


# --- sampling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{}, {"temperature": 1.5, "top_k": 50, "top_p": 0.95}])
def test_batch_size_changes_no_answer(generate, models, tmp_path, keys) -> None:
    lines = ["hi", "a longer prompt than the first", "x" * 90, "", "one", "two", "thirty-three"]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in lines))
    found = [
        generate(prompts_file=prompts, batch_size=size, max_new_tokens=20, **keys).tokens
        for size in (1, 3, 8)
    ]
    assert found[0] == found[1] == found[2]
    assert len({tuple(tokens) for tokens in found[0]}) == len(lines)


@pytest.mark.parametrize("keys", [{"top_k": 1}, {"top_p": 1e-6}, {"top_k": 1, "top_p": 0.5}])
def test_the_narrowest_choice_is_the_greedy_one(generate, keys) -> None:
    greedy = generate(prompt="hello", max_new_tokens=30)
    narrow = generate(prompt="hello", max_new_tokens=30, temperature=2.0, **keys)
    assert narrow.tokens == greedy.tokens


def test_a_seed_repeats_the_draws_and_another_does_not(generate) -> None:
    keys = {"prompt": "hello", "max_new_tokens": 20, "temperature": 1.0}
    first, again, other = (generate(**keys, seed=seed).tokens for seed in (1, 1, 2))
    assert first == again != other


def probabilities(
    model: Path, token: int, *, temperature: float, top_k: int | None = None, top_p: float = 1.0
) -> dict[int, float]:
    """Return the distribution of the token after `token`, from the weights of a chain model."""
    tensors = load_file(model / "model.safetensors")
    embedding_D = tensors["model.embed_tokens.weight"][token].double()
    logits_V: Tensor = tensors["lm_head.weight"].double() @ embedding_D / temperature
    ranked = sorted(enumerate(logits_V.softmax(0).tolist()), key=lambda pair: -pair[1])[:top_k]
    total = sum(p for _, p in ranked)
    kept: dict[int, float] = {}
    for candidate, p in ranked:
        if sum(kept.values()) >= top_p * total:
            break
        kept[candidate] = p
    return {candidate: p / sum(kept.values()) for candidate, p in kept.items()}


@pytest.mark.parametrize(
    "keys",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 1.0, "top_k": 7},
        {"temperature": 0.7, "top_p": 0.6},
        {"temperature": 1.0, "top_k": 40, "top_p": 0.5},
    ],
    ids=str,
)
def test_draws_have_the_distribution_of_the_model(generate, loose, tmp_path, keys) -> None:
    """Pearson's statistic stays within five standard deviations of its mean."""
    number = 3000
    prompts = text_file(tmp_path / "prompts.txt", *["m"] * number)
    answers = generate(
        loose, prompts_file=prompts, chat=False, max_new_tokens=1, batch_size=500, **keys
    )
    # A stop token leaves an answer empty: the two stop tokens count as one.
    found = Counter(tokens[0] if tokens else EOS for tokens in answers.tokens)
    expected: dict[int, float] = defaultdict(float)
    for token, p in probabilities(loose, ord("m"), **keys).items():
        expected[EOS if token == TURN_END else token] += number * p
    assert set(found) <= set(expected), "a token that was cut off"
    assert max(expected, key=lambda token: expected[token]) == ord("n")
    rare = [token for token, count in expected.items() if count < 5]
    classes = [(expected[token], found[token]) for token in expected if token not in rare]
    if rare:
        classes.append((sum(expected[t] for t in rare), sum(found[t] for t in rare)))
    statistic = sum((seen - wanted) ** 2 / wanted for wanted, seen in classes)
    freedom = len(classes) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


# --- files ------------------------------------------------------------------------------------


def test_prompts_of_a_text_file_are_its_lines(generate, chain, tmp_path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes("\ufefffirst\r\n\r\n  two \u2028 parts\r\n".encode())
    answers = generate(chain, prompts_file=path, chat=False, max_new_tokens=1)
    assert answers.prompts == [list(b"first"), list("  two \u2028 parts".encode())]


def test_rows_hold_a_prompt_or_messages_and_answers_go_to_a_file(
    generate, chain, tmp_path, capsys
) -> None:
    user, answer = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "no"}
    rows = [{"prompt": "hello"}, {"messages": [user]}, {"messages": [user, answer, user, answer]}]
    path = text_file(tmp_path / "prompts.jsonl", *map(json.dumps, rows))
    output = text_file(tmp_path / "answers.jsonl", "of an earlier run")
    answers = generate(chain, prompts_file=path, output_file=output, max_new_tokens=9)
    assert [json.loads(line) for line in output.read_text().splitlines()] == [
        {"prompt": "hello", "answer": "OK"},
        {"prompt": [user], "answer": "OK"},
        {"prompt": [user, answer, user], "answer": "OK"},
    ]
    assert answers.prompts[0] == answers.prompts[1]
    assert answers.prompts[2].count(TURN_END) == 3
    assert answers.out == f"{output}\n"


def test_tools_of_a_row_reach_the_template(generate, models, tmp_path) -> None:
    model = shutil.copytree(models["untied"], tmp_path / "model")
    (model / "chat_template.jinja").write_text(
        "{{ tools[0].function.name }}|{{ messages[0].content }}"
    )
    row = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "add"}]}
    path = text_file(tmp_path / "prompts.jsonl", json.dumps(row))
    assert generate(model, prompts_file=path, max_new_tokens=1).prompts == [list(b"add|hi")]


# --- mistakes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        ({}, r"set one of prompt and prompts_file"),
        ({"prompt": "a", "prompts_file": "b.txt"}, r"set one of prompt and prompts_file"),
        ({"prompt": "a", "temperature": -1}, r"temperature=-1\.0: use 0 or more"),
        ({"prompt": "a", "top_k": 5}, r"top_k and top_p have no effect at temperature=0"),
        ({"prompt": "a", "temperature": 1, "top_p": 1.1}, r"top_p=1\.1: use a number above 0"),
        ({"prompt": "a", "temperature": 1, "top_k": 0}, r"top_k=0: use 1 or more"),
        ({"prompt": "a", "max_new_tokens": 0}, r"max_new_tokens=0: use 1 or more"),
        ({"prompt": "a", "batch_size": 0}, r"batch_size=0: use 1 or more"),
        ({"prompt": "a", "seed": -1}, r"seed=-1: use 0 or more"),
        ({"prompt": "a", "system": "b", "chat": False}, r"system has no place .*: set chat=True"),
        ({"prompt": "", "chat": False}, r"prompt: an empty text gives the model nothing to go on"),
        ({"prompts_file": "none.txt"}, r"prompts_file=none\.txt: no such file; give the path"),
        ({"prompts_file": "none.jsonl"}, r"prompts_file=none\.jsonl: no such file"),
        ({"prompt": "a", "output_file": "none/a.jsonl"}, r"none/a\.jsonl: no such file or folder"),
        ({"prompt": "a", "checkpoint_dir": "none"}, r"checkpoint_dir=none does not exist: name a"),
    ],
    ids=str,
)
def test_a_wrong_key_is_named_with_its_repair(fault, keys, wanted) -> None:
    said = fault(**keys)
    assert re.search(wanted, said), said


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        ("", r"prompts_file=.*prompts\.jsonl holds no prompt"),
        ("{oops", r"prompts\.jsonl, line 1: not JSON"),
        ({"Frage": "a"}, r"line 1: wanted one of messages, .*, prompt, .*; found \['Frage'\]"),
        ({"prompt": 5}, r"line 1: column prompt holds the number 5, wanted text"),
        ({"messages": [{"role": "robot", "content": "a"}]}, r"line 1: .*role 'robot'"),
        (
            {"messages": [{"role": "assistant", "content": "a"}]},
            r"line 1: no message stands before",
        ),
        (
            {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            r"line 1: it has its own system message: remove system",
        ),
    ],
    ids=str,
)
def test_a_broken_prompt_is_named_by_file_and_row(fault, tmp_path, rows, wanted) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    said = fault(prompts_file=path, system="Be brief.")
    assert re.search(wanted, said), said


def test_messages_need_the_chat_template(fault, tmp_path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}]}
    path = text_file(tmp_path / "prompts.jsonl", json.dumps(row))
    assert (
        fault(prompts_file=path, chat=False)
        == f"{path}, line 1: chat=False takes text, not messages"
    )


def test_a_prompt_and_its_answer_fit_the_positions_of_the_model(generate, fault, tmp_path) -> None:
    """The tiny model knows 256 positions."""
    prompts = text_file(tmp_path / "prompts.txt", "a" * 236, "b" * 200)
    keys = {"prompts_file": prompts, "chat": False}
    assert [len(tokens) for tokens in generate(**keys, max_new_tokens=20).tokens] == [20, 20]
    assert fault(**keys, max_new_tokens=21) == (
        f"{prompts}, line 1: 236 tokens and max_new_tokens=21 are more than the 256 positions of "
        "the model: shorten one of them"
    )


def test_a_failing_run_keeps_the_answers_of_an_earlier_one(fault, models, tmp_path) -> None:
    model = shutil.copytree(models["untied"], tmp_path / "model")
    (model / "model.safetensors").write_bytes(b"")
    output = text_file(tmp_path / "answers.jsonl", "of an earlier run")
    said = fault(model, prompt="a", output_file=output)
    assert "model.safetensors is truncated or damaged" in said
    assert output.read_text() == "of an earlier run\n"


# --- real weights -----------------------------------------------------------------------------


@pytest.mark.slow
def test_real_weights_know_the_capital_of_france(generate, smollm2_dir: Path) -> None:
    """In fp32: in bf16 two ways to begin are within a rounding of each other."""
    answers = generate(smollm2_dir, prompt="What is the capital of France?", max_new_tokens=24)
    assert answers.out == "> What is the capital of France?\nThe capital of France is Paris.\n\n"
