# make demo     trains and evaluates the quickstart on the bundled data
# make test     a representative of every kind of test: 25 minutes on two slow cores;  make test-all  every test
#               (ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 make test: as on a processor without fp16)
# make test-gpu what one GPU alone can show; after 8 minutes no test is started; REHEARSE=1: the same on the CPU
#               (docs/gpu.md); RANKS=2 (or 4): what needs several ranks, which share a GPU if there are fewer GPUs;
#               NCCL=FILE: with the libnccl.so.2 in FILE instead of torch's
# make check    lint, format and types
# make wheel    builds sdist and wheel into dist/ and tries the wheel (tools/make/wheel.py)
# make bench-gpu  losses, training steps, GradAccum, memory and data on one GPU, beside open_clip and the published losses,
#                 as tables (docs/gpu.md); BUDGET=540 ends it within that many seconds, and the next call goes on;
#                 ONLY='"step: *" "peak: *"' takes some; REHEARSE=1: every slice at tiny shapes, on the CPU too
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
INSTALLED := $(STAMP)
# make test-gpu ENV=/opt/conda: in the environment of /opt/conda/bin/python; nothing is installed
ifdef ENV
BIN := $(ENV)/bin
INSTALLED :=
endif

.PHONY: demo test test-all test-gpu check wheel bench-gpu
.NOTPARALLEL:

$(STAMP): setup.py
	@command -v $(PYTHON) >/dev/null || { echo "python3 (3.11 or newer, with venv) is missing: install it, or say make PYTHON=..."; exit 1; }
	$(PYTHON) -c 'import sys; sys.exit("disco_ds needs Python 3.11 or newer; say make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing torch, DeepSpeed, open_clip and their dependencies into $(VENV), 6.4 GB: takes two to five minutes"
	@# Without --no-compile, pip would compile all 15,000 modules; Python compiles those that are imported.
	@$(BIN)/python -m pip install --quiet --no-compile --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m tools.make.demo

test: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not slow and not gpu" --durations=15

test-all: $(STAMP)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m "not gpu" --durations=30

test-gpu: $(INSTALLED)
	$(if $(NCCL),LD_PRELOAD=$(NCCL)) $(if $(RANKS),DISCO_DS_TEST_RANKS=$(RANKS)) DISCO_DS_TEST_DEVICE=$(if $(REHEARSE),cpu,cuda) \
		$(BIN)/python -m pytest tests/test_gpu$(if $(RANKS),_ranks).py -v -rsP --durations=10 --session-timeout=480

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

wheel: $(STAMP)
	$(BIN)/python -m tools.make.wheel

bench-gpu: $(INSTALLED)
	$(BIN)/python -m tools.bench.gpu $(if $(BUDGET),--budget $(BUDGET)) $(if $(ONLY),--only $(ONLY)) $(if $(REHEARSE),--rehearse)
