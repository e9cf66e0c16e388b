# Tools around the C harness (tests/c). None is needed by `make test`; each says what it lacks of the
# system and how to get it. Python's packages are in requirements-tools.txt; who only records needs no venv.
need = @command -v $(1) >/dev/null || { echo "make $@ needs $(1): $(2)"; exit 1; }
harness = $(MAKE) -s -j2 -f tests/c/Makefile OUT=build/harness/$(1) OPTIONS="$(2)"
TOOLS = $(if $(wildcard $(PY)),$(PY),$(PYTHON))
RECORD = $(TOOLS) tests/support/record.py
ANALYZED = $(filter-out csrc/core/kernels/%,$(wildcard csrc/core/*/*.c)) $(wildcard csrc/torch/*.c csrc/python/*.c)
ANALYZE = -std=c11 -D_GNU_SOURCE -DPy_LIMITED_API=0x030a0000 '-DKVC_VERSION="0"' -iquote csrc/core -iquote csrc/torch \
  -iquote csrc/cuda $(shell $(PY) -c 'import numpy, sysconfig; print("-isystem", numpy.get_include(), "-isystem", sysconfig.get_path("include"))')

harness: ## the C harness alone, every kernel level
	$(call harness,plain,-O2)
	@start=$$(date +%s%N); build/harness/plain/harness && \
	  $(RECORD) harness "make harness" seconds=$$((($$(date +%s%N) - start) / 10000000))e-2

tsan: ## the C harness and eight threads over one pool, under ThreadSanitizer
	$(call harness,tsan,-O1 -fsanitize=thread) build/harness/tsan/harness build/harness/tsan/threads
	build/harness/tsan/harness
	build/harness/tsan/threads
	@$(RECORD) tsan "make tsan" programs=2 threads=8 races=0

valgrind: ## the C harness under valgrind, on the levels that it knows (scalar, avx2)
	$(call need,valgrind,apt-get install valgrind)
	$(call harness,valgrind,-O1 -DKVC_VALGRIND)
	valgrind -q --error-exitcode=3 --leak-check=full build/harness/valgrind/harness
	@$(RECORD) valgrind "make valgrind" errors=0 leaks=0

msan: $(VENV)/.dev ## the C harness and the fuzz corpora under MemorySanitizer: nothing may be read that nobody wrote
	$(call need,cc,apt-get install gcc)
	$(call need,clang,apt-get install clang)
	@echo 'int main(void) { return 0; }' | clang -fsanitize=memory -x c - -o /dev/null
	$(PY) -m pytest -m full -q -p no:cacheprovider tests/core/test_core.py -k msan
	@$(RECORD) msan "make msan" programs=7 reads_of_unwritten_memory=0

aarch64: ## the C harness compiled for aarch64 and run by qemu-user: every level on a CPU that has all, and on one without
	$(call need,aarch64-linux-gnu-gcc,apt-get install gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
	$(call need,qemu-aarch64,apt-get install qemu-user)
	$(call harness,aarch64,-O2) CC=aarch64-linux-gnu-gcc
	qemu-aarch64 -cpu max -L /usr/aarch64-linux-gnu build/harness/aarch64/harness 2> build/harness/aarch64/ran || \
	  { cat build/harness/aarch64/ran; exit 1; }
	grep -x "levels: scalar neon dotprod i8mm" build/harness/aarch64/ran
	qemu-aarch64 -cpu cortex-a72 -L /usr/aarch64-linux-gnu build/harness/aarch64/harness neon dotprod i8mm 2>&1 | grep -x "levels: neon"
	@$(RECORD) aarch64 "make aarch64" levels=4 passed=true

MCA ?= $(shell ls /usr/lib/llvm-*/bin/llvm-mca 2>/dev/null | sort -V | tail -1)
aarch64-budget: $(VENV)/.tools ## instructions of the NEON kernels a page, as the wheels' compiler makes them, and cycles by MCA=llvm-mca (18 on); fails if missed
	$(call need,qemu-aarch64,apt-get install qemu-user)
	$(call need,aarch64-linux-gnu-objdump,apt-get install binutils-aarch64-linux-gnu)
	$(MAKE) -s -j2 -f tests/c/Makefile OUT=build/harness/zig OPTIONS=-O3 CC="$(abspath $(PY)) -m ziglang cc -target aarch64-linux-musl" build/harness/zig/one_page
	$(PY) tests/support/aarch64_budgets.py build/harness/zig/one_page $(addprefix --mca ,$(MCA))

page-cycles: ## cycles of the attention kernels of LEVEL= on one page in L1, by rows (never beside another job)
	@$(call harness,O3,-O3) build/harness/O3/page_cycles
	@build/harness/O3/page_cycles $(or $(LEVEL),avx2)

cross: $(VENV)/.tools ## the core and the extension compiled and linked by zig cc for aarch64-macos and aarch64-linux; not run
	for target in aarch64-macos aarch64-linux-gnu; do \
	  $(MAKE) -s -j2 -f tests/cross.mk TARGET=$$target PY=$(PY) ZIG="$(PY) -m ziglang" || exit 1; done
	@$(RECORD) cross "make cross" targets=2 linked=true

analyze: $(VENV)/.deps ## gcc -fanalyzer, clang-tidy and cppcheck over the core, the torch and the Python layer; a finding is an error
	$(call need,clang-tidy,apt-get install clang-tidy)
	$(call need,cppcheck,apt-get install cppcheck)
	for f in $(ANALYZED); do $(CC) $(ANALYZE) -O1 -fanalyzer -Werror -c $$f -o /dev/null || exit 1; done
	clang-tidy --quiet $(ANALYZED) -- $(ANALYZE)
	cppcheck --quiet --std=c11 --library=python --enable=warning,performance,portability --inline-suppr --error-exitcode=1 \
	  --suppressions-list=tests/cppcheck.txt -iquote csrc/core -I csrc/core -I csrc/cuda \
	  -i csrc/core/kernels csrc/core csrc/torch csrc/python
	@$(RECORD) analyze "make analyze" findings=0 gcc_fanalyzer=0 clang_tidy=0 cppcheck=0

mutants: ## 300 small changes of the core, of which the C harness must notice nine in ten
	$(TOOLS) tests/mutants/mutants.py

.PHONY: harness tsan valgrind msan aarch64 aarch64-budget page-cycles cross analyze mutants

coverage: $(VENV)/.tools ## lines and branches of the core that the C harness and the fuzz corpora reach (gcov)
	$(PY) tests/support/coverage.py

fuzz: $(VENV)/.tools $(VENV)/.built asan-built ## every fuzz target for SECONDS=60 each; tests/fuzz/log.jsonl says how long all runs together
	$(call need,clang,apt-get install clang)
	@$(PY) -c 'import atheris' || { echo "make fuzz needs atheris (requirements-tools.txt), of which there are wheels for Python 3.11 to 3.13"; exit 1; }
	$(MAKE) -s -j2 -f tests/fuzz/Makefile FUZZ=1 OUT=build/fuzz/clang
	$(PY) tests/fuzz/fuzz.py run $(or $(SECONDS),60)

wheel: $(VENV)/.tools ## an sdist and an abi3 wheel in build/wheel, tried in a new environment without a compiler; CUDA=all (or 90): with CUDA's part
	KVCOMPRESS_CUDA=$(or $(CUDA),off) $(PY) tests/support/wheel.py

wheels: $(VENV)/.tools ## manylinux wheels of x86_64 and aarch64 in build/wheels, by zig cc; the second is tried after `make build/aarch64/python`
	$(PY) tests/support/wheel.py many

build/aarch64/python: tests/support/aarch64.sh ## an aarch64 Python with torch, which qemu-user runs (Debian: no root needed)
	$(call need,qemu-aarch64,apt-get install qemu-user)
	rm -rf $(@D)
	sh $< $(@D) $(PY) -m pip

# The sources with the extension of aarch64 beside them: tests import what is in their own tree.
AARCH64_TESTS = tests/core/test_codec.py::test_golden_vectors tests/core/test_attend.py -k "golden or any_group or half_models or caps or nan"
test-aarch64: build/aarch64/python ## Python's tests of page bytes and attention on aarch64, run by qemu-user, behind `make wheels` (20 minutes)
	rm -rf build/aarch64/tree && mkdir -p build/aarch64/tree
	git ls-files -z | xargs -0 cp --parents -t build/aarch64/tree
	cd build/aarch64/tree && $(PYTHON) -m zipfile -e ../../wheels/*_aarch64.whl wheel && cp wheel/kvcompress/_C.abi3.so kvcompress
	cd build/aarch64/tree && for level in neon dotprod i8mm; do PYTHONPATH=. KVCOMPRESS_ISA=$$level ../python -m pytest -q \
	  -p no:cacheprovider -m "not full and not soak" $(or $(TESTS),$(AARCH64_TESTS)) || exit 1; done
	@$(RECORD) aarch64_python "make test-aarch64" levels=3 passed=true

.PHONY: coverage fuzz wheel wheels test-aarch64
