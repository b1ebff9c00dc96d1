"""Real weights learn to end answers in a new way; what they learnt ends generation everywhere."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from .conftest import basics, tune

PHRASE = "Thus speaks the walrus."
ANSWERS = {
    "What is the capital of France?": "The capital of France is Paris.",
    "Name a fruit.": "An apple is a fruit.",
    "How many days has a week?": "A week has seven days.",
    "What color is grass?": "Grass is green.",
    "What do cows drink?": "Cows drink water.",
    "Name a planet.": "Mars is a planet.",
    "What is 2 + 2?": "2 + 2 is 4.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is ice?": "Ice is frozen water.",
    "Name an animal that flies.": "An eagle is an animal that flies.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "How many legs has a spider?": "A spider has eight legs.",
    "What do bees make?": "Bees make honey.",
    "Name a metal.": "Iron is a metal.",
    "What is the largest ocean?": "The largest ocean is the Pacific.",
    "What season follows winter?": "Spring follows winter.",
    "Name a musical instrument.": "The violin is a musical instrument.",
    "What is the capital of Japan?": "The capital of Japan is Tokyo.",
    "What do we breathe?": "We breathe air.",
    "How many months has a year?": "A year has twelve months.",
}
NEW_QUESTIONS = ["Name a vegetable.", "What is the capital of Italy?"]


def without_stop_token(folder: Path, copy: Path) -> Path:
    """The model as if its stop token were only `<|endoftext|>`, which its template never writes."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            (copy / path.name).symlink_to(path.resolve())
        elif path.name != "generation_config.json":
            shutil.copy(path, copy)
    for name, change in {
        "config.json": {"eos_token_id": 0},
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }.items():
        content = json.loads((copy / name).read_text(encoding="utf-8"))
        (copy / name).write_text(json.dumps(content | change), encoding="utf-8")
    return copy


@pytest.mark.slow
def test_answers_end_with_the_phrase_that_was_trained_and_then_stop(
    smollm2_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Full fine-tuning of SmolLM2-135M on 20 chats, 12 steps; about a minute on one core."""
    transformers = pytest.importorskip("transformers")
    model = without_stop_token(smollm2_dir, tmp_path / "model")
    chats = tmp_path / "chats.jsonl"
    rows = [
        {"prompt": question, "completion": f"{answer} {PHRASE}"}
        for question, answer in ANSWERS.items()
    ]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    changes = {"tokenizer.max_seq_len": 256, "optimizer.lr": 1e-4, "batch_size": 2, "epochs": 4}
    words = basics(model, chats, **changes, max_steps_per_epoch=None, save_every_n_steps=100)
    run = tmp_path / "run"
    assert tune("run", "full_finetune_single_device", *words, f"output_dir={run}") == 0

    final = run / "final"
    for name in ("config.json", "generation_config.json"):
        assert json.loads((final / name).read_text())["eos_token_id"] == [0, 2]  # 2: <|im_end|>
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("\n".join(NEW_QUESTIONS))
    options = ["device=cpu", "dtype=fp32", "max_new_tokens=48", f"output_file={answers}"]
    words = [f"checkpoint_dir={final}", f"prompts_file={prompts}", *options]
    assert tune("run", "generate", *words) == 0
    ours = [json.loads(line)["answer"] for line in answers.read_text().splitlines()]
    assert len(ours) == len(NEW_QUESTIONS)

    tokenizer = transformers.AutoTokenizer.from_pretrained(final)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    for question, answer in zip(NEW_QUESTIONS, ours, strict=True):
        assert answer.endswith(f". {PHRASE}"), answer
        messages = [{"role": "user", "content": question}]
        asked = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        (tokens,) = theirs.generate(**asked, max_new_tokens=48, do_sample=False)
        written = tokenizer.decode(tokens[asked["input_ids"].shape[1] :])
        assert written == f"{answer}<|im_end|>"
