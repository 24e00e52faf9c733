# make demo    a serving cluster on this machine, real prompts through gRPC, then a clean stop
# make serve   the same cluster, left running (stop it with: .venv/bin/weft stop)
# make test    everything that this machine can test
# make sanitize  the tests of the compiled CPU kernels, with these watched for what C++ does not define; needs GCC
#
# TORCH chooses the build of torch, PYTHON the interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
TORCH ?= torch==2.13.0
ifeq ($(origin TORCH),file)
  # of the Tritons that pyproject.toml allows, that of this torch: only its builds for GPUs bring it along
  TRITON := "triton==3.7.1; sys_platform == 'linux'"
endif
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check --quiet

# Tests start hundreds of processes: each would compile all of Weft's modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve test sanitize lint format proto clean

demo: $(VENV)/.runtime
	@$(BIN)/weft demo

serve: $(VENV)/.runtime
	@$(BIN)/weft serve --tensor-parallel 2 --replicas 2 --detach

# a worker that dies ends the run: with another in its place this scheduler waits for ever
WORKERS := -n 2 --dist loadfile --max-worker-restart 0

test: lint
	@deploy/prometheus/fetch.sh
	@$(BIN)/python -m pytest $(WORKERS) tests/unit tests/property tests/deploy tests/distributed
	@$(BIN)/python -m pytest tests/gpu
	@$(BIN)/python -m pytest $(WORKERS) tests/e2e

SANITIZED := $(addprefix tests/unit/parallel/test_,native_kernels.py native_experts.py sampling_kernels.py int8_linear.py int8_cache.py \
  compiled_layers.py kernels_cpu.py rank_sums.py)

sanitize: $(VENV)/.dev
	@LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libubsan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  $(BIN)/python -m pytest --sanitize -p no:cacheprovider -k 'not (table and (40 or 150)) and not library_is_compiled' $(SANITIZED)

lint: $(VENV)/.dev
	@if command -v npm >/dev/null; then npm install --ignore-scripts --no-audit --no-fund --no-package-lock --silent; fi
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/lint-imports
	@$(BIN)/mypy

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

proto: $(VENV)/.dev
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python proto/generate.py

# torch comes first and pinned: a range would let pip choose a build for another machine.
$(VENV)/.runtime: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(f"Weft needs Python 3.11 or newer; this is {sys.version.split()[0]}") if sys.version_info < (3, 11) else None'
	@echo "Building $(VENV) (some minutes the first time) ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "$(TORCH)"
	@$(PIP) install --editable .
	@touch $@

# Of thousands of modules few are imported: those are compiled then.
$(VENV)/.dev: $(VENV)/.runtime
	@$(PIP) install --no-compile --editable ".[dev]" $(TRITON)
	@touch $@

clean:
	rm -rf $(VENV) node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
