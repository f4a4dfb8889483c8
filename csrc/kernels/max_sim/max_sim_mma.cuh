// Late interaction on tensor cores: vectors of 16 or 8 bits, from sm_80 on.
//
// A block has one document and kQueries queries, and goes through tiles of 64 of the document's vectors, which come by
// cp.async in chunks of a row. A warp holds the products of 32 of a query's vectors in registers and keeps of each the
// largest so far, so that no product ever leaves them. With as many queries as warps each warp has one and reads all of
// a tile; with one query the warps share its 32 vectors and divide the tile. A longer query takes another pass over the
// document, which then comes from the L2 cache.
//
// Operands of 8 bits lie in registers as those of 16: mma.m16n8k32 takes bytes where m16n8k16 takes half as many pairs.
#pragma once
#include <cstdint>

#include "device/fragment.cuh"
#include "device/launch.cuh"
#include "device/mma.cuh"
#include "kernels/kernels.h"

namespace ftbert {
namespace {

// What the kernels get of a MaxSim. stride: bytes of a vector.
struct MaxSimCall {
  const char *queries, *documents;
  const int32_t *cu_queries, *cu_documents, *query_of;
  int query_count, document_count, stride;
  float* scores;

  // groups: of queries, which are neighbours in the grid: they read the same document.
  __device__ int document(int groups) const { return static_cast<int>(blockIdx.x) / groups; }
  __device__ void put(int query, int document, float score) const {
    scores[query_of != nullptr ? document : int64_t{query} * document_count + document] = score;
  }
};

// d [16, 8] += a [16, 32] @ b [32, 8]
__device__ inline void multiply_add_bytes(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
#ifdef FTBERT_BEFORE_AMPERE
  __trap();
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#endif
}

// Sums of products of elements E, and the largest of two.
template <class E>
struct Products {
  using Sum = float;
  static constexpr float kNone = -INFINITY;
  static __device__ void add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add<E>(d, a, b0, b1);
  }
  static __device__ float largest(float x, float y) { return max_or_nan(x, y); }
};
template <>
struct Products<int8_t> {
  using Sum = int;
  static constexpr int kNone = INT32_MIN;
  static __device__ void add(int (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    multiply_add_bytes(d, a, b0, b1);
  }
  static __device__ int largest(int x, int y) { return max(x, y); }
};

// kQueries: of a block, 1 or as many as it has warps. kUnits: of 16 bytes, in a chunk of a row.
template <class E_, int kQueries_, int kUnits_>
struct MaxSimShape {
  using E = E_;
  static constexpr int kQueries = kQueries_, kUnits = kUnits_;
  static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 32, kKeys = 64, kStages = 3;
  static constexpr int kColumns = 8 * kUnits;  // of 16 bits, as tiles in shared memory are counted
  static constexpr int kChunkBytes = kKeys * kUnits * 16, kQueryBytes = kQueries * kRows * kUnits * 16;
  static constexpr int kOfWarp = kQueries > 1 ? kKeys : kKeys / kWarps;  // vectors of a tile
  static constexpr int kMaximaBytes = kWarps * kRows * 4;
  static_assert(kQueries == 1 || kQueries == kWarps);
  static_assert(kThreads % kUnits == 0 && kOfWarp % 16 == 0);

