# One environment, .venv, serves the template's tools and the projects that are baked here.
# Another place or Python: make test VENV=/path/to/venv PYTHON=/path/to/python3.12

VENV ?= .venv
PYTHON ?= python3
PY = $(VENV)/bin/python
SLUG = my_training

# Two processes show the distributed training on any machine; but two on a single GPU can't talk to each other by NCCL.
COUNT_PROCESSES = import torch; print(1 if torch.cuda.device_count() == 1 else 2)
TOO_OLD = import sys; sys.exit(sys.version_info < (3, 10) and "Python %d.%d is too old: 3.10 or newer is needed, name one by PYTHON=/path/to/python3" % sys.version_info[:2] or 0)

# $(call bake,FOLDER): a fresh project with the default answers in build/FOLDER, its packages installed.
# The user's cookiecutter defaults are left out, so that every machine gets the same project. cookiecutter copies all that
# lies in the template folder, so the caches of whoever worked there go first.
define bake
	@echo "bake: build/$(1)/$(SLUG)"
	@find "{{cookiecutter.project_slug}}" \( -name __pycache__ -o -name '.*_cache' \) -prune -exec rm -rf {} +
	@rm -rf "build/$(1)" && mkdir -p "build/$(1)"
	@"$(PY)" -m cookiecutter --no-input --default-config --output-dir "build/$(1)" . >"build/$(1)/bake.log" || { cat "build/$(1)/bake.log" >&2; exit 1; }
	+@$(call project,$(1),env)
endef

# $(call project,FOLDER,GOAL): a goal of the project's own Makefile, in this environment.
project = venv=`cd "$(VENV)" && pwd` && $(MAKE) --no-print-directory -C "build/$(1)/$(SLUG)" $(2) VENV="$$venv"

.PHONY: help env demo test lint bench overhead startup clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*##  */\1 | /p' Makefile | awk -F ' [|] ' '{ printf "make %-8s %s\n", $$1, $$2 }'

# Reinstalls only when the contents of pyproject.toml are other than what was installed last.
env:  ## create .venv and install the template's tools
	@set -e; \
	if [ ! -x "$(PY)" ]; then \
	    command -v "$(PYTHON)" >/dev/null || { echo "no $(PYTHON) found: install Python 3.10 or newer, or name one by PYTHON=/path/to/python3" >&2; exit 1; }; \
	    "$(PYTHON)" -c '$(TOO_OLD)'; \
	    "$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) can't make environments: install its venv module (Debian, Ubuntu: apt install python3-venv)" >&2; exit 1; }; \
	    echo "environment: creating $(VENV)"; \
	    "$(PYTHON)" -m venv "$(VENV)"; \
	fi; \
	if ! cmp -s pyproject.toml "$(VENV)/template.installed"; then \
	    "$(PY)" -c '$(TOO_OLD)'; \
	    "$(PY)" -m pip --version >/dev/null 2>&1 || "$(PY)" -m ensurepip >/dev/null; \
	    echo "environment: installing the template's tools into $(VENV)"; \
	    "$(PY)" -m pip install -qq --disable-pip-version-check -e ".[dev]"; \
	    cp pyproject.toml "$(VENV)/template.installed"; \
	fi

demo: env  ## bake a project and train it with 2 processes
	$(call bake,demo)
	+@processes=`"$(PY)" -c '$(COUNT_PROCESSES)'` && $(call project,demo,train) NPROC="$$processes" ARGS="run.dir=runs/demo $(ARGS)"
	@echo
	@echo "That was build/demo/$(SLUG), as cookiecutter writes it; the run is in its runs/demo. Go on with:"
	@echo "    . $(VENV)/bin/activate && cd build/demo/$(SLUG)"
	@echo "    python -m fasttrain evaluate runs/demo/best.pt      the metrics of its best checkpoint"
	@echo "    python train.py data.path=path/to/your/images       your own images; every setting is in config.yaml"
	@echo "A project of your own, beside this folder: cookiecutter --output-dir .. ."

test: env  ## all tests: the template's, then those of a baked project
	$(call bake,test)
	@"$(PY)" -m pytest -n auto --maxprocesses=4 --dist=worksteal
	+@$(call project,test,test)

lint: env  ## style and types of the template and the project
	$(call bake,lint)
	@"$(PY)" -m ruff check --no-cache . && "$(PY)" -m ruff format --no-cache --check .
	@"$(PY)" -m mypy --cache-dir=build/mypy
	+@$(call project,lint,lint)

# Photos of your own: make bench PHOTOS=/path/with/small/and/camera (each with train/<class>/*.jpg). A peer that can't be
# installed here is said once and then listed as not installed. FFCV is compiled: it needs a C++ compiler, pkg-config,
# libopencv-dev and libturbojpeg0-dev (Debian, Ubuntu).
PHOTOS ?= build/photos
bench: env  ## this project beside its peers, 20 minutes; WRITE=1 keeps it
	$(call bake,bench)
	@if ! cmp -s benchmarks/peers.txt "$(VENV)/peers.installed"; then \
	    while read -r peer; do \
	        echo "bench: installing $$peer"; \
	        "$(PY)" -m pip install -qq --disable-pip-version-check $$peer || echo "bench: $$peer can't be installed here" >&2; \
	    done <benchmarks/peers.txt; \
	    cp benchmarks/peers.txt "$(VENV)/peers.installed"; \
	fi
	@"$(PY)" -m benchmarks.run --photos "$(PHOTOS)" --project "build/bench/$(SLUG)" $(if $(WRITE),--write) $(ARGS)

# Peers that can't be installed here are named as missing in the table.
overhead: env  ## what a step costs beside bare PyTorch, Lightning, Accelerate, TraceML (8 minutes; WRITE=1 keeps it)
	$(call bake,overhead)
	@for peer in lightning accelerate traceml-ai==0.5.0; do \
	    "$(PY)" -m pip install -qq --disable-pip-version-check $$peer || echo "overhead: $$peer can't be installed here" >&2; \
	done
	@"$(PY)" -m benchmarks.overhead "build/overhead/$(SLUG)" $(if $(WRITE),--write) $(ARGS)

startup: env  ## how long rendering and the way to the first optimizer step take (2 minutes; WRITE=1 keeps it)
	$(call bake,startup)
	@"$(PY)" -m benchmarks.startup "build/startup/$(SLUG)" $(if $(WRITE),--write) $(ARGS)

clean:  ## remove build/ (not the environment)
	@rm -rf build
