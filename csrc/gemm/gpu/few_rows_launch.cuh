// Products of up to eight rows as launches see them: which there are, what kernels are given, and rows of a that are
// made ahead of them.
#pragma once
#include "core/check.h"
#include "gemm/gpu/few_rows_norm.cuh"
#include "gemm/gpu/few_rows_storage.cuh"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"

namespace ftbert {

// Sets work.prepared and work.prepared_bytes, unless the blocks that multiply lay rows out themselves: rows as they
// are, or those that a kernel makes in Context::gemm_workspace. order: of b in Q8_0. few_rows_prepare_cuda.cu.
template <class E>
void prepare_rows(const Context<Cuda>& context, const Format* b, Q8Order order, FewRows<E>& work);

namespace {

constexpr Parts kFewRowsParts{Part::bias, Part::activation, Part::gate, Part::residual, Part::norm_rows};

struct FewRowsShape {
  static constexpr int kTileM = kMostFewRows, kTileN = kTileRows, kSplit = 1;
  static constexpr std::string_view kKind = {};
};

// Whether a kernel for few rows computes it that has memory enough.
inline bool is_product_of_few_rows(const Product& p) {
  const Epilogue& e = p.epilogue;
  const bool q8 = p.b == &formats::q8_0, sums = e.activation == Activation::none && e.gate == Gate::none;
  return p.c == p.a && (!e.residual || sums) && is_16_bit(p.a) && (q8 || p.b->numbers == p.a) && p.m > 0 &&
         p.m <= kMostFewRows && p.n > 0 && p.n % kTileRows == 0 && p.k > 0 &&
         p.k % (q8 ? kQ8TileDepth : PlainRows<__half>::kStep) == 0 && p.n * p.k <= INT32_MAX &&
         p.k <= kMostPreparedColumns;
}

// Of a product that the kernel supports. Of 16 bits cuBLASLt's kernels for few rows are as fast where L2 holds what
// they read; beside wgmma_tile it was not measured.
inline OwnGuess guess_few_rows(const Gpu& gpu, const Product& p) {
  const bool q8 = p.b == &formats::q8_0;
  if (is_plain(p) && !q8 && !is_reading(gpu, p)) return {};
  return {0, 2.5 + reading_microseconds(gpu, p), !q8};
}

// Of a row of a in shared memory: eight of them begin in different banks.
inline int shared_row_bytes(const Format* b, int64_t k) {
  return static_cast<int>(b == &formats::q8_0 ? (k + 127) / 128 * 128 + 16 : (2 * k + 127) / 128 * 128 + 64);
}

template <class E>
FewRows<E> few_rows_work(const Product& p, const ProductData& data) {
  return {.a = static_cast<const E*>(data.a),
          .b = data.b,
          .bias = static_cast<const E*>(data.bias),
          .c = static_cast<E*>(data.c),
          .norm = norm_over<E>(data.norm),
          .add = p.epilogue.residual,
          .activation = p.epilogue.activation,
          .gate = p.epilogue.gate,
          .m = static_cast<int>(p.m),
          .n = static_cast<int>(p.n),
          .k = static_cast<int>(p.k),
          .stages = 0,
          .row_bytes = shared_row_bytes(p.b, p.k),
          .count = data.tile_count,
          .prepared = nullptr,
          .prepared_bytes = 0};
}

// launch.operator()<E>(): of the product's type.
template <class Launch>
void with_few_rows_type(const Product& p, const ProductData& data, const Launch& launch) {
  FTBERT_CHECK(!data.norm || data.norm.gamma, "a product of few rows: a norm without gamma");
  p.a == DType::fp16 ? launch.template operator()<__half>() : launch.template operator()<__nv_bfloat16>();
}

}  // namespace
}  // namespace ftbert
