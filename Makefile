# `make help` lists what there is. Needs Linux, Python 3.11 to 3.13, make and git.
PYTHON ?= python3
CONFIG ?=
MUTANTS ?=
RUN ?=
PLATFORM ?= nvidia-h200
SYSTEM_TORCH ?=
SITE_URL ?=

# The rules and the tests find the environment's programs by name.
export PATH := $(CURDIR)/.venv/bin:$(PATH)

# Tools keep their caches below HOME: lend them a folder where there is none to write to.
ifneq ($(shell test -w "$$HOME" && echo writable),writable)
export HOME := $(CURDIR)/.cache/home
$(shell mkdir -p "$(HOME)")
endif

# Where compiled modules may not be kept, each of hundreds of short processes compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE

EXPORT := --frozen --no-hashes --no-emit-workspace --no-annotate --no-header --quiet

.DEFAULT_GOAL := help
.PHONY: help install asked report test slow lanes timing test-all outside campaigns faults mutants recipes figures site hub pictures vendor lint lock clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 16

INSTALL := bash workflow/scripts/install.sh $(if $(SYSTEM_TORCH),--system-torch) $(PYTHON)

install: .venv/.installed ## create .venv with the pinned dependencies (PYTHON=python3.12 picks the Python)

# All of it, which is what the report needs and more.
.venv/.installed: pyproject.toml src/moe_routing_kernels/pyproject.toml constraints.txt
	@$(INSTALL)
	@touch .venv/.report $@

# Before minutes are spent on the environment.
asked:
	@for file in $(CONFIG); do \
	  [ -f "$$file" ] || { echo "error: CONFIG: got '$$file'; allowed: a config, such as config/layers.yaml" >&2; exit 2; }; \
	done

# Without the tests, the linters and, where there is no GPU, compilers for GPUs: half the size.
.venv/.report: pyproject.toml src/moe_routing_kernels/pyproject.toml constraints.txt
	@$(INSTALL) --report
	@touch $@

report: asked .venv/.report ## measure what changed, draw and report (CONFIG=config/h200.yaml on an H200; RUN=name keeps it apart; SYSTEM_TORCH=1 takes the torch of PYTHON)
	.venv/bin/snakemake --cores 1 --resources gpu=1 $(if $(CONFIG),--configfile $(CONFIG)) $(if $(RUN),--config 'run=$(RUN)')

# Two workers for each core: a third of the time they wait for processes and deadlines. A lost worker fails its test, and is not replaced.
WORKERS := --numprocesses $$((2 * $$(env -u OMP_NUM_THREADS nproc))) --maxprocesses 16 --max-worker-restart 0 --dist loadfile

test: .venv/.installed ## run the tests of behaviour (those that need a GPU are skipped where there is none)
	.venv/bin/pytest -q -m 'not slow' $(WORKERS) --no-loadscope-reorder

# `make faults` has the faults of long workflow runs.
APART := --ignore tests/timing --ignore tests/outside --ignore tests/faults/test_workflow_faults.py

slow: .venv/.installed ## run the tests that `make test` leaves out: compilers, browsers, documents, stored rows, long workflow runs, times
	.venv/bin/pytest -q -m 'slow and not campaign' $(APART) $(WORKERS) --no-loadscope-reorder
	$(MAKE) timing

lanes: .venv/.installed ## run the tests of `make test` and of `make slow` as one, which collects once and has one end
	.venv/bin/pytest -q -m 'not campaign' $(APART) $(WORKERS) --no-loadscope-reorder
	$(MAKE) timing

# With nothing else at work.
timing: .venv/.installed ## run the tests of times
	.venv/bin/pytest -q -m 'not campaign' tests/timing

# The lanes have a sample of each kind, with its boundaries.
campaigns: .venv/.installed ## run what exhausts a kind of tests, before a release: all cases of products, walks over all published runs, thousands of drawn inputs
	.venv/bin/pytest -q -m campaign --timeout 1200 --ignore tests/timing $(WORKERS) --no-loadscope-reorder
	.venv/bin/pytest -q -m campaign tests/timing
	CONFIGS=10000 COMMANDS=2000 FILES=2000 OPERATOR_CASES=10000 GATE_CASES=2000 .venv/bin/pytest -q --timeout 0 $(WORKERS) \
	  tests/unit/test_fuzz_config.py tests/unit/test_fuzz_commands.py tests/faults/test_fuzz_files.py tests/ops/test_drawn_operators.py tests/ops/test_gate_limits.py

test-all: lanes outside campaigns faults ## run all tests: both lanes, those outside, campaigns and faults

outside: .venv/.installed ## test a wheel in an empty folder, the workflow as a module, conda's environment, the container's definition, a grid through SLURM
	.venv/bin/pytest -q -m 'not campaign' tests/outside $(WORKERS)

faults: .venv/.installed ## inject faults and count them: kinds, and what became of them
	.venv/bin/pytest -q -m fault

# Takes hours for all modules; MUTANTS="moe_routing_bench.statistics*" picks some.
mutants: .venv/.installed ## how many small changes of the code no test would notice (MUTANTS=pattern picks some)
	.venv/bin/pip install --quiet --constraint constraints.txt mutmut
	OMP_NUM_THREADS=1 .venv/bin/mutmut run $(if $(MUTANTS),'$(MUTANTS)') >mutants.log
	.venv/bin/python tests/mutants.py

recipes: .venv/.installed ## run the tests of behaviour in a copy where every recipe of docs/extending.md was followed
	rm -rf .cache/recipes && mkdir -p .cache/recipes
	PYTHONPATH=src:tests .venv/bin/python tests/recipes/followed.py .cache/recipes
	cd .cache/recipes && PYTHONPATH=$$PWD/src .venv/bin/pytest -q -m 'not slow' $(WORKERS) --no-loadscope-reorder

figures: .venv/.report ## draw figures and report again from published measurements (PLATFORM=nvidia-h200)
	.venv/bin/moe-routing-bench figure --platform $(PLATFORM)
	.venv/bin/moe-routing-bench report --platform $(PLATFORM)

site: .venv/.report ## build a page per GPU and the reports of all published runs in site/ (4 to 8 minutes; SITE_URL=address for the feed and previews)
	.venv/bin/moe-routing-bench site --rebuild $(if $(SITE_URL),--url '$(SITE_URL)')

PICTURES := nvidia-h200/bandwidth

hub: ## write the kernels in the layout of Hugging Face's package `kernels` to dist/hub (standard library only)
	$(PYTHON) workflow/scripts/huggingface.py dist/hub

pictures: .venv/.report ## draw the pictures of the documents again
	@for one in $(PICTURES); do \
	  .venv/bin/moe-routing-bench figure --platform $${one%/*} --name $${one#*/} && \
	  cp reports/$${one%/*}/figures/$${one#*/}.png docs/img/ || exit; \
	done
	.venv/bin/python docs/img/layers.py

vendor: ## bundle the charting library of the report again, with its licences (needs npm)
	cd src/moe_routing_bench/report/vendor && npm ci --ignore-scripts && npm rebuild esbuild && npm run build && rm -rf node_modules

lint: .venv/.installed ## check style, workflow, types and words (as the pre-commit hooks do)
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/snakefmt --check Snakefile workflow
	.venv/bin/snakemake --lint
	.venv/bin/pyright
	.venv/bin/python docs/words.py

lock: .venv/.installed ## resolve pyproject.toml again: uv.lock, then constraints.txt and the pins of environment.yml
	.venv/bin/uv lock
	.venv/bin/uv export $(EXPORT) --all-extras -o constraints.txt
	sed -i '/^      - /d' environment.yml
	.venv/bin/uv export $(EXPORT) --extra gpu --extra peers | sed 's/.*/      - "&"/' >>environment.yml

clean: ## remove the CPU results, its report and all caches (keeps .venv and other platforms' results)
	rm -rf results/cpu reports/cpu .snakemake .cache .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
