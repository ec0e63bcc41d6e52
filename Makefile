# make demo: build, run a training job that really leaks, print the finding.
# make test: everything that CI runs. Both do all of their own set-up.
.PHONY: all build demo test test-rust test-python lint bindings check-bindings bench soak clean
.DEFAULT_GOAL := build

CARGO ?= cargo
PREFIX ?= /usr/local

all build:
	@command -v $(CARGO) >/dev/null || { echo "cargo was not found; install Rust 1.89 or newer (https://rustup.rs)" >&2; exit 1; }
	$(CARGO) build --release --locked

demo: build
	@venv=$$(scripts/venv.sh) && target/release/strandline demo --python "$$venv/bin/python"

test: build lint test-rust check-bindings test-python

lint: build
	$(CARGO) fmt --check
	$(CARGO) clippy --release --locked --all-targets -- -D warnings
	@venv=$$(scripts/venv.sh) && "$$venv/bin/ruff" check python tests && "$$venv/bin/ruff" format --check python tests

test-rust: build
	@venv=$$(scripts/venv.sh) && STRANDLINE_TEST_TORCH_PYTHON="$$venv/bin/python" $(CARGO) test --release --locked

test-python: build
	@venv=$$(scripts/venv.sh) && "$$venv/bin/python" -m pytest -q tests

# The Rust declarations of the C header, made with a pinned libclang.
bindings:
	@venv=$$(scripts/venv.sh) && \
	LIBCLANG_PATH=$$("$$venv/bin/python" -c 'import clang, os; print(os.path.join(list(clang.__path__)[0], "native"))') \
	BINDGEN_EXTRA_CLANG_ARGS="-I$$(cc -print-file-name=include)" \
	$(CARGO) build --locked --features bindings --lib

check-bindings:
	@cp src/attach/bindings.rs target/bindings.before && $(MAKE) --no-print-directory bindings && \
	{ cmp -s target/bindings.before src/attach/bindings.rs || \
	  { echo "src/attach/bindings.rs is not what include/strandline.h says; commit the new one" >&2; exit 1; }; }

bench: build
	$(CARGO) bench --locked

clean:
	$(CARGO) clean
