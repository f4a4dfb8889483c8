// few_rows_lanes: which products it computes, and its launches.
#include <algorithm>

#include "device/launch.cuh"
#include "gemm/ampere/few_rows.cuh"
#include "gemm/gpu/few_rows_launch.cuh"

namespace ftbert {
namespace {

// Shared memory that a block may have on every GPU since 8.0; of a multiprocessor's 1 KB a block is the driver's.
constexpr int kBlockBytes = 99 * 1024, kDriverBytes = 1024;
// What a block declares, rounded up to 128 bytes, the unit of shared memory.
constexpr int kDeclaredBytes = (sizeof(LaneShared) + 127) / 128 * 128;

// Rows that a block lays out, with their scales, are the most where they are as many columns as it has registers for.
constexpr int kMostRowBytes = kMostLaidColumns * static_cast<int>(sizeof(half_t)) + kMostLaidRows * 256;
static_assert(kLaneRingBytes<LaneTiles<__half>> + kMostLaidColumns + kMostLaidColumns / 8 + 512 + kDeclaredBytes <=
              kBlockBytes);
static_assert(kLaneRingBytes<LaneRows<__half>> + kMostRowBytes + kDeclaredBytes <= kBlockBytes);

bool supports(const Gpu& gpu, int, const Product& p) {
  return gpu.capability >= 80 && !gpu.warpgroups && is_product_of_few_rows(p);
}

OwnGuess guess(const Gpu& gpu, const Product& p) { return supports(gpu, 0, p) ? guess_few_rows(gpu, p) : OwnGuess{}; }

template <class E, class Bringing, bool kLays>
void launch(const Context<Cuda>& context, const FewRows<E>& work) {
  const int rows = kLays ? work.m * work.row_bytes + Bringing::scale_bytes(work.m, work.k) : 0;
  const int bytes = kLaneRingBytes<Bringing> + rows, all = bytes + kDeclaredBytes + kDriverBytes;
  const int64_t together = std::clamp(context.shared_bytes_of_sm / all, 1, 2);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(work.n / kTileRows, together * context.sm_count));
  launch_overlapped(context, "kernel few_rows_lanes", few_rows_lanes_kernel<E, Bringing, kLays>, blocks,
                    kFewRowsReaders, SharedBytes(bytes, kBlockBytes - kDeclaredBytes), 1, work);
}

template <class E, class Bringing>
void prepare_and_launch(const Context<Cuda>& context, const Product& p, const ProductData& data) {
  FewRows<E> work = few_rows_work<E>(p, data);
  prepare_rows(context, p.b, Q8Order::lanes, work);
  if (!work.prepared) return launch<E, Bringing, true>(context, work);
  work.row_bytes = work.prepared_bytes;
  launch<E, Bringing, false>(context, work);
}

void run(const Context<Cuda>& context, int, const Product& p, const ProductData& data) {
  with_few_rows_type(p, data, [&]<class E>() {
    p.b == &formats::q8_0 ? prepare_and_launch<E, LaneTiles<E>>(context, p, data)
                          : prepare_and_launch<E, LaneRows<E>>(context, p, data);
  });
}

}  // namespace

const OwnKernel few_rows_lanes{
    "few_rows_lanes", ShapeList<FewRowsShape>::kVariants, kFewRowsParts, supports, guess, run};

}  // namespace ftbert
