# Each target sets up what it needs. PYTHON=... names the Python (3.11 or newer) that .venv is made with.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PIP_INSTALL := -m pip --disable-pip-version-check install -qq
PYTEST := $(BIN)/python -m pytest
# CASES=N: of each test, at most N cases, drawn by its name; for all tests but those of test and test-gpu.
SOME := $(if $(CASES),--cases $(CASES))
# glibc would give the memory of each tensor back, and the kernel zero it anew for the next one: a quarter of the time.
export MALLOC_TRIM_THRESHOLD_ := 1000000000
export MALLOC_MMAP_THRESHOLD_ := 1000000000
# Tests start hundreds of processes: without bytecode on disk each would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# Each worker gets a contiguous part and steals from the others' ends: a module's fixtures are made once, not per worker.
PARALLEL := -n auto --maxprocesses 4 --dist worksteal
# With RECORD=1, tests in a framework's environment write what passed to fixtures/pins/.
RECORDED = $(if $(RECORD),--record fixtures/pins/$(1).json)

# Frameworks whose pins need environments of their own; those whose pins agree; markers that leave out the tests of all.
APART := verl openrlhf unirl megatron sglang
TOGETHER := renderers deepspeed quantized plane logging
FRAMEWORKS := $(APART) $(TOGETHER) hub
ELSEWHERE := $(FRAMEWORKS:%=and not %)
HERE := not slow and not rest and not gpu and not engine and not kernel and not compile and not upstream and not decoders $(ELSEWHERE)
MATRIX := vllm verl openrlhf sglang
# Models packed, which are tested under the transformers that each framework pins too: first, for verl patches classes.
PACKED := tests/adapters/test_attention.py tests/adapters/test_tower_attention.py

