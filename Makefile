# SPDX-License-Identifier: MIT
#
# Every job of the project. Each builds what it needs and only what changed;
# what is slow to build is kept in $XDG_CACHE_HOME/vtpu (or ~/.cache/vtpu).

PYTHON ?= python3
PORT ?= 8000
PROMPT ?=
MAX_TOKENS ?=
MODEL ?=
KERNEL ?= default
TOOLS ?=
SECONDS ?= 60
SOURCE ?= kmod
TEST ?=
ONCE ?=
WHAT ?= kernel
GDB ?=
REPLAY ?=
FILE ?=
ELF ?=
IGT ?=
ARGS ?=

# A value that a person gives is passed on as it is: neither make nor the shell
# may look for variables or commands in it.
inputs := PROMPT MAX_TOKENS MODEL PORT SECONDS REPLAY SOURCE TEST WHAT GDB KERNEL FILE ELF IGT
$(foreach name,$(inputs),$(eval override $(name) := $$(value $(name))))
export $(inputs)
# Whatever boots a guest boots this kernel.
export VTPU_KERNEL = $(KERNEL)
export VTPU_TOOLS = $(TOOLS)
# What a message that asks for root tells to run.
export VTPU_GOALS := $(MAKECMDGOALS)
# No shell in between: signals that make passes on, and its death, have to arrive.
guest := exec env PYTHONPATH=guest-image $(PYTHON) -m vtpu_guest
host := $(guest) python --
model := $(if $(MODEL),--model="$$MODEL")
checked := python compiler guest-image tests bench qemu-device

.DEFAULT_GOAL := help
.PHONY: run serve shell exec kmod-dev debug build test test-fast test-driver test-device fuzz-device fuzz-driver bench bench-device lint lint-driver coredump clean help

run: ## Stream the answer to PROMPT="..." [MAX_TOKENS=n] [MODEL=file.gguf]
	@$(guest) run $(model) $(if $(PROMPT),--prompt="$$PROMPT") $(if $(MAX_TOKENS),--max-tokens="$$MAX_TOKENS")

serve: ## Serve the OpenAI API on 127.0.0.1:PORT (8000) until Ctrl-C
	@$(guest) serve $(model) --port="$$PORT"

shell: ## Open a root shell in the guest [TOOLS=1: with perf, bpftrace, trace-cmd, gdb]
	@$(guest) shell $(model)

kmod-dev: ## Put the driver into the running guest, now and after each save [TEST=pytest arguments] [ONCE=1]
	@$(guest) kmod-dev $(model) --source="$$SOURCE" --test="$$TEST" $(if $(ONCE),--once)

debug: ## gdb on the running guest's kernel and driver, or WHAT=qemu [GDB="command; command"]
	@$(guest) debug $(model) --commands="$$GDB" "$$WHAT"

build: ## Build all images without booting
	@$(guest) build $(model)

test: ## Run every test, in the guest and out of it [ARGS="pytest arguments"]
	@$(guest) build
	@$(host) -m pytest -m "not stress" $(ARGS)

test-fast: ## Run the tests that need no guest
	@$(host) -m pytest -m "not guest and not fuzz" $(ARGS)

test-driver: ## Run the driver's tests, the long ones too [KERNEL=name] [IGT=folder]
	@$(guest) build
	@$(host) -m pytest $(if $(filter tests/%,$(ARGS)),,tests/guest/driver) $(ARGS)

test-device: ## Run the tests of the hardware, on its own and in QEMU
	@$(host) -m pytest tests/host/device tests/qtest $(ARGS)

fuzz-device: ## Look for inputs that break the hardware, for SECONDS (60), or run one again [REPLAY=file]
	@$(guest) fuzz --seconds="$$SECONDS" --replay="$$REPLAY"

fuzz-driver: ## Look for calls that break the driver, for SECONDS (60), or make some again [KERNEL=name] [REPLAY=file]
	@$(guest) fuzz-driver --seconds="$$SECONDS" --replay="$$REPLAY"

bench: ## Measure against llama.cpp; JSON on stdout
	@$(guest) build >&2
	@$(host) -m bench

bench-device: ## Measure the device alone against what this host can do; JSON on stdout
	@$(host) -m bench.device

lint: ## Check style and types
	@$(host) -m ruff check $(wildcard $(checked))
	@$(host) -m ruff format --check $(wildcard $(checked))
	@$(host) -m mypy guest-image/vtpu_guest $(wildcard python/vtpu compiler/vtpu_compiler)

lint-driver: ## Check the driver's source with the kernel's checkpatch, sparse and coccinelle
	@$(guest) lint-driver

coredump: ## Explain a core dump of the device, FILE=file [ELF="executable or folder"]
	@$(host) -m vtpu_compiler coredump "$$FILE" $(if $(ELF),"$$ELF")

clean: ## Remove all that was built and downloaded
	@$(guest) clean

help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20
	@echo 'What boots a guest takes KERNEL=default, backports (the newest) or debug (every checker; slow).'
