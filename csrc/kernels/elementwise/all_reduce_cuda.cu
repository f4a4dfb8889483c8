// x = the sum over ranks of their parts, for what has no norm behind it.
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/peers.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;

template <class E, int W>
__global__ void __launch_bounds__(kThreads) all_reduce_kernel(const PeerParts parts, int64_t count, E* x) {
  const PeerMeeting others(parts);
  wait_for_inputs();
  others.meet();
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * W;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * W; at < count; at += step) {
    float sum[W] = {};
    for (int rank = 0; rank < parts.size; ++rank) {
      float y[W];
      Packed<E, W>::load(static_cast<const E*>(parts.parts[rank]) + at).to_floats(y);
#pragma unroll
      for (int w = 0; w < W; ++w) sum[w] = rank == 0 ? y[w] : sum[w] + y[w];
    }
    Packed<E, W>::from_floats(sum).store(x + at);
  }
}

}  // namespace

template <class T>
void all_reduce(Context<Cuda>& context, const PeerParts& all, int64_t count, T* x) {
  if (count == 0) return;
  PeerParts parts = all;
  parts.inbox_bytes = 0;  // it reads them where they are
  with_width<kWidth<T>>(vectorizable(kWidth<T>, count, x), [&]<int W>() {
    const int64_t blocks = (count / W + kThreads - 1) / kThreads;
    launch_overlapped(context, "kernel all_reduce", all_reduce_kernel<native_t<T>, W>,
                      static_cast<unsigned>(std::min<int64_t>(blocks, context.sm_count)), kThreads, 0, 1, parts, count,
                      native(x));
  });
}

FTBERT_INSTANTIATE_CUDA(all_reduce)

}  // namespace ftbert
