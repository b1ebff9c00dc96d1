"""A user's mistake is one sentence that names what is wrong, an exit code, and nothing lost."""

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from solotune.config import read_schema
from solotune.losses import LinearCrossEntropy

from .conftest import TRAINING, basics, differing, metrics, names, tune

Damage = Callable[[Path], object]

USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}
CHAT = {"messages": [USER, ANSWER]}


@pytest.fixture(params=TRAINING, ids=names(TRAINING))
def recipe(request: pytest.FixtureRequest) -> Path:
    return request.param


def content(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """A folder as an earlier run leaves it, with a stranger's file and folder."""
    folder = tmp_path / "earlier"
    for name in ("final", "step_3", "step_by_step"):
        (folder / name).mkdir(parents=True)
        (folder / name / "model.safetensors").write_bytes(b"of the earlier run")
    for name in ("config.yaml", "run.json", "metrics.jsonl", "notes.txt"):
        (folder / name).write_text("{}\n")
    for name in ("latest", "best"):
        (folder / name).write_text("step_3\n")
    return folder


@pytest.fixture
def fault(recipe, models, chats, earlier, capsys) -> Callable[..., str]:
    """Return a function that runs the recipe, which must fail, and returns the sentence it said.

    The run may overwrite the earlier one, and must leave it as it was all the same.
    """

    def run(*words: str, code: int = 1, model: Path | None = None, **changes: object) -> str:
        before = content(earlier)
        keys = {"output_dir": earlier, "overwrite": True, **changes}
        found = tune(
            "run", recipe, *basics(model or models["untied"], chats, recipe=recipe, **keys), *words
        )
        printed = capsys.readouterr()
        assert found == code, printed.err
        assert content(earlier) == before
        return sentence(printed.err)

    return run


def sentence(err: str) -> str:
    """Return the one sentence on stderr, without its mark."""
    assert "Traceback" not in err
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture
def damaged(models: dict[str, Path], tmp_path: Path) -> Callable[[Damage], Path]:
    """Return a function that gives a copy of the model folder after some damage."""

    def copy(damage: Damage) -> Path:
        folder = tmp_path / "model"
        shutil.copytree(models["untied"], folder)
        damage(folder)
        return folder

    return copy


def config(**fields: object) -> Damage:
    """Change fields of config.json."""

    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return edit


def without_template(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))


def without_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def with_a_small_vocabulary(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:200].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    config(vocab_size=200)(folder)


def file(name: str, text: str | bytes) -> Damage:
    """Replace a file of the folder."""
    return lambda folder: (folder / name).write_bytes(
        text.encode() if isinstance(text, str) else text
    )


MODEL_FAULTS: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, r"checkpoint_dir=.*model does not exist: name a Hugging Face"),
    "no config": (
        lambda f: (f / "config.json").unlink(),
        r"config\.json does not exist: check",
    ),
    "half a config": (file("config.json", '{"model_type":'), r"config\.json is not valid JSON: "),
    "config of bytes": (file("config.json", b"\xff{}"), r"config\.json is not valid JSON: .*utf-8"),
    "config of a list": (
        file("config.json", "[1]"),
        r"config\.json holds a list, not a JSON",
    ),
    "model_type": (config(model_type="mamba"), r"model_type 'mamba' .*supported: llama"),
    "other width": (
        config(hidden_size=128),
        r"embed_tokens.weight has the shape \[260, 64\] where config\.json asks for \[260, 128\]",
    ),
    "width in words": (config(hidden_size="64"), r"hidden_size='64' is not a whole number above 0"),
    "no heads": (config(num_attention_heads=0), r"num_attention_heads=0 is not a whole number"),
    "eps in words": (config(rms_norm_eps="1e-5"), r"rms_norm_eps='1e-5' is not a number above 0"),
    "rope in words": (config(rope_scaling="linear"), r"rope_scaling='linear' is not an object"),
    "tied in words": (config(tie_word_embeddings="false"), r"='false' is not true or false"),
    "more layers": (config(num_hidden_layers=3), r"lacks the weights model\.layers\.2\.\S+ and 8"),
    "eos in words": (config(eos_token_id="</s>"), r"eos_token_id='</s>' .*one token id or a list"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"neither model\.safetensors nor"),
    "cut weights": (
        lambda f: os.truncate(f / "model.safetensors", 9000),
        r"model\.safetensors is truncated or damaged .*: download or copy it again",
    ),
    "broken header": (
        file("model.safetensors", struct.pack("<Q", 16) + b"not quite a JSON"),
        r"model\.safetensors is truncated or damaged \(its header is not readable\)",
    ),
    "LFS pointer": (
        file("model.safetensors", "version https://git-lfs.github.com/spec/v1\n"),
        r"model\.safetensors is a Git LFS pointer, .*git lfs pull",
    ),
    "missing tensor": (without_a_tensor, r"lacks the weights model\.norm\.weight: .*incomplete"),
    "small vocabulary": (
        with_a_small_vocabulary,
        r"token 25\d is outside the model's vocabulary of 200: .*tokenizer\.path",
    ),
    "no tokenizer": (
        lambda f: (f / "tokenizer.json").unlink(),
        r"holds no tokenizer \(tokenizer\.json, .*: set",
    ),
    "half a tokenizer": (file("tokenizer.json", "{"), r"tokenizer\.json is not JSON .*fetch the"),
    "no true tokenizer": (file("tokenizer.json", "{}"), r"tokenizer\.json cannot be used: .*fetch"),
    "half its config": (file("tokenizer_config.json", "{"), r"tokenizer_config\.json is not JSON"),
    "half a generation config": (
        file("generation_config.json", "{"),
        r"generation_config\.json is not JSON .*fetch the file again",
    ),
    "template syntax": (
        file("chat_template.jinja", "{% for %}"),
        r"chat_template\.jinja, line 1: .*repair the chat template or choose another",
    ),
    "template fault": (
        file("chat_template.jinja", "{{ x.y }}"),
        r"chats\.jsonl, line 1: .*chat_template\.jinja refuses .*'x' is undefined",
    ),
    "no template": (
        without_template,
        r"has no chat template \(a base model\): set tokenizer\.chat_template to chatml or",
    ),
}


