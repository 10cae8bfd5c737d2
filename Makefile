# Everything is set up in .venv inside this checkout. `make help` lists what there is.

PYTHON ?= python3

BIN     := .venv/bin
PIP     := $(BIN)/python -m pip --disable-pip-version-check
FOLDERS := native/src native/include native/patches pyh2o cli
SOURCES := pyproject.toml CMakeLists.txt $(wildcard native/*.*) $(shell find $(FOLDERS) -not -path '*/__pycache__*')
FETCH   := @echo "==> demo model SmolLM2-135M-Instruct (98 MB, only the first time)" && $(BIN)/pyh2o models fetch
# A worker whose test ends it is replaced: seconds for each, in which the new one collects all tests.
PYTEST  := $(BIN)/pytest --numprocesses auto --maxprocesses 8 --dist worksteal --max-worker-restart 200
NATIVE  := find native/src native/include tests/native tests/faults tests/fuzz \
    -name '*.c' -o -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh'

# of each property: make properties EXAMPLES=10000 for a night
EXAMPLES     ?= 1000
# How often each program is killed: make crash KILLS=1000 for a night
KILLS        ?= 25
# of each target, and which: make fuzz FUZZ_SECONDS=36000 for a night
FUZZ_SECONDS ?= 60
FUZZ_TARGETS ?=
# of the server under load: make soak MINUTES=600 for a night
MINUTES      ?= 5
# address (with undefined behaviour) or thread
SANITIZER    ?= address

# matplotlib would make a folder in the user's settings
export MPLCONFIGDIR ?= $(CURDIR)/build/matplotlib

.PHONY: help story page build test explore properties lint format crash fuzz sanitize vulkan soak arm wheel audit clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

story: build ## tell a story with the demo model; sets everything up first
	$(FETCH)
	$(BIN)/pyh2o generate --hh 96 --recent 96 --seed 7 --max-tokens 1000 \
	    --prompt "Once upon a time, in a town by the sea,"

page: build ## chat with the demo model in the browser; sets everything up first
	$(FETCH)
	$(BIN)/pyh2o chat --web

build: .venv/built ## install pyh2o into .venv; compiles only what changed

test: lint ## all checks and all tests
	$(FETCH)
	@echo "==> tests"
	$(PYTEST)

explore: .venv/tested ## the randomised tests with other random numbers (make test: always the same)
	PYH2O_TEST_SEED=random $(PYTEST) -m randomised

properties: .venv/tested ## tries to break what must hold, EXAMPLES=1000 times each, or 10000 for a night
	PYH2O_TEST_SEED=random PYH2O_EXAMPLES=$(EXAMPLES) $(PYTEST) tests/properties

lint: .venv/tested ## style and types
	@echo "==> style and types"
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(NATIVE) | xargs $(BIN)/clang-format --dry-run -Werror
	$(BIN)/python scripts/generate_reference.py --check

format: .venv/tested ## rewrite the sources in the project's style, and what is written from them
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format
	$(NATIVE) | xargs $(BIN)/clang-format -i
	$(BIN)/python scripts/generate_reference.py

crash: .venv/tested ## kill programs, fail allocations, damage model files (KILLS=25)
	$(BIN)/python tests/faults/kills.py --kills $(KILLS)
	$(BIN)/python tests/faults/allocations.py --kinds
	$(BIN)/python tests/faults/gguf_headers.py --files $$((40 * $(KILLS)))

fuzz: .venv/tested ## change saved states and archives at random, FUZZ_SECONDS=60 each; needs clang
	$(BIN)/python scripts/fuzz.py --seconds $(FUZZ_SECONDS) $(FUZZ_TARGETS)

sanitize: .venv/tested ## tests of native code under SANITIZER=address or thread; needs clang
	$(BIN)/python scripts/sanitize.py $(SANITIZER)

arm: .venv/tested ## compile for 64-bit ARM and run tests there, emulated, on Debian for another processor
	$(BIN)/python scripts/arm_check.py

wheel: .venv/tested ## a wheel for other machines, in dist, tried without a compiler
	$(BIN)/python scripts/wheel_check.py

vulkan: .venv/tested ## build with Vulkan, and run on it the tests of a device: a GPU, or Mesa's for the CPU
	$(FETCH)
	$(BIN)/python scripts/vulkan_check.py

soak: .venv/tested ## a server and 100 clients: answers right, memory flat (MINUTES=5)
	$(BIN)/python tests/soak/many_clients.py --minutes $(MINUTES)

audit: .venv/audited ## ask a public database for known holes in all packages of .venv
	$(BIN)/pip-audit --local --vulnerability-service osv --desc off --progress-spinner off

clean: ## remove .venv and everything that was built
	rm -rf .venv build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache

# --- the environment; these files are time stamps of when a step began, so no edit during it is missed ---

.venv/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "pyh2o needs Python 3.10 or newer: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	    { echo "$(PYTHON) cannot make virtual environments: apt install python3-venv (or make PYTHON=...)" >&2; exit 1; }
	@echo "==> virtual environment .venv"
	$(PYTHON) -m venv .venv
	$(PIP) install --quiet --upgrade pip
	@touch $@

.venv/llama_cpp: .venv/pip requirements.txt
	@echo "==> llama-cpp-python, without its llama.cpp (77 MB)"
	$(PIP) install --quiet --no-deps --no-cache-dir --requirement requirements.txt
	@touch $@

BUILD_NOTE := the first time it downloads 77 MB and compiles for minutes, later for seconds

.venv/built: .venv/llama_cpp $(SOURCES)
	@echo "==> pyh2o ($(BUILD_NOTE))"
	@touch $@.begun
	$(PIP) install --quiet '.[server]'
	@mv $@.begun $@

.venv/tested: .venv/llama_cpp $(SOURCES)
	@echo "==> pyh2o and the tools for its tests ($(BUILD_NOTE))"
	@touch $@.begun
	$(PIP) install --quiet '.[test,dev,integrations]'
	@mv $@.begun $@
	@touch -r $@ .venv/built

.venv/audited: .venv/tested
	@echo "==> pip-audit"
	$(PIP) install --quiet '.[audit]'
	@touch $@
