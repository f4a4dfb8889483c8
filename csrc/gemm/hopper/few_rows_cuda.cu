// few_rows: which products it computes, and its launches.
#include <algorithm>

#include "device/launch.cuh"
#include "gemm/gpu/few_rows_launch.cuh"
#include "gemm/hopper/few_rows.cuh"

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

// Of all m rows of a in shared memory, and of the scales behind them.
int64_t rows_bytes(const Format* b, int64_t m, int64_t k) {
  const int64_t scales =
      b == &formats::q8_0 ? BulkTiles<__half>::scale_bytes(static_cast<int>(m), static_cast<int>(k)) : 0;
  return m * shared_row_bytes(b, k) + scales;
}

bool supports(const Gpu& gpu, int, const Product& p) {
  const int chunk = p.b == &formats::q8_0 ? BulkTiles<__half>::kChunk : BulkRows<__half>::kChunk;
  return gpu.warpgroups && is_product_of_few_rows(p) && rows_bytes(p.b, p.m, p.k) + kFewestStages * chunk <= kWhole;
}

OwnGuess guess(const Gpu& gpu, const Product& p) { return supports(gpu, 0, p) ? guess_few_rows(gpu, p) : OwnGuess{}; }

template <class E, class Storage>
void launch(const Context<Cuda>& context, const Product& p, FewRows<E> work) {
  const int64_t rows = rows_bytes(p.b, p.m, p.k);
  const auto stages = [&](int64_t room) { return std::min<int64_t>(kMostStages, (room - rows) / Storage::kChunk); };
  const BlockMemory memory = block_memory(p.m, work.add);
  int64_t count = stages(memory.bytes);
  if (count < memory.enough) count = stages(kWhole);
  work.stages = static_cast<int>(count);
  prepare_rows(context, p.b, Q8Order::columns, work);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(p.n / kTileRows, context.sm_count));
  launch_overlapped(context, "kernel few_rows", few_rows_kernel<E, Storage>, blocks, kFewRowsThreads,
                    SharedBytes(count * Storage::kChunk + rows, kWhole), 1, work);
}

void run(const Context<Cuda>& context, int, const Product& p, const ProductData& data) {
  with_few_rows_type(p, data, [&]<class E>() {
    const FewRows<E> work = few_rows_work<E>(p, data);
    p.b == &formats::q8_0 ? launch<E, BulkTiles<E>>(context, p, work) : launch<E, BulkRows<E>>(context, p, work);
  });
}

}  // namespace

const OwnKernel few_rows{"few_rows", ShapeList<FewRowsShape>::kVariants, kFewRowsParts, supports, guess, run};

}  // namespace ftbert
