# Everything sets itself up: `make train` and `make test` need python >= 3.11, make and pip, nothing else.
# Another interpreter: make PYTHON=python3.12 test.   More for the quick start: make train ARGS="--train-iters 500"

PYTHON ?= python3
BIN := .venv/bin
# A terminal shows what is downloaded; a log gets no progress bars.
QUIET := $(shell test -t 2 || echo --quiet)
INSTALL := $(BIN)/python -m pip install $(QUIET) --disable-pip-version-check --constraint constraints.txt

# Sleeping, not spinning, OpenMP threads: with more threads than free cores a spinning step takes 2 to 20 times as long.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install peers train test pairs mutants check format bench bench-plan dry-run gpu-check docs build clean

help: ## show what there is to make
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: .venv/.installed ## create .venv and install everything, once

peers: .venv/.installed ## lm-eval, megatron-core and Triton too, for tests that are skipped without them
	$(INSTALL) --no-build-isolation --editable '.[dev,peers]'

train: .venv/.installed ## quick start: train a small GPT on the Python standard library, two processes
	$(BIN)/nanotrain train --nproc-per-node 2 +config=tiny $(ARGS)

# One worker per core, at most four: most tests of layouts start several processes of their own.
WORKERS = $$($(BIN)/python -c "import os; print(min(4, len(os.sched_getaffinity(0))))")

test: .venv/.installed ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

pairs: .venv/.installed ## law tests of every pair of settings, of which the suite has 16 % (minutes)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m all_pairs tests/laws/test_every_pair.py $(ARGS)

mutants: .venv/.installed ## plant known bugs one by one and list the tests that see them (an hour); ARGS="optim" for one package
	$(BIN)/python scripts/mutants $(ARGS)

check: .venv/.installed ## lint, format, types, floors and sizes
	scripts/check

format: .venv/.installed ## write the code as ruff would
	$(BIN)/ruff check --fix-only --quiet . && $(BIN)/ruff format .

bench: .venv/.installed ## memory against the table, throughput beside plain torch (minutes)
	$(BIN)/python benchmarks/memory.py && $(BIN)/python benchmarks/throughput.py $(ARGS)

bench-plan: .venv/.installed ## errors of the planner on published measurements; ARGS=FILE.tsv for another table
	$(BIN)/python benchmarks/plan.py $(ARGS)

dry-run: .venv/.installed ## the step of the largest recipes on 2,048 and 16,384 ranks, without a GPU (minutes)
	$(BIN)/nanotrain dry-run +config=deepseek_v3 --world-size 2048
	$(BIN)/nanotrain dry-run +config=llama70b --world-size 16384 --tensor-model-parallel-size 8 --sequence-parallel \
	    --pipeline-model-parallel-size 8 --global-batch-size 2048

# The tests have 5 minutes; the benchmark also runs where one fails, and ends before a job queue's limit of 10 minutes.
gpu-check: .venv/.installed ## the tests marked gpu, then what fits of the GPU benchmark in 10 minutes; code 2 without a GPU
	@start=$$(date +%s); timeout --foreground -s INT -k 20 300 $(BIN)/python -m pytest -m gpu --durations 5; tested=$$?; \
	$(BIN)/python benchmarks/gpu.py --rounds 1 --minutes $$(( (585 - $$(date +%s) + start) / 60 )) $(ARGS); measured=$$?; \
	exit $$(( measured ? measured : tested ))

docs: .venv/.installed ## write docs/config.md from the configuration's fields, and the pages as a site in site/
	$(BIN)/python -m scripts.config_page docs/config.md
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict && echo "site/index.html"

build: .venv/.installed ## a wheel and a source archive in dist/
	$(BIN)/python -m hatchling build

clean: ## remove what was built, keep .venv and runs/
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# Debian's python3 can come without ensurepip; then the outer pip fills the new environment.
.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanotrain needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip .venv && $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@echo "installing into .venv (once; some minutes)"
	$(INSTALL) $$(grep -E '^(torch|hatchling|editables)==' constraints.txt)
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@
