# Entry points for people and for CI. Needs Python >= 3.11 with pip and venv; everything else goes into .venv.
# Each install leaves a stamp in .venv and is skipped until pyproject.toml or constraints.txt changes.

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SOURCES := pyproject.toml constraints.txt

.PHONY: train train-lm test test-full lint docs clean

train: .venv/.whale
	$(BIN)/whale train m6-tiny

train-lm: .venv/.whale
	$(BIN)/whale launch -n 4 examples/train_lm.py

test: lint
	$(BIN)/python -m pytest -n 2 --dist loadgroup

test-full: .venv/.test
	$(BIN)/python -m pytest -n 2 --dist loadgroup --full

lint: .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/.docs
	$(BIN)/mkdocs build --strict

clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

.venv/.created:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Whale needs Python >= 3.11")'
	$(PYTHON) -m venv .venv
	touch $@

# torch comes first and pinned: as a mere dependency it could be another version than the tested one.
# On Linux pip takes the CUDA build, which also runs without a GPU; a CPU build of 2.13.0 satisfies the pin too.
.venv/.torch: .venv/.created constraints.txt
	$(PIP) torch==2.13.0
	touch $@

.venv/.whale: .venv/.torch $(SOURCES)
	$(PIP) -e .
	touch $@

.venv/.test: .venv/.whale
	$(PIP) -e '.[test,lint]'
	touch $@

.venv/.docs: .venv/.whale
	$(PIP) -e '.[docs]'
	touch $@
