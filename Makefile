# Front door. `make` alone lists what there is.

PREFIX ?= /usr/local
DESTDIR ?=
JOBS ?= $(shell nproc 2>/dev/null || echo 2)

# The interpreter with the torch for which the Python package is built and tested.
TORCH_PYTHON := $(CURDIR)/.venv-torch/bin/python3

CTEST := ctest --output-on-failure --no-tests=error -j$(JOBS)

.PHONY: help demo demo-torch test test-all bench attacks scenarios build install check clean
.PHONY: build-all test-release test-slow test-asan test-tsan test-clang test-fuzz
.PHONY: test-sanitized sanitized-asan sanitized-tsan

help:
	@sed -n 's/^\([a-z][a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

demo: build ## measure and cut the time of a training job in an emulated cluster
	@tools/setup demo
	@tools/demo

demo-torch: ## the same for a real training job in PyTorch, two ranks on this machine
	@tools/setup torch
	@cmake --preset release -DWEFT_PYTHON=$(TORCH_PYTHON) > /dev/null
	@cmake --build build -j$(JOBS) --target weft_python
	@tools/demo_torch

test: test-release ## build all and run every test that takes seconds

test-all: ## everything: slow tests, sanitizers, clang, fuzzing, check
	@tools/test_all

bench: build ## measure weft beside its peers and the limits of the machine
	@tools/setup bench
	@cmake --preset release -DWEFT_PYTHON=$(TORCH_PYTHON) > /dev/null
	@cmake --build build -j$(JOBS) --target weft_python
	@tools/bench

attacks: build-all ## attack weft in every way we know, and write docs/attacks.md
	@tools/python tools/attacks

scenarios: ## write what replay and diagnosis now say in tests/scenarios, to be read in review
	@tools/setup test
	@cmake --preset release > /dev/null
	@cmake --build build -j$(JOBS) --target scenarios_test
	@WEFT_SCENARIOS=update build/bin/scenarios_test --gtest_brief=1
	@git diff --stat -- tests/scenarios

build: ## the program build/weft and libweft.so
	@tools/setup build
	@cmake --preset release > /dev/null
	@cmake --build build -j$(JOBS) --target weft_cli

install: build ## into PREFIX (/usr/local), below DESTDIR if given
	@DESTDIR="$(DESTDIR)" cmake --install build --prefix "$(PREFIX)"

check: ## format, lint, module law, headers that compile alone, scripts
	@tools/setup check
	@tools/check

clean: ## remove what the build made
	rm -rf build build-dev build-asan build-tsan build-clang build-fuzz .cache

build-all:
	@tools/setup test
	@cmake --preset release $$(test ! -x $(TORCH_PYTHON) || echo -DWEFT_PYTHON=$(TORCH_PYTHON)) \
	  > /dev/null
	@cmake --build build -j$(JOBS)

# Deadlines of a second are tested by a clock, on machines that others use as well. What failed beside
# other tests has a second chance alone; its first words stay above, and what is broken fails again.
test-release: build-all
	@cd build && { $(CTEST) -LE slow || { \
	  echo 'weft: failed beside other tests; what failed once more, alone:'; \
	  ctest --output-on-failure --rerun-failed; }; }

test-slow: build-all
	@cd build && $(CTEST) -L slow
	@WEFT_SIM_SEEDS=20000 build/bin/runtime_test --gtest_brief=1 --gtest_filter='Simulation.ends_*'

# The shadow memory of sanitizers needs addresses that a kernel with much randomisation may have
# given away; where allowed, ask it not to.
NO_RANDOM_ADDRESSES := $(shell setarch -R true 2> /dev/null && echo setarch -R)

# Sanitizers slow everything down, so what measures time is left out.
test-asan test-tsan test-clang: test-%:
	@cmake --preset $* -DWEFT_ONLY= > /dev/null
	@cmake --build build-$* -j$(JOBS)
	@cd build-$* && $(NO_RANDOM_ADDRESSES) $(CTEST) -L 'unit|fuzz'

# What continuous integration has time for: the parsers, what threads share, and groups under a
# hundred seeds.
SANITIZED_asan := trace_test plan_test net_test lane_test join_test collective_test
SANITIZED_tsan := capture_test net_test lane_test collective_test
SANITIZED_MODULES := base;process;reduce;trace;plan;cost;schedule;capture;net;lane;join;probe;collective;runtime
test-sanitized: ## a part of test-asan and test-tsan that takes minutes
	@tools/setup test
	@$(MAKE) --no-print-directory sanitized-asan sanitized-tsan

sanitized-asan sanitized-tsan: sanitized-%:
	@cmake --preset $* -DWEFT_ONLY="$(SANITIZED_MODULES)" > /dev/null
	@cmake --build build-$* -j$(JOBS) --target $(SANITIZED_$*) runtime_test
	@cd build-$* && $(NO_RANDOM_ADDRESSES) $(CTEST) -R "^($$(echo $(SANITIZED_$*) | tr ' ' '|'))$$"
	@cd build-$* && $(NO_RANDOM_ADDRESSES) bin/runtime_test --gtest_brief=1 --gtest_filter='Simulation.ends_*'

test-fuzz:
	@cmake --preset fuzz > /dev/null
	@cmake --build build-fuzz -j$(JOBS)
	@cd build-fuzz && $(CTEST) -L fuzz
