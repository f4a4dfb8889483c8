// Rows moved as they are: restore_padding, gather_rows, last_rows_to_first.
#include <algorithm>
#include <type_traits>

#include "core/check.h"
#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kWarps = 8;  // of a block; a warp moves a row
constexpr int kInFlight = 4;

// Only sizes matter to a copy: half_t and bfloat16_t share one kernel.
template <class T>
using Raw = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

// Where an output row comes from, or what it is filled with.
constexpr int64_t kZeros = -1, kNaN = -2;
struct FromIndex {
  const int32_t* index;
  __device__ int64_t operator()(int64_t row) const { return index[row]; }
};
struct FromSequence {
  const int32_t* cu_seqlens;
  int64_t first_token;
  bool last;
  __device__ int64_t operator()(int64_t row) const {
    const int64_t begin = cu_seqlens[row], end = cu_seqlens[row + 1];
    return begin < end ? (last ? end - 1 : begin) - first_token : kZeros;
  }
};
struct FromToken {
  const int64_t* index;
  const int32_t *begin, *end;
  int64_t first_token;
  __device__ int64_t operator()(int64_t row) const {
    const int64_t token = index[row];
    return token >= *begin && token < *end ? token - first_token : kNaN;
  }
};

template <int W, class E, class Source>
__global__ void __launch_bounds__(32 * kWarps)
    copy_rows_kernel(const E* __restrict__ from, Source source, int64_t rows, int cols, E* __restrict__ to) {
  const int lane = threadIdx.x % 32;
  for (int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; row < rows; row += int64_t{gridDim.x} * kWarps) {
    const int64_t at = source(row);
    E* out = to + row * cols;
    if (at < 0) {
      Packed<E, W> fill = Packed<E, W>::zero();
      if (at == kNaN) memset(&fill, 0xff, sizeof(fill));
      for (int col = lane * W; col < cols; col += 32 * W) fill.store(out + col);
      continue;
    }
    const E* in = from + at * cols;
#pragma unroll 1
    for (int first = lane * W; first < cols; first += kInFlight * 32 * W) {
      Packed<E, W> pack[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int col = first + i * 32 * W;
        if (col < cols) pack[i] = Packed<E, W>::load(in + col);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int col = first + i * 32 * W;
        if (col < cols) pack[i].store(out + col);
      }
    }
  }
}

template <int W, class E>
__global__ void __launch_bounds__(32 * kWarps)
    last_rows_to_first_kernel(const int32_t* cu_seqlens, int64_t batch, int64_t first_token, int cols, int64_t stride,
                              E* x) {
  for (int64_t i = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32; i < batch; i += int64_t{gridDim.x} * kWarps) {
    const int64_t first = cu_seqlens[i], last = int64_t{cu_seqlens[i + 1]} - 1;
    if (first >= last) continue;
    const E* from = x + (last - first_token) * stride;
    E* to = x + (first - first_token) * stride;
#pragma unroll 1
    for (int col = threadIdx.x % 32 * W; col < cols; col += 32 * W) Packed<E, W>::load(from + col).store(to + col);
  }
}

template <class E>
__global__ void __launch_bounds__(32 * kWarps)
    zero_empty_rows_kernel(const int32_t* cu_seqlens, int64_t batch, int64_t cols, E* x) {
  for (int64_t row = blockIdx.x; row < batch; row += gridDim.x) {
    if (cu_seqlens[row] < cu_seqlens[row + 1]) continue;
    for (int64_t col = threadIdx.x; col < cols; col += 32 * kWarps) x[row * cols + col] = E(0);
  }
}

unsigned blocks_of(int64_t rows) {
  return static_cast<unsigned>(std::min<int64_t>((rows + kWarps - 1) / kWarps, 1 << 30));
}

template <class T, class Source>
void copy_rows(Context<Cuda>& context, const char* name, const T* from, Source source, int64_t rows, int64_t cols,
               T* to) {
  FTBERT_CHECK(cols < (1 << 30), "expected rows of at most 2^30 elements, got ", cols);
  using E = Raw<T>;
  with_width<kWidth<E>>(vectorizable(kWidth<E>, cols, from, static_cast<const T*>(to)), [&]<int W>() {
    launch_kernel(context, name, copy_rows_kernel<W, E, Source>, blocks_of(rows), 32 * kWarps,
                  reinterpret_cast<const E*>(from), source, rows, cols, reinterpret_cast<E*>(to));
  });
}

}  // namespace

template <class Device, class T>
void restore_padding(Context<Device>& context, const T* packed, const int32_t* to_packed, int64_t rows, int64_t cols,
                     T* padded) {
  if (rows == 0 || cols == 0) return;
  copy_rows(context, "kernel restore_padding", packed, FromIndex{to_packed}, rows, cols, padded);
}

template <class Device, class T>
void gather_rows(Context<Device>& context, const T* packed, const Sequences& sequences, const OutputRows& rows,
                 int64_t cols, T* out) {
  const int64_t count = rows.of(sequences), first = sequences.first_q;
  const int32_t* const cu = sequences.cu_q;
  if (count == 0 || cols == 0) return;
  if (rows.kind == RowKind::any)
    copy_rows(context, "kernel gather_rows", packed, FromToken{rows.index, cu, cu + sequences.count, first}, count,
              cols, out);
  else
    copy_rows(context, "kernel gather_rows", packed, FromSequence{cu, first, rows.kind == RowKind::last}, count, cols,
              out);
}

template <class Device, class T>
void last_rows_to_first(Context<Device>& context, const Sequences& sequences, DType, int64_t cols, int64_t stride,
                        void* x) {
  if (sequences.count == 0 || cols == 0) return;
  using E = Raw<T>;
  E* const elements = static_cast<E*>(x);
  with_width<kWidth<E>>(cols % kWidth<E> == 0 && vectorizable(kWidth<E>, stride, elements), [&]<int W>() {
    launch_kernel(context, "kernel last_rows_to_first", last_rows_to_first_kernel<W, E>, blocks_of(sequences.count),
                  32 * kWarps, sequences.cu_q, sequences.count, sequences.first_q, cols, stride, elements);
  });
}

template <class Device, class T>
void zero_empty_rows(Context<Device>& context, const int32_t* cu_seqlens, int64_t batch, int64_t cols, T* x) {
  if (batch == 0 || cols == 0) return;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(batch, 8 * context.sm_count));
  launch_kernel(context, "kernel zero_empty_rows", zero_empty_rows_kernel<Raw<T>>, blocks, 32 * kWarps, cu_seqlens,
                batch, cols, reinterpret_cast<Raw<T>*>(x));
}

FTBERT_INSTANTIATE_CUDA(restore_padding, Cuda)
FTBERT_INSTANTIATE_CUDA(gather_rows, Cuda)
FTBERT_INSTANTIATE_CUDA(last_rows_to_first, Cuda)
FTBERT_INSTANTIATE_CUDA(zero_empty_rows, Cuda)

}  // namespace ftbert
