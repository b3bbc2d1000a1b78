# Everything a developer or CI runs. The first target that needs it makes `.venv` and builds the
# extension into it; nothing has to be installed by hand but git, a C toolchain, make, Rust and
# Python 3.10+. `make test PYTHON=/path/to/python` takes that Python, and its torch when it has one;
# CONSTRAINTS=constraints-oldest.txt takes the oldest packages (with Python 3.10). What was named
# last stays so until `make clean`; where it is another one than before, `.venv` is made anew.

CHOICE := .cache/choice
$(shell mkdir -p .cache; touch -a $(CHOICE))
ifeq ($(origin PYTHON) $(origin CONSTRAINTS),undefined undefined)
include $(CHOICE)
endif
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTENSION := $(VENV)/.extension
DOCS := $(VENV)/.docs
$(shell printf 'PYTHON ?= %s\nCONSTRAINTS ?= %s\n' '$(PYTHON)' '$(CONSTRAINTS)' >$(CHOICE).new; \
	cmp -s $(CHOICE).new $(CHOICE) && rm $(CHOICE).new || mv $(CHOICE).new $(CHOICE))
# Each of the thousand processes that tests start would compile all sources again.
unexport PYTHONDONTWRITEBYTECODE
RUST_SOURCES := $(shell find crates -name '*.rs' -o -name Cargo.toml) Cargo.toml

.PHONY: demo test test-rust test-python test-neon test-torch-suite test-torch-versions faults swarm fuzz adversary lint bench docs format wheels release audit clean build

demo: build
	$(BIN)/gradlane demo

test: test-rust test-python

# No crate has tests in its documentation, and linting compiles the examples. Twice as many tests at a time as
# there are processors: those of the transport wait most of their time. TEST_FUZZ_S is the seconds of a fuzz target.
test-rust: .cache/tools
	$(addprefix GRADLANE_FUZZ_S=,$(TEST_FUZZ_S)) RUST_TEST_THREADS=$$((2 * $$(nproc))) cargo test --workspace --exclude gradlane-py --lib --tests

# Four files at a time: much of what tests do is waiting for others. `TEST_JOBS=0` runs one after another.
TEST_JOBS ?= 4
test-python: build
	$(BIN)/python -m pytest --numprocesses $(TEST_JOBS) --dist loadfile

# Kills, stops and cuts off ranks of real trainings at drawn moments (docs/faults.md); `SEED` is of
# the first fault. As root, else faults of the network are skipped.
SEED ?= 1
COUNT ?= 200
faults: build
	$(BIN)/python -m tests.faults --seed $(SEED) --count $(COUNT)
	$(BIN)/python -m tests.faults --going-on --seed $(SEED) --count $(COUNT)
	$(BIN)/python -m tests.faults --starting --seed $(SEED) --count $(COUNT)
	$(BIN)/python -m tests.faults --local-updates --seed $(SEED) --count $(COUNT)
	$(BIN)/python -m tests.faults --store --seed $(SEED) --count $(COUNT)
	$(BIN)/python -m tests.faults --options --seed $(SEED) --count $(COUNT)

# Clusters in virtual time whose ranks are killed, stopped and cut off at any moment: as many seeds, and every
# kill point of a small one.
SWARM_SEEDS ?= 1000000
swarm: .cache/tools
	GRADLANE_SWARM=$(SWARM_SEEDS) cargo test --release -p gradlane-engine --lib membership::tests -- --nocapture
	GRADLANE_SWARM=$(SWARM_SEEDS) cargo test --release -p gradlane-engine --test all -- --nocapture going_on::

# Torch's own tests of its backends over Gloo and over gradlane, and what Gloo alone passes (docs/backend.md);
# they need expecttest.
SUITE_RANKS ?= 2
test-torch-suite: build
	$(BIN)/python -m tests.distributed.torch_suite --ranks $(SUITE_RANKS)

# The kernel's tests with other versions of torch and Python, each in an environment of its own; says what to install,
# and writes the table of docs/support.md. MATRIX: its arguments, such as `--keep 3.11:2.7.1`.
test-torch-versions: build
	$(BIN)/python -m tests.version_matrix $(MATRIX)

