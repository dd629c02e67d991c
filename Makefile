# make demo    set-up and the main job on real input        make test       set-up and all tests
# make check   lint, types, imports between rooms            make bench      ours beside torch's own, in one run
# TORCH=2.15.0 with any of them uses a second environment with that torch.
PYTHON ?= python3.11
TORCH  ?= 2.13.0
VENV   := $(if $(filter 2.13.0,$(TORCH)),.venv,.venv-$(TORCH))
RUN    := $(VENV)/bin/python
# More than two cores: many tests wait, for ranks that are late, or lost.
JOBS   ?= 3

.PHONY: demo test test-full check bench coverage setup clean
setup: $(VENV)/.ready
$(VENV)/.ready: pyproject.toml constraints.txt tools/setup.py
	@$(PYTHON) tools/setup.py --venv $(VENV) --torch $(TORCH)

demo: setup
	$(RUN) -m torchshard demo

test: setup
	$(RUN) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-full: setup
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m "full or not full" $(ARGS)

check: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

bench: setup
	$(RUN) -m benchmarks

coverage: setup
	$(RUN) -m tests.coverage $(ARGS)

clean:
	rm -rf .venv .venv-* build dist demo-output
