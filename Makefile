# The two commands of a newcomer: `make demo` and `make test`. Each sets everything up itself.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
NATIVE := $(shell find csrc -name '*.cpp' -o -name '*.hpp')
NATIVE_TESTS := $(shell find tests -name '*.cpp' -o -name '*.hpp')

.PHONY: demo test test-slow sanitize lint format bench clean

$(STAMP): pyproject.toml setup.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check "$(TORCH)" numpy pybind11 ninja setuptools wheel
	$(BIN)/pip install -q --disable-pip-version-check --no-build-isolation -e ".[test,dev]"
	touch $@

demo: $(STAMP)
	$(BIN)/zbpipe demo $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow $(ARGS)

# The native executor without Python, under AddressSanitizer, UBSan and ThreadSanitizer.
sanitize: $(STAMP)
	$(BIN)/python tests/native/sanitize.py $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE) $(NATIVE_TESTS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(NATIVE) $(NATIVE_TESTS)

clean:
	rm -rf $(VENV) build dist *.egg-info zbpipe/_native*.so