@pytest.mark.parametrize("name", MODEL_FAULTS)
def test_a_broken_model_folder_is_named_by_file_and_repair(fault, damaged, name: str) -> None:
    damage, wanted = MODEL_FAULTS[name]
    said = fault(model=damaged(damage))
    assert re.search(wanted, said), said


def test_a_checkpoint_dir_that_is_a_file_is_said(fault, chats: Path) -> None:
    assert fault(model=chats).startswith(f"checkpoint_dir={chats} is a file, not a folder: name a")


def jsonl(*rows: object) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


ROBOT = {"messages": [USER, {"role": "robot", "content": "x"}]}


@pytest.mark.parametrize(
    ("rows", "words", "wanted"),
    [
        (None, [], r"dataset\.source=.*rows\.jsonl: no such file; give the path of a json"),
        ("", [], r"rows\.jsonl leaves nothing to train on: 0 rows"),
        (b'{"prompt": "\xe9"}\n', [], r"rows\.jsonl, line 1: not UTF-8 at byte 12 .*save it"),
        (
            jsonl(*[{"text": "a"}] * 3),  # field case 2
            ["dataset.format=messages"],
            r"rows\.jsonl, line 1: .*column messages, found \['text'\]: set dataset\.format",
        ),
        (
            jsonl({"Frage": "a", "Antwort": "b"}),
            [],
            r"line 1: no known format .*\['Antwort', 'Frage'\].*name yours with dataset\.column",
        ),
        (
            jsonl(CHAT, CHAT, ROBOT),
            [],
            r"line 3: message 1 has the role 'robot', of the roles \['user', 'robot'\]: use one of",
        ),
        (jsonl(CHAT, "{oops"), [], r"line 2: not JSON: .*dataset\.on_bad_row=skip"),
        (jsonl({"messages": [USER]}), [], r"nothing to train on: 1 rows, .*1 without a target"),
        (jsonl(CHAT), ["val_fraction=0.05"], r"val_fraction=0\.05 needs two .*: set it to 0"),
        (jsonl(CHAT), ["tokenizer.max_seq_len=8"], r"1 without a target .*max_seq_len=8"),
        (jsonl(CHAT), ["dataset.max_rows=0"], r"dataset\.max_rows: 1 or more is needed, not 0"),
        (jsonl(CHAT), ["dataset.history=drop"], r"dataset\.history: per_turn or as_rendered is"),
    ],
)
def test_a_broken_data_set_is_named_by_file_and_row(
    fault, tmp_path: Path, rows: str | bytes | None, words: list[str], wanted: str
) -> None:
    path = tmp_path / "rows.jsonl"
    if rows is not None:
        path.write_bytes(rows.encode() if isinstance(rows, str) else rows)
    said = fault(*words, dataset=path)
    assert re.search(wanted, said), said


