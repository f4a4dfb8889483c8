// Products of up to eight rows: which there are, and their launches.
#include <algorithm>

#include "core/check.h"
#include "gemm/gpu/guessed_time.h"
#include "gemm/gpu/own.h"
#include "gemm/hopper/few_rows.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// Bytes of shared memory that a launch asks for.
constexpr int kWhole = 222 * 1024, kHalf = 108 * 1024, kMore = 132 * 1024, kLess = 84 * 1024;
constexpr int kFewestStages = 2;  // of the ring
// Beside them a block has FewRowsShared, in units of 128 bytes, and 1 KB of the driver's.
constexpr size_t kMultiprocessor = 228 * 1024, kBesides = (sizeof(FewRowsShared) + 127) / 128 * 128 + 1024;
static_assert(kWhole + kBesides <= kMultiprocessor && 2 * (kHalf + kBesides) <= kMultiprocessor);
static_assert(kMore + kLess + 2 * kBesides <= kMultiprocessor);

// Shared memory of a block, beside which a block of the kernel behind finds room: out and down, which add to the
// stream, get 84 KB, qkv and up 132 KB. One of each fits on a multiprocessor, two large ones do not. With 108 KB for
// each up to 70 of 132 blocks shared a multiprocessor with a block of the same kernel, and 35 multiprocessors had none.
// With more than two rows of a, 84 KB are too little.
struct BlockMemory {
  int bytes;
  int enough;  // stages of the ring; if fewer fit, the block has the whole multiprocessor
};
BlockMemory block_memory(int64_t m, bool add) {
  if (m > kMostLaidRows) return {kHalf, 4};
  return {add ? kLess : kMore, 3};
}

// Of a row of a in shared memory: eight of them begin in different banks.
int row_bytes(const Format* b, int64_t k) {
  return static_cast<int>(b == &formats::q8_0 ? (k + 127) / 128 * 128 + 16 : (2 * k + 127) / 128 * 128 + 64);
}
// Of all m, and of the scales behind them.
int64_t rows_bytes(const Format* b, int64_t m, int64_t k) {
  const int64_t scales =
      b == &formats::q8_0 ? Q8Tiles<__half>::scale_bytes(static_cast<int>(m), static_cast<int>(k)) : 0;
  return m * row_bytes(b, k) + scales;
}

bool fits(const Gpu& gpu, DType stream, const Format* b, int64_t m, int64_t n, int64_t k) {
  const bool q8 = b == &formats::q8_0;
  const int chunk = q8 ? Q8Tiles<__half>::kChunk : PlainRows<__half>::kChunk;
  return gpu.warpgroups && is_16_bit(stream) && (q8 || b->numbers == stream) && m > 0 && m <= kMostFewRows && n > 0 &&
         n % kTileRows == 0 && k > 0 && k % (q8 ? Q8Tiles<__half>::kStep : PlainRows<__half>::kStep) == 0 &&
         n * k <= INT32_MAX && k <= kMostPreparedColumns && rows_bytes(b, m, k) + kFewestStages * chunk <= kWhole;
}

bool supports(const Gpu& gpu, int, const Product& p) {
  const Epilogue& e = p.epilogue;
  const bool sums = e.activation == Activation::none && e.gate == Gate::none;
  return p.c == p.a && (!e.residual || sums) && fits(gpu, p.a, p.b, p.m, p.n, p.k);
}

// Of 16 bits cuBLASLt's kernels for few rows are as fast where L2 holds what they read; beside wgmma_tile it was not
// measured.
OwnGuess guess(const Gpu& gpu, const Product& p) {
  const bool q8 = p.b == &formats::q8_0;
  if (!supports(gpu, 0, p) || (is_plain(p) && !q8 && !is_reading(p))) return {};
  return {0, 2.5 + reading_microseconds(p), !q8};
}

