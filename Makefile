# make help lists what there is. Objects go to build/<flavour>/, so flavours live side by side.
SHELL := /bin/bash
FLAVOUR ?= release
BUILD ?= build/$(FLAVOUR)
CC ?= gcc
prefix ?= /usr/local
PREFIX ?= $(prefix)

WARN := -Wall -Wextra -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wpointer-arith -Wvla -Wformat=2 -Wundef
# -ffp-contract=off: a multiply and an add fuse only where the code says so, or bits would depend on the compiler's mood.
BASE := -std=c11 -D_GNU_SOURCE -ffp-contract=off -fno-strict-aliasing -fstack-protector-strong -Iengine $(WARN) -MMD -MP
ifeq ($(FLAVOUR),release)
MODE := -O2 -g
else ifeq ($(FLAVOUR),test)
MODE := -O2 -g -DTL_TEST_HOOKS
else ifeq ($(FLAVOUR),asan)
MODE := -O1 -g -DTL_TEST_HOOKS -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
else ifeq ($(FLAVOUR),tsan)
MODE := -O1 -g -DTL_TEST_HOOKS -fsanitize=thread
else
$(error unknown FLAVOUR '$(FLAVOUR)': release, test, asan or tsan)
endif
CFLAGS += $(BASE) $(MODE)

need = $(if $(shell pkg-config --exists $(1) && echo yes),,$(error $(1) is missing: run scripts/setup.sh))
PKGS_ENGINE := libpcre2-8 libcjson libutf8proc libxxhash gnutls
PKGS_SERVER := libmicrohttpd libuv inih
LIBS_ENGINE = $(shell pkg-config --libs libpcre2-8 libcjson libutf8proc gnutls) $(LIBS_CUDA) -lm -lpthread
LIBS_SERVER = $(shell pkg-config --libs $(PKGS_SERVER)) $(LIBS_ENGINE)
LIBS_CHECK = $(shell pkg-config --libs check)

# CUDA where its compiler is (NVCC=/path/to/nvcc, or NVCC= for a build without); fault hooks and sanitizers
# watch the CPU's part alone.
# Code for compute capability 8.0 and 9.0, and PTX that the driver compiles for newer cards.
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA := $(if $(filter test asan tsan,$(FLAVOUR)),,$(NVCC))
CUDA_ARCH ?= -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a -gencode arch=compute_90,code=compute_90
NVFLAGS = -std=c++17 -O3 --fmad=false -Iengine $(CUDA_ARCH)
ifneq ($(CUDA),)
CUDA_SRC := $(wildcard cuda/*.cu)
CUDA_HOME = $(patsubst %/bin/,%,$(dir $(shell readlink -f $(CUDA))))
LIBS_CUDA = -L$(CUDA_HOME)/lib64 -lcudart_static -ldl -lrt -lstdc++
else
CUDA_STUB := cuda/backend_stub.c
endif

ENGINE_SRC := $(wildcard engine/*.c engine/cpu/*.c) $(CUDA_STUB)
CLI_SRC := $(wildcard engine/cli/*.c)
SERVER_SRC := $(wildcard server/*.c)
SUPPORT_SRC := $(wildcard tests/support/*.c)
UNIT_SRC := $(wildcard tests/unit/test_*.c)
EXACT_SRC := $(wildcard tests/exactness/*.c)
CHECK_SRC := $(wildcard tests/cuda/check_*.c)
FUZZ_SRC := $(wildcard tests/fuzz/fuzz_*.c)
BENCH_SRC := $(wildcard tests/bench/*.c)
LOAD_SRC := $(wildcard tests/load/*.c)
DRIVER_SRC := $(wildcard tests/*/*_driver.c)

obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))
ENGINE_OBJ := $(call obj,$(ENGINE_SRC)) $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(CUDA_SRC))
CLI_OBJ := $(call obj,$(CLI_SRC))
SERVER_OBJ := $(call obj,$(SERVER_SRC))
SUPPORT_OBJ := $(call obj,$(SUPPORT_SRC))
SERVER_LIB_OBJ := $(filter-out $(BUILD)/obj/server/main.o,$(SERVER_OBJ))
UNIT_BIN := $(patsubst tests/unit/%.c,$(BUILD)/tests/%,$(UNIT_SRC))
EXACT_BIN := $(patsubst tests/exactness/%.c,$(BUILD)/tests/%,$(filter tests/exactness/test_%.c,$(EXACT_SRC)))
CHECK_BIN := $(patsubst tests/cuda/%.c,$(BUILD)/tests/%,$(CHECK_SRC))
LOAD_BIN := $(patsubst tests/load/%.c,$(BUILD)/tests/%,$(LOAD_SRC))
DRIVER_BIN := $(patsubst %.c,$(BUILD)/tests/%,$(notdir $(DRIVER_SRC)))
LIB := $(BUILD)/libtinyloop.a

