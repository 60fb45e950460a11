# Two commands on a fresh machine with Python 3.11+: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := configs/demo.yaml
PYTEST_WORKERS ?= 2

export PYTHONUTF8 := 1
export DO_NOT_TRACK := 1

.PHONY: help demo test test-full check bench bench-compare ui format clean install

help:
	@echo "make demo    install, make the offline model and photographs, run the whole job demo_train on the CPU"
	@echo "make test    the test suite; make test-full adds the full versions of its long tests"
	@echo "make check   format, lint, types, import layers"
	@echo "make bench   ours against what the machine can do, in minutes; make bench BENCH=full for the quoted sizes"
	@echo "make bench-compare   the same, beside the newest run in bench/results; says what got slower"
	@echo "make ui      the Dagster UI on http://127.0.0.1:3000"
	@echo "make format  rewrite the sources in the project's format"

install: $(VENV)/installed

# torch first and by its exact pin, so that no other package chooses a build of it.
# Dagster's history last: two commands that make it at the same moment leave one that no command can read.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	DAGSTER_HOME="$(CURDIR)/.dagster" $(BIN)/dagster instance info > /dev/null
	touch $@

demo: install
	$(BIN)/python -m demo.photographs data/demo
	$(BIN)/python -m demo.tiny_model models/tiny-sd
	$(BIN)/dagster job execute -m assets.definitions -j demo_train
	$(BIN)/python -m demo.show models/tiny-sd outputs/demo/lora outputs/demo

test: install
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) -m 'not slow'

test-full: install
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS)

check: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: install
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: install
	$(BIN)/python -m bench $(if $(filter full,$(BENCH)),--full)

# BENCH_BEFORE names the JSON of the run to compare with: the newest that was made here, or else the project's.
BENCH_BEFORE ?= $(firstword $(shell ls -t bench/results/2*.json 2>/dev/null) bench/results/cpu.json)

bench-compare: install
	$(BIN)/python -m bench $(if $(filter full,$(BENCH)),--full) --compare $(BENCH_BEFORE)

ui: install
	DAGSTER_HOME="$(CURDIR)/.dagster" $(BIN)/dagster dev -w workspace.yaml --host 127.0.0.1 --port 3000

clean:
	rm -rf .cache data/demo models/tiny-sd outputs/demo
