// Products with a table of positions: the table behind a projection, which row a distance reads, and on the general
// path scores += q . keys[:, row] + k . queries[:, row].
#include <algorithm>

#include "core/dispatch.h"
#include "device/launch.cuh"
#include "device/vector.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

constexpr int kThreads = 128;
constexpr int kBuckets = 512;  // of a launch: they are arguments

struct Buckets {
  int32_t of[kBuckets];
};

template <class E>
__global__ void __launch_bounds__(kThreads)
    position_table_kernel(const E* __restrict__ x, int64_t x_stride, const E* __restrict__ bias, int64_t rows,
                          int64_t stride, int64_t count, E* __restrict__ out) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int64_t column = i / stride, row = i % stride;
    float value = 0;
    if (row < rows) value = to_float(x[(rows - 1 - row) * x_stride + column]) + (bias ? to_float(bias[column]) : 0.0f);
    out[i] = from_float<E>(value);
  }
}

// out: that of the first distance of these.
__global__ void __launch_bounds__(kThreads)
    position_rows_kernel(Buckets buckets, int count, int first, int span, int32_t* zero) {
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const int bucket = buckets.of[i];
    zero[first + i] = max(0, min(span - 1 + bucket, 2 * span - 1));
    zero[-(first + i)] = max(0, min(span - 1 - bucket, 2 * span - 1));
  }
}

// A block has a query of a head, each thread some of its keys.
template <class E>
__global__ void __launch_bounds__(kThreads)
    add_position_products_kernel(const E* __restrict__ q, const E* __restrict__ k, PositionProducts<E> positions,
                                 const int32_t* __restrict__ cu_seqlens, int64_t rows, int heads, int seq, int size,
                                 float* __restrict__ scores) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const int64_t matrix = row / seq, begin = cu_seqlens[matrix / heads];
    const int query = static_cast<int>(row % seq);
    const int length = min(static_cast<int>(cu_seqlens[matrix / heads + 1] - begin), seq);
    if (query >= length) continue;
    const int32_t* const columns = positions.columns ? positions.columns + begin : nullptr;
    const int64_t table = matrix % heads * size * positions.stride;
    const E* const from = q + row * size;
    for (int key = threadIdx.x; key < length; key += kThreads) {
      const int64_t distance = columns ? int64_t{columns[key]} - columns[query] : key - query;
      const int64_t at = table + positions.row_of(distance);
      const E* const of_key = k + (matrix * seq + key) * size;
      float sum = 0;
      for (int d = 0; d < size; ++d) {
        if (positions.keys) sum += to_float(from[d]) * to_float(positions.keys[at + d * positions.stride]);
        if (positions.queries) sum += to_float(of_key[d]) * to_float(positions.queries[at + d * positions.stride]);
      }
      scores[row * seq + key] += sum;
    }
  }
}

// Blocks of a launch over so many pieces of work.
unsigned blocks_for(const Context<Cuda>& context, int64_t pieces) {
  return static_cast<unsigned>(std::min<int64_t>(pieces, int64_t{64} * context.sm_count));
}

}  // namespace

template <class Device, class T>
void position_table(Context<Device>& context, const Heads& heads, const T* x, int64_t x_stride, const T* bias,
                    int64_t rows, int64_t stride, T* out) {
  const int64_t count = heads.width() * stride;
  launch_kernel(context, "kernel position_table", position_table_kernel<native_t<T>>,
                blocks_for(context, (count + kThreads - 1) / kThreads), kThreads, native(x), x_stride, native(bias),
                rows, stride, count, native(out));
}

template <>
void position_rows<Cuda>(Context<Cuda>& context, const int32_t* buckets, int64_t reach, int64_t span, int32_t* out) {
  for (int64_t first = 0; first <= reach; first += kBuckets) {
    const int64_t count = std::min<int64_t>(kBuckets, reach + 1 - first);
    Buckets some{};
    std::copy(buckets + first, buckets + first + count, some.of);
    launch_kernel(context, "kernel position_rows", position_rows_kernel, 1u, kThreads, some, static_cast<int>(count),
                  static_cast<int>(first), static_cast<int>(span), out + reach);
  }
}

template <class Device, class T>
void add_position_products(Context<Device>& context, const Heads& heads, const T* q, const T* k,
                           const Sequences& sequences, const PositionProducts<T>& positions, float* scores) {
  const int64_t seq = sequences.max_k, rows = sequences.count * heads.count * seq;
  if (rows == 0) return;
  PositionProducts<native_t<T>> on{native(positions.keys), native(positions.queries), positions.stride, positions.rows,
                                   positions.reach,        positions.exact,           positions.columns};
  launch_kernel(context, "kernel add_position_products", add_position_products_kernel<native_t<T>>,
                blocks_for(context, rows), kThreads, native(q), native(k), on, sequences.cu_q, rows,
                static_cast<int>(heads.count), static_cast<int>(seq), static_cast<int>(heads.size), scores);
}

FTBERT_INSTANTIATE_CUDA(position_table, Cuda)
FTBERT_INSTANTIATE_CUDA(add_position_products, Cuda)

}  // namespace ftbert
