# Two commands do all the set-up: `make run` and `make test`.
PYTHON ?= python3
PROMPT ?= Explain in two sentences why the sky is blue.
MODEL ?= smollm2-135m
FOLDER ?= build
JUDGES ?= --allow-missing
VENV := .venv
BIN := $(VENV)/bin
HF_BIN := .venv-hf/bin
GPU_CHECKS := draw backend quantized chains lookup trees weighing sanitize
SANITIZER ?= compute-sanitizer
CHROMIUM := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: help run serve check test-page judges test test-hf test-scale test-scale-core test-cuda gpu-test gpu-checks gpu-check-device gpu-check-oracle gpu-check-real gpu-conformance gpu-sanitize gpu-sanitize-memory gpu-sanitize-rounds gpu-sanitize-graphs gpu-sanitize-races gpu-sanitize-product-races gpu-times test-long test-wheel wheel native native-asan cuda-asan native-aarch64 native-digests lint goldens model setup clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: setup ## Install, fetch the default model once, and stream an answer (PROMPT="...", MODEL=...)
	@$(BIN)/verispec generate --model "$(MODEL)" -- "$(PROMPT)"

serve: setup model ## Serve the default model on http://127.0.0.1:8000 (MODEL=...)
	$(BIN)/verispec serve --model "$(MODEL)"

check: setup lint ## Lint, types, and the engine's tests that need neither the model nor a compiler, few cases of each; under 90 s
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --durations 5 -m "not hf and not cuda and not long and not slow" --bare --times 0.02 --cases 1 \
	  --ignore tests/server --ignore tests/batch --ignore tests/ray

test: setup model lint $(if $(CHROMIUM),$(BIN)/.page) ## The whole test suite; the page too, where there is a Chromium
	$(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder --durations 15 --times 0.6 -m "not hf and not cuda and not long"

test-page: $(BIN)/.page ## The server's page in a real browser; needs Chromium (pictures with SHOTS=FOLDER)
	$(BIN)/pytest tests/server/test_page.py --need-browser --shots=$(or $(SHOTS),build/shots)

judges: setup model ## Clients and checkers of others against a running server (JUDGES="--llama-cpp FOLDER"); docs/server.md
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,judges]'
	$(BIN)/python bench/judges.py $(JUDGES)

test-hf: $(HF_BIN)/.installed model ## Compare with torch and transformers (into .venv-hf); the CUDA backend on a CPU
	$(HF_BIN)/pytest -m hf tests/hf
	$(HF_BIN)/pytest -n auto --dist loadfile -m cuda tests/backends/cuda --ignore tests/backends/cuda/test_compile.py

test-scale: $(BIN)/.ray model ## Replicas on a cluster of local Ray nodes that are lost in mid-stream; minutes
	$(BIN)/pytest -W ignore -s --durations 20 tests/scale

test-scale-core: $(BIN)/.ray model ## The core of it: two nodes are lost; and parquet files, since Ray brings pyarrow
	$(BIN)/pytest -W ignore -s --times 0.2 tests/scale tests/cli/test_batch.py -k "mid_stream or fingerprint or options or parquet"

test-cuda: $(BIN)/.cuda-compiler ## Compile the CUDA kernels, look at their PTX and registers (installs NVRTC, 64 MB; no GPU)
	$(BIN)/pytest -n auto -m cuda tests/backends/cuda/test_compile.py

gpu-test: ## On a machine with an H200 and torch: every kernel, the backend and (PROMPTS=FILE MODEL=FILE) the equality oracle; quicker with -j9
	@$(MAKE) --no-print-directory gpu-check-failures
	@$(MAKE) --no-print-directory gpu-checks
	@awk 'match($$0, / of [0-9]+ differ/) { n += substr($$0, RSTART + 4) } match($$0, /comparisons of [0-9]+ rows/) { n += substr($$0, RSTART + 15) } \
	  END { print "gpu-test: all checks passed, " n " comparisons: failures device $(GPU_CHECKS) $(if $(PROMPTS),oracle)" }' \
	  $(patsubst %,"$(FOLDER)"/gpu-%.log,failures device $(GPU_CHECKS) $(if $(PROMPTS),oracle))

# `failures` fills the GPU's memory, so it runs before all others.
gpu-checks: gpu-check-device $(GPU_CHECKS:%=gpu-check-%) $(if $(PROMPTS),gpu-check-oracle)

# What a check prints is shown when it has ended, so that several at once do not mix, and kept for the sum.
gpu_logged = mkdir -p "$(FOLDER)" && log="$(FOLDER)/gpu-$(1).log"; PYTHONPATH=src:. $(2) > "$$log" 2>&1; status=$$?; cat "$$log"
gpu_check = $(call gpu_logged,$(1),$(PYTHON) -m tests.backends.cuda.$(1)_check $(2)); exit $$status

gpu-check-device:
	@$(call gpu_check,device,"$(FOLDER)")

gpu-check-oracle:
	@$(call gpu_check,oracle,"$(MODEL)" "$(PROMPTS)")

gpu-check-real: ## The same machine with transformers: logits of real weights against float32 (MODEL=FILE TEXT=FILE)
	@$(call gpu_check,real,"$(MODEL)" "$(TEXT)")

gpu-check-%:
	@$(call gpu_check,$*)

gpu-conformance: ## The same machine with pytest and hypothesis: the conformance suite, bursts and drafted rounds, on the GPU
	PYTHONPATH=src:. $(PYTHON) -m pytest -m cuda tests/backends/cuda/test_backend.py