def test_skipped_rows_are_counted_and_shown(train, recipe, tmp_path, capsys) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(jsonl(CHAT, "{oops", ROBOT, CHAT))
    train(recipe, dataset=path, **{"dataset.on_bad_row": "skip"})
    out = capsys.readouterr().out
    assert f"dataset: {path}, format messages, 4 rows" in out
    assert "dataset: 2 rows skipped that could not be read" in out
    assert f"dataset: skipped {path}, line 2: not JSON" in out
    assert f"dataset: skipped {path}, line 3: message 1 has the role 'robot'" in out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["device=cuda:77"], r"device=cuda:77 (is not available here|cannot be used).*device=auto"),
        (["dtype=fp16"], r"dtype: bf16 or fp32 is needed, not fp16"),
        (["epochs=0"], r"epochs=0: use a number above 0"),
        (["batch_size=-1"], r"batch_size=-1: use a number above 0"),
        (["gradient_accumulation_steps=0"], r"gradient_accumulation_steps=0: use a number above"),
        (["max_steps_per_epoch=0"], r"max_steps_per_epoch=0: use a number above 0"),
        (["clip_grad_norm=0"], r"clip_grad_norm=0\.0: use a number above 0"),
        (["log_every_n_steps=0"], r"log_every_n_steps=0: use a number above 0"),
        (["run_val_every_n_steps=0"], r"run_val_every_n_steps=0: use a number above 0"),
        (["save_every_n_steps=0"], r"save_every_n_steps=0: use a number above 0"),
        (["keep_last_n_checkpoints=0"], r"keep_last_n_checkpoints=0: use a number above 0"),
        (["val_fraction=1"], r"val_fraction=1\.0: use 0 or more, and less than 1"),
        (["seed=-1"], r"seed=-1: use 0 or more"),
        (["on_nonfinite=ignore"], r"on_nonfinite: stop or skip is needed, not ignore"),
        (
            ["activation_offload_to=disk"],
            r"activation_offload_to=disk has no effect: set enable_activation_offloading=True",
        ),
        (["trainable=layer.1"], r"trainable=layer\.1 matches no parameter: names are like"),
        (["trainable=layers.(1"], r"trainable=layers\.\(1: not a regular expression"),
        (["resident_layers=4"], r"resident_layers=4 streams weights in the layer-major schedule"),
        (["profiler.active=True"], r"profiler: _component_ is not set"),
        (["optimizer=torch.optim.AdmW"], r"torch\.optim has no AdmW; did you mean torch\.optim\."),
        (["optimizer=solotune.losses.LinearCrossEntropy"], r"is no optimizer: name one of sol"),
        (["optimizer.lrr=1"], r"optimizer\.lrr: .* takes no lrr; did you mean optimizer\.lr\?"),
        (["optimizer.lr=fast"], r"optimizer\.lr: a number is needed, not fast"),
        (["optimizer.lr=-1"], r"optimizer\.lr=-1: use 0 or more"),
        (
            ["optimizer.fused=True", "optimizer.foreach=True"],
            r"optimizer: torch\.optim\.AdamW: `fused` and `foreach` cannot be `True` together",
        ),
        (
            ["optimizer=torch.optim.LBFGS"],
            r"optimizer: torch\.optim\.LBFGS: .*(parameter groups|closure)",
        ),
        (
            ["lr_scheduler=torch.optim.lr_scheduler.LinearLR"],
            r"lr_scheduler: .*LinearLR is no schedule: name one of solotune\.training",
        ),
        (
            ["lr_scheduler=solotune.training.cosine", "lr_scheduler.num_warmup_steps=-2"],
            r"lr_scheduler\.num_warmup_steps=-2: use 0 or more",
        ),
        (["loss.chunk_tokens=0"], r"loss\.chunk_tokens=0: use at least 1, or null"),
        (["tokenizer.max_seq_len=1"], r"max_seq_len: 2 or more is needed, not 1"),
        (["tokenizer.path=/nowhere"], r"tokenizer\.path=/nowhere: no such folder; point it at a"),
        (["tokenizer.chat_template=none.jinja"], r"chat_template=none\.jinja: no such file; use"),
        (["resume_from_checkpoint=/nowhere"], r"resume_from_checkpoint=/nowhere does not exist"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "says",
)
def test_a_wrong_key_is_named_with_its_repair(fault, recipe, words: list[str], wanted: str) -> None:
    changes = dict(word.split("=", 1) for word in words)
    if any(key.partition(".")[0] not in read_schema(recipe) for key in changes):
        pytest.skip("a key of another recipe")
    said = fault(**changes)
    assert re.search(wanted, said), said


