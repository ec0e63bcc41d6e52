# make demo: build, run a training job that really leaks, print the finding.
# make test: everything that CI runs. Both do all of their own set-up.
.PHONY: all build install uninstall demo test property test-rust test-python lint bindings check-bindings bench clean
.DEFAULT_GOAL := build

CARGO ?= cargo

all build:
	@command -v $(CARGO) >/dev/null || { echo "cargo was not found; install Rust 1.89 or newer (https://rustup.rs)" >&2; exit 1; }
	$(CARGO) build --release --locked

demo: build
	@venv=$$(scripts/venv.sh) && target/release/strandline demo --python "$$venv/bin/python"

test: build lint test-rust check-bindings test-python

lint: build
	$(CARGO) fmt --check
	$(CARGO) clippy --locked --all-targets -- -D warnings
	$(CC) -std=c11 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -x c include/strandline.h
	$(CXX) -std=c++11 -fsyntax-only -Wall -Wextra -Wpedantic -Werror -x c++ include/strandline.h
	$(CXX) -std=c++17 -fsyntax-only -Wall -Wextra -Werror cuda/*.cpp
	@venv=$$(scripts/venv.sh) && "$$venv/bin/ruff" check python scripts tests benches && "$$venv/bin/ruff" format --check python scripts tests benches

# The property tests, here with seeds of their own and many cases; those of `make test` are the same every time.
CASES ?= 2000
property:
	PROPTEST_CASES=$(CASES) $(CARGO) test --locked --test heap_model --test ledger_exact --test replay_pickle

# STRANDLINE_REQUIRE_TORCH: a test that needs torch fails where there is none, instead of being skipped.
test-rust: build
	@venv=$$(scripts/venv.sh) && STRANDLINE_TEST_PYTHON="$$venv/bin/python" STRANDLINE_REQUIRE_TORCH=1 \
	PROPTEST_RNG_SEED=$${PROPTEST_RNG_SEED:-1} $(CARGO) test --locked --no-fail-fast

test-python: build
	@venv=$$(scripts/venv.sh) && "$$venv/bin/python" -m pytest -q -n auto --maxprocesses 4 --dist loadfile tests

# The Rust declarations of the C header, made with a pinned libclang.
bindings:
	@venv=$$(scripts/venv.sh) && \
	LIBCLANG_PATH=$$("$$venv/bin/python" -c 'import clang, os; print(os.path.join(list(clang.__path__)[0], "native"))') \
	BINDGEN_EXTRA_CLANG_ARGS="-I$$(cc -print-file-name=include)" \
	$(CARGO) check --locked --features bindings --lib

# A file that is right keeps its time, so that nothing is built anew for it.
check-bindings:
	@mkdir -p target && cp -p src/attach/bindings.rs target/bindings.before && \
	$(MAKE) --no-print-directory bindings && \
	{ cmp -s target/bindings.before src/attach/bindings.rs || \
	  { echo "src/attach/bindings.rs is not what include/strandline.h says; commit the new one" >&2; exit 1; }; } && \
	cp -p target/bindings.before src/attach/bindings.rs

# The command, the library, the C header and a pkg-config file. DESTDIR is put before every path, for packagers.
PREFIX ?= /usr/local
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
PLACE = $(DESTDIR)$(PREFIX)
install: build
	@case "$(PREFIX)" in /*) ;; *) echo "PREFIX=$(PREFIX) is not an absolute path" >&2; exit 2;; esac
	install -d "$(PLACE)/bin" "$(PLACE)/lib/pkgconfig" "$(PLACE)/include"
	install -m 755 target/release/strandline "$(PLACE)/bin/strandline"
	install -m 755 target/release/libstrandline.so "$(PLACE)/lib/libstrandline.so"
	install -m 644 include/strandline.h "$(PLACE)/include/strandline.h"
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@VERSION@|$(VERSION)|' scripts/strandline.pc.in >"$(PLACE)/lib/pkgconfig/strandline.pc"

uninstall:
	rm -f "$(PLACE)/bin/strandline" "$(PLACE)/lib/libstrandline.so" "$(PLACE)/include/strandline.h" "$(PLACE)/lib/pkgconfig/strandline.pc"

bench: build
	$(CARGO) bench --locked

clean:
	$(CARGO) clean
