# `make demo` and `make test` set everything up themselves; they need Python 3.10+ and pip, nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
TOOLS = $(VENV)/.tools

.PHONY: demo test pytest test-all test-rest test-versions lint format docs bench screenshots clean

demo: $(READY)  ## the main job, offline, in seconds once it is set up
	$(BIN)/leaveout demo

# Files are handed out whole, the longest first (tests/conftest.py has the order); a third process works while tests wait.
PYTEST = $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(TOOLS)  ## lint, types, doctests and tests, side by side
	$(MAKE) -j 2 lint pytest

pytest: $(TOOLS)
	$(PYTEST)

test-all: test test-rest  ## the same and everything that is long by nature

# Arrays and types are checked at run time here, which takes longer than the ordinary run has.
# Not in the tests of engines: a checked function cannot be sent to another process.
TYPED = --jaxtyping-packages=leaveout,typed.check
CHECKED = tests/test_optimizers.py tests/test_ids.py tests/test_timeline.py tests/test_jump.py tests/test_curvature.py tests/test_cleanse.py

test-rest: $(TOOLS)  ## what test-all adds to test: tests marked full, more random cases, types at run time
	$(PYTEST) -m 'full or hypothesis' --hypothesis-profile=full
	$(PYTEST) -m 'not full and not hypothesis' $(TYPED) $(CHECKED)

lint: $(TOOLS)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test-versions: $(TOOLS)  ## the tests that matter most with the newest and the lowest versions; writes docs/versions.md
	$(BIN)/python tests/versions.py

format: $(TOOLS)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(TOOLS)  ## the documents as a site in site/, without network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

bench: $(TOOLS)
	$(BIN)/python -m experiments bench

screenshots: $(TOOLS)  ## the documents' pictures of the report; needs chromium
	$(BIN)/python tests/screenshots.py docs/report

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[all]'
	@touch $@

$(TOOLS): $(READY) experiments/requirements.txt
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]' -r experiments/requirements.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis dist site