def test_flags_of_torchrun_and_other_flags_are_usage_errors(fault) -> None:
    said = fault("--nproc_per_node", "2", code=2)
    assert said.startswith("--nproc_per_node is a flag of torchrun: this recipe uses one device")
    assert fault("--lr", "1e-5", code=2).startswith("unrecognized arguments: --lr 1e-5")


def test_debug_shows_the_traceback_above_the_sentence(recipe, models, chats, tmp_path, capsys):
    words = basics(
        models["untied"], chats, recipe=recipe, dataset="gone.jsonl", output_dir=tmp_path / "run"
    )
    assert tune("run", recipe, *words, "--debug") == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert err.splitlines()[-1].startswith("error: dataset.source=gone.jsonl: no such file")


def test_an_output_dir_that_holds_something_is_refused(fault, earlier: Path) -> None:
    assert fault(overwrite=False) == (
        f"output_dir={earlier} is not empty: name another, resume with "
        "resume_from_checkpoint=True, or set overwrite=True"
    )


@pytest.mark.parametrize("place", ["earlier/notes.txt", "earlier/notes.txt/run", "/proc/run"])
def test_an_output_dir_that_cannot_be_written_is_refused(fault, tmp_path: Path, place: str) -> None:
    folder = tmp_path / place
    said = fault(output_dir=folder)
    assert re.search(rf"output_dir={folder} cannot be written \(.*\): name another folder", said), (
        said
    )


def test_resuming_in_no_named_folder_is_refused(recipe, models, chats, capsys) -> None:
    words = basics(models["untied"], chats, recipe=recipe, resume_from_checkpoint=True)
    assert tune("run", recipe, *words) == 1
    assert re.search(r"needs output_dir: name the run's folder", sentence(capsys.readouterr().err))


@pytest.mark.parametrize("part", ["", "final", "step_2"])
def test_a_run_does_not_overwrite_the_model_that_it_starts_from(
    train, recipe, chats, capsys, part: str
) -> None:
    run = train(recipe, max_steps_per_epoch=2).parent
    before = content(run)
    capsys.readouterr()
    words = basics(run / part, chats, recipe=recipe, output_dir=run, overwrite=True)
    assert tune("run", recipe, *words) == 1
    said = sentence(capsys.readouterr().err)
    assert said.startswith(f"checkpoint_dir={run / part} belongs to output_dir={run}")
    assert content(run) == before


def test_overwriting_deletes_the_earlier_run_and_nothing_else(
    recipe, models, chats, earlier: Path
) -> None:
    words = basics(models["untied"], chats, recipe=recipe, output_dir=earlier, overwrite=True)
    assert tune("run", recipe, *words) == 0
    assert not (earlier / "best").exists()
    assert (earlier / "notes.txt").exists()
    left = sorted(path.name for path in earlier.iterdir() if path.is_dir())
    assert left == ["final", "step_3", "step_by_step"]
    assert (earlier / "step_by_step" / "model.safetensors").read_bytes() == b"of the earlier run"
    assert any((earlier / "step_3" / f).exists() for f in ("config.json", "adapter_config.json"))


@pytest.fixture
def saved(train, recipe, capsys) -> Path:
    """The folder of a run of two steps."""
    folder = train(recipe, max_steps_per_epoch=2).parent
    capsys.readouterr()
    return folder


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"batch_size": 2}, r"batches would not be .*1 x 96 .*; now .*2 x 96 .*: resume with the"),
        ({"dataset.max_rows": 5}, r"batches would not be those of the saved run \(dataset, token"),
        ({"dataset.packed": False}, r"batches would not be .* packed .*; now .* unpacked"),
        ({"shuffle": False}, r"batches would not be .* shuffled by seed 42 .*; now .* in order"),
        ({"seed": 7}, r"batches would not be .* seed 42 .*; now .* seed 7"),
        ({"optimizer": "torch.optim.SGD"}, r"saved with optimizer=\S*AdamW, this run has \S*SGD"),
        ({"dtype": "bf16"}, r"embed_tokens\.weight was float32 .*config\.yaml"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "says",
)
def test_resuming_with_other_keys_is_refused(
    recipe, models, chats, saved: Path, capsys, changes: dict[str, Any], wanted: str
) -> None:
    before = content(saved)
    keys = {"output_dir": saved, "resume_from_checkpoint": True, "epochs": 3, **changes}
    assert tune("run", recipe, *basics(models["untied"], chats, recipe=recipe, **keys)) == 1
    said = sentence(capsys.readouterr().err)
    assert re.search(wanted, said), said
    assert content(saved) == before


