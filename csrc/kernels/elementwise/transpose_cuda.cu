// [count, heads, seq, head_size] -> [tokens, width], dropping padding.
#include "core/check.h"
#include "core/dispatch.h"
#include "device/column_walk.cuh"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

template <int W, class E>
__global__ void __launch_bounds__(kColumnThreads)
    transpose_kernel(const E* __restrict__ x, int64_t first_token, const int32_t* __restrict__ cu_seqlens, int64_t rows,
                     int64_t seq, int heads, int head_size, int packs, E* __restrict__ out) {
  SequenceWalk walk(packs, seq);
  if (walk.idle()) return;
  const int col = walk.pack * W;
  const int64_t hidden = int64_t{heads} * head_size;
  const E* in = x + col / head_size * seq * head_size + col % head_size;
  for (; walk.row < rows; walk.next(seq)) {
    const int64_t begin = cu_seqlens[walk.sequence], end = cu_seqlens[walk.sequence + 1];
    if (begin + walk.position >= end) continue;
    Packed<E, W>::load(in + (walk.sequence * heads * seq + walk.position) * head_size)
        .store(out + (begin + walk.position - first_token) * hidden + col);
  }
}

}  // namespace

template <class Device, class T>
void transpose(Context<Device>& context, const Heads& heads, const T* x, const Sequences& sequences, T* out) {
  const int64_t seq = sequences.max_k, rows = sequences.count * seq, cols = heads.width();
  if (rows == 0 || cols == 0) return;
  FTBERT_CHECK(cols < (1 << 30), "transpose: a row has at most 2^30 elements, got ", cols);
  const auto launch = [&]<int W>() {
    const int64_t packs = cols / W;
    launch_kernel(context, "kernel transpose", transpose_kernel<W, native_t<T>>,
                  column_blocks(rows, packs, 2, context.sm_count), kColumnThreads, native(x), sequences.first_q,
                  sequences.cu_q, rows, seq, heads.count, heads.size, packs, native(out));
  };
  with_width<kWidth<T>>(vectorizable(kWidth<T>, heads.size, x, out), launch);
}

FTBERT_INSTANTIATE_CUDA(transpose, Cuda)

}  // namespace ftbert
