# `make run` opens the chat, `make test` runs the tests, and `make help` lists the other targets.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
NATIVE := $(shell find native -type f 2>/dev/null) CMakeLists.txt pyproject.toml
BROWSER := $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)
ARGS   ?=

# Tests start many Python processes. With this variable, each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help run link test tests test-long check again lint format bench \
  results parity fuzz chaos races test-clients test-llama-cpp test-tune test-ray coverage clean stub sanitize screenshots lock \
  freeze plant audit sbom wheels front-wheel test-install test-readme test-arm docs deb test-deb test-image release matrix \
  test-darwin

help:  ## list these commands
	@awk -F ':.*## *' '/^[a-z-]+:.*##/ { printf "%-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.run  ## build what is missing and open the chat on http://127.0.0.1:3000 (ARGS="--port 3001")
	@command -v notso >/dev/null || echo "The command is $(CURDIR)/$(BIN)/notso; \`make link\` makes it available as notso."
	@$(BIN)/notso serve $(ARGS)

link: $(VENV)/.run  ## make the command available as notso, through a link in ~/.local/bin
	@mkdir -p "$(HOME)/.local/bin"; link="$(HOME)/.local/bin/notso"; \
	  if [ -e "$$link" ] && [ ! -L "$$link" ]; then echo "$$link is not a link; nothing was changed"; exit 1; fi; \
	  rm -f "$$link"; ln -s "$(CURDIR)/$(BIN)/notso" "$$link" && echo "$$link -> $(CURDIR)/$(BIN)/notso"; \
	  case ":$$PATH:" in *":$(HOME)/.local/bin:"*) ;; *) echo 'Add it to PATH: export PATH="$$HOME/.local/bin:$$PATH"';; esac

test: $(VENV)/.dev  ## run the tests affected by changes and some others; in a fresh clone, all (ARGS="-k words")
	@test -n "$(BROWSER)" || echo "no chromium found: the browser tests will be skipped"
	@$(if $(ARGS),$(BIN)/python -m pytest $(ARGS),FILES="$$($(BIN)/python tests/due_files.py)" && TESTS_PLANNED=1 $(MAKE) --no-print-directory tests FILES="$$FILES")

check: $(VENV)/.dev  ## run what .ci/run does: lint, the default suite, and the long tests affected by changes
	@LONG="$$($(BIN)/python tests/long_tests.py)"; export LONG; $(MAKE) --no-print-directory -j2 lint tests && \
	  case ",$$LONG," in *,clients,*) $(MAKE) --no-print-directory test-clients;; esac && \
	  case ",$$LONG," in *,tune,*) $(MAKE) --no-print-directory test-tune;; esac && \
	  case ",$$LONG," in *,ray,*) $(MAKE) --no-print-directory test-ray;; esac && \
	  $(if $(AGAIN),:,$(BIN)/python tests/long_tests.py --record "$$LONG")

# The default is four workers for two cores, because tests often wait. With AGAIN=1, failed tests (pytest's exit code 1)
# are left to `make again`; any other exit code fails the target.
JOBS ?= 4
tests: $(VENV)/.dev  ## run tests with four workers (FILES="tests/web/chat")
	@rm -f .pytest_cache/v/cache/lastfailed; \
	  $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(FILES) </dev/null || [ "$$?:$(AGAIN)" = 1:1 ]

test-long: $(VENV)/.dev  ## run all tests including the long ones, and record that they passed (commit the record)
	@LONG=all $(MAKE) --no-print-directory tests
	@$(MAKE) --no-print-directory test-clients
	@$(MAKE) --no-print-directory test-tune
	@$(MAKE) --no-print-directory test-ray
	@$(BIN)/python tests/long_tests.py --record

CLIENTS := $(addprefix build/tools-clients,/.done -openai-2/.done -lm-eval/.done)
CLIENT_TESTS = -m pytest -c tests/clients/pytest.ini -p no:cacheprovider

test-clients: $(VENV)/.run $(CLIENTS) build/npm-ai_sdk/.done build/npm-agents/.done  ## test other programs' clients against the server, with their default settings
	@build/tools-clients/bin/python $(CLIENT_TESTS) tests/clients/openai_3 tests/clients/ai_sdk tests/clients/agents
	@build/tools-clients-openai-2/bin/python $(CLIENT_TESTS) tests/clients/openai_2
	@build/tools-clients-lm-eval/bin/python $(CLIENT_TESTS) tests/clients/harness

