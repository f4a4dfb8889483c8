// Rows of a token's neighbours in its sequence beside each other, as a convolution over columns reads them.
#include <algorithm>

#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 256;

// A block has a place of a neighbour of a token, its threads the columns.
template <class E>
__global__ void __launch_bounds__(kThreads)
    neighbour_rows_kernel(const E* __restrict__ x, const int32_t* __restrict__ cu_seqlens, int64_t first_token,
                          const int32_t* __restrict__ columns, int64_t count, int64_t seq, int kernel, int64_t cols,
                          E* __restrict__ out) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t place = i / kernel, sequence = place / seq;
    const int64_t begin = cu_seqlens[sequence], end = cu_seqlens[sequence + 1], token = begin + place % seq;
    if (token >= end) continue;
    const int offset = static_cast<int>(i % kernel) - kernel / 2;
    int64_t from = token + offset;
    if (columns)  // which ascend: with gaps the neighbour is nearer, or there is none
      while (from != token && (from < begin || from >= end || columns[from] != columns[token] + offset))
        from += from < token ? 1 : -1;
    const bool there = from >= begin && from < end && (offset == 0 || from != token);
    E* const to = out + ((token - first_token) * kernel + i % kernel) * cols;
    for (int64_t c = threadIdx.x; c < cols; c += kThreads)
      to[c] = there ? x[(from - first_token) * cols + c] : from_float<E>(0.0f);
  }
}

}  // namespace

template <class Device, class T>
void neighbour_rows(Context<Device>& context, const T* x, const Sequences& sequences, const int32_t* columns,
                    int64_t kernel, int64_t cols, T* out) {
  const int64_t count = sequences.count * sequences.max_q * kernel;
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(count, int64_t{64} * context.sm_count));
  launch_kernel(context, "kernel neighbour_rows", neighbour_rows_kernel<native_t<T>>, blocks, kThreads, native(x),
                sequences.cu_q, sequences.first_q, columns, count, sequences.max_q, static_cast<int>(kernel), cols,
                native(out));
}

FTBERT_INSTANTIATE_CUDA(neighbour_rows, Cuda)

}  // namespace ftbert
