# Everything sets itself up: `make train` and `make test` need python >= 3.11, make and pip, nothing else.
# Another interpreter: make PYTHON=python3.12 test.   More for the quick start: make train ARGS="--train-iters 500"
# With the packages of an interpreter, as in a container with a torch of its own: make gpu-check PYTHON=python3 VENV=
# Without a package registry: make wheelhouse where there is one, then make install WHEELHOUSE=wheelhouse.
# WITHOUT=torch: the torch of PYTHON is used, and neither downloaded nor installed.

PYTHON ?= python3
VENV ?= .venv
WHEELHOUSE ?=
WITHOUT ?=
ifeq ($(VENV),)
RUN := $(PYTHON)
READY :=
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
else
RUN := $(VENV)/bin/python
READY := $(VENV)/.installed
endif
# A terminal shows what is downloaded; a log gets no progress bars.
QUIET := $(shell test -t 2 || echo --quiet)
PINS := $(if $(WITHOUT),build/constraints.txt,constraints.txt)
INSTALL = $(RUN) -m pip install $(QUIET) --disable-pip-version-check --constraint $(PINS) \
    $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE))

# that of torch 2.11: kernels have to compile with it too
OLDER_TRITON := triton==3.6.0

# Sleeping, not spinning, OpenMP threads: with more threads than free cores a spinning step takes 2 to 20 times as long.
export OMP_WAIT_POLICY := PASSIVE

.DEFAULT_GOAL := help
.PHONY: help install wheelhouse peers kernels train test pairs layouts mutants check format bench bench-plan dry-run prove gpu-check docs build clean

help: ## show what there is to make
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(READY) ## create .venv and install everything, once

wheelhouse: ## wheels of constraints.txt into wheelhouse/, or WHEELHOUSE, for machines without a package registry
	@$(pins)
	$(PYTHON) -m pip wheel $(QUIET) --disable-pip-version-check --constraint $(PINS) \
	    --wheel-dir $(or $(WHEELHOUSE),wheelhouse) $$($(PYTHON) scripts/requirements $(WITHOUT)) $(ARGS)

peers: $(READY) ## lm-eval, megatron-core and two versions of Triton, for tests that are skipped without them
	$(INSTALL) --no-build-isolation --editable '.[dev,peers]'
	$(if $(VENV),test -d $(VENV)/triton-3.6/triton || $(RUN) -m pip install $(QUIET) --disable-pip-version-check --no-deps \
	    $(if $(WHEELHOUSE),--no-index --find-links $(WHEELHOUSE)) --target $(VENV)/triton-3.6 $(OLDER_TRITON))

kernels: $(READY) ## compile every Triton kernel for every card, with both versions of Triton (minutes)
	$(RUN) -m pytest -n 2 --dist loadgroup --timeout 3600 -m all_kernels tests/kernels/test_triton_compile.py $(ARGS)

train: $(READY) ## quick start: train a small GPT on the Python standard library, two processes
	$(RUN) -m nanotrain train --nproc-per-node 2 +config=tiny $(ARGS)

# One worker per core, at most four: most tests of layouts start several processes of their own.
WORKERS = $$($(RUN) -c "import os; print(min(4, len(os.sched_getaffinity(0))))")

test: $(READY) ## the whole test suite
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

pairs: $(READY) ## law tests of every pair of settings, of which the suite has 16 % (minutes)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) -m all_pairs tests/laws/test_every_pair.py $(ARGS)

LAYOUTS := tests/laws tests/interop

layouts: $(READY) ## rows of the laws that the suite leaves out: more layouts, kinds of layers and models (minutes)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(WORKERS) --dist loadfile -m more_layouts $(LAYOUTS) $(ARGS)

mutants: $(READY) ## plant known bugs one by one and list the tests that see them (an hour); ARGS="optim" for one package
	$(RUN) scripts/mutants $(ARGS)

check: $(READY) ## lint, format, types, floors and sizes
	scripts/check

format: $(READY) ## write the code as ruff would
	$(RUN) -m ruff check --fix-only --quiet . && $(RUN) -m ruff format .

bench: $(READY) ## memory against the table, throughput beside plain torch (minutes)
	$(RUN) benchmarks/memory.py && $(RUN) benchmarks/throughput.py $(ARGS)

bench-plan: $(READY) ## errors of the planner on published measurements; ARGS=FILE.tsv for another table
	$(RUN) benchmarks/plan.py $(ARGS)

dry-run: $(READY) ## the step of the largest recipes on 2,048 and 16,384 ranks, without a GPU (minutes)
	$(RUN) -m nanotrain dry-run +config=deepseek_v3 --world-size 2048
	$(RUN) -m nanotrain dry-run +config=llama70b --world-size 16384 --tensor-model-parallel-size 8 --sequence-parallel \
	    --pipeline-model-parallel-size 8 --global-batch-size 2048

prove: $(READY) ## 2,000 random layouts of all recipes and families by types of tensors, and planted bugs (minutes)
	OMP_NUM_THREADS=1 $(RUN) scripts/prove layouts $(ARGS)
	OMP_NUM_THREADS=1 $(RUN) scripts/prove bugs

gpu-check: $(READY) ## four checks of a GPU machine, ten minutes each; ARGS=kernels, headline, recipes or fp8 for one; code 2 without a GPU
	@$(RUN) scripts/gpu_check $(ARGS)

docs: $(READY) ## write docs/config.md and docs/families.md from their tables, and the pages as a site in site/
	$(RUN) -m scripts.config_page docs/config.md
	$(RUN) -m scripts.families_page docs/families.md
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --quiet --strict && echo "site/index.html"

build: $(READY) ## a wheel and a source archive in dist/
	$(RUN) -m hatchling build

clean: ## remove what was built, keep .venv and runs/
	rm -rf build dist site .pytest_cache .ruff_cache .mypy_cache .hypothesis && find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# What is left out of the pins must not be asked for by them.
define pins
mkdir -p build && grep -vE '^($(or $(WITHOUT),-)|triton)==' constraints.txt > build/constraints.txt
endef

# Debian's python3 can come without ensurepip; then the outer pip fills the new environment.
ifneq ($(VENV),)
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("nanotrain needs Python 3.11 or newer and $(PYTHON) is " + sys.version.split()[0] + "; name another: make PYTHON=python3.12 ...")'
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(if $(WITHOUT),--system-site-packages) $(VENV) 2>/dev/null || { $(PYTHON) -m venv --clear --without-pip $(if $(WITHOUT),--system-site-packages) $(VENV) && $(PYTHON) -m pip --python $(RUN) install --quiet pip; }
	@$(pins)
	@echo "installing into $(VENV) (once; some minutes)"
	$(INSTALL) $$(grep -E '^(torch|hatchling|editables)==' $(PINS))
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@
endif
