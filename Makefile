# `make demo` and `make test` do all their own set-up on a fresh Debian 12 machine with Rust.
.DELETE_ON_ERROR:
.PHONY: help setup setup-tests build wheel demo test lint programs unit fuzz-short fuzz vm python sdk bench-python bench benchmarks bench-programs fresh clean

CARGO ?= cargo
TARGET := $(or $(CARGO_TARGET_DIR),target)
export CARGO_TERM_PROGRESS_WHEN ?= never

help:
	@echo "make demo    set up, build, and show the main job with timings"
	@echo "make test    set up, and pass every check and test"
	@echo "make build   the program: target/release/sandtree"
	@echo "make wheel   the Python package: target/wheels/sandtree-*.whl"
	@echo "make bench   measure, against plain QEMU, Quicksand and plain tools in the same run; QUICK=1: some minutes"
	@echo "make benchmarks  the same, and write docs/benchmarks.md and its plots"
	@echo "make fresh   demo and test in a fresh Debian 12 chroot (as root); RUN=\"demo\" runs less"
	@echo "make fuzz    fuzz both ends of the guest protocol for longer"

# Installs only what is missing, and says what.
setup:
	@./scripts/setup

# The same, with what tests and benchmarks need beside it.
setup-tests:
	@./scripts/setup demo tests

build: setup
	$(CARGO) build --release --locked -p sandtree-cli

# The Python package, with the program in it.
wheel: setup-tests
	./scripts/wheel $(TARGET)/wheels

demo: build
	@./scripts/setup demo
	@./scripts/demo $(TARGET)/release/sandtree

test: setup-tests lint unit fuzz-short vm python sdk
	@echo "all checks and tests passed"

# The second clippy checks the program as it is shipped: without the features of tests and benchmarks. The third has traces,
# which have no dependencies of their own.
lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	$(CARGO) clippy --locked -p sandtree-cli -- -D warnings
	$(CARGO) clippy --locked -p sandtree-cli --features otlp -- -D warnings
	@./scripts/deny

# What tests start. All of the workspace each time, so that nothing is built twice with other features.
programs:
	$(CARGO) build --workspace --locked --bins --examples

unit: programs
	$(CARGO) test --workspace --locked --lib --bins --test '[!v]*'
	$(CARGO) test --workspace --locked --doc

# A few seconds of each target; `make fuzz` runs longer.
fuzz-short: programs
	$(TARGET)/debug/sandtree-fuzz --seconds 2

fuzz:
	$(CARGO) run --release --locked -p sandtree-fuzz -- --seconds 120

# Real QEMU and real guests. `make vm ONLY=exec::` runs the tests whose names contain it. Those in ALONE need the machine
# for themselves: they run KVM inside emulated guests of one processor, two at a time.
ALONE := kvm::
VM = $(CARGO) test --workspace --locked --test vm --
vm: programs
	@rm -f $(TARGET)/tmp/narrow
ifdef ONLY
	$(VM) $(ONLY)
else
	$(VM) $(addprefix --skip ,$(ALONE))
	$(VM) --test-threads 2 $(ALONE)
endif
	@if [ -e $(TARGET)/tmp/narrow ]; then echo "waits that took more than half of their time:"; cat $(TARGET)/tmp/narrow; fi

# The Python package, installed from a wheel, with real guests. Uses the store that `vm` has filled.
python: programs
	./scripts/wheel $(TARGET)/python/wheels --debug
	./scripts/python-tests $(TARGET)/python/wheels/*.whl $(if $(ONLY),-k $(ONLY))

# The real E2B and CubeSandbox clients against the server, with real guests. Uses the store that `vm` has filled.
sdk: programs
	./scripts/sdk-tests $(TARGET)/debug/sandtree $(if $(ONLY),-k $(ONLY))

# Import time, overhead of a command and streams of the Python package, from the wheel for release.
bench-python: wheel
	./scripts/python-bench $(TARGET)/wheels/*.whl

# One table and one JSON. `make bench QUICK=1` takes some minutes, and leaves out what takes longer. Where Quicksand cannot
# be installed, the table says so.
BENCH = $(TARGET)/release/sandtree-bench all $(if $(QUICK),--quick) --quicksand $(TARGET)/quicksand
bench: bench-programs
	$(BENCH) --json $(TARGET)/bench.json

# Measures again what docs/benchmarks.md shows, and writes the page and its plots.
benchmarks: bench-programs
	$(BENCH) --only side --only processes --only exec --only mounts --only states --only store --only long \
	    --json docs/figures/benchmarks.json
	./scripts/benchmarks docs/figures/benchmarks.json
	./scripts/chart docs/figures/benchmarks.json >docs/figures/states.svg

# The program that measures, the program that is measured, and the peer.
bench-programs: setup-tests
	$(CARGO) build --release --locked -p sandtree-bench -p sandtree-cli
	./scripts/quicksand $(TARGET)/quicksand || echo "Quicksand is left out"

# What a fresh machine has is not what a developer's has. `make fresh RUN="setup-tests lint"` makes these targets there.
RUN ?= demo test
fresh:
	@./scripts/fresh $(RUN)

clean:
	$(CARGO) clean