// How rows of a come to the blocks: as they are; or each block lays them out itself, one or two where they fit its
// registers; or a kernel prepares them. Prepared, 8 rows of a layer of Llama-2-7B take 112 us in Q8_0, laid out 167.
template <class E, class Storage>
void prepare(const Context<Cuda>& context, FewRows<E>& work) {
  constexpr bool kQ8 = std::is_same_v<Storage, Q8Tiles<E>>;
  if (!kQ8 && work.norm.kind == NormKind::none) {
    work.prepared = reinterpret_cast<const char*>(work.a), work.prepared_bytes = work.k * static_cast<int>(sizeof(E));
    return;
  }
  if (work.m <= kMostLaidRows && work.m * work.k <= kMostLaidColumns) return;
  FTBERT_CHECK(
      context.gemm_workspace && context.gemm_workspace_bytes >= kMostFewRows * kMostPreparedColumns * sizeof(E),
      "few_rows needs Context::gemm_workspace");
  work.prepared = static_cast<const char*>(context.gemm_workspace);
  if constexpr (kQ8) {
    work.prepared_bytes = work.k;
    FewRows<E> prepared = work;
    prepared.row_bytes = work.prepared_bytes;
    launch_overlapped(context, "kernel few_rows", prepare_rows_kernel<E, Storage>, static_cast<unsigned>(work.m),
                      kPrepareThreads, size_t{0}, 1, prepared);
  } else {
    using T = std::conditional_t<std::is_same_v<E, __half>, half_t, bfloat16_t>;
    work.prepared_bytes = work.k * static_cast<int>(sizeof(E));
    Context<Cuda> same = context;
    add_bias_input_layernorm<Cuda, T>(same, reinterpret_cast<const T*>(work.a), nullptr, nullptr,
                                      norm_over<T>(work.norm), work.m, work.k,
                                      {.copy = Operand::of(static_cast<T*>(context.gemm_workspace))});
  }
}

template <class E, class Storage>
void launch(const Context<Cuda>& context, const Product& p, FewRows<E> work) {
  const int64_t rows = rows_bytes(p.b, p.m, p.k);
  const auto stages = [&](int64_t room) { return std::min<int64_t>(kMostStages, (room - rows) / Storage::kChunk); };
  const BlockMemory memory = block_memory(p.m, work.add);
  int64_t count = stages(memory.bytes);
  if (count < memory.enough) count = stages(kWhole);
  work.stages = static_cast<int>(count);
  prepare<E, Storage>(context, work);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.n / kTileRows, context.sm_count));
  launch_overlapped(context, "kernel few_rows", few_rows_kernel<E, Storage>, blocks, kFewRowsThreads,
                    SharedBytes(count * Storage::kChunk + rows, kWhole), 1, work);
}

template <class E>
void run_type(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  const FewRows<E> work{.a = static_cast<const E*>(data.a),
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
                        .row_bytes = row_bytes(p.b, p.k),
                        .count = data.tile_count,
                        .prepared = nullptr,
                        .prepared_bytes = 0};
  p.b == &formats::q8_0 ? launch<E, Q8Tiles<E>>(context, p, work) : launch<E, PlainRows<E>>(context, p, work);
}

void run(const Context<Cuda>& context, int, const Product& p, const ProductData& data) {
  FTBERT_CHECK(!data.norm || data.norm.gamma, "few_rows: a norm without gamma");
  p.a == DType::fp16 ? run_type<__half>(context, p, data) : run_type<__nv_bfloat16>(context, p, data);
}

struct Shape {
  static constexpr int kTileM = kMostFewRows, kTileN = kTileRows, kSplit = 1;
  static constexpr std::string_view kKind = {};
};

constexpr Parts kReads{Part::bias, Part::activation, Part::gate, Part::residual, Part::norm_rows};

}  // namespace

const OwnKernel few_rows{"few_rows", ShapeList<Shape>::kVariants, kReads, supports, guess, run};

}  // namespace ftbert
