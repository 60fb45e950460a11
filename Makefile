# Two commands on a fresh machine with Python 3.11+: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DEMO   := configs/demo.yaml
# Two workers keep two cores busy for nine tenths of the time, and another one would spend a minute on imports.
PYTEST_WORKERS ?= 2
# A file's tests stay with one worker: others would build its models and fill its caches again.
PYTEST = $(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist loadfile
UV := uv==0.13.9

# Folder of the Dagster instance, as in `latentline run`.
INSTANCE := $(or $(DAGSTER_HOME),$(CURDIR)/.dagster)

export PYTHONUTF8 := 1
export DO_NOT_TRACK := 1

.PHONY: help demo test test-full mutants check bench bench-compare ui format clean install install-dev lock

help:
	@echo "make demo    install, teach a tiny model a new shape on the CPU, with given captions and with a model's, and show the pictures"
	@echo "make install install what a user needs; make install-dev adds the tools for tests and checks"
	@echo "make test    run the test suite without slow tests and clusters; make test-full runs all tests"
	@echo "make mutants change the code in SAMPLE places at random, and list changes that no test notices; SINCE=main limits it to changed files"
	@echo "make check   check format, lint, types and import layers"
	@echo "make bench   compare Latentline with the machine's limits, in minutes; BENCH=full uses the published sizes"
	@echo "make bench-compare   run the benchmarks, and list what is slower than the newest run in bench/results"
	@echo "make ui      open the Dagster UI on http://127.0.0.1:3000, the pages of the recipes, and TensorBoard on port 6006"
	@echo "make format  format the sources and fix lint errors"
	@echo "make lock    write the hashes of the versions in constraints.txt to requirements.lock"
	@echo "make clean   remove the cache, the files of the demo, and temporary instances of killed commands"

# What developers have includes what users need.
install: $(if $(wildcard $(VENV)/installed-dev),install-dev,$(VENV)/installed)

install-dev: $(VENV)/installed-dev

# The extras of pyproject.toml that are no tools of developers.
USER_EXTRAS := demo,dg,gpu,heif,k8s,postgres,ray,s3,tagger

PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

# Install torch first with its exact pin; otherwise a dependency could select another build. Its builds differ by
# machine, so it has no hash. The locked packages include all that torch and the project need, also to build, except
# for the libraries of torch's CUDA builds, which the last line of pip adds.
define INSTALL_LOCKED
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --no-compile --no-deps "$$(grep '^torch==' constraints.txt)"
	$(PIP) --no-compile --no-deps --only-binary :all: --require-hashes -r requirements.lock
endef

# On all cores; pip would compile one file after the other. Packages have a few files for other versions of Python.
COMPILE_ALL = $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# Create Dagster's database last: if two commands created it at the same time, it would become unreadable.
CREATE_INSTANCE = DAGSTER_HOME="$(INSTANCE)" $(BIN)/dagster instance info > /dev/null

# requirements.lock includes the tools of developers, which are removed again, as in deploy/Dockerfile.
$(VENV)/installed: pyproject.toml constraints.txt requirements.lock
	$(INSTALL_LOCKED)
	$(PIP) --no-build-isolation -c constraints.txt -e '.[$(USER_EXTRAS)]'
	$(BIN)/python tools/unneeded_packages.py $(USER_EXTRAS) > $(VENV)/unneeded.txt
	test ! -s $(VENV)/unneeded.txt || $(BIN)/python -m pip uninstall --quiet --yes -r $(VENV)/unneeded.txt
	$(COMPILE_ALL)
	$(CREATE_INSTANCE)
	touch $@

$(VENV)/installed-dev: pyproject.toml constraints.txt requirements.lock
	$(INSTALL_LOCKED)
	$(PIP) --no-build-isolation -c constraints.txt -e '.[demo,dev]'
	$(COMPILE_ALL)
	$(CREATE_INSTANCE)
	touch $@

demo: install
	$(BIN)/python -m demo.concept_pictures data/demo
	$(BIN)/python -m demo.concept_pictures data/demo_captions --without-captions
	$(BIN)/latentline run demo demo_captions
	DAGSTER_HOME="$(INSTANCE)" $(BIN)/python -m demo.checks demo demo_captions

test: install-dev
	$(PYTEST) -m 'not slow and not clusters'

test-full: install-dev
	$(PYTEST)

SAMPLE ?= 50
SEED   ?= 0

mutants: install-dev
	$(PIP) --no-build-isolation -c constraints.txt -c tools/mutants/constraints.txt -e '.[mutants]'
	$(BIN)/python -m tools.mutants --sample $(SAMPLE) --seed $(SEED) --workers $(PYTEST_WORKERS) $(if $(SINCE),--since $(SINCE))

check: install-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/basedpyright
	$(BIN)/lint-imports

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The hashes of all files of each version in constraints.txt, for every platform.
lock:
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install --quiet --disable-pip-version-check $(UV)
	grep -v '^torch==' constraints.txt > build/lock/constraints.txt
	build/lock/bin/uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header --no-config \
		--python-version 3.11 --upgrade --output-file requirements.lock build/lock/constraints.txt

bench: install-dev
	$(BIN)/python -m bench $(if $(filter full,$(BENCH)),--full)

# JSON of the run to compare with: the newest local run, or the published one if there is none.
BENCH_BEFORE ?= $(firstword $(shell ls -t bench/results/2*.json 2>/dev/null) bench/results/cpu.json)

bench-compare: install-dev
	$(BIN)/python -m bench $(if $(filter full,$(BENCH)),--full) --compare $(BENCH_BEFORE)

ui: install
	DAGSTER_HOME="$(INSTANCE)" $(BIN)/python -m tools.ui

clean:
	rm -rf .cache data/demo data/demo_captions outputs/demo outputs/demo_captions .tmp_dagster_home_*
