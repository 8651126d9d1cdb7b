# Two commands set up everything: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT := demo-out
SOURCES := src tests benchmarks scripts soak

.PHONY: install demo test soak lock lint types docs tables bench clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --upgrade pip
	$(BIN)/pip install -q -e '.[all]'
	touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(BIN)/pip install -q -e '.[$*]'
	touch $@

demo: $(VENV)/.installed  ## tag the bundled photographs with the bundled model and write a page
	mkdir -p $(OUT)
	$(BIN)/ramatch tag "$$($(BIN)/python -c 'import ramatch.assets as a; print(a.photo_paths()[0].parent)')" \
	  --vocabulary everyday --top 8 --threshold 0.5 --report $(OUT)/report.html
	@echo "open $(OUT)/report.html"

test: $(VENV)/.installed-dev lint types  ## linter, type checker, tests
	$(BIN)/python -m pytest

soak: $(VENV)/.installed-dev  ## faults, load and hostile input, counted: about a quarter of an hour on two cores
	$(BIN)/python -m soak

lock:  ## every package of the container with its hashes, into constraints/container.txt
	uv pip compile pyproject.toml --extra serve --generate-hashes --no-annotate --custom-compile-command "make lock" -q \
	  --python-version 3.12 --python-platform x86_64-manylinux_2_28 --upgrade -o constraints/container.txt

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

types: $(VENV)/.installed-dev
	$(BIN)/mypy src/ramatch

docs: $(VENV)/.installed-docs  ## pages and API reference in site/; a broken reference fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

tables:  ## the tables of README, docs and the model card from results/*.csv
	$(PYTHON) scripts/render_tables.py

bench: $(VENV)/.installed  ## speed on this machine, beside baselines; --baseline DIR compares with another checkout
	$(BIN)/python -m benchmarks.speed

clean:
	rm -rf $(VENV) $(OUT) site build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
