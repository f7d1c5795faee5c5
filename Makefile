# `make demo` and `make test` do all their own set-up on a fresh Debian 12 machine with Rust.
.DELETE_ON_ERROR:
.PHONY: help setup setup-tests build demo test lint unit fuzz-short fuzz vm bench clean

CARGO ?= cargo
export CARGO_TERM_PROGRESS_WHEN ?= never

help:
	@echo "make demo    set up, build, and show the main job with timings"
	@echo "make test    set up, and pass every check and test"
	@echo "make build   the program: target/release/sandtree"
	@echo "make bench   measure, against plain QEMU in the same run"
	@echo "make fuzz    fuzz both ends of the guest protocol for longer"

# Installs only what is missing, and says what.
setup:
	@./scripts/setup

# The same, with what tests and benchmarks need beside it.
setup-tests:
	@./scripts/setup tests

build: setup
	$(CARGO) build --release --locked -p sandtree-cli

demo: build
	@./scripts/demo target/release/sandtree

test: setup-tests lint unit fuzz-short vm
	@echo "all checks and tests passed"

lint:
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets --locked -- -D warnings
	@./scripts/deny

unit:
	$(CARGO) test --workspace --locked --exclude sandtree-cli
	$(CARGO) test --locked -p sandtree-cli --bin sandtree

# A few seconds of each target; `make fuzz` runs longer.
fuzz-short:
	$(CARGO) run --locked -p sandtree-fuzz -- --seconds 2

fuzz:
	$(CARGO) run --release --locked -p sandtree-fuzz -- --seconds 120

# Real QEMU and real guests.
vm:
	$(CARGO) test --locked -p sandtree-cli --test 'vm-*'

bench: setup-tests build
	target/release/sandtree bench exec
	target/release/sandtree bench states
	target/release/sandtree bench store
	target/release/sandtree bench image

clean:
	$(CARGO) clean
