// Products with tables of positions: a table behind a projection, which row a distance reads, and on the general path
// scores += q . keys + k . queries, of the rows of each distance.
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

// out [heads, stride, size], count numbers.
template <class E>
__global__ void __launch_bounds__(kThreads)
    position_table_kernel(const E* __restrict__ x, int64_t x_stride, const E* __restrict__ bias, int64_t rows,
                          PositionProducts<E> of, int64_t size, int64_t count, E* __restrict__ out) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < count; i += int64_t{gridDim.x} * kThreads) {
    const int64_t column = i / (of.stride * size) * size + i % size, distance = i / size % of.stride - of.stride / 2;
    const float added = bias ? to_float(bias[column]) : 0.0f;
    out[i] = from_float<E>(to_float(x[(rows - 1 - of.row_of(distance)) * x_stride + column]) + added);
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

template <int kAtOnce, class E>
__device__ float product(const E* x, const E* row, int size) {
  float sum = 0;
  for (int d = 0; d < size; d += kAtOnce) {
    float a[kAtOnce], b[kAtOnce];
    Packed<E, kAtOnce>::load(x + d).to_floats(a);
    Packed<E, kAtOnce>::load(row + d).to_floats(b);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += a[i] * b[i];
  }
  return sum;
}

// A block has a query of a head, each thread some of its keys. kAtOnce: numbers that are read together.
template <int kAtOnce, class E>
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
    const int64_t zero = (matrix % heads * positions.stride + positions.stride / 2) * size, reach = positions.reach;
    for (int key = threadIdx.x; key < length; key += kThreads) {
      const int64_t distance = columns ? int64_t{columns[key]} - columns[query] : key - query;
      const int64_t at = zero + max(-reach, min(distance, reach)) * size;
      float sum = 0;
      if (positions.keys) sum += product<kAtOnce>(q + row * size, positions.keys + at, size);
      if (positions.queries) sum += product<kAtOnce>(k + (matrix * seq + key) * size, positions.queries + at, size);
      scores[row * seq + key] += sum;
    }
  }
}

// Blocks of a launch over so many pieces of work.
unsigned blocks_for(const Context<Cuda>& context, int64_t pieces) {
  return static_cast<unsigned>(std::min<int64_t>(pieces, int64_t{64} * context.sm_count));
}

template <class T>
PositionProducts<native_t<T>> on_gpu(const PositionProducts<T>& of) {
  return {native(of.keys), native(of.queries), of.stride, of.rows, of.reach, of.exact, of.columns};
}

}  // namespace

template <class Device, class T>
void position_table(Context<Device>& context, const Heads& heads, const T* x, int64_t x_stride, const T* bias,
                    int64_t rows, const PositionProducts<T>& of, T* out) {
  const int64_t count = heads.width() * of.stride;
  launch_kernel(context, "kernel position_table", position_table_kernel<native_t<T>>,
                blocks_for(context, (count + kThreads - 1) / kThreads), kThreads, native(x), x_stride, native(bias),
                rows, on_gpu(of), heads.size, count, native(out));
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
  constexpr int kMost = 16 / sizeof(T);
  using E = native_t<T>;
  launch_kernel(context, "kernel add_position_products",
                heads.size % kMost == 0 ? add_position_products_kernel<kMost, E> : add_position_products_kernel<1, E>,
                blocks_for(context, rows), kThreads, native(q), native(k), on_gpu(positions), sequences.cu_q, rows,
                static_cast<int>(heads.count), static_cast<int>(seq), static_cast<int>(heads.size), scores);
}

FTBERT_INSTANTIATE_CUDA(position_table, Cuda)
FTBERT_INSTANTIATE_CUDA(add_position_products, Cuda)

}  // namespace ftbert