.PHONY: all cli tests unit test bench asan tsan lint format help clean install sanitize soak fuzz run check-deps image-test nightly deb openapi man
.SECONDARY:

all: check-deps $(BUILD)/tinyloop $(if $(SERVER_SRC),$(BUILD)/tinyloopd) ## build tinyloop and tinyloopd (FLAVOUR=release|test|asan|tsan)

check-deps:
	$(foreach p,$(PKGS_ENGINE) $(PKGS_SERVER),$(call need,$(p)))@:

cli: $(BUILD)/tinyloop ## build the command line tool alone

# V=1 shows the commands.
ifeq ($(V),)
Q := @
say = @printf '%-5s %s\n' $(1) $@
endif

$(BUILD)/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call say,cc)
	$(Q)$(CC) $(CFLAGS) -c -o $@ $<

# Dependency files of an older build may name a header that is gone: those objects are built again.
cuda/%.cuh: ;

$(BUILD)/obj/%.cu.o: %.cu
	@mkdir -p $(@D)
	$(call say,nvcc)
	$(Q)$(CUDA) $(NVFLAGS) -MMD -MF $(@:.o=.d) -c -o $@ $<

$(LIB): $(ENGINE_OBJ)
	$(call say,ar)
	@rm -f $@
	$(Q)ar rcs $@ $^

$(BUILD)/tinyloop: $(CLI_OBJ) $(LIB)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_ENGINE)

$(BUILD)/tinyloopd: $(SERVER_OBJ) $(LIB)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_SERVER)

$(BUILD)/obj/tests/%.o: CFLAGS += -Itests/support -Iserver -Iengine/cpu -Iengine/cli

CLI_LIB_OBJ := $(filter-out %/main.o,$(CLI_OBJ))

# Manual pages, from the tables of settings, flags and commands.
MAN_PAGES := $(addprefix $(BUILD)/man/,tinyloopd.8 tinyloopd.conf.5 tinyloop.1)
$(BUILD)/obj/scripts/%.o: CFLAGS += -Iserver -Iengine/cli
$(BUILD)/make_man: $(BUILD)/obj/scripts/make_man.o $(SERVER_LIB_OBJ) $(CLI_LIB_OBJ) $(LIB)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_SERVER)
$(BUILD)/man/%: $(BUILD)/make_man
	@mkdir -p $(@D)
	$(Q)$< $(@F) >$@.tmp && mv $@.tmp $@
man: $(MAN_PAGES) ## write the manual pages

$(BUILD)/tests/test_server_%: $(BUILD)/obj/tests/unit/test_server_%.o $(SERVER_LIB_OBJ) $(SUPPORT_OBJ) $(CLI_LIB_OBJ) $(LIB)
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_SERVER) $(LIBS_CHECK)

$(BUILD)/tests/%: $(BUILD)/obj/tests/unit/%.o $(SUPPORT_OBJ) $(CLI_LIB_OBJ) $(LIB)
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_ENGINE) $(LIBS_CHECK)

$(BUILD)/tests/%: $(BUILD)/obj/tests/exactness/%.o $(LIB)
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_ENGINE)

# One device against another, through the backend's vtable.
$(BUILD)/tests/%: $(BUILD)/obj/tests/cuda/%.o $(addprefix $(BUILD)/obj/tests/cuda/,random_net.o report.o) $(LIB)
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_ENGINE)

# The CUDA backend's host side on a runtime that needs no card.
ifneq ($(CUDA),)
$(BUILD)/obj/tests/cuda/cuda_faults.o: CFLAGS += -isystem $(CUDA_HOME)/include
$(BUILD)/tests/cuda_faults: $(BUILD)/obj/tests/cuda/cuda_faults.o $(BUILD)/obj/tests/cuda/random_net.o $(LIB)
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(filter-out -lcudart_static,$(LIBS_ENGINE))
endif

$(BUILD)/tests/%: $(BUILD)/obj/tests/load/%.o
	@mkdir -p $(@D)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ -lm -lpthread

# Programs that tests in other languages drive through pipes.
define driver_rule
$(BUILD)/tests/$(basename $(notdir $(1))): $(BUILD)/obj/$(basename $(1)).o $(LIB)
	@mkdir -p $$(@D)
	$$(call say,link)
	$$(Q)$$(CC) $$(CFLAGS) -o $$@ $$^ $$(LIBS_ENGINE)
endef
$(foreach d,$(DRIVER_SRC),$(eval $(call driver_rule,$(d))))

