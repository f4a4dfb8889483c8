// Tuned tables: which kernel or algorithm runs a product, by ranges of m. No CUDA header: plans_cuda.cpp, or
// gemm_none.cpp in a build without CUDA.
#pragma once
#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "gemm/gpu/own.h"
#include "gemm/product.h"

namespace ftbert {

// A row of a tuned table: for m from `from` to `to`, both included.
struct TunedRow {
  Product product;  // m is not read
  int64_t from = 0, to = 0;
  OwnChoice own = {};                   // if there is none:
  std::array<uint64_t, 8> algorithm{};  // cuBLASLt's

  // cuBLASLt's, whatever that is; with a norm: no kernel that contains the norm.
  bool is_first_proposal() const { return !own && algorithm == std::array<uint64_t, 8>{}; }
};

// False for a kernel or variant that this build does not have.
bool is_known(std::string_view kernel, std::string_view variant);

// From now on `linear` on this device uses these rows; elsewhere, and where the GPU or cuBLASLt refuses a row,
// guess_product or cuBLASLt's first proposal. Replaces an earlier table. Rows with an algorithm of cuBLASLt must come
// from gemm_library_version() and this kind of GPU.
void set_table(int device, const std::vector<TunedRow>& rows);

}  // namespace ftbert
