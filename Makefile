# `make test` and `make demo` work from a bare clone: they need Python >= 3.11 (with venv) and make.
# PYTHON=/path/to/python3.12 chooses another interpreter for the environment.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; \
	done)
BIN := .venv/bin
STAMP := .venv/.installed
EQUALITY = $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadgroup tests/test_exactness*.py \
	$(addprefix tests/,codecs inference model optim runtime train wrapped)
LATE = $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist loadgroup --accelerator=late
SEEDS ?= 1 2
TRANSFORMERS ?= 5.18.0 5.24.0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help environment test accelerator check explore elsewhere lint format docs models demo package clean
help: ## say what there is to make
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

environment: $(STAMP) ## create or update .venv

# torch goes first and alone: whichever build the package index of the machine offers stays, because the second line
# finds its requirement already met.
$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/outsize/native/*.[ch])
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found; set PYTHON=/path/to/python" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@

# The made-up device takes a minute of one processor to build, which the tests that run first leave idle now and then.
test: $(STAMP) ## run the tests
	$(BIN)/python tests/accelerator/build.py > /dev/null 2>&1 & \
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup; status=$$?; wait; exit $$status
	$(LATE) -m "not slow" tests/accelerator

accelerator: $(STAMP) ## run every test of asynchrony on a made-up device, in both profiles: SEEDS="1 2 3"
	for seed in $(SEEDS); do for lateness in late-copies late-kernels; do \
		$(LATE) --lateness=$$lateness --late-seed=$$seed tests/accelerator tests/gpu || exit 1; done; done

check: $(STAMP) ## run the tests of what the change touches, or the fast ones: under 3 minutes
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadgroup -m "not slow" $$($(BIN)/python scripts/touched_tests.py)

explore: $(STAMP) ## run the tests of properties on examples that have not been tried, over and over until one fails
	while $(BIN)/python -m pytest -q --hypothesis-profile=explore -m hypothesis; do :; done

elsewhere: $(STAMP) ## run the tests of equality on other processors, made up (tests/processors.py) and older, and of other versions
	$(EQUALITY) --products=by-shape
	$(EQUALITY) --products=exact
	ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 $(EQUALITY)
	OMP_NUM_THREADS=2 MKL_NUM_THREADS=2 $(EQUALITY)
	for version in $(TRANSFORMERS); do \
		$(BIN)/python -m pip install --quiet --no-deps --target .venv/transformers-$$version transformers==$$version && \
		PYTHONPATH=.venv/transformers-$$version $(BIN)/python -m pytest -q tests/compat tests/objectives || exit 1; done

lint: $(STAMP) ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini --cache-dir .mypy_cache/tests
	$(BIN)/python scripts/house.py

format: $(STAMP) ## rewrite the files in the style that `make lint` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(STAMP) ## write the generated pages again
	$(BIN)/python scripts/configuration_page.py
	$(BIN)/python scripts/heartbeat_schema.py

models: $(STAMP) ## try every kind of model, and write the page of them again: minutes
	$(BIN)/python scripts/models_page.py

demo: $(STAMP) ## train a 40M-parameter model in a fifth of its memory, and prove it exact
	$(BIN)/python examples/demo.py

package: $(STAMP) ## build the source archive and the wheels of a release into dist
	rm -rf dist
	$(BIN)/python scripts/package.py

clean: ## remove the environment and every cache
	rm -rf .venv .demo .pytest_cache .ruff_cache .mypy_cache .hypothesis build dist src/outsize/native/libkernels.so.0