# By emulation on other machines than aarch64; says what to install. CI does not run it.
test-neon: .cache/tools
	bash scripts/test-neon

# The pure crates by themselves, since only so they and what they use are built without std.
lint: build
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	cargo clippy -p gradlane-units -p gradlane-wire -p gradlane-engine -- -D warnings
	$(BIN)/ruff check python papers tests examples benchmarks
	$(BIN)/ruff format --check python papers tests examples benchmarks
	$(BIN)/mypy

bench: .cache/tools
	cargo bench -p gradlane-codec --bench kernels -- --json $(CURDIR)/bench.json
	cargo bench -p gradlane-seal --bench sealing -- --json $(CURDIR)/bench-seal.json

# All targets side by side, guided by coverage, for an hour or FUZZ_S seconds. Needs a C++ compiler. `make test` gives
# the same targets drawn inputs for ten seconds (docs/decisions/0064-fuzzing-beside-ci.md).
FUZZ_S ?= 3600
fuzz: .cache/tools
	bash scripts/fuzz $(FUZZ_S)

# Sealed connections with somebody on the path: as many cases of frames of every kind, of two ranks over relayed
# sockets, and a tenth of it of whole sessions. CI takes 5,000 of ranks over sockets, and fewer of the others.
ADVERSARY_CASES ?= 10000
adversary: .cache/tools
	GRADLANE_ADVERSARY_CASES=$(ADVERSARY_CASES) cargo test -p gradlane-net --lib -- --nocapture \
		no_changed_frame_of_any_kind somebody_on_the_path every_flipped_bit moved_frames
	GRADLANE_ADVERSARY_CASES=$(ADVERSARY_CASES) cargo test -p gradlane-net --test all -- --nocapture sealing::

# The site, into `site`, which opens without a network. A warning of MkDocs is an error, and tests look
# for what would come from other hosts.
docs: build $(DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python -m pytest -q tests/documents/test_site.py
	@echo "wrote site/index.html"

$(DOCS): $(STAMP)
	$(BIN)/python scripts/extra-requirements docs | $(BIN)/python -m pip install --quiet \
		--disable-pip-version-check --constraint $(VENV)/constraints.txt --requirement /dev/stdin
	@touch $@

# What a release publishes, into `dist`: wheels that need no Rust, and the source.
wheels: .cache/tools
	PYTHON="$(PYTHON)" bash scripts/make-wheels dist

# Everything that a release publishes, twice from the last commit, compared and checked, and an upload rehearsed on
# this machine. Uploads nothing. TARGETS=x86_64-unknown-linux-gnu builds that target alone.
release: .cache/tools
	PYTHON="$(PYTHON)" "$(PYTHON)" scripts/release dist

# Known weaknesses of the crates and Python packages in use. Needs the network; CI does not run it.
audit: build
	bash scripts/audit $(VENV)

format: build
	cargo fmt --all
	$(BIN)/ruff check --fix python papers tests examples benchmarks
	$(BIN)/ruff format python papers tests examples benchmarks

build: $(EXTENSION)

# The environment is made with the extension in it; later changes of Rust code rebuild only that.
$(EXTENSION): $(STAMP) $(RUST_SOURCES)
	VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin develop --release --quiet --skip-install
	@touch $@

$(STAMP): .cache/tools pyproject.toml papers/pyproject.toml $(CONSTRAINTS) scripts/make-venv $(CHOICE)
	PYTHON="$(PYTHON)" bash scripts/make-venv $(VENV) $(CONSTRAINTS) $(CHOICE)
	@touch $@

.cache/tools: scripts/check-tools
	@PYTHON="$(PYTHON)" bash scripts/check-tools python || { : >$(CHOICE); exit 1; }
	@PYTHON="$(PYTHON)" bash scripts/check-tools
	@mkdir -p .cache && touch $@

clean:
	cargo clean
	rm -rf $(VENV) .cache dist site bench.json bench-seal.json demo.html