test-llama-cpp: $(VENV)/.run build/tools-clients-openai-2/.done  ## run llama.cpp's own server tests against the server (LLAMA_CPP=CLONE)
	@LLAMA_CPP="$(LLAMA_CPP)" build/tools-clients-openai-2/bin/python tests/clients/llama_cpp/suite.py $(ARGS)

test-tune: $(VENV)/.dev  ## fine-tune the demo model with TRL and PEFT, in a separate environment
	@if $(MAKE) --no-print-directory build/tools-tune/.linked; then \
	  build/tools-tune/bin/python -m pytest -p no:cacheprovider tests/smollm3/tuning $(ARGS); \
	else echo "the packages of supply/tune.txt could not be installed: the tests of fine-tuning are skipped"; fi

test-ray: $(VENV)/.dev  ## kill and update two replicas under Ray Serve, and run a batch on them, in a separate environment
	@if $(MAKE) --no-print-directory build/tools-ray/.linked; then \
	  LONG=ray build/tools-ray/bin/python -m pytest -p no:cacheprovider tests/cluster $(ARGS); \
	else echo "the packages of supply/ray.txt could not be installed: the tests with Ray are skipped"; fi

# These environments also import from .venv, through a .pth file: the program, and the packages that both need.
.PRECIOUS: build/tools-%/.done
build/tools-%/.linked: build/tools-%/.done | $(VENV)/.dev
	@path='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  printf 'import site; site.addsitedir("%s")\n' "$$($(BIN)/python -c "$$path")" > \
	    "$$(build/tools-$*/bin/python -c "$$path")/zz_notso.pth"
	@touch $@

AARCH64_TESTS := tests/qtensor/test_neon.py tests/qtensor/test_neon_from_python.py tests/smollm3/engine/test_answers_on_aarch64.py

test-arm: $(VENV)/.dev build/aarch64-python/.done  ## run kernel tests and twenty answers on AArch64 under qemu (half an hour)
	@LONG=native $(BIN)/python -m pytest -s $(AARCH64_TESTS) $(ARGS)

test-darwin: $(VENV)/.dev  ## run the Python tests in a simulation of macOS: its names, page size, folders and system calls
	@$(BIN)/python tests/darwin/environment.py -n $(JOBS) --dist loadfile -q -r fE $(ARGS)

build/aarch64-python/.done: supply/run.txt supply/aarch64_python.py | $(VENV)/.dev
	@$(BIN)/python supply/aarch64_python.py || echo "an AArch64 Python could not be created: its tests will be skipped"

build/npm-%/.done: tests/clients/%/package.json tests/clients/%/package-lock.json
	@mkdir -p $(@D)
	@cp $^ $(@D)
	@cd $(@D) && { command -v npm >/dev/null && npm ci --ignore-scripts --no-audit --no-fund --silent || \
	  echo "npm is missing or could not install $*: its tests will be skipped"; }
	@touch $@

again: $(VENV)/.dev  ## rerun the failures of `make check AGAIN=1` alone; tests that then pass are reported as flaky
	@failed=.pytest_cache/v/cache/lastfailed; \
	  test -s "$$failed" || exit 0; \
	  names=$$($(BIN)/python -c 'import json, sys; print(*json.load(open(sys.argv[1])), sep="\n")' "$$failed"); \
	  $(BIN)/python -m pytest --last-failed --last-failed-no-failures none </dev/null || exit 1; \
	  printf '%s\n' "$$names" | sed 's/^/flaky: /'

lint: $(VENV)/.dev  ## run ruff, mypy (for Linux and macOS), import contracts and clang-format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	@$(BIN)/lint-imports
	@$(BIN)/python -c 'from notso.web.values.wording import LANGUAGES, missing_translations; [print(f"{code}.toml lacks", *lacking) \
	  for code in LANGUAGES if (lacking := missing_translations(code))]'
	@find native tests/native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.dev  ## format Python and C++
	@$(BIN)/ruff check --fix-only -q .
	@$(BIN)/ruff format -q .
	@find native tests/native -name '*.cpp' -o -name '*.h' | xargs $(BIN)/clang-format -i

bench: $(VENV)/.run  ## generate a full-size random model once and measure it (ARGS="--json")
	@test -f build/synth-3b.gguf || $(BIN)/notso synth build/synth-3b.gguf
	@$(BIN)/notso bench build/synth-3b.gguf $(ARGS)

screenshots: $(VENV)/.dev  ## retake the documentation's screenshots in a browser with the demo model
	@$(BIN)/python tests/browser/take_screenshots.py

results: $(VENV)/.run  ## write benchmarks/RESULTS.md from the figures in benchmarks/results
	@$(BIN)/python benchmarks/report.py

parity: $(VENV)/.dev  ## compare results with those of transformers and llama.cpp, if installed
	@$(BIN)/python -m pytest -m parity -o addopts="-ra --import-mode=importlib" tests $(ARGS)

FUZZED = tests/smollm3/engine/test_engine_stress.py tests/smollm3/engine/test_one_generation.py $(shell grep -l '^@given' tests/*/test_*.py tests/*/*/test_*.py)

fuzz: $(VENV)/.dev  ## run the fuzzers for longer (FUZZ_SECONDS=300)
	@FUZZ_SECONDS=$${FUZZ_SECONDS:-300} $(BIN)/python -m pytest -o timeout=0 tests/fuzz $(FUZZED) $(ARGS)

chaos: $(VENV)/.dev  ## run the attacks on the server at full length (hours), and write docs/reliability.md (ARGS="-k words")
	@LONG=chaos CHAOS=long $(BIN)/python -m pytest -o timeout=0 tests/chaos tests/web/test_deployed.py $(ARGS); status=$$?; \
	  $(BIN)/python tests/chaos/ledger.py > docs/reliability.md; exit $$status

freeze: $(VENV)/.dev  ## record what a refactoring must not change, or compare with a record (make freeze AGAINST=build/freeze/COMMIT)
	@now=build/freeze/$$(git rev-parse --short HEAD)$$([ -z "$$(git status --porcelain)" ] || echo +changed); \
	  $(if $(AGAINST),if [ ! -d "$(AGAINST)" ] || [ "$(AGAINST)" -ef "$$now" ]; then \
	    echo "AGAINST=$(AGAINST) must be the record of another state of the tree; nothing was recorded"; exit 1; fi;) \
	  rm -rf "$$now"; $(BIN)/python tests/freeze/record.py record "$$now" && \
	  $(if $(AGAINST),$(BIN)/python tests/freeze/record.py compare "$(AGAINST)" "$$now",echo "recorded in $$now")

plant: $(VENV)/.dev  ## count the files to change for a new parameter, setting, route, button or command (ARGS="parameter")
	@$(BIN)/python supply/plant.py $(ARGS)

coverage: $(VENV)/.dev  ## measure test coverage of Python and native code, and write docs/coverage.md
	@$(BIN)/python tests/measure_coverage.py $(ARGS)

races: $(VENV)/.dev  ## run the tests of threaded code under load with forced delays (ARGS="--runs 20")
	@$(BIN)/python tests/races/hunt.py $(ARGS)

sanitize: $(VENV)/.dev  ## run the native code under sanitizers for longer (SANITIZE_SECONDS=60)
	@LONG=native SANITIZE_SECONDS=$${SANITIZE_SECONDS:-60} $(BIN)/python -m pytest -rP -o timeout=0 tests/qtensor/test_sanitizers.py $(ARGS)

stub: $(VENV)/.dev  ## regenerate the typed stub of the native module, after changes to its bindings
	@$(BIN)/python -m nanobind.stubgen -q -m notso.qtensor._native -o src/notso/qtensor/_native.pyi

lock: build/tools-lock/.done  ## update the hashes in supply/, after changes to constraints.txt or pyproject.toml
	@build/tools-lock/bin/python supply/lock.py

audit: $(VENV)/.dev  ## check versions, files, startup files, licenses and known vulnerabilities of the installed packages
	@$(MAKE) --no-print-directory build/tools-audit/.done || echo "pip-audit could not be installed"
	@$(BIN)/python supply/audit.py build/tools-audit/bin/pip-audit

wheels: $(BIN)/python  ## build wheels and the source distribution into dist/ (ARGS="--python PYTHON --twice")
	@$(BIN)/python supply/wheels.py $(ARGS)

front-wheel: $(VENV)/.run  ## build a wheel without kernels, for front ends, into dist/
	@rm -f dist/notso_smollm3_bot-*-py3-none-any.whl
	@$(BIN)/pip wheel . --quiet --no-deps --no-build-isolation --wheel-dir dist -C wheel.cmake=false -C wheel.platlib=false -C wheel.py-api=py3

test-install: $(BIN)/python  ## install the built wheels in minimal Debian systems without a compiler (needs root and debootstrap)
	@$(BIN)/python supply/try_wheels.py $(ARGS)

test-readme: $(BIN)/python  ## follow README's quick start as an ordinary user of a minimal Debian (needs root and debootstrap)
	@$(BIN)/python supply/try_readme.py $(ARGS)

deb: $(BIN)/python  ## build the Debian package from the wheel into dist/ (ARGS="--suite bookworm")
	@$(BIN)/python supply/deb.py $(ARGS)

test-deb: $(BIN)/python  ## install the Debian package in a minimal Debian, run its service and remove it (needs root and debootstrap; ARGS="--boot")
	@$(BIN)/python supply/try_deb.py $(ARGS)

test-image: $(BIN)/python  ## execute deploy/Containerfile without Docker, measure and run the image (needs root and debootstrap)
	@$(BIN)/python supply/try_image.py $(ARGS)

matrix: $(BIN)/python  ## build as on a fresh machine with each available compiler and Python (ARGS="--debian trixie")
	@$(BIN)/python supply/matrix.py $(ARGS)

sbom: $(VENV)/.build-tools libraries  ## write the bill of materials build/sbom.json (CycloneDX)
	@$(BIN)/python supply/sbom.py build/sbom.json

docs: build/tools-docs/.done  ## build the documentation site in build/handbook/site; broken links fail
	@build/tools-docs/bin/python supply/handbook.py

release: $(BIN)/python  ## commit, build and tag a version: make release VERSION=0.2.0 (ARGS="--dry-run")
	@$(BIN)/python supply/release.py $(ARGS) $(VERSION)

clean:  ## remove everything that was built
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis artifacts

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Python 3.11 or newer is needed: install it (Debian: apt install python3 python3-venv; macOS: brew install python) or set PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || \
	  { echo "Python's headers are needed (Debian: apt install python3-dev)"; exit 1; }
	@cxx=$${CXX:-$$(command -v c++ || command -v g++ || command -v clang++)}; \
	  printf '#include <atomic>\nint main() { std::atomic<int> a{1}; a.wait(0); }\n' | \
	  $$cxx -std=c++20 -x c++ -fsyntax-only - 2>/dev/null || \
	  { echo "A C++20 compiler is needed: install g++ 12 or clang 15 or newer (Debian: apt install g++; macOS: xcode-select --install) or set CXX=..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Python's venv module is needed (Debian: apt install python3-venv)"; rm -rf $(VENV); exit 1; }

# pip installs only archives whose hashes are in the lock files. Lock files are complete, so --no-deps is sufficient. The
# old pip from the venv module is replaced, and its setuptools, which nothing needs, is uninstalled.
LOCKED := install --require-hashes --no-deps -r

$(VENV)/.build-tools: $(BIN)/python supply/build.txt
	@echo "installing build tools ..."
	@$(PIP) $(LOCKED) supply/build.txt
	@$(PIP) uninstall -y setuptools wheel 2>/dev/null
	@touch $@

$(VENV)/.run: $(VENV)/.build-tools supply/run.txt $(NATIVE)
	@echo "building notso (minutes the first time) ..."
	@$(MAKE) --no-print-directory -j2 libraries module
	@touch $@

# These two run in parallel, because one waits for the network and the other for the compiler.
.PHONY: libraries module
libraries:
	@$(PIP) $(LOCKED) supply/run.txt
module:
	@$(PIP) install --no-deps --no-build-isolation -e .

$(VENV)/.dev: $(VENV)/.run supply/dev.txt
	@echo "installing test and lint tools ..."
	@$(PIP) $(LOCKED) supply/dev.txt
	@$(PIP) check
	@echo "compiling tests ..."  # otherwise each worker of `make tests` compiles all of them
	@$(BIN)/python -m pytest -qq --collect-only >/dev/null || :
	@touch $@

# Each set of tools that the project does not import has a separate environment.
build/tools-%/.done: supply/%.txt | $(BIN)/python
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip --disable-pip-version-check -qq $(LOCKED) $<
	@touch $@