$(BUILD)/bench_%: $(BUILD)/obj/tests/bench/bench_%.o $(LIB)
	$(call say,link)
	$(Q)$(CC) $(CFLAGS) -o $@ $^ $(LIBS_ENGINE) -ldnnl

unit: $(UNIT_BIN) ## build the unit tests of this flavour
tests: unit $(EXACT_BIN) $(CHECK_BIN) $(DRIVER_BIN) $(LOAD_BIN) ## build every test program (not in the release flavour: it has no fault hooks)

test: ## every quick test (what scripts/test.sh runs)
	scripts/test.sh

bench: ## figures and their ratios to ceilings measured in the same run
	$(MAKE) FLAVOUR=release all build/release/bench_gemm build/release/bench_grammar
	scripts/bench.sh

asan: ## build everything with AddressSanitizer and UBSan, run the unit tests
	scripts/test.sh --sanitizer asan
tsan: ## the same with ThreadSanitizer
	scripts/test.sh --sanitizer tsan
sanitize: asan tsan ## both
soak: ## the long tests: exactness at full length, load, fuzzing
	scripts/soak.sh

FUZZ_ENGINE := $(wildcard engine/*.c engine/cpu/*.c) cuda/backend_stub.c
FUZZ_BIN := $(patsubst tests/fuzz/%.c,build/fuzz/%,$(FUZZ_SRC))
fuzz: $(FUZZ_BIN) ## build the libFuzzer targets (clang)
FUZZ_FLAGS = -std=c11 -D_GNU_SOURCE -DTL_TEST_HOOKS -O1 -g -ffp-contract=off -fsanitize=fuzzer,address,undefined \
	-fno-sanitize-recover=all -Iengine -Iserver -Itests/support -w
build/fuzz/%: tests/fuzz/%.c $(FUZZ_ENGINE) $(SERVER_SRC)
	@mkdir -p $(@D)
	clang $(FUZZ_FLAGS) -o $@ $< $(FUZZ_ENGINE) $(filter-out server/main.c,$(SERVER_SRC)) $(LIBS_SERVER)

FORMATTED := $(wildcard engine/*.[ch] engine/*/*.[ch] server/*.[ch] cuda/*.[ch] cuda/*.cu cuda/*.cuh tests/*/*.[ch] tests/*/*.cu)
format: ## clang-format, in place
	clang-format -i $(FORMATTED)
lint: ## formatting, static analysis, shell checks
	clang-format --dry-run -Werror $(FORMATTED)
	cppcheck --quiet --error-exitcode=1 --std=c11 --inline-suppr --suppressions-list=.cppcheck -Iengine engine server cuda
	shellcheck scripts/*.sh
	scripts/check_words.sh

openapi: ## write server/openapi_json.inc after a change of server/openapi.yaml (needs scripts/setup.sh --test)
	build/venv/bin/python tests/openapi/embed.py

image-test: ## build the container image with buildah and run it (Debian, root, minutes)
	scripts/image_test.sh
nightly: soak image-test ## everything that takes long
deb: all ## a Debian package below build/
	+scripts/deb.sh

run: ## build and serve the bundled model on 127.0.0.1:8080
	scripts/run.sh

install: all man ## install below DESTDIR$(PREFIX); PREFIX=/usr/local by default
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/lib/systemd/system $(DESTDIR)/etc/tinyloop \
		$(DESTDIR)$(PREFIX)/share/tinyloop/demo-model $(addprefix $(DESTDIR)$(PREFIX)/share/man/man,1 5 8)
	install -m 755 build/release/tinyloop build/release/tinyloopd $(DESTDIR)$(PREFIX)/bin
	for f in service socket; do sed 's|/usr/local/bin|$(PREFIX)/bin|' config/systemd/tinyloopd.$$f \
		>$(DESTDIR)$(PREFIX)/lib/systemd/system/tinyloopd.$$f; done
	[ -e $(DESTDIR)/etc/tinyloop/tinyloopd.conf ] || sed 's|^model =.*|model = $(PREFIX)/share/tinyloop/demo-model|' \
		config/tinyloopd.conf >$(DESTDIR)/etc/tinyloop/tinyloopd.conf
	install -m 644 config/demo-model/*.json config/demo-model/*.safetensors $(DESTDIR)$(PREFIX)/share/tinyloop/demo-model
	for s in 1 5 8; do install -m 644 $(BUILD)/man/*.$$s $(DESTDIR)$(PREFIX)/share/man/man$$s; done

clean: ## remove build/
	rm -rf build

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

-include $(shell find $(BUILD)/obj -name '*.d' 2>/dev/null)
