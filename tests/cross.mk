# The core as a shared library and the extension, compiled and linked by zig cc for another system: `make cross`.
#   make -f tests/cross.mk TARGET=aarch64-macos ZIG="python -m ziglang" PY=python
OUT := build/cross/$(TARGET)
CC := $(ZIG) cc -target $(TARGET)
PYTHON_HEADERS := $(shell $(PY) -c 'import numpy, sysconfig; print("-isystem", numpy.get_include(), "-isystem", sysconfig.get_path("include"))')
FLAGS := -std=c11 -O2 -fPIC -ffp-contract=off -fvisibility=hidden -D_GNU_SOURCE -DKVC_EXPORT -DPy_LIMITED_API=0x030a0000 \
  '-DKVC_VERSION="0"' -Wall -Wextra -Wconversion -Wshadow -Wvla -Werror -iquote csrc/core -iquote csrc/torch -iquote csrc/cuda
CORE := $(patsubst %.c,$(OUT)/%.o,$(wildcard csrc/core/*/*.c))
REST := $(patsubst %.c,$(OUT)/%.o,$(wildcard csrc/torch/*.c csrc/python/*.c))
# Python's functions are found when the extension is loaded.
LATER := $(if $(findstring macos,$(TARGET)),-undefined dynamic_lookup)

# NumPy's headers are those of this machine, which has an endian.h.
ifdef LATER
HASH := \#
$(shell mkdir -p $(OUT)/include && echo '$(HASH)include <machine/endian.h>' > $(OUT)/include/endian.h)
PYTHON_HEADERS += -isystem $(OUT)/include
endif

all: $(OUT)/libkvcompress.so $(OUT)/_C.abi3.so

$(OUT)/%.o: %.c $(wildcard csrc/*/*.h csrc/*/*.def csrc/*/*/*.h)
	@mkdir -p $(@D)
	$(CC) $(FLAGS) $(if $(findstring csrc/core,$<),,$(PYTHON_HEADERS)) -c $< -o $@

$(OUT)/libkvcompress.so: $(CORE)
	$(CC) -shared $^ -lm -lpthread -o $@

$(OUT)/_C.abi3.so: $(CORE) $(REST)
	$(CC) -shared $(LATER) $^ -lm -lpthread -ldl -o $@

.PHONY: all
.DELETE_ON_ERROR:
