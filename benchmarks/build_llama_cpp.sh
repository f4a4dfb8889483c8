#!/bin/bash
# llama.cpp's llama-bench and llama-batched-bench, peers of bench_decode.py, from the source that the package index has
# in the sdist of llama-cpp-python.
#
#     benchmarks/build_llama_cpp.sh source llama.tgz          fetches 77 MB, writes 2.4: what the two programs need
#     benchmarks/build_llama_cpp.sh cpu llama.tgz FOLDER      for this machine's CPU; the programs in FOLDER/bin
#     benchmarks/build_llama_cpp.sh cuda llama.tgz FOLDER     with a CUDA backend beside it; 5 minutes on 16 cores
#
# Builds read nothing but the archive: no network. JOBS: processes (default: one a core). CUDA_ARCH: default 90.
# CUBLAS: a folder with include/ and lib/ of cuBLAS, where the CUDA toolkit has none. CXXFLAGS=-mno-amx-int8: for virtual
# machines that show AMX and end llama.cpp's first product of several rows with "illegal instruction".
set -euo pipefail

VERSION=0.3.36
SUM=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e

usage() { sed -n '2,13s/^# \{0,1\}//p' "$0" >&2; exit 2; }

write_source() { # FILE
  local work; work=$(mktemp -d); trap "rm -rf '$work'" EXIT
  # pip asks a sdist for its metadata; what answers is installed beside, or pip would make an environment for it anew.
  python3 -m venv "$work/venv"
  "$work/venv/bin/pip" --disable-pip-version-check install -q scikit-build-core
  "$work/venv/bin/pip" --disable-pip-version-check download -q --no-deps --no-binary :all: --no-build-isolation \
    -d "$work" "llama-cpp-python==$VERSION"
  echo "$SUM  $work/llama_cpp_python-$VERSION.tar.gz" | sha256sum --check --quiet
  tar xzf "$work/llama_cpp_python-$VERSION.tar.gz" -C "$work"
  local from="$work/llama_cpp_python-$VERSION/vendor/llama.cpp" to="$work/llama.cpp" path
  mkdir -p "$to"
  # Backends, parts of them for other processors, and programs that these two do not link are left out.
  (cd "$from" && tar c --exclude='*.md' --exclude='*.py' --exclude='ggml/src/ggml-*/*' --exclude='tools/*' \
    CMakeLists.txt LICENSE cmake common ggml include src vendor/CMakeLists.txt vendor/cpp-httplib vendor/nlohmann \
    vendor/sheredom) | tar x -C "$to"
  for path in ggml/src/ggml-cpu ggml/src/ggml-cuda tools/llama-bench tools/batched-bench; do
    mkdir -p "$to/$path"
    (cd "$from/$path" && tar c --exclude='*.md' --exclude=kleidiai --exclude=spacemit --exclude='arch/[!xa]*' .) | tar x -C "$to/$path"
  done
  sed -i '/(hash)\|(miniaudio)\|(stb)/d' "$to/vendor/CMakeLists.txt"
  printf 'llama_add_compile_flags()\nadd_subdirectory(llama-bench)\nadd_subdirectory(batched-bench)\n' > "$to/tools/CMakeLists.txt"
  echo "$VERSION" > "$to/sdist"
  tar c --sort=name --owner=0 --group=0 --mtime=@0 -C "$work" llama.cpp | gzip -9n > "$1"
  ls -l "$1"
}

build() { # cpu|cuda FILE FOLDER
  mkdir -p "$3"
  tar xzf "$2" -C "$3"
  local folder; folder=$(cd "$3" && pwd)
  local options=(-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DGGML_NATIVE=ON -DLLAMA_BUILD_NUMBER=0
    "-DLLAMA_BUILD_COMMIT=llama-cpp-python-$(cat "$folder/llama.cpp/sdist")" -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF
    -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF)
  if [ "$1" = cuda ]; then
    # FlashAttention and graphs are on; of FlashAttention's kernels only those for caches in 16 bits and alike.
    options+=(-DGGML_CUDA=ON "-DCMAKE_CUDA_ARCHITECTURES=${CUDA_ARCH:-90}" -DGGML_CUDA_FA=ON -DGGML_CUDA_GRAPHS=ON
      -DGGML_CUDA_FA_ALL_QUANTS=OFF -DGGML_CUDA_NCCL=OFF)
    # The driver's library, whose name for the linker machines without its development files lack; else without VMM.
    local driver; driver=$({ ldconfig -p; ls /usr/local/cuda/lib64/stubs/* /usr/local/cuda/targets/*/lib/stubs/*; } \
      2> /dev/null | grep -o '/[^ ]*libcuda\.so[.0-9]*$' | head -1 || true)
    if [ -n "$driver" ]; then options+=("-DCUDA_cuda_driver_LIBRARY=$driver"); else options+=(-DGGML_CUDA_NO_VMM=ON); fi
    if [ -n "${CUBLAS:-}" ]; then
      options+=("-DCMAKE_CUDA_FLAGS=-isystem $CUBLAS/include"
        "-DCUDA_cublas_LIBRARY=$(ls "$CUBLAS"/lib/libcublas.so* | head -1)"
        "-DCUDA_cublasLt_LIBRARY=$(ls "$CUBLAS"/lib/libcublasLt.so* | head -1)"
        "-DCMAKE_BUILD_RPATH=$CUBLAS/lib")
    fi
  fi
  command -v ninja > /dev/null && options+=(-G Ninja)
  cmake -S "$folder/llama.cpp" -B "$folder/build" "${options[@]}" > "$folder/cmake.log" 2>&1 || { tail -20 "$folder/cmake.log" >&2; exit 1; }
  cmake --build "$folder/build" --target llama-bench llama-batched-bench -j "${JOBS:-$(env -u OMP_NUM_THREADS nproc)}"
  ln -sfn build/bin "$folder/bin"
  ls -l "$folder"/bin/
}

case "${1:-}" in
  source) [ $# = 2 ] || usage; write_source "$2" ;;
  cpu | cuda) [ $# = 3 ] || usage; build "$@" ;;
  *) usage ;;
esac
