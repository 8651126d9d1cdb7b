# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := demo-out

.PHONY: demo test soak lint types install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[all]'
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install -q -e '.[dev]'
	touch $@

demo: $(VENV)/.installed  ## tag the bundled photographs with the bundled model and write a page
	mkdir -p $(OUT)
	$(BIN)/ramatch tag "$$($(BIN)/python -c 'import ramatch.assets as a; print(a.photo_paths()[0].parent)')" --vocabulary everyday --top 8 --threshold 0.5 --report $(OUT)/report.html
	@echo "open $(OUT)/report.html"

test: $(VENV)/.installed-dev lint types  ## linter, type checker, tests
	$(BIN)/python -m pytest

soak: $(VENV)/.installed-dev  ## faults, load and hostile input, counted: about a quarter of an hour on two cores
	$(BIN)/python -m soak

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests benchmarks soak
	$(BIN)/ruff format --check src tests benchmarks soak

types: $(VENV)/.installed-dev
	$(BIN)/mypy src/ramatch

clean:
	rm -rf $(VENV) $(OUT) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