def without(key: str) -> Callable[[str], str]:
    return lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != key})


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (lambda text: text[:99], r"state\.json is damaged: resume from another step folder"),
        (lambda text: "[]", r"state\.json is damaged: resume from another step folder"),
        (without("progress"), r"state\.json lacks progress: resume from another step folder"),
        (without("format"), r"state\.json has the format None, this version reads 1"),
    ],
)
def test_a_broken_state_is_refused(
    recipe, models, chats, saved: Path, capsys, damage: Callable[[str], str], wanted: str
) -> None:
    path = saved / "step_2" / "training_state" / "state.json"
    path.write_text(damage(path.read_text()))
    before = content(saved)
    words = basics(
        models["untied"], chats, recipe=recipe, output_dir=saved, resume_from_checkpoint=True
    )
    assert tune("run", recipe, *words) == 1
    said = sentence(capsys.readouterr().err)
    assert re.search(wanted, said), said
    assert content(saved) == before


def test_a_complete_run_has_nothing_to_save_elsewhere(
    recipe, models, chats, saved: Path, tmp_path: Path, capsys
) -> None:
    keys = {"resume_from_checkpoint": saved, "max_steps_per_epoch": 2}
    words = basics(models["untied"], chats, recipe=recipe, **keys)
    assert tune("run", recipe, *words, f"output_dir={saved}") == 0
    assert "1 epochs of 2 steps, 2 of them done" in capsys.readouterr().out
    assert tune("run", recipe, *words, f"output_dir={tmp_path / 'elsewhere'}") == 1
    assert re.search(r"is complete; raise epochs to train on", sentence(capsys.readouterr().err))


@pytest.fixture
def nan_model(damaged) -> Path:
    """A model folder with one weight that is NaN."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        tensors["model.layers.0.mlp.up_proj.weight"][3, 3] = math.nan
        save_file(tensors, path, metadata={"format": "pt"})

    return damaged(damage)


def test_a_loss_of_nan_stops_the_run_at_its_step(
    recipe, nan_model: Path, chats, tmp_path, capsys
) -> None:
    output = tmp_path / "run"
    words = basics(nan_model, chats, recipe=recipe, output_dir=output, clip_grad_norm=1.0)
    assert tune("run", recipe, *words) == 1
    said = sentence(capsys.readouterr().err)
    assert said.startswith("step 1: loss is nan and gradient norm is nan; no weight was changed")
    assert said.endswith("lower optimizer.lr, look at the data, or set on_nonfinite=skip")
    assert not list(output.glob("*step_*"))
    assert [row["step"] for row in metrics(output)] == [1]


def test_weights_that_are_not_finite_are_not_saved(
    recipe, nan_model: Path, chats, tmp_path, capsys
) -> None:
    output = tmp_path / "run"
    keys = {"output_dir": output, "on_nonfinite": "skip"}
    assert tune("run", recipe, *basics(nan_model, chats, recipe=recipe, **keys)) == 1
    printed = capsys.readouterr()
    for step in (1, 2, 3):
        assert f"warning: step {step} skipped: loss is nan" in printed.out
    said = sentence(printed.err)
    assert said.startswith("step 3: layers.0.mlp.up_proj.weight holds numbers that are not finite")
    assert not list(output.glob("*step_*"))


def test_skipped_steps_leave_the_weights_as_they_were(
    train, recipe, models, monkeypatch, capsys
) -> None:
    loss = LinearCrossEntropy.forward
    monkeypatch.setattr(LinearCrossEntropy, "forward", lambda *given: loss(*given) * math.nan)
    final = train(recipe, on_nonfinite="skip", max_steps_per_epoch=2, val_fraction=0.2)
    assert "warning: step 2 skipped: loss is nan" in capsys.readouterr().out
    assert differing(models["untied"], final) == []
    assert not (final.parent / "best").exists(), "a validation loss of NaN"


def test_text_longer_than_the_positions_of_the_model_is_told(
    recipe, capsys, damaged, chats, tmp_path
) -> None:
    model = damaged(config(max_position_embeddings=32))
    words = basics(model, chats, recipe=recipe, output_dir=tmp_path / "run", max_steps_per_epoch=1)
    assert tune("run", recipe, *words) == 0
    out = capsys.readouterr().out
    assert re.search(r"warning: \d+ tokens in a row, 32 positions known to the model", out)