# One file per op of the hot path; the others are what they share, what needs no GPU, and whole steps.
BENCHMARKS := $(filter-out $(patsubst %,benchmarks/%.py,__init__ gpu on_host several megatron_step render cost_model first_step frameworks host media_by_reference parity_speed video_decode ray_rows scale),$(wildcard benchmarks/*.py))

# Files with tests of one marker: only they are collected, in less time, and where packages of the others are missing.
marked = $(shell grep -rl --include='test_*.py' 'mark\.$(1)\b' tests)
KERNELS = $(shell grep -rl --include='test_*.py' 'mark\.kernel\b\|each_backend' tests)

LOCKED := .github/actions/parity/requirements.txt

.PHONY: help
help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | expand -t 20

.PHONY: smoke
smoke: $(STAMP)  ## one GRPO step on geometry problems, every check printed with its figure
	$(BIN)/mmpack smoke

.PHONY: test
test: $(STAMP)  ## the tests, without those marked slow or gpu; PYTEST_ADDOPTS=--durations=50 shows what they cost
	$(PYTEST) $(PARALLEL) -m "$(HERE)"

.PHONY: test-slow
test-slow: $(STAMP)  ## the tests marked slow, and the cases that test leaves out
	$(PYTEST) $(PARALLEL) $(SOME) -m "(slow or rest) and not gpu and not engine and not kernel and not compile and not upstream and not decoders $(ELSEWHERE)" $(call marked,\(slow\|few\))

# What compares floats with an oracle's: results differ between CPUs, bounds must not.
NUMERICAL := tests/losses tests/ops --ignore-glob='*_types.py' \
  $(patsubst %,tests/adapters/test_%.py,attention collator lora model_inputs pack_videos trl_grpo)

.PHONY: test-cpus
test-cpus: $(STAMP)  ## the numerical tests as other CPUs compute: narrower vectors, two threads
	runs="$$($(BIN)/python tests/support/cpus.py)" && echo "$$runs" | { status=0; while read -r settings; do \
	  echo "$$settings"; \
	  env $$settings $(PYTEST) $(PARALLEL) $(SOME) -m "$(HERE)" $(NUMERICAL) </dev/null || status=1; \
	done; exit $$status; }

.PHONY: test-video
test-video: .venv-upstream/.stamp .venv-together/.stamp  ## videos beside qwen-vl-utils and transformers' processors; every decoder beside PyAV
	.venv-upstream/bin/python -m pytest $(PARALLEL) $(SOME) -m "upstream and not engine" $(call marked,upstream)
	.venv-together/bin/python fixtures/readers/regenerate.py --check
	.venv-together/bin/python -m pytest $(PARALLEL) $(SOME) -m decoders $(call marked,decoders)

.PHONY: test-engines
test-engines: .venv-vllm/.stamp  ## a real engine as the rollout: its adapter, a whole step with it, causes put in
	.venv-vllm/bin/python fixtures/video/regenerate.py vllm --check
	.venv-vllm/bin/python -m pytest $(SOME) $(call RECORDED,vllm) -m "engine or adapter and not gpu and not slow and not rest" $(PACKED) $(call marked,engine)

.PHONY: test-frameworks
test-frameworks: $(FRAMEWORKS:%=test-framework-%) test-trl $(MATRIX:%=.venv-%/.stamp)  ## each framework's adapter beside the framework; then the matrix of all
	rm -rf build/matrix && mkdir -p build/matrix
	for name in $(MATRIX); do \
	  PYTHONPATH=tests .venv-$$name/bin/python -m matrix build/matrix --only $$name >/dev/null || exit 1; \
	done
	PYTHONPATH=tests $(BIN)/python -m matrix build/matrix || [ $$? -eq 1 ]
	MMPACK_MATRIX=build/matrix $(PYTEST) tests/matrix/test_matrix.py::test_no_framework_that_ci_installs_is_missing

.PHONY: $(FRAMEWORKS:%=test-framework-%)
$(APART:%=test-framework-%): test-framework-%: .venv-%/.stamp
	$(<D)/bin/python -m pytest $(SOME) $(call RECORDED,$*) -m "$* and not gpu or adapter and not gpu and not slow and not rest" $(PACKED) $(call marked,$*)
$(TOGETHER:%=test-framework-%): .venv-together/.stamp
test-framework-hub: .venv-sglang/.stamp
$(filter-out $(APART:%=test-framework-%),$(FRAMEWORKS:%=test-framework-%)): test-framework-%:
	$(<D)/bin/python -m pytest $(SOME) -m "$* and not gpu" $(call marked,$*)

.PHONY: test-trl
test-trl: .venv-trl-1.12/.stamp  ## TRL's adapter under the oldest TRL; `test` has the newest
	.venv-trl-1.12/bin/python -m pytest $(SOME) $(call RECORDED,trl-1.12) -m "$(HERE)" $(TRL)

# The table of docs/frameworks.md, and README's line. The frameworks' own tests are those of test-frameworks.
TRL := $(wildcard tests/adapters/test_trl_*.py)
.PHONY: pins
pins: $(STAMP)  ## each framework under its own pins: what passes, to fixtures/pins/ and the table of docs/frameworks.md
	$(MAKE) RECORD=1 $(APART:%=test-framework-%) test-trl test-engines test-transformers
	$(PYTEST) $(SOME) $(call RECORDED,trl) -m "$(HERE)" $(TRL) $(PACKED)
	$(BIN)/python tests/support/tried_with.py

.PHONY: test-kernels
test-kernels: .venv-triton/.stamp  ## the Triton kernels: interpreted against the oracle, and compiled for every target
	TRITON_INTERPRET=1 .venv-triton/bin/python -m pytest $(PARALLEL) $(SOME) -m "kernel and not gpu" $(KERNELS)
	.venv-triton/bin/python -m pytest $(PARALLEL) $(SOME) -m compile $(call marked,compile)

# Where pytest-xdist is: a worker per 16 GiB of GPU memory.
GPU_WORKERS := import torch, xdist; cards = map(torch.cuda.get_device_properties, range(torch.cuda.device_count())); \
  print("-v -n", max(1, sum(round(c.total_memory / 2**30) // 16 for c in cards)))

.PHONY: test-gpu
test-gpu: PYTHON := $(or $(PYTHON),python3)
test-gpu:  ## the tests marked gpu, with the machine's own Python and its CUDA build of torch
	@$(PYTHON) -c 'import importlib.util; importlib.util.find_spec("torch") or exit("test-gpu: $(PYTHON) has no torch. Fix: name a PYTHON=... with a CUDA build of torch")'
	@$(PYTHON) -c 'import torch; torch.cuda.is_available() or exit("test-gpu: no GPU here, torch.cuda.is_available() is False")'
	PYTHONPATH=. $(PYTHON) -m pytest $$($(PYTHON) -c '$(GPU_WORKERS)' 2>/dev/null) -m "(gpu or kernel) and not alone" $(sort $(call marked,gpu) $(KERNELS))
	PYTHONPATH=. $(PYTHON) -m pytest -m "gpu and alone" $(call marked,alone)

.PHONY: bench
bench: PYTHON := $(or $(PYTHON),python3)
bench:  ## every op of the hot path against its floor, with the machine's own Python and its CUDA build of torch
	for file in $(BENCHMARKS); do PYTHONPATH=. $(PYTHON) $$file || exit 1; done
	$(PYTHON) benchmarks/render.py

.PHONY: conformance
conformance: $(STAMP) .venv-verl/.stamp .venv-upstream/.stamp  ## the checks of every family, to fixtures/conformance/ and the table of docs/families.md; FAMILY=name for one
	families="$(or $(FAMILY),$$(PYTHONPATH=tests $(BIN)/python -c 'import support.kits as k; print(*k.kit_names())'))"; \
	set -- $$(printf -- '--family %s ' $$families); \
	$(PYTEST) "$$@" --results fixtures/conformance || [ $$? -eq 1 ]; \
	.venv-verl/bin/python -m pytest "$$@" --check verl --results fixtures/conformance || [ $$? -eq 1 ]; \
	.venv-upstream/bin/python -m pytest "$$@" --check layout --check video --results fixtures/conformance || [ $$? -eq 1 ]
	$(BIN)/python tests/conformance/table.py

.PHONY: lint
lint: $(STAMP)  ## ruff; imports run one way
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

.PHONY: types
types: $(STAMP)  ## mypy
	$(BIN)/mypy mmpack benchmarks/step

.PHONY: generated
generated: $(STAMP) .venv-upstream/.stamp  ## are the JSON schema, the fixtures, the pages and the table of rooms what their generators make?
	$(BIN)/mmpack schema --check schemas/sample.schema.json
	$(BIN)/mmpack schema --action --check schemas/action.schema.json
	$(BIN)/mmpack schema --rules --check docs/rules.md
	$(BIN)/python fixtures/regenerate.py --check
	$(BIN)/python fixtures/gui/regenerate.py --check
	.venv-upstream/bin/python fixtures/causes/regenerate.py --check
	.venv-upstream/bin/python fixtures/patches/regenerate.py --check
	.venv-upstream/bin/python fixtures/video/regenerate.py --check
	$(BIN)/python benchmarks/render.py --check
	$(BIN)/python benchmarks/scale.py --check
	$(BIN)/python benchmarks/frameworks.py --check
	$(BIN)/python tests/support/rooms.py --check
	$(BIN)/python tests/support/tried_with.py --check
	$(BIN)/python tests/support/manual.py --check
	$(BIN)/python tests/conformance/table.py --check
	$(BIN)/python docs/site/figures.py --check
	$(BIN)/python docs/site/notebook.py --check
	$(BIN)/python docs/site/explained.py --check

.PHONY: docs
docs: .venv-tools/.stamp  ## the documentation site, to build/site; a warning is an error, and so is a link that leads nowhere
	.venv-tools/bin/python -m sphinx -W --keep-going -q -E -a -c docs/site -d build/site-cache . build/site

.PHONY: wheel-check
wheel-check: $(STAMP)  ## does the built wheel install and run in an empty environment?
	$(BIN)/python tests/support/wheel_check.py

.PHONY: release
release: $(STAMP) .venv-tools/.stamp  ## sdist, wheel, bill of materials and sums in dist/, checked; nothing is uploaded
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	.venv-tools/bin/python -m twine check --strict dist/*
	.venv-tools/bin/python tests/support/extras_check.py
	$(BIN)/python tests/support/wheel_check.py --dist dist
	.venv-tools/bin/python tests/support/sbom.py dist
	cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

.PHONY: hub
hub: $(STAMP)  ## the ops as kernels for the Hugging Face hub, to build/hub
	$(BIN)/python hub/write.py build/hub

.PHONY: lock
lock: .venv-tools/.stamp  ## the pins, with hashes, of what the GitHub action installs
	{ head -n 1 $(LOCKED); .venv-tools/bin/uv pip compile pyproject.toml -c constraints.txt --universal --python-version 3.11 \
	  --extra cli --extra parquet --extra zstd --extra view --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet; } \
	  > build-lock.txt && mv build-lock.txt $(LOCKED)

.PHONY: fuzz
fuzz: $(STAMP)  ## damaged files for every reader, for SECONDS (600); a file that shows a fault stays in build/fuzz
	PYTHONPATH=.:tests $(BIN)/python tests/support/fuzz.py --seconds $(or $(SECONDS),600) --keep build/fuzz

.PHONY: venv
venv: $(STAMP)  ## only .venv

.PHONY: clean
clean:  ## remove environments, builds and caches
	rm -rf $(VENV) .venv-* build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first: what depends on it must find the pinned build and not choose one of its own.
$(STAMP): pyproject.toml constraints.txt
	@if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
	  for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	    if $$python -c 'import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "making $(VENV) with $$python (some minutes, once)"; \
	      exec $$python -m venv --clear $(VENV); \
	    fi; \
	  done; \
	  echo "no $(or $(PYTHON),Python) of 3.11 or newer with venv and ensurepip. Fix: install one (Debian: python3-venv too), or name it: make PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt torch
	$(BIN)/python $(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@

# An environment of constraints/NAME.txt holds only what differs, and finds the rest in .venv. Where it pins torchvision,
# torchvision.py runs when Python starts.
ENVIRONMENTS := $(patsubst constraints/%.txt,%,$(wildcard constraints/*.txt))
ENVIRONMENT_STAMPS := $(ENVIRONMENTS:%=.venv-%/.stamp)

.PHONY: environments
environments: $(ENVIRONMENT_STAMPS)  ## all of the other environments

# UniRL 0.2 says that it requires Python 3.12; under 3.11 it runs as well.
.venv-unirl/.stamp: private export PIP_IGNORE_REQUIRES_PYTHON := 1
$(ENVIRONMENT_STAMPS): .venv-%/.stamp: constraints/%.txt $(STAMP)
	$(BIN)/python -m venv --clear --without-pip $(@D)
	$(BIN)/python -m pip --disable-pip-version-check --python $(@D)/bin/python install -qq --no-deps -r $<
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > "$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/main.pth"
	if grep -q '^torchvision==' $<; then \
	  site="$$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"; \
	  cp constraints/torchvision.py "$$site/_environment.py" && echo "import _environment" > "$$site/environment.pth"; \
	fi
	@touch $@
$(patsubst constraints/%.txt,.venv-%/.stamp,$(shell grep -l '^torchvision==' constraints/*.txt)): constraints/torchvision.py

.PHONY: test-transformers
test-transformers: .venv-transformers-5.6/.stamp  ## the adapter's tests under the oldest transformers; `test` has the newest, test-frameworks those between
	.venv-transformers-5.6/bin/python -m pytest $(PARALLEL) $(SOME) $(call RECORDED,transformers-5.6) -m "adapter and not gpu and not engine $(if $(CASES),and not slow)" $(call marked,adapter)
