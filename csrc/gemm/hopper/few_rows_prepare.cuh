// Rows of a in Q8_1, where more of them are read than a block of few_rows lays out itself.
#pragma once
#include "device/launch.cuh"
#include "gemm/hopper/few_rows_storage.cuh"

namespace ftbert {
namespace {

constexpr int kPrepareThreads = 512, kMostPreparedColumns = kPrepareThreads * 8 * 4;

// A block a row -> int8 [m, k], and behind all of them float scales. It
// is told as work.prepared where they go.
template <class E>
__global__ void __launch_bounds__(kPrepareThreads) prepare_q8_kernel(const __grid_constant__ FewRows<E> work) {
  using Pack = Packed<E, 8>;
  constexpr int kPacks = 4;
  const int row = blockIdx.x;
  const E* const a = work.a + static_cast<int64_t>(row) * work.k;
  char* const to = const_cast<char*>(work.prepared);
  auto* const scales = reinterpret_cast<float*>(to + work.m * work.k) + row * Q8Tiles<E>::scale_stride(work.k);
  const auto column = [&](int i) { return (i * kPrepareThreads + static_cast<int>(threadIdx.x)) * 8; };
  wait_for_inputs();
  Pack packs[kPacks];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) packs[i] = column(i) < work.k ? Pack::load(a + column(i)) : Pack::zero();
  float mean = 0, scale = 1;
  const auto sum = [&](const auto& of) {
    float total = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float x[8];
      packs[i].to_floats(x);
#pragma unroll
      for (int j = 0; j < 8; ++j) total += column(i) < work.k ? of(x[j]) : 0;
    }
    return reduce<kPrepareThreads>(total, Sum()) / work.k;
  };
  if (work.norm == NormKind::layer) mean = sum([](float x) { return x; });
  if (work.norm != NormKind::none) scale = rsqrtf(sum([&](float x) { return (x - mean) * (x - mean); }) + work.eps);
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    float x[8];
    packs[i].to_floats(x);
    if (work.norm != NormKind::none && column(i) < work.k) {
      float gamma[8], beta[8] = {};
      Pack::load(work.gamma + column(i)).to_floats(gamma);
      if (work.beta) Pack::load(work.beta + column(i)).to_floats(beta);
      normalise(work, mean, scale, gamma, beta, x);
    }
    uint2 packed;
    const float block = Q8Tiles<E>::quantise(x, packed);
    if (column(i) >= work.k) continue;
    *reinterpret_cast<uint2*>(to + static_cast<int64_t>(row) * work.k + column(i)) = packed;
    if (column(i) % kQ8Block == 0) scales[column(i) / kQ8Block] = block;
  }
}

}  // namespace
}  // namespace ftbert