  // chunks: of a row.
  static constexpr int bytes(int chunks) { return chunks * kQueryBytes + kStages * kChunkBytes + kMaximaBytes; }
};

// grid: groups of queries fastest, then documents. chunks: of a row, whose last may be short; a row is whole units.
template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads) max_sim_mma(MaxSimCall call, int groups, int chunks) {
#ifndef FTBERT_BEFORE_AMPERE
  using E = typename Shape::E;
  using Of = Products<E>;
  using Sum = typename Of::Sum;
  constexpr int kUnits = Shape::kUnits, kRows = Shape::kRows, kKeys = Shape::kKeys, kStages = Shape::kStages;
  constexpr int kColumns = Shape::kColumns, kOfWarp = Shape::kOfWarp;
  constexpr bool kOwn = Shape::kQueries > 1;  // each warp has a query
  extern __shared__ __align__(128) char shared_memory[];
  const uint32_t shared_q = shared_address(shared_memory), shared_d = shared_q + chunks * Shape::kQueryBytes;
  auto* const maxima =
      reinterpret_cast<Sum(*)[kRows]>(shared_memory + chunks * Shape::kQueryBytes + kStages * Shape::kChunkBytes);
  wait_for_inputs();

  const int document = call.document(groups), group = static_cast<int>(blockIdx.x) % groups;
  const int first_query = call.query_of != nullptr ? call.query_of[document] : group * Shape::kQueries;
  const int queries = kOwn ? min(Shape::kQueries, call.query_count - first_query) : 1;
  const int first_key = call.cu_documents[document], keys = call.cu_documents[document + 1] - first_key;
  const int tiles = (keys + kKeys - 1) / kKeys, steps = tiles * chunks;
  const int units = call.stride / 16;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int query = first_query + (kOwn ? warp : 0);
  const auto vectors_of = [&](int which) { return call.cu_queries[which + 1] - call.cu_queries[which]; };
  const int vectors = !kOwn || warp < queries ? vectors_of(query) : 0;
  int longest = vectors;
  if (kOwn)
    for (int q = 0; q < queries; ++q) longest = max(longest, vectors_of(first_query + q));

  // Rows [first, first + kCount) of `from`, `valid` of them there, of a chunk; zeros elsewhere and behind a row.
  const int unit = static_cast<int>(threadIdx.x) % kUnits, first_row = static_cast<int>(threadIdx.x) / kUnits;
  const auto load = [&](uint32_t to, const char* from, int chunk, int count, int valid) {
    const int at = chunk * kUnits + unit;
    const bool inside = at < units;
#pragma unroll 4
    for (int row = first_row; row < count; row += Shape::kThreads / kUnits) {
      const bool real = inside && row < valid;
      copy_async16(swizzled<kColumns>(to, row, unit), real ? from + int64_t{row} * call.stride + at * 16 : from, real);
    }
  };
  const char* const documents = call.documents + int64_t{first_key} * call.stride;
  const auto load_step = [&](int step) {
    if (step < steps) {
      const int tile = step / chunks, valid = min(kKeys, keys - tile * kKeys);
      load(shared_d + step % kStages * Shape::kChunkBytes, documents + int64_t{tile} * kKeys * call.stride,
           step % chunks, kKeys, valid);
    }
    copy_async_commit();
  };

  float total = 0;
  for (int from = 0; from < longest; from += kRows) {
    if (from > 0) __syncthreads();  // nobody reads the vectors before, nor the last tiles
    for (int q = 0; q < Shape::kQueries; ++q) {
      const int of = q < queries ? vectors_of(first_query + q) - from : 0;
      const int64_t row = q < queries && of > 0 ? call.cu_queries[first_query + q] + from : 0;
      for (int chunk = 0; chunk < chunks; ++chunk)
        load(shared_q + chunk * Shape::kQueryBytes + q * (kRows * kUnits * 16), call.queries + row * call.stride, chunk,
             kRows, of);
    }
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) load_step(step);

    Sum most[2][2];
#pragma unroll
    for (int i = 0; i < 2; ++i) most[i][0] = most[i][1] = Of::kNone;
    Sum sum[2][kOfWarp / 8][4];
    const int first_of_warp = kOwn ? 0 : warp * kOfWarp;
    const int row_of_warp = kOwn ? warp * kRows : 0;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      copy_async_wait<kStages - 2>();
      __syncthreads();
      load_step(step + kStages - 1);
      const int chunk = step % chunks, tile = step / chunks;
      const uint32_t q_at = shared_q + chunk * Shape::kQueryBytes;
      const uint32_t d_at = shared_d + step % kStages * Shape::kChunkBytes;
      if (chunk == 0)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < kOfWarp / 8; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[i][j][c] = 0;
      const int here = min(kUnits, units - chunk * kUnits);
      const int valid = keys - tile * kKeys - first_of_warp;  // of this warp's vectors
      if (valid > 0) {
#pragma unroll
        for (int d = 0; d < kUnits / 2; ++d) {
          if (2 * d >= here) break;
          uint32_t a[2][4];
#pragma unroll
          for (int i = 0; i < 2; ++i)
            load_matrices(a[i], swizzled<kColumns>(q_at, row_of_warp + i * 16 + lane % 16, 2 * d + lane / 16));
#pragma unroll
          for (int j = 0; j < kOfWarp / 16; ++j) {
            uint32_t b[4];
            load_matrices(
                b, swizzled<kColumns>(d_at, first_of_warp + j * 16 + lane / 16 * 8 + lane % 8, 2 * d + lane / 8 % 2));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              Of::add(sum[i][2 * j], a[i], b[0], b[1]);
              Of::add(sum[i][2 * j + 1], a[i], b[2], b[3]);
            }
          }
        }
      }
      if (chunk + 1 < chunks) continue;
#pragma unroll
      for (int j = 0; j < kOfWarp / 8; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          if (j * 8 + Fragment::column() + c % 2 < valid)
#pragma unroll
            for (int i = 0; i < 2; ++i) most[i][c / 2] = Of::largest(most[i][c / 2], sum[i][j][c]);
    }
    copy_async_wait<0>();  // also where there is no step

#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int mask = 1; mask < 4; mask *= 2)
          most[i][r] = Of::largest(most[i][r], __shfl_xor_sync(~0u, most[i][r], mask));
    if constexpr (!kOwn) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          if (lane % 4 == 0) maxima[warp][i * 16 + r * 8 + Fragment::row()] = most[i][r];
      __syncthreads();
      if (warp == 0) {
        Sum whole = maxima[0][lane];
#pragma unroll
        for (int w = 1; w < Shape::kWarps; ++w) whole = Of::largest(whole, maxima[w][lane]);
        total += from + lane < vectors ? static_cast<float>(whole) : 0.0f;
      }
    } else if (lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int r = 0; r < 2; ++r)
          total += from + i * 16 + r * 8 + Fragment::row() < vectors ? static_cast<float>(most[i][r]) : 0.0f;
    }
  }
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) total += __shfl_xor_sync(~0u, total, mask);
  if (lane == 0 && (kOwn ? warp < queries : warp == 0))
    call.put(query, document, vectors == 0 ? 0.0f : keys == 0 ? kScoreOfNothing : total);
#else
  __trap();
#endif
}

}  // namespace
}  // namespace ftbert
