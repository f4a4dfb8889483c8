// Late interaction without tensor cores: vectors of floats, whose bits TF32 would cut, of any width and on any GPU.
//
// A block has one document and one query. 32 of the query's vectors by 64 of the document's are 16 sums of each thread,
// made of 32 columns at a time; a thread keeps the largest of its four rows.
#pragma once
#include "kernels/max_sim/max_sim_mma.cuh"

namespace ftbert {
namespace {

constexpr int kMaxSimThreads = 128;

// Numbers to multiply: floats, and of int8 integers.
template <class E>
__device__ auto number(E x) {
  if constexpr (sizeof(E) == 1)
    return static_cast<int>(x);
  else
    return to_float(x);
}

// grid: groups of queries, one each, fastest, then documents. width: of a vector.
template <class E>
__global__ void __launch_bounds__(kMaxSimThreads) max_sim_simt(MaxSimCall call, int groups, int width) {
  using Of = Products<E>;
  using Sum = typename Of::Sum;
  constexpr int kRows = 32, kKeys = 64, kDepth = 32, kEach = 4, kAcross = kKeys / kEach;
  // Rows are one longer than 32 banks: those of a warp's reads then lie in different ones.
  __shared__ Sum q[kRows][kDepth + 1], d[kKeys][kDepth + 1];
  wait_for_inputs();
  const int document = call.document(groups);
  const int query = call.query_of != nullptr ? call.query_of[document] : static_cast<int>(blockIdx.x) % groups;
  const int first_vector = call.cu_queries[query], vectors = call.cu_queries[query + 1] - first_vector;
  const int first_key = call.cu_documents[document], keys = call.cu_documents[document + 1] - first_key;
  const E* const queries = reinterpret_cast<const E*>(call.queries) + int64_t{first_vector} * width;
  const E* const documents = reinterpret_cast<const E*>(call.documents) + int64_t{first_key} * width;
  const int column = static_cast<int>(threadIdx.x) % kAcross, row = static_cast<int>(threadIdx.x) / kAcross * kEach;

  float total = 0;
  for (int from = 0; from < vectors; from += kRows) {
    Sum most[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) most[i] = Of::kNone;
    for (int first = 0; first < keys; first += kKeys) {
      Sum sum[kEach][kEach] = {};
      for (int depth = 0; depth < width; depth += kDepth) {
        __syncthreads();
        const auto load = [&](auto& to, const E* of, int count, int valid) {
          for (int i = threadIdx.x; i < count * kDepth; i += kMaxSimThreads) {
            const int at = i / kDepth, deep = depth + i % kDepth;
            to[at][i % kDepth] = at < valid && deep < width ? number(of[int64_t{at} * width + deep]) : Sum{0};
          }
        };
        load(q, queries + int64_t{from} * width, kRows, vectors - from);
        load(d, documents + int64_t{first} * width, kKeys, keys - first);
        __syncthreads();
#pragma unroll 8
        for (int k = 0; k < kDepth; ++k) {
          Sum a[kEach], b[kEach];
#pragma unroll
          for (int i = 0; i < kEach; ++i) a[i] = q[row + i][k], b[i] = d[column + i * kAcross][k];
#pragma unroll
          for (int i = 0; i < kEach; ++i)
#pragma unroll
            for (int j = 0; j < kEach; ++j) sum[i][j] += a[i] * b[j];
        }
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        if (first + column + j * kAcross < keys)
#pragma unroll
          for (int i = 0; i < kEach; ++i) most[i] = Of::largest(most[i], sum[i][j]);
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
#pragma unroll
      for (int mask = 1; mask < kAcross; mask *= 2) most[i] = Of::largest(most[i], __shfl_xor_sync(~0u, most[i], mask));
      if (column == 0 && from + row + i < vectors) total += static_cast<float>(most[i]);
    }
  }
  // The rows of a block lie in its first threads of each 16.
  __shared__ float of_rows[kMaxSimThreads / kAcross];
  __syncthreads();
  if (column == 0) of_rows[threadIdx.x / kAcross] = total;
  __syncthreads();
  if (threadIdx.x > 0) return;
  total = 0;
#pragma unroll
  for (const float one : of_rows) total += one;
  call.put(query, document, vectors == 0 ? 0.0f : keys == 0 ? kScoreOfNothing : total);
}

}  // namespace
}  // namespace ftbert