# Each target is one run of the sanitizer; all of them run, whichever fails.
sanitized = $(call gpu_logged,sanitize-$(1),$(2) --error-exitcode 1 $(PYTHON) -m tests.backends.cuda.sanitize_check $(3)); \
  if [ $$status = 0 ]; then echo "gpu-sanitize-$(1): nothing found in $(3)"; else echo "gpu-sanitize-$(1): FAILED with $$status"; fi; exit $$status
MEMCHECK := $(SANITIZER) --tool memcheck --report-api-errors no
SANITIZED := memory rounds graphs races

gpu-sanitize: ## The same machine with compute-sanitizer: every kernel in small cases, bad accesses and races; minutes
	@$(MAKE) --no-print-directory -k $(SANITIZED:%=gpu-sanitize-%)
	@echo "gpu-sanitize: no bad access in any kernel, and no race in those of attention, draws and weighing"

gpu-sanitize-memory:
	@$(call sanitized,memory,PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK),attention wide large quantized draws weighing passes)

gpu-sanitize-rounds:
	@$(call sanitized,rounds,PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(MEMCHECK),rounds)

gpu-sanitize-graphs:
	@$(call sanitized,graphs,$(MEMCHECK),graphs)

gpu-sanitize-races:
	@$(call sanitized,races,$(SANITIZER) --tool racecheck,attention draws weighing $(ALONE))

gpu-sanitize-product-races:
	@$(call sanitized,product-races,$(SANITIZER) --tool racecheck,passes wide large quantized)

gpu-times: ## The same checks one by one, with what rounds and products take; into FOLDER
	mkdir -p "$(FOLDER)"
	for check in quantized chains lookup trees weighing; do \
	  PYTHONPATH=src:. $(PYTHON) -m tests.backends.cuda.$${check}_check "$(FOLDER)" || exit 1; done

test-long: setup model ## The suite with many more generated cases; takes a long time
	$(BIN)/pytest -m "not hf and not cuda" --times 20

wheel: setup ## Build a wheel with the native kernels inside, into dist/
	rm -rf dist
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .

test-wheel: wheel model ## Install the wheel into a fresh environment and generate with it
	$(BIN)/python tests/check_wheel.py dist/*.whl

native: setup ## Build the native kernels again, after a change in native/
	$(BIN)/python native/build.py src/verispec/backends/_native.so

native-asan: setup ## The kernel tests under the address and undefined-behaviour sanitizers
	$(BIN)/python native/build.py --sanitize build/native-asan.so
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so) $$($${CXX:-c++} -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 VERISPEC_TEST_KERNELS=build/native-asan.so \
	  $(BIN)/pytest -p no:cacheprovider tests/backends/test_native_kernels.py tests/backends/test_hopper.py tests/backends/test_conformance.py -k "native or hopper"

cuda-asan: $(HF_BIN)/.installed ## The sources of CUDA products, run on a CPU, under the address sanitizer; minutes
	LD_PRELOAD="$$($${CXX:-c++} -print-file-name=libasan.so)" ASAN_OPTIONS=detect_leaks=0 \
	  VERISPEC_TEST_EMULATED="-fsanitize=address --param asan-stack=0" \
	  $(HF_BIN)/python -m pytest -s -p no:cacheprovider -m cuda tests/backends/cuda/test_large.py tests/backends/cuda/test_wide.py

native-aarch64: setup ## The kernels for aarch64 under qemu against this machine's (needs g++-aarch64-linux-gnu, qemu-user)
	$(BIN)/python native/build.py --selftest build/selftest
	CXX=aarch64-linux-gnu-g++ $(BIN)/python native/build.py --selftest --portable build/selftest-aarch64
	build/selftest > build/selftest.here
	build/selftest portable 1 | diff build/selftest.here -
	qemu-aarch64 build/selftest-aarch64 | diff build/selftest.here -
	@echo "aarch64 and this machine agree, bit for bit, on $$(wc -l < build/selftest.here) kernels"

lint: setup ## Style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

goldens: $(HF_BIN)/.installed model ## Make the committed reference values again
	$(HF_BIN)/python tests/goldens/make_logit_goldens.py
	$(HF_BIN)/python tests/goldens/make_smollm2_goldens.py

native-digests: setup model ## Make the committed digests of the native backend again: only when its kernels change bits
	$(BIN)/python -m tests.backends.test_native_digests

model: setup ## Fetch the default model into the user's cache
	@$(BIN)/verispec models pull smollm2-135m

setup: $(BIN)/.installed

$(BIN)/.installed: pyproject.toml hatch_build.py $(wildcard native/*)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "verispec needs Python 3.11 or newer; try make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --progress-bar on -e '.[dev]'
	@touch $@

$(HF_BIN)/.installed: pyproject.toml hatch_build.py $(wildcard native/*)
	$(PYTHON) -m venv .venv-hf
	$(HF_BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev,hf]'
	@touch $@

$(BIN)/.ray: $(BIN)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["ray"][:1])' \
	  | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	@touch $@

$(BIN)/.page: $(BIN)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["judges"])' \
	  | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	@touch $@

$(BIN)/.cuda-compiler: $(BIN)/.installed
	$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["cuda-compiler"])' \
	  | xargs $(BIN)/python -m pip install --quiet --disable-pip-version-check
	@touch $@

clean: ## Remove environments and caches of this checkout
	rm -rf $(VENV) .venv-hf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
